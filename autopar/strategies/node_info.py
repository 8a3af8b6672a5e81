"""NodeInfo: what is known of a node of a graph, each fact by its name and with its type.

    info(node).type                     # what the value is, once layouts are assigned
    info(node).types                    # that of each result of a call
    info(node).sync = ("dp",)

The facts stand in `node.meta` under the names here, so that fx copies them with a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopar.collectives.movement import Movement
from autopar.layout import ParameterPlacement, Placement, TensorType
from autopar.recompute import Recompute
from autopar.states import StateBytes
from autopar.strategies.kernel_calls import KernelCall
from autopar.strategies.rule import Facts, Rule
from autopar.strategies.strategy import Strategy

Ways = Mapping[tuple[str, Placement], tuple[Placement, ...]]  # (value, what is wanted) ->


@dataclass(frozen=True)
class WeightInputs:
    """The inputs of an activation whose gradients a split backward takes later."""

    positions: tuple[int, ...]  # among its tensor inputs, in the order of its arguments
    product: bool  # each gradient is a product of its own, and is all put off


@dataclass(frozen=True)
class Region:
    """A run of operators whose forward runs again in backward, whole or as far as it is cheap, or
    which keeps elsewhere what backward reads."""

    name: str  # as in decisions: a module may run several times
    how: Recompute
    number: int = 0  # tells runs of one name apart
    is_random: bool = False  # draws random numbers
    times: int = 1  # how many it stands for

    @property
    def is_full(self) -> bool:
        return self.how.kind == "full"


@dataclass(frozen=True)
class Readers:
    """Of a parameter."""

    stages: tuple[int, ...]  # of a pipeline, that read it
    holders: tuple[int, ...]  # the places along the pipeline that hold one of these
    first: int  # in the program of all stages, the first call that reads it; -1: none
    last: int

    @property
    def is_own(self) -> bool:
        """Whether one stage reads it."""
        return len(self.stages) == 1


class NodeInfo:
    """The facts of one node. Without a default one is there from the pass on that writes it."""

    def __init__(self, node: fx.Node) -> None:
        self.__dict__ = node.meta  # so that a fact is read as fast as any attribute

    # From capture
    val: torch.Tensor  # the fake tensor, global; of several results a flat tuple
    source: str | None = None  # the user's line
    module: str = ""  # the path of the module that makes the value
    differentiable: bool = False  # whether a gradient flows through it
    learns: bool = False  # a step gives it a gradient
    state_bytes: StateBytes | None = None  # of a parameter that is read in another dtype
    no_grad: bool = False  # made under torch.no_grad; gone when the graph is frozen

    draw: int | None = None  # its number among the calls that draw random numbers; as no_grad

    on_host: bool = False  # of a parameter: where it is kept; of a call: where it runs
    parts: tuple[int, int] | None = None  # a dim of equal parts, and their number: it may be cut so
    checkpoint: int | None = None  # the user's checkpoint that it stands in, by number

    # From assign_types
    origin: tuple[str, str]  # of a placeholder: its kind ("parameter", ...) and name
    places: ParameterPlacement | None = None  # of a parameter; its type is that in storage
    type: TensorType  # shape, dtype and layout; of several results a flat tuple
    wants: tuple[Placement, ...]  # of each tensor input
    ways: Ways = MappingProxyType({})  # what readers share on the way to what they want
    rule: Rule | None = None
    strategy: Strategy | None = None
    saved: tuple[int, ...] = ()  # the tensor arguments that backward keeps
    saves_output: bool = False
    calls: tuple[tuple[Facts, Strategy], ...] = ()  # what the price follows from

    # From later passes
    start_of: KernelCall | None = None  # it takes where a rank's piece of a factor starts
    joint: KernelCall | None = None  # ranks carry it out together
    movement: Movement | None = None  # of a collective
    alone: bool = False  # it goes all the way between two layouts
    bytes: int  # that a movement moves
    region: Region | None = None  # that is recomputed, and it stands in
    remade: bool = False  # its forward runs again in backward
    dropped: bool = False  # what it gives is made again where backward reads it
    # By the regions that keep its memory elsewhere, the axes over whose ranks they cut it.
    away: Mapping[Region, tuple[str, ...]] = MappingProxyType({})
    sync: tuple[str, ...] = ()  # of a parameter: the axes that sum its gradient last
    pending: tuple[str, ...] = ()  # the axes over which its own gradient stays a sum
    buffers: tuple[str, ...] = ()  # of an output: the buffers whose new values it gives
    weight_inputs: WeightInputs | None = None
    readers: Readers | None = None  # of a parameter of a stage: those of all stages
    copies: tuple[int, ...] = ()  # the groups of copies that it reads, which come and go

    # In a program that stands for a longer one: of so many equal blocks, one after another, this is
    # what stands here of one.
    times: int = 1

    @property
    def values(self) -> tuple[Any, ...]:
        """The fake value of each result of a call; of most nodes one."""
        return flat(self.val)

    @property
    def types(self) -> tuple[TensorType, ...]:
        """The type of each result that is a tensor."""
        return tuple(type_ for type_ in flat(self.type) if type_ is not None)

    def update(self, **facts: Any) -> None:
        """Set several facts at once."""
        self.__dict__.update(facts)

    def end(self, results: Sequence[fx.Node]) -> None:
        """What is known of the output of `results`."""
        self.update(
            val=tuple(info(node).val for node in results),
            source=None,
            module="",
            differentiable=any(info(node).differentiable for node in results),
        )


info = NodeInfo  # info(node).type is read as "the type of node"


def times_of(node: fx.Node, times: int | None = None) -> int:
    """How often a node counts, where those that stand for others are as many as `times`, or as they
    say themselves."""
    own = info(node).times
    return own if times is None or own == 1 else times


def flat(values: Any) -> tuple[Any, ...]:
    """What an operator gives, one after another."""
    if not isinstance(values, list | tuple):
        return (values,)
    return tuple(leaf for value in values for leaf in flat(value))
