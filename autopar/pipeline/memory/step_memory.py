"""Step memory: the peak bytes of a rank in a step, from its schedule and each stage's timeline.

    stage = StageMemory.of(graph, mesh, roots, travel)
    peak_in_step(schedule, rank, {0: stage})

The bytes of a rank at one time are a sum over its stages of counts times sizes (`memory_items.py`).
The counts follow from the schedule alone, so they are computed once for all programs that run by
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost.bucket_prices import BucketConfig
from autopar.cost.footprint import distinct_saved_bytes
from autopar.cost.gather_groups import LIVE_GROUPS
from autopar.cost.saved_tensors import SavedBytesCache
from autopar.mesh import Mesh
from autopar.passes.stages import Stage
from autopar.pipeline.memory.memory_items import (
    ITEMS_OF_KIND,
    KINDS,
    READING,
    BytesByKind,
    MemoryItem,
)
from autopar.pipeline.memory.memory_timeline import MemoryTimeline
from autopar.pipeline.memory.moments import MemorySample
from autopar.pipeline.schedule import Action, Schedule
from autopar.strategies.node_info import info

Counts = NDArray[np.int64]  # by moment, stage of the rank, and MemoryItem
# The groups that F leaves alive, and those of B or I, numbered from `MemoryItem.LEFT` on: two at
# most, the one that was read last at the end.
Groups = tuple[tuple[int, ...], tuple[int, ...]]
NO_GROUPS: Groups = (), ()


@dataclass(frozen=True, eq=False)
class StageMemory:
    """Hold the bytes of each item of a stage, by kind, and of its parameters' gradients."""

    by_item: NDArray[np.float64]  # by MemoryItem and kind
    learned: Mapping[str, float]  # gradient bytes by placeholder, of all blocks it stands for
    at_once: frozenset[str]  # those of them that are computed by I
    host: float  # kept for backward on the host
    groups: Groups = NO_GROUPS

    @cached_property
    def sizes(self) -> NDArray[np.float64]:
        """Return the bytes of each MemoryItem."""
        return self.by_item.sum(1)

    def keeping(self, size: float) -> StageMemory:
        """Return the memory of a stage that keeps so many bytes more of each micro-batch."""
        by_item = self.by_item.copy()
        by_item[MemoryItem.KEPT, KINDS.index("activations")] += size
        return replace(self, by_item=by_item)

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        mesh: Mesh,
        roots: Sequence[fx.Node],
        travel: BucketConfig,
        *,
        is_split: bool = False,
        sends: Sequence[fx.Node] = (),
        statistics: Sequence[fx.Node] = (),
        known: SavedBytesCache | None = None,
    ) -> StageMemory:
        """Return the memory of a program whose backward begins at `roots`.

        `sends`, `statistics`: results that a stage sends, and that change buffers.
        """
        timeline = MemoryTimeline(graph, mesh, roots, travel, is_split=is_split, known=known)
        placeholders = graph.find_nodes(op="placeholder")
        received = [n for n in placeholders if info(n).origin[0] == "received"]
        early = sum(timeline.learned[name] for name in timeline.at_once)
        copies = timeline.copies
        left = list(dict.fromkeys((*copies.after_forward, *copies.after_backward)))
        sizes = {
            MemoryItem.KEPT: timeline.kept,
            MemoryItem.HALVES: timeline.halves,
            MemoryItem.RECEIVED: _local_bytes(received, mesh),
            MemoryItem.GIVEN: _local_bytes(filter(_is_differentiable, received), mesh),
            MemoryItem.RETURNED: _local_bytes(filter(_is_differentiable, sends), mesh),
            MemoryItem.SENT: timeline.left(sends),
            MemoryItem.STATISTICS: timeline.left(statistics),
            MemoryItem.EARLY: early,
            MemoryItem.LATE: timeline.gradients - early,
        } | {MemoryItem(MemoryItem.LEFT + at): copies.size(g) for at, g in enumerate(left)}
        by_item = np.zeros((len(MemoryItem), len(KINDS)))
        for kind, items in ITEMS_OF_KIND.items():
            by_item[items, KINDS.index(kind)] = [sizes.get(item, 0.0) for item in items]
        for shift in (0, READING):
            forward, backward = (
                [sample for sample in samples if (sample.copies is not None) == bool(shift)]
                for samples in (timeline.forward, timeline.backward)
            )
            by_item[MemoryItem.F + shift] = _peak_kinds(forward)
            first, runs = (MemoryItem.I, 2) if is_split else (MemoryItem.B, 4)
            by_item[first + shift : first + shift + runs] = _peaks_by_run(backward)[:runs]
        if is_split:
            by_item[MemoryItem.W : MemoryItem.W_ONLY + 1] = _peaks_by_run(timeline.weights)
            by_item[[MemoryItem.W, MemoryItem.W_ONLY], KINDS.index("gradients")] -= early
        host = distinct_saved_bytes(graph.nodes, timeline.once.on_host)
        of_forward, of_backward = (
            tuple(map(left.index, groups))
            for groups in (copies.after_forward, copies.after_backward)
        )
        groups = of_forward, of_backward
        return cls(by_item, timeline.learned, timeline.at_once, host, groups)

    @classmethod
    def of_stage(
        cls,
        stage: Stage,
        mesh: Mesh,
        travel: BucketConfig,
        *,
        is_split: bool,
    ) -> StageMemory:
        """Return the memory of a stage of a pipeline."""
        results: Sequence[fx.Node] = stage.graph.output_node().args[0]  # type: ignore[assignment]
        count = len(stage.sends)
        roots = [result for result, learns in zip(results, stage.learns_sent) if learns]
        if stage.loss is not None:
            roots.append(results[count + stage.loss])
        return cls.of(
            stage.graph,
            mesh,
            roots,
            travel,
            is_split=is_split,
            sends=results[:count],
            statistics=results[count + len(stage.outputs) :],
        )


