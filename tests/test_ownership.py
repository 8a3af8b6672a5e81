"""Ownership: what lives after a step is what the plan counts, and a closed module frees all of it.

The garbage collector is off meanwhile: what it alone would find stays till it comes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.runtime.module.submodule_view import class_like
from tests import models
from tests.captures import shared_captures
from tests.held import Allocated, held_by
from tests.mixtures import mixture, mixture_cut
from tests.models import Case

HOST = ap.States("all", "all", "all", optimizer_device="host", parameters_device="host")
DATA = {"mesh": ap.Mesh(dp=2), "mode": "data"}
SETTINGS = [
    ("gpt", DATA),
    ("gpt", DATA | {"states": "zero1"}),
    ("gpt", DATA | {"states": "zero2", "microbatches": 2}),
    ("gpt", DATA | {"states": "zero3", "recompute": "selective"}),
    ("gpt", DATA | {"states": HOST, "recompute": ap.Recompute("full", keep="host")}),
    ("gpt", {"mesh": ap.Mesh(tp=2), "recompute": ap.Recompute("full", keep="cut")}),
    ("gpt", {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 2}),
    ("gpt", {"mesh": ap.Mesh(pp=2), "schedule": "zb-h1", "microbatches": 2, "recompute": "full"}),
    ("gpt", DATA | {"check": True}),
    ("mixture", {"mesh": ap.Mesh(ep=2)}),
    ("mixture", {"mesh": ap.Mesh(ep=2), "recompute": "full"}),
]


@pytest.fixture
def captured_once() -> Iterator[None]:
    with shared_captures():
        yield


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def case_of(name: str) -> Case:
    if name == "mixture":
        return mixture_cut(mixture(), ap.Mesh(ep=2))
    return models.shared(name, layers=2)


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in kept if isinstance(value, Tensor)]


@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=str)
def test_what_lives_after_a_step_is_the_plan_s(
    name: str, options: dict, captured_once: None, no_collector: None
) -> None:
    case, check = case_of(name), options.get("check", False)
    options = {key: value for key, value in options.items() if key != "check"}
    plan = ap.plan(case.model, case.args, case.kwargs, **options)
    with Allocated() as allocated:
        module = ap.parallelize(
            case.model, case.args, case.kwargs, plan=plan, backend="virtual", check=check
        )
        optimizer = torch.optim.AdamW(module.parameters())
        for step in ("first", "second"):
            module.step(*case.args, **case.kwargs)
            optimizer.step()
            allocated.mark(step)
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        kept = held_by([*module.parameters(), *module.buffers(), *gradients, *states_of(optimizer)])
        del gradients
        optimizer.zero_grad()
        module.close()
        del optimizer
        allocated.mark("closed")
    assert allocated.at == {"first": kept, "second": kept, "closed": 0}


class Local(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


def test_a_closed_module_frees_its_model_and_plan(no_collector: None) -> None:
    model, x = Local(), torch.ones(2, 4)
    with ap.parallelize(model, (x,), backend="virtual", **DATA) as module:
        module.step(x)
    gone = [weakref.ref(one) for one in (model, module, module.plan)]
    del model, module
    assert [one() for one in gone] == [None, None, None]


def test_modules_that_come_and_go_leave_nothing(captured_once: None) -> None:
    case = models.shared("mlp", layers=2)
    plan = ap.plan(case.model, case.args, **DATA)
    objects = []
    for number in range(50):
        with ap.parallelize(case.model, case.args, plan=plan, backend="virtual") as module:
            module.step(*case.args)
        del module
        if number in (5, 49):
            gc.collect()
            objects.append(len(gc.get_objects()))
    assert objects[1] <= objects[0]


def test_classes_of_modules_go_with_their_modules() -> None:
    kind = weakref.ref(class_like(ap.ParallelModule, type("Passing", (Local,), {})))
    gc.collect()
    assert kind() is None
