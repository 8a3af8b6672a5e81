"""Checkpoint folders: replace one checkpoint by another, so that a complete one always exists.

    run/100                        a checkpoint
    run/.100.5e1f0c2b7a94.new      a checkpoint that is being written, by the id of its save
    run/.100.5e1f0c2b7a94.old      the replaced checkpoint, between two renames

A folder that contains any other file is never replaced. If programs save to one path at the same
time, each replaces the others' checkpoints, and the last one stays.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from autopar.base.files import hold, if_abandoned, locked, read_regular, replacing, sync, writing
from autopar.base.schema import is_count
from autopar.errors import ExecutionError, InvalidInput
from autopar.runtime.parameters.weight_files import CHECKPOINT
from autopar.text.source_lines import frames_to_caller

FORMAT: Final = "autopar checkpoint"
VERSION: Final = 1
INDEX, BESIDE, PLAN, DCP_INDEX = CHECKPOINT, "beside.pt", "plan.json", ".metadata"
_FILE = re.compile(r"rank-(\d+)\.safetensors")
_DCP_FILE = re.compile(r"__(\d+)_0\.distcp")
_NAMES = "|".join(map(re.escape, (INDEX, BESIDE, PLAN, DCP_INDEX)))
_OWN = f"(?:{_FILE.pattern}|{_DCP_FILE.pattern}|{_NAMES}|written-\\d+)"
_OWN_FILE = re.compile(rf"{_OWN}|\.{_OWN}\.[0-9a-f]{{12}}\.new|failed-\d+")  # .new: unfinished
_renaming = threading.Lock()


@dataclass(frozen=True)
class SaveFolders:
    """The folders of one save, in which a checkpoint is written and replaced."""

    path: Path
    id: str = field(default_factory=lambda: secrets.token_hex(6))

    @property
    def new(self) -> Path:
        return self.path.parent / f".{self.path.name}.{self.id}.new"

    @property
    def old(self) -> Path:
        return self.new.with_suffix(".old")

    def begin(self) -> None:
        """Make and lock the new folder, after restoring and cleaning up interrupted saves."""
        with writing(self.path, "a checkpoint"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _renames(self.path.parent):
                if not self.path.exists() and (complete := _interrupted_checkpoint(self.path)):
                    os.rename(complete, self.path)
                _require_replaceable(self.path)
                for folder in _unfinished_saves(self.path):
                    with if_abandoned(folder) as is_abandoned:
                        if is_abandoned:
                            _discard(folder)
                self.new.mkdir()
                descriptor = os.open(self.new, os.O_RDONLY)
                weakref.finalize(self, os.close, descriptor)
                hold(descriptor)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Refuse the path if the disk or another program prevents writing."""
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
        """Refuse a path at which this rank does not see the folder that rank 0 made."""
        if not self.new.is_dir():
            raise InvalidInput(
                "all ranks write a checkpoint into one folder",
                got=f"{self.path}, which rank 0 has made and this one does not see",
                remedy="give all ranks the same path on a disk that they share",
            )

    def commit(self, names: Iterable[str], index: bytes) -> None:
        """Write the index after all files in `names`, and replace the earlier checkpoint."""
        expected = {BESIDE, PLAN, *names}
        actual = {file.name for file in self.new.iterdir()}
        if actual != expected:
            raise ExecutionError(
                "the folder of an unfinished checkpoint is left alone",
                got=f"{self.new}, where {', '.join(sorted(actual ^ expected))} came or went",
                remedy="save again; the last checkpoint is still whole",
            )
        write_in_folder(self.new, INDEX, index)
        with _renames(self.path.parent):
            _require_replaceable(self.path)
            is_replacing = self.path.exists()
            if is_replacing:
                os.rename(self.path, self.old)
            try:
                os.rename(self.new, self.path)
            except OSError:
                if is_replacing:
                    os.rename(self.old, self.path)
                raise
        sync(self.path.parent)
        _discard(self.old)
        if self.old.exists():
            warnings.warn(
                f"the checkpoint that was replaced cannot be deleted and stays at {self.old}",
                stacklevel=frames_to_caller(),
            )

    def discard(self) -> None:
        """Delete the new folder of a save that failed."""
        _discard(self.new)


@contextmanager
def _renames(folder: Path) -> Iterator[None]:
    """Let one thread of one program at a time rename checkpoints in a folder."""
    with _renaming, ExitStack() as stack:
        with suppress(OSError):  # some disks have no locks
            stack.enter_context(locked(folder))
        yield


