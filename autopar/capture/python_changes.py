"""Python changes: what forward changes in Python becomes an effect, is refused, or warned of.

Forward is followed once, and a program runs many times. What it has changed is compared with what
stood there before:

| what has changed | then |
|---|---|
| an attribute of a module that forward sets before it reads it | it is set after each call |
| another place, or a list, that the next call sets, or lets grow, alike | so after each call |
| a tensor that the next call reads | refused: it belongs in a buffer |
| a number, a flag or a list by which the next call computes something else | refused |
| a value that is another one after each call, and is not computed with | warned of once |
| a tensor that the first call alone keeps, or that stands in an object | warned of once |
| modules, parameters and hooks of modules | refused |

Where the first line does not hold, forward runs twice more, without values, to tell.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar._torch.export_graph import traced_node
from autopar._torch.modules import MODULE_CALL
from autopar._torch.tensors import memory_of
from autopar.base.user_code import is_from_user, is_users_frame
from autopar.capture.bytecode import raised_by_user
from autopar.capture.containers import Call, in_own_containers
from autopar.capture.decisions import followed, written
from autopar.capture.effects import KEPT, Effect, Holds, effect_of
from autopar.capture.fake import FakeTensorMode
from autopar.capture.graph_builder import is_mutable
from autopar.capture.grown_lists import reads_noted
from autopar.capture.holders import (
    TENSORS,
    Change,
    Holder,
    Parts,
    Path,
    Place,
    has_tensors,
    tensors_in,
)
from autopar.capture.hooks import replaced
from autopar.capture.likeness import is_alike
from autopar.capture.lines_of_changes import LinesOfChanges
from autopar.capture.object_contents import PLAIN
from autopar.capture.operator_record import OperatorRecord
from autopar.capture.python_state import PythonState, is_switch
from autopar.capture.randomness import may_be_random
from autopar.capture.templates import AGAIN
from autopar.errors import InvalidInput
from autopar.text.source_lines import caller, frames_to_caller
from autopar.text.units import counted

_ALL = "__dict__"  # by which all attributes are read
MOST_WATCHED = 8  # places whose lines are looked for
ALIKE = (
    "a program computes the same at every call, whatever the calls before have changed in Python"
)
BUFFER = (
    "register_buffer() it with its first value, and write to it in place (self.state.copy_(...), "
    "self.count += 1); or hand it over as an input"
)


@dataclass
class Noted:
    """What forward does, while it is followed."""

    effects: list[Effect] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  # that the program gives beside its outputs
    # That the next call may depend on, or change otherwise.
    doubtful: dict[Place, Change] = field(default_factory=dict)
    hidden: dict[Place, str] = field(default_factory=dict)  # tensors in an object of that class
    varying: set[Place] = field(default_factory=set)
    # Of modules, by identity, and their attributes: the lines that set them, which are read before
    # that, and which export and autopar have set.
    lines: dict[tuple[int, str], str | None] = field(default_factory=dict)
    read: set[tuple[int, str]] = field(default_factory=set)
    by_tracing: set[tuple[int, str]] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)  # buffers that forward does not write to

    def gather(self, state: PythonState, varies: Callable[[Tensor], bool]) -> None:
        """Note what has changed since `state`."""
        for change in state.changes():
            attribute = id(change.holder.value), change.key
            if attribute in self.by_tracing or self._stays(change, varies):
                continue
            line = self.lines.get(attribute)
            is_varying = any(map(varies, tensors_in(change.value)))
            self.varying |= {change.place} if is_varying else set()
            if line is None or not self.read.isdisjoint((attribute, (attribute[0], _ALL))):
                self.doubtful[change.place] = change
            try:
                self.effects.append(effect_of(change, state, self.tensors, line))
            except Holds as holds:
                self.hidden[change.place] = str(holds)
                self.doubtful[change.place] = change
        self.effects += self._set_as_before(state)

    def _set_as_before(self, state: PythonState) -> Iterator[Effect]:
        """Yield the attributes that forward sets, unread, to the plain values that they had: a call
        of another size may have left others there."""
        places = {change.place for change in state.changes()}
        for attribute, line in self.lines.items():
            if attribute in self.by_tracing or attribute in self.read:
                continue
            identity, name = attribute
            holder = state.module(identity)
            if holder is None or (identity, _ALL) in self.read or name not in holder.held:
                continue
            value = holder.held[name]
            change = Change(holder, name, value, value)
            if change.place not in places and type(value) in PLAIN:
                yield effect_of(change, state, self.tensors, line)

    def _stays(self, change: Change, varies: Callable[[Tensor], bool]) -> bool:
        """Return whether a change is made once for all; refuse it where it changes a module."""
        holder, value = change.holder, change.value
        if not isinstance(holder, Parts):
            return is_switch(change) and not isinstance(value, bool)
        is_buffer = isinstance(value, Tensor) and holder.kind == TENSORS[1]
        if is_buffer and not varies(value):  # a table
            return True
        raise InvalidInput(
            "parameters, buffers, submodules and hooks of a model are those that it has before it "
            "runs",
            got=f"{change.name}, which forward replaces or adds",
            remedy=BUFFER if is_buffer else "make it in __init__(), or keep it in an attribute",
            source=self.lines.get((id(holder.owner), change.key)),
        )


@contextmanager
def changes_noted(
    model: nn.Module, noted: Noted, varies: Callable[[Tensor], bool]
) -> Iterator[None]:
    """Within, what a call of `model`, which is followed, changes is noted, and stands in the graph;
    and everything holds again what it held."""
    call, is_running = getattr(model, MODULE_CALL), False

    @wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_running
        if is_running:  # it calls itself
            return call(*args, **kwargs)
        state, is_running = PythonState(model), True
        try:
            with _attributes_watched(noted):
                result = call(*args, **kwargs)
            noted.gather(state, varies)
            if noted.doubtful:
                noted.tables = {k for k, value in model.named_buffers() if not varies(value)}
        finally:
            is_running = False
            state.put_back()
        if noted.tensors:
            KEPT(noted.tensors)
        return result

    with replaced(model, MODULE_CALL, run):
        yield


@contextmanager
def _attributes_watched(noted: Noted) -> Iterator[None]:
    """Note which attributes of modules are set, where, and which are read before that."""
    plain_get, plain_set = nn.Module.__getattribute__, nn.Module.__setattr__

    def get(self: nn.Module, name: str) -> Any:
        is_of_torch = name == _ALL and not is_users_frame(sys._getframe(1))
        if (id(self), name) not in noted.lines and not is_of_torch:
            noted.read.add((id(self), name))
        return plain_get(self, name)

    def put(self: nn.Module, name: str, value: Any) -> None:
        attribute, is_own = (id(self), name), not is_from_user(sys._getframe(1))
        noted.lines[attribute] = caller()
        noted.by_tracing.add(attribute) if is_own else noted.by_tracing.discard(attribute)
        plain_set(self, name, value)

    with replaced(nn.Module, "__getattribute__", get), replaced(nn.Module, "__setattr__", put):
        yield


CARRIED, GROWS, CACHE = "carried out", "a list that grows", "the same once it is made"
ASSUMED = (
    "taken to change at every call as in the first: forward asks for values, so that a second call "
    "is not followed"
)
UNKNOWN = "kept by forward, which asks for values: a program keeps the one of its capture"
ANOTHER = (
    "another {} after every call: a program keeps the one of its capture; a buffer changes with "
    "the steps"
)
READ = (
    "a list that grows and that forward reads: a program goes the way of its capture, whatever "
    "the list holds; a buffer changes with the steps"
)
FIRST = "kept by the first call alone: a program keeps none"
HIDDEN = "not kept by a program: it is in an object of class {}; lists and dicts of tensors are"


def settled(noted: Noted, model: nn.Module, mode: FakeTensorMode, call: Call) -> list[Effect]:
    """Return the effects of each call; refuse, or warn of, what is none. Forward runs twice more,
    without values, where that is not known."""
    if not noted.doubtful:
        return noted.effects
    calls = _TwoCalls(model, noted)
    try:
        with mode, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the call that was followed has shown
            calls.run(call)
    except Exception as error:  # it may ask for values, which are not there
        if (line := raised_by_user(error)) is not None:
            raise InvalidInput(
                ALIKE,
                got=f"{type(error).__name__} in the second call of forward: {error}",
                remedy="let forward raise nothing by what an earlier call has left",
                source=line,
            ) from error
    calls.require_independent()
    fates = {place: calls.fate(change) for place, change in noted.doubtful.items()}
    told = defaultdict[str, list[tuple[str, str | None]]](list)
    for place, fate in fates.items():
        told[fate].append(calls.described(place))
        if calls.list_of(noted.doubtful[place]) in calls.lists_read:
            told[READ].append(calls.described(place))
    told[ANOTHER.format("value")] += calls.later_changes()
    for fate, places in told.items():
        if fate not in (CARRIED, GROWS, CACHE):
            _warn(places, fate)
    stay = {place for place, fate in fates.items() if fate in (CARRIED, GROWS, ASSUMED)}
    return [
        replace(one, kind="grown") if fates.get(one.place) == GROWS else one
        for one in noted.effects
        if one.place in stay or one.place not in fates
    ]


class _TwoCalls:
    """Two calls of forward, one after the other, and what each has changed."""

    def __init__(self, model: nn.Module, noted: Noted) -> None:
        self.model, self.noted = model, noted
        self.lines = {
            place: noted.lines.get((id(one.holder.value), one.key))
            for place, one in noted.doubtful.items()
        }
        self.changes: list[dict[Place, Change]] = []
        self.made: list[list[Any]] = []  # what each computes
        self.read: list[Place] = []  # by the second, of what the first keeps
        self.lists_read = set[Path | int]()  # by the second, of those that the first lets grow

    def run(self, call: Call) -> None:
        switches = [one for one in self.noted.doubtful.values() if is_switch(one)]
        buffers = (b for k, b in self.model.named_buffers() if k not in self.noted.tables)
        own = {memory_of(one) for one in (*self.model.parameters(), *buffers)}
        watch = OperatorRecord({*own})
        for switch in switches:
            switch.holder.put_back([switch])
        states = [PythonState(self.model)]
        known = own | states[0].memory()
        try:
            for _ in range(2):
                lists = set(map(self.list_of, self.noted.doubtful.values()) if self.made else ())
                grown = states[-1].lists_at(lists)
                args, kwargs = in_own_containers(pytree.tree_map_only(Tensor, torch.clone, call))
                watch.begin(tensors_in((args, kwargs)))
                lines = LinesOfChanges(self._unexplained(states[-1]))
                try:
                    with watch, lines, reads_noted(states[-1], grown, self.lists_read):
                        self.model(*args, **kwargs)
                finally:
                    self.lines |= {
                        p: line for p, line in lines.found.items() if not self.lines.get(p)
                    }
                self.made.append(watch.made)
                self.changes.append({one.place: one for one in states[-1].changes()})
                watch.kept |= {
                    memory_of(tensor): place
                    for place, change in self.changes[0].items()
                    for tensor in tensors_in(change.value)
                    if place in self.noted.doubtful and memory_of(tensor) not in known
                }
                states.append(PythonState(self.model))
        finally:
            self.read = watch.read
            states[0].put_back()
            for switch in switches:
                switch.holder.write(switch.holder.value, switch.key, switch.value)

    def _unexplained(self, state: PythonState) -> list[Holder]:
        """What changes on lines that are not known."""
        changes = (one for one in self.noted.doubtful.values() if not self.lines[one.place])
        found = {one.holder.place: state.holder_of(one.holder) for one in changes}
        return [one for one in found.values() if one is not None][:MOST_WATCHED]

    def require_independent(self) -> None:
        """Refuse what the second call reads of what the first has left."""
        # A table that follows from no input may be made once, and read by all later calls.
        changing = self.noted.varying.union(*self.changes[1:])
        tensor = next((one for one in self.read if one in changing), None)
        if tensor is not None:
            name, line = self.described(tensor)
            raise InvalidInput(
                "what a call keeps for the next one stands in a buffer",
                got=f"{name}, a tensor that forward keeps and the next call reads",
                remedy=BUFFER,
                source=line,
            )
        if len(self.made) < 2 or self.made[0] == self.made[1]:
            return
        plain = [one for one in self.noted.doubtful.values() if not has_tensors(one.value)]
        blamed = sorted(plain, key=lambda one: one.place not in self.changes[1])
        blamed += [one for one in self.noted.doubtful.values() if one.kind == "grown"]
        if blamed:
            name, line = self.described(blamed[0].place)
            raise InvalidInput(
                ALIKE,
                got=f"{name}, which a call changes, so that the next one computes something else",
                remedy=BUFFER,
                source=line,
            )

    def fate(self, change: Change) -> str:
        """Return what becomes of a change: one of the texts above."""
        place, noted = change.place, self.noted
        if place in noted.hidden:
            return HIDDEN.format(noted.hidden[place])
        has_some = has_tensors(change.value)
        is_table = has_some and place not in noted.varying
        if len(self.changes) < 2:
            return CACHE if is_table else ASSUMED if has_some else UNKNOWN
        first, second = (changes.get(place) for changes in self.changes)
        if second is None and is_table:
            return CACHE
        if second is None and first is not None and self._grows(first):
            return GROWS
        if second is None:
            return FIRST if has_some else CARRIED
        if first is not None and is_alike(first.value, second.value) and first.kind == second.kind:
            return CARRIED
        is_number = isinstance(change.value, int | float)
        return ANOTHER.format("number" if is_number else "value")

    def later_changes(self) -> list[tuple[str, str | None]]:
        """Return what the second call alone changes where the first has changed something else, as
        an entry of a dict that grows."""
        if len(self.changes) < 2:
            return []
        first, second = self.changes
        holders = {change.holder.place for change in self.noted.doubtful.values()}
        return [
            (change.name, None)
            for place, change in second.items()
            if place not in first and change.holder.place in holders
        ]

    def list_of(self, change: Change) -> Path | int:
        """Return the place of the list that grows, or that is made, by a change."""
        if change.key is None:
            return change.holder.place
        path = change.holder.path_of(change.key)
        return id(change.value) if path is None else path

    def _grows(self, change: Change) -> bool:
        """Return whether the first call makes a list that the second lets grow alike."""
        second = self.changes[1].get((self.list_of(change), None))
        if second is None or second.kind != "grown":
            return False
        return is_alike(second.before, second.value)

    def described(self, place: Place) -> tuple[str, str | None]:
        """Return how messages call a place, and the line that has changed it."""
        return self.noted.doubtful[place].name, self.lines.get(place)


def _warn(places: Sequence[tuple[str, str | None]], fate: str) -> None:
    """Tell once of all that has one fate and was changed on one line."""
    of_line = defaultdict[str | None, list[str]](list)
    for name, line in places:
        of_line[line].append(name)
    what, _, so = fate.partition(": ")
    for line, names in of_line.items():
        more = f" and {counted(len(names) - 1, 'more place')}" if len(names) > 1 else ""
        where = f" ({line})" if line else ""
        warnings.warn(f"{names[0]}{more} is {what}{where}: {so}", stacklevel=frames_to_caller())


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


@contextmanager
def tensors_put_back(model: nn.Module) -> Iterator[None]:
    """Afterwards the modules of a model have the parameters and buffers that they had."""
    dicts = [vars(one)[kind] for one in model.modules() for kind in TENSORS]
    held = [dict(one) for one in dicts]
    try:
        yield
    finally:
        for one, tensors in zip(dicts, held, strict=True):
            one.clear()
            one.update(tensors)
