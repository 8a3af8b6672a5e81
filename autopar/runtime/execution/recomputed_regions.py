"""Recompute regions of a program, so that less is kept from forward to backward.

    y = FullRecompute(function)(x, w)      keeps x; backward's first read of another value runs
                                           forward once more
    region = SelectiveRecompute(function)  keeps all values but those of some calls;
    call = region.recompute(gelu)          each is made again where backward first reads it
    FullRecompute(function, offload=...)   offloads inputs (`activation_offload.py`)

Autograd sees the operators of the first forward alone. Each tensor that it saves there has a
stand-in, which the second forward fills. Tensors that a region keeps where they are go through the
hooks on saved tensors around the region.
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
OffloadedInputs = dict[StorageWeakRef, tuple[OffloadedMemory, int]]


@dataclass(frozen=True)
class RegionOffload:
    """The values of a region that are offloaded."""

    offload: ActivationOffload
    inputs: Sequence[Axes | None]  # the axes that cut each input; None: it stays
    on_host: bool

    def put(self, values: Sequence[Tensor], axes: Axes) -> OffloadedMemory:
        """Offload one value, of which each rank of this process has a copy in `values`."""
        return self.offload.put(values, axes, on_host=self.on_host)

    def put_inputs(self, arguments: Sequence[Any]) -> OffloadedInputs:
        """Offload inputs, of which `arguments` has one for each rank; return them by storage."""
        count = len(arguments) // len(self.inputs) if self.inputs else 0
        stay = _storages([v for i, v in enumerate(arguments) if self.inputs[i // count] is None])
        offloaded: OffloadedInputs = {}
        for at, axes in enumerate(self.inputs):
            values = arguments[at * count : (at + 1) * count]
            if axes is None or not stay.isdisjoint(_storages(values)):
                continue
            storages = [StorageWeakRef(value.untyped_storage()) for value in values]
            if storages[0] not in offloaded:
                memory = self.put(values, axes)
                offloaded |= {storage: (memory, place) for place, storage in enumerate(storages)}
        return offloaded


class FullRecompute:
    """A function whose forward runs again in backward."""

    def __init__(
        self,
        function: Function,
        *,
        is_random: bool = False,
        contexts: Sequence[ContextFactory] = (),
        offload: RegionOffload | None = None,
    ) -> None:
        """Wrap `function`, whose second forward runs in `contexts`; None offloads no input."""
        self.function, self.is_random, self.contexts = function, is_random, contexts
        self.offload = offload

    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*inputs)
        run = _RecomputedRun(self, inputs)
        with saved_tensors_hooks(run.pack, _unpack_saved):
            results = self.function(*inputs)
        run.settle()
        run.input_storages.clear()
        run.offloaded.clear()
        return results


class _StandIn:
    """The stand-in of a saved tensor that is not kept; the last of a run frees the run."""

    __slots__ = ("__weakref__", "run", "value")

    def __init__(self, run: _RecomputedRun) -> None:
        self.run = run
        self.value: Tensor | None = None

    def unpack(self) -> Tensor:
        if self.value is None:
            self.run.rerun()
        assert self.value is not None
        return self.value


class _SavedTensor:
    """A tensor that is kept, as the hooks around the region pack it.

    If they return the tensor itself, it must not change; torch does not check it behind hooks."""

    __slots__ = ("packed", "unpack_", "version")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed, self.unpack_ = packed, unpack
        self.settle()

    def settle(self) -> None:
        """Take the version of a tensor that changes no more, as gathered copies have come."""
        self.version = _tensor_version(self.packed)

    def unpack(self) -> Tensor:
        if self.version != _tensor_version(self.packed):
            raise changed_before_backward()
        return self.unpack_(self.packed)


def _tensor_version(value: Any) -> int:
    """Return a number that grows when a tensor, or the base of a view, changes in place."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _unpack_saved(saved: _StandIn | _SavedTensor | _SavedReference | _ValueView) -> Tensor:
    return saved.unpack()


class _AllRecomputed(Exception):
    """Raised when all tensors of a run that backward reads are recomputed."""