def _local_bytes(values: Iterable[fx.Node], mesh: Mesh) -> float:
    return float(sum(info(value).type.local_bytes(mesh) for value in values))


def _is_differentiable(value: fx.Node) -> bool:
    return info(value).differentiable


def kinds_of(
    sample: MemorySample, *, is_later: bool = False, is_last: bool = False
) -> dict[str, float]:
    """Return the bytes of a sample by kind; later runs find gradients that the first allocated."""
    summed = (sample.last - sample.passing) * is_last
    return {
        "activations": sample.kept,
        "messages": 0.0,
        "gradients": sample.gradients * (not is_later) + summed,
        "gathered": sample.copies or 0.0,
        "working": sample.flowing + sample.more + sample.passing * is_last,
    }


def _peak_kinds(
    samples: Sequence[MemorySample], *, is_later: bool = False, is_last: bool = False
) -> list[float]:
    """Return the kinds of the sample with the most bytes."""
    kinds = ([*kinds_of(s, is_later=is_later, is_last=is_last).values()] for s in samples)
    return max(kinds, key=sum, default=[0.0] * len(KINDS))


def _peaks_by_run(samples: Sequence[MemorySample]) -> list[list[float]]:
    """Return the peaks of the first backward, the later ones, the last, and an only one."""
    runs = (False, False), (True, False), (True, True), (False, True)
    return [_peak_kinds(samples, is_later=later, is_last=last) for later, last in runs]


def peak_in_step(schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]) -> BytesByKind:
    """Return the most bytes that a rank allocates at one time, gradients among them."""
    counts = _counts(schedule, rank, stages)
    return peak_of(counts, [stages[stage] for stage in schedule.stages_on(rank)])


def peak_of(counts: Counts, held: Sequence[StageMemory]) -> BytesByKind:
    """Return the bytes of each kind at the moment of `counts` with the most bytes."""
    shared = shared_gradients(counts, held)
    bytes_ = np.einsum("msp,sp->m", counts, np.array([stage.sizes for stage in held])) - shared
    at = bytes_.argmax()
    kinds = np.einsum("sp,spk->k", counts[at], np.array([stage.by_item for stage in held]))
    kinds[KINDS.index("gradients")] -= shared[at]
    return dict(zip(KINDS, kinds.tolist()))


def shared_gradients(counts: Counts, held: Sequence[StageMemory]) -> NDArray[np.float64]:
    """Return, by moment, the gradient bytes of shared parameters that are counted repeatedly."""
    repeated = np.zeros(len(counts))
    for name in {name for stage in held for name in stage.learned}:
        users = [number for number, stage in enumerate(held) if name in stage.learned]
        if len(users) > 1:
            flags = [
                counts[:, at, MemoryItem.EARLY if name in held[at].at_once else MemoryItem.LATE]
                for at in users
            ]
            repeated += (np.sum(flags, 0) - np.max(flags, 0)) * held[users[0]].learned[name]
    return repeated


def counts_by_action(
    schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]
) -> list[Counts]:
    """Return the counts of a rank at the moments of each of its actions."""
    groups = tuple(stages[n].groups for n in range(schedule.stages))
    return _ItemCounter(schedule, rank, groups).by_action


