"""What a call gives is what the model gives, wherever it runs: whole, plain, differentiable.

>>> for law in LAWS:
...     law(mesh=Mesh(dp=2, tp=2), backend="virtual")

Losses stand outside of the model. What is expected is the plain model's, on one device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers.utils import ModelOutput

import autopar as ap
from autopar import Mesh
from tests.captures import alike

BATCH = 6  # four ranks have pieces of two sizes


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def random(*shape: int, seed: int = 0, learns: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return found.requires_grad_(learns)


class Body(nn.Module):
    """Where the mesh has `tp`, its output is cut over both axes."""

    def __init__(self, width: int = 4, outputs: int = 5) -> None:
        super().__init__()
        self.up = ap.shard(nn.Linear(width, 8), params={"weight": ("tp", None)})
        self.down = ap.shard(nn.Linear(8, outputs), params={"weight": ("tp", None)})

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


@dataclass
class Result(ModelOutput):
    """As models of transformers give it."""

    features: Tensor | None = None
    logits: Tensor | None = None


class Several(nn.Module):
    """Outputs of several kinds in one of three types."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.head, self.kind = Body(), nn.Linear(5, 3), kind

    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        logits = self.head(torch.tanh(features))
        if self.kind == "tuple":
            return logits, features, logits.argmax(1), features.detach().square().mean()
        if self.kind == "dict":
            return {"logits": logits, "nothing": None, "features": features}
        return Result(features=features, logits=logits)


def made(make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return alike(make(*args).double(), (make, args))


def parallel(model: nn.Module, *inputs: Tensor, **options: Any) -> ap.ParallelModule:
    return ap.parallelize(model, inputs, **{"mode": "propagate", **options})


Trained = tuple[list[Tensor], list[dict[str, Tensor]]]


def trained(modules: Sequence[nn.Module], losses: Callable[..., Any], steps: int = 3) -> Trained:
    """Losses, then gradients of the first step and parameters after the last, of each module.

    `losses` gives those of one step one after another; of that at a place the module at this place
    learns.
    """
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.05, eps=1e-3) for module in modules]
    seen: list[Tensor] = []
    first: list[dict[str, Tensor]] = []
    for step in range(steps):
        for module, optimizer, loss in zip(modules, optimizers, losses(*modules)):
            assert type(loss) is Tensor
            optimizer.zero_grad()
            loss.backward()
            if step == 0:
                first.append(gradients(module))
            optimizer.step()
            seen.append(loss.detach())
    return seen, [*first, *(state(module) for module in modules)]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    if isinstance(module, ap.ParallelModule):
        return module.full_grads()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def state(module: nn.Module) -> dict[str, Tensor]:
    if isinstance(module, ap.ParallelModule):
        return module.full_state_dict()
    return {name: value.clone() for name, value in module.state_dict().items()}


def a_loss_outside_is_one_inside(**options: Any) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = made(Body)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.body(x), y)

    x, y = random(BATCH, 4), torch.arange(BATCH) % 5
    model, inside = made(Body), Inside()
    outside = trained([parallel(model, x, **options)], lambda pm: [F.cross_entropy(pm(x), y)])
    assert_close(outside, trained([model], lambda model: [F.cross_entropy(model(x), y)]))
    pm = parallel(inside, x, y, **options)
    assert_close(pm.step(x, y), outside[0][0])
    assert_close(list(pm.full_grads().values()), list(outside[1][0].values()))


def one_module_is_fed_with_the_output_of_another(**options: Any) -> None:
    """A generator and a discriminator, each with an optimizer of its own."""
    z, real = random(BATCH, 4, seed=1), random(BATCH, 5, seed=2)
    g, d = made(Body), made(Body, 5, 2)

    def losses(d: nn.Module, g: nn.Module) -> Any:
        fake = g(z)
        assert fake.shape == real.shape
        yield F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
        yield F.softplus(-d(fake)).mean()

    pg, pd = parallel(g, z, **options), parallel(d, random(BATCH, 5, learns=True), **options)
    assert_close(trained([pd, pg], losses), trained([d, g], losses))


