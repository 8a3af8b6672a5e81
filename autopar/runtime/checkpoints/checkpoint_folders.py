"""Checkpoint folders: where a checkpoint is written, and how it takes the place of another.

    run/100                        a checkpoint
    run/.100.5e1f0c2b7a94.new      one that is being written, by the id of its save
    run/.100.5e1f0c2b7a94.old      the one whose place it takes, for a moment

It is written beside its place and renamed: at any moment the last one is whole at its place, or,
between the two renames that replace it, beside it. What else lies in a checkpoint's folder is
nobody's to delete: then the checkpoint is not replaced. Programs that save to one path at once
replace each other's checkpoints, each of which is whole; the last one stays.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from autopar.base.files import hold, if_abandoned, locked, read_regular, replacing, sync, writing
from autopar.base.schema import is_count
from autopar.errors import ExecutionError, InvalidInput
from autopar.runtime.parameters.weight_files import CHECKPOINT

FORMAT: Final = "autopar checkpoint"
VERSION: Final = 1
INDEX, BESIDE, PLAN = CHECKPOINT, "beside.pt", "plan.json"
_FILE = re.compile(r"rank-(\d+)\.safetensors")
_UNFINISHED = re.compile(r"\.rank-\d+\.safetensors\.[0-9a-f]{12}\.new|failed-\d+")
_renaming = threading.Lock()


@dataclass(frozen=True)
class Place:
    """Of one save of a checkpoint."""

    path: Path
    id: str = field(default_factory=lambda: secrets.token_hex(6))

    @property
    def new(self) -> Path:
        return _beside(self.path, self.id, "new")

    @property
    def old(self) -> Path:
        return _beside(self.path, self.id, "old")

    def begin(self) -> None:
        """Make the folder in which it is written."""
        with writing(self.path, "a checkpoint"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _renames(self.path.parent):
                if not self.path.exists() and (left := _left_whole(self.path)):
                    os.rename(left, self.path)  # it was broken off between two renames
                _require_replaceable(self.path)
                for left in _left_beside(self.path):
                    with if_abandoned(left) as is_abandoned:
                        if is_abandoned:
                            _discard(left)
                self.new.mkdir()
                descriptor = os.open(self.new, os.O_RDONLY)
                weakref.finalize(self, os.close, descriptor)
                hold(descriptor)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Refuse the path where the disk, or another program, does not let this be written."""
        try:
            with writing(self.path, "a checkpoint"):
                yield
        except InvalidInput:
            if self.new.is_dir():
                raise
            raise ExecutionError(
                "a program that saves a checkpoint has its folder to itself",
                got=f"{self.new}, which somebody has deleted or renamed",
                remedy="save again, each program to a path of its own",
            ) from None

    def require_seen(self) -> None:
        """Rank 0 has made the folder: others see it too."""
        if not self.new.is_dir():
            raise InvalidInput(
                "all ranks write a checkpoint into one folder",
                got=f"{self.path}, which rank 0 has made and this one does not see",
                remedy="give all ranks the same path on a disk that they share",
            )

    def commit(self, files: int, index: bytes) -> None:
        """All other files are there: from now on it is whole, then it takes its place."""
        names = {BESIDE, PLAN, *map(file_name, range(files))}
        found = {one.name for one in self.new.iterdir()}
        if found != names:
            raise ExecutionError(
                "the folder of an unfinished checkpoint is left alone",
                got=f"{self.new}, where {', '.join(sorted(found ^ names))} came or went",
                remedy="save again; the last checkpoint is still whole",
            )
        put(self.new, INDEX, index)
        with _renames(self.path.parent):
            _require_replaceable(self.path)
            is_there = self.path.exists()
            if is_there:
                os.rename(self.path, self.old)
            try:
                os.rename(self.new, self.path)
            except OSError:
                if is_there:
                    os.rename(self.old, self.path)
                raise
        sync(self.path.parent)
        _discard(self.old)

    def discard(self) -> None:
        """It will not become whole."""
        _discard(self.new)


@contextmanager
def _renames(folder: Path) -> Iterator[None]:
    """Let one thread of one program at a time rename checkpoints in a folder."""
    with _renaming, ExitStack() as stack:
        with suppress(OSError):  # of a disk that knows no locks
            stack.enter_context(locked(folder))
        yield


