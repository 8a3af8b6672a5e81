"""The law of `ap.optimizer`: parameters after five steps are those of one process.

>>> assert_updates_alike(parallel(case, SETTINGS[2]["zero3"]), case.fresh(), RECIPES["muon"])

A recipe makes the optimizers of some named parameters, by torch or by autopar.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import autopar as ap
from autopar import Mesh
from autopar.runtime.optimizers.local_optimizer import LocalOptimizer
from tests.models import Case
from tests.parity import Outcome, assert_equal

O = torch.optim  # noqa: E741
STEPS = 5
Make = Callable[..., O.Optimizer]  # of a class, groups of names, and options
Recipe = Callable[[Make, Mapping[str, int]], list[O.Optimizer]]


def of_all(kind: type[O.Optimizer], **options: Any) -> Recipe:
    return lambda make, dims: [make(kind, [{"params": [*dims]}], **options)]


def in_groups(make: Make, dims: Mapping[str, int]) -> list[O.Optimizer]:
    """Weights decay, biases and norms do not."""
    weights = [name for name, ndim in dims.items() if ndim > 1]
    others = [name for name, ndim in dims.items() if ndim < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}]
    return [make(O.Adam, groups, lr=1e-2, eps=1e-4)]


def muon(make: Make, dims: Mapping[str, int]) -> list[O.Optimizer]:
    """Matrices by Muon, all else by AdamW."""
    matrices = [name for name, ndim in dims.items() if ndim == 2]
    others = [name for name, ndim in dims.items() if ndim != 2]
    return [
        make(O.Muon, [{"params": matrices}], lr=2e-2),
        make(O.AdamW, [{"params": others}], lr=1e-2, eps=1e-4),
    ]


# Gradients that are zero but for rounding stay small: each divides by at least some 1e-4.
RECIPES: dict[str, Recipe] = {
    "adamw": of_all(O.AdamW, lr=1e-2, eps=1e-4),
    "amsgrad": of_all(O.AdamW, lr=1e-2, eps=1e-4, amsgrad=True, foreach=True),
    "sgd": of_all(O.SGD, lr=0.2, momentum=0.9, nesterov=True),
    "groups": in_groups,
    "rmsprop": of_all(O.RMSprop, lr=1e-2, eps=1e-4, centered=True),
    "adagrad": of_all(O.Adagrad, lr=1e-2, eps=1e-4, initial_accumulator_value=1e-3),
    "adafactor": of_all(O.Adafactor, lr=5e-2, eps=(1e-2, 1e-3), weight_decay=1e-2),
    "muon": muon,
}
DATA: dict[str, Any] = {"mode": "data"}
SETTINGS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "whole": {"mesh": Mesh(dp=2), **DATA, "states": "whole"},
        "zero1": {"mesh": Mesh(dp=2), **DATA, "states": "zero1"},
        "zero2": {"mesh": Mesh(dp=2), **DATA, "states": "zero2", "microbatches": 2},
        "zero3": {"mesh": Mesh(dp=2), **DATA, "states": "zero3"},
        "tp": {"mesh": Mesh(tp=2), "mode": "propagate"},
        "host": {
            "mesh": Mesh(dp=2),
            **DATA,
            "states": ap.States(optimizer="all", optimizer_device="host"),
        },
        "pipeline": {"mesh": Mesh(pp=2), **DATA, "schedule": "1f1b", "microbatches": 2},
        "chimera": {"mesh": Mesh(pp=2), **DATA, "schedule": "chimera", "microbatches": 2},
    },
    4: {
        "zero3": {"mesh": Mesh(dp=4), **DATA, "states": "zero3"},
        "tp, zero3": {"mesh": Mesh(dp=2, tp=2), "mode": "propagate", "states": "zero3"},
        "pipeline, zero1": {
            "mesh": Mesh(pp=2, dp=2),
            **DATA,
            "schedule": "1f1b",
            "microbatches": 2,
            "states": "zero1",
        },
    },
}


def parallel(case: Case, options: Mapping[str, Any], **others: Any) -> ap.ParallelModule:
    return ap.parallelize(case.model, case.args, case.kwargs, **options, **others)


def assert_updates_alike(
    module: ap.ParallelModule, alone: Case, recipe: Recipe, *, with_schedule: bool = False
) -> None:
    """Losses, norms and parameters, with clipping, and with a schedule of learning rates."""
    named = dict(alone.model.named_parameters())
    dims = {name: parameter.ndim for name, parameter in named.items()}

    def by_torch(kind: Any, groups: Iterable[Mapping[str, Any]], **options: Any) -> Any:
        return kind([{**g, "params": [named[n] for n in g["params"]]} for g in groups], **options)

    def by_autopar(kind: Any, groups: Iterable[Mapping[str, Any]], **options: Any) -> Any:
        made = ap.optimizer(kind, groups, module, **options)
        assert isinstance(made, kind)
        return made

    def step() -> Tensor:
        loss = alone.loss(alone.run())
        loss.backward()
        return loss.detach()

    clip = partial(nn.utils.clip_grad_norm_, list(named.values()))
    expected = _trained(recipe(by_torch, dims), step, clip, with_schedule)
    made = recipe(by_autopar, dims)
    found = _trained(
        made,
        lambda: module.step(*alone.args, **alone.kwargs),
        module.clip_grad_norm_,
        with_schedule,
    )
    state = module.full_state_dict()
    assert_equal(Outcome(found, {}, state), Outcome(expected, {}, alone.model.state_dict()))
    assert all(parameter.grad is None for parameter in module.parameters())
    for optimizer in made:
        assert isinstance(optimizer, LocalOptimizer)
        held = [t for group in optimizer.updated_groups for t in group.tensors]
        assert all(tensor.grad is None for tensor in held)


def _trained(
    optimizers: list[O.Optimizer],
    step: Callable[[], Tensor],
    clip: Callable[[float], Tensor],
    with_schedule: bool,
) -> list[Tensor]:
    rates = O.lr_scheduler.LambdaLR
    warm = [rates(one, lambda at: at / 3) for one in optimizers if with_schedule]  # from 0
    losses = []
    for _ in range(STEPS):
        losses += [step(), clip(0.5)]
        for one in (*optimizers, *warm):
            one.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return losses


def assert_state_dicts_go_round(module: ap.ParallelModule, case: Case) -> None:
    """States are placed like their parameters; another optimizer goes on with them to the bit."""
    for kind in (O.AdamW, O.Adafactor):
        module.zero_grad()
        first = ap.optimizer(kind, module, lr=1e-2)
        for _ in range(2):
            _update(module, case, first)
        saved = tree_map_only(Tensor, torch.clone, first.state_dict())
        before = module.full_state_dict()
        parameters = [*module.parameters()]
        for number, states in saved["state"].items():
            for value in states.values() if kind is O.AdamW else ():
                if isinstance(parameters[number], DTensor) and value.ndim:
                    assert value.placements == parameters[number].placements
        _update(module, case, first)
        after = module.full_state_dict()
        module.load_state_dict(before)
        second = ap.optimizer(kind, module.parameters(), lr=0.5)
        second.load_state_dict(saved)
        _update(module, case, second)
        torch.testing.assert_close(module.full_state_dict(), after, rtol=0, atol=0)
        assert second.param_groups[0]["lr"] == 1e-2
        for states in second.state.values():
            states["step"] = torch.tensor(7.0)
        assert all(float(s["step"]) == 7 for s in second.state_dict()["state"].values())


def _update(module: ap.ParallelModule, case: Case, optimizer: O.Optimizer) -> None:
    module.step(*case.args, **case.kwargs)
    optimizer.step()
    optimizer.zero_grad()


def assert_unusual_gradients_are_used(module: ap.ParallelModule, case: Case) -> None:
    """Of `no_sync()`, partial sums; none at all; and of a closure, whose loss is returned."""
    alone = case.fresh()
    frozen = next(iter(dict(module.named_parameters())))
    expected = O.AdamW(alone.model.parameters(), lr=1e-2, eps=1e-4)
    optimizer = ap.optimizer(O.AdamW, module, lr=1e-2, eps=1e-4)
    with module.no_sync():
        module.step(*case.args, **case.kwargs)
    alone.loss(alone.run()).backward()
    optimizer.step()
    expected.step()
    for made, model in ((optimizer, module), (expected, alone.model)):
        made.zero_grad()
        dict(model.named_parameters())[frozen].requires_grad_(False)

    def loss() -> Tensor:
        value = alone.loss(alone.run())
        value.backward()
        return value

    found = optimizer.step(lambda: module.step(*case.args, **case.kwargs))
    torch.testing.assert_close(found, expected.step(loss).detach(), rtol=1e-9, atol=0)
    state = alone.model.state_dict()
    torch.testing.assert_close(module.full_state_dict(), state, rtol=1e-9, atol=1e-11)


def assert_scaled_alike(module: ap.ParallelModule, case: Case) -> None:
    """torch's GradScaler skips a step whose gradients overflow, or lets a fused kernel do so."""
    _assert_scaled_alike(module, case)
    _assert_scaled_alike(module, case, fused=True)


