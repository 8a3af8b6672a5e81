"""Private calls that move tensors between ranks, and facts of process groups and their stores."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group

# torch 2.13 renamed two public collectives and warns at each call of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Returns a process group by its name.
process_group: Callable[[str], ProcessGroup] = _resolve_process_group  # type: ignore[assignment]

_SUM = AllreduceOptions()
_SUM.asyncOp = False


def all_reduce_now(x: Tensor, group: str) -> None:
    """Sum a tensor over a group in place, without the checks and logs of `dist.all_reduce`."""
    work = process_group(group).allreduce([x], _SUM)
    if work is not None:
        work.wait()


class PendingWork(Protocol):
    """Communication that is under way, and can be waited for."""

    def wait(self) -> object: ...


def wait_for(work: PendingWork) -> None:
    """Wait for other ranks: what breaks here may have its cause on one of them."""
    work.wait()


def send_to(x: Tensor, member: int, group: ProcessGroup) -> PendingWork:
    """Send a tensor to a member of a group, without the checks of `dist.isend`."""
    return group.send([x], member, 0)


def receive_from(x: Tensor, member: int, group: ProcessGroup) -> PendingWork:
    """Receive a tensor from a member of a group, without the checks of `dist.irecv`."""
    return group.recv([x], member, 0)


_WAITS = tuple(call.__code__ for call in (all_reduce_now, wait_for, send_to, receive_from))
_TORCH = Path(torch.__file__).parent
_COLLECTIVES = [
    _TORCH / "distributed" / f for f in ("distributed_c10d.py", "_functional_collectives.py")
]


def is_raised_by_collective(error: Exception) -> bool:
    """Return whether a collective raised an error: below it come frames of dispatch at most."""
    for code in reversed([frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]):
        path = Path(code.co_filename)
        if code in _WAITS or path in _COLLECTIVES:
            return True
        if _TORCH not in path.parents or _TORCH / "distributed" in path.parents:
            return False
    return False


def world_store() -> Store:
    """Return the key-value store through which the ranks of the world met."""
    return _get_default_store()


def world_timeout() -> timedelta:
    """Return how long a rank of the world waits for another, as set when the world began."""
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(world._device_types[0]).options._timeout


def another_connection(store: Store) -> Store:
    """Return a store's contents through a second connection, for another thread.

    A thread that waits blocks all others of its connection.
    """
    return store.clone()  # type: ignore[attr-defined]


def serves_store(store: Store) -> bool:
    """Return whether this process serves the store of the world, which is lost when it ends."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and "server=TCPServer" in repr(store)


def moves_through_host(group: ProcessGroup) -> bool:
    """Return whether a group moves tensors on a GPU through the host's memory, as gloo does."""
    return torch.device("cuda") not in group._device_types or is_gloo(group, "cuda")


def moves_host_tensors(group: ProcessGroup) -> bool:
    """Return whether a group moves tensors that are on the host."""
    return torch.device("cpu") in group._device_types


def is_gloo(group: ProcessGroup, device: str) -> bool:
    """Return whether a group moves tensors on a kind of device by gloo."""
    return group._get_backend(torch.device(device)).name() == "gloo"
