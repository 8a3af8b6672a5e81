"""Recompute: regions of a program that keep less from forward to backward.

    y = Full(function)(x, w)               keeps x; the first that backward reads of the rest makes
                                           it all again, by one more forward
    region = Selective(function)           keeps all but the values of the calls that it notes;
    call = region.noted(gelu)              each is made again where backward first reads it
    Full(function, leaving=Leaving(...))   keeps inputs elsewhere (away.py), which come back when
                                           backward first reads of them; Selective values too

Autograd sees the operators of the first forward and no others: what it kept of them has a stand-in,
which the values that are made again are put into. What a region keeps where it is goes through the
hooks on saved tensors that stand around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import get_device_states, set_device_states

from autopar._torch.autograd import saved_tensor_hooks
from autopar._torch.tensors import memory_of
from autopar.runtime.execution.activation_offload import ActivationOffload, Axes, OffloadedMemory
from autopar.runtime.parameters.gathered_copies import changed_before_backward

Function = Callable[..., Any]
ContextFactory = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class RegionOffload:
    """What of a region is kept elsewhere: of each input the axes that cut it, None if it stays."""

    keeper: ActivationOffload
    inputs: Sequence[Axes | None]
    on_host: bool

    def put(self, values: Sequence[Tensor], axes: Axes) -> OffloadedMemory:
        return self.keeper.put(values, axes, self.on_host)

    def of(self, given: Sequence[Any]) -> dict[StorageWeakRef, tuple[OffloadedMemory, int]]:
        """The memory of inputs that leaves; of each value there is one on each rank."""
        count = len(given) // len(self.inputs) if self.inputs else 0
        stay = _storages([v for i, v in enumerate(given) if self.inputs[i // count] is None])
        found: dict[StorageWeakRef, tuple[OffloadedMemory, int]] = {}
        for at, axes in enumerate(self.inputs):
            values = given[at * count : (at + 1) * count]
            if axes is None or not stay.isdisjoint(_storages(values)):
                continue
            memory = [StorageWeakRef(value.untyped_storage()) for value in values]
            if memory[0] not in found:
                away = self.put(values, axes)
                found |= {one: (away, place) for place, one in enumerate(memory)}
        return found


class FullRecompute:
    """A function whose forward runs again in backward."""

    def __init__(
        self,
        function: Function,
        is_random: bool = False,
        beside: Sequence[ContextFactory] = (),
        leaving: RegionOffload | None = None,
    ) -> None:
        """`beside`: what the second forward runs in."""
        self.function, self.is_random, self.beside = function, is_random, beside
        self.leaving = leaving

    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*inputs)
        run = _RecomputedRun(self, inputs)
        with saved_tensors_hooks(run.pack, _unpack_saved):
            results = self.function(*inputs)
        run.settle()
        run.own.clear()
        run.away.clear()
        return results


class _StandIn:
    """For a tensor that is not kept. The last to go lets go of the run."""

    __slots__ = ("__weakref__", "run", "value")

    def __init__(self, run: _RecomputedRun) -> None:
        self.run = run
        self.value: Tensor | None = None

    def unpack(self) -> Tensor:
        if self.value is None:
            self.run.again()
        assert self.value is not None
        return self.value


class _SavedTensor:
    """A tensor that is kept, as the hooks around the region want it. If they take it as it is, it
    must not change; torch does not look at what goes through hooks."""

    __slots__ = ("packed", "unpack_", "version")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed, self.unpack_ = packed, unpack
        self.settle()

    def settle(self) -> None:
        """The copies that the region reads have come: they change no more."""
        self.version = _tensor_version(self.packed)

    def unpack(self) -> Tensor:
        if self.version != _tensor_version(self.packed):
            raise changed_before_backward()
        return self.unpack_(self.packed)


def _tensor_version(value: Any) -> int:
    """Grows when a tensor, or what it is a view of, changes in place."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _unpack_saved(saved: _StandIn | _SavedTensor | _SavedReference | _ValueView) -> Tensor:
    return saved.unpack()


class _AllRecomputed(Exception):
    """All that backward reads of a run has been made again."""


