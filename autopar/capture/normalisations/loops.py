"""Loops: a recurrence that is written as a loop over time is one operator, and so is its body.

So transformers writes the scans of state-space models, where there are no kernels for them:

    for t in range(length):
        state = a[:, :, t] * state + b[:, :, t]
        outputs.append(torch.matmul(state, c[:, t].unsqueeze(-1))[:, :, 0])
    torch.stack(outputs, dim=-1)

Calls that differ only in what they read are one call with a dim more, in front, for time; pieces of
one tensor are that tensor; and states are those of `linear_scan`. Loops without a recurrence, or
with other calls in it, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, Site, shape_of
from autopar.capture.normalisations.cleanup import drop_dead_code
from autopar.capture.normalisations.shapes import as_call
from autopar.strategies import OperatorCall
from autopar.strategies.kernels.recurrences import LINEAR_SCAN
from autopar.strategies.node_info import info

aten = torch.ops.aten
Nodes = tuple[fx.Node, ...]
# They do the same where there is a dim more in front; the arguments that number dims.
_DIMS: dict[object, tuple[str, ...]] = {
    aten.select.int: ("dim",),
    aten.slice.Tensor: ("dim",),
    aten.unsqueeze.default: ("dim",),
    aten.squeeze.dim: ("dim",),
    aten.transpose.int: ("dim0", "dim1"),
    aten.sum.dim_IntList: ("dim",),
    aten.to.dtype: (),
}
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


class _Other(Exception):
    """A loop is not what is looked for."""


def loops_are_scans(builder: GraphBuilder) -> None:
    """Of what is stacked at the end of a loop."""
    found = False
    for node in builder.calls(aten.stack.default):
        call = Site(builder, node)
        with builder.graph.inserting_before(node):
            loop = _Loop(call)
            try:
                new = loop.stacked()
            except _Other:
                new = None
        if new is not None:
            builder.substitute(node, new)
            found = True
            continue
        for made in reversed(loop.made):
            builder.graph.erase_node(made)
    if found:
        drop_dead_code(builder)


class _Loop:
    """Calls of so many steps, which are made again as calls of all steps."""

    def __init__(self, call: Site) -> None:
        self.call, self.length = call, len(call.inputs)
        self.made: list[fx.Node] = []
        self.known: dict[Nodes, fx.Node] = {}
        self.scans: list[tuple[fx.Node, fx.Node]] = []  # the last state, and all of them

    def stacked(self) -> fx.Node | None:
        """What stands for the stack; None where no state is carried."""
        rolled = self.whole(self.call.inputs)
        if not self.scans:
            return None
        order = list(range(1, len(self.call.shape)))
        order.insert(self.call.dim(self.call["dim"], len(self.call.shape)), 0)
        new = self.permuted(rolled, order)
        for state, scan in self.scans:
            self.read_later(state, scan)
        return new

    def read_later(self, state: fx.Node, scan: fx.Node) -> None:
        """Who reads the last state behind the loop, reads it of the operator."""
        readers = [user for user in state.users if user > self.call.node]
        if readers:
            last = self.make(aten.select.int, scan, 0, self.length - 1)
            for reader in readers:
                reader.replace_input_with(state, last)

    def make(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        self.made.append(self.call.make(target, *args, **kwargs))
        return self.made[-1]

    def rolled(self, nodes: Nodes) -> fx.Node:
        """The values of all steps along a first dim; of size 1 if all are one."""
        if nodes not in self.known:
            self.known[nodes] = self._rolled(nodes)
        return self.known[nodes]

    def _rolled(self, nodes: Nodes) -> fx.Node:
        first = nodes[0]
        if len(set(nodes)) == 1:
            return self.make(aten.unsqueeze.default, first, 0)
        _require(all(isinstance(n, fx.Node) and n.op == "call_function" for n in nodes))
        _require(len({(node.target, _place(node), _form(node)) for node in nodes}) == 1)
        _require(_place(first) == _place(self.call.node))
        found = self.pieces(nodes) or self.states(nodes) or self.alike(nodes)
        length, *shape = shape_of(found)
        _require((tuple(shape), info(found).val.dtype) == _form(first))
        _require(length in (1, self.length))
        return found

    def whole(self, nodes: Nodes, shape: Sequence[int] | None = None) -> fx.Node:
        """The same, of all steps, and broadcast to a shape."""
        wanted = [self.length, *(shape_of(nodes[0]) if shape is None else shape)]
        rolled = self.aligned(nodes, len(wanted) - 1)
        if [*shape_of(rolled)] == wanted:
            return rolled
        return self.make(aten.expand.default, rolled, wanted)

    def aligned(self, nodes: Nodes, count: int) -> fx.Node:
        """The same, as broadcasting sees values of so many dims."""
        rolled = self.rolled(nodes)
        for _ in range(count + 1 - len(shape_of(rolled))):
            rolled = self.make(aten.unsqueeze.default, rolled, 1)
        return rolled

    def permuted(self, x: fx.Node, order: list[int]) -> fx.Node:
        return x if order == sorted(order) else self.make(*as_call(x, order))

    def pieces(self, nodes: Nodes) -> fx.Node | None:
        """Selections of one tensor, one behind the other."""
        if nodes[0].target is not aten.select.int:
            return None
        given: Any = nodes[0].args
        x, dim, start = given
        if any(node.args != (x, dim, start + step) for step, node in enumerate(nodes)):
            return None
        if shape_of(x)[dim] != self.length:
            x = self.make(aten.slice.Tensor, x, dim, start, start + self.length)
        others = [other for other in range(len(shape_of(x))) if other != dim]
        return self.permuted(x, [dim, *others])

    def states(self, nodes: Nodes) -> fx.Node | None:
        """Each a factor times the one before, and a term."""
        later = [_splits(node) for node in nodes[1:]]
        steps = [
            next((split[1:] for split in ways if split[0] is before), None)
            for ways, before in zip(later, nodes)
        ]
        if None in steps:
            return None
        # Of the first step it is not told which of two factors is the state.
        place = [split[0] is nodes[0] for split in later[0]].index(True)
        first = _splits(nodes[0])
        _require(len(first) == len(later[0]))
        start, *rest = first[place]
        _require(isinstance(start, fx.Node))
        factors, terms = zip(rest, *steps)
        shape, dtype = _form(nodes[0])
        parts = [factors[0], terms[0]]
        if start.target in _ZEROS:
            start = None
        else:
            parts.append(start)
            _require(shape_of(start) == shape)
        _require(all(isinstance(part, fx.Node) for part in (*factors, *terms)))
        _require({info(part).val.dtype for part in parts} == {dtype})
        a, b = (self.whole(part, shape) for part in (factors, terms))
        scan = self.make(LINEAR_SCAN, a, b, start, 0)
        self.scans.append((nodes[-1], scan))
        return scan

    def alike(self, nodes: Nodes) -> fx.Node:
        """Calls of one operator with the same arguments, but for what they read."""
        target: Any = nodes[0].target
        kwargs = nodes[0].kwargs
        _require(all(node.kwargs == kwargs and not _reads(kwargs) for node in nodes))
        _require(len({len(node.args) for node in nodes}) == 1)
        columns = [*zip(*(node.args for node in nodes))]
        if target in _PRODUCTS:
            return self.product(*columns)
        if target is aten.linear.default:
            _require(all(len(set(column)) == 1 for column in columns[1:]))
            return self.make(target, self.rolled(columns[0]), *nodes[0].args[1:])
        if target in _DIMS:
            shifted = _DIMS[target]
            _require(not kwargs.keys() & {*shifted})
            others = [_same(column) for column in columns[1:]]
            named = list(OperatorCall(nodes[0]).arguments)[1:]
            moved = [_behind(o) if name in shifted else o for name, o in zip(named, others)]
            return self.make(target, self.rolled(columns[0]), *moved, **kwargs)
        tags = getattr(target, "tags", ())
        _require(torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)
        count = len(shape_of(nodes[0]))
        args = [
            self.aligned(column, count) if isinstance(column[0], fx.Node) else _same(column)
            for column in columns
        ]
        return self.make(target, *args, **kwargs)

    def product(self, left: Nodes, right: Nodes) -> fx.Node:
        """Of matrices."""
        counts = [len(shape_of(nodes[0])) for nodes in (left, right)]
        _require(min(counts) >= 2)
        a, b = (self.aligned(nodes, max(counts)) for nodes in (left, right))
        return self.make(aten.matmul.default, a, b)


def _require(holds: bool) -> None:
    if not holds:
        raise _Other


def _form(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
    value = info(node).val
    _require(isinstance(value, torch.Tensor))
    return tuple(value.shape), value.dtype


def _place(node: fx.Node) -> tuple[object, ...]:
    """What calls have in common that can be one."""
    return info(node).no_grad, info(node).checkpoint, info(node).policy


def _reads(value: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return bool(found)


def _same(column: Sequence[Any]) -> Any:
    """An argument that is the same in all steps, and reads nothing."""
    _require(not _reads(column[0]) and all(value == column[0] for value in column))
    return column[0]


def _behind(dims: Any) -> Any:
    """Dims, where there is one more in front."""
    _require(isinstance(dims, int) or bool(dims))
    return dims + (dims >= 0) if isinstance(dims, int) else [dim + (dim >= 0) for dim in dims]


def _splits(node: fx.Node) -> list[tuple[Any, Any, Any]]:
    """The ways to see a call as `factor * state + term`: state, factor, term."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return []
    found = []
    for product, term in (node.args, node.args[::-1]):
        if isinstance(product, fx.Node) and product.target is aten.mul.Tensor:
            found += [(s, f, term) for s, f in (product.args, product.args[::-1])]
    return found
