"""Each: a loop over the experts that are chosen, which is followed once, for all of them.

    mask = one_hot(chosen, experts).permute(2, 1, 0)             # chosen: [tokens, choices]
    for expert in (mask.sum((-1, -2)) > 0).nonzero():
        choice, token = torch.where(mask[expert[0]])
        rows = act(x[token] @ weight[expert[0]])
        y.index_add_(0, token, rows * gates[token, choice, None])

Every choice of every token is one row, of the one expert that it chose: products are those of rows
that choose their matrix, and what is added to a token is summed over its choices. So the loop says
nothing but what is of rows and experts, and leaves nothing else behind.
"""

from __future__ import annotations

import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils import _pytree as pytree

from autopar._torch.export_graph import traced_node
from autopar._torch.tensors import memory_of
from autopar.capture.attributes import is_equal
from autopar.capture.bytecode import starts_for_statement
from autopar.capture.decisions import is_written
from autopar.capture.fake import FakeTensor
from autopar.capture.grouped import CASTS, OPERATORS, PRODUCTS, is_of_elements
from autopar.capture.guards import VALUES
from autopar.capture.hooks import replaced
from autopar.capture.named import Named
from autopar.errors import InvalidInput
from autopar.strategies import OperatorCall
from autopar.strategies.kernels.experts.chosen_products import CHOSEN_PRODUCTS
from autopar.text.source_lines import caller

_aten = torch.ops.aten
_PLACES = (_aten.argmax, _aten.argmin, _aten.argsort)
_WITH_PLACES = (_aten.topk, _aten.sort, _aten.max, _aten.min)
_SAME_NUMBERS = (
    *(_aten.to, _aten._to_copy, _aten.clone, _aten.contiguous, _aten.detach, _aten.alias),
    *(_aten.view, _aten.reshape, _aten.flatten, _aten.permute, _aten.transpose, _aten.t),
    *(_aten.unsqueeze, _aten.squeeze, _aten.expand, _aten.slice, _aten.select),
)


@dataclass(eq=False)
class _Choices:
    """Which expert each token chose."""

    mask: fx.Node  # [experts, and the dims of `chosen` in an order]
    experts: int  # that may be chosen: the mask may tell of more
    order: tuple[int, ...]
    chosen: Tensor | None = None  # [tokens, choices], once its mask is read
    is_open: bool = True  # while the loop is followed
    read: set[int] = field(default_factory=set)  # the memory of what rows are made of
    written: set[int] = field(default_factory=set)  # and of what is added to

    @property
    def rows(self) -> Tensor:
        """The expert of each row."""
        assert self.chosen is not None
        return self.chosen.reshape(-1)

    @property
    def shape(self) -> torch.Size:
        assert self.chosen is not None
        return self.chosen.shape


