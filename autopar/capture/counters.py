"""Counters: what a module keeps from call to call in plain attributes, which a program cannot.

Export follows forward, and keeps the value that a number had then. One that is set to the same
value at every call (a length taken from the input) does no harm; one that a second call would
change again is told to the user, and one by which a second call goes another way. A tensor that
varies, and that a second call would read, is refused: its program would have none, or that of the
example. Modules keep such things in attributes, and in what stands there (`module_state.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar._torch import memory_of, traced_node
from autopar.capture.attributes import PLAIN
from autopar.capture.containers import Call, in_own_containers
from autopar.capture.decisions import followed, written
from autopar.capture.fake import FakeTensorMode
from autopar.capture.graph_builder import is_mutable
from autopar.capture.hooks import replaced
from autopar.capture.module_state import ModuleState, is_known
from autopar.capture.randomness import may_be_random
from autopar.capture.templates import AGAIN
from autopar.errors import InvalidInput
from autopar.lines import caller, frames_to_caller

_OF_FORM = {"shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "itemsize"}


@dataclass
class Changes:
    """Of what modules keep, while forward is followed."""

    paths: list[str] = field(default_factory=list)
    varying: list[str] = field(default_factory=list)  # those that are tensors which vary
    numbers: list[str] = field(default_factory=list)
    lines: dict[tuple[int, str], str | None] = field(default_factory=dict)  # that set attributes


@contextmanager
def changes_seen(model: nn.Module) -> Iterator[Changes]:
    """What forward of `model` changes within; other modules keep what they kept."""
    seen, own = Changes(), {id(module) for module in model.modules()}
    others: dict[int, ModuleState] = {}
    plain = nn.Module.__setattr__

    def notice(self: nn.Module, name: str, value: Any) -> None:
        if id(self) not in own:
            if not is_known(self):
                others.setdefault(id(self), ModuleState(self))
        elif type(value) in PLAIN or pytree.tree_any_only(Tensor, lambda _: True, value):
            seen.lines[id(self), name] = caller()
        plain(self, name, value)

    with replaced(nn.Module, "__setattr__", notice):
        try:
            yield seen
        finally:
            for before in others.values():
                before.put_back()


@contextmanager
def compared(model: nn.Module, seen: Changes, varies: Callable[[Tensor], bool]) -> Iterator[None]:
    """Around forward, where it is followed: what it changes is `seen`."""
    before = ModuleState(model)
    yield
    after = ModuleState(model)
    seen.paths = before.changed(after)
    seen.numbers = _numbers(seen.paths, after)
    changed = ((path, after.values[path]) for path in seen.paths)
    seen.varying = [path for path, one in changed if isinstance(one, Tensor) and varies(one)]


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """What modules keep afterwards is what they kept before."""
    before = ModuleState(model)
    dicts = [vars(one)[kind] for one in model.modules() for kind in ("_parameters", "_buffers")]
    held = [dict(one) for one in dicts]
    try:
        yield
    finally:
        before.put_back()
        for one, tensors in zip(dicts, held, strict=True):
            one.clear()
            one.update(tensors)


def varies(count: int) -> Callable[[Tensor], bool]:
    """Whether a tensor that is traced follows from one of the last `count` placeholders, which are
    the inputs, from a parameter, a buffer that is written to, or from random numbers."""

    def test(tensor: Tensor) -> bool:
        node, _ = traced_node(tensor)
        if node is None:
            return False
        placeholders = node.graph.find_nodes(op="placeholder")
        changing = {*placeholders[len(placeholders) - count :]}
        for one in node.graph.nodes:
            if is_mutable(one.target):
                changing.update(written(one))
        of = followed(node)
        return any(
            (one.op == "placeholder" and one in changing)
            or _learns(one)
            or one.target is AGAIN
            or may_be_random(one)
            for one in of
        )

    return test


def _learns(node: fx.Node) -> bool:
    """Whether it is a parameter that takes a gradient."""
    return node.op == "placeholder" and getattr(
        node.meta.get("tensor_meta"), "requires_grad", False
    )


class _Calls(TorchFunctionMode):
    """What is called, with which plain values, and where of some tensors more than the form is
    read."""

    def __init__(self, kept: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.made: list[tuple[Any, ...]] = []
        self.read: list[str] = []
        self._kept = {memory_of(one): path for path, one in kept.items()}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _asks_of_form(function):
            return function(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        self.made.append((function, *(leaf for leaf in leaves if type(leaf) in PLAIN)))
        if self._kept:
            memories = (memory_of(leaf) for leaf in leaves if isinstance(leaf, Tensor))
            self.read += [self._kept[one] for one in memories if one in self._kept]
        return function(*args, **(kwargs or {}))


def _asks_of_form(function: Any) -> bool:
    """Whether only an attribute is asked, as a shape."""
    return getattr(getattr(function, "__self__", None), "__name__", "") in _OF_FORM


def warn_of_counters(
    model: nn.Module,
    mode: FakeTensorMode,
    call: Call,
    seen: Changes,
) -> None:
    """Tell which of the numbers that were `seen` to change would change at every `call`, and refuse
    tensors that it would read: forward runs twice more, without values."""
    states, calls = [ModuleState(model)], list[_Calls]()
    with put_back(model), suppress(Exception), mode, torch.no_grad():
        own = {memory_of(one) for one in (*model.parameters(), *model.buffers())}
        for kept in (lambda: dict[str, Tensor](), lambda: _new_tensors(*states)):
            others = {path: one for path, one in kept().items() if memory_of(one) not in own}
            args, kwargs = in_own_containers(pytree.tree_map_only(Tensor, torch.clone, call))
            calls.append(_Calls(others))
            with calls[-1]:
                model(*args, **kwargs)
            states.append(ModuleState(model))
    if len(states) < 3:  # values are asked for, which nobody has here
        told = [path for path in seen.paths if path in seen.varying or path in seen.numbers]
        _tell(model, told, "kept by forward, which asks for values", seen)
        return
    read = [path for path in calls[1].read if _root(path) in map(_root, seen.varying)]
    if read:
        raise InvalidInput(
            "what a call keeps for the next one stands in a buffer",
            got=f"{read[0]}, a tensor that forward keeps and the next call reads",
            remedy="register_buffer() it with its first value, and write to it in place "
            "(self.state.copy_(...)); or hand it over as an input",
            source=_line(model, read[0], seen),
        )
    before, once, twice = states
    changed, again = before.changed(once), {*once.changed(twice)}
    new = _new_tensors(before, once)
    how = "another number after every call"
    told = [path for path in _numbers(changed, once) if path in again]
    if not told and not new and calls[0].made != calls[1].made:
        how = "another one after the first call, which the next one reads"
        told = [path for path in changed if path.rpartition(".")[0] not in changed]
    _tell(model, told, how, seen)


def _tell(model: nn.Module, paths: Sequence[str], how: str, seen: Changes) -> None:
    for path in paths:
        line = _line(model, path, seen)
        warnings.warn(
            f"{path} is {how}{f' ({line})' if line else ''}: a program keeps the one of its "
            "capture; a buffer changes with the steps",
            stacklevel=frames_to_caller(),
        )


def _numbers(paths: Sequence[str], state: ModuleState) -> list[str]:
    return [path for path in paths if isinstance(state.values[path], int | float)]


def _new_tensors(before: ModuleState, after: ModuleState) -> dict[str, Tensor]:
    changed = {*before.changed(after)}
    return {path: tensor for path, tensor in after.tensors.items() if path in changed}


def _root(path: str) -> str:
    """The attribute, of what stands in it."""
    return path.partition("[")[0]


def _line(model: nn.Module, path: str, seen: Changes) -> str | None:
    """That set it, as far as it stands in an attribute of a module."""
    owner, _, name = _root(path).rpartition(".")
    modules = {where: id(module) for where, module in model.named_modules()}
    return seen.lines.get((modules.get(owner, 0), name))
