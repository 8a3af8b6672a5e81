"""When one rank fails, all stop, soon, and say which failed first.

The first rank to fail writes its name and its error to the store of the world, then closes its
process groups, which ends the collectives that the others wait in; these read the store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from autopar._torch import world_store
from autopar.errors import ExecutionError

_KEY = "autopar/first_failure"
_PATIENCE = 5.0  # seconds to wait for the first rank's word once a collective has broken


@contextmanager
def one_fails_all_stop(rank: int) -> Iterator[None]:
    """Around everything in which ranks wait for one another."""
    try:
        yield
    except Exception as error:
        if not dist.is_initialized() or isinstance(error, _StoppedByOther):
            raise
        collective = _is_collective(error)
        first = _read_failure() if collective else _report(rank, error)
        if first is None or first.startswith(f"rank {rank}:"):
            _close_groups()
            if first is None:
                raise ExecutionError(
                    "a rank was lost in the middle of a step",
                    got=f"on rank {rank}: {error}",
                    remedy="look at the output of the ranks that ended first",
                ) from error
            raise
        _close_groups()
        raise _StoppedByOther(
            "another rank failed first, so this one stopped",
            got=first,
            remedy="mend what failed there",
        ) from error


class _StoppedByOther(ExecutionError):
    """Raised on ranks that stop because another failed."""


def _is_collective(error: Exception) -> bool:
    """Whether the error came out of a collective, whose cause may lie on another rank."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("connection", "gloo", "timed out", "nccl")
    )


def _report(rank: int, error: Exception) -> str:
    """Write this rank's failure to the store, unless another was first; the first one."""
    mine = f"rank {rank}: {type(error).__name__}: {error}"
    try:
        return world_store().compare_set(_KEY, "", mine).decode()
    except Exception:
        return mine


def _read_failure() -> str | None:
    deadline = time.monotonic() + _PATIENCE
    with suppress(Exception):
        store = world_store()
        while time.monotonic() < deadline:
            if store.check([_KEY]):
                return store.get(_KEY).decode()
            time.sleep(0.05)
    return None


def _close_groups() -> None:
    """Leave all process groups, so that nobody waits for this rank any more."""
    with suppress(Exception):
        dist.destroy_process_group()
