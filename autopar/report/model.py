"""Model: the modules of a program as a tree, equal neighbours as one, with what they hold and take.

>>> print(*lines(tree(candidate)), sep="\\n")
blocks.{0..3}      x 4
  qkv.weight       f32[192@tp, 64]       gradient summed over dp
  linear           f32[8@dp, 32, 192@tp] 21 µs
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autopar.capture.listing import operator_of, type_text
from autopar.planner.candidate import Candidate
from autopar.strategies.node_info import info
from autopar.strategies.results import is_result


@dataclass(frozen=True)
class Moved:
    """What a movement, or a call that ranks carry out together, moves."""

    forward: str
    backward: str  # "" where no gradient flows
    axes: str
    bytes: int  # the larger of one rank's pieces before and after


@dataclass(frozen=True)
class Call:
    """One call of a program, each time that it runs."""

    name: str
    operator: str
    type: str
    seconds: float  # forward and backward
    source: str
    reads: tuple[str, ...] = field(compare=False)
    moved: Moved | None = None
    again: bool = False  # it runs again in backward

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for calls of equal blocks."""
        return self.operator, self.type, round(self.seconds, 12), self.moved, self.again


@dataclass(frozen=True)
class Held:
    """A parameter or buffer."""

    name: str  # in its module
    type: str
    note: str  # over which axes its gradient is summed; or which it is by another name


@dataclass
class Part:
    """A module, or several that are equal, with what is in it."""

    members: tuple[str, ...]  # their names
    held: list[Held] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)  # by the name of the first member

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def name(self) -> str:
        """Of all of them: `{0..3}`, or `{1, 4}` where they do not follow each other."""
        if self.count == 1:
            return self.members[0]
        if _follow(self.members):
            return f"{{{self.members[0]}..{self.members[-1]}}}"
        return f"{{{', '.join(self.members)}}}"

    @property
    def seconds(self) -> float:
        """Of its calls, in one of them if there are several."""
        own = sum(call.seconds for call in self.calls)
        return own + sum(part.count * part.seconds for part in self.parts.values())

    @property
    def moving(self) -> float:
        """The part of these that movements take."""
        own = sum(call.seconds for call in self.calls if call.moved is not None)
        return own + sum(part.count * part.moving for part in self.parts.values())

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for those that are shown as one."""
        inside = tuple((part.members, part.form) for part in self.parts.values())
        return tuple(self.held), tuple(call.form for call in self.calls), inside


def calls_of(candidate: Candidate) -> Iterator[tuple[str, Call]]:
    """The calls of a rewritten program in order, each with the path of its module."""
    graph = candidate.rewritten
    for node in graph.nodes:
        if node.op == "call_function" and not is_result(node):
            yield info(node).module or "", _call(node, candidate)


def tree(candidate: Candidate) -> Part:
    """The whole model."""
    root = Part(("",))
    placeholders = {node.name: node for node in candidate.rewritten.find_nodes(op="placeholder")}
    named = candidate.captured.parameters | candidate.captured.buffers
    for placeholder, name in named.items():
        path, _, own = name.rpartition(".")
        _at(root, path).held.append(_held(own, placeholders.get(placeholder)))
    types = {name: placeholders.get(placeholder) for placeholder, name in named.items()}
    for alias, kept in candidate.captured.tied.items():
        path, _, own = alias.rpartition(".")
        node = types.get(kept)
        type_ = "not read" if node is None else type_text(node)
        _at(root, path).held.append(Held(own, type_, f"is {_beside(kept, path)}"))
    for path, call in calls_of(candidate):
        _at(root, path).calls.append(call)
    return folded(root)


def folded(part: Part) -> Part:
    """With those of its parts that are equal, but for a number, as one."""
    runs: list[list[Part]] = []
    for inner in map(folded, part.parts.values()):
        last = runs[-1] if runs else []
        if last and _are_numbers(last[-1].name, inner.name) and inner.form == last[-1].form:
            last.append(inner)
        else:
            runs.append([inner])
    as_one = [replace(run[0], members=tuple(one.name for one in run)) for run in runs]
    return replace(part, parts={one.members[0]: one for one in as_one})


def _are_numbers(*names: str) -> bool:
    return all(name.isascii() and name.isdigit() for name in names)


def _follow(names: Sequence[str]) -> bool:
    """Whether names are numbers that count up."""
    first = int(names[0]) if _are_numbers(*names) else 0
    return [*names] == [str(number) for number in range(first, first + len(names))]


def joined(path: str, name: str) -> str:
    """The path of what is called so in a module."""
    return f"{path}.{name}" if path else name


def _at(root: Part, path: str) -> Part:
    """The part of a module, made if it is not there."""
    part = root
    for name in filter(None, path.split(".")):
        part = part.parts.setdefault(name, Part((name,)))
    return part


def _beside(name: str, path: str) -> str:
    """A name as it is told in a module: without the block that both stand in."""
    block = re.match(r"(.*\.)?[0-9]+(?=\.|$)", path)
    if block is None or not name.startswith(f"{block[0]}."):
        return name
    return f"{name.removeprefix(f'{block[0]}.')} of the same block"


def _held(name: str, node: fx.Node | None) -> Held:
    if node is None:
        return Held(name, "not read", "")
    notes = [f"gradient summed over {', '.join(info(node).sync)}"] if info(node).sync else []
    places = info(node).places
    if places is not None and places.working != places.storage:
        notes.append(f"read as {replace(info(node).type, layout=places.working)}")
    if info(node).on_host:
        notes.append("on the host")
    return Held(name, type_text(node), "; ".join(notes))


def _call(node: fx.Node, candidate: Candidate) -> Call:
    return Call(
        name=node.name,
        operator=operator_of(node),
        type=type_text(node),
        seconds=candidate.prices.own(node).seconds,
        source=(info(node).source or ""),
        reads=tuple(one.name for one in node.all_input_nodes),
        moved=_moved(node),
        again=bool(info(node).remade),
    )


def _moved(node: fx.Node) -> Moved | None:
    movement, joint = info(node).movement, info(node).joint
    if movement is not None:
        back = movement.backward if info(node).learns else ""
        return Moved(movement.kind, back, ", ".join(movement.axes), info(node).bytes)
    if joint is not None:
        back = joint.joint.backward.__name__ if info(node).learns else ""
        about = joint.joint.forward.__name__, back, ", ".join(joint.axes)
        return Moved(*about, info(node).bytes)
    return None
