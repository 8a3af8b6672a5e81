"""Record: the questions and answers so far, the best answer, and what another has to beat.

    record = Record()
    record.add(entry)
    record.fastest              # seconds of the fastest way that fits
    record.cutoff(question)     # what this question has to beat: a simpler way may take a bit more
    record.by_simplicity()      # of what is about as fast the simplest first, then the others

A plan is worth a further axis, cut states, or states on a host only if that gains enough, or makes
it fit: 1% for what makes it harder to understand, 10% for what keeps something on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autopar.candidates.axis_roles import axis_roles
from autopar.candidates.candidate import Candidate
from autopar.mesh import Mesh
from autopar.planner.question import Found, Question, Refused, TooLarge, TooSlow
from autopar.planner.rules import SIMPLER, SearchEntry
from autopar.search.search_report import ConsideredMesh
from autopar.states import BUFFER_BYTES
from autopar.text.units import bytes_text

EQUAL = 1e-9  # relative: what differs by less is as fast
_A_FURTHER_AXIS = 4  # times the seconds of an answer
_OF_LONGEST = 0.5  # of the seconds of the longest answer
HOSTED = 0.1  # relative: what a plan that keeps something on the host must gain


@dataclass
class Record:
    """The questions about one request with their answers."""

    to_beat: float = math.inf  # seconds that were found elsewhere
    wanted: int = 1  # how many ways that differ
    asked: list[SearchEntry] = field(default_factory=list)  # in order
    ruled_out: dict[Question, float] = field(default_factory=dict)  # with their bounds, unasked
    found: list[SearchEntry] = field(default_factory=list)  # the fastest first

    def add(self, entry: SearchEntry) -> None:
        """Keep a question with its answer."""
        self.asked.append(entry)
        if isinstance(entry.answer, Found):
            self.found.append(entry)
            self.found.sort(key=_seconds)

    @property
    def has_some(self) -> bool:
        """Return whether some way fits, here or elsewhere."""
        return bool(self.found) or self.to_beat < math.inf

    @property
    def was_refused(self) -> bool:
        """Return whether some way cannot be taken, whatever is fastest."""
        return any(isinstance(entry.answer, TooLarge | Refused) for entry in self.asked)

    @property
    def fastest(self) -> float:
        """Return the seconds of the fastest way that fits."""
        return min([self.to_beat, *map(_seconds, self.found[:1])])

    def cutoff(self, question: Question) -> float:
        """Return the seconds that a question has to beat to be worth it."""
        costs = sorted({_seconds(entry) * _handicap(entry) for entry in self.found})
        best = min([self.to_beat, *costs[self.wanted - 1 : self.wanted]])
        simplest = min((complexity(_candidate(entry)) for entry in self._nearly_best()), default=0)
        is_simpler = complexity(question) < simplest
        return best * (1 + SIMPLER if is_simpler else 1 - EQUAL) / handicap(question)

    def _nearly_best(self) -> list[SearchEntry]:
        """Return what is as good as the best, but for what a simpler plan may take more."""
        costs = [_seconds(entry) * _handicap(entry) for entry in self.found]
        limit = min(costs, default=0.0) * (1 + SIMPLER)
        return [entry for entry, cost in zip(self.found, costs) if cost <= limit]

    def by_simplicity(self) -> Iterator[SearchEntry]:
        """Yield the simplest of what is about as good as the best, then the others."""
        near = self._nearly_best()
        yield from sorted(near, key=lambda entry: (complexity(_candidate(entry)), _seconds(entry)))
        yield from (entry for entry in self.found if entry not in near)

    def priced(self) -> list[Candidate]:
        """Return the ways whose program was made, in the order in which they were asked about."""
        ways = [
            getattr(entry.answer, "candidate", getattr(entry.answer, "way", None))
            for entry in self.asked
        ]
        return [way for way in ways if isinstance(way, Candidate)]

    @property
    def least(self) -> float:
        """Return the seconds that all ruled-out questions take at least."""
        slow = (entry.answer.bound for entry in self.asked if isinstance(entry.answer, TooSlow))
        return self._bound(min([*slow, *self.ruled_out.values()], default=math.inf))

    def _bound(self, seconds: float) -> float:
        """Return a bound, raised to the seconds of the fastest way where they differ only by the
        tolerance of comparisons."""
        return max(seconds, self.fastest) if seconds >= self.fastest * (1 - 2 * EQUAL) else seconds

    def considered(self, chosen: Question, mesh: Mesh) -> tuple[ConsideredMesh, ...]:
        """Return what is known of each mesh with the stages and micro-batches of a question, whose
        `mesh` was chosen. Axes are named by what they do, where that is known."""
        size = chosen.stages, chosen.microbatches
        meshes: dict[Mesh, tuple[ConsideredMesh, SearchEntry]] = {}
        for entry in self.asked:
            if (entry.question.stages, entry.question.microbatches) == size:
                known = self._considered(entry)
                before, _ = meshes.setdefault(known.mesh, (known, entry))
                if (before.why, before.seconds or math.inf) > (
                    known.why,
                    known.seconds or math.inf,
                ):
                    meshes[known.mesh] = known, entry
        rows = {key: replace(known, mesh=_named(entry)) for key, (known, entry) in meshes.items()}
        if mesh.shape == chosen.meshes[0].shape and chosen.meshes[0] in rows:
            rows[chosen.meshes[0]] = replace(rows[chosen.meshes[0]], mesh=mesh)
        for question, bound in self.ruled_out.items():
            if (question.stages, question.microbatches) == size:
                other = question.meshes[0]
                least = self._bound(bound)
                rows.setdefault(other, ConsideredMesh(other, least, None, "takes at least that"))
        return tuple(rows.values())

    def _considered(self, entry: SearchEntry) -> ConsideredMesh:
        answer, mesh = entry.answer, entry.question.meshes[0]
        if isinstance(answer, Found):
            return ConsideredMesh(mesh, answer.seconds, answer.candidate.memory.peak)
        if isinstance(answer, TooSlow):
            least = self._bound(answer.bound)
            return ConsideredMesh(mesh, least, None, "takes at least that")
        if isinstance(answer, TooLarge):
            least = answer.least_bytes
            return ConsideredMesh(mesh, None, least, f"needs at least {bytes_text(least, 4)}")
        return ConsideredMesh(mesh, None, None, str(answer))


class AnswerCosts:
    """Expects how long answers take, by those to questions about meshes with as many axes."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def note(self, question: Question, seconds: float) -> None:
        """Keep the seconds that an answer took."""
        axes = len(question.meshes[0].names)
        self._seconds[axes] = max(seconds, self._seconds.get(axes, 0.0))

    def of(self, question: Question) -> float:
        """Return the seconds that an answer may take; a further axis takes several times as many.
        Most take less than the longest."""
        axes = len(question.meshes[0].names)
        fewer = _A_FURTHER_AXIS * self._seconds.get(axes - 1, 0.0)
        return self._seconds.get(axes, fewer) * _OF_LONGEST


