"""Together: what all ranks do and know of one call; in one process there is nobody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.module.plan_broadcast import require_same_call

T = TypeVar("T")


def rank_of(backend: Backend) -> int:
    return backend.world.rank if isinstance(backend, TorchBackend) else 0


def work_share(backend: Backend) -> tuple[int, int]:
    """Return which of how many equal shares of some work is this process's."""
    return (rank_of(backend), backend.world.size if isinstance(backend, TorchBackend) else 1)


def run_on_all_ranks(backend: Backend, work: Callable[[], T], call: str = "") -> T:
    """What `work` makes here; what it refuses on one rank, all ranks refuse. So they do if they
    have come here by other calls than `call`."""
    if not isinstance(backend, TorchBackend):
        with backend.local_checks():
            return work()
    made: list[T] = []
    with backend.guard(agreed=True):
        require_same_call(lambda: made.append(work()), call=call)
    return made[0]


def gather_values(backend: Backend, mine: T, everywhere: bool = True) -> list[T]:
    """What all ranks have, by rank: on rank 0, or on all."""
    if not isinstance(backend, TorchBackend):
        return [mine]
    found: list[Any] = [None] * backend.world.size
    with backend.guard():
        if everywhere:
            dist.all_gather_object(found, mine)
        else:
            dist.gather_object(mine, found if backend.world.rank == 0 else None)
    return found


def scatter_values(backend: Backend, shares: Sequence[T]) -> T:
    """That of this rank, of what rank 0 has for all."""
    if not isinstance(backend, TorchBackend):
        return shares[0]
    box: list[Any] = [None]
    with backend.guard():
        dist.scatter_object_list(box, list(shares) if backend.world.rank == 0 else None)
    return box[0]
