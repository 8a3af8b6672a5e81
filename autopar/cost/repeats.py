"""Repeats: the equal blocks of a rewritten program, of which one is looked at for all.

    repeats = Repeats.of(graph)
    repeats.twin(node)             # the node that stands for it, in a block among others like it
    repeats.beside(other, node)    # what stands to `node` as `other` does to its twin

Two calls are equal when all that prices and bytes follow from is: what they are, and where the
calls that they read, and those that read them, stand from there. Parameters are as those who read
them. What is known of a node from its neighbours is known of its twin's, as long as these are
within a block: the first and last block stand for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from autopar.program.rows import longest_row
from autopar.strategies.node_info import RecomputeRegion, info

Known = TypeVar("Known")


@dataclass(frozen=True)
class EqualBlocks:
    """A run of equal blocks of a program; of none, every node stands for itself."""

    calls: Sequence[fx.Node] = ()  # in order
    start: int = 0  # the place of the first call of a block
    period: int = 0  # so many calls later comes the next block
    end: int = 0
    twins: dict[fx.Node, fx.Node] = field(default_factory=dict)
    place: dict[fx.Node, int] = field(default_factory=dict)

    def twin(self, node: fx.Node) -> fx.Node:
        """The node of which the same is known."""
        return self.twins.get(node, node)

    def along(self, ask: Callable[[fx.Node], Known]) -> Callable[[fx.Node], Known]:
        """What is known of a node from its neighbours, asked once for those that repeat."""
        known: dict[fx.Node, Known] = {}

        def find(node: fx.Node) -> Known:
            twin = self.twins.get(node, node)
            if twin not in known:
                known[twin] = ask(twin)
            return known[twin]

        return find

    def before(self, node: fx.Node) -> fx.Node | None:
        """The same call one block earlier, if both are in blocks among others like them."""
        at = self.place.get(node, -1)
        is_inside = self.start + 2 * self.period <= at < self.end - self.period
        return self.calls[at - self.period] if is_inside else None

    def moved_to(self, graph: fx.Graph) -> EqualBlocks:
        """The same of a copy of the graph."""
        to = {node.name: node for node in graph.nodes}
        return EqualBlocks(
            [to[node.name] for node in self.calls],
            self.start,
            self.period,
            self.end,
            {to[node.name]: to[twin.name] for node, twin in self.twins.items()},
            {to[node.name]: at for node, at in self.place.items()},
        )

    def beside(self, other: fx.Node, node: fx.Node) -> fx.Node:
        """The call near `node` that is what `other` is near its twin; all blocks may read one that
        stands before them."""
        at = self.place.get(other, -1)
        if at < self.start:
            return other
        return self.calls[at + self.place[node] - self.place[self.twins[node]]]

    @classmethod
    def of(cls, graph: fx.Graph) -> EqualBlocks:
        """The longest run of a program."""
        calls = [node for node in graph.nodes if node.op == "call_function"]
        place = {node: at for at, node in enumerate(calls)}
        row = longest_row(calls, _Facts(place), _held)
        if row is None:
            return cls()
        twins = row.twins(row.start + row.period, row.end - row.period)
        return cls(calls, row.start, row.period, row.end, twins, place)


NO_EQUAL_BLOCKS = EqualBlocks()


class _Facts:
    """Says what each call is, wherever it stands."""

    def __init__(self, place: dict[fx.Node, int]) -> None:
        self._place = place
        self._first: dict[RecomputeRegion, int] = {}  # the place of the first call of each region

    def __call__(self, node: fx.Node) -> Hashable:
        known = info(node)
        region = known.region
        if known.away or (region is not None and region.how.keep != "device"):
            return node  # what is kept elsewhere has names
        about: tuple[Hashable, ...] = ()
        if region is not None:
            at = self._place[node]
            about = at - self._first.setdefault(region, at), region.how, region.is_random
        is_plain = known.calls or known.movement is not None
        return (
            node.target,
            # Calls that are alike share these.
            tuple(map(id, known.calls)),
            None if is_plain else _given(node),
            known.type,
            (known.movement, known.alone, known.strategy, id(known.rule)),
            known.start_of and (known.start_of.name, known.start_of.strategy),
            known.joint and (known.joint.name, known.joint.strategy),
            (known.saved, known.saves_output, known.differentiable, known.learns, known.on_host),
            (known.pending, known.remade, known.dropped),
            about,
        )


def _given(node: fx.Node) -> str:
    """What a call is given, whatever the names of the tensors."""
    return repr(fx.map_arg((node.args, node.kwargs), lambda value: "%"))


def _held(placeholder: fx.Node) -> Hashable:
    """What is known of a parameter, or anything else that a program is given."""
    known = info(placeholder)
    return (
        known.type,
        known.places,
        known.origin[0],
        (known.sync, known.pending, known.learns, known.differentiable),
        (known.state_bytes, known.on_host, known.parts, bool(known.away)),
    )