class _RecomputedRun:
    """One run of a function: what it was given, and stand-ins for all that it kept besides."""

    def __init__(self, region: FullRecompute, inputs: Sequence[Any]) -> None:
        self.region, (self._pack, self._unpack) = region, saved_tensor_hooks()
        self.own = _storages(inputs)
        self.away = {} if region.leaving is None else region.leaving.of(inputs)
        self.stand_ins: list[ReferenceType[_StandIn]] = []
        self._inputs: list[tuple[Any, bool | None]] = [
            (self._kept(value.detach()), value.requires_grad)
            if isinstance(value, Tensor)
            else (value, None)
            for value in inputs
        ]
        self._random = _random_states(inputs) if region.is_random else None

    def _kept(self, tensor: Tensor) -> _SavedTensor | _ValueView:
        """An input, or a view of one."""
        found = self.away.get(StorageWeakRef(tensor.untyped_storage())) if self.away else None
        return (
            _SavedTensor(self._pack(tensor), self._unpack)
            if found is None
            else _ValueView.of(tensor, found)
        )

    def settle(self) -> None:
        for value, _ in self._inputs:
            if isinstance(value, _SavedTensor):
                value.settle()

    def pack(self, tensor: Tensor) -> _StandIn | _SavedTensor | _ValueView:
        if memory_of(tensor) in self.own:
            return self._kept(tensor)
        stand_in = _StandIn(self)
        self.stand_ins.append(ref(stand_in))
        return stand_in

    def again(self) -> None:
        """Run it once more, and put what it keeps this time in the place of the stand-ins."""
        inputs = [
            value if learns is None else value.unpack().detach().requires_grad_(learns)
            for value, learns in self._inputs
        ]
        self._inputs.clear()
        own, waiting = _storages(inputs), [stand_in() for stand_in in self.stand_ins]
        self.stand_ins.clear()
        last = max(i for i, stand_in in enumerate(waiting) if stand_in is not None)
        count = 0

        def pack(tensor: Tensor) -> None:
            nonlocal count
            if memory_of(tensor) in own:
                return
            if (stand_in := waiting[count]) is not None:
                stand_in.value = tensor.detach()  # without the graph of this run
            count += 1
            if count > last:
                raise _AllRecomputed

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for beside in self.region.beside:
                stack.enter_context(beside())
            stack.enter_context(_replay_random_states(self._random))
            stack.enter_context(saved_tensors_hooks(pack, _never))
            with suppress(_AllRecomputed):
                self.region.function(*inputs)


def _never(_: None) -> Tensor:
    raise AssertionError("nobody goes backward through what runs again")


class SelectiveRecompute:
    """A function that does not keep the values of some of its calls, and others elsewhere."""

    def __init__(self, function: Function, leaving: RegionOffload | None = None) -> None:
        self.function, self.leaving = function, leaving
        self._pack, self._unpack = saved_tensor_hooks()
        # While it runs, of what is made again or kept elsewhere.
        self._found: dict[StorageWeakRef, tuple[_RecomputedCall | OffloadedMemory, int]] | None = (
            None
        )
        self._stays: set[int] = set()  # the memory of inputs that is not kept elsewhere
        self._fresh: list[_SavedReference] | None = None  # kept by the call that runs

    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*inputs)
        self._found, (self._pack, self._unpack) = {}, saved_tensor_hooks()
        try:
            if self.leaving is not None:
                self._found |= self.leaving.of(inputs)
                self._stays, self._fresh = _storages(inputs), []
            with saved_tensors_hooks(self._save, _unpack_saved):
                results = self.function(*inputs)
                self._settle()
                return results
        finally:
            self._found = self._fresh = None
            self._stays.clear()

    def noted(self, function: Function, plain: Function | None = None) -> Function:
        """`function`, whose values are not kept: `plain`, or itself, makes them again."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._found is None:
                return function(*args, **kwargs)
            if self._fresh is None:
                self._fresh = []
            values = function(*args, **kwargs)
            given = pytree.tree_map_only(Tensor, self._later, (args, kwargs))
            again = _RecomputedCall(plain or function, *given)
            for place, value in enumerate(_leaves(values)):
                if isinstance(value, Tensor):
                    self._found[StorageWeakRef(value.untyped_storage())] = again, place
            self._settle()
            return values

        return call

    def leaves(self, function: Function, axes: Axes) -> Function:
        """`function`, whose value is kept elsewhere."""

        def call(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            self.put([value], axes)
            return value

        return call

    def put(self, values: Sequence[Tensor], axes: Axes) -> None:
        """Keep a value, one on each rank, elsewhere."""
        if self._found is not None:
            assert self.leaving is not None
            away = self.leaving.put(values, axes)
            for place, value in enumerate(values):
                self._found[StorageWeakRef(value.untyped_storage())] = away, place
            self._settle()

    def _settle(self) -> None:
        """Keep what calls kept, now that it is known whether it is made again."""
        fresh, self._fresh = self._fresh or (), None if self.leaving is None else []
        for noted in fresh:
            noted.saved = self._later(noted.saved)
            self._keep(noted)

    def _save(self, tensor: Tensor) -> _SavedReference:
        noted = _SavedReference(self._later(tensor))
        if isinstance(noted.saved, Tensor) and self._fresh is not None:
            self._fresh.append(noted)  # it may be a value of this very call
        else:
            self._keep(noted)
        return noted

    def _keep(self, noted: _SavedReference) -> None:
        saved, leaving = noted.saved, self.leaving
        if not isinstance(saved, Tensor):
            return
        if leaving is not None and leaving.on_host and self._is_own(saved):
            assert self._found is not None
            found = leaving.put([saved], ()), 0
            self._found[StorageWeakRef(saved.untyped_storage())] = found
            noted.saved = _ValueView.of(saved, found)
        else:
            noted.saved = _SavedTensor(self._pack(saved), self._unpack)

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether an operator made a tensor for its own backward: sums of rows, a mask."""
        return tensor.dim() > 0 and memory_of(tensor) not in self._stays

    def _later(self, tensor: Tensor) -> Tensor | _ValueView:
        """How a tensor will be had in backward: it is kept anyway, or made again."""
        assert self._found is not None
        found = self._found.get(StorageWeakRef(tensor.untyped_storage()))
        return tensor.detach() if found is None else _ValueView.of(tensor, found)


