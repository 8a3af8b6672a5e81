"""What stands in objects is seen without asking them: no code of their classes runs."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import OrderedDict, defaultdict, deque
from functools import partial
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.object_contents import (
    attributes_of,
    is_a,
    items_of,
    reader_of,
    space_of,
    values_in,
)
from autopar.capture.python_state import PythonState


def _asked(self: Any, *args: Any) -> Any:
    raise RuntimeError("asked")


class Meta(type):
    """A metaclass whose classes answer nothing either."""

    __getattribute__ = __eq__ = __hash__ = __instancecheck__ = __subclasscheck__ = _asked


class Shy(metaclass=Meta):
    """An object that answers nothing."""

    __slots__ = ("__dict__", "slot")
    __getattribute__ = __eq__ = __hash__ = __len__ = __iter__ = __bool__ = __repr__ = _asked
    __contains__ = __getitem__ = __torch_function__ = __call__ = __sizeof__ = __dir__ = _asked
    __class__ = property(_asked)  # type: ignore[assignment]

    def __init__(self) -> None:
        object.__setattr__(self, "slot", 1)
        object.__setattr__(self, "plain", 2)


class ShyDict(dict[str, int]):
    __iter__ = __len__ = __getitem__ = items = keys = values = __eq__ = __bool__ = _asked  # type: ignore


class ShyList(list[int]):
    __iter__ = __len__ = __getitem__ = __eq__ = __bool__ = _asked  # type: ignore


class Copied:
    """An object that is its own copy, and answers nothing else."""

    tensor: Tensor
    __getattr__ = __eq__ = __len__ = __iter__ = __bool__ = _asked
    __hash__ = object.__hash__
    __class__ = property(_asked)  # type: ignore[assignment]

    def __deepcopy__(self, memo: Any) -> Copied:
        return self


class Lazy(ModuleType):
    """A module that imports something as soon as it is asked for anything that it has not."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"loads for {name}")


def lazily(name: str) -> ModuleType:
    """A module that Python loads when it is asked for anything at all."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LAZY, LOADS, ODD = Lazy("lazy"), lazily("wave"), Copied()


class Model(nn.Module):
    module: ClassVar[Any] = LAZY
    odd: ClassVar[Any] = ODD

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.held = [ODD, {"odd": ODD}, partial(max, ODD), SimpleNamespace(odd=ODD)]

    def forward(self, x: Tensor) -> Tensor:
        known = LAZY, LOADS, ODD
        for block in self.blocks:
            x = block(x)
        return x * len(known)


def test_what_stands_in_objects_that_answer_nothing() -> None:
    shy = Shy()
    assert attributes_of(shy) == {"slot": 1, "plain": 2}
    assert values_in(shy) == ["plain", 2, 1]
    assert not is_a(shy, int, Tensor, nn.Module)
    pairs: list[tuple[Any, Any]] = [
        (ShyDict(a=1), {"a": 1}),
        (ShyList([5, 6]), {0: 5, 1: 6}),
        (OrderedDict(a=1), {"a": 1}),
        (deque([5]), {0: 5}),
        ({5}, {5: None}),
        (shy, None),
    ]
    for value, items in pairs:
        found = items_of(value)
        assert found is None if items is None else found == items
    for holder in (
        [shy],
        (shy,),
        {"x": shy},
        deque([shy]),
        partial(print, shy),
        SimpleNamespace(x=shy),
    ):
        waiting = values_in(holder)
        for one in waiting:  # which grows meanwhile
            if is_a(one, tuple):
                waiting += values_in(one)
        assert any(one is shy for one in waiting)
    known = defaultdict(list, a=[1])
    assert values_in(known) == [list, "a", [1]]
    assert values_in(MappingProxyType(known))[0] is known
    assert reader_of(random.Random()) is None
    assert (space_of(LAZY) or {})["__name__"] == "lazy"


def test_models_beside_modules_and_objects_that_answer_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lazy", LAZY)
    monkeypatch.setitem(sys.modules, "odd", ODD)
    targets = [str(node.target) for node in capture(Model(), (torch.randn(2, 4),)).operators]
    assert targets.count("aten.tanh.default") == 4
    assert "readframes" not in str((space_of(LOADS) or {}).keys())  # it is not loaded


def test_what_a_module_keeps_is_told_apart() -> None:
    model = Model()
    before = PythonState(model)
    assert not before.changes()
    model.held.append(Copied())
    assert [(one.name, one.kind) for one in before.changes()] == [("held", "grown")]
    before.put_back()
    assert len(model.held) == 4


class Registry:
    def __init__(self) -> None:
        self.named, self.other = [1], [1]


REGISTRY = Registry()


class Naming(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(REGISTRY.named) if Shy is not None else x


def test_outside_the_model_what_code_names_is_seen_alone() -> None:
    before = PythonState(Naming())
    REGISTRY.named.append(2)
    REGISTRY.other.append(2)
    assert [one.name for one in before.changes()] == ["REGISTRY.named"]
    before.put_back()
    assert (REGISTRY.named, REGISTRY.other) == ([1], [1, 2])
