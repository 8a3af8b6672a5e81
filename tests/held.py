"""What the runtime holds of each part that a plan predicts."""

from __future__ import annotations

import gc
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

import autopar as ap
from autopar.pipeline.running.executor import RankRunner
from autopar.pipeline.running.worker import Worker
from autopar.runtime.execution import recomputed_regions
from tests.models import Case
from tests.pipeline.live_counts import live_microbatches


def kept_for_backward(module: ap.ParallelModule, case: Case) -> int:
    """Bytes that autograd keeps from forward to backward in this process, each storage once."""
    parameters = [*case.model.parameters(), *module.parameters()]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    own = {tensor.untyped_storage().data_ptr() for tensor in local}
    own |= {b.untyped_storage().data_ptr() for b in (*case.model.buffers(), *module.buffers())}
    inputs = [*case.args, *case.kwargs.values()]
    own |= {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, Tensor)}
    kept: dict[int, int] = {}
    copies = {copy.untyped_storage()._cdata for copy in copies_of(module)}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_parameter = (tensor.is_leaf and tensor.requires_grad) or storage._cdata in copies
        if not is_parameter and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(*case.args, **case.kwargs)
        del outputs
    return sum(kept.values())


def copies_of(module: ap.ParallelModule) -> list[Tensor]:
    """The tensors that parameters are gathered to, on processes; few have memory at a time."""
    leaves = getattr(module.backend, "leaves", None)
    groups = [] if leaves is None else leaves.window.groups
    return [copy for group in groups if group is not None for copy in group.targets]


def storages() -> dict[int, int]:
    """Bytes of all memory that tensors of this process hold, by address."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    held = [t.untyped_storage() for t in tensors if t.device.type != "meta"]
    return {storage.data_ptr(): storage.nbytes() for storage in held if storage.data_ptr()}


def held_by(tensors: Iterable[Tensor]) -> int:
    """Bytes of all memory that these tensors of this rank keep alive."""
    pieces = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    held = [piece.untyped_storage() for piece in pieces]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def pieces_of(module: ap.ParallelModule, rank: int) -> dict[str, int]:
    """Bytes of each parameter, buffer and cut constant of a rank, as the layouts say."""
    program, found = module.program, {}
    captured = program.captured
    names = {**captured.parameters, **captured.buffers}
    cut = {n: n for n in captured.constants if not program.type_of(n).layout.is_replicated}
    here = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    for placeholder, name in (names | cut).items():
        type_ = program.type_of(placeholder)
        shape = program.kept_layout(placeholder).local_shape(type_.shape, program.mesh, rank)
        if name in here or name in cut:
            found[name] = math.prod(shape) * type_.dtype.itemsize
    return found


def local_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of this rank's pieces."""
    pieces = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum(piece.numel() * piece.itemsize for piece in pieces)


