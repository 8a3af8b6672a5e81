"""What two processes do together when plans are run, and one of them has no memory for some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import autopar as ap
from autopar.runtime.backends.stage_runs import StageRun, UnstagedRun
from autopar.runtime.backends.world import joined
from autopar.runtime.parameters.placing import TensorPlacer
from tests import models
from tests.models import Case
from tests.parity import assert_equal, parallel_outcome, single_outcome
from tests.toy import machines

ABOUT: dict[str, Any] = {"cluster": machines(2), "progress": False, "profile": 4}


def cases() -> list[tuple[Case, None]]:
    """What is captured before the ranks are there."""
    return [(models.shared("gpt", layers=1), None)]


def chosen(case: Case, **about: Any) -> ap.ParallelModule:
    """By a plan that is the same on both ranks, by the same figures, in the world of before."""
    here = joined()
    module = ap.parallelize(case.model, case.args, case.kwargs, **{**ABOUT, **about})
    told: list[Any] = [None, None]
    dist.all_gather_object(told, (module.plan.trials, str(module.plan.whole_mesh)))
    assert told[0] == told[1]
    assert here is None or joined() is here
    return module


@contextmanager
def without_memory(kind: Any, name: str, when: Callable[[Any], bool]) -> Iterator[None]:
    """Rank 1 has none there."""
    plain = getattr(kind, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and when(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(self, *args, **kwargs)

    with patch.object(kind, name, call):
        yield


def takes_the_fastest_on_all_ranks() -> None:
    case = models.shared("gpt", layers=1)
    module = chosen(case)
    assert len(module.plan.trials) == 4
    assert not any(one.why for one in module.plan.trials)
    assert module.plan.trials[0].how == module.plan.alternative(0.0).how
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))


def leaves_out_what_one_rank_has_no_memory_for() -> None:
    """In the middle of a step, of a stage, and where values are placed: the other rank waits for
    it there. What is then made in the world of before has groups of its own, that all know."""
    case = models.shared("gpt", layers=1)
    calls: list[TensorPlacer] = []

    def third_of_the_second_plan(placing: TensorPlacer) -> bool:
        calls.append(placing)
        plans = list(dict.fromkeys(map(id, calls)))
        return calls.count(placing) == 3 and plans.index(id(placing)) == 1

    with without_memory(UnstagedRun, "__call__", lambda run: run.backend.program.batches is None):
        module = chosen(case)
    wrong = [one.how for one in module.plan.trials if one.why]
    assert 0 < len(wrong) < len(module.plan.trials)
    assert all(how.endswith(" 1 micro-batch") for how in wrong)
    assert all(one.why in ("", "out of memory on rank 1") for one in module.plan.trials)
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
    with without_memory(TensorPlacer, "place_from_rank0", third_of_the_second_plan):
        module = chosen(case)
    assert [one.why for one in module.plan.trials] == ["", "", "", "out of memory on rank 1"]
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
    with (
        without_memory(UnstagedRun, "__call__", bool),
        without_memory(StageRun, "__call__", bool),
        pytest.raises(ap.ExecutionError, match="have room"),
    ):
        chosen(case)
    module = chosen(case, profile=None, mesh=ap.Mesh(tp=2))
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))


CHECKS = [takes_the_fastest_on_all_ranks, leaves_out_what_one_rank_has_no_memory_for]
