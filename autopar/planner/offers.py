"""Offers: which devices of a cluster of unlike nodes a plan may use.

Work in lock step waits for the slowest device, and ranks come in grids: a slow node, or some of a
large one's devices, may be worth less than they cost. Each offer has a choice of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import nn

from autopar.candidates.alternative import Alternative, best_first
from autopar.candidates.candidate import Candidate
from autopar.candidates.patience import Ended
from autopar.candidates.request import Request
from autopar.candidates.search_step import SearchStep
from autopar.capture.captured import Captured
from autopar.cluster import Cluster, Device
from autopar.errors import Interrupted, InvalidInput
from autopar.passes.batch_cutter import InseparableBatch
from autopar.planner.loop import Planner
from autopar.planner.question import Refused
from autopar.text.progress import Report


def has_world() -> bool:
    """Return whether ranks run: a world has none to spare."""
    return dist.is_initialized() or dist.is_torchelastic_launched()


def offers(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the parts of a cluster that may be used, all of it first.

    The others leave slow kinds of devices out, and may take the same number of devices from every
    node that has so many."""
    counts = cluster.used_of_nodes
    seen = [counts]
    yield cluster
    if len({*zip(counts, (node.device for node in cluster.nodes))}) == 1:
        return
    speeds = [_speed(node.device) for node in cluster.nodes]
    for slowest in sorted({*speeds}):
        left = [count * (speed >= slowest) for count, speed in zip(counts, speeds)]
        sizes = sorted({*left, *(1 << (count.bit_length() - 1) for count in left if count)} - {0})
        for used in (tuple(left), *(tuple(n * (c >= n) for c in left) for n in sizes)):
            if used not in seen:
                seen.append(used)
                yield replace(cluster, used=used)


def _speed(device: Device) -> float:
    return max(map(device.peak, device.flops))


class Choice:
    """The choice of the best way on all parts of a cluster that a request may use."""

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        request: Request,
        report: Report,
        *,
        uses_every_device: bool,
    ) -> None:
        self.request = request
        self._planner_of = partial(Planner, model, captured, report=report)
        is_free = request.mesh is None and request.mode == "auto" and not uses_every_device
        self._offers = list(offers(request.cluster)) if is_free else [request.cluster]
        self.planners: list[Planner] = []
        self.ended: Ended = ""  # early
        self.was_cut_short = False  # on some of the machines

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Return all ways that were weighed, the best first."""
        return best_first(way for planner in self.planners for way in planner.alternatives)

    @property
    def left_out(self) -> Counter[str]:
        """Return how many questions bounds ruled out."""
        return sum((planner.left_out for planner in self.planners), Counter())

    @property
    def asked(self) -> tuple[SearchStep, ...]:
        """Return every question with its answer and the rule that asked it, in order."""
        steps = (entry.step for planner in self.planners for entry in planner.record.asked)
        return tuple(steps)

    @property
    def inseparable(self) -> InseparableBatch | None:
        """Return why the batch cannot be cut into micro-batches, if that was asked for."""
        answers = (entry.answer for planner in self.planners for entry in planner.record.asked)
        errors = (answer.error for answer in answers if isinstance(answer, Refused))
        return next((error for error in errors if isinstance(error, InseparableBatch)), None)

    def best(self, wanted: int = 1) -> list[tuple[Candidate, Planner]]:
        """Return the best ways to run a step that differ, at most so many, and who found them."""
        ways: list[tuple[Candidate, Planner]] = []
        refused: list[InvalidInput] = []
        planners = [self._planner_of(request=self._request_on(cluster)) for cluster in self._offers]
        left = sorted(planners, key=lambda planner: planner.promise)
        while left and not self.ended:
            planner = left.pop(0)
            if ways and self.request.patience.is_over():
                self.ended = "time"
                break
            self.planners.append(planner)
            fastest = ways[wanted - 1][0].seconds if len(ways) >= wanted else math.inf
            try:
                patience = self.request.patience.shared(len(left))
                ways += [(c, planner) for c in planner.best(wanted, fastest, patience)]
            except InvalidInput as error:
                refused.append(error)
            except Interrupted:
                if not ways:
                    raise
                self.ended = "Ctrl-C"
            if len(self.planners) > 1:  # one planner gives the simplest of the best first
                ways.sort(key=lambda way: way[0].seconds)
            if planner.ended == "Ctrl-C" or self.request.patience.is_over():
                self.ended = self.ended or planner.ended
            self.was_cut_short |= bool(planner.ended)
        self.ended = self.ended or ("time" if self.was_cut_short else "")
        if not ways:
            raise refused[0]
        best, finder = ways[0]
        is_accounted = len(self.planners) == len(self._offers) and finder is self.planners[-1]
        if self.ended and not is_accounted and best.search:  # of what its planner left
            ways[0] = best.changed(best.search.cut_short()), finder
        return ways[:wanted]

    def _request_on(self, cluster: Cluster) -> Request:
        """Return the same request on these machines, whose memory is theirs."""
        request = self.request
        is_own = request.limit == request.cluster.device.usable_memory
        limit = cluster.device.usable_memory if is_own else request.limit
        return replace(request, cluster=cluster, limit=limit)
