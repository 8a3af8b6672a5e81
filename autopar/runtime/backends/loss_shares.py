"""Loss shares: the losses of micro-batches, which the ranks of a pipeline add to one loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch.communication import wait_for
from autopar.pipeline.running.worker import sum_in_order


class LossShares:
    """Adds the losses of a step over the places of a pipeline, beside its last actions."""

    def __init__(
        self, line: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`line`: of this rank's counterparts at all places; None: there is one place."""
        self._line, self._dtype, self._device = line, dtype, device
        self.is_summed_in_steps = True  # a run of steps sums them by itself
        self._sum: tuple[Tensor, dist.Work] | None = None  # of the running step

    def begin(self, losses: Mapping[int, Tensor], count: int) -> None:
        """Begin to sum this rank's losses of `count` micro-batches with the other places'."""
        if self.is_summed_in_steps:
            self._sum = self.reduce(losses, count)

    def reduce(self, losses: Mapping[int, Tensor], count: int) -> tuple[Tensor, dist.Work] | None:
        """Return the losses of all places, being summed; None: there is one place."""
        if self._line is None:
            return None
        shares = torch.zeros(count, dtype=self._dtype, device=self._device)
        for number, loss in losses.items():
            shares[number] = loss
        work = dist.all_reduce(shares, group=self._line, async_op=True)
        return None if work is None else (shares, work)

    def total(self, losses: Mapping[int, Tensor]) -> Tensor:
        """Return the sum of all shares in the order of micro-batches, the same on every rank."""
        if self._sum is None:
            return sum_in_order(losses)
        (shares, work), self._sum = self._sum, None
        return received_loss(shares, work)


def received_loss(shares: Tensor, work: dist.Work) -> Tensor:
    """Return the sum of shares once they have come from all places."""
    wait_for(work)
    return sum_in_order(dict(enumerate(shares))).clone()
