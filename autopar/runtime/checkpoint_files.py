"""Checkpoint files: a folder that is whole or not there, and tensors in it that are read in parts.

    run/100/checkpoint.json        what the others hold; written last
            rank-0.safetensors     pieces of parameters, buffers and optimizer states, by writer
            beside.pt              random and optimizer's state, loss scale, what the user adds
            plan.json              the plan that it was saved under

It is written beside its place, as `.100.new`, and renamed: at any moment the last one is whole at
its place, or, between the two renames that replace it, beside it. No file runs code when it is
read: pieces and their index are data, and the rest goes through torch's `weights_only`. (Torch's
own format keeps its index as a pickle, and loads what is no tensor as one.)
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from autopar.errors import AutoparError, InvalidInput
from autopar.runtime.loss_scale import LossScale
from autopar.runtime.placing import Bounds, part_of
from autopar.runtime.safetensors import Held, SafetensorsFiles
from autopar.schema import Count, Index, read, write

INDEX, BESIDE, PLAN = "checkpoint.json", "beside.pt", "plan.json"


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, and where it lies."""

    file: Index
    bounds: Bounds


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint."""

    shape: tuple[Index, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Contents:
    """What the index of a checkpoint says."""

    format: Literal["autopar checkpoint"]
    version: Literal[1]
    files: Count
    values: Mapping[str, Stored]  # parameters and buffers
    states: Mapping[str, Mapping[str, Stored]]  # of an optimizer, by parameter


@dataclass(frozen=True)
class Group:
    """Parameters with options of their own."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class SavedOptimizer:
    """What of an optimizer is no tensor of a parameter."""

    kind: str
    groups: tuple[Group, ...]
    others: Mapping[str, Mapping[str, Any]]  # states that are no tensors, by parameter


@dataclass(frozen=True)
class Beside:
    """What a checkpoint holds beside tensors of the model."""

    random: Any  # the state of the generator that draws follow
    loss_scale: LossScale | None
    optimizer: SavedOptimizer | None
    extra: Any

    def to_bytes(self) -> bytes:
        """As a file; what could not be read again is refused."""
        buffer = io.BytesIO()
        try:
            torch.save(write(self), buffer)
            _load(io.BytesIO(buffer.getvalue()))
        except Exception as error:
            raise InvalidInput(
                "extra, and the options of an optimizer, are plain data and tensors: loading a "
                "checkpoint runs no code",
                got=str(error).split("\n")[0],
                remedy="give numbers, texts, tensors, lists and dicts of these, such as the "
                "state_dict() of a scheduler",
            ) from None
        return buffer.getvalue()


class Checkpoint:
    """One that is whole, opened to be read."""

    def __init__(self, path: Path) -> None:
        self.folder = _folder_of(path)
        try:
            self.contents = read(Contents, json.loads((self.folder / INDEX).read_bytes()))
            self._files = [
                SafetensorsFiles([self.folder / file_name(number)])
                for number in range(self.contents.files)
            ]
            for label, stored in self._every():
                self._require_whole(label, stored)
            pieces = sum(len(stored.pieces) for _, stored in self._every())
            if pieces != sum(len(file.held) for file in self._files):
                raise ValueError("its files hold other tensors than its index tells")
            self.beside = read(Beside, _load(self.folder / BESIDE))
            if getattr(self.beside.random, "dtype", None) != torch.uint8:
                raise ValueError("no state of random numbers")
        except Exception as error:
            raise InvalidInput(
                "a checkpoint is as ap.save() wrote it",
                got=f"{self.folder}: {error.got if isinstance(error, AutoparError) else error}",
                remedy="copy it again, whole, or load an earlier one",
            ) from None

    def _every(self) -> list[tuple[str, Stored]]:
        found = [(label_of(name), stored) for name, stored in self.contents.values.items()]
        for name, states in self.contents.states.items():
            found += [(label_of(name, state), stored) for state, stored in states.items()]
        return found

    def _require_whole(self, label: str, stored: Stored) -> None:
        """Its pieces are there, and make a grid that fills it."""
        if len({self._held(label, piece).dtype for piece in stored.pieces}) != 1:
            raise ValueError(f"{label} is not whole, or of several dtypes")
        count = 1
        for dim, size in enumerate(stored.shape):
            cuts, end = sorted({piece.bounds[dim] for piece in stored.pieces}), 0
            for start, length in cuts:
                if start != end:
                    raise ValueError(f"{label} is not whole")
                end += length
            if end != size:
                raise ValueError(f"{label} is not whole")
            count *= len(cuts)
        if not len(stored.pieces) == len({piece.bounds for piece in stored.pieces}) == count:
            raise ValueError(f"{label} is not whole")

    def _held(self, label: str, piece: Piece) -> Held:
        held = self._files[piece.file].held if piece.file < len(self._files) else {}
        found = held.get(key_of(label, piece.bounds))
        if found is None or found.shape != tuple(length for _, length in piece.bounds):
            raise ValueError(f"{key_of(label, piece.bounds)} is missing")
        return found

    def stored(self, name: str, state: str = "") -> Stored:
        contents = self.contents
        return contents.states[name][state] if state else contents.values[name]

    def dtype(self, name: str, state: str = "") -> torch.dtype:
        return self._held(label_of(name, state), self.stored(name, state).pieces[0]).dtype

    def read(self, name: str, state: str, bounds: Bounds) -> Tensor:
        """What lies inside `bounds` of a tensor, and no other byte: of a parameter, a buffer, or
        where one is named, of a state of a parameter."""
        label = label_of(name, state)
        found = torch.empty([length for _, length in bounds], dtype=self.dtype(name, state))
        for piece in self.stored(name, state).pieces:
            there, here = [], []
            for (start, length), (begin, size) in zip(bounds, piece.bounds):
                first, last = max(start, begin), min(start + length, begin + size)
                there.append((first - begin, max(0, last - first)))
                here.append((first - start, max(0, last - first)))
            if all(length for _, length in there):
                part = self._files[piece.file].read(key_of(label, piece.bounds), tuple(there))
                part_of(found, tuple(here)).copy_(part)
        return found


