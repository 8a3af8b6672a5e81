"""Writing: who writes which parts of a checkpoint, now or in a thread."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch.communication import world_timeout
from autopar.base.files import replacing
from autopar.errors import ExecutionError, InvalidInput, error_text
from autopar.runtime.checkpoints.checkpoint_files import (
    Contents,
    Key,
    Piece,
    Stored,
    in_file,
    metadata_of,
)
from autopar.runtime.checkpoints.checkpoint_folders import (
    BESIDE,
    FORMAT,
    PLAN,
    VERSION,
    Place,
    file_name,
    put,
)
from autopar.runtime.module.call_agreement import run_on_all_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.placing import Bounds
from autopar.runtime.parameters.weight_files import StoredTensor, write_safetensors

PATIENCE = 60.0  # seconds for the files of other ranks, once the program has ended here


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor."""

    key: Key
    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    bounds: Bounds

    @property
    def held(self) -> StoredTensor:
        return in_file(tuple(length for _, length in self.bounds), self.dtype)


def divided(
    everyones: Sequence[Sequence[Part]], save: str, beside: str
) -> tuple[list[list[tuple[str, Part]]], Contents]:
    """Which rank writes which parts under which keys, and the index of all: every part is written
    by that of its holders who has the least to write so far. `save` is the id of this, `beside` the
    digest of what is written beside tensors."""
    holders: dict[Part, list[int]] = {}
    for rank, parts in enumerate(everyones):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    loads = [0] * len(everyones)
    shares: list[list[tuple[str, Part]]] = [[] for _ in everyones]
    stored: dict[Key, tuple[Part, list[Piece]]] = {}
    # Files whose widest elements come first have all of them aligned.
    for part in sorted(holders, key=lambda one: -one.dtype.itemsize):
        first, pieces = stored.setdefault(part.key, (part, []))
        if (first.shape, first.dtype) != (part.shape, part.dtype):
            raise _not_whole(f"{part.key} has other shapes or dtypes on other ranks")
        if not part.held.size and (0 not in part.shape or pieces):
            continue
        rank = min(holders[part], key=lambda one: loads[one])
        loads[rank] += part.held.size
        shares[rank].append((part.key.piece(part.bounds), part))
        pieces.append(Piece(rank, part.bounds))
    found = {key: Stored(p.shape, p.dtype, tuple(own)) for key, (p, own) in stored.items()}
    values = {key.name: one for key, one in found.items() if key.state is None}
    states: dict[str, dict[str, Stored]] = {}
    for key, one in found.items():
        if key.state is not None:
            states.setdefault(key.name, {})[key.state] = one
    return shares, Contents(FORMAT, VERSION, save, beside, len(everyones), values, states)


def require_makes_whole(contents: Contents, names: Sequence[str]) -> None:
    """Refuse to save what could not be loaded: ranks do not have all of it, or not the same."""
    for key, stored in contents.every.items():
        try:
            stored.require_whole(key)
        except ValueError as error:
            raise _not_whole(str(error)) from None
    if missing := [name for name in names if name not in contents.values]:
        raise _not_whole(f"no rank has {', '.join(missing[:4])}")


def _not_whole(got: str) -> InvalidInput:
    return InvalidInput(
        "what the ranks hold makes whole tensors",
        got=got,
        remedy="make the same optimizer on all ranks, and change its states on all alike",
    )


@dataclass(frozen=True)
class Whole:
    """What rank 0 writes of a checkpoint for all ranks."""

    contents: Contents
    beside: bytes
    plan: bytes


