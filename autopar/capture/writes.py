"""Writes to what forward is given, as they are seen from outside.

    labels.masked_fill_(labels == -100, pad)           an argument
    self.weight.data.clamp_(-1, 1)                     a parameter, before it is read

Both are carried out as a call begins. Of an argument the program reads what it is given, and
computes what forward reads after the write, where inputs alone say what is written. A parameter is
bounded, which every rank does to its own elements, and which changes nothing when it is done again:
the program reads it afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar._torch.tensors import local_of, memory_of
from autopar.capture.decisions import evaluated
from autopar.capture.graph_builder import GraphBuilder
from autopar.capture.randomness import may_be_random
from autopar.errors import InvalidInput
from autopar.strategies import OperatorCall
from autopar.strategies.node_info import info

aten = torch.ops.aten

_BOUNDS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
_UNCHANGED = (aten.detach.default, aten.alias.default, aten.to.dtype)


@dataclass(frozen=True)
class Write:
    """What an input becomes, by a graph of inputs and constants."""

    graph: fx.Graph
    inputs: Mapping[str, Any]  # placeholder -> number of the flat argument, or its own placeholder
    constants: dict[str, Tensor]  # placeholder -> value
    target: Any  # the argument that is written to, as one of the inputs
    source: str | None


@dataclass(frozen=True)
class ValueRange:
    """Between what forward puts the elements of a parameter."""

    least: float | None
    greatest: float | None

    def __str__(self) -> str:
        return f"{self.least} .. {self.greatest}"


def bounds_of(parameter: fx.Node, value: fx.Node) -> ValueRange | None:
    """The bounds between which a value is a parameter, if it is that, in whatever dtype."""
    bounds = None
    while value is not parameter:
        call = OperatorCall(value)
        if value.target in _BOUNDS and bounds is None:
            least, greatest = map(call.get, ("min", "max"))
            if isinstance(least, fx.Node) or isinstance(greatest, fx.Node):
                return None
            bounds = ValueRange(least, greatest)
        elif value.target not in _UNCHANGED:
            return None
        value = value.args[0]  # type: ignore[assignment]
    return bounds


def written_input(builder: GraphBuilder, target: fx.Node, value: fx.Node) -> Write | None:
    """The write that makes an input a value; None where more than inputs says what it is."""
    needed, reached = {value}, [value]
    while reached:
        new = {node for node in reached.pop().all_input_nodes if node not in needed}
        needed |= new
        reached.extend(new)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs, constants = dict[str, Any](), dict[str, Tensor]()
    for node in builder.graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            copies[node] = made = graph.placeholder(node.name)
            if node.name in builder.inputs:
                inputs[made.name] = builder.inputs.index(node.name)
            elif node.name in builder.constants:
                constants[made.name] = builder.constants[node.name]
            else:
                return None
        elif may_be_random(node):
            return None
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[value])
    number = builder.inputs.index(target.name)
    return Write(graph, inputs, constants, number, info(value).source)


def by_placeholder(writes: Sequence[Write], inputs: Sequence[str | None]) -> tuple[Write, ...]:
    """Writes to flat arguments, of placeholders."""
    return tuple(
        replace(
            one,
            inputs={name: inputs[number] for name, number in one.inputs.items()},
            target=inputs[one.target],
        )
        for one in writes
    )


@torch.no_grad()
def carry_out(writes: Sequence[Write], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write to the tensors of a call; what they held before, by placeholder."""
    for one in writes:
        require_apart(one, given)
    values = [evaluated(one.graph, one.constants | _of(one, given)) for one in writes]
    before = {one.target: given[one.target].clone() for one in writes}
    for one, value in zip(writes, values, strict=True):
        given[one.target].copy_(value)
    return before


def require_apart(write: Write, given: Mapping[str, Tensor]) -> None:
    """Refuse a write that would change another argument as well."""
    memory = memory_of(given[write.target])
    shared = [n for n, one in given.items() if n != write.target and memory_of(one) == memory]
    if shared:
        raise InvalidInput(
            "an argument that forward changes in place shares no memory with another",
            got=f"{write.target}, and {', '.join(shared)}",
            remedy="hand over a copy (x.clone()) as one of them",
            source=write.source,
        )


@torch.no_grad()
def put_between(bounds: ValueRange, parameter: Tensor) -> None:
    """Bound a parameter, or a rank's piece of one."""
    local_of(parameter).clamp_(bounds.least, bounds.greatest)


def _of(write: Write, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: given[placeholder] for name, placeholder in write.inputs.items()}