def outputs_keep_their_type(**options: Any) -> None:
    """One of several is used; what takes no gradient there takes none here."""
    x = random(BATCH, 4)
    for kind in ("tuple", "dict", "dataclass"):
        model = made(Several, kind)
        pm = parallel(model, x, **options)
        found, expected = pm(x), model(x)
        assert type(found) is type(expected)
        if kind != "tuple":
            assert list(found) == list(expected)
            assert kind == "dict" or torch.equal(found.logits, found["logits"])
            found, expected = list(found.values()), list(expected.values())
        assert_close(found, expected)
        pairs = [(one, other) for one, other in zip(found, expected) if other is not None]
        assert all(type(one) is Tensor for one, _ in pairs)
        assert all(one.requires_grad == other.requires_grad for one, other in pairs)
        for used in (1, 0) if kind == "tuple" else (2,) if kind == "dict" else (0,):
            pm.zero_grad()
            model.zero_grad()
            for run in (pm, model):
                outputs = run(x)
                outputs = list(outputs.values()) if kind != "tuple" else outputs
                outputs[used].pow(3).sum().backward()
            assert_close(pm.full_grads(), gradients(model))
        with torch.no_grad():
            outputs = pm(x)
            outputs = outputs[0] if kind == "tuple" else outputs["logits"]
            assert not outputs.requires_grad
            outputs += 1  # the caller's own


def inputs_get_their_gradients(**options: Any) -> None:
    x = random(BATCH, 4, learns=True)
    model = made(Body)
    pm = parallel(model, x, **options)
    expected = torch.autograd.grad(model(x).square().mean(), x)
    assert_close(torch.autograd.grad(pm(x).square().mean(), x), expected)
    assert not pm.full_grads()
    x.grad = None
    (pm(2 * x).square().mean() + x.sum()).backward()
    found, x.grad = x.grad, None
    (model(2 * x).square().mean() + x.sum()).backward()
    assert_close(found, x.grad)


def parameters_get_the_gradients_that_are_asked_for(**options: Any) -> None:
    """Some of them, beside inputs or alone, of one output or of two; and nobody else any."""
    x = random(BATCH, 4, learns=True)
    model = made(Several, "tuple")
    for more in ({}, {"recompute": "full"}):
        pm = parallel(model, x, **options, **more)
        found: list[list[Tensor]] = []
        for module in (pm, model):
            given = dict(module.named_parameters())
            some = [given["head.bias"], given["body.up.weight"]]
            one, other = module(x)[:2]
            loss = one.square().mean() + other.pow(3).mean()
            asked = [torch.autograd.grad(loss, some, retain_graph=True)]
            asked.append(torch.autograd.grad(loss, (x, given["body.down.bias"])))
            asked.append(torch.autograd.grad(module(x)[0].exp().mean(), list(given.values())))
            asked.append(torch.autograd.grad(module(x)[1].exp().mean(), x))
            with pytest.raises(RuntimeError, match="not have been used in the graph"):
                torch.autograd.grad(module(x)[1].sum(), some)
            assert not gradients(module)
            module(x)[0].square().mean().backward(inputs=some)
            assert gradients(module).keys() == {"head.bias", "body.up.weight"}
            asked.append([p.grad for p in some])
            found.append([whole(value) for values in asked for value in values])
            module.zero_grad()
        assert_close(*found)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


