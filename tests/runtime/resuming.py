"""A training that can be saved and taken up: dropout, two groups, a schedule.

>>> run = Run(case, mesh=Mesh(dp=4)); run.train(2); run.save(path)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import autopar as ap
from tests.models import Case
from tests.parity import Outcome, assert_equal

SEED = 11


class Run:
    def __init__(self, case: Case, **options: Any) -> None:
        self.case = case
        self.module = ap.parallelize(case.model, case.args, case.kwargs, **options)
        parameters = list(self.module.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "lr": 2e-2},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 8)
        self.losses: list[Tensor] = []
        self.saving: Any = None
        torch.manual_seed(SEED)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.losses.append(self.module.step(*self.case.args, **self.case.kwargs))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def save(self, path: Path, **how: Any) -> None:
        extra = {"schedule": self.schedule.state_dict(), "losses": [float(x) for x in self.losses]}
        self.saving = ap.save(path, self.module, self.optimizer, extra=extra, **how)

    def load(self, path: Path) -> None:
        extra = ap.load(path, self.module, self.optimizer)
        self.schedule.load_state_dict(extra["schedule"])
        self.losses = [torch.tensor(loss, dtype=torch.float64) for loss in extra["losses"]]


def assert_alike(run: Run, other: Run) -> None:
    """Both have come to the same, by the same losses."""
    pairs = [(one.losses, one.module.full_state_dict()) for one in (run, other)]
    assert len(run.losses) == len(other.losses)
    found, expected = (Outcome(losses, {}, state) for losses, state in pairs)
    assert_equal(found, expected, tolerance=1e-12)
