"""Precision: masters, copies to compute with, sums of gradients, and a loss that is scaled."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

import autopar as ap
from autopar.plans.plan import SavedPlan
from autopar.strategies.node_info import info
from tests import models
from tests.captures import alike
from tests.models import Case
from tests.pipeline.models import share_captures  # noqa: F401

MESH = ap.Mesh(dp=2, tp=2)
BF16 = ap.Precision(compute=torch.bfloat16)


def in_float32(case: Case) -> Case:
    """Return the case in single precision."""
    args, kwargs = _cast((case.args, case.kwargs), torch.float32)
    return replace(case, model=case.model.float(), args=args, kwargs=kwargs)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    return pytree.tree_map(cast, tree)


def alone(case: Case, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of masters on one device that computes in `dtype`."""
    model = copy.deepcopy(case.model)
    kept = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for name, _ in module.named_parameters(recurse=False)
    }
    masters = dict(model.named_parameters())
    working = {name: p if name in kept else p.to(dtype) for name, p in masters.items()}
    args, kwargs = _cast((case.args, case.kwargs), dtype)
    loss = case.loss(functional_call(model, working, args, kwargs, tie_weights=True))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in masters.items() if p.grad is not None}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the error of all gradients together, relative to their size."""
    assert one.keys() == other.keys()
    difference = sum(float((one[n].double() - other[n].double()).square().sum()) for n in one)
    return (difference / sum(float(g.double().square().sum()) for g in other.values())) ** 0.5


def single(name: str) -> Case:
    """Captured once."""
    case = in_float32(models.ZOO[name]())
    alike(case.model, name)
    return case


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt", {"mesh": MESH}),
        ("gpt", {"mesh": ap.Mesh(pp=2, dp=2)}),
        ("llama", {"mesh": MESH, "microbatches": 2}),
        ("resnet", {"mesh": MESH}),
        ("resnet", {"mesh": ap.Mesh(dp=4)}),
    ],
    ids=str,
)
def test_the_parallel_program_rounds_as_one_device_does(name, options):
    """Both are as far from exact numbers as rounding to 8 bits takes them, and no farther apart.

    What one device loses by rounding is measured against the same model in float32. Sums in another
    order round otherwise, but no more of them: so the two lie within twice that of one another.
    """
    case = single(name)
    exact_loss, exact = alone(case, torch.float32)
    loss, rounded = alone(case, torch.bfloat16)
    lost = distance(rounded, exact)
    module = ap.parallelize(
        case.model, case.args, case.kwargs, mode="propagate", precision=BF16, **options
    )
    found = module.step(*case.args, **case.kwargs)
    assert found.dtype == loss.dtype
    assert 1e-4 < lost < 0.1
    assert distance(module.full_grads(), rounded) < 2 * lost
    assert abs(float(found) - float(exact_loss)) < 2**-7 * float(exact_loss)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("options", [{"mesh": MESH}, {"mesh": ap.Mesh(pp=2, dp=2)}], ids=str)
def test_casts_are_where_they_belong(options):
    """Computing in more digits than masters have: all that is left is their own rounding."""
    case = single("gpt")
    loss, expected = alone(case, torch.float64)
    precision = ap.Precision(compute=torch.float64)
    module = ap.parallelize(case.model, case.args, case.kwargs, precision=precision, **options)
    found = module.step(*case.args, **case.kwargs)
    assert abs(float(found) - float(loss)) < 1e-12
    assert distance(module.full_grads(), expected) < 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": ap.Mesh(dp=4)},
        {"mesh": ap.Mesh(dp=4), "microbatches": 2, "states": "zero3"},
        {"mesh": ap.Mesh(pp=2, dp=2), "microbatches": 2, "schedule": "zb-h1"},
    ],
    ids=str,
)
def test_gradients_are_summed_in_the_dtype_that_is_asked_for(options):
    """A sum in 8 bits has 8 bits, and is as far from the exact one as so many roundings take it."""
    case = in_float32(models.mlp(layers=4))
    _, expected = alone(case, torch.float32)
    for reduce, far in ((torch.bfloat16, 2**-6), (torch.float32, 1e-6)):
        precision = ap.Precision(compute=torch.float32, reduce=reduce)
        module = ap.parallelize(
            case.model, case.args, mode="propagate", precision=precision, **options
        )
        module.step(*case.args)
        found = module.full_grads()
        assert distance(found, expected) < far
        rounded = {name: value.to(torch.bfloat16).float() for name, value in found.items()}
        assert (distance(found, rounded) == 0) == (reduce == torch.bfloat16)


def test_a_step_that_fails_leaves_nothing_behind():
    case = models.gpt(layers=1)
    case = replace(case, model=case.model.float())
    module = ap.parallelize(case.model, case.args, mesh=ap.Mesh(dp=2), mode="data", precision=BF16)
    wrong = [arg + 10**6 for arg in case.args]
    with pytest.raises(IndexError):
        module.step(*wrong)
    module.step(*case.args)


def test_what_moves_is_listed_in_the_dtype_in_which_it_moves():
    case = in_float32(models.mlp(hidden=32))
    options = {"mesh": ap.Mesh(dp=2), "mode": "data", "states": "zero3"}
    plan = ap.plan(case.model, case.args, precision=BF16, **options)
    gathers = [one for one in plan.movements() if one.forward == "all_gather"]
    size = sum(parameter.numel() for parameter in case.model.parameters())
    assert sum(one.bytes for one in gathers) == 2 * size
    assert {one.tensor[:4] for one in gathers} == {"bf16"}


def test_the_same_gradients_are_summed_once_a_step():
    """Positions are cast, too, which no input cuts: a cast is no operator that reads them."""
    case = in_float32(models.gpt())
    found = []
    for precision in (None, BF16):
        options = {"mesh": MESH, "mode": "data", "states": "zero2", "precision": precision}
        plan = ap.plan(case.model, case.args, **options)
        sums = {n: info(p).sync for n, p in plan.program.placeholders.items() if info(p).places}
        found.append((sums, plan.decisions.apart))
        text = next(line for line in str(plan).splitlines() if "positions.weight" in line)
        assert "kept as f32[8@dp@tp, 32]" in text
    assert found[0] == found[1]
    plan = ap.plan(case.model, case.args, **{**options, "states": "zero3"})
    text = next(line for line in str(plan).splitlines() if "positions.weight" in line)
    assert "f32[8@dp@tp, 32]" in text
    assert "read as bf16[8, 32]" in text


def test_a_model_in_few_digits_has_masters_and_states_in_more():
    case = in_float32(models.gpt())
    case.model.bfloat16()
    module = ap.parallelize(case.model, case.args, case.kwargs, mesh=MESH, precision=BF16)
    optimizer = torch.optim.AdamW(module.parameters())
    module.step(*case.args, **case.kwargs)
    optimizer.step()
    states = [s for state in optimizer.state.values() for s in state.values() if s.ndim]
    assert {s.dtype for s in states} == {torch.float32}
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert {p.dtype for p in case.model.parameters()} == {torch.bfloat16}


def test_a_file_has_the_precision(tmp_path):
    case = in_float32(models.gpt())
    plan = ap.plan(case.model, case.args, case.kwargs, mesh=MESH, precision=BF16)
    plan.save(tmp_path / "plan.json")
    saved = ap.Plan.load(tmp_path / "plan.json")
    assert saved.precision == BF16
    for text in map(str, (plan, saved)):
        assert f"  precision  {BF16}" in text
    again = saved.attach(case.model, case.args, case.kwargs)
    assert again.decisions == plan.decisions
    assert again.attach(case.model).precision == BF16
    assert SavedPlan.of(again).to_json() == SavedPlan.of(plan).to_json()


class Overflows(nn.Module):
    """Gradients leave the range of half precision when the input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


