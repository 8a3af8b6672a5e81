"""Blocks that read, by some road, what their caller sets: these are no copies of each other."""

from __future__ import annotations

import enum
import itertools
import random
import threading
import weakref
from collections import UserDict, deque, namedtuple
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.capture.followed_blocks import FollowedBlock
from tests.capture.test_repeated import Block, both
from tests.capture.test_repeated import Net as Plain

TURN = 0
TABLE = {"turn": 0}
CONTEXT = ContextVar("CONTEXT", default=0)
LOCAL = threading.local()


@dataclass(slots=True)
class Slots:
    turn: int = 0


SLOTS = Slots()


def turn() -> int:
    return TURN


def in_table() -> int:
    return TABLE["turn"]


class Scale:
    kept = SimpleNamespace(turn=0)

    def __call__(self) -> int:
        return TURN

    def get(self) -> int:
        return turn()

    @property
    def value(self) -> int:
        return TURN

    @staticmethod
    def plain() -> int:
        return TURN

    def of_class(self) -> int:
        return self.kept.turn


class Descriptor:
    def __get__(self, owner: Any, kind: Any = None) -> int:
        return TURN


class Described:
    turn = Descriptor()


class Way(enum.Enum):
    ONE = 1

    def turn(self) -> int:
        return TURN


class Own(list[Any]):
    turn = 0


OWN = Own()
FRESH: dict[str, Any] = {}  # what blocks consume


def _renew() -> None:
    FRESH["generator"], FRESH["count"] = _numbers(), itertools.count()
    FRESH["cycle"] = itertools.cycle([0, 0, 5, 5, 5, 5])
    FRESH["random"], FRESH["numpy"] = Drawing(0), np.random.default_rng(0)


Pair = namedtuple("Pair", "turn other")


def _closure() -> Callable[[], int]:
    def inner() -> int:
        return turn()

    return lambda: inner()


def _numbers() -> Iterator[int]:
    at = 0
    while True:
        yield at
        at += 1


def _default(read: Callable[[], int] = Scale()) -> int:  # noqa: B008
    return read()


@torch.no_grad()
def _decorated() -> int:
    return TURN


class Drawing(random.Random):
    pass


# What blocks hold, of a net; and what they read of that.
ROADS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], int]]] = {
    "slots": (lambda net: SLOTS, lambda held: held.turn),
    "parent": (lambda net: [net], lambda held: held[0].turn),
    "parent's inner": (lambda net: (net.state,), lambda held: held[0].turn),
    "weak": (weakref.ref, lambda held: held().turn),
    "weak proxy": (weakref.proxy, lambda held: held.turn),
    "weak set": (lambda net: weakref.WeakSet([net]), lambda held: next(iter(held)).turn),
    "method of parent": (lambda net: [net.asked], lambda held: held[0]()),
    "callable": (lambda net: Scale(), lambda held: held()),
    "method": (lambda net: Scale(), lambda held: held.get()),
    "bound": (lambda net: Scale().get, lambda held: held()),
    "property": (lambda net: Scale(), lambda held: held.value),
    "static": (lambda net: Scale, lambda held: held.plain()),
    "of a class": (lambda net: Scale(), lambda held: held.of_class()),
    "descriptor": (lambda net: Described(), lambda held: held.turn),
    "enum": (lambda net: Way.ONE, lambda held: held.turn()),
    "dict": (lambda net: {"a": turn}, lambda held: held["a"]()),
    "proxy": (lambda net: MappingProxyType(TABLE), lambda held: held["turn"]),
    "table": (lambda net: [in_table], lambda held: held[0]()),
    "user dict": (lambda net: UserDict(a=[turn]), lambda held: held["a"][0]()),
    "tuple": (lambda net: Pair(turn, 1), lambda held: held.turn()),
    "deque": (lambda net: deque([turn]), lambda held: held[0]()),
    "partial": (lambda net: partial(turn), lambda held: held()),
    "partial of method": (lambda net: partial(Scale.get, Scale()), lambda held: held()),
    "closure": (lambda net: partial(_closure()), lambda held: held()),
    "default": (lambda net: [_default], lambda held: held[0]()),
    "decorated": (lambda net: [_decorated], lambda held: held[0]()),
    "context": (lambda net: [CONTEXT.get], lambda held: held[0]()),
    "thread": (lambda net: [LOCAL], lambda held: held[0].turn),
    "own list": (lambda net: OWN, lambda held: held.turn),
    "by name": (lambda net: "turn", lambda held: globals()[held]()),
    "generator": (lambda net: None, lambda held: next(FRESH["generator"])),
    "count": (lambda net: None, lambda held: next(FRESH["count"])),
    "cycle": (lambda net: None, lambda held: next(FRESH["cycle"])),
    "random": (lambda net: None, lambda held: int(FRESH["random"].random() * 1e6)),
    "numpy": (lambda net: None, lambda held: int(FRESH["numpy"].integers(10**6))),
    "array": (lambda net: net.array, lambda held: int(held[0])),
}


