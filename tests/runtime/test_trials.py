"""Plans are run to choose among them, and nothing of that stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import autopar as ap
from autopar.errors import ExecutionError, InvalidInput
from autopar.options import PlanOptions
from autopar.planning import make_plans
from autopar.runtime.module import trials
from autopar.runtime.observation.timing import time_in_rounds
from autopar.text.units import seconds_text
from tests import models
from tests.captures import shared_captures
from tests.models import Case
from tests.toy import machines

FOUR = machines(4)

SEVERAL = 6  # ways, some of them in one micro-batch and others in more


def parallel(case: Case, profile: int | None = 4, **about: Any) -> ap.ParallelModule:
    options: dict[str, Any] = {"cluster": FOUR, "backend": "virtual", **about}
    return ap.parallelize(case.model, case.args, case.kwargs, profile=profile, **options)


def timed(seconds: Callable[[ap.ParallelModule], float]) -> Any:
    """Steps take what is said, not what they take."""
    return patch.object(trials, "step_seconds", lambda module, args, kwargs: seconds(module))


def small() -> Case:
    return models.shared("mlp")


def is_undivided(how: str) -> bool:
    """Return whether a way has one micro-batch, by its words."""
    return how.split(": ")[-1].split(", ")[-1] == "1 micro-batch"


@pytest.fixture(autouse=True)
def _captured_once() -> Iterator[None]:
    with shared_captures():
        yield


def test_the_fastest_that_was_measured_is_taken_and_all_are_told(tmp_path: Path) -> None:
    """Steps that take longer in one micro-batch make the second best the best."""
    case = small()
    predicted = parallel(case, None).plan
    with timed(
        lambda module: (3.0 if module.plan.microbatches == 1 else 1.0) + module.plan.seconds
    ):
        plan = parallel(case, SEVERAL).plan
    assert predicted.trials == ()
    assert predicted.microbatches == 1 < plan.microbatches
    assert len(plan.trials) == SEVERAL
    assert [one.measured for one in plan.trials] == sorted(one.measured for one in plan.trials)
    assert plan.trials[0].how == plan.alternative(math.inf).how
    for one in plan.trials:
        assert one.measured == one.predicted + (3.0 if is_undivided(one.how) else 1.0)
        assert one.how in {way.how for way in plan.alternatives}
        assert one.how in str(plan).partition("ways that were run")[2]
    told = str(plan.explain("microbatches"))
    ran = seconds_text(plan.trials[0].measured)
    assert f"the fastest that was run: {ran} a step when it was measured" in told
    words = " ".join(told.split())
    assert "took 2 s more (3 times) when both were run" in words
    assert "was predicted to take" in words.partition("when both were run")[2]
    plan.save(tmp_path / "plan.json")
    plan.report(tmp_path / "plan.html")
    saved = ap.Plan.load(tmp_path / "plan.json")
    assert saved.trials == plan.trials == saved.attach(case.model, case.args).trials
    assert plan.to_json()["trials"][0]["measured"] == plan.trials[0].measured
    page = (tmp_path / "plan.html").read_text()
    assert plan.trials[0].how in page.partition("Profiled")[2]
    assert "slower when both were run" in page


def test_steps_count_when_they_get_no_faster() -> None:
    """The first ones of a process, or of a kernel, take long: they are no step's."""
    taken = dict[int, int]()

    def seconds(module: ap.ParallelModule) -> float:
        number = taken[id(module)] = taken.get(id(module), 0) + 1
        return max(1.0, 8.0 / 2**number)

    with timed(seconds):
        plan = parallel(small()).plan
    assert {one.measured for one in plan.trials} == {1.0}


def test_what_is_run_is_what_the_same_request_by_name_gives() -> None:
    """The plans are those that are predicted fastest, the simplest of the best first. Each takes
    no less than what its name is planned to."""
    case = small()
    options = PlanOptions(cluster=FOUR)
    plans = make_plans(case.model, case.args, case.kwargs, options, 8)
    seconds = [plan.seconds for plan in plans]
    near = sum(one <= 1.01 * min(seconds) for one in seconds)
    assert seconds[0] <= 1.01 * min(seconds)
    assert max(seconds[:near]) <= min(seconds[near:])
    assert seconds[near:] == sorted(seconds[near:])
    assert len({plan.alternative(1.0).how for plan in plans}) == 8
    assert plans[0].seconds == ap.plan(case.model, case.args, cluster=FOUR).seconds
    for plan in plans:
        asked: dict[str, Any] = {"mesh": plan.whole_mesh, "microbatches": plan.microbatches}
        asked["states"] = plan.states
        if plan.pipelining is not None:
            made = plan.pipelining.schedule
            asked["schedule"] = {"name": made.name, **dict(made.options)}
            asked["microbatches"] = made.all_parts
        named = ap.plan(case.model, case.args, cluster=FOUR, **asked)
        assert named.alternatives[0].seconds <= plan.seconds * (1 + 1e-6)