@pytest.mark.parametrize("options", [{"mesh": ap.Mesh(dp=2)}, {"mesh": ap.Mesh(pp=2)}], ids=str)
def test_an_overflow_skips_the_step_and_halves_the_scale(options):
    torch.manual_seed(0)
    model, good = Overflows(), torch.randn(8, 4)
    precision = ap.Precision(compute=torch.float16, loss_scale="dynamic")
    module = ap.parallelize(model, (good,), precision=precision, **options)
    plain = ap.parallelize(model, (good,), precision=ap.Precision(torch.float16), **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in module.full_state_dict().items()}
    scale = module.loss_scale.value
    module.step(good * 1e3)
    assert all(parameter.grad is None for parameter in module.parameters())
    optimizer.step()
    assert all(torch.equal(v, before[n]) for n, v in module.full_state_dict().items())
    assert (module.loss_scale.value, module.loss_scale.skipped) == (scale / 2, 1)
    while module.loss_scale.skipped == module.loss_scale.good + 1 or not module.loss_scale.good:
        module.zero_grad()
        module.step(good)
    plain.step(good)
    expected = plain.full_grads()
    for name, gradient in module.full_grads().items():
        assert torch.allclose(gradient, expected[name], rtol=2e-2, atol=1e-3), name


def test_gradients_of_several_scaled_steps_add_up():
    torch.manual_seed(0)
    model, x = Overflows(), torch.randn(8, 4)
    precision = ap.Precision(compute=torch.float32, loss_scale="dynamic")
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), precision=precision)
    module.step(x)
    once = module.full_grads()
    module.step(x)
    for name, gradient in module.full_grads().items():
        assert torch.allclose(gradient, 2 * once[name])
    assert module.loss_scale.good == 2


def test_every_so_many_good_steps_more_is_tried():
    from autopar.runtime.module.loss_scale import GROWTH_INTERVAL, LossScale

    scale = LossScale()
    for _ in range(GROWTH_INTERVAL):
        scale.update(is_good=True)
    assert scale == LossScale(value=2.0**17)
    scale.update(is_good=True)
    scale.update(is_good=False)  # from which steps are counted anew
    assert scale == LossScale(value=2.0**16, skipped=1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ap.Precision(compute=torch.int8), ["floating-point", "int8", "bfloat16"]),
        (lambda: ap.Precision(compute="bf16"), ["floating-point", "'bf16'"]),
        (lambda: ap.Precision(reduce=torch.float8_e4m3fn), ["reduce=torch.float8_e4m3fn"]),
        (lambda: ap.Precision(loss_scale=128), ["loss_scale=128", "dynamic"]),
        (lambda: ap.plan(Overflows(), (torch.randn(8, 4),), precision="bf16"), ["a Precision"]),
        (lambda: ap.verify(Overflows(), (torch.randn(8, 4),), precision=BF16), ["float64"]),
    ],
)
def test_what_is_no_precision_is_refused(make, words):
    with pytest.raises(ap.InvalidInput) as raised:
        make()
    assert all(word in str(raised.value) for word in words)


class Stubborn(nn.Module):
    """Adds a table of float32, so that its linear layer is given what it does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.table).sum()


def test_a_layer_that_refuses_a_precision_is_named():
    with pytest.raises(ap.InvalidInput) as raised:
        ap.plan(Stubborn(), (torch.randn(8, 4),), mesh=ap.Mesh(dp=2), precision=BF16)
    assert "self.linear(x + self.table)" in str(raised.value)
