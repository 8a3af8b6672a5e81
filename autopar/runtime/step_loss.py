"""The loss of a pipeline's step on every rank, though only the last stages know it.

All forwards of a rank are done before its last action: the sum over the line starts there, and
travels beside that action.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist
from torch import Tensor

from autopar._torch import wait_for
from autopar.pipeline.schedule import Action
from autopar.pipeline.worker import Worker, sum_by_slice


class StepLoss:
    """Sums the shares of one step's loss."""

    def __init__(
        self, shares: Tensor, order: Collection[Action], group: dist.ProcessGroup | None
    ) -> None:
        """`shares`: a zero for each micro-batch; `order`: this rank's; no `group`: it is alone."""
        self._shares, self._start, self._group = shares, len(order) - 2, group
        self._work: dist.Work | None = None

    def after(self, position: int, workers: Collection[Worker]) -> None:
        """The action at `position` is done."""
        if position != self._start:
            return
        for worker in workers:
            for slice_, (value,) in worker.losses.items():
                self._shares[slice_] = value
        if self._group is not None:
            self._work = dist.all_reduce(self._shares, group=self._group, async_op=True)

    def total(self) -> Tensor:
        """The sum of all shares in the order of the micro-batches, the same on every rank."""
        if self._work is not None:
            wait_for(self._work)
        return sum_by_slice(dict(enumerate(self._shares))).clone()
