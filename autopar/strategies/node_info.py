"""NodeInfo: the facts of a node of a graph, each by its name and with its type.

    info(node).type                     # what the value is, once layouts are assigned
    info(node).types                    # the type of each result of a call
    info(node).sync = ("dp",)

The facts stand in `node.meta` under the names here, so that fx copies them with a node.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import fx

from autopar.collectives.movement import Movement
from autopar.layout import ParameterPlacement, Parts, Placement
from autopar.recompute import Recompute
from autopar.states import StateBytes
from autopar.strategies.kernel_calls import KernelCall
from autopar.strategies.rule import Facts, Rule
from autopar.strategies.strategy import Strategy
from autopar.tensor_type import TensorType

SEQUENCE = "sequence"  # the kind of a placeholder that slices of a sequence share
SharedRoutes = Mapping[tuple[str, Placement], tuple[Placement, ...]]  # (value, what is wanted) ->


@dataclass(frozen=True)
class WeightInputs:
    """The inputs of an activation whose gradients a split backward takes later."""

    positions: tuple[int, ...]  # among its tensor inputs, in the order of its arguments
    product: bool  # each gradient is a product of its own, and is all put off


@dataclass(frozen=True)
class RecomputeRegion:
    """A run of operators that backward computes again, or whose saved values are offloaded."""

    name: str  # as in decisions: a module may run several times
    how: Recompute
    number: int = 0  # tells runs of one name apart
    is_random: bool = False  # draws random numbers
    count: int = 1  # how many it stands for

    @property
    def is_full(self) -> bool:
        return self.how.kind == "full"

    @property
    def is_by_policy(self) -> bool:
        return self.how.kind == "policy"


@dataclass(frozen=True)
class ParameterReaders:
    """The stages of a pipeline that read a parameter, and its first and last calls."""

    stages: tuple[int, ...]
    holders: tuple[int, ...]  # the places along the pipeline that hold one of these
    first: int  # in the program of all stages, the first call that reads it; -1: none
    last: int

    @property
    def is_own(self) -> bool:
        """Return whether a single stage reads the parameter."""
        return len(self.stages) == 1


class BlockNames(Protocol):
    """Gives the names of nodes and modules in each of some equal blocks."""

    @property
    def graph(self) -> fx.Graph:
        """Return the graph of the first block."""

    def node_name(self, name: str, block: int) -> str:
        """Return the name in one block of a node of the first."""

    def name(self, path: str, block: int) -> str:
        """Return the name in one block of a module or parameter of the first."""

    def moved(self, path: str, block: int, to: int) -> str:
        """Return the name in another block of a module or parameter of one."""

    @property
    def draws(self) -> int:
        """Return the number of random calls in each block."""

    @property
    def checkpoints(self) -> int:
        """Return the number of the user's checkpoints in each block."""


@dataclass(frozen=True)
class BlockPlace:
    """Says where a node stands among equal blocks."""

    blocks: BlockNames
    name: str  # of the node in the first block
    number: int  # of its block, counted from 0 in its row
    count: int = 1  # of the blocks that it stands for

    @property
    def node_name(self) -> str:
        """Return the name of the node."""
        return self.blocks.node_name(self.name, self.number)

    def later(self, blocks: int) -> BlockPlace:
        """Return the place of the same node so many blocks later, which stands for itself."""
        return BlockPlace(self.blocks, self.name, self.number + blocks)

    def path_of(self, node: fx.Node) -> str:
        """Return the module of the node at this place, which `node` stands for."""
        place, path = info(node).block, info(node).module
        return path if place is None else self.blocks.moved(path, place.number, self.number)


