"""Training as people write it: each recipe gives on one device and in parallel the same numbers.

>>> assert_same(accumulated, "zero3", backend="virtual")

A recipe is handed a model or a parallel module, and says what is to be compared beside the state
that it leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar as ap
from autopar import Mesh, shard
from autopar.pipeline.running.executor import RankRunner
from autopar.plans.plan import Plan
from autopar.runtime.module.gradient_accumulation import is_partial
from tests.models import Case
from tests.outputs import gradients, made, random, state, whole

Recipe = Callable[[Any], Iterable[Any]]
X, Y = random(8, 4), torch.arange(8) % 3


class Net(nn.Module):
    """With `tp`, weights and a buffer that steps change are cut."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.up = shard(nn.Linear(4, 6), params={"weight": ("tp", None)})
        self.middle, self.down = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.up(x))
        if self.counts:
            self.seen += shard(h.detach().sum(0), ("tp",))
        logits = self.down(torch.tanh(self.middle(h + self.seen / 100)))
        return F.cross_entropy(logits, y), logits


SETTINGS: dict[str, dict[str, Any]] = {
    "cut": {"mesh": Mesh(dp=2, tp=2)},
    "zero3": {"mesh": Mesh(dp=4, tp=1), "states": "zero3"},
    "pipeline": {"mesh": Mesh(pp=2, dp=2, tp=1), "microbatches": 2, "schedule": "1f1b"},
    "whole": {"mesh": Mesh(dp=4, tp=1)},
}


@cache
def case(counts: bool) -> Case:
    """Which nobody changes."""
    return Case("net", made(Net, counts), (X, Y))


def net(setting: str) -> Case:
    """Micro-batches have no statistics of a batch."""
    return case(setting != "pipeline")


@cache
def planned(setting: str) -> Plan:
    return ap.plan(net(setting).model, (X, Y), mode="propagate", **SETTINGS[setting])


def parallel(setting: str, **options: Any) -> ap.ParallelModule:
    return ap.parallelize(net(setting).model, plan=planned(setting), **options)


def assert_same(recipe: Recipe, setting: str, **options: Any) -> None:
    alone, module = net(setting).fresh().model, parallel(setting, **options)
    expected = [whole(one) for one in recipe(alone)]
    found = [whole(one) for one in recipe(module)]
    close = {"rtol": 1e-9, "atol": 1e-11, "msg": lambda m: f"{recipe.__name__}, {setting}: {m}"}
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(state(module), state(alone), **close)


def step(net: nn.Module, scale: float = 1.0) -> Tensor:
    if isinstance(net, ap.ParallelModule):
        return net.step(X, Y, scale=scale)
    loss = net(X, Y)[0]
    (scale * loss).backward()
    return loss.detach()


def trained(kind: Any, **options: Any) -> Recipe:
    """With an optimizer of torch, in two groups."""

    def recipe(net: nn.Module) -> Iterator[Tensor]:
        parameters = list(net.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]
        optimizer = kind(groups, **options)
        for _ in range(3):
            yield step(net)
            optimizer.step()
            optimizer.zero_grad()

    recipe.__name__ = f"{kind.__name__}_{'_'.join(options)}"
    return recipe


def lbfgs(net: nn.Module) -> Iterator[Tensor]:
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return step(net)

    for _ in range(2):
        yield optimizer.step(closure)


def sgd(net: nn.Module, lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def frozen_and_unfrozen(net: Any) -> Iterator[Tensor]:
    optimizer = sgd(net)
    for learns in (False, True):
        for name, parameter in net.named_parameters():
            if name.startswith("up"):
                parameter.requires_grad_(learns)
        yield step(net)
        optimizer.step()
        optimizer.zero_grad()


def assigned_and_copied(net: Any) -> Iterator[Tensor]:
    before = state(net)
    yield step(net)
    half = {name: 0.5 * value for name, value in before.items()}
    net.load_state_dict(half, assign=True)
    net.requires_grad_(True)
    net.zero_grad()
    yield step(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.5 * parameter)
            parameter.mul_(2).add_(0.25)
    yield step(net)
    yield from whole_gradients(net)


def whole_gradients(net: nn.Module) -> list[Tensor]:
    found = gradients(net)
    return [found[name] for name in sorted(found)]


def gradients_changed_after_a_step(net: nn.Module) -> Iterator[Tensor]:
    """In place of hooks on gradients."""
    optimizer = sgd(net)
    for _ in range(2):
        yield step(net)
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)
        optimizer.step()