def complexity(way: Candidate | Question) -> int:
    """Return how much there is to understand: axes, cut states, a host, parts, other buffers."""
    states = way.states
    if isinstance(way, Candidate):
        axes, is_hosted = [*way.whole_mesh.sizes.values()], _is_hosted(way)
    else:
        axes, is_hosted = [*way.meshes[0].shape, way.stages], way.is_hosted
    count = sum(size > 1 for size in axes) + is_hosted + states.is_cut + bool(states.numbers)
    return count + (states.buffer_bytes != BUFFER_BYTES)


def handicap(question: Question) -> float:
    """Return how many times its seconds a way counts for, because of what is on the host."""
    return 1 + HOSTED if question.is_hosted else 1.0


def _is_hosted(candidate: Candidate) -> bool:
    return candidate.states.is_on_host or candidate.decisions.keeps_on_host


def _handicap(entry: SearchEntry) -> float:
    return 1 + HOSTED if _is_hosted(_candidate(entry)) else 1.0


def _candidate(entry: SearchEntry) -> Candidate:
    assert isinstance(entry.answer, Found)
    return entry.answer.candidate


def _seconds(entry: SearchEntry) -> float:
    return _candidate(entry).seconds


def _named(entry: SearchEntry) -> Mesh:
    """Return the mesh of a question, with axes named by what they do in its answer."""
    answer, mesh = entry.answer, entry.question.meshes[0]
    way = answer.candidate if isinstance(answer, Found) else getattr(answer, "way", None)
    names = axis_roles(way) if isinstance(way, Candidate) and way.mesh == mesh else {}
    return mesh.renamed(names)
