"""The modules of a program as a tree with layouts and times; equal neighbours are one node.

>>> print(*lines(module_tree(candidate)), sep="\\n")
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

from autopar.candidates.candidate import Candidate
from autopar.capture.listing import operator_of, type_text
from autopar.strategies.node_info import info
from autopar.strategies.results import is_result


@dataclass(frozen=True)
class MovedBytes:
    """The bytes that a movement, or a kernel that several ranks run together, moves."""

    forward: str
    backward: str  # "" where no gradient flows
    axes: str
    bytes: int  # the larger of one rank's pieces before and after


@dataclass(frozen=True)
class ProgramCall:
    """One call of a program, as it runs once."""

    name: str
    operator: str
    type: str
    seconds: float  # forward and backward
    source: str
    reads: tuple[str, ...] = field(compare=False)
    moved: MovedBytes | None = None
    again: bool = False  # it runs again in backward

    @property
    def form(self) -> tuple[Any, ...]:
        """A value that is equal for calls of equal blocks."""
        return self.operator, self.type, round(self.seconds, 12), self.moved, self.again


@dataclass(frozen=True)
class HeldTensor:
    """A parameter or buffer."""

    name: str  # in its module
    type: str
    note: str  # over which axes its gradient is summed; or which it is by another name


@dataclass
class ModuleNode:
    """A module, or several equal ones, with its tensors, calls and children."""

    members: tuple[str, ...]  # their names
    held: list[HeldTensor] = field(default_factory=list)
    calls: list[ProgramCall] = field(default_factory=list)
    parts: dict[str, ModuleNode] = field(default_factory=dict)  # by the name of the first member

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def name(self) -> str:
        """The name of all members: `{0..3}`, or `{1, 4}` if they do not follow each other."""
        if self.count == 1:
            return self.members[0]
        if _follow(self.members):
            return f"{{{self.members[0]}..{self.members[-1]}}}"
        return f"{{{', '.join(self.members)}}}"

    @property
    def seconds(self) -> float:
        """Seconds of the calls inside one member."""
        seconds_of_calls = sum(call.seconds for call in self.calls)
        return seconds_of_calls + sum(part.count * part.seconds for part in self.parts.values())

    @property
    def moving(self) -> float:
        """Seconds of the movements inside one member."""
        seconds_of_calls = sum(call.seconds for call in self.calls if call.moved is not None)
        return seconds_of_calls + sum(part.count * part.moving for part in self.parts.values())

    @property
    def form(self) -> tuple[Any, ...]:
        """A value that is equal for modules that are shown as one."""
        inside = tuple((part.members, part.form) for part in self.parts.values())
        return tuple(self.held), tuple(call.form for call in self.calls), inside


def calls_of(candidate: Candidate) -> Iterator[tuple[str, ProgramCall]]:
    """Yield the calls of a rewritten program in order, each with the path of its module."""
    graph = candidate.rewritten
    for node in graph.nodes:
        if node.op == "call_function" and not is_result(node):
            yield info(node).module or "", _call(node, candidate)


def module_tree(candidate: Candidate) -> ModuleNode:
    """Build the tree of the whole model."""
    root = ModuleNode(("",))
    placeholders = {node.name: node for node in candidate.rewritten.find_nodes(op="placeholder")}
    named = candidate.captured.parameters | candidate.captured.buffers
    for placeholder, name in named.items():
        path, _, leaf = name.rpartition(".")
        _node_of(root, path).held.append(_held(leaf, placeholders.get(placeholder)))
    types = {name: placeholders.get(placeholder) for placeholder, name in named.items()}
    for alias, first_name in candidate.captured.tied.items():
        path, _, leaf = alias.rpartition(".")
        node = types.get(first_name)
        type_ = "not read" if node is None else type_text(node)
        _node_of(root, path).held.append(
            HeldTensor(leaf, type_, f"is {_relative_name(first_name, path)}")
        )
    for path, call in calls_of(candidate):
        _node_of(root, path).calls.append(call)
    return fold_equal_children(root)


def fold_equal_children(part: ModuleNode) -> ModuleNode:
    """Merge children that are equal except for their number."""
    runs: list[list[ModuleNode]] = []
    for inner in map(fold_equal_children, part.parts.values()):
        last = runs[-1] if runs else []
        if last and _are_numbers(last[-1].name, inner.name) and inner.form == last[-1].form:
            last.append(inner)
        else:
            runs.append([inner])
    children = [replace(run[0], members=tuple(child.name for child in run)) for run in runs]
    return replace(part, parts={child.members[0]: child for child in children})


def _are_numbers(*names: str) -> bool:
    return all(name.isascii() and name.isdigit() for name in names)


def _follow(names: Sequence[str]) -> bool:
    """Return whether names are numbers that count up."""
    first = int(names[0]) if _are_numbers(*names) else 0
    return [*names] == [str(number) for number in range(first, first + len(names))]


def joined(path: str, name: str) -> str:
    """Join a module path and a name."""
    return f"{path}.{name}" if path else name


def _node_of(root: ModuleNode, path: str) -> ModuleNode:
    """Return the node of a module, created if needed."""
    part = root
    for name in filter(None, path.split(".")):
        part = part.parts.setdefault(name, ModuleNode((name,)))
    return part


def _relative_name(name: str, path: str) -> str:
    """Return a name without the block that `path` is in too."""
    block = re.match(r"(.*\.)?[0-9]+(?=\.|$)", path)
    if block is None or not name.startswith(f"{block[0]}."):
        return name
    return f"{name.removeprefix(f'{block[0]}.')} of the same block"


def _held(name: str, node: fx.Node | None) -> HeldTensor:
    if node is None:
        return HeldTensor(name, "not read", "")
    notes = [f"gradient summed over {', '.join(info(node).sync)}"] if info(node).sync else []
    places = info(node).places
    if places is not None and places.working != places.storage:
        notes.append(f"read as {replace(info(node).type, layout=places.working)}")
    if info(node).on_host:
        notes.append("on the host")
    return HeldTensor(name, type_text(node), "; ".join(notes))


def _call(node: fx.Node, candidate: Candidate) -> ProgramCall:
    return ProgramCall(
        name=node.name,
        operator=operator_of(node),
        type=type_text(node),
        seconds=candidate.prices.own(node).seconds,
        source=(info(node).source or ""),
        reads=tuple(read.name for read in node.all_input_nodes),
        moved=_moved(node),
        again=bool(info(node).remade),
    )


def _moved(node: fx.Node) -> MovedBytes | None:
    movement, joint = info(node).movement, info(node).joint
    if movement is not None:
        back = movement.backward if info(node).learns else ""
        return MovedBytes(movement.kind, back, ", ".join(movement.axes), info(node).bytes)
    if joint is not None:
        back = joint.joint.backward.__name__ if info(node).learns else ""
        name, axes = joint.joint.forward.__name__, ", ".join(joint.axes)
        return MovedBytes(name, back, axes, info(node).bytes)
    return None