def state_in_and_out(net: nn.Module) -> Iterator[Tensor]:
    """Whole and in pieces; buffers too."""
    optimizer, kept = sgd(net), state(net)
    own = {name: value.detach().clone() for name, value in net.state_dict().items()}
    for states in (kept, own):
        yield step(net)
        optimizer.step()
        net.load_state_dict(states)
        yield step(net)


def accumulated(net: nn.Module) -> Iterator[Tensor]:
    optimizer = sgd(net)
    for _ in range(2):
        for _ in range(3):
            yield step(net, scale=1 / 3)
        yield from whole_gradients(net)
        optimizer.step()
        optimizer.zero_grad()


def averaged(net: nn.Module) -> Iterator[Tensor]:
    """A moving average, as the message of a copy says."""
    optimizer = sgd(net)
    average = {name: p.detach().clone() for name, p in net.named_parameters()}
    for _ in range(3):
        yield step(net)
        optimizer.step()
        for name, parameter in net.named_parameters():
            average[name].lerp_(parameter.detach(), 0.1)
    net.load_state_dict(average, strict=False)
    yield step(net)


def clipped(net: Any) -> Iterator[Tensor]:
    optimizer = sgd(net)
    for _ in range(2):
        yield step(net)
        if isinstance(net, ap.ParallelModule):
            yield net.clip_grad_norm_(0.05)
        else:
            yield nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()


# Those that call the module itself, which a pipeline does not do.


def synced_at_last(net: Any) -> Iterator[Tensor]:
    """Calls and steps without sums, in turns; one update drops them, and what breaks off leaves
    them."""
    optimizer = sgd(net, 0.1)
    quiet = net.no_sync if isinstance(net, ap.ParallelModule) else nullcontext
    for update in range(3):
        for turn in range(4):
            with quiet() if turn != 3 else nullcontext():
                if turn % 2:
                    yield step(net, scale=0.5)
                else:
                    net(X, Y)[1].square().mean().backward()
            if (update, turn) == (0, 1):
                yield from whole_gradients(net)
            if (update, turn) == (1, 2):
                yield from (p.grad for _, p in sorted(net.named_parameters()))
                optimizer.zero_grad()
        yield from whole_gradients(net)
        optimizer.step()
        optimizer.zero_grad()


def scaled_by_a_scaler(net: Any) -> Iterator[Tensor]:
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for factor in (1.0, float("inf"), 1.0):
        loss = F.cross_entropy(net(X, Y)[1], Y)
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield torch.tensor(scaler.get_scale())


def hooked(net: Any) -> Iterator[Tensor]:
    """Hooks around calls of the whole."""
    before = net.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    after = net.register_forward_hook(lambda module, args, outputs: 3 * outputs[0])
    net(X, Y).backward()
    yield from whole_gradients(net)
    before.remove()
    after.remove()
    yield step(net)


def criterion_outside(net: Any) -> Iterator[Tensor]:
    optimizer = sgd(net)
    for _ in range(2):
        loss = F.cross_entropy(net(X, Y)[1], 2 - Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


O = torch.optim  # noqa: E741
RECIPES: tuple[Recipe, ...] = (
    trained(O.Adam, lr=0.05, eps=1e-3, amsgrad=True),
    trained(O.AdamW, lr=0.05, eps=1e-3, foreach=True),
    trained(O.AdamW, lr=0.05, eps=1e-3, fused=True),
    trained(O.SGD, lr=0.5, momentum=0.9, nesterov=True),
    frozen_and_unfrozen,
    assigned_and_copied,
    gradients_changed_after_a_step,
    state_in_and_out,
    accumulated,
    averaged,
    clipped,
)
CALLED: tuple[Recipe, ...] = (synced_at_last, scaled_by_a_scaler, hooked, criterion_outside)
OF_WHOLE: tuple[Recipe, ...] = (trained(O.Adafactor, lr=0.05), lbfgs)  # not in pieces


REFUSED: tuple[tuple[str, Any, str], ...] = (  # on processes
    ("zero3", O.Adafactor, "Adafactor, which does not for parameters that are kept in pieces"),
    ("cut", O.LBFGS, "LBFGS, which does not for parameters that are kept in pieces"),
    ("pipeline", O.LBFGS, "LBFGS, which does not for parameters of some stages"),
    ("whole", O.Rprop, "Rprop, which does not for DTensors"),
    ("whole", lambda own: O.SGD(own, fused=True), "which does not for DTensors"),
)


def chosen(every: bool = False) -> list[tuple[Recipe, str]]:
    """A setting or two for each."""
    found = [(recipe, "whole") for recipe in OF_WHOLE]
    for recipes, settings in ((RECIPES, ["cut", "zero3", "pipeline"]), (CALLED, ["cut", "zero3"])):
        for at, recipe in enumerate(recipes):
            own = settings if every or recipes is CALLED else [settings[at % len(settings)]]
            found += [(recipe, setting) for setting in own]
    return found


def a_parameter_is_shared_by_two(**options: Any) -> None:
    """Each module has its own until one is given that of the other."""
    found = []
    for setting in ("cut", "zero3"):
        for pair in (
            [net(setting).fresh().model for _ in range(2)],
            [parallel(setting, **options) for _ in range(2)],
        ):
            one, other = pair
            other.get_submodule("middle").weight = one.get_submodule("middle").weight
            optimizer = torch.optim.SGD({*one.parameters(), *other.parameters()}, lr=0.5)
            for _ in range(2):
                for module in pair:
                    step(module)
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*(state(module)["middle.weight"] for module in pair))
            found.append([state(module) for module in pair])
        torch.testing.assert_close(*found[-2:], rtol=1e-9, atol=1e-11)


