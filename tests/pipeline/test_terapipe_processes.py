"""TeraPipe on processes: messages of slices, shared keys and values, states of ranks."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch.distributed as dist

import autopar as ap
from tests.annotations import megatron
from tests.distributed.forked import launch_forked
from tests.models import Case, gpt
from tests.parity import Outcome, assert_equal, parallel_outcome, single_outcome

Form = tuple[dict[str, int], list[int], int, str]  # mesh, slices, micro-batches, states
FORMS: dict[int, list[Form]] = {
    2: [({"pp": 2}, [3, 5], 1, "whole"), ({"pp": 2}, [2, 2, 3, 1], 2, "whole")],
    4: [
        ({"pp": 2, "tp": 2}, [3, 5], 2, "whole"),
        ({"pp": 2, "dp": 2}, [5, 3], 2, "zero2"),
        ({"pp": 2, "dp": 2}, [4, 4], 2, "zero3"),
        ({"pp": 4}, [2, 2, 2, 2], 1, "whole"),
    ],
}
pytestmark = pytest.mark.usefixtures("warm_ranks")


def small() -> Case:
    return gpt(layers=4, batch=4, hidden=16, heads=2, sequence=8, vocabulary=19)


@cache
def outcome() -> Outcome:
    """What one device does, once for all ranks."""
    return single_outcome(small())


@cache
def plan_of(sizes: tuple[tuple[str, int], ...], slices: tuple[int, ...], count: int, states: str):
    case = megatron(small()) if "tp" in dict(sizes) else small()
    options: dict[str, Any] = {"schedule": "terapipe", "schedule_options": {"slices": [*slices]}}
    options |= {"microbatches": count, "states": states}
    mesh = ap.Mesh(**dict(sizes))
    return case, ap.plan(case.model, case.args, mode="propagate", mesh=mesh, **options)


def plans(ranks: int) -> list[tuple[Case, ap.Plan]]:
    return [plan_of(tuple(m.items()), tuple(s), n, states) for m, s, n, states in FORMS[ranks]]


def prepared(ranks: int) -> list[tuple[Case, None]]:
    """What is known before the ranks are there."""
    outcome()
    plans(ranks)
    return []


def train(say):
    for case, plan in plans(dist.get_world_size()):
        case = case.fresh()
        module = ap.parallelize(case.model, case.args, plan=plan)
        assert_equal(parallel_outcome(module, case), outcome())
        (record,) = module.backend.recorded.values()
        place = next(iter(module.backend.recorded))
        assert tuple(record.order) == module.plan.pipelining.schedule.orders[place]
        say(str(plan.whole_mesh))


@pytest.mark.parametrize("ranks", [2, 4])
def test_parity_on_real_ranks(ranks):
    heard: list[str] = []
    cases = partial(prepared, ranks)
    launch_forked(cases, train, ranks, heard=lambda rank, form: heard.append(form))
    assert len(heard) == ranks * len(FORMS[ranks])
