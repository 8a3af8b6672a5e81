"""Checkpoint files: the format of a checkpoint, and tensors that are read in parts.

    run/100/checkpoint.json        the index of the other files, written last
            rank-0.safetensors     pieces of parameters, buffers and optimizer states of a writer
            beside.pt              random state, optimizer options, loss scale, the user's `extra`
            plan.json              the plan under which it was saved

The first three bear the id of the save, the version of the format and digests of all bytes, so
that a changed bit is refused. No file runs code when it is read.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from autopar.base.files import read_regular
from autopar.base.schema import Count, Index, read, write
from autopar.errors import AutoparError, InvalidInput
from autopar.runtime.checkpoints.checkpoint_folders import (
    BESIDE,
    INDEX,
    PLAN,
    VERSION,
    NewerVersion,
    file_name,
    folder_of,
    index_of,
    require_readable,
)
from autopar.runtime.checkpoints.plain_data import from_file, to_bytes
from autopar.runtime.module.loss_scale import LossScale
from autopar.runtime.parameters.placing import Bounds, narrow_to
from autopar.runtime.parameters.weight_files import (
    DIGESTS,
    NAMES,
    SafetensorsFiles,
    StoredTensor,
    digest_of,
)


class Key(NamedTuple):
    """The name of a tensor: a parameter or buffer, or an optimizer's state of a parameter."""

    name: str
    state: str | None = None

    def __str__(self) -> str:
        return self.name if self.state is None else f"{self.state} of {self.name}"

    def piece(self, bounds: Bounds) -> str:
        """Return the name of a part of the tensor in a file, which is unique in a checkpoint."""
        ends = ", ".join(f"{start}:{start + length}" for start, length in bounds)
        if self.state is None:
            return f"value {self.name}[{ends}]"
        return f"state {json.dumps(self.state)} of {self.name}[{ends}]"


def dtype_named(text: str) -> torch.dtype:
    """Return the dtype whose `str` is `text`."""
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput("a tensor has a dtype of torch", got=text, remedy="torch.float32")
    return dtype


@dataclass(frozen=True)
class Piece:
    """The bounds of a part of a tensor, and the number of the file that holds it."""

    file: Index
    bounds: Bounds


@dataclass(frozen=True)
class Stored:
    """The form of a tensor in a checkpoint, and its pieces."""

    shape: tuple[Index, ...]
    dtype: Annotated[torch.dtype, dtype_named]
    pieces: tuple[Piece, ...]

    def require_complete(self, key: Key) -> None:
        """Raise ValueError unless the pieces form a grid that fills the tensor."""
        count, places = 1, {piece.bounds for piece in self.pieces}
        is_whole = all(len(bounds) == len(self.shape) for bounds in places)
        for dim, size in enumerate(self.shape if is_whole else ()):
            cuts, end = sorted({bounds[dim] for bounds in places}), 0
            for start, length in cuts:
                is_whole &= start == end
                end += length
            is_whole &= end == size
            count *= len(cuts)
        if not is_whole or not len(self.pieces) == len(places) == count:
            raise ValueError(f"{key} is not whole")


@dataclass(frozen=True)
class Contents:
    """The index of a checkpoint."""

    format: Literal["autopar checkpoint"]
    version: Literal[1]
    id: str  # of the save
    beside: str  # the digest of beside.pt
    files: Count
    values: Mapping[str, Stored]  # parameters and buffers
    states: Mapping[str, Mapping[str, Stored]]  # of an optimizer, by parameter and state
    plan: str = ""  # the digest of plan.json; "" in a checkpoint of an earlier autopar
    form: Literal["safetensors", "dcp"] = "safetensors"  # of the files with pieces

    @property
    def tensors(self) -> dict[Key, Stored]:
        tensors = {Key(name): stored for name, stored in self.values.items()}
        for name, states in self.states.items():
            tensors |= {Key(name, state): stored for state, stored in states.items()}
        return tensors

    def to_bytes(self) -> bytes:
        data = write(self)
        return json.dumps({"digest": digest_of(data), **data}).encode()


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters of an optimizer's group, and its options."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class SavedOptimizer:
    """The part of an optimizer that is not tensors of parameters."""

    kind: str
    groups: tuple[ParameterGroup, ...]
    others: Mapping[str, Mapping[str, Any]]  # states that are not tensors, by parameter


