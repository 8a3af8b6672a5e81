"""Estimates: what a question is likely to be answered, in microseconds, before it is asked.

    estimates = Estimates(captured, request, bounds)
    estimates.of(question)                  # Estimate(seconds=1.7, bytes_=6e10)
    estimates.learn(question, 1.9)    # what an answer teaches about similar questions

An estimate adds up what an expert would on paper: the compute of a rank, two reductions of an
activation for a pair of products that are cut, the sum of gradients, the bubble of the schedule,
and the bytes of states and of what forward keeps. It orders questions, and rules out none. Answers
correct it: by a factor for the same mesh, or else for meshes with an equal last axis.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from autopar.candidates.request import Request
from autopar.capture.captured import Captured
from autopar.cluster import Cluster
from autopar.cluster.cluster_part import ClusterPart
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.footprint import unsharded_bytes
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.passes.microbatches import batch_size
from autopar.pipeline.memory.activation_counts import peak_counts
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.simulation.simulator import simulate
from autopar.planner.bounds import Bounds
from autopar.planner.product_messages import products, share_of_experts
from autopar.planner.question import Question, ScheduleName
from autopar.planner.schedule_lists import listed
from autopar.recompute import FULL, PLAIN, SELECTIVE, Recompute
from autopar.states import Factor, States

_SAMPLE_STAGES = 4  # stages of the pipeline by which a schedule is judged
_HIDDEN = 0.7  # of a rank's compute, behind which sums and gathers hide
_SHOWN = 0.1  # of a movement that hides
_ENDS = 2  # layers besides equal blocks: an embedding and a head
_WAITING = 1.0  # of what a micro-batch keeps: the inputs of its weight gradients
_WHOLE = 0.25  # of what is kept beside attention: the inputs of norms and products
_KEPT_BY_FULL = 0.04  # of what a program keeps, if all its regions run again


# Relative, by how alike the answers are that corrected an estimate.
_DOUBTS = (0.0, 0.0, 0.03, 0.06, 0.1, 0.15)


class Estimate(NamedTuple):
    """The seconds and bytes that a way to run a step is likely to take."""

    seconds: float
    bytes_: float  # on the fullest device


class _Cuts(NamedTuple):
    """The numbers of ranks of a mesh over which the batch, tensors, and experts are cut."""

    data: int
    tensor: int = 1
    experts: int = 1  # of those that cut the batch


class _ScheduleShape(NamedTuple):
    """The bubble and the live activations of a schedule, for each of its stages."""

    bubble: float  # micro-batches' time that a rank waits, for each stage but one
    # Activations on the fullest rank, in units of one micro-batch on one stage, for each rank.
    live: float
    pipes: int
    chunks: int
    # The same of the inputs of weight gradients that wait: no recomputation spares these.
    waiting: float = 0.0


class Estimates:
    """Judges the questions about one program."""

    def __init__(self, captured: Captured, request: Request, bounds: Bounds, blocks: int) -> None:
        """`blocks`: the equal blocks of the whole program."""
        self._captured, self._request, self._bounds = captured, request, bounds
        self._rows = batch_size(captured) or 1
        self._sizes = unsharded_bytes(captured)
        self._blocks = max(1, blocks)
        self._products, self._expert_products = products(captured)
        self._experts = share_of_experts(captured)
        self._seconds, self._bytes = _Ratios(), _Ratios()
        self._message_seconds, self._price = cache(self._messages_of), cache(self._cluster_price)
        self._estimate = cache(self._with_cuts)
        self._shared_work = cache(bounds.average_run)  # of stages, which share it by their speed

    def of(self, question: Question) -> Estimate:
        """Return what the best of the question's meshes is likely to take."""
        return min(self._on_mesh(question, mesh) for mesh in question.meshes)

    def doubt(self, question: Question) -> float:
        """Return the part of its seconds by which an estimate may be too high."""
        names = self._names(question, question.meshes[0])
        known = next((at for at, name in enumerate(names) if name in self._seconds), len(names))
        return _DOUBTS[known]

    def learn(self, question: Question, seconds: float) -> None:
        """Correct the estimates of similar questions by the seconds of an answer."""
        mesh = question.meshes[0]
        guess = self._on_mesh(question, mesh, is_plain=True)
        self._seconds.note(self._names(question, mesh), _ratio(seconds, guess.seconds))

    def learn_bytes(self, question: Question, bytes_: float) -> None:
        """Correct similar estimates by the bytes of the fullest device. A mix takes all there is,
        or is too large though all runs again."""
        if question.is_mixed and bytes_ <= self._request.memory:
            return
        mesh = question.meshes[0]
        if question.is_mixed:
            question = replace(question, recompute=FULL)
        guess = self._on_mesh(question, mesh, is_plain=True)
        self._bytes.note(self._kept_names(question, mesh), _ratio(bytes_, guess.bytes_))

    def _names(self, question: Question, mesh: Mesh) -> Sequence[Hashable]:
        """Return what ratios are kept by, the most alike first."""
        size, last = (question.stages, mesh), mesh.shape[1:]
        parts = question.microbatches
        return (*size, parts, question.states), (*size, parts), size, last, "any"

    def _kept_names(self, question: Question, mesh: Mesh) -> Sequence[Hashable]:
        size, schedule = (question.stages, mesh, question.microbatches), question.schedule
        names = (*size, question.states, schedule), (*size, schedule), size
        # How a schedule keeps activations is alike in all sizes.
        return names if schedule is None else (*names, ("of", schedule))

    def _on_mesh(self, question: Question, mesh: Mesh, *, is_plain: bool = False) -> Estimate:
        """Return the estimate on one mesh; `is_plain`: as it is without any answer."""
        ratio = 1.0 if is_plain else self._bytes.of(self._kept_names(question, mesh))
        ways = self._possible_cuts(mesh, question.microbatches)
        best = min(
            (self._estimate(question, mesh, cuts, ratio) for cuts in ways),
            key=lambda guess: guess.seconds * max(1.0, guess.bytes_ / self._request.memory) ** 2,
        )
        if is_plain:
            return best
        return best._replace(seconds=best.seconds * self._seconds.of(self._names(question, mesh)))

    def _with_cuts(self, question: Question, mesh: Mesh, cuts: _Cuts, ratio: float) -> Estimate:
        """Return the estimate where the axes of a mesh are used in one way, and bytes are so many
        times what they seem."""
        stages, parts = question.stages, question.microbatches
        shape = _ScheduleShape(0.0, 1.0, 1, 1)
        if question.schedule is not None:
            shape = _schedule_shape(question.schedule, min(stages, _SAMPLE_STAGES))
        if shape.chunks * stages > self._blocks + _ENDS:
            return Estimate(math.inf, 0.0)  # there are not so many layers
        pieces = parts * mesh.size
        states = ratio * self._state_bytes(question.states, cuts) * shape.pipes / stages
        live = 1.0 if question.schedule is None else min(parts, shape.live * stages)
        share = ratio * live / pieces / stages
        # What enters products is whole on the ranks that cut them.
        whole = _WHOLE * self._bounds.kept(SELECTIVE) * (cuts.tensor - 1)
        kept_by = self._bounds.kept
        kept_bytes = {kind: (kept_by(kind) + whole) * share for kind in (PLAIN, SELECTIVE)}
        kept_bytes[FULL] = _KEPT_BY_FULL * self._bounds.kept(PLAIN) * cuts.tensor * share
        waiting = _WAITING * kept_bytes[PLAIN] * min(parts, shape.waiting * stages) / live
        kept_bytes = {kind: max(size, waiting) for kind, size in kept_bytes.items()}
        again, bytes_ = self._recompute_costs(question, states, kept_bytes, pieces)
        work = self._bounds.run(pieces)
        if stages > 1:  # on unlike machines stages are uneven, but not as uneven as these
            work = (work + self._shared_work(pieces)) / 2
        once = work + self._message_seconds(stages, mesh, parts, cuts) + again
        # Blocks are not split: the slowest chunk has a whole number of them.
        chunks = stages * shape.chunks
        slowest = math.ceil(self._blocks / chunks) * chunks / self._blocks if stages > 1 else 1.0
        per_stage = once / stages * slowest
        # One micro-batch passes all stages, however few there are to hide behind.
        seconds = max(stages, parts + shape.bubble * (stages - 1)) * per_stage
        seconds += self._sync_seconds(question, mesh, cuts, per_stage * shape.pipes)
        if question.states.is_on_host:
            seconds += self._bounds.update
        return Estimate(seconds, bytes_ + states)

    def _recompute_costs(
        self, question: Question, states: float, kept_bytes: dict[Recompute, float], pieces: int
    ) -> Estimate:
        """Return the seconds that a micro-batch takes more, and the bytes that stay."""
        kind = question.recompute
        if isinstance(kind, Recompute):
            base = SELECTIVE if kind.kind == "policy" else Recompute(kind.kind)
            return Estimate(self._bounds.again(pieces, base), kept_bytes[base])
        room = self._request.memory - states
        steps = [(kept_bytes[k], self._bounds.again(pieces, k)) for k in (PLAIN, SELECTIVE, FULL)]
        if steps[0][0] <= room:
            return Estimate(0.0, steps[0][0])
        for (more, cheap), (less, dear) in pairwise(steps):
            if less <= room and less < more:
                share = (more - room) / (more - less)
                return Estimate(cheap + share * (dear - cheap), room)
        return Estimate(steps[-1][1], steps[-1][0])

    def _state_bytes(self, states: States, cuts: _Cuts) -> float:
        """Return the bytes of parameters, gradients and optimizer states on a rank."""

        def parts(factor: Factor, replicas: int) -> int:
            return replicas if factor == "all" else min(factor, replicas)

        factors: dict[str, Factor] = {"gradients": states.gradients}
        if states.parameters_device != "host":
            factors["gathered"] = states.parameters  # copies that are read
        if not states.is_on_host:
            factors |= dict.fromkeys(("parameters", "optimizer"), states.optimizer)
        sizes = dict(self._sizes)
        if not sizes["gathered"] and states.parameters != states.optimizer:
            sizes["gathered"] = sizes["parameters"]
        return sum(
            sizes[kind] * share / cut / parts(factor, replicas)
            for kind, factor in factors.items()
            for share, cut, replicas in self._parameter_shares(cuts)
        )

    def _parameter_shares(self, cuts: _Cuts) -> list[tuple[float, int, int]]:
        """Return of dense parameters and of experts the share of all, the ranks that cut them, and
        those that hold replicas."""
        cut = cuts.tensor * cuts.experts
        dense = (1 - self._experts, cuts.tensor, cuts.data)
        return [dense, (self._experts, cut, max(1, cuts.data // cuts.experts))]

    def _possible_cuts(self, mesh: Mesh, parts: int) -> list[_Cuts]:
        """Return how experts use the axes: the outer ones cut the batch as far as it goes, the last
        cuts tensors, or experts, which it has a part of the batch for."""
        rows, sizes = self._rows // parts, mesh.shape
        data = 1
        for size in sizes[:-1] or sizes:
            if rows % (data * size):
                break
            data *= size
        last = mesh.size // data
        ways = [_Cuts(data, last)]
        if len(sizes) > 1 and last == sizes[-1] and rows % mesh.size == 0:
            ways += [_Cuts(mesh.size, 1, last)] if self._experts else []
        return ways

    def _messages_of(self, stages: int, mesh: Mesh, parts: int, cuts: _Cuts) -> float:
        """Return the seconds that cut tensors of one micro-batch move in all stages together."""
        if cuts.tensor * cuts.experts == 1:
            return 0.0
        price = self._price(stages, mesh)
        axes = mesh.names[-1:] if mesh.shape[-1] in (cuts.tensor, cuts.experts) else mesh.names
        kind = "all_to_all" if cuts.experts > 1 else "all_reduce"
        products = self._expert_products if cuts.experts > 1 else self._products
        return sum(
            count * float(price.seconds(kind, axes, size / parts / cuts.data))
            for size, count in products
        )

    def _sync_seconds(self, question: Question, mesh: Mesh, cuts: _Cuts, per_stage: float) -> float:
        """Return the seconds of gathers and sums of what is learned that a step does not hide."""
        parts, states = question.microbatches, question.states
        summed = self._sizes["gradients"] or 1.0
        gather = 0.5 * (self._sizes["gathered"] or summed) / summed  # of an all_reduce
        if states.parameters != 1 and states.lifetime == "use":
            times, overlapped = (2 * gather + 0.5) * parts, parts
        elif states.gradients != 1:
            times, overlapped = 0.5 * parts + gather, parts
        else:
            times, overlapped = 0.5 + gather, 1
        price = self._price(question.stages, mesh)
        outer = mesh.names[: max(1, len(mesh.names) - 1)]
        moved = 0.0
        for share, cut, replicas in self._parameter_shares(cuts):
            if share and replicas > 1:
                axes = mesh.names if replicas == mesh.size else outer
                size = self._sizes["gradients"] * share / cut / question.stages
                moved += times * float(price.seconds("all_reduce", axes, size))
        return max(_SHOWN * moved, moved - _HIDDEN * overlapped * per_stage)

    def _cluster_price(self, stages: int, mesh: Mesh) -> ClusterPrice:
        line, machines = self._request.line(stages), self._request.cluster
        part: Cluster = machines if line is None or stages == 1 else ClusterPart.of(machines, line)
        return ClusterPrice(part, mesh, States().buffer_bytes)


def _ratio(answer: float, guess: float) -> float:
    return answer / guess if guess else math.inf


class _Ratios:
    """The factors by which answers differed from estimates: of each name the mean."""

    def __init__(self) -> None:
        self._logs: dict[Hashable, list[float]] = defaultdict(list)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._logs

    def note(self, names: Sequence[Hashable], ratio: float) -> None:
        """Keep a factor under several names; none, if either figure is nothing."""
        for name in names if 0 < ratio < math.inf else ():
            self._logs[name].append(math.log(ratio))

    def of(self, names: Sequence[Hashable]) -> float:
        """Return the factor of the first name that is known."""
        logs = next((self._logs[name] for name in names if name in self._logs), [0.0])
        return math.exp(sum(logs) / len(logs))


@cache
def _schedule_shape(name: Schedule | ScheduleName, stages: int) -> _ScheduleShape:
    """Return the behaviour of a schedule, by a small one of the same name."""
    if isinstance(name, Schedule):
        schedule, stages = name, name.ranks
        parts = name.batch_parts
    else:
        parts = 2 * stages
        try:
            schedule = listed(name, stages, parts)
        except InvalidInput:
            return _ScheduleShape(math.inf, 1.0, 1, 1)  # it is asked about last, and says why
    third = [schedule.parts / schedule.stages / 3] * schedule.stages
    twice = [2 * share for share in third]
    step = simulate(schedule, forward=third, backward=twice, backward_weight=third).makespan
    is_full = any(schedule.delays)  # from step to step
    bubble = 0.0 if is_full else max(0.0, step * stages - parts) / max(1, stages - 1)
    peaks = peak_counts(schedule, recompute=False)
    fullest = max(sum(counts[0] for counts in live.values()) for live in peaks)
    waiting = max(sum(counts[2] for counts in live.values()) for live in peaks)
    count = schedule.stages
    return _ScheduleShape(bubble, fullest / count, schedule.pipes, schedule.chunks, waiting / count)