class Noisy(nn.Module):
    """Draws random numbers, keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x)))).square().mean()


def test_it_leaves_no_trace() -> None:
    """Values, statistics, gradients, modes and random numbers are what they were; and so is the
    first step."""
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(8, 8)
    model(x).backward()
    model.last.eval()
    modes = [module.training for module in model.modules()]
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    losses, numbers = [], []
    for profile in (None, 3):
        torch.manual_seed(1)
        about = {"cluster": machines(2), "backend": "virtual", "mesh": ap.Mesh(dp=2)}
        about["states"] = "whole"
        module = ap.parallelize(model, (x,), profile=profile, **about)
        numbers.append(torch.get_rng_state())
        losses.append(module.step(x).item())
        assert [one.training for one in model.modules()] == modes
        assert all(torch.equal(one.grad, own) for one, own in zip(model.parameters(), gradients))
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert losses[0] == losses[1]
    assert torch.equal(*numbers)
    assert len(module.plan.trials) == 1  # all was asked for by name: a choice of one


def test_what_was_built_on_no_device_is_made_for_each() -> None:
    """Values are those of a model built on the CPU, though others were made from them before."""
    made = []
    for device, profile in (("cpu", None), ("meta", 3)):
        torch.manual_seed(2)
        with torch.device(device):
            model = Noisy()
        about = {"cluster": machines(2), "backend": "virtual", "profile": profile}
        made.append(ap.parallelize(model, (torch.zeros(8, 8),), **about).full_state_dict())
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())


def test_what_has_no_room_is_left_out_and_told_of() -> None:
    def seconds(module: ap.ParallelModule) -> float:
        if module.plan.microbatches == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return 1.0

    with (
        timed(seconds),
        pytest.warns(UserWarning, match="left out: .*1 micro-batch.*out of memory"),
    ):
        plan = parallel(small(), SEVERAL).plan
    assert [bool(one.why) for one in plan.trials] == [is_undivided(one.how) for one in plan.trials]
    assert plan.trials[-1].measured is None is not plan.trials[0].measured
    assert plan.microbatches > 1

    def nowhere(module: ap.ParallelModule) -> float:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes")

    with timed(nowhere), pytest.raises(ExecutionError, match="have room"):
        parallel(small(), 2)

    def wrong(module: ap.ParallelModule) -> float:
        raise ZeroDivisionError("deliberate")

    with timed(wrong), pytest.raises(ZeroDivisionError, match="deliberate"):
        parallel(small(), 2)


@pytest.mark.parametrize("number", [0, -3, True, 2.5, "all"])
def test_a_number_of_plans_is_one(number: Any) -> None:
    with pytest.raises(InvalidInput, match="profile is a number of plans"):
        parallel(small(), number)


def test_what_cannot_be_run_is_refused() -> None:
    case = small()
    plan = ap.plan(case.model, case.args, cluster=FOUR)
    with pytest.raises(InvalidInput, match="finished plan leaves no choice"):
        ap.parallelize(case.model, case.args, plan=plan, profile=2, backend="virtual")
    args = tuple(value.to("meta") for value in case.args)
    with pytest.raises(InvalidInput, match="which have data"):
        ap.parallelize(case.model, args, cluster=FOUR, profile=2, backend="virtual")


def test_a_loss_outside_of_the_model_is_refused_before_it_is_planned() -> None:
    told: list[str] = []
    about = {"cluster": machines(2), "profile": 2, "backend": "virtual"}
    about["progress"] = lambda phase, detail: told.append(phase)
    with pytest.raises(InvalidInput, match="the loss that the model returns") as caught:
        ap.parallelize(nn.Linear(8, 8), (torch.randn(8, 8),), **about)
    assert "profile=2 of a model with outputs f32[8, 8]" in str(caught.value)
    assert "leave profile= out" in str(caught.value)
    assert told == ["capture"]


def test_progress_tells_of_each_round() -> None:
    """What is clearly slower is not run again."""
    heard: list[str] = []

    def report(phase: str, detail: str) -> None:
        heard.extend([detail] * (phase == "profile"))

    with timed(lambda module: 1.0 if module.plan.microbatches == 1 else 2.0):
        plan = parallel(small(), SEVERAL, progress=report).plan
    rounds = [line.partition(",")[0] for line in heard]
    fast = [one.how for one in plan.trials if is_undivided(one.how)]
    assert 0 < len(fast) < SEVERAL
    later = [f"round {n} of 3" for n in (2, 3) for _ in fast]
    assert rounds == ["round 1 of 3"] * SEVERAL + later
    assert {line.partition(", ")[2] for line in heard[SEVERAL:]} == {*fast}


def test_rounds_begin_with_another_one_each() -> None:
    order: list[int] = []

    def step(number: int) -> float:
        order.append(number)
        return float(len(order))

    found = time_in_rounds([lambda at=at: step(at) for at in range(3)], rounds=2, warm=1)
    assert order == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert found == [[6.0, 8.0], [4.0, 9.0], [5.0, 7.0]]