class _Part:
    """What a loop makes. Only operators of its own are done with it."""

    choices: _Choices

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        _refuse(f"{getattr(function, '__name__', function)} behind a loop over experts")

    def __getattr__(self, name: str) -> Any:
        function = getattr(Tensor, name, None)
        if not callable(function):
            _refuse(f"{name} in a loop over experts")
        return lambda *args, **kwargs: self._done(function, self, *args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self._done(Tensor.__getitem__, self, index)

    def _done(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.choices.is_open:
            _refuse(f"{function.__name__} behind a loop over experts")
        return handle_torch_function(function, (self,), *args, **kwargs)

    def _refused(self, *_: Any) -> NoReturn:
        _refuse("what is asked in a loop over experts")

    __len__ = __iter__ = __bool__ = __int__ = __float__ = __index__ = _refused


@dataclass(frozen=True, eq=False)
class _Number(_Part):
    """The number of an expert, or a list with it."""

    choices: _Choices
    is_list: bool

    def __eq__(self, other: object) -> Any:
        if isinstance(other, int) and not 0 <= other < self.choices.experts:
            return False
        return _refuse("which expert it is, in a loop over experts")

    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class _Mask(_Part):
    """Who chose an expert."""

    choices: _Choices


@dataclass(frozen=True, eq=False)
class _Place(_Part):
    """The token of each row, or which of its choices it is: an index of a dim of `chosen`."""

    choices: _Choices
    dim: int


@dataclass(frozen=True, eq=False)
class _OfExpert(_Part):
    """What each expert has, stacked."""

    choices: _Choices
    stacked: Tensor


@dataclass(frozen=True, eq=False)
class _Rows(_Part):
    """A value of each row."""

    choices: _Choices
    value: Tensor


def _operation(name: str, is_right: bool) -> Callable[..., Any]:
    function = getattr(torch, name.replace("truediv", "true_divide"))

    def operate(self: _Part, *others: Any) -> Any:
        args = (*others, self) if is_right else (self, *others)
        return self._done(function, *args)

    return operate


for _name in OPERATORS:
    for _side in ("", "r"):
        setattr(_Part, f"__{_side}{_name}__", _operation(_name, bool(_side)))


class _Loop(TorchFunctionMode):
    """Around the body of a loop."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") == "__get__":  # a shape, a dtype
            return function(*args, **(kwargs or {}))
        return _called(function, args, kwargs or {})


@contextmanager
def loops_over_experts() -> Iterator[None]:
    """Within, a loop over the experts that are chosen is one over all."""
    left: list[str | None] = []
    running = weakref.WeakSet[Any]()
    plain_iter, plain_where = Tensor.__iter__, torch.where

    def over(choices: _Choices, frame: Any) -> Iterator[Any]:
        before, line, is_done = Named(frame, but=_is_made).now(), caller(), False
        try:
            with _Loop():
                yield _Number(choices, True)
            is_done = True
        finally:
            choices.is_open = False
            if not is_done:
                left.append(line)
        if choices.read & choices.written:
            _refuse("a tensor that is read and added to in a loop over experts")
        for name, seen in Named(frame, but=_is_made).now().items():
            if not is_equal(before.get(name, []), seen):
                _refuse(f"{name}, which a loop over experts changes")

    def iterate(self: Tensor) -> Any:
        choices = _found(self) if isinstance(self, FakeTensor) else None
        if choices is None:
            return plain_iter(self)
        frame = sys._getframe(1)
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR
        if is_generator or not starts_for_statement(frame):  # not all of the body is its own
            _refuse("the experts that are chosen, other than by a for statement of its own")
        loop = over(choices, frame)
        running.add(loop)
        return loop

    def where(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], _Mask):
            choices = args[0].choices
            return tuple(_Place(choices, dim) for dim in choices.order)
        return plain_where(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(Tensor, "__iter__", iterate))
        stack.enter_context(replaced(torch, "where", where))
        try:
            yield
        finally:
            for one in [*running]:
                one.close()
    if left:
        _refuse("a loop over experts that does not come to its end", left[0])


def _is_made(value: Any) -> bool:
    """Whether a value is of what a loop makes alone."""
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, _Part) for leaf in leaves)


def _found(hit: Tensor) -> _Choices | None:
    """Whose numbers those are that a tensor holds, if they are the experts that are chosen."""
    node, _ = traced_node(hit)
    steps: list[fx.Node] = []
    for names in (("nonzero",), ("gt", "greater", "ne"), ("sum",), ("permute",), ("one_hot",)):
        if node is None or getattr(node.target, "overloadpacket", None) not in [
            getattr(_aten, name) for name in names
        ]:
            return None
        steps.append(node)
        node = node.args[0]  # type: ignore[assignment]
    _, compared, summed, permuted, hot = steps
    shape, order = permuted.meta["val"].shape, tuple[int, ...](permuted.args[1])  # type: ignore[arg-type]
    added: Any = summed.args[1]
    dims = {dim % len(shape) for dim in added}
    last = len(order) - 1
    is_said = len(hot.args) > 1 and len(summed.args) == 2 and compared.args[1] == 0
    is_changed = any(map(is_written, steps))
    if (
        is_changed
        or not is_said
        or order[0] % len(order) != last
        or dims != {*range(1, len(shape))}
        or last != 2
    ):
        return None
    return _Choices(permuted, min(shape[0], _bound(hot.args[0]) or shape[0]), order[1:])


def _bound(numbers: Any) -> int | None:
    """What all numbers in a tensor are below, if its graph shows it."""
    target = getattr(numbers.target, "overloadpacket", numbers.target)
    if is_written(numbers):
        return None
    if target is operator.getitem and numbers.args[1] == 1:
        return _size(numbers.args[0], _WITH_PLACES)
    return _bound(numbers.args[0]) if target in _SAME_NUMBERS else _size(numbers, _PLACES)


def _size(found: fx.Node, among: Sequence[Any]) -> int | None:
    """Of the dim of which an operator tells places, if it is among some."""
    if getattr(found.target, "overloadpacket", None) not in among:
        return None
    dim, of = OperatorCall(found).get("dim"), found.args[0]
    return None if dim is None else int(of.meta["val"].shape[dim])  # type: ignore[union-attr]


def _called(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What is called in a loop, of all rows."""
    name = getattr(function, "__name__", str(function))
    parts = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, _Part)]
    if not parts or len({id(part.choices) for part in parts}) > 1:
        _refuse(f"{name} of nothing of an expert, in a loop over experts")
    choices = parts[0].choices
    match name, args:
        case "__getitem__", (_Number(is_list=True), 0):
            return _Number(choices, False)
        case "__getitem__", (Tensor() as of, _Number(is_list=False)):
            return _of_expert(choices, of)
        case "__getitem__", (Tensor() as of, _Place() | tuple() as index):
            return _of_rows(choices, of, index if isinstance(index, tuple) else (index,))
        case "__getitem__", (_Rows(value=value), (slice(start=None, stop=None, step=None), *_)):
            return _Rows(choices, value[args[1]])
        case "index_add_", (Tensor() as y, 0, _Place(dim=0), _Rows(value=value)):
            tokens, count = choices.shape
            if not kwargs and y.dtype == value.dtype and y.shape == (tokens, *value.shape[1:]):
                total = value.view(tokens, count, *value.shape[1:]).sum(1)
                choices.written.add(memory_of(y))
                return y.add_(total)
        case "unsqueeze", (_Rows(value=value), int() as dim) if dim == -1 or dim > 0:
            return _Rows(choices, value.unsqueeze(dim))
        case "chunk", (_Rows(value=value), *_) if value.ndim == 2:
            if [*args[2:], *kwargs.values()][-1:] in ([-1], [1]) and len(args) + len(kwargs) == 3:
                return tuple(_Rows(choices, one) for one in function(value, *args[1:], **kwargs))
        case _, (_OfExpert(stacked=stacked), *rest) if name in CASTS:
            return _OfExpert(choices, function(stacked, *rest, **kwargs))
        case _, (_Rows(value=value), _OfExpert(stacked=stacked)) if function in PRODUCTS:
            if value.ndim == 2 and stacked.ndim == 3 and not kwargs:
                is_linear = function is functional.linear
                matrices = stacked if is_linear else stacked.transpose(1, 2)
                return _Rows(choices, CHOSEN_PRODUCTS(value, matrices, choices.rows))
        case _ if name in CASTS or is_of_elements(name):
            leaves, spec = pytree.tree_flatten((args, kwargs))
            own, named = pytree.tree_unflatten([_element(one) for one in leaves], spec)
            return _Rows(choices, function(*own, **named))
    _refuse(f"{name} in a loop over experts")


