"""Offers: which devices of a cluster of unlike nodes a plan may use.

Work in lock step waits for the slowest device, and ranks come in grids: a slow node, or some of a
large one's devices, may be worth less than they cost. Each offer has a choice of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import nn

from autopar.candidates.alternative import Alternative
from autopar.candidates.candidate import Candidate
from autopar.capture.captured import Captured
from autopar.cluster import Cluster, Device
from autopar.errors import Interrupted, InvalidInput
from autopar.planner.deep import DeepPlanner
from autopar.planner.fastest import Fastest
from autopar.planner.ledger import best_first
from autopar.planner.patience import Ended
from autopar.planner.request import Request
from autopar.search.layout_search import NothingFaster
from autopar.text.progress import Report


def has_world() -> bool:
    """Whether ranks run: a world has none to spare."""
    return dist.is_initialized() or dist.is_torchelastic_launched()


def offers(cluster: Cluster) -> Iterator[Cluster]:
    """What of a cluster may be used, all of it first.

    Slow kinds of devices are left out, and of the other nodes are taken as many devices of each,
    where these nodes have them."""
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
    """The best of the ways on all that a request is offered."""

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        request: Request,
        report: Report,
        is_all: bool,
    ) -> None:
        """`is_all`: all devices are to be used."""
        self.request = request
        self._planner_of = partial(DeepPlanner, model, captured, report=report)
        is_free = request.mesh is None and request.mode == "auto" and not is_all
        self._offers = list(offers(request.cluster)) if is_free else [request.cluster]
        self._planners: list[DeepPlanner] = []
        self.kept = Fastest(request.wanted)  # the fastest of all planners
        self.ended: Ended = ""  # early

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """All that was weighed, the best first."""
        return best_first(one for planner in self._planners for one in planner.alternatives)

    @property
    def left_out(self) -> Counter[str]:
        """What bounds ruled out."""
        return sum((planner.left_out for planner in self._planners), Counter())

    def best(self) -> tuple[Candidate, DeepPlanner]:
        """The fastest way to run a step, and who found it."""
        found: tuple[Candidate, DeepPlanner] | None = None
        refused: list[Exception] = []
        for cluster in self._offers:
            asked = replace(self._on(cluster), fastest=self.kept.cutoff)
            if found is not None and asked.patience.is_over():
                self.ended = "time"
                break
            planner = self._planner_of(request=asked)
            self._planners.append(planner)
            try:
                candidate = planner.best()
            except InvalidInput as error:
                refused.append(error)
            except NothingFaster:
                pass
            except (KeyboardInterrupt, Interrupted):
                self.ended = "Ctrl-C"
                if found is None:
                    raise
            else:
                self.kept.add(*planner.kept.found)
                if found is None or candidate.seconds < found[0].seconds:
                    found = candidate, planner
            self.ended = self.ended or planner.ended
            if self.ended:
                break
        if found is None:
            raise refused[0]
        best, by = found
        is_told = len(self._planners) == len(self._offers) and by is self._planners[-1]
        if self.ended and not is_told:  # of what its planner left
            best = best.changed(best.search and best.search.cut_short())
        return best, by

    def _on(self, cluster: Cluster) -> Request:
        """The same request on these machines, whose memory is theirs."""
        asked = self.request
        is_own = asked.limit == asked.cluster.device.memory
        limit = cluster.device.memory if is_own else asked.limit
        return replace(asked, cluster=cluster, limit=limit)