@dataclass(frozen=True)
class Beside:
    """The data of a checkpoint that is not tensors of the model: the file beside.pt."""

    version: Literal[1]
    id: str
    random: Any  # the state of torch's generator on the host
    loss_scale: LossScale | None
    optimizer: SavedOptimizer | None
    extra: Any

    def to_bytes(self) -> bytes:
        return to_bytes(write(self))


class Checkpoint:
    """A complete checkpoint, opened for reading; files in any other form are refused."""

    def __init__(self, path: Path) -> None:
        self.folder = self._find(path)
        self._id: str | None = None  # of the save, once it is known
        with self._refused():
            self._open()

    def _find(self, path: Path) -> Path:
        """Return the folder of the last complete checkpoint of a path."""
        return folder_of(path)

    def _is_replaced(self) -> bool:
        """Return whether the folder now holds another checkpoint, or none."""
        index = index_of(self.folder)
        return index is None or self._id not in (None, index.get("id"))

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Raise InvalidInput in place of any error that reading raises."""
        try:
            yield
        except NewerVersion:
            raise
        except Exception as error:
            if self._is_replaced():
                raise InvalidInput(
                    "a checkpoint stays where it is while it is loaded",
                    got=f"{self.folder}, which a program has replaced or taken away",
                    remedy="load it again, or save to a path of its own for each step",
                ) from None
            raise InvalidInput(
                "a checkpoint is as ap.save() wrote it",
                got=f"{self.folder}: {error.got if isinstance(error, AutoparError) else error}",
                remedy="copy it again, whole, or load an earlier one",
            ) from None

    def require_unchanged(self, reader: int, readers: int) -> None:
        """Refuse pieces with a changed bit; each of several readers compares its share."""
        pieces = [
            (held.size, n, key)
            for n, f in enumerate(self._files)
            for key, held in f.tensors.items()
        ]
        with self._refused():
            for _, number, key in sorted(pieces)[reader::readers]:
                if self._files[number].digest(key) != self._digests[number][key]:
                    raise ValueError(f"{key} in {file_name(number)} has changed")

    def _open(self) -> None:
        data = json.loads(read_regular(self.folder / INDEX))
        require_readable(data.get("version"), self.folder / INDEX)
        if data.pop("digest", None) != digest_of(data):
            raise ValueError(f"{INDEX} has changed, or bears no digest")
        self.contents = read(Contents, data)
        self._id = self.contents.id
        for key, stored in self.contents.tensors.items():
            stored.require_complete(key)
        self._open_files()
        if self.contents.plan not in ("", sha256_of(read_regular(self.folder / PLAN))):
            raise ValueError(f"{PLAN} has changed")
        self.beside = self._read_beside(read_regular(self.folder / BESIDE))
        torch.Generator("cpu").set_state(self.beside.random)

    def _open_files(self) -> None:
        """Open the files with pieces, or refuse other pieces than the index names."""
        self._digests: list[dict[str, str]] = []
        self._files = [self._file(number) for number in range(self.contents.files)]
        tensors = self.contents.tensors
        for key, stored in tensors.items():
            for piece in stored.pieces:
                self._require_piece(key, stored, piece)
        pieces = sum(len(stored.pieces) for stored in tensors.values())
        if pieces != sum(len(file.tensors) for file in self._files):
            raise ValueError("its files hold other tensors than its index tells")

    def _read_beside(self, content: bytes) -> Beside:
        has_changed = sha256_of(content) != self.contents.beside
        try:
            data = from_file(io.BytesIO(content))
        except Exception as error:
            if has_changed:
                size = f"{len(content)} bytes"
                raise ValueError(f"{BESIDE}, of {size}, has changed or is cut short") from error
            raise
        require_readable(data.get("version"), self.folder / BESIDE)
        contents = read(Beside, data)
        self._require_same_save(BESIDE, contents.id)
        if has_changed:
            raise ValueError(f"{BESIDE} has changed")
        return contents

    def _file(self, number: int) -> SafetensorsFiles:
        path = self.folder / file_name(number)
        file = SafetensorsFiles([path])
        version = str(file.metadata.get("version"))
        require_readable(int(version) if version.isdecimal() else None, path)
        self._require_same_save(path.name, file.metadata.get("id"))
        digests = file.metadata.get(DIGESTS, "").split()
        if not file.have_digests or len(digests) != len(file.tensors):
            raise ValueError(f"{path.name} has changed, or bears no digests")
        self._digests.append(dict(zip(file.tensors, digests)))
        return file

    def _require_same_save(self, name: str, save: object) -> None:
        if save != self.contents.id:
            raise ValueError(f"{name} is of another checkpoint than {INDEX}")

    def _require_piece(self, key: Key, stored: Stored, piece: Piece) -> None:
        held = self._files[piece.file].tensors if piece.file < len(self._files) else {}
        actual, shape = held.get(key.piece(piece.bounds)), [length for _, length in piece.bounds]
        expected = in_file(tuple(shape), stored.dtype)
        if actual is None or (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            raise ValueError(f"{key.piece(piece.bounds)} is missing")

    def stored(self, key: Key) -> Stored:
        values, states = self.contents.values, self.contents.states
        return values[key.name] if key.state is None else states[key.name][key.state]

    def read(self, key: Key, bounds: Bounds) -> Tensor:
        """Return the part of a tensor inside `bounds` on the host, and read no other byte."""
        stored = self.stored(key)
        form = self._form(tuple(length for _, length in bounds), stored.dtype)
        last_dim = tuple((0, size) for size in form.shape[len(bounds) :])  # bytes of an element
        result = torch.empty(form.shape, dtype=form.dtype, device="cpu")
        for piece in stored.pieces:
            in_piece, in_result = [], []
            for (start, length), (begin, size) in zip(bounds, piece.bounds):
                first, last = max(start, begin), min(start + length, begin + size)
                in_piece.append((first - begin, max(0, last - first)))
                in_result.append((first - start, max(0, last - first)))
            if all(length for _, length in in_piece):
                with self._refused():
                    part = self._read_part(key, piece, (*in_piece, *last_dim))
                narrow_to(result, (*in_result, *last_dim)).copy_(part)
        return result.view(stored.dtype).squeeze(-1) if last_dim else result

    def _form(self, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
        """Return the form in which a part of a tensor is read."""
        return in_file(shape, dtype)

    def _read_part(self, key: Key, piece: Piece, bounds: Bounds) -> Tensor:
        """Return the part of a piece inside `bounds`, which count from the piece's start."""
        return self._files[piece.file].read(key.piece(piece.bounds), bounds)


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def in_file(shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
    """Return the form of a piece in a file: bytes if safetensors has no name for the dtype."""
    if dtype in NAMES:
        return StoredTensor(shape, dtype)
    return StoredTensor((*shape, dtype.itemsize), torch.uint8)


def require_storable(key: Key, dtype: torch.dtype) -> None:
    """Refuse a tensor that is more than the bytes of its elements, such as a quantized one."""
    if not (dtype in NAMES or dtype.is_floating_point or dtype.is_complex):
        raise InvalidInput(
            "a checkpoint holds tensors of numbers",
            got=f"{key} of {dtype}",
            remedy="keep it in another dtype, or as what is not saved (persistent=False)",
        )


def metadata_of(save: str) -> dict[str, str]:
    """Return the metadata of a file of pieces."""
    return {"id": save, "version": str(VERSION)}
