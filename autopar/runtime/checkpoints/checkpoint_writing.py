"""Divide the parts of a checkpoint among ranks, and write them at once or in a thread."""

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
    SavedOptimizer,
    Stored,
    in_file,
    metadata_of,
)
from autopar.runtime.checkpoints.checkpoint_folders import (
    BESIDE,
    FORMAT,
    PLAN,
    VERSION,
    SaveFolders,
    file_name,
    write_in_folder,
)
from autopar.runtime.module.call_agreement import run_on_all_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.placing import Bounds
from autopar.runtime.parameters.weight_files import StoredTensor, write_safetensors

PATIENCE = 60.0  # seconds for the files of other ranks, once the program has ended here


@dataclass(frozen=True)
class Part:
    """A part of a tensor that a rank holds."""

    key: Key
    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype
    bounds: Bounds

    @property
    def held(self) -> StoredTensor:
        return in_file(tuple(length for _, length in self.bounds), self.dtype)


def divide_parts(
    parts_by_rank: Sequence[Sequence[Part]],
) -> tuple[list[list[tuple[str, Part]]], Contents]:
    """Return the parts that each rank writes, with their keys, and the index of the checkpoint.

    Of the ranks that hold a part, the one with the fewest bytes so far writes it. The index has no
    id of the save and no digests yet.
    """
    holders: dict[Part, list[int]] = {}
    for rank, parts in enumerate(parts_by_rank):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    loads = [0] * len(parts_by_rank)
    shares: list[list[tuple[str, Part]]] = [[] for _ in parts_by_rank]
    stored: dict[Key, tuple[Part, list[Piece]]] = {}
    # The widest elements come first, so that all are aligned in a file.
    for part in sorted(holders, key=lambda part: -part.dtype.itemsize):
        first, pieces = stored.setdefault(part.key, (part, []))
        if (first.shape, first.dtype) != (part.shape, part.dtype):
            raise _incomplete(f"{part.key} has other shapes or dtypes on other ranks")
        if not part.held.size and (0 not in part.shape or pieces):
            continue
        rank = min(holders[part], key=loads.__getitem__)
        loads[rank] += part.held.size
        shares[rank].append((part.key.piece(part.bounds), part))
        pieces.append(Piece(rank, part.bounds))
    values: dict[str, Stored] = {}
    states: dict[str, dict[str, Stored]] = {}
    for key, (part, pieces) in stored.items():
        tensor = Stored(part.shape, part.dtype, tuple(pieces))
        if key.state is None:
            values[key.name] = tensor
        else:
            states.setdefault(key.name, {})[key.state] = tensor
    return shares, Contents(FORMAT, VERSION, "", "", len(parts_by_rank), values, states)


def require_complete(contents: Contents, names: Sequence[str]) -> None:
    """Refuse to save incomplete tensors, or without one of the tensors in `names`."""
    for key, stored in contents.tensors.items():
        try:
            stored.require_complete(key)
        except ValueError as error:
            raise _incomplete(str(error)) from None
    if missing := [name for name in names if name not in contents.values]:
        raise _incomplete(f"no rank has {', '.join(missing[:4])}")


def _incomplete(got: str) -> InvalidInput:
    return InvalidInput(
        "what the ranks hold makes whole tensors",
        got=got,
        remedy="make the same optimizer on all ranks, and change its states on all alike",
    )


@dataclass(frozen=True)
class SharedFiles:
    """The files of a checkpoint that rank 0 writes for all ranks, and what is in them."""

    contents: Contents
    beside: bytes
    plan: bytes
    optimizer: SavedOptimizer | None
    tied: Mapping[str, str]  # the names of tied tensors, and the name under which each is stored


