"""Experts: rows sorted by expert, multiplied in groups, and put back are one operator.

So transformers writes them, in all its families:

    order = sort(chosen)                                 of [tokens * k]
    rows = grouped_mm(x[order // k], gate_up, ends)      + bias[chosen, sorted]
    rows = grouped_mm(inner(rows), down, ends)           + bias[chosen, sorted]
    y = (rows * weights[order])[order back].view(tokens, k, -1).sum(1)

`inner` are operators of elements, on one half of the columns and the other, or on those at even
and odd places. The bias of the second layer, which does not depend on the token, becomes a product
with the weights of all experts. Operators of rows between the second product and the weights (a
norm behind the experts) stand behind the mixture then, in which each choice of a token is a token
of its own. What is not of this form stays as it is.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import Site, rewrites, shape_of
from autopar.capture.listing import operator_name
from autopar.strategies import OperatorCall
from autopar.strategies.kernels.experts.expert_kernels import EXPERTS
from autopar.strategies.node_info import info
from autopar.strategies.results import is_result, maker, result_index

aten = torch.ops.aten
GROUPED = ("_grouped_mm", "transformers.grouped_mm_fallback")  # the names of the product
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)
_NORMS = ("layer_norm", "rms_norm")


class _Other(Exception):
    """A call is not what is looked for."""


@rewrites(aten.sum.dim_IntList)
def experts_are_one_operator(call: Site) -> fx.Node | None:
    """Of the sum over the choices of each token."""
    if call["keepdim"] or call.dims() != [1] or len(call.shapes[0]) != 3:
        return None
    try:
        found = _Found.at(call.node)
    except _Other:
        return None
    tokens, choices, hidden = call.shapes[0]
    if not found.after:
        weights = call.make(aten.reshape.default, found.weights, [tokens, choices])
        y = _mixture(call, found, found.x, weights, tokens, choices)
        return _cast(call, y, call.outputs[0].dtype)
    x = call.make(aten.unsqueeze.default, found.x, 1)
    x = call.make(aten.expand.default, x, [tokens, choices, hidden])
    x = call.make(aten.reshape.default, x, [tokens * choices, hidden])
    weights = call.make(aten.unsqueeze.default, found.weights, 1)
    alone = call.make(aten.ones_like.default, weights)
    moved = {found.product: _mixture(call, found, x, alone, tokens * choices, 1)}
    for node in found.after:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: moved.get(one, one))
        assert callable(node.target)
        moved[node] = call.make(node.target, *args, **kwargs)
    rows = _cast(call, call.make(aten.mul.Tensor, moved[node], weights), call.outputs[0].dtype)
    rows = call.make(aten.reshape.default, rows, [tokens, choices, hidden])
    return call.make(aten.sum.dim_IntList, rows, [1])


def _mixture(
    call: Site, found: _Found, x: fx.Node, weights: fx.Node, tokens: int, choices: int
) -> fx.Node:
    """Of these tokens, which choose so many experts each."""
    chosen = call.make(aten.reshape.default, found.chosen, [tokens, choices])
    down, gate = (layer.weight.node(call) for layer in (found.second, found.first))
    bias = None if found.first.bias is None else found.first.bias.node(call)
    about = found.inner, found.columns
    y = call.make(EXPERTS, x, chosen, weights, down, gate, None, bias, None, *about)
    if found.second.bias is not None:
        count = shape_of(down)[0]
        none = call.make(
            aten.zeros.default,
            [tokens, count],
            dtype=info(weights).val.dtype,
            device=info(weights).val.device,
        )
        of_all = call.make(aten.scatter_add.default, none, 1, chosen, weights)
        of_all = _cast(call, of_all, info(y).val.dtype)
        bias = found.second.bias.node(call)
        y = call.make(aten.add.Tensor, y, call.make(aten.matmul.default, of_all, bias))
    return y


@dataclass(frozen=True)
class _Matrices:
    """Parameters of all experts, [e o i] once they are transposed where they have to be."""

    value: fx.Node
    is_transposed: bool = False

    def node(self, call: Site) -> fx.Node:
        return call.make(aten.transpose.int, self.value, 1, 2) if self.is_transposed else self.value


@dataclass(frozen=True)
class _Layer:
    """One product in groups, with its bias."""

    rows: fx.Node
    weight: _Matrices
    bias: _Matrices | None
    ends: fx.Node
    sorted: fx.Node | None  # by which the bias is looked up

    @classmethod
    def at(cls, node: fx.Node) -> _Layer:
        bias = order = None
        if _is(node, aten.add.Tensor):
            node, looked_up = _args(node, aten.add.Tensor, 2)
            table, indices = _args(looked_up, aten.index.Tensor, 2)
            bias, (order,) = _Matrices(table), indices
        if operator_name(node.target) not in GROUPED:
            raise _Other
        weight: Any
        ends: Any
        rows, weight, ends = node.args[:3]
        _require(len(node.args) == 3 and not node.kwargs)
        if _is(weight, aten.transpose.int):
            weight, *dims = _args(weight, aten.transpose.int, 3)
            _require({dim % 3 for dim in dims} == {1, 2})
            return cls(_uncast(rows), _Matrices(weight), bias, ends, order)
        return cls(_uncast(rows), _Matrices(weight, True), bias, ends, order)


@dataclass(frozen=True)
class _Found:
    """The parts of one mixture."""

    x: fx.Node
    chosen: fx.Node
    weights: fx.Node
    first: _Layer
    second: _Layer
    inner: str
    columns: str
    product: fx.Node  # the second, with its bias
    after: tuple[fx.Node, ...]  # what stands between it and the weights, in order

    @classmethod
    def at(cls, node: fx.Node) -> _Found:
        """Back from the sum over the choices."""
        grouped = node.args[0]
        tokens, choices, hidden = shape_of(grouped)
        rows, _ = _args(grouped, aten.reshape.default, 2)
        rows, indices = _args(rows, aten.index.Tensor, 2)
        _require(shape_of(rows) == (tokens * choices, hidden) and len(indices) == 1)
        _, into, places = _args(indices[0], aten.index_put.default, 3)
        _require(len(into) == 1 and _counts(places, tokens * choices))
        (order,) = into
        one, other = _args(rows, aten.mul.Tensor, 2)
        one, other = (one, other) if _is(other, aten.unsqueeze.default) else (other, one)
        column, dim = _args(other, aten.unsqueeze.default, 2)
        weights, by = _args(column, aten.index.Tensor, 2)
        _require(dim in (-1, 1) and [*by] == [order])
        sort = _require_sort(order, 1)
        chosen, *rest = OperatorCall(sort).arguments.values()
        _require(shape_of(chosen) == (tokens * choices,) and rest[-1] is False)
        product, after = _product_before(_uncast(one))
        second, inner = _Layer.at(product), _Inner()
        text = inner.text(second.rows)
        _require(inner.layer is not None)
        first: Any = inner.layer
        x, by = _args(first.rows, aten.index.Tensor, 2)
        _require(len(by) == 1)
        _require(_args(by[0], aten.floor_divide.default, 2) == (order, choices))
        for layer in (first, second):
            _require_ends(layer.ends, sort, shape_of(layer.weight.value)[0])
            if layer.sorted is not None:
                _require_sort(layer.sorted, 0, sort)
        _require(len({info(v).val.dtype for v in (x, first.weight.value, product)}) == 1)
        _require(shape_of(x) == (tokens, hidden))
        return cls(x, chosen, weights, first, second, text, inner.columns(), product, tuple(after))


def _product_before(last: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The product whose rows a value has, after operators that treat each row alike."""
    after, products = dict[fx.Node, None](), set[fx.Node]()
    _visit_rows(last, shape_of(last)[0], after, products)
    _require(len(products) == 1)
    return products.pop(), list(after)