class Reading(Block):
    def __init__(self, read: Callable[[Any], int]) -> None:
        super().__init__(0)
        self.__dict__.update(held=None, read=read)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.read(self.held) < 2 else 2)


class Net(nn.Module):
    def __init__(self, road: str, count: int = 6) -> None:
        super().__init__()
        self.road = road
        self.turn, self.state = 0, nn.Identity()
        self.array = np.zeros(1)
        self.layers = nn.ModuleList(Reading(ROADS[road][1]) for _ in range(count))

    def asked(self) -> int:
        return self.turn

    def set(self, now: int) -> None:
        global TURN
        TURN = now
        self.turn = self.state.turn = SLOTS.turn = TABLE["turn"] = OWN.turn = now
        Scale.kept.turn = LOCAL.turn = self.array[0] = now
        CONTEXT.set(now)

    def forward(self, x: Tensor) -> Tensor:
        _renew()
        held = ROADS[self.road][0](self)  # not what a copy of the model would hold
        for layer in self.layers:
            layer.__dict__["held"] = held
        x = x + 0 * x
        for now, layer in enumerate(self.layers):
            self.set(now)
            x = layer(x)
        self.set(0)
        for layer in self.layers:
            layer.__dict__["held"] = None
        return x.square().mean()


CONSUMED = ("generator", "count", "cycle", "random", "numpy")
X = torch.randn(6, 4)


@pytest.mark.parametrize("road", [road for road in ROADS if road not in CONSUMED])
def test_what_is_read_by_a_road(road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(monkeypatch, Net(road), (X,)) == []


@pytest.mark.parametrize("road", CONSUMED)
def test_what_each_block_takes_is_no_copy(road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FollowedBlock, "again", lambda *_: pytest.fail("followed once"))
    capture(Net(road), (X,))


@pytest.mark.parametrize("road", ["slots", "parent", "callable", "dict", "partial", "weak"])
def test_values(road: str) -> None:
    torch.manual_seed(0)
    net = Net(road)
    expected = net(X)
    module = ap.parallelize(net, (X,), mesh=ap.Mesh(dp=2), backend="virtual")
    torch.testing.assert_close(module(X), expected)


class Unchanged(Net):
    def set(self, now: int) -> None:
        super().set(0)


@pytest.mark.parametrize("road", ["slots", "parent", "callable", "method", "dict", "partial"])
def test_what_stays_the_same_is_copied(road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = both(monkeypatch, Unchanged(road), (X,))
    assert copied == ["layers.3", "layers.4", "layers.5"]  # the input of the first learns nothing


class TiedInside(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.other = nn.Linear(4, 4)
        self.other.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(super().forward(x)))


def test_blocks_with_ties_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Plain(TiedInside)
    assert len(both(monkeypatch, net, (X,))) == 3
    expected = net(X)
    module = ap.parallelize(net, (X,), mesh=ap.Mesh(dp=2), backend="virtual")
    torch.testing.assert_close(module(X), expected)
