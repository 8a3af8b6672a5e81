"""Checkpoint files: what lies in the folder of a checkpoint, and tensors that are read in parts.

    run/100/checkpoint.json        what the others hold; written last
            rank-0.safetensors     pieces of parameters, buffers and optimizer states, by writer
            beside.pt              random and optimizer's state, loss scale, what the user adds
            plan.json              the plan that it was saved under

The first three bear the id of the save and the version of the format. The index bears its digest
and that of `beside.pt`, a file of pieces that of its header and of each piece: a bit that has
changed is refused. No file runs code when it is read: pieces and their index are data, and the rest
goes through torch's `weights_only`.
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
    Newer,
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
    """Of a tensor: a parameter or buffer, or what an optimizer keeps of one under some name."""

    name: str
    state: str | None = None

    def __str__(self) -> str:
        return self.name if self.state is None else f"{self.state} of {self.name}"

    def piece(self, bounds: Bounds) -> str:
        """Under which a part of it lies in a file: no other part of anything has this name."""
        ends = ", ".join(f"{start}:{start + length}" for start, length in bounds)
        if self.state is None:
            return f"value {self.name}[{ends}]"
        return f"state {json.dumps(self.state)} of {self.name}[{ends}]"


def dtype_named(text: str) -> torch.dtype:
    """The inverse of `str`."""
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidInput("a tensor has a dtype of torch", got=text, remedy="torch.float32")
    return found


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, and where it lies."""

    file: Index
    bounds: Bounds


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint."""

    shape: tuple[Index, ...]
    dtype: Annotated[torch.dtype, dtype_named]
    pieces: tuple[Piece, ...]

    def require_whole(self, key: Key) -> None:
        """Its pieces make a grid that fills it."""
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
    """What the index of a checkpoint says."""

    format: Literal["autopar checkpoint"]
    version: Literal[1]
    id: str  # of the save
    beside: str  # what the bytes of the file beside tensors come to
    files: Count
    values: Mapping[str, Stored]  # parameters and buffers
    states: Mapping[str, Mapping[str, Stored]]  # of an optimizer, by parameter
    plan: str = ""  # the digest of the plan's file; "" in a checkpoint of an earlier autopar

    @property
    def every(self) -> dict[Key, Stored]:
        found = {Key(name): stored for name, stored in self.values.items()}
        for name, states in self.states.items():
            found |= {Key(name, state): stored for state, stored in states.items()}
        return found

    def to_bytes(self) -> bytes:
        data = write(self)
        return json.dumps({"digest": digest_of(data), **data}).encode()


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

    version: Literal[1]
    id: str
    random: Any  # the state of the generator that draws follow
    loss_scale: LossScale | None
    optimizer: SavedOptimizer | None
    extra: Any

    def to_bytes(self) -> bytes:
        return to_bytes(write(self))


class Checkpoint:
    """One that is whole, opened to be read."""

    def __init__(self, path: Path) -> None:
        self.folder = folder_of(path)
        self._id: str | None = None  # of the save, once it is known
        with self._refused():
            self._open()

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Refuse the checkpoint for whatever error reading it raises."""
        try:
            yield
        except Newer:
            raise
        except Exception as error:
            if (index := index_of(self.folder)) is None or self._id not in (None, index.get("id")):
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
        """Refuse pieces of which a bit has changed: each of several readers looks at a share."""
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
        self._digests: list[dict[str, str]] = []
        self._files = [self._file(number) for number in range(self.contents.files)]
        every = self.contents.every
        for key, stored in every.items():
            stored.require_whole(key)
            for piece in stored.pieces:
                self._require_piece(key, stored, piece)
        pieces = sum(len(stored.pieces) for stored in every.values())
        if pieces != sum(len(file.tensors) for file in self._files):
            raise ValueError("its files hold other tensors than its index tells")
        if self.contents.plan not in ("", digest(read_regular(self.folder / PLAN))):
            raise ValueError(f"{PLAN} has changed")
        self.beside = self._beside(read_regular(self.folder / BESIDE))
        torch.Generator("cpu").set_state(self.beside.random)

    def _beside(self, given: bytes) -> Beside:
        has_changed = digest(given) != self.contents.beside
        try:
            data = from_file(io.BytesIO(given))
        except Exception as error:
            if has_changed:
                size = f"{len(given)} bytes"
                raise ValueError(f"{BESIDE}, of {size}, has changed or is cut short") from error
            raise
        require_readable(data.get("version"), self.folder / BESIDE)
        beside = read(Beside, data)
        self._require_same_save(BESIDE, beside.id)
        if has_changed:
            raise ValueError(f"{BESIDE} has changed")
        return beside

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
        found, shape = held.get(key.piece(piece.bounds)), [length for _, length in piece.bounds]
        asked = in_file(tuple(shape), stored.dtype)
        if found is None or (found.shape, found.dtype) != (asked.shape, asked.dtype):
            raise ValueError(f"{key.piece(piece.bounds)} is missing")

    def stored(self, key: Key) -> Stored:
        contents = self.contents
        is_value = key.state is None
        return contents.values[key.name] if is_value else contents.states[key.name][key.state]

    def read(self, key: Key, bounds: Bounds) -> Tensor:
        """What lies inside `bounds` of a tensor, and no other byte, on the host."""
        stored = self.stored(key)
        form = in_file(tuple(length for _, length in bounds), stored.dtype)
        behind = tuple((0, size) for size in form.shape[len(bounds) :])
        found = torch.empty(form.shape, dtype=form.dtype, device="cpu")
        for piece in stored.pieces:
            there, here = [], []
            for (start, length), (begin, size) in zip(bounds, piece.bounds):
                first, last = max(start, begin), min(start + length, begin + size)
                there.append((first - begin, max(0, last - first)))
                here.append((first - start, max(0, last - first)))
            if all(length for _, length in there):
                name = key.piece(piece.bounds)
                with self._refused():
                    part = self._files[piece.file].read(name, (*there, *behind))
                narrow_to(found, (*here, *behind)).copy_(part)
        return found.view(stored.dtype).squeeze(-1) if behind else found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def in_file(shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
    """As what a piece lies in a file: bytes, if that has no name for its dtype."""
    if dtype in NAMES:
        return StoredTensor(shape, dtype)
    return StoredTensor((*shape, dtype.itemsize), torch.uint8)


def require_storable(key: Key, dtype: torch.dtype) -> None:
    """Refuse what is more than the bytes of its elements."""
    if not (dtype in NAMES or dtype.is_floating_point or dtype.is_complex):
        raise InvalidInput(
            "a checkpoint holds tensors of numbers",
            got=f"{key} of {dtype}",
            remedy="keep it in another dtype, or as what is not saved (persistent=False)",
        )


def metadata_of(save: str) -> dict[str, str]:
    """What a file of pieces says of itself."""
    return {"id": save, "version": str(VERSION)}
