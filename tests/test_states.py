"""States: parameters, gradients and what an optimizer keeps, cut over replicas; the laws hold."""

import pytest

import autopar as ap
from tests import models
from tests.annotations import megatron
from tests.parity import assert_parity
from tests.pipeline.models import share_captures  # noqa: F401

PARTIAL = [ap.States(1, 1, 2), ap.States(1, 2, 4), ap.States(2, 4, 4), ap.States(2, 2, 2)]
STEP = ap.States("all", "all", "all", lifetime="step")
DP4 = {"mesh": ap.Mesh(dp=4)}
TWO = {"mesh": ap.Mesh(a=2, b=2)}
LAW = [
    *(("zero1", DP4), ("zero2", DP4), ("zero3", DP4), (STEP, DP4)),
    *((states, TWO) for states in PARTIAL),
    *((states, DP4) for states in PARTIAL[1:3]),
    ("zero3", {**TWO, "microbatches": 2}),
    (PARTIAL[2], {**DP4, "microbatches": 2, "mode": "data"}),
    ("zero2", {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "1f1b", "microbatches": 4}),
    ("zero3", {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "zb-v", "microbatches": 4}),
    ("zero3", {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "chimera", "microbatches": 4}),
    (ap.States(2, 2, 4), {"mesh": ap.Mesh(pp=2, dp=4), "schedule": "1f1b", "microbatches": 2}),
    ("zero1", {**TWO, "mode": "auto"}),
    ("zero3", {**TWO, "mode": "auto"}),
]


@pytest.mark.parametrize(("states", "options"), LAW, ids=str)
def test_parity(states, options):
    layers = 4 if options.get("schedule") == "zb-v" else 2
    assert_parity(models.gpt(layers=layers), states=states, **options)


@pytest.mark.parametrize("states", ["zero1", "zero3"])
def test_parity_beside_tensor_parallelism(states):
    module = assert_parity(megatron(models.gpt()), ap.Mesh(dp=2, tp=2), states=states)
    for places in module.plan.decisions.apart.values():
        assert places.is_nested
        cut = set(places.optimizer.axes) - set(places.working.axes)
        assert cut <= {"dp", "tp"}
