"""Programs that compute in another dtype than parameters are kept in, on processes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

import autopar as ap
from tests import models
from tests.distributed.states import NAMED, STEP, elements, exchanged, most_gathered
from tests.held import copies_of, kept_for_backward
from tests.models import Case
from tests.test_precision import BF16, Overflows, alone, distance, in_float32

EXACT = ap.Precision(compute=torch.float64)


@cache
def small_mlp() -> Case:
    return in_float32(models.mlp(hidden=10, layers=3))


@cache
def small_gpt(layers: int = 2) -> Case:
    return in_float32(models.gpt(layers=layers))


def cases() -> list[tuple[Case, ap.Precision]]:
    """What is captured before the ranks are there."""
    return [(small_mlp(), EXACT), (small_gpt(), EXACT), (small_gpt(), BF16), (small_gpt(4), BF16)]


def made(case: Case, precision: ap.Precision, **options: Any) -> ap.ParallelModule:
    options = {"mode": "propagate", "precision": precision, **options}
    return ap.parallelize(case.model, case.args, case.kwargs, **options)


def stepped(case: Case, precision: ap.Precision, **options: Any) -> tuple[float, dict]:
    """The loss and the gradients of a step."""
    module = made(case, precision, **options)
    loss = module.step(*case.args, **case.kwargs)
    assert {parameter.grad.dtype for parameter in module.parameters()} == {torch.float32}
    assert not any(copy.untyped_storage().nbytes() for copy in copies_of(module))
    return float(loss), module.full_grads()


def computes_in_more_digits(ranks: int) -> None:
    """All that is left is the rounding of sums, and of gradients, to those of the parameters."""

    def compare(case: Case, **options: Any) -> None:
        loss, expected = alone(case, torch.float64)
        found, gradients = stepped(case, EXACT, **options)
        assert abs(found - float(loss)) < 1e-12, options
        assert distance(gradients, expected) < 1e-6, options

    ways = ("whole", 1), ("zero1", 2), ("zero2", 1), ("zero3", 1), ("zero3", 2), (STEP, 2)
    for states, count in ways:
        compare(small_mlp(), mesh=ap.Mesh(dp=ranks), states=states, microbatches=count)
    case = small_gpt()
    for schedule, slices in (("1f1b", 2), ("zb-h1", 2), ("chimera", 2), ("zb-v", 4)):
        case = small_gpt(4 if schedule == "zb-v" else 2)
        compare(case, mesh=ap.Mesh(pp=ranks), schedule=schedule, microbatches=slices)
    case = small_gpt()
    for states in ("whole", "zero3"):
        compare(case, mesh=ap.Mesh(dp=ranks), states=states, recompute="full")


def rounds_as_one_device_does(ranks: int) -> None:
    data = [{"mesh": ap.Mesh(dp=ranks), "states": states} for states in ("whole", *NAMED)]
    pipelines = [{"mesh": ap.Mesh(pp=ranks), "schedule": name} for name in ("1f1b", "chimera")]
    assert_rounds(small_gpt(), *data, *pipelines)
    assert_rounds(small_gpt(4), {"mesh": ap.Mesh(pp=ranks), "schedule": "zb-v"})


def rounds_in_pipelines_with_cut_states(ranks: int) -> None:
    mesh = ap.Mesh(pp=2, dp=ranks // 2)
    names = ("zb-h1", "zero2"), ("chimera", "zero3")
    ways = [{"mesh": mesh, "schedule": name, "states": states} for name, states in names]
    assert_rounds(small_gpt(), *ways)
    assert_rounds(small_gpt(4), {"mesh": mesh, "schedule": "zb-v", "states": "zero3"})


def assert_rounds(case: Case, *ways: dict[str, Any]) -> None:
    """As in `tests/test_precision.py`."""
    exact_loss, exact = alone(case, torch.float32)
    _, rounded = alone(case, torch.bfloat16)
    lost = distance(rounded, exact)
    for options in ways:
        found, gradients = stepped(case, BF16, microbatches=2, **options)
        assert distance(gradients, rounded) < 2 * lost, options
        assert abs(found - float(exact_loss)) < 2**-7 * float(exact_loss), options


def sends_what_it_computes_with(ranks: int) -> None:
    """Parameters travel in the dtype of their copies, gradients in that of their sums."""
    case = in_float32(models.mlp(hidden=32, layers=3))
    size = sum(parameter.numel() for parameter in case.model.parameters())
    reduced = ap.Precision(reduce=torch.bfloat16)
    for states, precision in ((STEP, BF16), ("zero1", reduced), ("zero3", BF16)):
        module = made(case, precision, mesh=ap.Mesh(dp=ranks), states=states)
        with exchanged() as found:
            module.step(*case.args, **case.kwargs)
        sent = sum(one.nbytes for group in found.gathered for one in group)
        again = 2 if states == "zero3" else 1
        assert 2 * size <= sent <= again * 2 * size
        assert {one.dtype for one in found.parts} == {precision.reduce}
        assert elements(found.cut) == size


def holds_copies_in_few_digits(ranks: int) -> None:
    """What a step works with is in the dtype that it computes in; autograd keeps no other copy."""
    case = small_gpt(4)
    size = sum(parameter.numel() for parameter in case.model.parameters())
    for states in ("whole", "zero1", "zero3"):
        module = made(case, BF16, mesh=ap.Mesh(dp=ranks), states=states)
        kept = kept_for_backward(module, case)
        assert 0.98 * module.plan.memory.activations < kept <= module.plan.memory.activations
        most = most_gathered(module, case)
        if states == "zero3":
            assert most <= module.plan.memory.gathered < 2 * size
        else:
            assert most == module.plan.memory.gathered == 2 * size


def is_called(ranks: int) -> None:
    """Directly, twice, and with a parameter that no longer learns."""
    case = small_mlp()
    _, once = alone(case, torch.float64)
    for states in ("whole", "zero1", "zero3"):
        module = made(case, EXACT, mesh=ap.Mesh(dp=ranks), states=states)
        first, second = module(*case.args), module(*case.args)
        (case.loss(first) + case.loss(second)).backward()
        case.loss(module(*case.args)).backward()
        assert distance(module.full_grads(), {n: 3 * g for n, g in once.items()}) < 1e-6
        module.zero_grad()
        frozen, parameter = next(module.named_parameters())
        parameter.requires_grad_(False)
        with torch.no_grad():
            assert module(*case.args) is not None
        module.step(*case.args)
        assert distance(module.full_grads(), {n: g for n, g in once.items() if n != frozen}) < 1e-6


def an_overflow_on_one_rank_skips_the_step_on_all(ranks: int) -> None:
    torch.manual_seed(0)
    model, good = Overflows(), torch.randn(8, 4)
    bad = torch.cat([good[:-1], good[-1:] * 1e3])
    precision = ap.Precision(compute=torch.float16, loss_scale="dynamic")
    for states in ("whole", "zero3"):
        options = {"mesh": ap.Mesh(dp=ranks), "states": states, "microbatches": 2}
        module = ap.parallelize(model, (good,), mode="propagate", precision=precision, **options)
        module.step(bad)
        assert module.loss_scale.skipped == 1
        assert all(parameter.grad is None for parameter in module.parameters())
        while not module.loss_scale.good:
            module.step(good)
        plain: dict[str, Tensor] = {
            name: torch.autograd.grad(model(good), parameter)[0]
            for name, parameter in model.named_parameters()
        }
        assert distance(module.full_grads(), plain) < 2e-2


CHECKS = {
    2: (
        computes_in_more_digits,
        rounds_as_one_device_does,
        sends_what_it_computes_with,
        holds_copies_in_few_digits,
        is_called,
        an_overflow_on_one_rank_skips_the_step_on_all,
    ),
    4: (rounds_in_pipelines_with_cut_states,),
}
