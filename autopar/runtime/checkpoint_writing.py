"""Writing: who writes which parts of a checkpoint, now or in a thread."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch import world_timeout
from autopar.errors import ExecutionError
from autopar.runtime import checkpoint_files as files
from autopar.runtime.checkpoint_files import Contents, Piece, Stored, key_of, label_of
from autopar.runtime.module import ParallelModule
from autopar.runtime.placing import Bounds
from autopar.runtime.safetensors import Held, write
from autopar.runtime.together import on_all

Key = tuple[str, str]  # of a tensor: a name, and that of an optimizer's state or ""
PATIENCE = 60.0  # seconds for the files of other ranks, once the program has ended here


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor."""

    key: Key
    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    bounds: Bounds

    @property
    def held(self) -> Held:
        return Held(tuple(length for _, length in self.bounds), self.dtype)


def divided(
    everyones: Sequence[Sequence[Part]],
) -> tuple[list[list[tuple[str, Part]]], Contents]:
    """Which rank writes which parts under which keys, and the index of all: every part is written
    by that of its holders who has the least to write so far."""
    holders: dict[Part, list[int]] = {}
    for rank, parts in enumerate(everyones):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    loads = [0] * len(everyones)
    shares: list[list[tuple[str, Part]]] = [[] for _ in everyones]
    stored: dict[Key, tuple[tuple[int, ...], list[Piece]]] = {}
    # Files whose widest elements come first have all of them aligned.
    for part in sorted(holders, key=lambda one: -one.dtype.itemsize):
        shape, pieces = stored.setdefault(part.key, (part.shape, []))
        if not part.held.size and (0 not in part.shape or pieces):
            continue
        rank = min(holders[part], key=lambda one: loads[one])
        loads[rank] += part.held.size
        shares[rank].append((key_of(label_of(*part.key), part.bounds), part))
        pieces.append(Piece(rank, part.bounds))
    values = {name: Stored(s, tuple(p)) for (name, key), (s, p) in stored.items() if not key}
    states: dict[str, dict[str, Stored]] = {}
    for (name, key), (shape, pieces) in stored.items():
        if key:
            states.setdefault(name, {})[key] = Stored(shape, tuple(pieces))
    return shares, Contents("autopar checkpoint", 1, len(everyones), values, states)


class Job:
    """What one rank writes of a checkpoint."""

    def __init__(
        self,
        path: Path,
        rank: int,
        mine: Mapping[str, tuple[Part, Tensor]],
        contents: Contents | None,
        others: Mapping[str, Any],
    ) -> None:
        """`mine`: by its key in this rank's file; of rank 0, `others`: what is written beside."""
        self.path, self.rank, self._mine = path, rank, dict(mine)
        self._contents, self._others = contents, others

    def copy(self) -> None:
        """From now on nothing that training changes is written."""
        for key, (part, value) in self._mine.items():
            self._mine[key] = part, value.detach().to("cpu", copy=True)

    def write(self) -> None:
        folder = files.beside(self.path, "new")
        name = files.file_name(self.rank)
        unfinished = folder / f"{name}.part"
        kinds = {key: part.held for key, (part, _) in self._mine.items()}
        write(unfinished, kinds, (value for _, value in self._mine.values()))
        unfinished.replace(folder / name)
        self._mine.clear()

    def commit(self) -> None:
        """On rank 0, once all have written."""
        assert self._contents is not None
        folder = files.beside(self.path, "new")
        files.put(folder, files.BESIDE, self._others["beside"])
        self._others["plan"].save(folder / files.PLAN)
        files.commit(self.path, self._contents)

    def tell(self, error: Exception) -> None:
        """Rank 0 is not to wait for this one."""
        text = f"rank {self.rank}: {type(error).__name__}: {error}"
        (files.beside(self.path, "new") / f"failed-{self.rank}").write_text(text)

    def await_others(self) -> None:
        """Until all ranks have written: no collective, since training goes on."""
        assert self._contents is not None
        folder, until = files.beside(self.path, "new"), time.monotonic() + _patience()
        names = [files.file_name(number) for number in range(self._contents.files)]
        while missing := [name for name in names if not (folder / name).exists()]:
            failed = [one.read_text() for one in folder.glob("failed-*")]
            has_ended = not threading.main_thread().is_alive()
            until = min(until, time.monotonic() + PATIENCE) if has_ended else until
            if failed or time.monotonic() > until:
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
        self._error: Exception | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="saving")
        self._thread.start()

    def wait(self) -> None:
        """Until it is whole, on all ranks; an error of any rank is raised on all.

        All ranks wait together."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        on_all(self._backend, self._raise)

    def _run(self) -> None:
        try:
            self._job.write()
            if self._job.rank == 0:
                self._job.await_others()
                self._job.commit()
        except Exception as error:
            self._error = error
            with suppress(OSError):
                self._job.tell(error)

    def tell(self) -> None:
        """Say what failed, if nobody has waited."""
        if self._thread is not None and self._error is not None:
            print(f"a checkpoint was not saved: {self._error}", file=sys.stderr)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _patience() -> float:
    return world_timeout().total_seconds() if dist.is_initialized() else PATIENCE
