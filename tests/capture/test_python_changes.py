"""What forward changes in Python: carried out after each call, refused, or warned of once.

What is carried out on meshes is in tests/test_outputs.py.
"""

from __future__ import annotations

import itertools
import warnings
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from enum import Enum
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.errors import InvalidInput

X = torch.ones(4, 4)


def effects(model: nn.Module) -> list[str]:
    """Return what each call of a model leaves behind, by name."""
    return sorted(effect.name for effect in capture(model, (X,)).effects)


class Counting(nn.Module):
    """Sets plain attributes in forward."""

    def __init__(self, counts: bool, reads: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.counts, self.reads, self.calls, self.length, self.seen = counts, reads, 0, 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.length, self.seen = x.shape[0], True
        if self.counts:
            self.calls += 1  # the line
        return (self.linear(x) * (self.length + self.calls * self.reads)).sum()


def test_a_counter_is_warned_of_with_its_line() -> None:
    model = nn.Sequential(Counting(counts=True))
    with pytest.warns(UserWarning, match=r"0\.calls .*self\.calls \+= 1.*a buffer") as heard:
        assert effects(model) == ["0.length", "0.seen"]
    assert len(heard) == 1
    assert heard[0].filename == __file__
    assert model[0].calls == 0


def test_counters_of_one_line_are_told_together() -> None:
    with pytest.warns(UserWarning, match=r"1\.calls and 2 more places") as heard:
        capture(nn.Sequential(nn.Linear(4, 4), *(Scaled(4, 4) for _ in range(3))), (X,))
    assert len(heard) == 1


class Scaled(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_numbers_that_stay_the_same_are_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(Counting(counts=False), (X,))


class ByClass(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # the line
        return (super().forward(x) * self.calls).sum()


class OfClass(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        OfClass.calls += 1  # the line
        return (super().forward(x) * OfClass.calls).sum()


class InDict(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.state = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1  # the line
        return (super().forward(x) * self.state["calls"]).sum()


class FromNothing(nn.Linear):
    calls: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls = (self.calls or 0) + 1  # the line
        return (super().forward(x) * self.calls).sum()


class TheFirstIsAnother(nn.Linear):
    is_first = True

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.is_first:
            y = y * 2
            self.is_first = False  # the line
        return y.sum()


class TogglesItsMode(nn.Linear):
    """By a method of torch."""

    def forward(self, x: Tensor) -> Tensor:
        self.train(not self.training)  # the line
        return super().forward(x).sum() * (2 if self.training else 1)


class ByAllAttributes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = vars(self).get("calls", 0) + 1  # the line
        return super().forward(x).sum() * self.calls


class ByAnOrder(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.factors = {"a": 1, "b": 2}

    def forward(self, x: Tensor) -> Tensor:
        first = next(iter(self.factors))
        self.factors[first] = self.factors.pop(first)  # the line
        return super().forward(x).sum() * next(iter(self.factors.values()))


class InSlots:
    __slots__ = ("__calls", "other")

    def __init__(self) -> None:
        self.__calls = 0

    def next(self) -> int:
        self.__calls += 1  # the line
        return self.__calls


class ByAnObject(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.counter = InSlots()

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.counter.next()).sum()


class InACycle(nn.Linear):
    """What comes next of an iterator that stands in an attribute."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.factors = itertools.cycle([1.0, 2.0, 3.0])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum() * next(self.factors)  # the line


class InAMap(InACycle):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.factors = map(float, enumerate_all())  # type: ignore[assignment]


def enumerate_all() -> Iterator[int]:
    return itertools.chain(range(1, 3), [4, 5, 6])


class ByAnAttributeOfAFunction(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]  # the line
        return super().forward(x).sum() * counted.calls  # type: ignore[attr-defined]


def counted() -> None:
    """Which has no attribute so far."""


class InAnArray(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = np.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # the line
        return (super().forward(x) * float(self.calls[0])).sum()


class InAUserDict(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.state = UserDict(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1  # the line
        return (super().forward(x) * self.state["calls"]).sum()


class ByAWord(nn.Linear):
    kind = "first"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * (2 if self.kind == "first" else 1)
        self.kind = "other"  # the line
        return y.sum()


class ByALength(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.log = list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(3)  # the line
        return (super().forward(x) * len(self.log)).sum()


STEP = 0


class OfAFile(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        global STEP
        STEP += 1  # the line
        return (super().forward(x) * STEP).sum()


def counts_in_a_closure() -> nn.Module:
    count, model = 0, nn.Linear(4, 4)

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal count
        count += 1  # the line
        return output.sum() * count

    model.register_forward_hook(hook)
    return model


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (lambda: Counting(counts=True, reads=True), "calls"),
        (lambda: ByClass(4, 4), "calls"),
        (lambda: OfClass(4, 4), "OfClass.calls"),
        (InDict, "state['calls']"),
        (lambda: FromNothing(4, 4), "calls"),
        (lambda: TheFirstIsAnother(4, 4), "is_first"),
        (lambda: TogglesItsMode(4, 4), "training"),
        (lambda: ByAllAttributes(4, 4), "calls"),
        (ByAnOrder, "factors['b']"),
        (ByAnObject, "counter._InSlots__calls"),
        (InAnArray, "calls"),
        (lambda: InACycle(4, 4), "factors"),
        (lambda: InAMap(4, 4), "factors"),
        (lambda: ByAnAttributeOfAFunction(4, 4), "counted.calls"),
        (InAUserDict, "state.data['calls']"),
        (lambda: ByAWord(4, 4), "kind"),
        (ByALength, "log"),
        (lambda: OfAFile(4, 4), "STEP"),
        (counts_in_a_closure, "count of counts_in_a_closure.<locals>.hook"),
    ],
)
def test_what_the_next_call_computes_with_is_refused(
    kind: Callable[[], nn.Module], name: str
) -> None:
    with pytest.raises(InvalidInput, match="computes the same at every call") as error:
        capture(kind(), (X,))
    assert str(error.value.got).startswith(f"{name}, ")
    assert str(error.value.source).endswith("# the line")
    assert STEP == OfClass.calls == 0, "a capture leaves nothing behind"


class GoesThrough(nn.Linear):
    """Numbers that are what they were when the call ends."""

    depth, last = 0, float("nan")

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        self.last = float("nan")
        for self.place in range(3):
            x = super().forward(x) * (self.depth + self.place)
        self.depth -= 1
        return x.sum()


def test_numbers_that_are_set_back_are_not_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(GoesThrough(4, 4), (X,))


class Keeps(nn.Linear):
    """A tensor of one call, for the next."""

    state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.state is not None:
            y = y + self.read(self.state)
        self.state = self.kept(x, y)  # the line
        return y.sum()

    def kept(self, x: Tensor, y: Tensor) -> Any:
        return y.detach()

    def read(self, state: Any) -> Tensor:
        return state


class KeepsTheFirst(Keeps):
    """As a cache of what the first batch was."""

    def kept(self, x: Tensor, y: Tensor) -> Any:
        return [x.mean()] if self.state is None else self.state

    def read(self, state: Any) -> Tensor:
        return state[0]


class KeepsWeights(Keeps):
    def kept(self, x: Tensor, y: Tensor) -> Any:
        return {"ema": 0.9 * self.weight.detach()}

    def read(self, state: Any) -> Tensor:
        return state["ema"].sum()


class KeepsNoise(Keeps):
    def kept(self, x: Tensor, y: Tensor) -> Any:
        return torch.rand(4)


class KeepsWritten(Keeps):
    """Of what is written to in place."""

    def kept(self, x: Tensor, y: Tensor) -> Any:
        made = torch.zeros(4, 4)
        made[:2] = y[:2].detach()
        return made


class KeepsABuffer(Keeps):
    """What stood in it before."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(4))

    def kept(self, x: Tensor, y: Tensor) -> Any:
        before = self.seen.clone()
        self.seen += x.mean(0)
        return before


class Counted(nn.Linear):
    """A tensor that follows from no input."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.state: Any = self.first()

    def first(self) -> Any:
        return torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state + 1  # the line
        return super().forward(x).sum() * self.state


class CountedInAList(Counted):
    def first(self) -> Any:
        return [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        self.state[0] = self.state[0] + 1  # the line
        return nn.Linear.forward(self, x).sum() * self.state[0]


class CountedInADict(Counted):
    def first(self) -> Any:
        return {0: torch.zeros(())}

    forward = CountedInAList.forward


COUNTED: list[type[nn.Linear]] = [Counted, CountedInAList, CountedInADict]


class ReadsData(Keeps):
    def read(self, state: Any) -> Tensor:
        return state.data


class ReadsTransposed(Keeps):
    def read(self, state: Any) -> Tensor:
        return state.T


FORMS = [KeepsTheFirst, KeepsWeights, KeepsNoise, KeepsWritten, KeepsABuffer]


@pytest.mark.parametrize("kind", [Keeps, *FORMS, *COUNTED, ReadsData, ReadsTransposed])
def test_a_tensor_for_the_next_call_is_refused(kind: Callable[..., Any]) -> None:
    model = nn.Sequential(kind(4, 4))
    before = str(model[0].state)
    with pytest.raises(InvalidInput, match="stands in a buffer") as error:
        capture(model, (X,))
    assert "0.state" in str(error.value.got)
    assert str(error.value.source).endswith("# the line")
    assert str(model[0].state) == before


class InAList(Keeps):
    """Elsewhere than in an attribute that is set."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.history = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        y = nn.Linear.forward(self, x)
        if self.history:
            y = y + self.history[-1]
        self.history.append(y.detach())
        return y.sum()


class InAnObject(InAList):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.around = SimpleNamespace(history=self.history)
        del self.history

    def __getattr__(self, name: str) -> Any:
        return self.around.history if name == "history" else super().__getattr__(name)


@pytest.mark.parametrize("kind", [InAList, InAnObject])
def test_wherever_it_stands(kind: type[Keeps]) -> None:
    model = nn.Sequential(kind(4, 4))
    with pytest.raises(InvalidInput, match="stands in a buffer") as error:
        capture(model, (X,))
    assert "history" in str(error.value.got)
    assert str(error.value.source).endswith("self.history.append(y.detach())")
    assert model[0].history == []


HELPER = Keeps(4, 4)


class Uses(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        HELPER.state = x.detach()
        return super().forward(x).sum()


def test_a_module_that_is_no_part_of_the_model_is_left_as_it_was() -> None:
    assert effects(Uses(4, 4)) == ["HELPER.state"]
    assert HELPER.state is None


class KeepsInABuffer(nn.Linear):
    """That is not there before the first call."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("state", None)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.state = y.detach() if self.state is None else self.state + y.detach()
        return (y + self.state).sum()


class ReplacesAParameter(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight = nn.Parameter(self.weight * 2)
        return super().forward(x).sum()


class AddsAModule(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.state = nn.Identity()
        return super().forward(x).sum()


class AddsAHook(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.register_forward_hook(lambda module, args, output: None)
        return super().forward(x).sum()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (KeepsInABuffer, "0.state"),
        (ReplacesAParameter, "0.weight"),
        (AddsAModule, "0.state"),
        (AddsAHook, "a forward hook of 0"),
    ],
)
def test_what_modules_are_made_of_stays(kind: Callable[..., nn.Module], name: str) -> None:
    with pytest.raises(InvalidInput, match="those that it has before it runs") as error:
        capture(nn.Sequential(kind(4, 4)), (X,))
    assert str(error.value.got).startswith(name)


class AsksForValues(nn.Linear):
    calls, kept = 0, None

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.calls += 1
        self.kept = x.sum()
        return (super().forward(x)[:, : int(lengths.max())] * self.calls).sum()


def test_where_values_are_asked_for_all_that_changes_is_told() -> None:
    given = X, torch.tensor([1, 2, 3, 2])
    with pytest.warns(UserWarning, match="calls is kept by forward, which asks for values") as told:
        captured = capture(AsksForValues(4, 4), given)
    assert len(told) == 1
    assert [effect.name for effect in captured.effects] == ["kept"], "set before it is read"


class KeepsAnObject(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).sum()
        self.later = lambda: y * 2
        return y


class KeepsOneForAll(nn.Linear):
    first: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x.sum()
        return super().forward(x).sum()


class Phase(Enum):
    FIRST, SECOND, THIRD = range(3)


@dataclass(frozen=True)
class Progress:
    calls: int


class ByPhases(nn.Linear):
    """What computes something else after more calls than are followed."""

    def __init__(self, state: Any, following: Callable[[Any], Any]) -> None:
        super().__init__(4, 4)
        self.state, self.following = state, following
        self.third = following(following(state))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).sum() * (3 if self.state == self.third else 1)
        self.state = self.following(self.state)
        return y


def by_phases(state: Any, following: Callable[[Any], Any]) -> Callable[..., nn.Module]:
    return lambda *_: ByPhases(state, following)


class AfterSome(nn.Linear):
    """Lets a container grow, and computes something else once it is long enough."""

    def __init__(self, state: Any, grow: Callable[[Any], Any]) -> None:
        super().__init__(4, 4)
        self.state, self.grow = state, grow

    def forward(self, x: Tensor) -> Tensor:
        self.grow(self.state)
        return super().forward(x).sum() * (3 if len(self.state) > 2 else 1)


class OnlyLogs(AfterSome):
    def forward(self, x: Tensor) -> Tensor:
        self.grow(self.state)
        return nn.Linear.forward(self, x).sum()


def after_some(state: Any, grow: Callable[[Any], Any]) -> Callable[..., nn.Module]:
    return lambda *_: AfterSome(state, grow)


@pytest.mark.parametrize(
    "kind",
    [
        by_phases(Phase.FIRST, lambda one: Phase(min(one.value + 1, 2))),
        by_phases(Fraction(1, 2), lambda one: one + Fraction(1, 2)),
        by_phases(1 + 0j, lambda one: one + 1),
        by_phases(b"", lambda one: one + b"x"),
        by_phases(Progress(0), lambda one: Progress(one.calls + 1)),
        by_phases(date(2000, 1, 1), lambda one: one.replace(year=one.year + 1)),
    ],
)
def test_what_is_another_value_after_each_call_is_told(kind: Callable[..., nn.Module]) -> None:
    with pytest.warns(UserWarning, match="state is another value after every call"):
        assert effects(kind()) == []


@pytest.mark.parametrize("state", [[], deque(maxlen=8)])
def test_lists_that_grow_and_are_read_are_told(state: Any) -> None:
    with pytest.warns(UserWarning, match="state is a list that grows and that forward reads") as a:
        assert effects(AfterSome(state, lambda one: one.append(1))) == ["state"]
    assert len(a) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert effects(OnlyLogs(state, lambda one: one.append(1))) == ["state"]
    assert len(state) == 0


@pytest.mark.parametrize(
    "kind",
    [
        after_some(set(), lambda one: one.add(len(one))),
        after_some({}, lambda one: one.setdefault(len(one), 1)),
    ],
)
def test_others_that_grow_are_told(kind: Callable[..., nn.Module]) -> None:
    with pytest.warns(UserWarning, match="state.* is another value after every call"):
        effects(kind())


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (KeepsAnObject, "later is not kept by a program .*an object of class function"),
        (KeepsOneForAll, "first is kept by the first call alone"),
    ],
)
def test_what_cannot_be_carried_out_is_told(kind: Callable[..., nn.Module], told: str) -> None:
    with pytest.warns(UserWarning, match=told):
        assert effects(kind(4, 4)) == []


class OnlyLooksAtShapes(Keeps):
    def read(self, state: Any) -> Tensor:
        return torch.ones(state.shape[-1])


class Tabulates(nn.Linear):
    """What is made once, of no input: each call would make the same."""

    table: Any = None
    shown: Any = None
    given: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1]) / 4
        y = super().forward(x * self.table)
        self.shown, self.given = y.detach(), x  # which no call reads
        self.within = y.square()
        return self.within.sum()


class Lengthens(nn.Linear):
    """A table of places, made longer where it is too short."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.longest = 0
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.longest < x.shape[1]:
            self.longest = x.shape[1]
            self.register_buffer("table", torch.arange(x.shape[1]) / 4, persistent=False)
        return (super().forward(x) + self.table).sum()


NOTES = SimpleNamespace(last=[0])


class Slopes(nn.Linear):
    """A table of another buffer, of which each later call takes as much as it needs."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("slopes", torch.ones(4, 1))
        self.register_buffer("offsets", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        NOTES.last = [size]
        if self.offsets is None:
            self.register_buffer("offsets", self.slopes * torch.arange(size), persistent=False)
            return (super().forward(x) + self.offsets).sum()
        return (super().forward(x) + self.offsets[:, -size:]).sum()


class Orders(nn.Linear):
    """A constant that passes through an operator which gives it back as it is."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.order = torch.arange(4)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, self.order.long()]
        NOTES.last = [len(x)]
        return super().forward(x).sum()


REGISTERED: Any = None
IS_READY = False


class Registers(nn.Linear):
    """Something for the whole process, which must not be done again."""

    def forward(self, x: Tensor) -> Tensor:
        global REGISTERED, IS_READY
        if REGISTERED is None and not IS_READY:
            REGISTERED, IS_READY = object(), True
        return super().forward(x).sum()


@pytest.mark.parametrize(
    "kind", [OnlyLooksAtShapes, Tabulates, Lengthens, Slopes, Orders, Registers]
)
def test_others_are_kept_in_peace(kind: type[nn.Linear]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(nn.Sequential(kind(4, 4)), (X,))
    assert (kind is Registers) == IS_READY


def test_what_is_looked_at_leaves_nothing_behind() -> None:
    """A table that is made once is there in the next program, too, with its values."""
    model, x = Tabulates(4, 4), torch.randn(4, 4)
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), backend="virtual")
    module.step(x)
    module.eval()
    torch.testing.assert_close(module(x), model(x))


LAST: Any = None
OTHER: Any = None
THIRD: Any = None


class SetsGlobals(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        global LAST, OTHER, THIRD
        y = super().forward(x)
        THIRD, LAST, OTHER = y.sum(), y.mean(), y.square()
        return y.sum()


def test_effects_stand_in_the_order_of_the_code_on_every_rank() -> None:
    """Not in that of a set of names, which is another one in each process."""
    found = capture(SetsGlobals(4, 4), (X,)).effects
    assert [effect.name for effect in found] == ["THIRD", "LAST", "OTHER"]


class KeepsWithin(nn.Module):
    """In containers that stand in a tuple, and beside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.pair: tuple[Tensor, list[Tensor]] = torch.zeros(1), []
        self.table: dict[str, Any] = {"of": self.linear, "log": []}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.pair[1].append(y.detach().sum())
        self.table["log"].append(y.detach().mean())
        return y.sum()


def test_what_grows_inside_of_other_containers() -> None:
    model, plain = nn.Sequential(KeepsWithin()), KeepsWithin()
    plain.load_state_dict(model[0].state_dict())
    module = ap.parallelize(model, (X,), mesh=ap.Mesh(dp=2), backend="virtual")
    for _ in range(2):
        module.step(X)
        plain(X)
    for one in (module[0].pair[1], plain.pair[1]):
        assert len(one) == 2
    torch.testing.assert_close(module[0].pair[1], plain.pair[1])
    torch.testing.assert_close(module[0].table["log"], plain.table["log"])


class RunsOnce(nn.Linear):
    is_done: Any = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.is_done is None, "forward runs once"  # the line
        self.is_done = [len(x)]
        return super().forward(x).sum()


def test_a_second_call_that_fails_is_refused() -> None:
    with pytest.raises(InvalidInput, match="AssertionError in the second call") as error:
        capture(RunsOnce(4, 4), (X,))
    assert str(error.value.source).endswith("# the line")