def activation_peak_in_step(
    schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]
) -> float:
    """Return the most bytes that a rank keeps for backward."""
    items = [MemoryItem.KEPT, MemoryItem.RECEIVED, MemoryItem.HALVES]
    counts = _counts(schedule, rank, stages)[:, :, items]
    held = [stages[stage].sizes[items] for stage in schedule.stages_on(rank)]
    return float(np.einsum("msp,sp->m", counts, np.array(held)).max(initial=0.0))


def host_peak_in_step(schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]) -> float:
    """Return the most bytes that are kept for backward on the host."""
    host = np.array([stages[stage].host for stage in schedule.stages_on(rank)])
    return float((_counts(schedule, rank, stages)[:, :, MemoryItem.KEPT] @ host).max(initial=0.0))


def _counts(schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]) -> Counts:
    return step_counts(schedule, tuple(stages[n].groups for n in range(schedule.stages)))[rank]


@lru_cache(maxsize=64)
def step_counts(schedule: Schedule, groups: tuple[Groups, ...] = ()) -> tuple[Counts, ...]:
    """Return the counts of each rank at all moments that differ."""
    groups, short = groups or (NO_GROUPS,) * schedule.stages, schedule.of_sequences.short
    return tuple(_ItemCounter(short, rank, groups).rows for rank in range(short.ranks))


class _SentMessage(NamedTuple):
    """A message to another rank that may not have arrived."""

    receiver: int
    read_at: int  # the position of the action that reads it
    counter: int  # the place in `_now` at which it is counted


