"""Pipelines from the user's words to trained parameters, and words that are refused."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import autopar as ap
from autopar.base.schema import write
from tests.models import Case, gpt
from tests.parity import assert_equal, assert_parity, parallel_outcome, single_outcome
from tests.pipeline.models import (
    FORMS,
    assert_recorded,
    made_of_weights,
    reference,
    share_captures,  # noqa: F401
    shared,
)


def run(name, ranks, microbatches, schedule, options, **more):
    """Train on the virtual mesh, compare with one device, and what was done with the schedule."""
    case = shared(name)
    module = ap.parallelize(
        case.model,
        case.args,
        case.kwargs,
        mode="propagate",
        mesh=ap.Mesh(pp=ranks),
        backend="virtual",
        microbatches=microbatches,
        schedule=schedule,
        schedule_options=options,
        **more,
    )
    made = module.plan.pipelining.schedule
    assert_equal(parallel_outcome(module, case), reference(name, made.all_parts))
    assert_recorded(module, made)
    return module


@cache
def weights() -> Case:
    return made_of_weights()


@cache
def frozen_but_the_last() -> Case:
    case = gpt(batch=4, layers=4, tied=False)
    case.model.requires_grad_(False)
    case.model.layers[-1].requires_grad_(True)
    return case


@pytest.mark.parametrize(("schedule", "options"), FORMS[1::2])  # see test_parity_law.py
def test_gpt2_with_a_tied_embedding_under_many_schedules(schedule, options):
    run("gpt2", 4, 4, schedule, options)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "schedule", "options"),
    [
        ("gpt2", 4, 12, "chimera", {"scale": "doubling"}),
        ("gpt2", 8, 8, "chimera", {"pipes": 8}),
        ("llama", 8, 8, "1f1b", {}),
        ("residuals", 2, 1, "gems", {}),
    ],
)
def test_other_sizes(name, ranks, microbatches, schedule, options):
    run(name, ranks, microbatches, schedule, options)


@pytest.mark.parametrize(("schedule", "options"), [("chimera", {}), ("zb-h1", {})])
def test_recomputation_runs_forward_again(schedule, options):
    module = run("gpt2", 4, 4, schedule, options, recompute=True)
    assert all(not worker.kept for worker in module.backend.workers.values())


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("zb-h1", True),
        ("zb-v", False),
        ("zb-v", True),
        ("dualpipe", True),
        ("dualpipe-v", False),
        ("chimera-zb", True),
        ("chimera-zb", False),
    ],
)
def test_parameters_pass_through_operators_of_their_own(schedule, recompute):
    options = {"schedule": schedule, "microbatches": 8, "recompute": recompute}
    assert_parity(weights(), ap.Mesh(pp=4), **options)


def test_weights_made_of_parameters_that_are_cut():
    assert_parity(weights(), ap.Mesh(pp=2, tp=2), schedule="zb-h1", microbatches=4)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_only_the_last_layers_learn(schedule):
    assert_parity(frozen_but_the_last(), ap.Mesh(pp=2), microbatches=2, schedule=schedule)


def test_gradients_are_clipped_by_the_norm_of_the_model():
    case = gpt(layers=4, batch=8)
    module = ap.parallelize(
        case.model,
        case.args,
        mode="propagate",
        mesh=ap.Mesh(pp=4),
        backend="virtual",
        microbatches=4,
        schedule="chimera",
    )
    clip = (0.1, 2.0)
    assert_equal(parallel_outcome(module, case, clip=clip), single_outcome(case.fresh(), clip=clip))
    with pytest.raises(ap.InvalidInput, match="positive order"):
        module.clip_grad_norm_(1.0, 0.0)


def test_skips_pass_through_the_stages_between():
    class Skips(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))

        def forward(self, x):
            kept = []
            for layer in self.layers[:3]:
                x = torch.tanh(layer(x))
                kept.append(x)
            for layer in self.layers[3:]:
                x = torch.tanh(layer(x + kept.pop()))
            return x.square().mean()

    torch.manual_seed(0)
    model = Skips().double()
    x = torch.randn(8, 8, dtype=torch.float64)
    module = ap.parallelize(
        model,
        (x,),
        mode="propagate",
        mesh=ap.Mesh(pp=3),
        backend="virtual",
        microbatches=2,
        schedule="1f1b",
    )
    assert max(len(stage.receives) for stage in module.program.stages) > 1
    loss = model(x)
    loss.backward()
    assert torch.allclose(module.step(x), loss.detach(), rtol=1e-12)
    grads = module.full_grads()
    for name, parameter in model.named_parameters():
        assert torch.allclose(grads[name], parameter.grad, rtol=1e-9), name


def test_the_plan_says_what_was_decided():
    case = shared("gpt2")
    plan = ap.plan(
        case.model,
        case.args,
        case.kwargs,
        mode="propagate",
        mesh=ap.Mesh(pp=4),
        microbatches=4,
        schedule="chimera",
    )
    text = str(plan.pipelining)
    assert text.startswith("pipeline over pp: chimera, 2 pipes, 4 stages")
    assert "imbalance" in text
    data = write(plan.pipelining)
    assert ap.pipeline.from_text(data["schedule"]) == plan.pipelining.schedule
    assert len(data["stages"]) == len(plan.program.stages) == 4


@pytest.mark.parametrize("suffix", ["txt", "csv"])
def test_a_schedule_from_a_file(tmp_path, suffix):
    """Three micro-batches as in 1F1B, but the first rank sends all before it waits."""
    path = tmp_path / f"mine.{suffix}"
    first, second = "0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"
    text = f"microbatches: 3\npipe 0: 0 1\nrank 0: {first}\nrank 1: {second}\n"
    if suffix == "csv":
        text = "\n".join(line.replace(" ", ",") for line in (first, second))
    path.write_text(text)
    case, made = shared("gpt2"), ap.pipeline.load(path)
    module = ap.parallelize(
        case.model,
        case.args,
        case.kwargs,
        mode="propagate",
        mesh=ap.Mesh(pp=2),
        backend="virtual",
        schedule=made,
    )
    assert module.plan.microbatches == 3
    assert_equal(parallel_outcome(module, case), reference("gpt2", 3))
    assert_recorded(module, made)
