"""The parity law: a parallel program computes what one device computes.

    assert_parity(megatron(gpt(), "tp"), Mesh(tp=4))

Loss, every gradient, and parameters and buffers after two AdamW steps agree below 1e-9, relative
to the largest element of each tensor; no two gradients share memory. Some gradients are zero but
for rounding (the bias of keys: softmax does not see it). Two things keep that rounding out of the
comparison: a tensor counts as at least 1e-4 of the largest gradient of the model, and AdamW divides
by sqrt(v) + 1e-4, because with its usual epsilon the first step of a parameter is the sign of its
gradient, be that 1e-17 or 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autopar as ap
from tests.combined import accumulate, assert_own_memory
from tests.models import Case

TOLERANCE = 1e-9
FLOOR = 1e-4
STEPS = 2
Tensors = Mapping[str, Tensor]
Batches = Sequence[Sequence[tuple[Any, ...]]]  # of each step, one or several that add up


@dataclass(frozen=True)
class Outcome:
    """What a few steps of training leave behind."""

    losses: list[Tensor]  # where gradients are clipped, each with the norm before
    grads: Tensors  # of the first step
    state: Tensors  # parameters, buffers and what stands in attributes `aux` at the end


def assert_parity(case: Case, mesh: ap.Mesh, **options: Any) -> ap.ParallelModule:
    """The law for one annotated case on the virtual mesh, replicas compared on the way."""
    options = {"mode": "propagate", "backend": "virtual", "check": True, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = ap.parallelize(case.model, case.args, case.kwargs, mesh=mesh, **options)
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
    return module


def single_outcome(
    case: Case,
    steps: int = STEPS,
    clip: tuple[float, float] | None = None,
    batches: Batches | None = None,
) -> Outcome:
    """The original model on one device; `clip` its gradients to a norm of an order. `batches`:
    instead of the case's own."""

    def step(args: tuple[Any, ...]) -> Tensor:
        one = replace(case, args=args)
        loss = one.loss(one.run())
        if batches is None:
            loss.backward()
        else:
            accumulate(loss, case.model.parameters())
        return loss.detach()

    def grads() -> dict[str, Tensor]:
        named = case.model.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    def state() -> dict[str, Tensor]:
        return case.model.state_dict() | _kept(case.model)

    clip_ = clip and partial(nn.utils.clip_grad_norm_, list(case.model.parameters()), *clip)
    each = batches or [[case.args]] * steps
    return _train(step, case.model.parameters(), grads, state, each, clip_)


def parallel_outcome(
    module: ap.ParallelModule,
    case: Case,
    steps: int = STEPS,
    clip: tuple[float, float] | None = None,
    batches: Batches | None = None,
) -> Outcome:
    """The parallel program, on whichever backend it runs."""

    def step(args: tuple[Any, ...]) -> Tensor:
        loss = module.step(*args, **case.kwargs)
        assert_own_memory(module.parameters())
        return loss

    def grads() -> dict[str, Tensor]:
        return module.full_grads()

    def state() -> dict[str, Tensor]:
        return module.full_state_dict() | _kept(module)

    clip_ = clip and partial(module.clip_grad_norm_, *clip)
    each = batches or [[case.args]] * steps
    return _train(step, module.parameters(), grads, state, each, clip_)


def _kept(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that forward has left in attributes `aux`."""
    named = ((path, vars(module).get("aux")) for path, module in model.named_modules())
    return {f"{path}.aux": kept for path, kept in named if isinstance(kept, Tensor)}


def assert_equal(
    actual: Outcome, expected: Outcome, tolerance: float = TOLERANCE, floor: float = FLOOR
) -> None:
    """Everything that training left agrees; the message lists what does not."""
    wrong = [
        f"loss of step {index}: {float(one)!r}, expected {float(other)!r}"
        for index, (one, other) in enumerate(zip(actual.losses, expected.losses))
        if not abs(float(one) - float(other)) <= tolerance * abs(float(other))
    ]
    sizes = [float(grad.abs().max()) for grad in expected.grads.values() if grad.numel()]
    largest = max(sizes, default=1.0)
    wrong += _differences("gradient", actual.grads, expected.grads, tolerance, floor * largest)
    wrong += _differences("state", actual.state, expected.state, tolerance, floor)
    assert not wrong, "\n".join(wrong)


def relative(actual: Tensor, expected: Tensor, floor: float) -> float:
    """The largest difference, relative to the largest element."""
    if expected.numel() == 0 or torch.equal(actual, expected):
        return 0.0
    actual, expected = actual.double(), expected.double()
    scale = max(float(expected.abs().max()), floor)
    return float((actual - expected).abs().max()) / scale


def _differences(
    what: str, actual: Tensors, expected: Tensors, tolerance: float, floor: float
) -> list[str]:
    wrong = [f"{what} of {name} on one side only" for name in sorted(set(actual) ^ set(expected))]
    for name in sorted(set(actual) & set(expected)):
        one, other = actual[name], expected[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            wrong.append(f"{what} of {name}: {one.dtype} {one.shape}, not {other.shape}")
        elif not (error := relative(one, other, floor)) <= tolerance:
            wrong.append(f"{what} of {name}: relative error {error:.2e}")
    return wrong


def _train(
    step: Callable[[tuple[Any, ...]], Tensor],
    parameters: Iterable[nn.Parameter],
    grads: Callable[[], Tensors],
    state: Callable[[], Tensors],
    batches: Batches,
    clip: Callable[[], Tensor] | None,
) -> Outcome:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)
    losses, first = [], {}
    for index, parts in enumerate(batches):
        optimizer.zero_grad()
        losses += [step(args) for args in parts]
        if clip is not None:
            losses.append(clip())
        if index == 0:
            first = dict(grads())
        optimizer.step()
    return Outcome(losses, first, dict(state()))