class _RecomputedRun:
    """One run of a function: its inputs, and stand-ins for all other tensors that it saves."""

    def __init__(self, region: FullRecompute, inputs: Sequence[Any]) -> None:
        self.region, (self._pack, self._unpack) = region, saved_tensor_hooks()
        self.input_storages = _storages(inputs)
        self.offloaded = {} if region.offload is None else region.offload.put_inputs(inputs)
        self.stand_ins: list[ReferenceType[_StandIn]] = []
        self._inputs: list[tuple[Any, bool | None]] = [
            (self._save_input(value.detach()), value.requires_grad)
            if isinstance(value, Tensor)
            else (value, None)
            for value in inputs
        ]
        self._random = _random_states(inputs) if region.is_random else None

    def _save_input(self, tensor: Tensor) -> _SavedTensor | _ValueView:
        """Save an input, or a view of one."""
        storage = StorageWeakRef(tensor.untyped_storage()) if self.offloaded else None
        offloaded = self.offloaded.get(storage) if storage is not None else None
        if offloaded is not None:
            return _ValueView.of(tensor, offloaded)
        return _SavedTensor(self._pack(tensor), self._unpack)

    def settle(self) -> None:
        for value, _ in self._inputs:
            if isinstance(value, _SavedTensor):
                value.settle()

    def pack(self, tensor: Tensor) -> _StandIn | _SavedTensor | _ValueView:
        if memory_of(tensor) in self.input_storages:
            return self._save_input(tensor)
        stand_in = _StandIn(self)
        self.stand_ins.append(ref(stand_in))
        return stand_in

    def rerun(self) -> None:
        """Run the function once more, and fill the stand-ins with the tensors that it saves."""
        inputs = [
            value if learns is None else value.unpack().detach().requires_grad_(learns)
            for value, learns in self._inputs
        ]
        self._inputs.clear()
        input_storages = _storages(inputs)
        waiting = [stand_in() for stand_in in self.stand_ins]
        self.stand_ins.clear()
        last = max(i for i, stand_in in enumerate(waiting) if stand_in is not None)
        count = 0

        def pack(tensor: Tensor) -> None:
            nonlocal count
            if memory_of(tensor) in input_storages:
                return
            if (stand_in := waiting[count]) is not None:
                stand_in.value = tensor.detach()  # without the graph of this run
            count += 1
            if count > last:
                raise _AllRecomputed

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for context in self.region.contexts:
                stack.enter_context(context())
            stack.enter_context(_replay_random_states(self._random))
            stack.enter_context(saved_tensors_hooks(pack, _never))
            with suppress(_AllRecomputed):
                self.region.function(*inputs)


def _never(_: None) -> Tensor:
    raise AssertionError("nobody goes backward through what runs again")


class SelectiveRecompute:
    """A function that recomputes the values of some of its calls, and offloads others."""

    def __init__(self, function: Function, offload: RegionOffload | None = None) -> None:
        """Wrap `function`; `offload` None offloads nothing."""
        self.function, self.offload = function, offload
        self._pack, self._unpack = saved_tensor_hooks()
        # While it runs, the source of each value that is recomputed or offloaded.
        self._sources: dict[StorageWeakRef, _Source] | None = None
        self._input_storages: set[int] = set()  # only where values are offloaded
        self._fresh: list[_SavedReference] | None = None  # saved by the call that runs

    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*inputs)
        self._sources, (self._pack, self._unpack) = {}, saved_tensor_hooks()
        try:
            if self.offload is not None:
                self._sources |= self.offload.put_inputs(inputs)
                self._input_storages, self._fresh = _storages(inputs), []
            with saved_tensors_hooks(self._save, _unpack_saved):
                results = self.function(*inputs)
                self._settle()
                return results
        finally:
            self._sources = self._fresh = None
            self._input_storages.clear()

    def recompute(self, function: Function, plain: Function | None = None) -> Function:
        """Return `function` with values that are not kept; `plain` or itself makes them again."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._sources is None:
                return function(*args, **kwargs)
            if self._fresh is None:
                self._fresh = []
            values = function(*args, **kwargs)
            args, kwargs = pytree.tree_map_only(Tensor, self._saved_input, (args, kwargs))
            recomputed = _RecomputedCall(plain or function, args, kwargs)
            for place, value in enumerate(_leaves(values)):
                if isinstance(value, Tensor):
                    self._sources[StorageWeakRef(value.untyped_storage())] = recomputed, place
            self._settle()
            return values

        return call

    def _saved_input(self, tensor: Tensor) -> _SavedTensor | _ValueView:
        """Save an input of a call that runs again."""
        reference = self._reference(tensor)
        if isinstance(reference, Tensor):
            return _SavedTensor(self._pack(reference), self._unpack)
        return reference

    def offloading(self, function: Function, axes: Axes) -> Function:
        """Return `function` with a value that is offloaded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            self.put([value], axes)
            return value

        return call

    def put(self, values: Sequence[Tensor], axes: Axes) -> None:
        """Offload a value, of which each rank of this process has a copy in `values`."""
        if self._sources is not None:
            assert self.offload is not None
            memory = self.offload.put(values, axes)
            for place, value in enumerate(values):
                self._sources[StorageWeakRef(value.untyped_storage())] = memory, place
            self._settle()

    def _settle(self) -> None:
        """Keep the tensors that calls saved, now that the sources of their values are known."""
        fresh, self._fresh = self._fresh or (), None if self.offload is None else []
        for reference in fresh:
            reference.saved = self._reference(reference.saved)
            self._keep(reference)

    def _save(self, tensor: Tensor) -> _SavedReference:
        reference = _SavedReference(self._reference(tensor))
        if isinstance(reference.saved, Tensor) and self._fresh is not None:
            self._fresh.append(reference)  # it may be a value of this very call
        else:
            self._keep(reference)
        return reference

    def _keep(self, reference: _SavedReference) -> None:
        saved, offload = reference.saved, self.offload
        if not isinstance(saved, Tensor):
            return
        if offload is not None and offload.on_host and self._is_made_for_backward(saved):
            assert self._sources is not None
            source = offload.put([saved], ()), 0
            self._sources[StorageWeakRef(saved.untyped_storage())] = source
            reference.saved = _ValueView.of(saved, source)
        else:
            reference.saved = _SavedTensor(self._pack(saved), self._unpack)

    def _is_made_for_backward(self, tensor: Tensor) -> bool:
        """Return whether an operator made a tensor for its backward: sums of rows, a mask."""
        return tensor.dim() > 0 and memory_of(tensor) not in self._input_storages

    def _reference(self, tensor: Tensor) -> Tensor | _ValueView:
        """Return a view of the source of a tensor, or the tensor itself if it is kept anyway."""
        assert self._sources is not None
        source = self._sources.get(StorageWeakRef(tensor.untyped_storage()))
        return tensor.detach() if source is None else _ValueView.of(tensor, source)