class Cast(nn.Module):
    """`inside`: forward casts by itself."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.inside else nullcontext():
            y = self.down(torch.relu(self.up(x)))
        return y.float().square().mean()


def autocast_is_kept_or_refused(**options: Any) -> None:
    """In bfloat16 a sum in another order is another number."""
    x = X.float()
    for inside in (True, False):
        model = made(Cast, inside).float()
        with nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
            module = ap.parallelize(model, (x,), mesh=Mesh(dp=4), mode="propagate", **options)
            loss = model(x)
        loss.backward()
        close = {"rtol": 0.02, "atol": 2e-3}
        torch.testing.assert_close(module.step(x), loss.detach(), **close)
        torch.testing.assert_close(module.full_grads(), gradients(model), **close)
        assert not torch.equal(loss, Cast.forward(module_without(model), x))
        if inside:
            with (
                torch.autocast("cpu", torch.bfloat16),
                pytest.raises(ap.InvalidInput, match="autocast is part of the program"),
            ):
                module.step(x)


def module_without(model: nn.Module) -> Any:
    """The same without a cast."""
    found = made(Cast, False).float()
    found.load_state_dict(model.state_dict())
    return found


def unsummed_gradients_outlive_a_step_that_breaks_off() -> None:
    """On processes, where they are partial sums."""
    module = parallel("whole")
    with module.no_sync():
        module.step(X, Y)
        held = {name: parameter.grad for name, parameter in module.named_parameters()}
        assert all(is_partial(gradient) for gradient in held.values())
        with patch.object(RankRunner, "advance", broken), pytest.raises(KeyboardInterrupt):
            module.step(X, Y)
    with patch.object(RankRunner, "advance", broken), pytest.raises(KeyboardInterrupt):
        module.step(X, Y)
    assert all(p.grad is held[name] for name, p in module.named_parameters())
    again = parallel("whole")
    again.step(X, Y, scale=2)
    module.load_state_dict(again.full_state_dict() | {"seen": torch.zeros(6).double()})
    module.step(X, Y)
    torch.testing.assert_close(module.full_grads(), again.full_grads(), rtol=1e-9, atol=1e-11)


def hooks_that_come_before_backward_are_refused() -> None:
    """On processes, where a hook would see no gradient."""
    module = parallel("cut")
    loss = module(X, Y)[0]
    hook = dict(module.named_parameters())["up.weight"].register_hook(lambda gradient: gradient)
    with pytest.raises(ap.InvalidInput, match="without hooks"):
        loss.backward()
    hook.remove()
    module(X, Y)[0].backward()


def broken(runner: RankRunner) -> None:
    raise KeyboardInterrupt


def optimizers_that_do_something_else_are_refused() -> None:
    for setting, kind, text in REFUSED:
        module = parallel(setting)
        optimizer, loss = kind(module.parameters()), module.step(X, Y)
        with pytest.raises(ap.InvalidInput, match="does on processes what it does") as caught:
            optimizer.step(partial(module.step, X, Y))
        assert text in str(caught.value.got)
        module.get_buffer("seen").zero_() if setting != "pipeline" else None
        torch.testing.assert_close(module.step(X, Y), loss)


def assert_recipes_give_the_same(**options: Any) -> None:
    for recipe, setting in chosen():
        assert_same(recipe, setting, **options)
    a_parameter_is_shared_by_two(**options)
    autocast_is_kept_or_refused(**options)
