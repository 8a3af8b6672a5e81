"""Call agreement: work and values that the ranks of a backend share; a virtual mesh is alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.module.plan_broadcast import require_same_call

T = TypeVar("T")


def rank_of(backend: Backend) -> int:
    """Return the rank of this process; 0 for the virtual mesh."""
    return backend.world.rank if isinstance(backend, TorchBackend) else 0


def work_share(backend: Backend) -> tuple[int, int]:
    """Return this process's index among the equal shares of some work, and their number."""
    return (rank_of(backend), backend.world.size if isinstance(backend, TorchBackend) else 1)


def run_on_all_ranks(backend: Backend, work: Callable[[], T], call: str = "") -> T:
    """Return the result of `work` on this rank. All ranks refuse an error of one rank, and a rank
    that comes here by another `call`."""
    if not isinstance(backend, TorchBackend):
        with backend.local_checks():
            return work()
    results: list[T] = []
    with backend.guard(agreed=True):
        require_same_call(lambda: results.append(work()), call=call)
    return results[0]


def gather_values(backend: Backend, value: T, *, everywhere: bool = True) -> list[T]:
    """Return the values of all ranks, by rank, on all ranks or else on rank 0 alone."""
    if not isinstance(backend, TorchBackend):
        return [value]
    values: list[Any] = [None] * backend.world.size
    with backend.guard():
        if everywhere:
            dist.all_gather_object(values, value)
        else:
            dist.gather_object(value, values if backend.world.rank == 0 else None)
    return values


def scatter_values(backend: Backend, shares: Sequence[T]) -> T:
    """Return this rank's share of the `shares` that rank 0 has for all ranks."""
    if not isinstance(backend, TorchBackend):
        return shares[0]
    box: list[Any] = [None]
    with backend.guard():
        dist.scatter_object_list(box, list(shares) if backend.world.rank == 0 else None)
    return box[0]
