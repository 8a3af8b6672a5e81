"""A loop as users write it: some parameters frozen, others in groups, steps that add up, clipping.

>>> assert_trains_alike(module, case)

SGD shows what AdamW hides: a gradient too large or too small by a factor.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar as ap
from autopar.pipeline.running.executor import RankRunner
from tests.models import Case
from tests.parity import Outcome, assert_equal

STEPS, PASSES, NORM = 3, 2, 0.1


def assert_trains_alike(module: ap.ParallelModule, case: Case) -> None:
    """The parallel module and the model, on either backend, with or without a pipeline."""
    alone = case.fresh()

    def step() -> Tensor:
        loss = alone.loss(alone.run())
        loss.backward()
        return loss.detach()

    def grads() -> dict[str, Tensor]:
        named = alone.model.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    clip = nn.utils.clip_grad_norm_
    expected = _trained(alone.model, step, grads, lambda: clip(alone.model.parameters(), NORM))
    has_parts = dist.is_initialized() and module.plan.pipelining is not None

    def clip_parallel() -> Tensor:
        if has_parts:  # a rank has the parameters of its stages alone
            return module.clip_grad_norm_(NORM)
        return clip(module.parameters(), NORM)

    found = _trained(
        module, lambda: module.step(*case.args, **case.kwargs), module.full_grads, clip_parallel
    )
    state = module.full_state_dict()
    assert_equal(Outcome(*found, state), Outcome(*expected, alone.model.state_dict()))


def _trained(
    module: nn.Module,
    step: Callable[[], Tensor],
    grads: Callable[[], dict[str, Tensor]],
    clip: Callable[[], Tensor],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses with the norms of gradients, and the gradients of the first update."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("norm1" not in name)
    learns = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learns if p.ndim > 1], "lr": 0.5, "weight_decay": 0.1},
        {"params": [p for p in learns if p.ndim == 1], "momentum": 0.5, "nesterov": True},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    seen: list[Tensor] = []
    first: dict[str, Tensor] = {}
    for index in range(STEPS):
        optimizer.zero_grad()
        seen += [step() for _ in range(PASSES)]
        if index == 0:
            first = grads()
        norm = clip()
        seen.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
    return seen, first


def assert_broken_steps_leave_no_trace(module: ap.ParallelModule, case: Case) -> None:
    """A step that breaks off after any of its actions leaves gradients as they were, and nothing
    in the way of the next."""
    advance = RankRunner.advance

    def breaking(left: int) -> Callable[[RankRunner], None]:
        def advance_or_break(self: RankRunner) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            advance(self)

        return advance_or_break

    actions = sum(len(runner.order) for runner in module.backend.runners)
    for earlier in (False, True):
        module.zero_grad()
        if earlier:
            module.step(*case.args, **case.kwargs)
        held = {name: p.grad for name, p in module.named_parameters()}
        before = module.full_grads()
        for left in range(actions):
            with (
                patch.object(RankRunner, "advance", breaking(left)),
                pytest.raises(KeyboardInterrupt),
            ):
                module.step(*case.args, **case.kwargs)
            assert all(p.grad is held[name] for name, p in module.named_parameters())
        after = module.full_grads()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