def _assert_scaled_alike(module: ap.ParallelModule, case: Case, **options: Any) -> None:
    alone = case.fresh()
    module.load_state_dict(alone.model.state_dict())
    options["lr"] = 1e-2
    made = [ap.optimizer(O.AdamW, module, **options), O.AdamW(alone.model.parameters(), **options)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1) for _ in made]
    for factor in (1.0, float("inf"), 1.0):
        losses = module(*case.args, **case.kwargs), alone.run()
        for loss, optimizer, scaler in zip(losses, made, scalers):
            scaler.scale(alone.loss(loss) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2048.0
    state = alone.model.state_dict()
    torch.testing.assert_close(module.full_state_dict(), state, rtol=1e-9, atol=1e-9)


def assert_refused(module: ap.ParallelModule) -> None:
    """What is no optimizer, no parameter, or needs more than a parameter's gradients."""
    name, parameter = next(iter(module.named_parameters()))
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((nn.Linear, module), {}, "of a class of optimizers"),
        ((O.LBFGS, module), {}, "needs nothing but gradients"),
        ((Normed, module), {"lr": 0.1}, "follows from the gradients of this parameter alone"),
        ((O.AdamW, [name + "s"], module), {}, "updates parameters of its module"),
        ((O.AdamW, [{"params": [name]}]), {}, "parameters of a parallel module"),
        ((O.AdamW, [nn.Parameter(parameter.detach())], module), {}, "the module's own parameters"),
        ((O.AdamW, [{"names": [name]}], module), {}, "is a dict with its parameters"),
        ((O.AdamW, module), {"differentiable": True}, "has no gradients"),
    ]
    for args, options, rule in wrong:
        with pytest.raises(ap.InvalidInput, match=rule):
            ap.optimizer(*args, **options)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ap.optimizer(O.AdamW, module, lr=-1.0)
    optimizer = ap.optimizer(O.AdamW, [name], module)
    with pytest.raises(ap.InvalidInput, match="bound to the ranks"):
        copy.deepcopy(optimizer)
    optimizer.add_param_group({"params": [n for n, _ in module.named_parameters()][1:2], "lr": 1.0})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


class Normed(O.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1e-3)
        return super().step(closure)
