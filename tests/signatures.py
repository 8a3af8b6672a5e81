"""Laws of one set of parameters under many programs, for both backends."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar as ap
from autopar.plans.plan import SavedPlan
from tests.outputs import assert_close, gradients, made, random, state

BATCH = 8


class Tagger(nn.Module):
    """With all that makes modes, batches and signatures other programs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(6, 8))
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.25)
        self.up, self.down, self.extra = nn.Linear(8, 16), nn.Linear(16, 5), nn.Linear(8, 5)

    def forward(self, ids: Tensor, labels: Tensor | None = None, deep: bool = True) -> Any:
        x = (self.embed(ids) if ids.dtype == torch.long else ids) + self.places[: ids.shape[1]]
        x = self.drop(self.norm(x.mT).mT)
        logits = self.down(torch.tanh(self.up(x))) if deep else self.extra(x)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def ids(batch: int = BATCH, length: int = 6) -> tuple[Tensor, Tensor]:
    found = torch.arange(batch * length).view(batch, length)
    return found * 7 % 11, found * 3 % 5


def tagger() -> nn.Module:
    return made(Tagger)


Pair = tuple[nn.Module, ap.ParallelModule]


def start(**options: Any) -> Pair:
    """The model that programs are compared with, and its parallel module, of a step."""
    model = tagger()
    x, y = ids()
    mesh = {"mesh": ap.Mesh(dp=2, tp=2), "mode": "propagate"}
    options = mesh | options
    other = annotated(tagger(), options["mode"])
    return model, ap.parallelize(other, (x,), {"labels": y}, **options)


def annotated(model: nn.Module, mode: str) -> nn.Module:
    if mode != "data":  # which takes no layouts
        ap.shard(model.up, params={"weight": ("tp", None)})
    return model


def both(pair: Pair, act: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    """What an act gives on each, with the same random numbers."""
    found = []
    for module in pair:
        torch.manual_seed(5)
        found.append(act(module))
    return found[0], found[1]


def step(module: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    if isinstance(module, ap.ParallelModule):
        return module.step(ids, labels=labels)
    loss = module(ids, labels=labels)["loss"]
    loss.backward()
    return loss.detach()


def reference(pair: Pair) -> Pair:
    """The same beside the captured program of one device, which draws as all meshes do."""
    _, module = pair
    x, y = ids()
    inside = {"mesh": ap.Mesh(tp=1), "backend": "virtual"}
    one = ap.parallelize(tagger(), (x,), {"labels": y}, **inside)
    return one, module


SIZES = ((BATCH, 6), (5, 6), (1, 4), (BATCH, 6), (BATCH, 4))


def trains_and_evaluates_in_turn(sizes: Sequence[tuple[int, int]] = SIZES, **options: Any) -> None:
    """Training, evaluation of another batch without labels, training, a last smaller batch."""
    pair = reference(start(**options))
    model, module = tagger().eval(), pair[1]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-3) for one in pair]
    for batch, length in sizes:
        x, y = ids(batch, length)
        for one, optimizer in zip(pair, optimizers):
            one.train()
            optimizer.zero_grad()
        assert_close(*both(pair, partial(step, ids=x, labels=y)))
        assert_close(gradients(pair[1]), gradients(pair[0]))
        for optimizer in optimizers:
            optimizer.step()
        found = state(module)
        assert_close(found, state(pair[0]))
        model.load_state_dict(found)
        module.eval()
        with torch.no_grad():
            others = ids(3, length)[0]
            assert_close(module(others), model(others))
        assert_close(state(module), found)
    assert [one.mode for one in module.programs[:2]] == ["training", "evaluation"]
    plans_are_kept(module)
    lengths = {(3, length, "evaluation") for _, length in sizes}
    assert len(module.programs) == len({*sizes, *lengths})  # what comes again is known


