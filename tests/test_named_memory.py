"""Under a memory limit: the same costs the same by name and by choice, and what fits is found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.planner.rules import SIMPLER

MACHINE = ap.Cluster.preset("dgx-h100")
ALONE = {"cluster": MACHINE, "pipeline": None, "seconds": None}


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
    return ap.plan(model, inputs, memory=limit, **ALONE, **asked)


@pytest.mark.parametrize("part", [0.5, 0.4, 0.3])
def test_a_choice_that_memory_binds_costs_the_same_by_name(part: float) -> None:
    model, inputs = wide()
    free = ap.plan(model, inputs, **ALONE)
    limit = part * free.memory.peak
    plan = ap.plan(model, inputs, memory=limit, **ALONE)
    assert plan.memory.peak <= limit
    assert plan.states.is_cut or plan.decisions.recompute or plan.microbatches > 1
    for without in ([], ["recompute"], ["states"]):
        again = named(plan, limit, *without)
        assert again.memory.peak <= limit
        # What is left out is chosen: the simplest of what is about as fast.
        tolerance = SIMPLER if without else 1e-9
        assert again.cost.seconds == pytest.approx(plan.cost.seconds, rel=tolerance), without


class Blocks(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(width, inner) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(inner, width) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return nn.functional.mse_loss(x, target)


def blocks(width: int, inner: int, rows: int, limit: float, **asked: object) -> ap.Plan:
    with torch.device("meta"):
        model, x = Blocks(width, inner), torch.empty(rows, width)
    return ap.plan(model, (x, x), microbatches=1, memory=limit, **ALONE, **asked)


def test_layouts_that_add_up_least_are_tried_before_nothing_fits() -> None:
    """The search adds up 8.4 MB, the finished program takes 40.9: a limit that is lowered by what
    is too much would be below what any layouts add up."""
    on_host = ap.States("all", "all", "all", parameters_device="host", optimizer_device="host")
    asked = {"recompute": "selective", "states": on_host, "mesh": ap.Mesh(x=4, y=2)}
    plan = blocks(1024, 2048, 2048, 41.58e6, **asked)
    assert plan.memory.peak <= 41.58e6
    assert plan.search is not None
    assert plan.search.bound > 0.5 * plan.cost.seconds  # searched for, not only the least


def test_states_on_the_host_are_weighed_with_regions_that_run_again() -> None:
    asked = {"mesh": ap.Mesh(x=4, y=2)}
    plan = blocks(1024, 2048, 2048, 41.58e6, **asked)
    again = blocks(1024, 2048, 2048, 41.58e6, recompute="selective", **asked)
    assert again.decisions.recompute
    assert plan.memory.peak <= 41.58e6
    assert plan.cost.seconds <= again.cost.seconds * (1 + SIMPLER)


@pytest.mark.parametrize("states", ["zero1", "zero3"])
def test_states_by_name_are_no_slower_with_more_memory(states: str) -> None:
    """Without replicas there is nothing to cut: the best layouts of few rows have none."""
    limits = (60e6, 80.7e6, 120e6)
    seconds = [blocks(1024, 1024, 4, limit, states=states).cost.seconds for limit in limits]
    assert seconds == sorted(seconds, reverse=True)


class Plain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.last(torch.relu(self.first(x))), target)


def test_states_that_cannot_be_cut_are_refused_for_that() -> None:
    """Whatever was looked for on the way, under limits that nobody gave."""
    with torch.device("meta"):
        model, x = Plain(4096), torch.empty(1, 4096)
    with pytest.raises(ap.InvalidInput, match="states are cut over ranks that hold replicas"):
        ap.plan(model, (x, x), states="zero1", mesh=ap.Mesh(x=8), **ALONE)


class Noise(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("noise", torch.zeros(rows, width))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.last(torch.relu(self.first(x + self.noise))), target)


def test_cut_states_are_chosen_for_their_speed_alone() -> None:
    """Backward does not hide a sum, of which forward hides the half that gathers."""
    with torch.device("meta"):
        model, x = Noise(2048, 2048), torch.empty(2048, 2048)
    about = {**ALONE, "cluster": ap.Cluster.preset("dgx-a100", nodes=2), "microbatches": 1}
    plan, whole, cut = (
        ap.plan(model, (x, x), **about, **({"states": states} if states else {}))
        for states in (None, "whole", "zero1")
    )
    assert cut.cost.seconds < 0.999 * whole.cost.seconds
    assert plan.cost.seconds == pytest.approx(cut.cost.seconds, rel=1e-9)
