"""Gathers: the runtime makes the copies of parameters that a rank's program reads.

For graphs of one rank that run eagerly, after `localize`. A gather, or a cast, that all readers of
a parameter share leaves the program: its placeholder is the copy then. They come and go in groups:

    have_copies(group, next)          before the first reader; the group after it is started
    leave_copies(group)               after the last reader in forward
    watch_readers(y, groups, next)    before the backward of what made y, which reads them again

Each reader knows its groups: what runs again in backward asks for them anew.
What stands in the memory of a copy (views of it) is read as the copy is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.origins import copies_behind
from autopar.passes.pass_setting import LocalSetting
from autopar.strategies import tensor_inputs, traits_of
from autopar.strategies.node_info import info
from autopar.strategies.registry import has_rule
from autopar.strategies.results import is_result

NO_GROUP = -1  # no group
# What may give its input itself.
_PASSING = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
_PIECES = (operator.getitem, torch.unbind, torch.split_with_sizes)


def have_copies(group: int, following: int) -> None:
    """Where a group of copies is read first; the one that follows is started."""


def leave_copies(group: int) -> None:
    """Where forward has read a group of copies for the last time."""


def watch_readers(made: Any, groups: tuple[int, ...], following: int) -> None:
    """What was made by a reader whose backward reads these groups again."""


def take_gathers(graph: fx.Graph, setting: LocalSetting) -> fx.Graph:
    """Let the placeholders of parameters be the copies that the runtime makes of them."""
    for node in graph.find_nodes(op="placeholder"):
        kind, name = info(node).origin
        made = copies_behind(node) if kind == "parameter" else []
        made = made[: setting.copies.taken.get(name, 0)]
        if made:
            info(node).update(type=info(made[-1]).type, val=info(made[-1]).val)
            made[-1].replace_all_uses_with(node)
        for copy in reversed(made):
            graph.erase_node(copy)
    return graph


@dataclass
class _Readers:
    """Of one group of copies, in the order of the program."""

    group: int
    all: list[fx.Node] = field(default_factory=list)


def mark_copies(graph: fx.Graph, setting: LocalSetting) -> fx.Graph:
    """Say where each group of copies is read, and where backward reads it again."""
    found: dict[int, _Readers] = {}
    again: dict[fx.Node, set[int]] = {}
    for node in graph.find_nodes(op="placeholder"):
        kind, name = info(node).origin
        group = setting.copies.groups.get(name) if kind == "parameter" else None
        if group is None:
            continue
        for reader, value in list(readers_of(node)):
            if reader.op == "output":
                reader = _cloned(graph, reader, value)
            found.setdefault(group, _Readers(group)).all.append(reader)
            if group not in setting.copies.lasting:
                info(reader).copies = tuple(sorted({*info(reader).copies, group}))
                if is_read_again(reader, value):
                    again.setdefault(reader, set()).add(group)
    place = {node: at for at, node in enumerate(graph.nodes)}
    for readers in found.values():
        readers.all.sort(key=place.__getitem__)
    order = sorted(found.values(), key=lambda readers: place[readers.all[0]])
    _mark_forward(graph, order, setting.copies.lasting)
    _mark_backward(graph, sorted(again, key=place.__getitem__), again)
    return graph


def _mark_forward(graph: fx.Graph, order: list[_Readers], lasting: frozenset[int]) -> None:
    for at, readers in enumerate(order):
        lasts = readers.group in lasting
        later = [other.group for other in order[at + 1 :] if (other.group in lasting) == lasts]
        with graph.inserting_before(readers.all[0]):
            graph.call_function(have_copies, (readers.group, later[0] if later else NO_GROUP))
        if not lasts:
            with graph.inserting_after(readers.all[-1]):
                graph.call_function(leave_copies, (readers.group,))


def _mark_backward(
    graph: fx.Graph, readers: list[fx.Node], again: Mapping[fx.Node, set[int]]
) -> None:
    """Of each reader, and of the one before it whose groups are others: backward comes there next,
    that of a step.

    A weight that is read beside another is not put off: each gradient reads the other weight.
    """
    for at, reader in enumerate(readers):
        groups = tuple(sorted(again[reader]))
        earlier = [one for one in reversed(readers[:at]) if info(one).learns]
        before = [group for one in earlier for group in sorted(again[one])]
        following = next((one for one in before if one not in groups), NO_GROUP)
        weights = info(reader).weight_inputs
        if weights is not None and weights.product and len(weights.positions) > 1:
            info(reader).weight_inputs = None
        with graph.inserting_after(reader):
            graph.call_function(watch_readers, (reader, groups, following))


def readers_of(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Those of a value, and of all that stands in its memory, each with what it reads."""
    for reader in value.users:
        yield reader, value
        if reader.op != "output" and _may_alias(reader):
            yield from readers_of(reader)


def _may_alias(reader: fx.Node) -> bool:
    """Whether what is made may stand in the memory of an input."""
    if reader.target in _PIECES or is_result(reader):
        return True
    if info(reader).movement is not None:
        return info(reader).movement.kind == "identity"  # type: ignore[union-attr]
    if getattr(reader.target, "__module__", "").startswith("autopar."):
        return False
    if not has_rule(reader.target):
        return True
    schema = getattr(reader.target, "_schema", None)
    return bool(traits_of(reader).view) or (
        schema is not None and schema.name.partition("::")[2] in _PASSING
    )


def is_read_again(reader: fx.Node, value: fx.Node) -> bool:
    """Whether the backward of a reader may read the elements of a value again."""
    if not info(reader).differentiable or reader.target in _PIECES or is_result(reader):
        return False
    if info(reader).movement is not None:
        return False
    if not isinstance(reader.target, torch._ops.OpOverload) or info(reader).rule is None:
        return True
    inputs = tensor_inputs(reader)
    return any(inputs[at] is value for at in info(reader).saved if at < len(inputs))


def _cloned(graph: fx.Graph, output: fx.Node, value: fx.Node) -> fx.Node:
    """What leaves the program lies in memory of its own."""
    with graph.inserting_before(output):
        clone = graph.call_function(torch.ops.aten.clone.default, (value,))
    clone.meta = dict(value.meta)
    output.replace_input_with(value, clone)
    return clone
