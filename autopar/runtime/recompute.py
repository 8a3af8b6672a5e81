"""Recompute: regions of a program that keep less from forward to backward.

    y = Full(function)(x, w)               keeps x; the first that backward reads of the rest makes
                                           it all again, by one more forward
    region = Selective(function)           keeps all but the values of the calls that it notes;
    call = region.noted(gelu)              each is made again where backward first reads it

Autograd sees the operators of the first forward and no others: what it kept of them has a stand-in,
which the values that are made again are put into. What a region keeps goes through the hooks on
saved tensors that stand around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import get_device_states, set_device_states

from autopar._torch import saving_hooks

Function = Callable[..., Any]
Beside = Callable[[], AbstractContextManager[Any]]


class Full:
    """A function whose forward runs again in backward."""

    def __init__(
        self, function: Function, is_random: bool = False, beside: Sequence[Beside] = ()
    ) -> None:
        """`beside`: what the second forward runs in."""
        self.function, self.is_random, self.beside = function, is_random, beside

    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*inputs)
        run = _Run(self, inputs)
        with saved_tensors_hooks(run.pack, _unpack):
            results = self.function(*inputs)
        run.own.clear()
        return results


class _StandIn:
    """For a tensor that is not kept. The last to go lets go of the run."""

    __slots__ = ("__weakref__", "run", "value")

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.value: Tensor | None = None

    def unpack(self) -> Tensor:
        if self.value is None:
            self.run.again()
        assert self.value is not None
        return self.value


class _Kept:
    """A tensor that is kept, as the hooks around the region want it."""

    __slots__ = ("packed", "unpack_")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed, self.unpack_ = packed, unpack

    def unpack(self) -> Tensor:
        return self.unpack_(self.packed)


def _unpack(saved: _StandIn | _Kept | _Noted) -> Tensor:
    return saved.unpack()


class _Enough(Exception):
    """All that backward reads of a run has been made again."""


class _Run:
    """One run of a function: what it was given, and stand-ins for all that it kept besides."""

    def __init__(self, region: Full, inputs: Sequence[Any]) -> None:
        self.region, (self._pack, self._unpack) = region, saving_hooks()
        self.own = _storages(inputs)
        self.stand_ins: list[ReferenceType[_StandIn]] = []
        self._inputs: list[tuple[Any, bool | None]] = [
            (self._pack(value.detach()), value.requires_grad)
            if isinstance(value, Tensor)
            else (value, None)
            for value in inputs
        ]
        self._random = _random_states(inputs) if region.is_random else None

    def pack(self, tensor: Tensor) -> _StandIn | _Kept:
        if tensor.untyped_storage()._cdata in self.own:
            return _Kept(self._pack(tensor), self._unpack)
        stand_in = _StandIn(self)
        self.stand_ins.append(ref(stand_in))
        return stand_in

    def again(self) -> None:
        """Run it once more, and put what it keeps this time in the place of the stand-ins."""
        inputs = [
            value if learns is None else self._unpack(value).detach().requires_grad_(learns)
            for value, learns in self._inputs
        ]
        self._inputs.clear()
        own, waiting = _storages(inputs), [stand_in() for stand_in in self.stand_ins]
        self.stand_ins.clear()
        last = max(i for i, stand_in in enumerate(waiting) if stand_in is not None)
        count = 0

        def pack(tensor: Tensor) -> None:
            nonlocal count
            if tensor.untyped_storage()._cdata in own:
                return
            if (stand_in := waiting[count]) is not None:
                stand_in.value = tensor.detach()  # without the graph of this run
            count += 1
            if count > last:
                raise _Enough

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for beside in self.region.beside:
                stack.enter_context(beside())
            stack.enter_context(_replayed(self._random))
            stack.enter_context(saved_tensors_hooks(pack, _never))
            with suppress(_Enough):
                self.region.function(*inputs)


def _never(_: None) -> Tensor:
    raise AssertionError("nobody goes backward through what runs again")


class Selective:
    """A function that does not keep the values of some of its calls."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self._pack, self._unpack = saving_hooks()
        self._found: dict[StorageWeakRef, tuple[_Again, int]] | None = None  # while it runs
        self._fresh: list[_Noted] | None = None  # kept by the call that runs

    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*inputs)
        self._found, (self._pack, self._unpack) = {}, saving_hooks()
        try:
            with saved_tensors_hooks(self._save, _unpack):
                return self.function(*inputs)
        finally:
            self._found = self._fresh = None

    def noted(self, function: Function, plain: Function | None = None) -> Function:
        """`function`, whose values are not kept: `plain`, or itself, makes them again."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._found is None:
                return function(*args, **kwargs)
            self._fresh = []
            values = function(*args, **kwargs)
            given = pytree.tree_map_only(Tensor, self._later, (args, kwargs))
            again = _Again(plain or function, *given)
            for place, value in enumerate(_flat(values)):
                if isinstance(value, Tensor):
                    self._found[StorageWeakRef(value.untyped_storage())] = again, place
            fresh, self._fresh = self._fresh, None
            for noted in fresh:
                noted.saved = self._later(noted.saved)
                self._keep(noted)
            return values

        return call

    def _save(self, tensor: Tensor) -> _Noted:
        noted = _Noted(self._later(tensor))
        if isinstance(noted.saved, Tensor) and self._fresh is not None:
            self._fresh.append(noted)  # it may be a value of this very call
        else:
            self._keep(noted)
        return noted

    def _keep(self, noted: _Noted) -> None:
        if isinstance(noted.saved, Tensor):
            noted.saved = _Kept(self._pack(noted.saved), self._unpack)

    def _later(self, tensor: Tensor) -> Tensor | _View:
        """How a tensor will be had in backward: it is kept anyway, or made again."""
        assert self._found is not None
        found = self._found.get(StorageWeakRef(tensor.untyped_storage()))
        if found is None:
            return tensor.detach()
        return _View(
            *found, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )


class _Again:
    """A call that is made again when one of its values is first wanted."""

    __slots__ = ("args", "function", "kwargs", "values")

    def __init__(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.values: Any = None

    def __call__(self, place: int) -> Tensor:
        if self.values is None:
            args, kwargs = pytree.tree_map_only(
                _View, _View.unpack, (self.args, self.kwargs), is_leaf=_is_view
            )
            with torch.no_grad():
                self.values = _flat(self.function(*args, **kwargs))
            self.args, self.kwargs = (), {}
        return self.values[place]


class _View(NamedTuple):
    """A piece of a value that is made again."""

    again: _Again
    place: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    start: int

    def unpack(self) -> Tensor:
        whole = self.again(self.place)
        whole = whole if whole.dtype == self.dtype else whole.view(self.dtype)
        return whole.as_strided(self.shape, self.strides, self.start)


class _Noted:
    """What autograd keeps in a selective region."""

    __slots__ = ("saved",)

    def __init__(self, saved: Any) -> None:
        self.saved = saved

    def unpack(self) -> Tensor:
        return self.saved.unpack()


def _is_view(value: object) -> bool:
    return isinstance(value, _View)


def _flat(values: Any) -> list[Any]:
    return pytree.tree_leaves(values)


def _storages(values: Sequence[Any]) -> set[int]:
    """The memory of tensors that live on, wherever it lies: it may come and go."""
    return {v.untyped_storage()._cdata for v in values if isinstance(v, Tensor)}


States = tuple[Tensor, list[int], list[Tensor]]


def _random_states(inputs: Sequence[Any]) -> States:
    return torch.get_rng_state(), *get_device_states(*inputs)


@contextmanager
def _replayed(states: States | None) -> Iterator[None]:
    """With the random numbers that the first run drew."""
    if states is None:
        yield
        return
    cpu, devices, of_devices = states
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(cpu)
        set_device_states(devices, of_devices)
        yield
