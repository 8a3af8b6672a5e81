"""Memory in use: the bytes of what a rank holds, by kind, beside those of the plan.

    with parallel.watching_memory():
        parallel.step(x)
    print(parallel.memory(optimizer))

    rank 0        held     planned
    parameters    7 MB     7 MB
    ...
    peak          21.3 MB  21.3 MB
    planned of each kind is its own most; plan.memory.at_peak adds up to the peak

Each storage of a tensor counts once. Peaks come from torch's allocator: on a GPU always, on a CPU
for code inside `watching_memory`. Numbers that are not known are None, and not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch.allocator_profile import AllocatorProfile
from autopar._torch.tensors import local_of, memory_of
from autopar.cost.footprint import HOST_PREFIX, Memory
from autopar.errors import InvalidInput, require_one_of
from autopar.plans.plan import Plan
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.backends.stage_ranks import StageRanks, TensorReaders
from autopar.text.tables import table
from autopar.text.units import bytes_text

KINDS = ("parameters", "gradients", "optimizer", "buffers", "gathered", "activations", "inputs")
_PLANNED_NOTE = "planned of each kind is its own most; plan.memory.at_peak adds up to the peak"
_UNCOUNTED_STATES_NOTE = (
    "the planned peak is without the optimizer's states: .memory(optimizer) counts them"
)


@dataclass(frozen=True)
class KindBytes:
    """The bytes of one kind of tensors on one rank."""

    held: int | None  # now, or at the peak; None: not known
    planned: float | None  # None: plans do not have this kind


@dataclass(frozen=True)
class RankMemoryUse:
    """The bytes of one rank by kind: `KINDS`, kinds on the host of a GPU, "peak", "reserved"."""

    rank: int
    kinds: Mapping[str, KindBytes]

    def __getitem__(self, kind: str) -> KindBytes:
        require_one_of("a kind of memory", kind, list(self.kinds))
        return self.kinds[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def notes(self) -> list[str]:
        """Return notes on how to read the table."""
        optimizer = self["optimizer"]
        if optimizer.held is not None or not optimizer.planned or "reserved" in self.kinds:
            return [_PLANNED_NOTE]
        return [_PLANNED_NOTE, _UNCOUNTED_STATES_NOTE]

    def to_json(self) -> dict[str, dict[str, float | None]]:
        return {
            kind: {"held": size.held, "planned": size.planned} for kind, size in self.kinds.items()
        }

    @property
    def figures(self) -> str:
        """Return the table, without notes."""

        def text(size: float | None) -> str:
            return "not known" if size is None else bytes_text(size)

        rows = [(kind, text(pair.held), text(pair.planned)) for kind, pair in self.kinds.items()]
        return "\n".join(table([(f"rank {self.rank}", "held", "planned"), *rows]))

    def __str__(self) -> str:
        return "\n".join([self.figures, *self.notes])


@dataclass(frozen=True)
class MemoryUse:
    """The memory of the ranks that run in this process, by rank."""

    ranks: Mapping[int, RankMemoryUse]

    def __getitem__(self, rank: int) -> RankMemoryUse:
        if rank not in self.ranks:
            raise InvalidInput(
                "the memory of this process is that of its own ranks",
                got=f"rank {rank!r}",
                remedy=f"one of {', '.join(map(str, self.ranks))}",
            )
        return self.ranks[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def to_json(self) -> dict[int, dict[str, dict[str, float | None]]]:
        return {rank: memory.to_json() for rank, memory in self.ranks.items()}

    def __str__(self) -> str:
        tables = [memory.figures for memory in self.ranks.values()]
        notes = dict.fromkeys(note for memory in self.ranks.values() for note in memory.notes)
        return "\n".join([*tables, *notes])


HeldBytes = dict[str, int | None]
TensorsByKind = Mapping[str, Iterable[Tensor]]


class MemoryWatch:
    """Measures the peak of torch's allocator inside a `with`, beyond the bytes from before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile = None if device.type == "cuda" else AllocatorProfile()
        self.most: int | None = None

    def __enter__(self) -> MemoryWatch:
        if self._profile is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(*error)
        self.most = self._profile.peak


def require_own_optimizer(optimizer: object, parameters: Iterable[Tensor]) -> None:
    """Refuse an object that is no optimizer of some of these parameters."""
    ours = set(map(id, parameters))
    remedy = "the optimizer that was made of this module's parameters()"
    if not isinstance(optimizer, torch.optim.Optimizer):
        rule = "memory() counts the states of a torch.optim.Optimizer"
        got = f"{optimizer!r}, of type {type(optimizer).__name__}"
        raise InvalidInput(rule, got=got, remedy=remedy)
    if ours and not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
        raise InvalidInput(
            "memory() counts the states of the module's own optimizer",
            got=f"{type(optimizer).__name__}, which has none of the module's parameters",
            remedy=remedy,
        )


def local_bytes(tensors: TensorsByKind, device: torch.device) -> HeldBytes:
    """Return the bytes of the storages of this process's pieces, those on a GPU's host apart."""
    sizes: HeldBytes = {}
    seen: set[int] = set()
    for kind, values in tensors.items():
        sizes[kind] = 0
        for tensor in map(local_of, values):
            if memory_of(tensor) in seen:
                continue
            seen.add(memory_of(tensor))
            place = kind if tensor.device.type == device.type else f"{HOST_PREFIX}{kind}"
            sizes[place] = (sizes.get(place) or 0) + tensor.untyped_storage().nbytes()
    return sizes


