"""Step memory: what a rank makes at most in a step, from its schedule and the course of each stage.

    stage = StageMemory.of(graph, mesh, roots, travel)
    most_in_step(schedule, rank, {0: stage})

What a rank holds at a time is a sum over its stages of counts times bytes: of so many micro-batches
the activations, so many buffers of messages, and what the action takes that runs. The counts follow
from the schedule alone, and each of its moments is looked at once for all that run by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cached_property, lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost.bucket_prices import BucketConfig
from autopar.cost.footprint import distinct_saved_bytes
from autopar.cost.gather_groups import LIVE_GROUPS
from autopar.cost.saved_tensors import SavedBytesCache
from autopar.mesh import Mesh
from autopar.passes.stages import Stage
from autopar.pipeline.memory.memory_timeline import ProgramCourse
from autopar.pipeline.memory.moments import Moment
from autopar.pipeline.schedule import Action, Schedule
from autopar.strategies.node_info import info

Counts = NDArray[np.int64]  # by moment, stage of the rank, and Part


class Part(IntEnum):
    """What a stage holds some of, and what it does."""

    KEPT = 0  # activations of a micro-batch, from the end of F to B or I
    RECEIVED = auto()  # an activation from the stage before, until B or I is done (F in a call)
    RETURNED = auto()  # a gradient from the stage after, until B or I is done
    SENT = auto()  # an activation that may not have arrived
    GIVEN = auto()  # a gradient that may not have arrived
    HALVES = auto()  # what the gradients of weights are made of, from I to W
    STATISTICS = auto()  # what buffers change by, to the end of the step
    EARLY = auto()  # whether there are those gradients of parameters that I makes
    LATE = auto()  # and all others
    # Whether there are groups of copies that live a use, of those that F, B or I leave here.
    LEFT = auto()
    LEFT_1 = auto()
    LEFT_2 = auto()
    LEFT_3 = auto()
    F = auto()  # it runs; up to `I_AGAIN`, no copy has come that it reads
    B = auto()  # the first, in which gradients of parameters come
    B_AGAIN = auto()
    B_LAST = auto()  # the last, in which they are summed
    B_ONLY = auto()  # the first and last
    I = auto()  # noqa: E741
    I_AGAIN = auto()
    F_READING = auto()  # the same with the copies that it reads
    B_READING = auto()
    B_AGAIN_READING = auto()
    B_LAST_READING = auto()
    B_ONLY_READING = auto()
    I_READING = auto()
    I_AGAIN_READING = auto()
    W = auto()
    W_AGAIN = auto()
    W_LAST = auto()
    W_ONLY = auto()


READING = Part.F_READING - Part.F
# What these are, for people; a moment of what runs is some of each.
KINDS = ("activations", "messages", "gradients", "gathered", "working")
_KIND_OF = {
    "activations": [Part.KEPT, Part.HALVES, Part.STATISTICS],
    "messages": [Part.RECEIVED, Part.RETURNED, Part.SENT, Part.GIVEN],
    "gradients": [Part.EARLY, Part.LATE],
    "gathered": [*map(Part, range(Part.LEFT, Part.F))],
}
Held = Mapping[str, float]  # bytes by kind
# The groups that F leaves here, and those that B or I leave, by number from `LEFT` on: two at most,
# the one that was read last at the end.
Groups = tuple[tuple[int, ...], tuple[int, ...]]
NO_GROUPS: Groups = (), ()


@dataclass(frozen=True, eq=False)
class StageMemory:
    """The bytes of each part of a stage, by kind, and of the gradients of its parameters."""

    made: NDArray[np.float64]  # by Part and kind
    learned: Mapping[str, float]  # gradients by placeholder, of all it stands for
    at_once: frozenset[str]  # those of them that are there after I
    host: float  # kept for backward on the host
    groups: Groups = NO_GROUPS

    @cached_property
    def sizes(self) -> NDArray[np.float64]:
        """The bytes of each Part."""
        return self.made.sum(1)

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        mesh: Mesh,
        roots: Sequence[fx.Node],
        travel: BucketConfig,
        is_split: bool = False,
        sends: Sequence[fx.Node] = (),
        statistics: Sequence[fx.Node] = (),
        times: int | None = None,
        known: SavedBytesCache | None = None,
    ) -> StageMemory:
        """Of a program whose backward begins at `roots`; in a pipeline it sends some results.
        `times`: as many are the blocks that one stands for, or as its nodes say."""
        course = ProgramCourse(graph, mesh, roots, travel, is_split, times, known)
        given = [n for n in graph.find_nodes(op="placeholder") if info(n).origin[0] == "received"]
        early = sum(course.learned[name] for name in course.at_once)

        def size(values: Sequence[fx.Node], learn: bool = False) -> float:
            learning = [v for v in values if info(v).differentiable or not learn]
            return float(sum(info(value).type.local_bytes(mesh) for value in learning))

        sizes = np.zeros(len(Part))
        sizes[Part.KEPT], sizes[Part.HALVES] = course.kept, course.halves
        sizes[Part.RECEIVED], sizes[Part.GIVEN] = size(given), size(given, learn=True)
        sizes[Part.RETURNED] = size(sends, learn=True)
        sizes[Part.SENT], sizes[Part.STATISTICS] = course.left(sends), course.left(statistics)
        sizes[Part.EARLY], sizes[Part.LATE] = early, course.gradients - early
        passing = course.passing
        left = list(dict.fromkeys((*passing.after_forward, *passing.after_backward)))
        sizes[Part.LEFT : Part.LEFT + len(left)] = [passing.size(group) for group in left]
        made = np.zeros((len(Part), len(KINDS)))
        for kind, parts in _KIND_OF.items():
            made[parts, KINDS.index(kind)] = sizes[parts]
        for more in (0, READING):
            forward, backward = (
                [one for one in moments if (one.copies is not None) == bool(more)]
                for moments in (course.forward, course.backward)
            )
            made[Part.F + more] = _most(forward)
            if is_split:
                made[Part.I + more : Part.I_AGAIN + more + 1] = _running(backward)[:2]
            else:
                made[Part.B + more : Part.B_ONLY + more + 1] = _running(backward)
        if is_split:
            made[Part.W : Part.W_ONLY + 1] = _running(course.weights)
            made[[Part.W, Part.W_ONLY], KINDS.index("gradients")] -= early
        host = distinct_saved_bytes(graph.nodes, course.once.on_host, times)
        about = made, course.learned, course.at_once, host
        after = passing.after_forward, passing.after_backward
        of_forward, of_backward = (tuple(left.index(one) for one in groups) for groups in after)
        return cls(*about, (of_forward, of_backward))

    @classmethod
    def of_stage(
        cls,
        stage: Stage,
        mesh: Mesh,
        is_split: bool,
        travel: BucketConfig,
        times: int | None = None,
    ) -> StageMemory:
        """Of a stage of a pipeline."""
        results: Sequence[fx.Node] = stage.graph.output_node().args[0]  # type: ignore[assignment]
        count = len(stage.sends)
        roots = [one for one, learns in zip(results, stage.learns_sent) if learns]
        if stage.loss is not None:
            roots.append(results[count + stage.loss])
        about = stage.graph, mesh, roots, travel, is_split
        statistics = results[count + len(stage.outputs) :]
        return cls.of(*about, results[:count], statistics, times)


def kinds_of(moment: Moment, again: bool = False, last: bool = False) -> dict[str, float]:
    """The bytes of a moment by kind, besides gradients that are there from the first run."""
    return {
        "activations": moment.kept,
        "messages": 0.0,
        "gradients": moment.gradients * (not again) + (moment.last - moment.passing) * last,
        "gathered": moment.copies or 0.0,
        "working": moment.flowing + moment.more + moment.passing * last,
    }


def _most(moments: Sequence[Moment], again: bool = False, last: bool = False) -> list[float]:
    """The kinds of the moment at which that is most."""
    kinds = ([*kinds_of(moment, again, last).values()] for moment in moments)
    return max(kinds, key=sum, default=[0.0] * len(KINDS))


def _running(moments: Sequence[Moment]) -> list[list[float]]:
    """The most of a run backward: of the first, the next ones, the last and the only one."""
    runs = (False, False), (True, False), (True, True), (False, True)
    return [_most(moments, again, last) for again, last in runs]


def most_in_step(schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]) -> Held:
    """The most bytes that a rank makes at one time, gradients of parameters among them."""
    counts = _counts(schedule, rank, stages)
    return most_of(counts, [stages[stage] for stage in schedule.stages_on(rank)])


def most_of(counts: Counts, held: Sequence[StageMemory]) -> Held:
    """The bytes of each kind at that of some moments at which a rank takes most."""
    shared = shared_gradients(counts, held)
    bytes_ = np.einsum("msp,sp->m", counts, np.array([stage.sizes for stage in held])) - shared
    at = bytes_.argmax()
    kinds = np.einsum("sp,spk->k", counts[at], np.array([stage.made for stage in held]))
    kinds[KINDS.index("gradients")] -= shared[at]
    return dict(zip(KINDS, kinds.tolist()))


def shared_gradients(counts: Counts, held: Sequence[StageMemory]) -> NDArray[np.float64]:
    """By moment, the bytes of gradients that are counted more than once: a parameter of several
    stages has one."""
    found = np.zeros(len(counts))
    for name in {name for stage in held for name in stage.learned}:
        users = [number for number, stage in enumerate(held) if name in stage.learned]
        if len(users) > 1:
            flags = [
                counts[:, at, Part.EARLY if name in held[at].at_once else Part.LATE] for at in users
            ]
            found += (np.sum(flags, 0) - np.max(flags, 0)) * held[users[0]].learned[name]
    return found


def counts_by_action(
    schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]
) -> list[Counts]:
    """What a rank holds of its stages at the moments of each of its actions."""
    groups = tuple(stages[n].groups for n in range(schedule.stages))
    return _Counting(schedule, rank, groups).by_action


def kept_in_step(schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]) -> float:
    """The most of that which is kept for backward."""
    parts = [Part.KEPT, Part.RECEIVED, Part.HALVES]
    counts = _counts(schedule, rank, stages)[:, :, parts]
    held = [stages[stage].sizes[parts] for stage in schedule.stages_on(rank)]
    return float(np.einsum("msp,sp->m", counts, np.array(held)).max(initial=0.0))


def host_in_step(schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]) -> float:
    """The most bytes that are kept for backward on the host."""
    host = np.array([stages[stage].host for stage in schedule.stages_on(rank)])
    return float((_counts(schedule, rank, stages)[:, :, Part.KEPT] @ host).max(initial=0.0))


def _counts(schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]) -> Counts:
    return step_counts(schedule, tuple(stages[n].groups for n in range(schedule.stages)))[rank]


@lru_cache(maxsize=64)
def step_counts(schedule: Schedule, groups: tuple[Groups, ...] = ()) -> tuple[Counts, ...]:
    """Of each rank, what it holds of its stages at all moments that differ."""
    given = groups or (NO_GROUPS,) * schedule.stages
    return tuple(_Counting(schedule, rank, given).rows for rank in range(schedule.ranks))


def _run_of(first: Part, is_again: bool, is_last: bool) -> Part:
    """Of the four parts from that of the first run."""
    return Part(first + (is_again + is_last if is_again else 3 * is_last))


class _Counting:
    """Goes through the actions of one rank."""

    def __init__(self, schedule: Schedule, rank: int, groups: Sequence[Groups]) -> None:
        self.schedule, self.rank, self._groups = schedule, rank, groups
        self._left: list[int] = []  # the groups of copies that are here, by place in `_now`
        own = schedule.stages_on(rank)
        self._first = {stage: number * len(Part) for number, stage in enumerate(own)}
        self._now = [0] * (len(own) * len(Part))
        self._sent: list[tuple[int, int, int, int]] = []  # to, read there at, where, how many
        # Messages by key, as `Schedule.messages` has them.
        self._read_at = {
            waited: (at, position)
            for at, row in enumerate(schedule.messages)
            for position, (waited, _, _) in enumerate(row)
            if waited >= 0
        }
        # Where the last gradients of each stage are made.
        made = schedule.gradient_positions[rank]
        self._last = {stage: positions[-1] for stage, positions in made.items()}
        self._due = {other: self._coming(other) for other in range(schedule.ranks) if other != rank}
        self._here: set[int] = set()  # those of which there is a buffer
        self._shape = -1, len(own), len(Part)

    @property
    def rows(self) -> Counts:
        """All moments that differ."""
        return np.array([*dict.fromkeys(moment for _, moment in self.moments())]).reshape(
            self._shape
        )

    @property
    def by_action(self) -> list[Counts]:
        """The moments of each action of the rank."""
        found = groupby(self.moments(), key=lambda one: one[0])
        return [np.array([m for _, m in some]).reshape(self._shape) for _, some in found]

    def _coming(self, sender: int) -> Iterator[int]:
        """The keys of what another rank sends here, in that order."""
        for _, key, _ in self.schedule.messages[sender]:
            if key >= 0 and self._read_at.get(key, (-1,))[0] == self.rank:
                yield key

    def moments(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """In order, each with the position of its action; to be asked for once."""
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
        """A buffer is made for a message, and for those that come before it."""
        if key < 0 or key in self._here or key not in self.schedule.senders:
            return
        sender, _ = self.schedule.senders[key]
        if sender == self.rank:
            return
        for due in self._due[sender]:
            self._take(due)
            if due == key:
                return

    def _take(self, key: int) -> None:
        """A message is here, or a buffer for it."""
        self._here.add(key)
        rank, position = self._read_at[key]
        action = self.schedule.orders[rank][position]
        part = Part.RECEIVED if action.kind == "F" else Part.RETURNED
        self._add(action.stage, part, len(action.microbatches))

    def _have_arrived(self, by: int, position: int) -> None:
        """What another rank had read before it sent what has come from there."""
        left = []
        for one in self._sent:
            to, read_at, where, count = one
            if to == by and read_at <= position:
                self._now[where] -= count
            else:
                left.append(one)
        self._sent = left

    def _add(self, stage: int, part: Part, count: int) -> None:
        self._now[self._first[stage] + part] += count

    def _running(self, stage: int, part: Part) -> tuple[int, ...]:
        at = self._first[stage] + part
        return (*self._now[:at], self._now[at] + 1, *self._now[at + 1 :])

    def _has(self, stage: int, part: Part) -> bool:
        return bool(self._now[self._first[stage] + part])

    def _do(self, action: Action, position: int, sent: int) -> Iterator[tuple[int, ...]]:
        stage, kind = action.stage, action.kind
        is_split = stage in self.schedule.split_stages
        for number in range(len(action.microbatches)):
            is_last = position == self._last.get(stage) and number == len(action.microbatches) - 1
            if kind == "F":
                yield from self._run(stage, Part.F)
                self._add(stage, Part.STATISTICS, 1)
                if self.schedule.goes_back:
                    self._add(stage, Part.KEPT, 1)
                elif stage:
                    self._add(stage, Part.RECEIVED, -1)
            if kind in ("B", "I"):
                self._add(stage, Part.KEPT, -1)
                if is_split:
                    part = Part.I_AGAIN if self._has(stage, Part.EARLY) else Part.I
                else:
                    part = _run_of(Part.B, self._has(stage, Part.LATE), is_last)
                yield from self._run(stage, part)
                self._come(stage, *([Part.EARLY] if is_split else [Part.EARLY, Part.LATE]))
                self._add(stage, Part.HALVES, is_split)
                if stage:
                    self._add(stage, Part.RECEIVED, -1)
            if kind == "W" or (kind == "B" and is_split):
                self._add(stage, Part.HALVES, -1)
                given = kind == "B" and stage > 0
                self._add(stage, Part.GIVEN, given)
                yield self._running(stage, _run_of(Part.W, self._has(stage, Part.LATE), is_last))
                self._add(stage, Part.GIVEN, -given)
                self._come(stage, Part.LATE)
            if sent >= 0 and sent in self._read_at:
                self._send(action, sent)
        if kind in ("B", "I") and stage < self.schedule.stages - 1:
            self._add(stage, Part.RETURNED, -len(action.microbatches))
        yield tuple(self._now)

    def _come(self, stage: int, *parts: Part) -> None:
        """Gradients of parameters are there from now on."""
        for part in parts:
            self._now[self._first[stage] + part] = 1

    def _run(self, stage: int, part: Part) -> Iterator[tuple[int, ...]]:
        """First beside what copies are left here. Those that come take their room."""
        yield self._running(stage, part)
        first = self._first[stage] + Part.LEFT
        own = [first + number for number in self._groups[stage][part != Part.F]]
        if not own:
            return
        room = LIVE_GROUPS - len(own)
        beside = [one for one in self._left if one not in own]
        self._put(beside[len(beside) - room :])
        yield self._running(stage, Part(part + READING))
        self._put([*self._left, *own])

    def _put(self, left: list[int]) -> None:
        """Let these groups of copies be here."""
        for one in self._left:
            self._now[one] = 0
        for one in left:
            self._now[one] = 1
        self._left = left

    def _send(self, action: Action, key: int) -> None:
        """One of the micro-batches of a message leaves."""
        to, read_at = self._read_at[key]
        if to == self.rank:
            there = self.schedule.orders[to][read_at]
            part = Part.RECEIVED if there.kind == "F" else Part.RETURNED
            self._add(there.stage, part, 1)
            return
        part = Part.SENT if action.kind == "F" else Part.GIVEN
        self._add(action.stage, part, 1)
        self._sent.append((to, read_at, self._first[action.stage] + part, 1))
