"""Models with a part that takes gradients and gets none in a step, each beside one like it that
takes none there.

>>> case, like = pair("head")       # a head that the loss does not read; the same under no_grad
>>> case, like = pair("detached")   # a body that is read under detach(); the same under no_grad
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor, nn

import autopar as ap
from tests.models import Case
from tests.parity import relative

NAMES = ("head", "detached")


def _layers(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


class Unlearned(nn.Module):
    """Its loss reads `body`, `last` and, without its gradient, `first`; `side` is read by a result
    alone."""

    def __init__(self, width: int, name: str, takes_gradients: bool) -> None:
        super().__init__()
        self.first, self.body, self.last, self.side = (_layers(width) for _ in range(4))
        self.name, self.takes_gradients = name, takes_gradients

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quiet = nullcontext if self.takes_gradients else torch.no_grad
        with quiet() if self.name == "detached" else nullcontext():
            h = self.first(x)
        if self.name == "detached":
            h = h.detach()
        h = self.body(h)
        with quiet():
            side = self.side(h) if self.name == "head" else h
        return self.last(h).square().mean(), side


@cache
def pair(name: str, width: int = 8, batch: int = 8) -> tuple[Case, Case]:
    """The model that takes gradients, and that which does not."""
    found = []
    for takes_gradients in (True, False):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Unlearned(width, name, takes_gradients).double()
            x = torch.randn(batch, width, dtype=torch.float64)
        found.append(Case(f"{name} {takes_gradients}", model, (x,)))
    return found[0], found[1]


def assert_called_alike(module: ap.ParallelModule, case: Case) -> None:
    """Direct calls, differentiated by each output and by both, steps in between."""
    state = module.full_state_dict()
    for places in ((0,), (1,), (0, 1)):
        single = case.fresh()
        single.model.load_state_dict(state)
        module.step(*case.args)
        module.zero_grad()
        for run in (single.run, lambda: module(*case.args)):
            outputs = run()
            torch.stack([outputs[place].square().sum() for place in places]).sum().backward()
        named = single.model.named_parameters()
        expected = {name: p.grad for name, p in named if p.grad is not None}
        found = module.full_grads()
        assert found.keys() == expected.keys()
        assert all(relative(found[name], expected[name], 1e-6) < 1e-9 for name in expected)
