"""Tensors that forward keeps in Python are those of the plain model, wherever a program runs.

>>> kept_tensors_are_those_of_the_model(mesh=Mesh(dp=2, tp=2), backend="virtual")
>>> stages_keep_what_one_device_keeps(mesh=Mesh(pp=2), microbatches=2, backend="virtual")
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from autopar import ParallelModule
from tests.outputs import assert_close, gradients, made, parallel, random, state

EXPERTS, WIDTH = 3, 4


class Recorder:
    """A forward hook that is bound to an object."""

    def __init__(self) -> None:
        self.means = list[Tensor]()

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.means.append(output.detach().mean())


class Routed(nn.Module):
    """A mixture, whose balance loss stands in an attribute: over the batch, as Switch has it, or a
    mean over tokens."""

    def __init__(self, over_batch: bool) -> None:
        super().__init__()
        self.router, self.over_batch = nn.Linear(WIDTH, EXPERTS), over_batch
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.log, self.metrics = defaultdict[str, list[Tensor]](list), dict[str, Any]()

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).softmax(-1)
        chosen = F.one_hot(probabilities.argmax(-1), EXPERTS).to(x.dtype)
        if self.over_batch:
            self.aux = EXPERTS * (chosen.mean(0) * probabilities.mean(0)).sum()
        else:
            self.aux = (chosen * probabilities).sum(-1).mean()
        self.log["chosen"].append(chosen)
        self.metrics["routing"] = probabilities, {"tokens": x.shape[0]}
        products = torch.einsum("ti,eio->teo", x, self.experts).tanh()
        return x + torch.einsum("teo,te->to", products, chosen * probabilities)


class Mixture(nn.Module):
    def __init__(self, over_batch: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed(over_batch) for _ in range(4))
        self.head, self.recorder = nn.Linear(WIDTH, 5), Recorder()
        self.layers[1].register_forward_hook(self.recorder.note)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.balance = sum(layer.aux for layer in self.layers)
        return F.cross_entropy(self.head(x), y) + 0.01 * self.balance


def left(module: Any) -> list[Any]:
    """Return all that forward has left behind."""
    layers = [(one.aux, one.log["chosen"], one.metrics) for one in module.layers]
    return pytree.tree_leaves([module.balance, module.recorder.means, layers])


def assert_left(module: nn.Module, model: nn.Module, *, learns: bool) -> None:
    pairs = list(zip(left(module), left(model), strict=True))
    for one, other in pairs:
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert one.requires_grad == (learns and other.requires_grad)
    assert_close(*zip(*pairs))


def kept_tensors_are_those_of_the_model(**options: Any) -> None:
    """Calls give tensors of which losses are made outside, and steps those of the whole batch."""
    x, y = random(12, WIDTH), torch.arange(12) % 5
    for more in ({}, {"microbatches": 3, "recompute": "full"}):
        model, single = (made(Mixture, not more) for _ in range(2))
        pm = parallel(model, x, y, **options, **more)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (pm, single)]
        for turn in range(3):
            is_step = turn == 1
            if is_step:
                pm.step(x, y)
                single(x, y).backward()
            for module in () if is_step else (pm, single):
                (module(x, y) + 0.1 * module.layers[2].aux + module.balance.square()).backward()
            assert_left(pm, single, learns=not is_step)
            assert_close(pm.full_grads(), gradients(single))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_close(pm.full_state_dict(), state(single))
        assert not any("aux" in vars(layer) for layer in model.layers), "of the parallel module"


def stages_keep_what_one_device_keeps(**options: Any) -> None:
    x, y = random(12, WIDTH), torch.arange(12) % 5
    model, single = (made(Mixture, False) for _ in range(2))
    pm: ParallelModule = parallel(model, x, y, **options)
    for _ in range(2):
        assert_close(pm.step(x, y), single(x, y).detach())
        assert_left(pm, single, learns=False)
    loss, output = pm.step(x, y, outputs=True)
    assert_close(loss, output)
    with torch.no_grad():
        pm(x, y)
    for _ in range(2):
        single(x, y)
    assert_left(pm, single, learns=False)