class Job:
    """What one rank writes of a checkpoint."""

    def __init__(
        self,
        place: Place,
        rank: int,
        mine: Mapping[str, tuple[Part, Tensor]],
        whole: Whole | None,
    ) -> None:
        """`mine`: by its key in this rank's file; `whole`: of rank 0."""
        self.place, self.rank, self._mine, self._whole = place, rank, dict(mine), whole

    def copy(self) -> None:
        """From now on nothing that training changes is written."""
        for key, (part, value) in self._mine.items():
            self._mine[key] = part, value.detach().to("cpu", copy=True)

    def write(self) -> None:
        """Write this rank's file, and the digest of each piece as it passes."""
        path = self.place.new / file_name(self.rank)
        kinds = {key: part.held for key, (part, _) in self._mine.items()}
        values = (value for _, value in self._mine.values())
        with self.place.writing(), replacing(path) as file:
            write_safetensors(file, kinds, values, metadata_of(self.place.id), has_digests=True)
        self._mine.clear()

    def commit(self) -> None:
        """On rank 0, once all have written."""
        if self._whole is None:
            return
        with self.place.writing():
            put(self.place.new, BESIDE, self._whole.beside)
            put(self.place.new, PLAN, self._whole.plan)
            contents = self._whole.contents
            self.place.commit(contents.files, contents.to_bytes())

    def discard(self) -> None:
        """Rank 0 takes away what was written, since it does not become whole."""
        if self._whole is not None:
            self.place.discard()

    def tell(self, error: Exception) -> None:
        """Rank 0 is not to wait for this one."""
        text = f"rank {self.rank}: {error_text(error)}"
        put(self.place.new, f"failed-{self.rank}", text.encode(errors="backslashreplace"))

    def await_others(self) -> None:
        """On rank 0, until all ranks have written: no collective, since training goes on."""
        if self._whole is None:
            return
        folder, until = self.place.new, time.monotonic() + _patience()
        names = [file_name(number) for number in range(self._whole.contents.files)]
        while missing := [name for name in names if not (folder / name).exists()]:
            failed = [one.read_text() for one in folder.glob("failed-*")]
            has_ended = not threading.main_thread().is_alive()
            until = min(until, time.monotonic() + PATIENCE) if has_ended else until
            if failed or not folder.is_dir() or time.monotonic() > until:
                raise ExecutionError(
                    "a checkpoint is whole when all ranks have written their files",
                    got=next(iter(failed), f"{folder} without {', '.join(missing)}"),
                    remedy="look at the output of these ranks; the last checkpoint is still whole",
                )
            time.sleep(0.01)


class Saving:
    """A checkpoint on its way to the disk."""

    def __init__(self, module: ParallelModule, job: Job) -> None:
        self._backend, self._job = module.backend, job
        self._error: Exception | None = None  # of this rank's thread
        self._told: Exception | None = None  # what all ranks were told of
        self.is_over = False  # all ranks have waited
        self._thread = threading.Thread(target=self._run, name="saving")
        _threads[job.place.path] = self._thread
        self._thread.start()

    def wait(self) -> None:
        """Until it is whole, on all ranks; an error of any rank is raised on all, each time.

        All ranks wait together."""
        if self.is_over:
            if self._told is not None:
                raise self._told
            return
        self._thread.join()
        try:
            run_on_all_ranks(
                self._backend, self._raise, "wait() of what ap.save(asynchronous=True) gave"
            )
        except Exception as error:
            self._told = error
            self._job.discard()
            raise
        finally:
            self.is_over = True

    def _run(self) -> None:
        try:
            self._job.write()
            self._job.await_others()
            self._job.commit()
        except Exception as error:
            self._error = error
            with suppress(OSError):
                self._job.tell(error)

    def tell(self) -> None:
        """Say what failed, if nobody has waited."""
        if not self.is_over and self._error is not None:
            print(f"a checkpoint was not saved: {self._error}", file=sys.stderr)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


_threads: dict[Path, threading.Thread] = {}  # the last one that writes each path


def await_thread(path: Path) -> None:
    """What a thread of this process still writes there is there, or has failed."""
    if (thread := _threads.get(path)) is not None:
        thread.join()
        if _threads.get(path) is thread:
            del _threads[path]


def _patience() -> float:
    return world_timeout().total_seconds() if dist.is_initialized() else PATIENCE