class Job:
    """The part of a save that one rank writes."""

    def __init__(
        self,
        folders: SaveFolders,
        rank: int,
        parts: Mapping[str, tuple[Part, Tensor]],
        shared: SharedFiles | None,
    ) -> None:
        """`parts`: those of this rank's file, by their keys; `shared`: None except on rank 0."""
        self.folders, self.rank, self._parts, self._shared = folders, rank, dict(parts), shared

    def copy(self) -> None:
        """Copy the values to the host, so that training may change the tensors.

        A GPU copies them into pinned memory, one after another without a wait in between.
        """
        is_on_gpu = False
        for key, (part, value) in self._parts.items():
            host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            self._parts[key] = part, host.copy_(value.detach(), non_blocking=True)
            is_on_gpu |= value.is_cuda
        if is_on_gpu:
            torch.cuda.synchronize()

    def write(self) -> None:
        """Write this rank's file with the digest of each piece."""
        path = self.folders.new / file_name(self.rank)
        kinds = {key: part.held for key, (part, _) in self._parts.items()}
        values = (value for _, value in self._parts.values())
        with self.folders.writing(), replacing(path) as file:
            write_safetensors(file, kinds, values, metadata_of(self.folders.id), has_digests=True)
        self._parts.clear()

    def commit(self) -> None:
        """Complete the checkpoint on rank 0 after all ranks have written."""
        if self._shared is None:
            return
        with self.folders.writing():
            write_in_folder(self.folders.new, BESIDE, self._shared.beside)
            write_in_folder(self.folders.new, PLAN, self._shared.plan)
            contents = self._shared.contents
            self.folders.commit(self.complete(contents), contents.to_bytes())

    def written_names(self, contents: Contents) -> list[str]:
        """Return the names of the files that appear when the ranks have written."""
        return [file_name(rank) for rank in range(contents.files)]

    def complete(self, contents: Contents) -> list[str]:
        """Return the names of all files with pieces, once they are complete."""
        return self.written_names(contents)

    def discard(self) -> None:
        """Delete on rank 0 the files of a save that failed."""
        if self._shared is not None:
            self.folders.discard()

    def report_failure(self, error: Exception) -> None:
        """Leave a file that ends rank 0's wait for this rank."""
        text = f"rank {self.rank}: {error_text(error)}"
        write_in_folder(
            self.folders.new, f"failed-{self.rank}", text.encode(errors="backslashreplace")
        )

    def await_others(self) -> None:
        """Wait on rank 0 until all files exist: collectives would disturb the training."""
        if self._shared is None:
            return
        patience = world_timeout().total_seconds() if dist.is_initialized() else PATIENCE
        folder, until = self.folders.new, time.monotonic() + patience
        names = self.written_names(self._shared.contents)
        while missing := [name for name in names if not (folder / name).exists()]:
            failed = [file.read_text() for file in folder.glob("failed-*")]
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
    """A checkpoint that a thread writes."""

    def __init__(self, module: ParallelModule, job: Job) -> None:
        self._backend, self._job = module.backend, job
        self._error: Exception | None = None  # of this rank's thread
        self._raised: Exception | None = None  # the error that `wait` raised on all ranks
        self.is_over = False  # all ranks have waited
        self._thread = threading.Thread(target=self._run, name="saving")
        _threads[job.folders.path] = self._thread
        self._thread.start()

    def wait(self) -> None:
        """Wait on all ranks together until the checkpoint is complete; an error of any rank is
        raised on all of them, each time."""
        if self.is_over:
            if self._raised is not None:
                raise self._raised
            return
        self._thread.join()
        try:
            run_on_all_ranks(
                self._backend, self._raise, "wait() of what ap.save(asynchronous=True) gave"
            )
        except Exception as error:
            self._raised = error
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
                self._job.report_failure(error)

    def print_failure(self) -> None:
        """Print the error of a save for which no rank has waited."""
        if not self.is_over and self._error is not None:
            print(f"a checkpoint was not saved: {self._error}", file=sys.stderr)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


_threads: dict[Path, threading.Thread] = {}  # the last writer of each path


def join_writer(path: Path) -> None:
    """Wait for the thread of this process that writes to a path, if there is one."""
    if (thread := _threads.get(path)) is not None:
        thread.join()
        if _threads.get(path) is thread:
            del _threads[path]