def label_of(name: str, state: str = "") -> str:
    return f"{state} of {name}" if state else name


def key_of(label: str, bounds: Bounds) -> str:
    """Under which a piece lies in its file."""
    ends = ", ".join(f"{start}:{start + length}" for start, length in bounds)
    return f"{label}[{ends}]"


def file_name(number: int) -> str:
    return f"rank-{number}.safetensors"


def _load(file: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def beside(path: Path, what: str) -> Path:
    return path.parent / f".{path.name}.{what}"


def _is_whole(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def is_there(path: Path) -> bool:
    return any(map(_is_whole, _places(path)))


def _places(path: Path) -> list[Path]:
    """Where the checkpoint of a path may lie: beside it, broken off between two renames."""
    return [path] if path.exists() else [beside(path, "new"), beside(path, "old")]


def _folder_of(path: Path) -> Path:
    """Where the last whole checkpoint of a path lies."""
    for folder in _places(path):
        if _is_whole(folder):
            return folder
    raise InvalidInput(
        "a checkpoint is a folder that ap.save() wrote",
        got=f"{path}, where {'something else' if path.exists() else 'nothing'} is",
        remedy="give the path that was given to ap.save()",
    )


def begin(path: Path) -> None:
    """Make the folder in which a checkpoint is written, beside its place."""
    try:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        if path.exists() and not _is_whole(path):
            raise InvalidInput(
                "a checkpoint takes the place of another one, or of nothing",
                got=f"{path}, where something else is",
                remedy="give another path, or take away what is there",
            )
        for left in map(beside, (path, path), ("new", "old")):
            if not path.exists() and _is_whole(left):  # it was broken off between two renames
                os.rename(left, path)
            shutil.rmtree(left, ignore_errors=True)
        beside(path, "new").mkdir(parents=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(
        "a checkpoint is a folder in one that can be written",
        got=f"{path}: {error.strerror}",
        remedy="give a path on a disk that all ranks see",
    )


def require_seen(path: Path) -> None:
    """Rank 0 has made the folder: others see it too."""
    if not beside(path, "new").is_dir():
        raise InvalidInput(
            "all ranks write a checkpoint into one folder",
            got=f"{path.absolute()}, which rank 0 has made and this one does not see",
            remedy="give all ranks the same path on a disk that they share",
        )


def put(folder: Path, name: str, data: bytes) -> None:
    """Write a file; it is on the disk when this returns."""
    with (folder / name).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def commit(path: Path, contents: Contents) -> None:
    """All other files are there: from now on the checkpoint is whole, then it takes its place."""
    new, old = beside(path, "new"), beside(path, "old")
    put(new, INDEX, json.dumps(write(contents)).encode())
    sync(new)
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(folder: Path) -> None:
    """The names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