class _RecomputedCall:
    """A call that runs again when backward first reads one of its values."""

    __slots__ = ("args", "function", "kwargs", "values")

    def __init__(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.values: Any = None

    def __call__(self, place: int) -> Tensor:
        if self.values is None:
            args, kwargs = pytree.tree_map(
                lambda value: value.unpack() if _is_saved(value) else value,
                (self.args, self.kwargs),
                is_leaf=_is_saved,
            )
            with torch.no_grad():
                self.values = _leaves(self.function(*args, **kwargs))
            self.args, self.kwargs = (), {}
        return self.values[place]


# A call or memory that returns values, and the place of one among them.
_Source = tuple[_RecomputedCall | OffloadedMemory, int]


class _ValueView(NamedTuple):
    """A view of a value that is recomputed, or restored from where it was offloaded."""

    source: _RecomputedCall | OffloadedMemory
    place: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, tensor: Tensor, source: _Source) -> _ValueView:
        start = int(tensor.storage_offset())
        return cls(*source, tensor.dtype, tensor.shape, tensor.stride(), start)

    def unpack(self) -> Tensor:
        value = self.source(self.place)
        value = value if value.dtype == self.dtype else value.view(self.dtype)
        return value.as_strided(self.shape, self.strides, self.start)


class _SavedReference:
    """The object that autograd saves for a tensor in a selective region."""

    __slots__ = ("saved",)

    def __init__(self, saved: Any) -> None:
        self.saved = saved

    def unpack(self) -> Tensor:
        return self.saved.unpack()


def _is_saved(value: object) -> bool:
    return isinstance(value, _ValueView | _SavedTensor)


def _leaves(values: Any) -> list[Any]:
    return pytree.tree_leaves(values)


def _storages(values: Sequence[Any]) -> set[int]:
    """Return the keys of tensors' storages, which stay when their memory comes and goes."""
    return {memory_of(v) for v in values if isinstance(v, Tensor)}


RandomStates = tuple[Tensor, list[int], list[Tensor]]


def _random_states(inputs: Sequence[Any]) -> RandomStates:
    return torch.get_rng_state(), *get_device_states(*inputs)


@contextmanager
def _replay_random_states(states: RandomStates | None) -> Iterator[None]:
    """Return a context that draws the random numbers of the first run again."""
    if states is None:
        yield
        return
    cpu, devices, of_devices = states
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(cpu)
        set_device_states(devices, of_devices)
        yield
