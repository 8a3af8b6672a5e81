"""Counters: what a module keeps in plain attributes from call to call, which a program cannot.

Export follows forward, and keeps the value that a number had then. One that is set to the same
value at every call (a length taken from the input) does no harm; one that a second call would
change again is told to the user. A tensor that follows from inputs or parameters, and that a second
call would read, is refused: its program would have none, or that of the example.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar._torch import traced_node
from autopar.capture.containers import Call, in_own_containers
from autopar.capture.fake import FakeTensorMode
from autopar.capture.randomness import may_be_random
from autopar.errors import InvalidInput
from autopar.lines import caller, frames_to_caller


@dataclass
class Change:
    """An attribute of a module that forward gave another number."""

    module: nn.Module
    name: str
    before: float
    after: float
    source: str | None


@dataclass
class Kept:
    """An attribute of a module that forward gave a tensor."""

    module: nn.Module
    name: str
    before: Any
    value: Any
    source: str | None


@dataclass
class Changes:
    """Of attributes, by module and name."""

    numbers: dict[tuple[int, str], Change] = field(default_factory=dict)
    tensors: dict[tuple[int, str], Kept] = field(default_factory=dict)
    buffers: dict[tuple[int, str], str | None] = field(default_factory=dict)  # the last lines


@contextmanager
def changes_seen(is_kept: Callable[[Any], bool]) -> Iterator[Changes]:
    """What becomes of plain numbers that modules hold, and which tensors they come to hold, while
    forward runs: of those that `is_kept` says."""
    seen = Changes()
    plain = nn.Module.__setattr__

    def notice(self: nn.Module, name: str, value: Any) -> None:
        before = self.__dict__.get(name, getattr(type(self), name, None))
        key = id(self), name
        if isinstance(before, int | float) and isinstance(value, int | float) and before != value:
            if key not in seen.numbers:
                seen.numbers[key] = Change(self, name, before, value, caller())
            elif value != seen.numbers[key].before:  # export puts back what was there
                seen.numbers[key].after = value
        parameters, buffers = (vars(self).get(kind, {}) for kind in ("_parameters", "_buffers"))
        if buffers.get(name) is not None:  # written to as forward ends (assigned.py)
            seen.buffers[key] = caller()
        elif name not in parameters and any(map(is_kept, _tensors(value))):
            first = seen.tensors.get(key)
            at = (before, caller()) if first is None else (first.before, first.source)
            seen.tensors[key] = Kept(self, name, at[0], value, at[1])
        plain(self, name, value)

    nn.Module.__setattr__ = notice  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        nn.Module.__setattr__ = plain  # type: ignore[method-assign]


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """The attributes of modules afterwards are those before."""
    before = [
        (module, {name: _own(value) for name, value in vars(module).items()})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def varies(count: int) -> Callable[[Tensor], bool]:
    """Whether a tensor that is traced follows from one of the last `count` placeholders, which are
    the inputs, from a parameter, or from random numbers."""

    def test(tensor: Tensor) -> bool:
        node, _ = traced_node(tensor)
        if node is None:
            return False
        placeholders = node.graph.find_nodes(op="placeholder")
        inputs = {*placeholders[len(placeholders) - count :]}
        met, waiting = {node}, [node]
        while waiting:
            one = waiting.pop()
            if one in inputs or _learns(one) or may_be_random(one):
                return True
            waiting.extend(set(one.all_input_nodes) - met)
            met.update(one.all_input_nodes)
        return False

    return test


def _learns(node: fx.Node) -> bool:
    """Whether it is a parameter that takes a gradient."""
    return node.op == "placeholder" and getattr(
        node.meta.get("tensor_meta"), "requires_grad", False
    )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class _Readers(TorchFunctionMode):
    """Notes which of some tensors are read."""

    def __init__(self, kept: Mapping[tuple[int, str], Kept], read: list[Kept]) -> None:
        super().__init__()
        self._of = {id(one): each for each in kept.values() for one in _tensors(each.value)}
        self._read = read

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if id(leaf) in self._of and not _is_getter(function):
                self._read.append(self._of[id(leaf)])
        return function(*args, **(kwargs or {}))


def _is_getter(function: Any) -> bool:
    """Whether only an attribute is asked, as a shape."""
    return getattr(function, "__name__", "") == "__get__"


def warn_of_counters(
    model: nn.Module,
    mode: FakeTensorMode,
    call: Call,
    seen: Changes,
) -> None:
    """Tell which of the numbers that were `seen` to change would change at every `call`, and refuse
    tensors that it would read."""
    with put_back(model):
        read = _read_later(model, mode, call, seen) if seen.tensors else None
    if read is not None:
        raise InvalidInput(
            "what a call keeps for the next one stands in a buffer",
            got=f"{_path(model, read)}, a tensor that forward assigns and the next call reads",
            remedy="register_buffer() it with its first value, and write to it in place "
            "(self.state.copy_(...)); or hand it over as an input",
            source=read.source,
        )
    if not seen.numbers:
        return
    with put_back(model):
        for change in seen.numbers.values():
            setattr(change.module, change.name, change.after)
        with (
            changes_seen(lambda _: False) as again,
            suppress(Exception),
            mode,
            torch.no_grad(),
        ):
            _run(model, call)
    for change in seen.numbers.values():
        setattr(change.module, change.name, change.before)
    for key in seen.numbers.keys() & again.numbers.keys():
        change = seen.numbers[key]
        warnings.warn(
            f"{_path(model, change)} is another number after every call ({change.source}): a "
            "program keeps the one of its capture; a buffer changes with the steps",
            stacklevel=frames_to_caller(),
        )


def _read_later(
    model: nn.Module,
    mode: FakeTensorMode,
    call: Call,
    seen: Changes,
) -> Kept | None:
    """What forward keeps and then reads, where it runs twice more, without values."""
    read: list[Kept] = []
    with suppress(Exception), mode, torch.no_grad():
        with changes_seen(lambda _: True) as first:
            _run(model, call)
        kept = {key: one for key, one in first.tensors.items() if key in seen.tensors}
        with _Readers(kept, read):
            _run(model, call)
    return read[0] if read else None


def _run(model: nn.Module, call: Call) -> None:
    args, kwargs = in_own_containers(call)
    model(*args, **kwargs)


def _own(value: Any) -> Any:
    """A plain list, dict or set with what is in it now."""
    return copy.copy(value) if type(value) in (list, dict, set) else value


def _path(model: nn.Module, change: Change | Kept) -> str:
    paths = {id(module): path for path, module in model.named_modules()}
    return ".".join(filter(None, (paths.get(id(change.module), ""), change.name)))