class _Box:
    """Holds one tensor for autograd, and is gone when autograd lets go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class HeldByWorkers:
    """What the workers of a pipeline hold of each micro-batch.

    Counts what autograd has not let go of, what was received, and the gradients that wait for
    those of weights. What `outside` gives, asked when a step has begun, does not count.
    """

    def __init__(self, outside: Callable[[], Iterable[Tensor]]) -> None:
        self._find_outside = outside
        self._runs: weakref.WeakKeyDictionary[Any, Hashable] = weakref.WeakKeyDictionary()
        self._again: defaultdict[Hashable, weakref.WeakSet[Any]] = defaultdict(weakref.WeakSet)
        self._here: Hashable = None
        self._boxes: defaultdict[Hashable, weakref.WeakSet[_Box]] = defaultdict(weakref.WeakSet)

    @cached_property
    def _outside(self) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in self._find_outside()}

    @contextmanager
    def watching(self, look: Callable[[Worker], None]) -> Iterator[None]:
        """Steps in here `look` at a worker each time that it holds more."""
        forward, run, do = Worker.forward, Worker._run, RankRunner._do
        start, again = (
            recomputed_regions._RecomputedRun.__init__,
            recomputed_regions._RecomputedRun.rerun,
        )

        def watched_forward(worker: Worker, *args: object) -> object:
            sent = forward(worker, *args)
            look(worker)
            return sent

        def watched_run(worker: Worker, microbatch: int, kept: object) -> object:
            with self.packing(worker, microbatch):
                results = run(worker, microbatch, kept)
            return results

        def watched_start(run: Any, *args: object) -> None:
            start(run, *args)
            self._runs[run] = self._here

        def watched_again(run: Any) -> None:
            alive = [stand_in() for stand_in in run.stand_ins]
            again(run)
            self._again[self._runs[run]].update(one for one in alive if one is not None)

        def watched_do(runner: RankRunner, action: object, *args: object) -> object:
            sent = do(runner, action, *args)
            if action.kind == "I":
                look(runner.workers[action.pipe, action.stage])
            return sent

        with (
            patch.object(Worker, "forward", watched_forward),
            patch.object(Worker, "_run", watched_run),
            patch.object(recomputed_regions._RecomputedRun, "__init__", watched_start),
            patch.object(recomputed_regions._RecomputedRun, "rerun", watched_again),
            patch.object(RankRunner, "_do", watched_do),
        ):
            yield

    def packing(self, worker: Worker, microbatch: int) -> AbstractContextManager[None]:
        """Around a forward."""

        def pack(tensor: Tensor) -> _Box:
            box = _Box(tensor)
            self._boxes[worker, microbatch].add(box)
            return box

        self._here = worker, microbatch
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor)

    def of(self, worker: Worker, microbatch: int) -> tuple[int, int]:
        """Bytes: every storage once; and with gradients apart, that may share a tensor's."""
        tensors = [box.tensor for box in self._boxes[worker, microbatch]]
        again = [stand_in.value for stand_in in self._again[worker, microbatch]]
        tensors += [value for value in again if value is not None]
        gradients: list[Tensor] = []
        kept = worker.kept.get(microbatch)
        if kept is not None:
            tensors += [tensor for value in kept.received for tensor in value]
            gradients += [g for half in kept.halves for g in half.gradients if g is not None]

        def storages(tensors: Iterable[Tensor]) -> int:
            found = [tensor.untyped_storage() for tensor in tensors]
            sizes = {storage.data_ptr(): storage.nbytes() for storage in found}
            return sum(size for pointer, size in sizes.items() if pointer not in self._outside)

        return storages([*tensors, *gradients]), storages(tensors) + storages(gradients)


def predicted_course(module: ap.ParallelModule, rank: int) -> list[dict[int, int]]:
    """Bytes that the plan says a rank of the pipeline keeps by stage, each time they are more."""
    pipelining = module.plan.pipelining
    return [
        {
            stage: whole * cost.activations + received * cost.receives + later * cost.weight_halves
            for stage, (whole, received, later, *_) in moment.items()
            for cost in [pipelining.stages[stage]]
        }
        for moment in live_microbatches(pipelining.schedule, rank)
    ]


def held_in_a_step(module: ap.ParallelModule, case: Case) -> list[int]:
    """Bytes of storage that this process's stages keep in a step, each time they are more."""
    backend = module.backend

    def outside() -> Iterator[Tensor]:
        for tensor in (*module.parameters(), *module.buffers()):
            yield tensor.to_local() if isinstance(tensor, DTensor) else tensor
        yield from backend.constants.values()
        for stage in backend.stages.values():
            for batch in stage.batches.values():
                yield from batch.values()

    held, seen = HeldByWorkers(outside), []

    def look(_: Worker) -> None:
        slices = range(backend.schedule.all_parts)
        both = [held.of(w, number) for w in backend.workers.values() for number in slices]
        seen.append(sum(really for really, _ in both))

    with held.watching(look):
        module.step(*case.args, **case.kwargs)
    return seen


class Allocated:
    """Follows torch's allocator in a `with`: the bytes that live at each `mark`, beyond those that
    lived before; of this thread alone, so that on processes it does not see all."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def mark(self, name: str) -> None:
        with record_function(f"mark {name}"):
            pass

    def __enter__(self) -> Allocated:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        events, now = self._profile.profiler.kineto_results.events(), 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                now += event.nbytes()
            elif event.name().startswith("mark "):
                self.at[event.name().removeprefix("mark ")] = now


def alive() -> dict[int, int]:
    """Bytes of all memory that tensors of this process hold, garbage included."""
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    held = [t.untyped_storage() for t in tensors if t.device.type != "meta"]
    return {storage._cdata: storage.nbytes() for storage in held if storage.nbytes()}