def resolve_path(path: Any) -> Path:
    """Return the absolute path to which a path leads through links; or refuse it."""
    got = f"a value of type {type(path).__name__}"
    if isinstance(path, str | os.PathLike):
        try:
            resolved = Path(path).resolve()
            resolved.exists()  # some names are too long for any file
            return resolved
        except (OSError, ValueError, RuntimeError) as error:
            got = f"{str(path)[:80]!r}: {getattr(error, 'strerror', None) or error}"
    raise InvalidInput("a checkpoint has a path", got=got, remedy='ap.save("run/100", module)')


def require_elsewhere(path: Path) -> None:
    """Refuse a path that contains the working directory, which a save would delete."""
    with suppress(FileNotFoundError):  # a working directory that was deleted is in no path
        if Path.cwd().is_relative_to(path):
            raise InvalidInput(
                "a checkpoint has a folder of its own, which is replaced as a whole",
                got=f"{path}, where the working directory is",
                remedy='ap.save("run/100", module)',
            )


def folder_of(path: Path) -> Path:
    """Return the folder of the last complete checkpoint of a path; or refuse the path."""
    if folder := find_folder(path):
        return folder
    content = "something else" if path.exists() else "nothing"
    if (path / INDEX).exists():
        content = f"{INDEX} of something else, or a damaged one,"
    raise InvalidInput(
        "a checkpoint is a folder that ap.save() wrote",
        got=f"{path}, where {content} is",
        remedy="give the path that was given to ap.save()",
    )


def require_readable(version: object, file: Path) -> None:
    """Refuse a file that a later version of autopar wrote."""
    if is_count(version, VERSION + 1):
        raise NewerVersion(
            "a checkpoint is read by the autopar that wrote it, or by a later one",
            got=f"{file} of version {version}; this autopar reads version {VERSION}",
            remedy="install the autopar that wrote it, or a later one",
        )


class NewerVersion(InvalidInput):
    """Raised for a checkpoint that a later version of autopar wrote."""


def file_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def dcp_file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def write_in_folder(folder: Path, name: str, data: bytes) -> None:
    """Write a file into an existing folder."""
    with replacing(folder / name) as file:
        file.write(data)


def _unfinished_saves(path: Path) -> list[Path]:
    """Return the folders of saves of a path that run or were interrupted."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}\.(new|old)")
    if not path.parent.is_dir():
        return []
    return [folder for folder in path.parent.iterdir() if name.fullmatch(folder.name)]


def index_of(folder: Path) -> dict[str, Any] | None:
    """Return the unchecked index of a checkpoint; None: the folder has none."""
    try:
        data = json.loads(read_regular(folder / INDEX))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


def find_folder(path: Path) -> Path | None:
    """Return the folder of the last complete checkpoint of a path; None: it has none."""
    if not path.parent.is_dir():
        return None
    with _renames(path.parent):  # between two renames the path would seem to have none
        if path.exists():
            return path if index_of(path) is not None else None
        return _interrupted_checkpoint(path)


def _interrupted_checkpoint(path: Path) -> Path | None:
    """Return the newest complete checkpoint of saves that stopped between two renames."""
    complete = [folder for folder in _unfinished_saves(path) if index_of(folder) is not None]
    replacing_old = {folder.with_suffix(".new") for folder in complete if folder.suffix == ".old"}
    return max(
        complete,
        key=lambda f: (f in replacing_old, f.suffix == ".new", (f / INDEX).stat().st_mtime),
        default=None,
    )


def _require_replaceable(path: Path) -> None:
    """Refuse a path with anything that no checkpoint has."""
    if not path.exists():
        return
    rule = "a checkpoint takes the place of another one, or of nothing"
    names = sorted(file.name for file in path.iterdir()) if path.is_dir() else None
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
    """Return whether a file belongs to the checkpoint with this index."""
    is_dcp = index.get("form") == "dcp"
    if match := (_DCP_FILE if is_dcp else _FILE).fullmatch(name):
        return is_count(index.get("files")) and int(match[1]) < index["files"]
    return name in (INDEX, BESIDE, PLAN) or (is_dcp and name == DCP_INDEX)


def _discard(folder: Path) -> None:
    """Delete the files of a checkpoint, and its folder if that is then empty."""
    with suppress(OSError):
        for file in folder.iterdir():
            if _OWN_FILE.fullmatch(file.name):
                file.unlink()
        folder.rmdir()
