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
import math
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
    """Where a part of a tensor lies."""

    file: Index
    key: str  # there
    starts: tuple[Index, ...]  # the place of its first element in the tensor


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
            for name, stored in self._every():
                self._require_whole(name, stored)
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
        found = list(self.contents.values.items())
        for name, states in self.contents.states.items():
            found += [(f"{key} of {name}", stored) for key, stored in states.items()]
        return found

    def _require_whole(self, name: str, stored: Stored) -> None:
        """Its pieces are there, lie in it, and fill it."""
        filled = 0
        for piece in stored.pieces:
            held = self._held(piece)
            ends = [start + size for start, size in zip(piece.starts, held.shape)]
            is_inside = len(held.shape) == len(piece.starts) == len(stored.shape)
            if not is_inside or any(end > size for end, size in zip(ends, stored.shape)):
                raise ValueError(f"{name} has a piece that is no part of it")
            if held.dtype != self.dtype(stored):
                raise ValueError(f"{name} has pieces of several dtypes")
            filled += math.prod(held.shape)
        if filled != math.prod(stored.shape) or not stored.pieces:
            raise ValueError(f"{name} is not whole")

    def _held(self, piece: Piece) -> Held:
        if piece.file >= len(self._files) or piece.key not in self._files[piece.file].held:
            raise ValueError(f"{piece.key} is missing")
        return self._files[piece.file].held[piece.key]

    def dtype(self, stored: Stored) -> torch.dtype:
        return self._held(stored.pieces[0]).dtype

    def read(self, stored: Stored, bounds: Bounds) -> Tensor:
        """What lies inside `bounds` of a tensor, and no other byte."""
        found = torch.empty([length for _, length in bounds], dtype=self.dtype(stored))
        for piece in stored.pieces:
            held = self._held(piece)
            there, here = [], []
            for (start, length), begin, size in zip(bounds, piece.starts, held.shape):
                first, last = max(start, begin), min(start + length, begin + size)
                there.append((first - begin, max(0, last - first)))
                here.append((first - start, max(0, last - first)))
            if all(length for _, length in there):
                part = self._files[piece.file].read(piece.key, tuple(there))
                part_of(found, tuple(here)).copy_(part)
        return found


def file_name(number: int) -> str:
    return f"rank-{number}.safetensors"


def _load(file: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def beside(path: Path, what: str) -> Path:
    return path.parent / f".{path.name}.{what}"


def _is_whole(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def _folder_of(path: Path) -> Path:
    """Where the last whole checkpoint of a path lies."""
    places = [path] if path.exists() else [beside(path, "new"), beside(path, "old")]
    for folder in places:
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