def differentiates_every_signature(**options: Any) -> None:
    """Calls with other arguments, dtypes and inputs that want a gradient; losses outside."""
    pair = start(**options)
    for one in pair:
        one.eval()
    x, y = ids(6)
    values = random(6, 6, 8, learns=True)

    def acts(one: nn.Module) -> list[Tensor]:
        one.zero_grad()
        logits = one(x)
        loss = logits.square().mean() + one(x[:4], deep=False).exp().mean()
        loss = loss + one(ids=values, labels=y)["loss"]
        loss.backward()
        asked = torch.autograd.grad(one(values).sin().mean(), values)
        return [logits, loss, *asked]

    found = both(pair, acts)
    assert_close(*found)
    assert_close(gradients(pair[1]), gradients(pair[0]))
    module = pair[1]
    assert isinstance(module, ap.ParallelModule)
    count = len(module.programs)
    assert_close(*both(pair, acts))
    assert len(module.programs) == count == 5
    plans_are_kept(module)


def unfreezes(**options: Any) -> None:
    """A parameter that was frozen when it was planned learns; then it does not again."""
    model = tagger()
    for part in (model.embed, model.up):
        part.requires_grad_(False)
    x, y = ids()
    options = {"mesh": ap.Mesh(dp=2, tp=2), "mode": "propagate"} | options
    annotated(model, options["mode"]).eval()
    pair = model, ap.parallelize(model, (x,), {"labels": y}, **options).eval()
    pair = copy.deepcopy(model), pair[1]
    for learns in (False, True, False):
        for one in pair:
            one.get_submodule("embed").requires_grad_(learns)
            one.get_parameter("up.weight").requires_grad_(learns)
            one.zero_grad()
        assert_close(*both(pair, partial(step, ids=x, labels=y)))
        assert_close(gradients(pair[1]), gradients(pair[0]))
        assert ("up.weight" in gradients(pair[1])) is learns


class Deep(nn.Module):
    """For stages: layers in a row, of which the last reads the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.drop, self.norms = nn.Dropout(0.25), nn.ModuleList(nn.LayerNorm(8) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor | None = None, depth: int = 4) -> Any:
        x = self.embed(ids)
        for layer, norm in [*zip(self.layers, self.norms)][:depth]:
            x = x + self.drop(torch.tanh(layer(norm(x))))
        if depth < 4:
            return x
        logits = self.head(x)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


LENGTHS = ((BATCH, 6), (5, 6), (4, 3), (BATCH, 6))


def goes_through_stages(sizes: Sequence[tuple[int, int]] = LENGTHS, **options: Any) -> None:
    """Steps of other batches and lengths, and calls of other modes and arguments, in a pipeline."""
    model = made(Deep)
    x, y = ids()
    module = ap.parallelize(made(Deep), (x,), {"labels": y}, **options)
    inside = {"mesh": ap.Mesh(tp=1), "backend": "virtual"}
    one = ap.parallelize(made(Deep), (x,), {"labels": y}, **inside)
    pair = one, module
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-3) for each in pair]
    for batch, length in sizes:
        x, y = ids(batch, length)
        for each in pair:
            each.train().zero_grad()
        assert_close(*both(pair, partial(step, ids=x, labels=y)))
        assert_close(module.full_grads(), gradients(one))
        for optimizer in optimizers:
            optimizer.step()
        found = module.full_state_dict()
        assert_close(found, one.full_state_dict())
        model.load_state_dict(found)
        module.eval()
        model.eval()
        with torch.no_grad():
            others, fewer = ids(6, length)[0], ids(3, length)[0]
            assert_close(module(others), model(others))
            assert_close(module(fewer, depth=2), model(fewer, depth=2))
    module.train()
    told, given = module.step(x, labels=y, outputs=True)
    assert_close(told, given["loss"])
    assert len(module.programs) == len({*sizes}) + 2 * len({length for _, length in sizes})
    plans_are_kept(module)


def plans_are_kept(module: ap.ParallelModule) -> None:
    """Every program's plan prints, counts its memory, and is what its file says."""
    for one in module.programs:
        assert str(one.plan)
        assert one.plan.memory.peak > 0
        saved = SavedPlan.of(one.plan).to_json()
        assert SavedPlan.from_json(json.loads(json.dumps(saved))).to_json() == saved


LAWS = (trains_and_evaluates_in_turn, differentiates_every_signature, unfreezes)