def _of_expert(choices: _Choices, of: Tensor) -> _Part:
    """A tensor at the number of each expert."""
    choices.read.add(memory_of(of))
    if traced_node(of)[0] is choices.mask:
        if choices.chosen is None:
            inner = of.to(torch.uint8).argmax(0)
            choices.chosen = inner.permute([choices.order.index(dim) for dim in (0, 1)])
        return _Mask(choices)
    if len(of) < choices.experts or not of.is_floating_point():
        _refuse("what is no stack of an expert each, in a loop over experts")
    return _OfExpert(choices, of)


def _of_rows(choices: _Choices, of: Tensor, index: tuple[Any, ...]) -> _Rows:
    """A tensor at the token, and the choice, of each row."""
    choices.read.add(memory_of(of))
    tokens, count = choices.shape
    dims = [one.dim for one in index if isinstance(one, _Place)]
    if any(not isinstance(one, _Place) for one in index[: len(dims)]) or any(
        one is not None for one in index[len(dims) :]
    ):
        _refuse("an index besides the token and its choice, in a loop over experts")
    if dims == [0, 1] and of.shape[:2] == (tokens, count):
        value = of.flatten(0, 1)
    elif dims == [0] and len(of) == tokens:
        value = of.unsqueeze(1).expand(tokens, count, *of.shape[1:]).flatten(0, 1)
    else:
        _refuse("an index of other dims than those of tokens and choices, in a loop over experts")
    for _ in index[len(dims) :]:
        value = value.unsqueeze(1)
    return _Rows(choices, value)


def _element(one: Any) -> Any:
    """What an operator of elements reads of each row."""
    if isinstance(one, _Rows):
        return one.value
    if isinstance(one, _OfExpert) and one.stacked.ndim <= 2:
        return one.stacked[one.choices.rows].view(len(one.choices.rows), -1)
    if isinstance(one, _Part) or (isinstance(one, Tensor) and one.ndim):
        _refuse("an operator of elements of other than rows, in a loop over experts")
    return one


def _refuse(got: str, source: str | None = None) -> NoReturn:
    raise InvalidInput(
        VALUES,
        got=f"{got}, which follows from values",
        remedy="for a model of transformers, experts_implementation='grouped_mm' in from_config() "
        "or from_pretrained(); else ap.nn.MoE, or say in the loop what is of rows and their expert "
        "alone: x[token] @ weight[expert], operators of elements, y.index_add_(0, token, ...)",
        source=source or caller(),
    )