class _ItemCounter:
    """Count the items of one rank through its actions."""

    def __init__(self, schedule: Schedule, rank: int, groups: Sequence[Groups]) -> None:
        self.schedule, self.rank, self._groups = schedule, rank, groups
        self._left: list[int] = []  # the groups of copies that are alive, by place in `_now`
        local = schedule.stages_on(rank)
        self._first = {stage: number * len(MemoryItem) for number, stage in enumerate(local)}
        self._now = [0] * (len(local) * len(MemoryItem))
        self._in_flight: list[_SentMessage] = []
        # Messages by key, as `Schedule.messages` has them.
        self._read_at = schedule.readers
        # The position of the last action that computes gradients of a stage.
        gradients = schedule.gradient_positions[rank]
        self._last = {stage: positions[-1] for stage, positions in gradients.items()}
        self._due = {other: self._coming(other) for other in range(schedule.ranks) if other != rank}
        self._buffered: set[int] = set()  # keys of messages that have a buffer
        self._shape = -1, len(local), len(MemoryItem)

    @property
    def rows(self) -> Counts:
        """Return the counts at all moments that differ."""
        return np.array([*dict.fromkeys(moment for _, moment in self.moments())]).reshape(
            self._shape
        )

    @property
    def by_action(self) -> list[Counts]:
        """Return the counts at the moments of each action of the rank."""
        actions = groupby(self.moments(), key=itemgetter(0))
        return [np.array([m for _, m in moments]).reshape(self._shape) for _, moments in actions]

    def _coming(self, sender: int) -> Iterator[int]:
        """Yield the keys of the messages from another rank to this one, in their order."""
        for _, key, _ in self.schedule.messages[sender]:
            if key >= 0 and self._read_at.get(key, (-1,))[0] == self.rank:
                yield key

    def moments(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the moments in order, each with the position of its action; can be called once."""
        order = self.schedule.orders[self.rank]
        messages = self.schedule.messages[self.rank]
        for position, action in enumerate(order):
            waited, sent, _ = messages[position]
            self._expect(waited)
            if waited in self.schedule.senders:
                self._have_arrived(*self.schedule.senders[waited])
            if position + 1 < len(order):
                self._expect(messages[position + 1][0])
            for moment in self._do(action, position, sent):
                yield position, moment

    def _expect(self, key: int) -> None:
        """Allocate a buffer for a message, and for those that come before it."""
        if key < 0 or key in self._buffered or key not in self.schedule.senders:
            return
        sender, _ = self.schedule.senders[key]
        if sender == self.rank:
            return
        for due in self._due[sender]:
            self._take(due)
            if due == key:
                return

    def _take(self, key: int) -> None:
        """Count the buffer of a message."""
        self._buffered.add(key)
        rank, position = self._read_at[key]
        action = self.schedule.orders[rank][position]
        item = MemoryItem.RECEIVED if action.kind == "F" else MemoryItem.RETURNED
        self._add(action.stage, item, len(action.microbatches))

    def _have_arrived(self, by: int, position: int) -> None:
        """Free the messages that rank `by` had read before its action at `position`."""
        in_flight = []
        for message in self._in_flight:
            if message.receiver == by and message.read_at <= position:
                self._now[message.counter] -= 1
            else:
                in_flight.append(message)
        self._in_flight = in_flight

    def _add(self, stage: int, item: MemoryItem, count: int) -> None:
        self._now[self._first[stage] + item] += count

    def _running(self, stage: int, item: MemoryItem) -> tuple[int, ...]:
        at = self._first[stage] + item
        return (*self._now[:at], self._now[at] + 1, *self._now[at + 1 :])

    def _has(self, stage: int, item: MemoryItem) -> bool:
        return bool(self._now[self._first[stage] + item])

    def _do(self, action: Action, position: int, sent: int) -> Iterator[tuple[int, ...]]:
        stage, kind = action.stage, action.kind
        is_split = stage in self.schedule.split_stages
        for number in range(len(action.microbatches)):
            is_last = position == self._last.get(stage) and number == len(action.microbatches) - 1
            if kind == "F":
                yield from self._run(stage, MemoryItem.F)
                self._add(stage, MemoryItem.STATISTICS, 1)
                if self.schedule.goes_back:
                    self._add(stage, MemoryItem.KEPT, 1)
                elif stage:
                    self._add(stage, MemoryItem.RECEIVED, -1)
            if kind in ("B", "I"):
                self._add(stage, MemoryItem.KEPT, -1)
                if is_split:
                    is_later = self._has(stage, MemoryItem.EARLY)
                    yield from self._run(stage, MemoryItem.I_AGAIN if is_later else MemoryItem.I)
                    self._come(stage, MemoryItem.EARLY)
                else:
                    is_later = self._has(stage, MemoryItem.LATE)
                    item = MemoryItem.B.of_run(is_later=is_later, is_last=is_last)
                    yield from self._run(stage, item)
                    self._come(stage, MemoryItem.EARLY, MemoryItem.LATE)
                self._add(stage, MemoryItem.HALVES, is_split)
                if stage:
                    self._add(stage, MemoryItem.RECEIVED, -1)
            if kind == "W" or (kind == "B" and is_split):
                self._add(stage, MemoryItem.HALVES, -1)
                gives = kind == "B" and stage > 0
                self._add(stage, MemoryItem.GIVEN, gives)
                is_later = self._has(stage, MemoryItem.LATE)
                item = MemoryItem.W.of_run(is_later=is_later, is_last=is_last)
                yield self._running(stage, item)
                self._add(stage, MemoryItem.GIVEN, -gives)
                self._come(stage, MemoryItem.LATE)
            if sent >= 0 and sent in self._read_at:
                self._send(action, sent)
        if kind in ("B", "I") and stage < self.schedule.stages - 1:
            self._add(stage, MemoryItem.RETURNED, -len(action.microbatches))
        yield tuple(self._now)

    def _come(self, stage: int, *items: MemoryItem) -> None:
        """Count gradients of parameters as allocated from now on."""
        for item in items:
            self._now[self._first[stage] + item] = 1

    def _run(self, stage: int, item: MemoryItem) -> Iterator[tuple[int, ...]]:
        """Yield a running action beside the copies that are left, then with those that it reads."""
        yield self._running(stage, item)
        first = self._first[stage] + MemoryItem.LEFT
        groups = [first + number for number in self._groups[stage][item != MemoryItem.F]]
        if not groups:
            return
        room = LIVE_GROUPS - len(groups)
        others = [group for group in self._left if group not in groups]
        self._put(others[len(others) - room :])
        yield self._running(stage, MemoryItem(item + READING))
        self._put([*self._left, *groups])

    def _put(self, left: list[int]) -> None:
        """Set the groups of copies that are alive."""
        for group in self._left:
            self._now[group] = 0
        for group in left:
            self._now[group] = 1
        self._left = left

    def _send(self, action: Action, key: int) -> None:
        """Count one of the micro-batches of a message as sent."""
        receiver, read_at = self._read_at[key]
        if receiver == self.rank:
            reader = self.schedule.orders[receiver][read_at]
            item = MemoryItem.RECEIVED if reader.kind == "F" else MemoryItem.RETURNED
            self._add(reader.stage, item, 1)
            return
        item = MemoryItem.SENT if action.kind == "F" else MemoryItem.GIVEN
        self._add(action.stage, item, 1)
        counter = self._first[action.stage] + item
        self._in_flight.append(_SentMessage(receiver, read_at, counter))
