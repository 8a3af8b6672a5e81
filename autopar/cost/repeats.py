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
from itertools import groupby
from typing import TypeVar

import numpy as np
from torch import fx

from autopar.strategies.node_info import Region, info

LEAST_BLOCKS = 4
Known = TypeVar("Known")


@dataclass(frozen=True)
class Repeats:
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

    def moved_to(self, graph: fx.Graph) -> Repeats:
        """The same of a copy of the graph."""
        to = {node.name: node for node in graph.nodes}
        return Repeats(
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
    def of(cls, graph: fx.Graph) -> Repeats:
        """The longest run of a program."""
        calls = [node for node in graph.nodes if node.op == "call_function"]
        place = {node: at for at, node in enumerate(calls)}
        comparison = _Comparison(place)
        numbers = comparison.numbers(calls)
        period = _period(numbers)
        if not period:
            return cls()
        same = numbers[period:] == numbers[:-period]
        for at in np.flatnonzero(same).tolist():
            same[at] = comparison.are_alike(calls[at], calls[at + period])
        start, length = _longest(same)
        count = length // period + 1
        if count < LEAST_BLOCKS:
            return cls()
        twins = dict[fx.Node, fx.Node]()
        first = start + period
        for at in range(first + period, start + (count - 1) * period):
            node, twin = calls[at], calls[first + (at - first) % period]
            twins[node] = twin
            for own, others in zip(node.all_input_nodes, twin.all_input_nodes):
                if own.op == "placeholder" and own is not others:
                    twins[own] = others
        return cls(calls, start, period, start + count * period, twins, place)


NONE = Repeats()


class _Comparison:
    """Says which calls of a program are equal."""

    def __init__(self, place: dict[fx.Node, int]) -> None:
        self._place = place
        self._first: dict[Region, int] = {}  # the place of the first call of each region

    def numbers(self, calls: Sequence[fx.Node]) -> np.ndarray:
        """A number for what each call is, wherever it stands."""
        known: dict[Hashable, int] = {}
        return np.array([known.setdefault(self._facts(node), len(known)) for node in calls])

    def _facts(self, node: fx.Node) -> Hashable:
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

    def are_alike(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two calls that are the same also stand to others in the same way."""
        if self._readers(one, one) != self._readers(other, other):
            return False
        read, others = one.all_input_nodes, other.all_input_nodes
        return len(read) == len(others) and all(
            self._is_same(value, one, another, other)
            for value, another in zip(read, others)
            if value is not another
        )

    def _is_same(self, value: fx.Node, one: fx.Node, another: fx.Node, other: fx.Node) -> bool:
        if value.op == "call_function":
            back = self._place[one] - self._place[value]
            return self._place.get(another) == self._place[other] - back
        if another.op != "placeholder" or _held(value) != _held(another):
            return False
        return self._readers(value, one) == self._readers(another, other)

    def _readers(self, value: fx.Node, node: fx.Node) -> list[int]:
        """How far after a call those stand that read a value; the end of a program is far."""
        at = self._place[node]
        return [self._place.get(user, 2 * len(self._place)) - at for user in value.users]


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


def _period(numbers: np.ndarray) -> int:
    """After how many calls most of those come again that come at equal distances; 0: never."""
    order = np.argsort(numbers, kind="stable")
    gaps, is_next = np.diff(order), np.diff(numbers[order]) == 0
    covered: dict[int, int] = {}
    for _, row in groupby(
        zip(numbers[order][1:].tolist(), gaps.tolist(), is_next.tolist()), key=lambda one: one[0]
    ):
        own = [gap for _, gap, is_same in row if is_same]
        if len(own) >= LEAST_BLOCKS - 1:
            middle = sorted(own)[len(own) // 2]
            if own.count(middle) * 4 >= len(own) * 3:
                covered[middle] = covered.get(middle, 0) + len(own)
    return max(covered, key=lambda gap: covered[gap], default=0)


def _longest(same: np.ndarray) -> tuple[int, int]:
    """Where the longest row of true ones starts, and how long it is."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(starts):
        return 0, 0
    at = int(lengths.argmax())
    return int(starts[at]), int(lengths[at])