class WithLoss(nn.Module):
    """Outputs of every kind: cut, summed, the same for all, of numbers without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = Body(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.body(x) * self.scale.exp()
        right = logits.detach().argmax(1) == y
        loss = F.cross_entropy(logits, y)
        rest = {"count": 3, "nothing": None, "scale": self.scale.exp(), "x": x}
        accuracy = right.double().mean()
        return {"loss": loss, "logits": logits, "right": right, "accuracy": accuracy, **rest}


def a_step_gives_outputs_beside_its_loss(**options: Any) -> None:
    x, y = random(12, 4), torch.arange(12) % 5
    for more in ({}, {"microbatches": 3}):
        model = made(WithLoss)
        pm = parallel(model, x, y, **options, **more)
        learner, alone = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (pm, model))
        for _ in range(2):
            expected = model(x, y)
            expected["loss"].backward()
            loss, found = pm.step(x, y, outputs=True)
            assert list(found) == list(expected)
            assert not any(isinstance(v, Tensor) and v.requires_grad for v in found.values())
            assert_close([loss, *found.values()], [expected["loss"], *expected.values()])
            assert_close(pm.full_grads(), gradients(model))
            assert_close(pm.step(x, y), loss)
            model(x, y)["loss"].backward()
            for optimizer in (learner, alone):
                optimizer.step()
                optimizer.zero_grad()
            assert_close(pm.full_state_dict(), state(model))


class Deep(nn.Module):
    """Outputs of several stages: of a layer in the middle, of the last, of a parameter, an input.

    One parameter is read by the first layer and by the last."""

    def __init__(self, drop: float = 0.2, norms: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) if norms else nn.Identity() for _ in range(4))
        self.head, self.scale = nn.Linear(6, 5), nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.drop = drop

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h, middle = x * self.scale, x
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms)):
            h = F.dropout(torch.tanh(norm(layer(h))), self.drop, self.training)
            middle = h if number == 1 else middle
        logits = self.head(h * self.scale)
        right = logits.detach().argmax(1) == y
        rest = {"right": right, "accuracy": right.double().mean(), "scale": self.scale.exp()}
        rest |= {"middle": middle, "number": 3, "x": x}
        return {"loss": F.cross_entropy(logits, y), "logits": logits, **rest}


def stages_give_what_one_device_gives(**options: Any) -> None:
    """A step its outputs, calls theirs without a gradient; one after another, as users do."""
    x, y = random(12, 6), torch.arange(12) % 5
    model = made(Deep)
    alone = parallel(model, x, y, mesh=Mesh(one=1), backend="virtual")
    pm = parallel(model, x, y, **options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (alone, pm)]
    for turn in range(2):
        found = []
        for module, optimizer in zip((alone, pm), optimizers):
            torch.manual_seed(turn)
            with torch.inference_mode(turn == 1), torch.no_grad():
                told = [module(x, y)]
            loss, outputs = module.step(x, y, outputs=True)
            told += [{"loss": loss}, outputs]
            assert list(outputs) == list(told[0])
            values = [v for one in told for v in one.values() if isinstance(v, Tensor)]
            assert not any(value.requires_grad for value in values)
            found.append((values, module.full_grads()))
            optimizer.step()
            optimizer.zero_grad()
        assert_close(*found)


def batch_norm_in_stages_sees_the_whole_batch_in_a_call(**options: Any) -> None:
    x, y = random(12, 6), torch.arange(12) % 5
    model = made(Deep, 0.0, True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # steps are of micro-batches
        pm = parallel(model, x, y, **options)
    for _ in range(2):
        with torch.no_grad():
            assert_close(list(pm(x, y).values()), list(model(x, y).values()))
    assert_close(pm.full_state_dict(), state(model))


PIPELINES: list[dict[str, Any]] = [
    {"mesh": Mesh(pp=2, dp=2), "microbatches": 3, "schedule": "1f1b"},
    {"mesh": Mesh(pp=2, tp=2), "microbatches": 4, "schedule": "chimera"},
    {"mesh": Mesh(pp=2, dp=2), "microbatches": 2, "schedule": "zb-v"},
    {"mesh": Mesh(pp=2, dp=2), "microbatches": 4, "schedule": "interleaved", "states": "zero3"},
]


# Those in which parameters that are kept in pieces come and go in ways of their own.
OF_PIECES = (
    a_step_gives_outputs_beside_its_loss,
    parameters_get_the_gradients_that_are_asked_for,
)
LAWS = (
    *OF_PIECES,
    a_loss_outside_is_one_inside,
    one_module_is_fed_with_the_output_of_another,
    outputs_keep_their_type,
    inputs_get_their_gradients,
)
