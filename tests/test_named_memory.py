"""Under a memory limit, what was chosen costs the same when all of it is asked for by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar as ap

MACHINE = ap.Cluster.preset("dgx-h100")


class Wide(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        rows = ([nn.Linear(width, width), nn.GELU()] for _ in range(layers))
        self.layers = nn.Sequential(*(one for row in rows for one in row))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), target)


def wide() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.device("meta"):
        model, x = Wide(8192, 10), torch.empty(16384, 8192)
    return model, (x, x)


def named(plan: ap.Plan, limit: float, *without: str) -> ap.Plan:
    """What was chosen, by name."""
    model, inputs = wide()
    asked = {
        "mesh": plan.mesh,
        "microbatches": plan.microbatches,
        "states": plan.states,
        "recompute": dict(plan.decisions.recompute),
    }
    asked = {name: value for name, value in asked.items() if name not in without}
    about = {"cluster": MACHINE, "memory": limit, "pipeline": None}
    return ap.plan(model, inputs, **about, **asked)


@pytest.mark.parametrize("part", [0.5, 0.4, 0.3])
def test_a_choice_that_memory_binds_costs_the_same_by_name(part: float) -> None:
    model, inputs = wide()
    free = ap.plan(model, inputs, cluster=MACHINE)
    limit = part * free.memory.peak
    plan = ap.plan(model, inputs, cluster=MACHINE, memory=limit)
    assert plan.pipelining is None
    assert plan.memory.peak <= limit
    assert plan.states.is_cut or plan.decisions.recompute or plan.microbatches > 1
    for without in ([], ["recompute"], ["states"]):
        again = named(plan, limit, *without)
        assert again.memory.peak <= limit
        assert again.cost.seconds == pytest.approx(plan.cost.seconds, rel=1e-9), without