def accepted(path: Any) -> Path:
    """Where a path leads, through links; or refuse it."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidInput(
            "a checkpoint has a path",
            got=f"a value of type {type(path).__name__}",
            remedy='ap.save("run/100", module)',
        )
    try:
        found = Path(path).resolve()
        found.exists()  # some names are too long for any file
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidInput(
            "a checkpoint has a path",
            got=f"{str(path)[:80]!r}: {getattr(error, 'strerror', None) or error}",
            remedy='ap.save("run/100", module)',
        ) from None
    return found


def require_apart(path: Path) -> None:
    """Refuse a place that the working directory lies in: it would be gone."""
    if Path.cwd().is_relative_to(path):
        raise InvalidInput(
            "a checkpoint has a folder of its own, which is replaced as a whole",
            got=f"{path}, where the working directory is",
            remedy='ap.save("run/100", module)',
        )


def is_there(path: Path) -> bool:
    return _found(path) is not None


def folder_of(path: Path) -> Path:
    """Where the last whole checkpoint of a path lies."""
    if found := _found(path):
        return found
    raise InvalidInput(
        "a checkpoint is a folder that ap.save() wrote",
        got=f"{path}, where {'something else' if path.exists() else 'nothing'} is",
        remedy="give the path that was given to ap.save()",
    )


def require_readable(version: object, file: Path) -> None:
    """Refuse a file of a checkpoint that was written by a later autopar."""
    if is_count(version, VERSION + 1):
        raise Newer(
            "a checkpoint is read by the autopar that wrote it, or by a later one",
            got=f"{file} of version {version}; this autopar reads version {VERSION}",
            remedy="install the autopar that wrote it, or a later one",
        )


class Newer(InvalidInput):
    """A checkpoint of a later autopar."""


def file_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def put(folder: Path, name: str, data: bytes) -> None:
    """Write a file into a folder that is there."""
    with replacing(folder / name) as file:
        file.write(data)


def _beside(path: Path, save: str, what: str) -> Path:
    return path.parent / f".{path.name}.{save}.{what}"


def _left_beside(path: Path) -> list[Path]:
    """Folders of saves of a path that were broken off."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}\.(new|old)")
    if not path.parent.is_dir():
        return []
    return [one for one in path.parent.iterdir() if name.fullmatch(one.name)]


def index_of(folder: Path) -> dict[str, Any] | None:
    """What the index of a checkpoint says, if there is one."""
    try:
        data = json.loads(read_regular(folder / INDEX))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


def _found(path: Path) -> Path | None:
    if path.exists():
        return path if index_of(path) is not None else None
    return _left_whole(path)


def _left_whole(path: Path) -> Path | None:
    """The last checkpoint of a path, which was broken off between two renames: the new one."""
    whole = [one for one in _left_beside(path) if index_of(one) is not None]
    is_replacing = {one.with_suffix(".new") for one in whole if one.suffix == ".old"}

    def order(folder: Path) -> tuple[bool, bool, float]:
        made = (folder / INDEX).stat().st_mtime
        return folder in is_replacing, folder.suffix == ".new", made

    return max(whole, key=order, default=None)


def _require_replaceable(path: Path) -> None:
    """Refuse a place where anything lies that no checkpoint has."""
    if not path.exists():
        return
    rule = "a checkpoint takes the place of another one, or of nothing"
    names = sorted(one.name for one in path.iterdir()) if path.is_dir() else None
    if names == []:
        return
    index = index_of(path)
    if index is None or names is None:
        raise InvalidInput(
            rule,
            got=f"{path}, where something else is",
            remedy="give another path, or take away what is there",
        )
    require_readable(index.get("version"), path / INDEX)
    if others := [name for name in names if not _is_of(name, index)]:
        raise InvalidInput(
            rule,
            got=f"{path}, where {', '.join(others[:4])} is too",
            remedy="save to a folder beside the other one, not inside; or move what is there",
        )


def _is_of(name: str, index: dict[str, Any]) -> bool:
    """Whether a file is one of those that an index tells of."""
    if match := _FILE.fullmatch(name):
        return is_count(index.get("files")) and int(match[1]) < index["files"]
    return name in (INDEX, BESIDE, PLAN)


def _discard(folder: Path) -> None:
    """Delete the files of a checkpoint, and its folder if that is all of it."""
    own = (INDEX, BESIDE, PLAN)
    with suppress(OSError):
        for one in folder.iterdir():
            if one.name in own or _FILE.fullmatch(one.name) or _UNFINISHED.fullmatch(one.name):
                one.unlink()
        folder.rmdir()