def _visit_rows(
    node: fx.Node, count: int, after: dict[fx.Node, None], products: set[fx.Node]
) -> None:
    """Add the products that `count` rows come from, and the operators `after` them in order."""
    with suppress(_Other):
        _Layer.at(node)
        products.add(node)
        return
    _require(_is_of_rows(node))
    for value in node.all_input_nodes:
        shape = shape_of(value)
        if len(shape) == 2 and shape[0] == count and value not in after:
            _visit_rows(value, count, after, products)
        _require(len(shape) < 2 or shape[0] in (1, count))
    after[node] = None


def _is_of_rows(node: fx.Node) -> bool:
    """Whether rows of a call's result are of its arguments' rows, each by the same formula."""
    if node.target in _REDUCTIONS:
        arguments = OperatorCall(node).arguments
        return bool(arguments["keepdim"]) and [*arguments["dim"]] in ([1], [-1])
    if operator_name(node.target) in _NORMS:
        return len(OperatorCall(node).arguments["normalized_shape"]) == 1
    is_atens = getattr(node.target, "namespace", None) == "aten"
    tags = node.target.tags if is_atens else ()  # type: ignore[union-attr]
    return node.target is aten.to.dtype or torch.Tag.pointwise in tags


@dataclass
class _Inner:
    """What stands between the two products, written as an expression."""

    product: fx.Node | None = None
    layer: _Layer | None = None
    texts: dict[fx.Node, str] = field(default_factory=dict)
    pieces: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the columns

    def text(self, node: object) -> str:
        """Of a value, or a number."""
        if not isinstance(node, fx.Node):
            _require(node is None or isinstance(node, bool | int | str) or _is_finite(node))
            return repr(node)
        if node not in self.texts:
            self.texts[node] = self._made(node)
        return self.texts[node]

    def _made(self, node: fx.Node) -> str:
        if _is(node, aten.slice.Tensor) and self._is_product(node.args[0]):
            _, dim, first, last, step = OperatorCall(node).arguments.values()
            _require(dim in (-1, 1))
            width = shape_of(node.args[0])[1]
            name = "gate" if first == 0 else "up"
            self.pieces[name] = (first, min(last, width), step)
            return name
        if self._is_product(node):
            self.pieces["gate"] = ()
            return "gate"
        _require(getattr(node.target, "namespace", None) == "aten")
        _require(torch.Tag.pointwise in node.target.tags)  # type: ignore[union-attr]
        words = [self.text(value) for value in node.args]
        words += [f"{name}={self.text(value)}" for name, value in node.kwargs.items()]
        return f"{operator_name(node.target)}({', '.join(words)})"

    def _is_product(self, node: object) -> bool:
        if node is not self.product and isinstance(node, fx.Node):
            with suppress(_Other):
                layer = _Layer.at(node)
                _require(self.layer is None)
                self.product, self.layer = node, layer
        return node is self.product

    def columns(self) -> str:
        """How the columns of two layers stand in one."""
        width = shape_of(self.product)[1]
        known = {
            "apart": {"gate": ()},
            "halves": {"gate": (0, width // 2, 1), "up": (width // 2, width, 1)},
            "interleaved": {"gate": (0, width, 2), "up": (1, width, 2)},
        }
        found = next((name for name, pieces in known.items() if pieces == self.pieces), None)
        _require(found is not None)
        return str(found)


def _is_finite(number: object) -> bool:
    """Others have no form as a number."""
    return isinstance(number, float) and math.isfinite(number)


def _cast(call: Site, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    is_cast = info(value).val.dtype == dtype
    return value if is_cast else call.make(aten.to.dtype, value, dtype)


def _is(node: object, target: object) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _args(node: object, target: object, count: int) -> tuple[Any, ...]:
    """The first arguments of a call, which has no others that say something."""
    if not _is(node, target):
        raise _Other
    call = OperatorCall(node)  # type: ignore[arg-type]
    given = list(call.arguments.items())
    _require(all(_says_nothing(name, value) for name, value in given[count:]))
    return tuple(value for _, value in given[:count])


def _says_nothing(name: str, value: object) -> bool:
    return value is None or value is False or (name == "alpha" and value == 1)


def _require(holds: bool) -> None:
    if not holds:
        raise _Other


def _uncast(node: Any) -> fx.Node:
    """What a cast to the dtype that it has is of."""
    is_cast = _is(node, aten.to.dtype) and info(node).val.dtype == info(node.args[0]).val.dtype
    return node.args[0] if is_cast else node


def _require_sort(node: object, place: int, sort: fx.Node | None = None) -> fx.Node:
    """The call of which a value is one of the two results."""
    _require(is_result(node) and result_index(node) == place)  # type: ignore[arg-type]
    made = maker(node)  # type: ignore[arg-type]
    _require(operator_name(made.target) == "sort" and (sort is None or made is sort))
    return made


def _require_ends(ends: fx.Node, sort: fx.Node, count: int) -> None:
    """That these are the ends of the rows of each of `count` experts."""
    arguments = OperatorCall(ends).arguments
    _require(operator_name(ends.target) == "cumsum" and arguments["dim"] in (0, -1))
    sizes, bins, least, most = _args(arguments["self"], aten.histc.default, 4)
    _require((bins, least, most) == (count, 0, count - 1))
    if _is(sizes, aten.to.dtype):
        sizes = sizes.args[0]
    _require_sort(sizes, 0, sort)


def _counts(node: object, count: int) -> bool:
    """Whether a value is 0, 1, 2, ... count - 1."""
    if not isinstance(node, fx.Node) or operator_name(node.target) != "arange":
        return False
    arguments = OperatorCall(node).arguments
    ends = arguments.get("start", 0), arguments["end"], arguments.get("step", 1)
    return ends == (0, count, 1)
