"""The loss of a step on every rank, though only the last stages know it.

All forwards of a rank are done before its last action: the sum over the line starts there, and
travels beside that action.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch import wait_for
from autopar.pipeline.worker import Worker, sum_in_order
from autopar.plan.program import Program
from autopar.strategies.node_info import info


class StepLoss:
    """Sums the shares of each step's loss."""

    def __init__(
        self, program: Program, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        """`group`: the ranks of the pipeline; None: this one has all stages."""
        self._program, self._device, self._group = program, device, group
        self._started: tuple[Tensor, dist.Work] | None = None

    def start(self, workers: Collection[Worker]) -> None:
        """All forwards are done."""
        if self._group is not None:
            dtype = info(self._program.outputs[self._program.captured.loss_index]).val.dtype
            shares = torch.zeros(self._program.schedule.all_parts, dtype=dtype, device=self._device)
            for number, loss in _losses(workers).items():
                shares[number] = loss
            self._started = shares, dist.all_reduce(shares, group=self._group, async_op=True)

    def total(self, workers: Collection[Worker]) -> Tensor:
        """The sum of all shares in the order of the micro-batches, the same on every rank."""
        if self._started is None:
            return sum_in_order(_losses(workers))
        (shares, work), self._started = self._started, None
        wait_for(work)
        return sum_in_order(dict(enumerate(shares))).clone()


def _losses(workers: Collection[Worker]) -> dict[int, Tensor]:
    return {n: value[0] for worker in workers for n, value in worker.losses.items()}
