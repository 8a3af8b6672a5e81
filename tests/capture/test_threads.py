"""Threads: what capture replaces while it follows forward, it replaces for itself alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.capture.hooks import replaced
from autopar.capture.listing import listing

X = torch.ones(2, 4)


class Meanwhile(nn.Module):
    """A layer, in whose forward something is done."""

    def __init__(self, doing: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.doing = nn.Linear(4, 4), doing

    def forward(self, x: Tensor) -> Tensor:
        self.doing()
        return self.layer(x).sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x))


def trained() -> list[Any]:
    """A step of training, with all that forward may not do."""
    model, x = nn.Linear(4, 2), torch.arange(8.0).reshape(2, 4).requires_grad_()
    torch.manual_seed(3)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 4))
        model.bias.zero_()
    hidden = model(x)
    hidden.register_hook(lambda grad: grad * 2)
    hidden.retain_grad()
    loss = hidden.square().mean()
    loss.grad_fn.register_hook(lambda *grads: None)
    (alone,) = torch.autograd.grad(loss, x, retain_graph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        more = F.gaussian_nll_loss(hidden, hidden.detach(), torch.ones(2, 2))
    (loss + more).backward()
    model.weight.data = model.weight.data - model.weight.grad
    drawn = random.Random(5).random(), isinstance(random.Random(), random.Random)
    random.random()
    large = loss if bool(loss > 0) else -loss
    chosen = torch.where(model.weight > 0)
    found = [alone, hidden.grad, model.weight, large, model.bias, *chosen, *hidden.split(1)]
    return [drawn, loss.item(), *(tensor.tolist() for tensor in found)]


def started(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that does this, and what it has found, or why it has not."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_another_thread_trains_while_one_captures() -> None:
    results = SimpleQueue[list[Any]]()  # a list would hold again what it held before capture

    def beside() -> None:
        thread, seen = started(trained)
        thread.join()
        results.put(seen)

    plain = {name: vars(Tensor).get(name) for name in ("backward", "grad_fn", "data", "split")}
    capture(Meanwhile(beside), (X,))
    seen = [results.get() for _ in range(results.qsize())]
    assert seen
    assert all(one == [trained()] for one in seen)
    assert plain == {name: vars(Tensor).get(name) for name in plain}


def test_one_thread_captures_after_the_other() -> None:
    others = SimpleQueue[tuple[threading.Thread, list[Any]]]()

    def model() -> nn.Module:
        return nn.Sequential(*[Block() for _ in range(5)])

    def beside() -> None:
        if others.empty():
            thread, found = started(lambda: listing(capture(model(), (X,)).graph))
            others.put((thread, found))
            thread.join(timeout=0.3)  # it would be in the middle of it now

    before = nn.Module.__setattr__, nn.Module.__getattribute__
    capture(Meanwhile(beside), (X,))
    thread, found = others.get()
    thread.join()
    assert found == [listing(capture(model(), (X,)).graph)]
    assert before == (nn.Module.__setattr__, nn.Module.__getattribute__)


class Owner:
    def method(self) -> str:
        return "plain"

    @classmethod
    def of_class(cls) -> str:
        return f"plain {cls.__name__}"

    @property
    def known(self) -> str:
        return "plain"


class Heir(Owner):
    pass


INSTEAD: dict[str, Any] = {
    "method": lambda self: f"instead of {type(self).__name__}",
    "of_class": classmethod(lambda cls: f"instead of {cls.__name__}"),
    "known": property(lambda self: f"instead of {type(self).__name__}"),
}


@pytest.mark.parametrize("owner", [Owner, Heir])
@pytest.mark.parametrize("name", INSTEAD)
def test_what_is_replaced_is_bound_as_ever(name: str, owner: type) -> None:
    def asked() -> str:
        found = getattr(Heir(), name)
        return found if isinstance(found, str) else found()

    before = asked()
    with replaced(owner, name, INSTEAD[name]):
        assert asked() == "instead of Heir"
        thread, found = started(asked)
        thread.join()
        assert found == [before]
    assert asked() == before
