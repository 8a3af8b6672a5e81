"""When one rank fails, all stop, soon, and say which failed first.

A rank that fails by itself writes its name and its error to the store of the world; one whose
collective broke writes only that it stopped. Both leave their process groups, which ends the
collectives that others wait in (over gloo, when the process ends). A rank that stopped reads who
was first. If nobody says so, a rank was lost without a word: one of those that have not even
stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from autopar._torch import abort_groups, world_store
from autopar.errors import ExecutionError

_FIRST = "autopar/first_failure"
_STOPPED = "autopar/stopped"
_PATIENCE = 5.0  # seconds to wait for the first rank's word once a collective has broken


@contextmanager
def one_fails_all_stop(rank: int) -> Iterator[None]:
    """Around everything in which ranks wait for one another."""
    try:
        yield
    except Exception as error:
        if not dist.is_initialized() or isinstance(error, _Stopped):
            raise
        if not _is_collective(error):
            mine = f"rank {rank}: {type(error).__name__}: {error}"
            first = _report(mine)
            _close_groups()
            if _what(first) == _what(mine):
                raise
            raise _stopped_by(first) from error
        raise _after_collective(rank, error) from error


class _Stopped(ExecutionError):
    """Raised on ranks that stop because another failed."""


def _stopped_by(first: str) -> _Stopped:
    return _Stopped(
        "another rank failed first, so this one stopped",
        got=first,
        remedy="mend what failed there",
    )


def _after_collective(rank: int, error: Exception) -> _Stopped:
    """Leave, and find out why the others left."""
    size, store, silent = dist.get_world_size(), world_store(), "unknown"
    with suppress(Exception):
        store.set(f"{_STOPPED}/{rank}", "")
    _close_groups()
    with suppress(Exception):  # the store may have gone with the rank that held it
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if store.check([_FIRST]):
                return _stopped_by(store.get(_FIRST).decode())
            time.sleep(0.05)
        lost = [other for other in range(size) if not store.check([f"{_STOPPED}/{other}"])]
        silent = ", ".join(map(str, lost))
    return _Stopped(
        "a rank was lost in the middle of a step",
        got=f"no word from rank {silent}; on rank {rank}: {error}",
        remedy="look at the output of these: one was killed, or ended early",
    )


def _is_collective(error: Exception) -> bool:
    """Whether the error came out of a collective, whose cause may lie on another rank."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("connection", "gloo", "timed out", "nccl")
    )


def _report(mine: str) -> str:
    """Write this rank's failure to the store, unless another was first; the first one."""
    with suppress(Exception):
        return world_store().compare_set(_FIRST, "", mine).decode()
    return mine


def _what(report: str) -> str:
    return report.partition(": ")[2]


def _close_groups() -> None:
    """Leave all process groups, so that nobody waits for this rank any more."""
    with suppress(Exception):
        abort_groups()
