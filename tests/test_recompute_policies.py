"""Checkpoint policies by operator: what they save stays, the rest is made again, exactly."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import autopar as ap
from autopar.capture import capture
from autopar.capture.policies import saved_results
from autopar.recompute import FULL, POLICY
from autopar.runtime.execution import recomputed_regions
from autopar.strategies.node_info import info
from tests import models
from tests.distributed.forked import launch_forked
from tests.held import kept_for_backward
from tests.models import Case
from tests.parity import assert_equal, assert_parity, parallel_outcome, single_outcome

aten = torch.ops.aten
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
PRODUCTS = [aten.mm.default, aten.addmm.default, aten.bmm.default]
X = torch.randn(8, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DATA = {"mesh": ap.Mesh(one=1), "mode": "data"}


def save_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    return "scaled_dot_product" in str(operator) or operator is aten.gelu.default


def save_every_second_product() -> Callable[..., CheckpointPolicy]:
    """A policy that counts, as torchtitan's does."""
    counts = Counter[str]()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts["products"] += operator in PRODUCTS
        return SAVE if operator in PRODUCTS and counts["products"] % 2 else RECOMPUTE

    return policy


POLICIES: dict[str, Callable[[], Any]] = {
    "list": lambda: PRODUCTS,
    "attention": lambda: save_attention,
    "counting": save_every_second_product,
}


class Wrapped(nn.Module):
    """Blocks of a GPT, each in a checkpoint with a policy."""

    def __init__(self, context: Any, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (models.GPTBlock(16, 2, False, dropout) for _ in range(layers))
        self.layers, self.context = nn.ModuleList(blocks).double(), context

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.context is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=self.context)
        return x.square().mean()


def wrapped(policy: Any, **sizes: Any) -> Case:
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    return Case("wrapped", Wrapped(policy and context, **sizes), (X,))


@pytest.mark.parametrize("name", POLICIES)
def test_the_operators_that_are_saved_are_those_of_eager_torch(name: str) -> None:
    def saved(run: Callable[[nn.Module], object]) -> list[str]:
        operators, policy = list[str](), POLICIES[name]()

        def recorded(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
            is_list = isinstance(policy, list)
            answer = operator in policy if is_list else policy(context, operator, *args, **kwargs)
            if answer in (True, SAVE):
                shapes = [tuple(value.shape) for value in args if isinstance(value, Tensor)]
                operators.append(f"{operator} {shapes}")
            return answer

        run(wrapped(recorded).model)
        return operators

    ours = saved(lambda model: capture(model, (X,)))
    assert ours
    assert ours == saved(lambda model: model(X))


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_kept_is_what_is_predicted(name: str) -> None:
    case = wrapped(POLICIES[name]())
    module = ap.parallelize(case.model, case.args, backend="virtual", **DATA)
    assert set(module.plan.decisions.recompute.values()) == {POLICY}
    predicted = module.plan.memory.activations
    assert predicted == pytest.approx(kept_for_backward(module, case), rel=0.015)
    plain = wrapped(None).model
    full, whole = (
        ap.plan(plain, (X,), recompute=how, **DATA).memory.activations for how in ("full", None)
    )
    assert full < predicted < whole
    by_option = ap.plan(plain, (X,), recompute={"policy": POLICIES[name]()}, **DATA)
    assert by_option.memory.activations == predicted


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor parallel": ("list", {"mesh": ap.Mesh(dp=2, tp=2), "mode": "auto"}),
    "zero3": ("counting", {"mesh": ap.Mesh(dp=2), "mode": "data", "states": "zero3"}),
    "micro-batches": ("attention", {"mesh": ap.Mesh(dp=2), "mode": "data", "microbatches": 2}),
    "1f1b": ("list", {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 4}),
    "zb-v": ("attention", {"mesh": ap.Mesh(pp=2), "schedule": "zb-v", "microbatches": 4}),
}


@pytest.mark.parametrize("form", FORMS)
def test_parity(form: str) -> None:
    name, options = FORMS[form]
    case = models.gpt(layers=4, hidden=16, heads=2)
    module = assert_parity(case, recompute={"policy": POLICIES[name]()}, **options)
    assert set(module.plan.decisions.recompute.values()) == {POLICY}


ON_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor parallel": ("list", {"mesh": ap.Mesh(tp=2), "mode": "auto"}),
    "zero3": ("counting", {"mesh": ap.Mesh(dp=2), "states": "zero3"}),
    "1f1b": ("attention", {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 4}),
}


def small_gpt() -> Case:
    return models.shared("gpt", layers=4, hidden=16, heads=2)


def captured_cases() -> list[tuple[Case, None]]:
    """Return what is captured before the ranks are forked."""
    return [(small_gpt(), None)]