def virtual_bytes(
    program: RuntimeProgram, rank: int, named: Mapping[str, Mapping[str, list[Tensor]]]
) -> HeldBytes:
    """Return the bytes that one rank of the virtual mesh would hold, by the layouts.

    `named` has for each kind the tensors by the name of their parameter or buffer.
    """
    ranks, readers = StageRanks(program, rank), TensorReaders(program)
    placeholders = {
        n: p for p, n in (program.captured.parameters | program.captured.buffers).items()
    }

    def size(name: str, value: Tensor) -> int:
        shape = program.type_of(placeholders[name]).shape if name in placeholders else ()
        if tuple(value.shape) != tuple(shape):
            return value.nbytes  # a scalar of an optimizer
        layout = program.kept_layout(placeholders[name])
        local_shape = layout.local_shape(shape, program.mesh, ranks.rank_in_stage)
        return math.prod(local_shape) * value.itemsize

    # The virtual mesh gathers no copies.
    gathered: HeldBytes = {"gathered": 0}
    return gathered | {
        kind: sum(
            size(name, value)
            for name, values in by_name.items()
            if ranks.place in ranks.places_of(readers.stages(name))
            for value in values
        )
        for kind, by_name in named.items()
    }


def compare_with_plan(
    rank: int, held: HeldBytes, memory: Memory, device: torch.device | None, peak: int | None
) -> RankMemoryUse:
    """Return the held bytes of a rank next to the planned ones.

    A `device` of None, or a CPU, is its own host: then kinds on the host count with the device.
    """
    planned, on_gpu = memory.to_json(), device is not None and device.type == "cuda"
    kinds = {}
    for kind in KINDS:
        host_bytes = planned.get(f"{HOST_PREFIX}{kind}", 0.0)
        device_bytes = planned[kind]
        if not on_gpu:  # a CPU's gradients are on the host already, so they do not count twice
            is_shared = kind == "gradients"
            device_bytes = max(device_bytes, host_bytes) if is_shared else device_bytes + host_bytes
        kinds[kind] = KindBytes(held.get(kind), device_bytes)
        if on_gpu and (host_bytes or held.get(f"{HOST_PREFIX}{kind}")):
            kinds[f"{HOST_PREFIX}{kind}"] = KindBytes(
                held.get(f"{HOST_PREFIX}{kind}", 0), host_bytes
            )
    if on_gpu:
        stats = torch.cuda.memory_stats(device)
        kinds["peak"] = KindBytes(stats["allocated_bytes.all.peak"], memory.peak)
        kinds["reserved"] = KindBytes(stats["reserved_bytes.all.current"], None)
        return RankMemoryUse(rank, kinds)
    # The caller's batch was there before; so were an optimizer's states, if they are not shown.
    # Gradients reach the host after the peak.
    unseen = memory.inputs + memory.host_gradients
    if held.get("optimizer") is None:
        unseen += memory.optimizer + memory.host_optimizer
    if peak is not None:
        peak += held.get("optimizer") or 0
    kinds["peak"] = KindBytes(peak, memory.peak + memory.host - unseen)
    return RankMemoryUse(rank, kinds)


def resident_tensors(
    module: nn.Module, backend: Backend, optimizer: torch.optim.Optimizer | None
) -> dict[str, dict[str, list[Tensor]]]:
    """Return the tensors that stay after a step, by kind and by the name of their parameter or
    buffer."""
    parameters, stale = dict(module.named_parameters()), backend.stale_weights.tensors
    tensors: dict[str, dict[str, list[Tensor]]] = {
        "parameters": {name: [value, *stale.get(name, ())] for name, value in parameters.items()},
        "gradients": {n: [value.grad] for n, value in parameters.items() if value.grad is not None},
        "buffers": {name: [value] for name, value in module.named_buffers()},
    }
    if optimizer is not None:
        require_own_optimizer(optimizer, parameters.values())
        tensors["optimizer"] = {
            name: [v for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
            for name, p in parameters.items()
        }
    return tensors


def local_tensors(
    module: nn.Module, backend: Backend, optimizer: torch.optim.Optimizer | None
) -> dict[str, list[Tensor]]:
    """Return the tensors of this process, by kind."""
    named = resident_tensors(module, backend, optimizer)
    tensors = {
        kind: [v for values in by_name.values() for v in values] for kind, by_name in named.items()
    }
    if isinstance(backend, TorchBackend):
        tensors["gathered"] = backend.leaves.window.copies
    return tensors


def memory_use(
    module: nn.Module,
    plan: Plan,
    backend: Backend,
    optimizer: torch.optim.Optimizer | None,
    peak: int | None,
) -> MemoryUse:
    """Return the memory of the ranks of this process now, next to the plan.

    `peak`: the peak bytes of this process without an optimizer's; None if they are not known.
    """
    device = backend.device if isinstance(backend, TorchBackend) else None

    def compare(rank: int, held: HeldBytes) -> RankMemoryUse:
        return compare_with_plan(rank, held, plan.memories[plan.place_of(rank)], device, peak)

    if isinstance(backend, TorchBackend):
        local_rank = backend.world.rank
        held = local_bytes(local_tensors(module, backend, optimizer), backend.device)
        return MemoryUse({local_rank: compare(local_rank, held)})
    named, ranks = resident_tensors(module, backend, optimizer), range(plan.whole_mesh.size)
    program = backend.program
    return MemoryUse({rank: compare(rank, virtual_bytes(program, rank, named)) for rank in ranks})