class NodeInfo:
    """The facts of one node; one without a default is absent until its pass has run."""

    def __init__(self, node: fx.Node) -> None:
        self.__dict__ = node.meta  # so that a fact is read as fast as any attribute

    # Written by capture.
    val: torch.Tensor  # the fake tensor of the global value; a flat tuple for several results
    source: str | None = None  # the user's source line
    module: str = ""  # the path of the module that makes the value
    differentiable: bool = False  # whether a gradient flows through it, from any output
    learns: bool = False  # whether a step gives it a gradient: price, memory and states follow it
    state_bytes: StateBytes | None = None  # bytes that training keeps per element of a parameter
    no_grad: bool = False  # made under torch.no_grad; removed when the graph is frozen
    draw: int | None = None  # its number among random calls; removed when the graph is frozen
    on_host: bool = False  # a parameter is kept on the host, or a call runs there
    # Dims of equal parts and their numbers, as in a qkv weight or a batch joined of several.
    parts: Parts = ()
    checkpoint: int | None = None  # the number of the user's checkpoint that contains it
    policy: int = -1  # the number of that checkpoint's policy, until it has decided; -1: none
    policy_saves: bool | None = None  # whether a policy keeps its result; None: no policy decides
    block: BlockPlace | None = None  # where it stands among equal blocks

    # Written by assign_types.
    origin: tuple[str, str]  # kind ("parameter", "buffer", "input", ...) and name of a placeholder
    places: ParameterPlacement | None = None  # where a parameter is stored, read, summed and kept
    type: TensorType  # shape, dtype and layout; a flat tuple for several results
    wants: tuple[Placement, ...]  # the layout that each tensor input must have
    ways: SharedRoutes = MappingProxyType({})  # the movements that readers of a value share
    rule: Rule | None = None  # what the operator can do
    strategy: Strategy | None = None  # what it does here
    saved: tuple[int, ...] = ()  # the tensor arguments that backward keeps
    saves_output: bool = False  # whether backward keeps the result
    calls: tuple[tuple[Facts, Strategy], ...] = ()  # the calls from which the price follows

    # Written by later passes.
    start_of: KernelCall | None = None  # a kernel that takes the start of a rank's piece
    joint: KernelCall | None = None  # a kernel that several ranks carry out together
    movement: Movement | None = None  # the movement that a collective carries out
    alone: bool = False  # whether this movement is the only one between two layouts
    bytes: int  # the bytes that a movement moves
    region: RecomputeRegion | None = None  # the recomputed region that contains it
    remade: bool = False  # whether its forward runs again in backward
    dropped: bool = False  # whether its value is made again where backward reads it
    # For each region that keeps this value elsewhere: the axes over which it is cut.
    away: Mapping[RecomputeRegion, tuple[str, ...]] = MappingProxyType({})
    sync: tuple[str, ...] = ()  # the axes over which a parameter's gradient is summed last
    pending: tuple[str, ...] = ()  # the axes over which a gradient stays a partial sum
    buffers: tuple[str, ...] = ()  # the buffers whose new values an output gives
    weight_inputs: WeightInputs | None = None  # the gradients that a split backward puts off
    readers: ParameterReaders | None = None  # the stages that read a parameter
    copies: tuple[int, ...] = ()  # the groups of gathered parameters that it reads

    @property
    def count(self) -> int:
        """Return how many equal blocks the node stands for, in a folded program."""
        return 1 if self.block is None else self.block.count

    @property
    def repeated_block(self) -> tuple[fx.Graph, int] | None:
        """Return the block that the node is in, if it stands for several; None: it does not."""
        place = self.block
        return None if place is None or place.count == 1 else (place.blocks.graph, place.number)

    @property
    def values(self) -> tuple[Any, ...]:
        """Return the fake value of each result of a call; most nodes have one."""
        return flat_values(self.val)

    @property
    def types(self) -> tuple[TensorType, ...]:
        """Return the type of each result that is a tensor."""
        return tuple(type_ for type_ in flat_values(self.type) if type_ is not None)

    def update(self, **facts: Any) -> None:
        """Set several facts at once."""
        self.__dict__.update(facts)

    def end(self, results: Sequence[fx.Node]) -> None:
        """Write the facts of a graph's output node, which returns `results`."""
        self.update(
            val=tuple(info(node).val for node in results),
            source=None,
            module="",
            differentiable=any(info(node).differentiable for node in results),
        )


info = NodeInfo  # info(node).type is read as "the type of node"


def name_beside(
    node: fx.Node, kind: str, taken: Container[str] = ()
) -> tuple[str, BlockPlace | None]:
    """Return a name for a node of some `kind` that belongs to another one, and its place; the name
    is none of those that are `taken`.

    What belongs to equal nodes has names that are as regular as theirs are."""
    place = info(node).block
    for number in count():
        prefix = f"{kind}_{number}" if number else kind
        of_node = None if place is None else replace(place, name=f"{prefix}_for_{place.name}")
        name = f"{prefix}_for_{node.name}" if of_node is None else of_node.node_name
        if name not in taken:
            return name, of_node
    raise AssertionError


def flat_values(values: Any) -> tuple[Any, ...]:
    """Return an operator's results one after another, lists flattened."""
    if not isinstance(values, list | tuple):
        return (values,)
    return tuple(leaf for value in values for leaf in flat_values(value))
