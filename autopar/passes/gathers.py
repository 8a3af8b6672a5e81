"""Gathers: the runtime makes the copies of parameters that a rank's program reads.

For graphs of one rank that run eagerly, after `localize`. A gather, or a cast, that all readers of
a parameter share leaves the program: its placeholder is the copy then. They come and go in groups:

    have_copies(group, next)          before the first reader; the group after it is started
    leave_copies(group)               after the last reader in forward
    watch_readers(y, groups, next)    before the backward of the operator of y, which reads them

Each reader knows its groups, so that recomputation can ask for them anew. A reader of a view of a
copy counts as a reader of the copy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.origins import copies_behind
from autopar.passes.pass_context import LocalContext
from autopar.strategies import tensor_inputs, traits_of
from autopar.strategies.node_info import info
from autopar.strategies.registry import has_rule
from autopar.strategies.results import is_result

NO_GROUP = -1
# Operators that may return their input itself.
_PASSING = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
_PIECES = (operator.getitem, torch.unbind, torch.split_with_sizes)


def have_copies(group: int, following: int) -> None:
    """Mark the first reader of a group of copies; the group `following` is started."""


def leave_copies(group: int) -> None:
    """Mark that forward has read a group of copies for the last time."""


def watch_readers(output: Any, groups: tuple[int, ...], following: int) -> None:
    """Mark the output of a reader whose backward reads these groups again."""


def take_gathers(graph: fx.Graph, context: LocalContext) -> fx.Graph:
    """Let the placeholders of parameters be the copies that the runtime makes of them."""
    for node in graph.find_nodes(op="placeholder"):
        kind, name = info(node).origin
        copies = copies_behind(node) if kind == "parameter" else []
        copies = copies[: context.copies.runtime_copies.get(name, 0)]
        if copies:
            info(node).update(type=info(copies[-1]).type, val=info(copies[-1]).val)
            copies[-1].replace_all_uses_with(node)
        for copy in reversed(copies):
            graph.erase_node(copy)
    return graph


@dataclass
class _Readers:
    """Collect the readers of one group of copies, in the order of the program."""

    group: int
    all: list[fx.Node] = field(default_factory=list)


def mark_copies(graph: fx.Graph, context: LocalContext) -> fx.Graph:
    """Mark where each group of copies is read, and where backward reads it again."""
    by_group: dict[int, _Readers] = {}
    read_again: dict[fx.Node, set[int]] = {}
    for node in graph.find_nodes(op="placeholder"):
        kind, name = info(node).origin
        group = context.copies.groups.get(name) if kind == "parameter" else None
        if group is None:
            continue
        for reader, value in list(readers_of(node)):
            if reader.op == "output":
                reader = _cloned(graph, reader, value)
            by_group.setdefault(group, _Readers(group)).all.append(reader)
            if group not in context.copies.step_long_groups:
                info(reader).copies = tuple(sorted({*info(reader).copies, group}))
                if is_read_again(reader, value):
                    read_again.setdefault(reader, set()).add(group)
    positions = {node: at for at, node in enumerate(graph.nodes)}
    for readers in by_group.values():
        readers.all.sort(key=positions.__getitem__)
    order = sorted(by_group.values(), key=lambda readers: positions[readers.all[0]])
    _mark_forward(graph, order, context.copies.step_long_groups)
    _mark_backward(graph, sorted(read_again, key=positions.__getitem__), read_again)
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
    graph: fx.Graph, readers: list[fx.Node], read_again: Mapping[fx.Node, set[int]]
) -> None:
    """Mark what backward reads at each reader, and the other group that it reads next in a step.

    Gradients of two weights that are multiplied are not put off: each reads the other weight."""
    for at, reader in enumerate(readers):
        groups = tuple(sorted(read_again[reader]))
        earlier = [other for other in reversed(readers[:at]) if info(other).learns]
        earlier_groups = [group for other in earlier for group in sorted(read_again[other])]
        following = next((group for group in earlier_groups if group not in groups), NO_GROUP)
        weights = info(reader).weight_inputs
        if weights is not None and weights.product and len(weights.positions) > 1:
            info(reader).weight_inputs = None
        with graph.inserting_after(reader):
            graph.call_function(watch_readers, (reader, groups, following))


def readers_of(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the readers of a value and of all views of it, each with what it reads."""
    for reader in value.users:
        yield reader, value
        if reader.op != "output" and _may_alias(reader):
            yield from readers_of(reader)


def _may_alias(reader: fx.Node) -> bool:
    """Return whether the output may be a view of an input."""
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
    """Return whether the backward of a reader may read the elements of a value again."""
    if not info(reader).differentiable or reader.target in _PIECES or is_result(reader):
        return False
    if info(reader).movement is not None:
        return False
    if not isinstance(reader.target, torch._ops.OpOverload) or info(reader).rule is None:
        return True
    inputs = tensor_inputs(reader)
    return any(inputs[at] is value for at in info(reader).saved if at < len(inputs))


def _cloned(graph: fx.Graph, output: fx.Node, value: fx.Node) -> fx.Node:
    """Clone a copy that leaves the program, which has memory of its own then."""
    with graph.inserting_before(output):
        clone = graph.call_function(torch.ops.aten.clone.default, (value,))
    clone.meta = dict(value.meta)
    output.replace_input_with(value, clone)
    return clone
