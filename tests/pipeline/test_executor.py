"""Parity under every synchronous schedule; what runs is what the schedule and simulator say."""

from __future__ import annotations

import pytest
import torch

import autopar as ap
from autopar.pipeline import NAMES, simulate
from tests.annotations import megatron
from tests.models import gpt
from tests.parity import assert_equal, parallel_outcome, single_outcome
from tests.pipeline.models import gpt2, reference, share_captures, shared  # noqa: F401

FORMS = [
    *((name, {}) for name in NAMES),
    ("chimera", {"scale": "doubling"}),
    ("chimera", {"scale": "halving"}),
    ("chimera", {"scale": "list"}),
    ("chimera", {"pipes": 4}),
]
SOME = [("1f1b", {}), ("chimera", {"scale": "halving"}), ("zb-v", {}), ("interleaved", {})]


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
    assert_equal(parallel_outcome(module, case), reference(name, made.slices))
    assert tuple(tuple(one.order) for one in module.backend.recorded) == made.orders
    peaks = tuple(one.peak_activations for one in module.backend.recorded)
    assert peaks == pytest.approx(simulate(made).peak_activations)
    return module


@pytest.mark.parametrize(("schedule", "options"), FORMS)
def test_gpt2_with_a_tied_embedding_under_every_schedule(schedule, options):
    run("gpt2", 4, 4, schedule, options)


@pytest.mark.parametrize(("schedule", "options"), SOME)
@pytest.mark.parametrize("name", ["llama", "residuals"])
def test_other_models(name, schedule, options):
    run(name, 4, 4, schedule, options)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "schedule", "options"),
    [
        ("gpt2", 2, 3, "chimera", {}),
        ("gpt2", 2, 3, "chimera-zb", {}),
        ("gpt2", 2, 3, "zb-v", {}),
        ("residuals", 2, 3, "chimera", {"scale": "doubling"}),
        ("gpt2", 4, 3, "chimera", {"scale": "doubling"}),
        ("gpt2", 4, 12, "chimera", {"scale": "doubling"}),
        ("gpt2", 8, 8, "chimera", {}),
        ("gpt2", 8, 8, "chimera", {"pipes": 8}),
        ("gpt2", 8, 3, "zb-h1", {}),
        ("llama", 8, 8, "1f1b", {}),
        ("residuals", 8, 4, "chimera", {"pipes": 4}),
    ],
)
def test_other_sizes(name, ranks, microbatches, schedule, options):
    run(name, ranks, microbatches, schedule, options)


@pytest.mark.parametrize(("schedule", "options"), [("chimera", {}), ("zb-h1", {})])
def test_recomputation_runs_forward_again(schedule, options):
    module = run("gpt2", 4, 4, schedule, options, recompute=True)
    assert all(not worker.kept for worker in module.backend.workers.values())


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "zb-v"])
def test_data_and_tensor_parallel_inside_stages(schedule):
    case = gpt(layers=4, batch=8)
    expected = single_outcome(case.fresh())
    module = ap.parallelize(
        megatron(case).model,
        case.args,
        case.kwargs,
        mode="propagate",
        mesh=ap.Mesh(dp=2, pp=2, tp=2),
        backend="virtual",
        check=True,
        microbatches=4,
        schedule=schedule,
    )
    assert_equal(parallel_outcome(module, case), expected)
    assert {record.axis for record in module.plan.movements()} == {"dp", "tp"}


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
    assert text.startswith("pipeline over pp: chimera, pipes=2, scale=direct, 4 stages")
    assert "imbalance" in text
    data = plan.pipelining.data()
    assert ap.pipeline.from_text(data["schedule"]) == plan.pipelining.schedule
    assert len(data["stages"]) == len(plan.program.stages) == 4


def make(**options):
    case = gpt2(batch=8, layers=2)
    return ap.parallelize(case.model, case.args, case.kwargs, backend="virtual", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": ap.Mesh(pp=3), "schedule": "chimera"}, "even number of stages"),
        (
            {"mesh": ap.Mesh(pp=4), "schedule": {"name": "chimera", "pipes": 6}},
            "k divides half the number",
        ),
        ({"mesh": ap.Mesh(pp=4), "microbatches": 4}, "as many stages as the model has layers"),
        ({"mesh": ap.Mesh(pp=2), "microbatches": 3}, "equal parts of the batch"),
        ({"mesh": ap.Mesh(dp=2), "microbatches": 3}, "equal parts of the batch"),
        ({"mesh": ap.Mesh(dp=2), "schedule": "1f1b"}, "a schedule is for a pipeline"),
        ({"mesh": ap.Mesh(pp=2), "schedule": "fastest"}, "known by its name"),
        ({"mesh": ap.Mesh(pp=2), "schedule": 3}, "given by its name"),
        ({"mesh": ap.Mesh(pp=2), "pipeline": "stages"}, "pipeline is the name of an axis"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ap.InvalidInput, match=message):
        make(**options)


def test_a_schedule_with_a_missing_action_is_refused():
    made = ap.pipeline.schedule("1f1b", stages=2, microbatches=2)
    short = ap.pipeline.Schedule(
        made.name, 2, made.placement, (made.orders[0][:-1], made.orders[1])
    )
    with pytest.raises(ap.InvalidInput, match="one F, and one B"):
        make(mode="propagate", mesh=ap.Mesh(pp=2), schedule=short)


def test_a_pipeline_runs_steps_only():
    module = make(mode="propagate", mesh=ap.Mesh(pp=2), microbatches=2)
    case = gpt2(batch=8, layers=2)
    with pytest.raises(ap.InvalidInput, match="whole steps only"):
        module(*case.args, **case.kwargs)
