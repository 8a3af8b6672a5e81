"""Memory in use: the bytes of what a rank holds, by kind, beside those of the plan.

    with parallel.watching_memory():
        parallel.step(x)
    print(parallel.memory(optimizer))

    rank 0        held     planned
    parameters    7 MB     7 MB
    ...
    peak          21.3 MB  21.3 MB
    planned of each kind is its own most; plan.memory.at_peak adds up to the peak

Tensors count by their storages, each once. A peak is what torch's allocator says: on a GPU always,
on a CPU of what ran inside `watching_memory`. What nobody knows is None, and not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import local_of, memory_of
from autopar._torch_memory import AllocatorProfile
from autopar.cost.footprint import HOST, Memory
from autopar.errors import InvalidInput, require_one_of
from autopar.plan.plan import Plan
from autopar.plan.runtime_program import Program
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.backends.stage_ranks import StageRanks, Users
from autopar.tables import table
from autopar.units import bytes_text

KINDS = ("parameters", "gradients", "optimizer", "buffers", "gathered", "activations", "inputs")
_PLANNED = "planned of each kind is its own most; plan.memory.at_peak adds up to the peak"
_WITHOUT_STATES = (
    "the planned peak is without the optimizer's states: .memory(optimizer) counts them"
)


@dataclass(frozen=True)
class Bytes:
    """Of one kind on one rank."""

    held: int | None  # now (of a peak: at most); None: not known
    planned: float | None  # None: plans do not tell


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds: `KINDS`, those on the host of a GPU, "peak", "reserved"."""

    rank: int
    kinds: Mapping[str, Bytes]

    def __getitem__(self, kind: str) -> Bytes:
        require_one_of("a kind of memory", kind, list(self.kinds))
        return self.kinds[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def notes(self) -> list[str]:
        """How it is to be read."""
        kept = self["optimizer"]
        if kept.held is not None or not kept.planned or "reserved" in self.kinds:
            return [_PLANNED]
        return [_PLANNED, _WITHOUT_STATES]

    def to_json(self) -> dict[str, dict[str, float | None]]:
        return {k: {"held": one.held, "planned": one.planned} for k, one in self.kinds.items()}

    @property
    def figures(self) -> str:
        """The table, without what is noted."""

        def text(size: float | None) -> str:
            return "not known" if size is None else bytes_text(size)

        rows = [(kind, text(one.held), text(one.planned)) for kind, one in self.kinds.items()]
        return "\n".join(table([(f"rank {self.rank}", "held", "planned"), *rows]))

    def __str__(self) -> str:
        return "\n".join([self.figures, *self.notes])


@dataclass(frozen=True)
class MemoryUse:
    """Of the ranks that run in this process, by rank."""

    ranks: Mapping[int, RankMemory]

    def __getitem__(self, rank: int) -> RankMemory:
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
        return {rank: one.to_json() for rank, one in self.ranks.items()}

    def __str__(self) -> str:
        tables = [one.figures for one in self.ranks.values()]
        notes = dict.fromkeys(note for one in self.ranks.values() for note in one.notes)
        return "\n".join([*tables, *notes])


Held = dict[str, int | None]
Tensors = Mapping[str, Iterable[Tensor]]  # by kind


class MemoryWatch:
    """The most that torch's allocator gives in a `with`, beyond what was there before."""

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


def require_known(optimizer: object, parameters: Iterable[Tensor]) -> None:
    """Refuse what is no optimizer of some of these parameters."""
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


def here(tensors: Tensors, device: torch.device) -> Held:
    """The bytes of the storages of this process's pieces; what lies on the host of a GPU apart."""
    found: Held = {}
    seen: set[int] = set()
    for kind, those in tensors.items():
        found[kind] = 0
        for tensor in map(local_of, those):
            if memory_of(tensor) in seen:
                continue
            seen.add(memory_of(tensor))
            where = kind if tensor.device.type == device.type else f"{HOST}{kind}"
            found[where] = (found.get(where) or 0) + tensor.untyped_storage().nbytes()
    return found


def of_rank(program: Program, rank: int, named: Mapping[str, Mapping[str, list[Tensor]]]) -> Held:
    """What one rank of the virtual mesh would hold, by the layouts: of each kind, tensors by the
    name of the parameter or buffer that they belong to."""
    ranks, users = StageRanks(program, rank), Users(program)
    placeholders = {
        n: p for p, n in (program.captured.parameters | program.captured.buffers).items()
    }

    def size(name: str, value: Tensor) -> int:
        whole = program.type_of(placeholders[name]).shape if name in placeholders else ()
        if tuple(value.shape) != tuple(whole):
            return value.nbytes  # a number beside it
        layout = program.kept_layout(placeholders[name])
        shape = layout.local_shape(whole, program.mesh, ranks.inner)
        return math.prod(shape) * value.itemsize

    # Nothing is gathered there.
    found: Held = {"gathered": 0}
    return found | {
        kind: sum(
            size(name, value)
            for name, values in those.items()
            if ranks.place in ranks.of(users.stages(name))
            for value in values
        )
        for kind, those in named.items()
    }


def beside_plan(
    rank: int, held: Held, memory: Memory, device: torch.device | None, peak: int | None
) -> RankMemory:
    """What a rank holds, and the plan for it; on no device of its own, or a CPU, which is its own
    host, all counts that the rank has."""
    planned, on_gpu = memory.to_json(), device is not None and device.type == "cuda"
    kinds = {}
    for kind in KINDS:
        there = planned.get(f"{HOST}{kind}", 0.0)
        here = planned[kind]
        if not on_gpu:  # gradients go to the host, which nothing does that is there already
            here = max(here, there) if kind == "gradients" else here + there
        kinds[kind] = Bytes(held.get(kind), here)
        if on_gpu and (there or held.get(f"{HOST}{kind}")):
            kinds[f"{HOST}{kind}"] = Bytes(held.get(f"{HOST}{kind}", 0), there)
    if on_gpu:
        stats = torch.cuda.memory_stats(device)
        kinds["peak"] = Bytes(stats["allocated_bytes.all.peak"], memory.peak)
        kinds["reserved"] = Bytes(stats["reserved_bytes.all.current"], None)
        return RankMemory(rank, kinds)
    # The caller's batch was there before; so was what an optimizer keeps, if nobody shows it. What
    # the host takes of gradients comes when the most is over.
    unseen = memory.inputs + memory.host_gradients
    if held.get("optimizer") is None:
        unseen += memory.optimizer + memory.host_optimizer
    if peak is not None:
        peak += held.get("optimizer") or 0
    kinds["peak"] = Bytes(peak, memory.peak + memory.host - unseen)
    return RankMemory(rank, kinds)


def kept_by(
    module: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, dict[str, list[Tensor]]]:
    """What stays after a step, by kind and the name of what it belongs to."""
    parameters = dict(module.named_parameters())
    found: dict[str, dict[str, list[Tensor]]] = {
        "parameters": {name: [value] for name, value in parameters.items()},
        "gradients": {n: [value.grad] for n, value in parameters.items() if value.grad is not None},
        "buffers": {name: [value] for name, value in module.named_buffers()},
    }
    if optimizer is not None:
        require_known(optimizer, parameters.values())
        found["optimizer"] = {
            name: [v for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
            for name, p in parameters.items()
        }
    return found


def held_by(
    module: nn.Module, backend: Backend, optimizer: torch.optim.Optimizer | None
) -> dict[str, list[Tensor]]:
    """The tensors of this process, by kind."""
    named = kept_by(module, optimizer)
    found = {kind: [v for own in those.values() for v in own] for kind, those in named.items()}
    if isinstance(backend, TorchBackend):
        found["gathered"] = backend.leaves.window.copies
    return found


def use_of(
    module: nn.Module,
    plan: Plan,
    backend: Backend,
    optimizer: torch.optim.Optimizer | None,
    peak: int | None,
) -> MemoryUse:
    """What the ranks of this process hold now, beside the plan; `peak` is that of this one."""
    device = backend.device if isinstance(backend, TorchBackend) else None

    def beside(rank: int, held: Held) -> RankMemory:
        return beside_plan(rank, held, plan.memories[plan.place_of(rank)], device, peak)

    if isinstance(backend, TorchBackend):
        own = backend.world.rank
        held = here(held_by(module, backend, optimizer), backend.device)
        return MemoryUse({own: beside(own, held)})
    named, ranks = kept_by(module, optimizer), range(plan.whole_mesh.size)
    program = backend.program
    return MemoryUse({rank: beside(rank, of_rank(program, rank, named)) for rank in ranks})