def train_on_ranks(say: Callable[[str], None]) -> None:
    """Compare steps under each policy with those of one device; say what this rank keeps."""
    for form, (name, options) in ON_RANKS.items():
        case, how = small_gpt(), {"policy": POLICIES[name]()}
        options = {"mode": "propagate", **options, "recompute": how}
        module = ap.parallelize(case.model, case.args, **options)
        assert set(module.plan.decisions.recompute.values()) == {POLICY}
        assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
        if "pp" not in options["mesh"].names:
            predicted = module.plan.memory.activations
            assert kept_for_backward(module, case) == pytest.approx(predicted, rel=0.015)
        say(form)


def test_parity_on_two_processes() -> None:
    heard = dict[int, list[str]]()
    launch_forked(
        captured_cases,
        train_on_ranks,
        2,
        heard=lambda rank, form: heard.setdefault(rank, []).append(form),
    )
    assert heard == {0: [*ON_RANKS], 1: [*ON_RANKS]}


def test_a_dear_value_is_made_again_once_and_only_where_it_is_not_saved() -> None:
    case, runs = wrapped(save_attention), Counter[str]()
    module = ap.parallelize(case.model, case.args, backend="virtual", **DATA)
    again = recomputed_regions._RecomputedCall.__call__

    def counted(call: recomputed_regions._RecomputedCall, place: int) -> Tensor:
        if call.values is None:
            runs[getattr(call.function, "__name__", "")] += 1
        return again(call, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputed_regions._RecomputedCall, "__call__", counted)
        module.step(*case.args)
    marked = Counter(
        getattr(node.target, "__name__", "")
        for node in module.plan.rewritten.nodes
        if info(node).remade
    )
    assert runs
    assert runs <= marked
    assert not any("attention" in name or "gelu" in name for name in runs)


def test_random_numbers_are_the_same_when_they_are_drawn_again() -> None:
    def outcome(policy: Any) -> list[Tensor]:
        case = wrapped(policy, dropout=0.2)
        module = ap.parallelize(case.model, case.args, backend="virtual", **DATA)
        torch.manual_seed(3)
        loss = module.step(*case.args)
        return [loss, *module.full_grads().values(), torch.rand(1)]

    for first, second in zip(outcome(None), outcome(PRODUCTS), strict=True):
        assert torch.equal(first, second)


def test_a_saved_plan_needs_no_policy(tmp_path: Path) -> None:
    case = models.gpt(layers=4, hidden=16, heads=2)
    policy = save_every_second_product()
    plan = ap.plan(case.model, case.args, recompute={"policy": policy}, **DATA)
    plan.save(tmp_path / "plan.json")
    saved = ap.Plan.load(tmp_path / "plan.json").attach(case.fresh().model, case.args)
    assert saved_results(saved.original) == saved_results(plan.original) != ()
    assert saved.memory == plan.memory
    module = ap.parallelize(case.model, case.args, plan=saved, backend="virtual")
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))


@pytest.mark.parametrize("name", ["list", "counting"])
def test_equal_blocks_decide_by_themselves_if_a_policy_has_a_state(name: str) -> None:
    """A block has five products here, so that one that counts differs from block to block."""
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)), nn.GELU()) for _ in range(14))
    )
    policy = POLICIES[name]()
    plan = ap.plan(model, (X[0].float(),), recompute={"policy": policy}, **DATA)
    names = saved_results(plan.original)
    modules = {node.name: info(node).module for node in plan.original.operators}
    places = [*dict.fromkeys(modules[name] for name in names)]  # a bias is a call of its own
    linears = [f"{block}.{layer}" for block in range(14) for layer in range(5)]
    assert places == (linears if name == "list" else linears[::2])
    assert (plan.original.program is not None) or name == "counting"


def test_other_keys_name_the_rest() -> None:
    case = models.gpt(layers=4, hidden=16, heads=2)
    how = {"policy": PRODUCTS, "layers.1": "full", "layers.2": None}
    plan = ap.plan(case.model, case.args, recompute=how, **DATA)
    expected = {"layers.0": POLICY, "layers.1": FULL, "layers.3": POLICY}
    assert plan.decisions.recompute == expected


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"policy": [aten.mm]}, "overloads of operators"),
        ({"policy": PRODUCTS, "layers.*": None}, "own blocks that no other key names"),
        (ap.Recompute("policy"), "a policy is a function"),
        ({"policy": lambda *_: CheckpointPolicy.MUST_CPU_OFFLOAD}, "saves what an operator makes"),
    ],
)
def test_it_refuses_what_is_no_policy(how: Any, words: str) -> None:
    case = models.gpt(layers=2, hidden=16, heads=2)
    with pytest.raises(ap.InvalidInput, match=words):
        ap.plan(case.model, case.args, recompute=how, **DATA)
