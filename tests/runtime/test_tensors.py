"""Changes of the tensors in a parallel module's tree take effect, or are refused.

What is the same on processes is checked in tests/distributed/checks.py.
"""

from __future__ import annotations

from typing import Any

import pytest

import autopar as ap
from autopar import Mesh
from tests.pipeline.models import share_captures  # noqa: F401
from tests.runtime.acts import (
    DONE,
    DONE_TO_WHOLE,
    REFUSED,
    assert_done,
    assert_refused,
    put_another_shape,
    shared_tree,
)

PLAN = {"mesh": Mesh(d=2)}
WAYS: dict[str, dict[str, Any]] = {
    "whole": PLAN,
    "micro-batches": {**PLAN, "microbatches": 2},
    "1f1b": {"mesh": Mesh(pp=2, d=2), "microbatches": 2, "schedule": "1f1b"},
    "zb-h1": {"mesh": Mesh(pp=2, d=2), "microbatches": 2, "schedule": "zb-h1"},
}


def parallel(way: str) -> ap.ParallelModule:
    case = shared_tree()
    options = {"mode": "propagate", "backend": "virtual", **WAYS[way]}
    return ap.parallelize(case.model, case.args, **options)


@pytest.mark.parametrize("way", WAYS)
def test_acts_have_the_effect_that_they_have_on_the_model(way: str) -> None:
    case = shared_tree()
    plan = ap.plan(case.model, case.args, mode="propagate", **WAYS[way])
    for act in DONE + DONE_TO_WHOLE:
        module = ap.parallelize(case.model, case.args, plan=plan, backend="virtual")
        assert_done(module, act)


@pytest.mark.parametrize(("act", "rule"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_acts_that_make_another_program_are_refused(act: Any, rule: str) -> None:
    assert_refused(parallel("whole"), act, rule)


def test_a_refused_act_can_be_undone() -> None:
    module, case = parallel("whole"), shared_tree()
    loss = module.step(*case.args)
    module.get_buffer("scale").requires_grad_(True)
    with pytest.raises(ap.InvalidInput, match="take no gradient"):
        module(*case.args)
    module.get_buffer("scale").requires_grad_(False)
    assert module.step(*case.args) == loss


def test_another_shape_is_refused_where_it_is_put() -> None:
    """Nothing has changed then; where torch lets it through, the next call says what to do."""
    module, case = parallel("whole"), shared_tree()
    loss = module.step(*case.args)
    with pytest.raises(ap.InvalidInput, match=r"planned was \(6, 4\)(.|\n)*then parallelize it"):
        put_another_shape(module)
    assert module.step(*case.args) == loss
    module.get_parameter("a.weight").data = module.get_parameter("a.weight").detach()[:3]
    with pytest.raises(ap.InvalidInput, match="changed after parallelize; or change the model"):
        module.step(*case.args)
