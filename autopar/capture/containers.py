"""Containers: what forward leaves in the lists, dicts and dataclasses that it is given.

    labels = batch.pop("labels")
    batch["mask"] = batch["ids"] != pad

Export hands copies of them to forward. As a call begins, the caller's own are filled with what they
hold after it, where inputs alone say what that is.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar._torch.export_graph import traced_node
from autopar.capture.decisions import evaluated, slice_of
from autopar.capture.hooks import replaced
from autopar.capture.object_contents import PLAIN
from autopar.capture.source import of_stack
from autopar.errors import InvalidInput
from autopar.text.source_lines import describe

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
Path = tuple[Any, ...]  # of keys
_FILLED = (dict, OrderedDict, defaultdict, list)


@dataclass(frozen=True)
class Given:
    """What stands at a path of a call."""

    path: Path

    def __repr__(self) -> str:
        return shown(self.path)


@dataclass(frozen=True)
class Made:
    """A tensor that a graph makes of inputs and constants."""

    graph: fx.Graph
    inputs: Mapping[str, Any]  # placeholder -> number of the flat argument, or its own placeholder
    constants: dict[str, Tensor]  # placeholder -> value
    source: str | None

    def of(self, given: Mapping[str, Tensor]) -> Tensor:
        values = {name: given[placeholder] for name, placeholder in self.inputs.items()}
        made: Tensor = evaluated(self.graph, self.constants | values)
        return made


@dataclass(frozen=True)
class Content:
    """What a container holds after forward, by key or in turn: `Given`, `Made`, plain values, and
    containers of these."""

    path: Path
    items: Any  # a list, or a dict of keys or names

    @property
    def made(self) -> list[Made]:
        return [leaf for leaf in pytree.tree_leaves(self.items) if isinstance(leaf, Made)]


@contextmanager
def contents_seen(model: nn.Module, seen: list[Content]) -> Iterator[None]:
    """While forward is followed, what it makes of the containers that it is given is `seen`."""
    forward, is_running = model.forward, False

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_running
        if is_running:  # it calls itself
            return forward(*args, **kwargs)
        call, is_running = _Watched((args, kwargs), forward), True
        try:
            result = forward(*args, **kwargs)
        finally:
            is_running = False
        seen[:] = call.contents()
        return result

    with replaced(model, "forward", watched):
        yield


class _Watched:
    """The containers of a call, and what they hold before it."""

    def __init__(self, call: Call, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.count = len(pytree.tree_leaves(call))
        self.before = [(path, value, _held(value)) for path, value in _inside(call, ())]
        self.paths = {id(value): path for path, value, _ in self.before}

    def contents(self) -> list[Content]:
        found = []
        for path, value, before in self.before:
            held = _held(value)
            if held is None or before is None or _is_same(before, held):
                continue
            if type(value) not in _FILLED and not is_dataclass(value):
                self._refuse(path, f"items of type {type(value).__name__}, which it changes")
            found.append(Content(path, self._kept(held, path)))
        return found

    def _kept(self, value: Any, path: Path) -> Any:
        """What is to stand in a container, of what stands there now."""
        if type(value) in (*PLAIN, torch.Size):
            return value
        if id(value) in self.paths:
            return Given(self.paths[id(value)])
        if type(value) in (list, tuple):
            return type(value)(self._kept(one, path) for one in value)
        if type(value) is dict:
            return {key: self._kept(one, path) for key, one in value.items()}
        if not isinstance(value, Tensor):
            self._refuse(path, f"an item of type {type(value).__name__}")
        node, root = traced_node(value)
        source = of_stack(node.meta.get("stack_trace")) if node is not None else None
        sliced = None if node is None else slice_of(node, root, [True] * self.count)
        if sliced is None:
            self._refuse(path, "a tensor that follows from more than inputs", source)
        if value.requires_grad:
            self._refuse(path, "a tensor that takes a gradient", source)
        return Made(*sliced, source)

    def _refuse(self, path: Path, what: str, source: str | None = None) -> NoReturn:
        code = inspect.unwrap(self.forward).__code__
        raise InvalidInput(
            "what forward leaves in a container of its arguments are inputs, and what follows from "
            "them alone, without a gradient",
            got=f"{what}, in {shown(path)}",
            remedy="change a copy (batch = dict(batch)), and return what is wanted outside",
            source=source or describe(code.co_filename, code.co_firstlineno),
        )


def shown(path: Path) -> str:
    """args[0]['x']."""
    return ("args", "kwargs")[path[0].idx] + pytree.keystr(path[1:])


def _held(value: Any) -> Any:
    """What a container holds, by key or in turn; None of what cannot change."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name, None) for one in fields(value)}
    return None


def _inside(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """All that stands in the arguments of a call, by path."""
    if isinstance(value, list | tuple):
        inner: list[Any] = [(pytree.SequenceKey(at), one) for at, one in enumerate(value)]
    elif isinstance(value, dict):
        inner = [(pytree.MappingKey(key), one) for key, one in dict.items(value)]
    else:
        inner = [(pytree.GetAttrKey(name), one) for name, one in (_held(value) or {}).items()]
    for key, one in inner:
        if path:  # else it is the tuple, or the dict, of the arguments themselves
            yield (*path, key), one
        yield from _inside(one, (*path, key))


def _is_same(before: Any, now: Any) -> bool:
    """Whether a container holds the same objects in the same order."""
    if isinstance(now, dict):
        if [*before] != [*now]:
            return False
        before, now = [*before.values()], [*now.values()]
    return len(before) == len(now) and all(one is two for one, two in zip(before, now))


def by_placeholder(seen: Sequence[Content], inputs: Sequence[str | None]) -> tuple[Content, ...]:
    """Contents that are made of flat arguments, of placeholders."""

    def named(made: Made) -> Made:
        return replace(made, inputs={name: inputs[at] for name, at in made.inputs.items()})

    return tuple(replace(one, items=pytree.tree_map_only(Made, named, one.items)) for one in seen)


def filled(
    contents: Sequence[Content], call: Call, given: Mapping[str, Tensor]
) -> list[tuple[Any, Any]]:
    """The containers of a call, each with what it is to hold. `given`: tensors by placeholder."""

    def known(leaf: Any) -> Any:
        if isinstance(leaf, Given):
            return pytree.key_get(call, leaf.path)
        return leaf.of(given) if isinstance(leaf, Made) else leaf

    pairs = ((pytree.key_get(call, one.path), one.items) for one in contents)
    return [(container, pytree.tree_map(known, items)) for container, items in pairs]


def fill(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Let containers hold this from now on."""
    for container, items in pairs:
        if isinstance(container, list):
            container[:] = items
        elif isinstance(container, dict):
            container.clear()
            container.update(items)
        else:
            for name, value in items.items():
                object.__setattr__(container, name, value)


def in_own_containers(call: Call) -> Call:
    """The same arguments, in containers that forward may change."""
    own: Call = pytree.tree_map(lambda leaf: leaf, call)
    return own