class _RecomputedCall:
    """A call that is made again when one of its values is first wanted."""

    __slots__ = ("args", "function", "kwargs", "values", "version")

    def __init__(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.values: Any = None
        self.version = self._now()

    def _now(self) -> int:
        return sum(map(_tensor_version, pytree.tree_leaves((self.args, self.kwargs))))

    def __call__(self, place: int) -> Tensor:
        if self.values is None:
            if self.version != self._now():
                raise changed_before_backward()
            args, kwargs = pytree.tree_map_only(
                _ValueView, _ValueView.unpack, (self.args, self.kwargs), is_leaf=_is_view
            )
            with torch.no_grad():
                self.values = _leaves(self.function(*args, **kwargs))
            self.args, self.kwargs = (), {}
        return self.values[place]


class _ValueView(NamedTuple):
    """A piece of a value that is made again, or brought back."""

    again: _RecomputedCall | OffloadedMemory
    place: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, tensor: Tensor, found: tuple[_RecomputedCall | OffloadedMemory, int]) -> _ValueView:
        start = int(tensor.storage_offset())
        return cls(*found, tensor.dtype, tensor.shape, tensor.stride(), start)

    def unpack(self) -> Tensor:
        whole = self.again(self.place)
        whole = whole if whole.dtype == self.dtype else whole.view(self.dtype)
        return whole.as_strided(self.shape, self.strides, self.start)


class _SavedReference:
    """What autograd keeps in a selective region."""

    __slots__ = ("saved",)

    def __init__(self, saved: Any) -> None:
        self.saved = saved

    def unpack(self) -> Tensor:
        return self.saved.unpack()


def _is_view(value: object) -> bool:
    return isinstance(value, _ValueView)


def _leaves(values: Any) -> list[Any]:
    return pytree.tree_leaves(values)


def _storages(values: Sequence[Any]) -> set[int]:
    """The memory of tensors that live on, wherever it lies: it may come and go."""
    return {memory_of(v) for v in values if isinstance(v, Tensor)}


RandomStates = tuple[Tensor, list[int], list[Tensor]]


def _random_states(inputs: Sequence[Any]) -> RandomStates:
    return torch.get_rng_state(), *get_device_states(*inputs)


@contextmanager
def _replay_random_states(states: RandomStates | None) -> Iterator[None]:
    """With the random numbers that the first run drew."""
    if states is None:
        yield
        return
    cpu, devices, of_devices = states
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(cpu)
        set_device_states(devices, of_devices)
        yield
