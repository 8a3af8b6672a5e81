"""DCP reading: a checkpoint of torch.distributed.checkpoint, by whichever program it was saved.

It is one that `ap.save(..., format="dcp")` wrote, with all that a checkpoint has, or one that
another program saved: `dcp.save({"model": ..., "optimizer": ...}, ...)` with the state dicts of
`get_state_dict(model, optimizer)`, or `dcp.save(model.state_dict(), ...)`. The latter has no random
state, no loss scale and no `extra`. No code of a file is run, its metadata's included.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from autopar._torch.distributed_checkpoint import end_of_place, read_metadata
from autopar.runtime.checkpoints.checkpoint_files import (
    Beside,
    Checkpoint,
    Contents,
    Key,
    ParameterGroup,
    Piece,
    SavedOptimizer,
    Stored,
    sha256_of,
)
from autopar.runtime.checkpoints.checkpoint_folders import FORMAT, INDEX, VERSION, find_folder
from autopar.runtime.checkpoints.dcp_entries import (
    GROUPS,
    METADATA,
    MODEL,
    OPTIMIZERS,
    EntryPath,
    key_of,
)
from autopar.runtime.checkpoints.plain_data import from_file
from autopar.runtime.parameters.placing import Bounds
from autopar.runtime.parameters.weight_files import StoredTensor

UNKNOWN_CLASS = ""  # of an optimizer that another program saved


class DcpCheckpoint(Checkpoint):
    """A checkpoint in DCP form, opened for reading."""

    def _find(self, path: Path) -> Path:
        return find_folder(path) or path

    @property
    def is_of_autopar(self) -> bool:
        """Return whether `ap.save` wrote it."""
        return (self.folder / INDEX).is_file()

    def _is_replaced(self) -> bool:
        return self.is_of_autopar and super()._is_replaced()

    def require_unchanged(self, reader: int, readers: int) -> None:
        """Do nothing: torch's files bear no digests of pieces; reading checks their checksums."""

    def _open(self) -> None:
        self._metadata = read_metadata(self.folder / METADATA)
        self._reader = FileSystemReader(self.folder)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        self._require_files()
        paths: Mapping[str, EntryPath] = self._metadata.planner_data or {}
        entries = self._metadata.state_dict_metadata
        self._paths = {name: paths.get(name, (name,)) for name in entries}
        is_bare = not any(path[0] == MODEL for path in self._paths.values())
        keys = {name: key_of(path, is_bare=is_bare) for name, path in self._paths.items()}
        self._names = {key: name for name, key in keys.items() if key is not None}
        if self.is_of_autopar:
            super()._open()
            return
        self.contents = self._foreign_contents()
        self.beside = Beside(
            VERSION, self.contents.id, None, None, self._foreign_optimizer(), extra=None
        )

    def _require_files(self) -> None:
        """Refuse files that are missing or cut short."""
        for place in self._metadata.storage_data.values():
            name, end = end_of_place(place)
            if not (self.folder / name).is_file() or (self.folder / name).stat().st_size < end:
                raise ValueError(f"{name} is missing or cut short")

    def _open_files(self) -> None:
        """Refuse an index that names other pieces than torch's."""
        for key, stored in self.contents.tensors.items():
            for piece in stored.pieces:
                if self._index(key, piece.bounds) not in self._metadata.storage_data:
                    raise ValueError(f"{key.piece(piece.bounds)} is missing")

    def _foreign_contents(self) -> Contents:
        values: dict[str, Stored] = {}
        states: dict[str, dict[str, Stored]] = {}
        for key, name in self._names.items():
            entry = self._metadata.state_dict_metadata[name]
            if isinstance(entry, TensorStorageMetadata):
                chunks = (tuple(zip(chunk.offsets, chunk.sizes)) for chunk in entry.chunks)
                pieces = tuple(Piece(0, bounds) for bounds in chunks)
                stored = Stored(tuple(entry.size), entry.properties.dtype, pieces)
                stored.require_complete(key)
                if key.state is None:
                    values[key.name] = stored
                else:
                    states.setdefault(key.name, {})[key.state] = stored
        save = sha256_of((self.folder / METADATA).read_bytes())
        return Contents(FORMAT, VERSION, save, "", 1, values, states, form="dcp")

    def _foreign_optimizer(self) -> SavedOptimizer | None:
        """Return groups and numbers of an optimizer whose groups list parameters by name."""
        options: dict[int, dict[str, Any]] = {}
        others: dict[str, dict[str, Any]] = {}
        for name, path in self._paths.items():
            if path[0] in OPTIMIZERS and len(path) == 4 and path[1] == GROUPS:
                options.setdefault(int(path[2]), {})[str(path[3])] = self._read_entry(name)
        for key, name in self._names.items():
            is_bytes = isinstance(self._metadata.state_dict_metadata[name], BytesStorageMetadata)
            if key.state is not None and is_bytes:
                others.setdefault(key.name, {})[key.state] = self._read_entry(name)
        if not options:
            return None
        groups = []
        for _, group in sorted(options.items()):
            names = group.pop("params", [])
            if not all(isinstance(name, str) for name in names):
                raise ValueError("an optimizer whose parameters have no names: get_state_dict()")
            groups.append(ParameterGroup(tuple(names), group))
        return SavedOptimizer(UNKNOWN_CLASS, tuple(groups), others)

    def _form(self, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
        return StoredTensor(shape, dtype)

    def _read_part(self, key: Key, piece: Piece, bounds: Bounds) -> Tensor:
        starts, lengths = (torch.Size(pair[side] for pair in bounds) for side in (0, 1))
        part = torch.empty(lengths, dtype=self.stored(key).dtype, device="cpu")
        self._read(LoadItemType.TENSOR, self._index(key, piece.bounds), starts, part)
        return part

    def _read_entry(self, name: str) -> Any:
        """Return an entry that is no tensor of a parameter, such as an option of a group."""
        entry = self._metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            value = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            zeros = torch.Size([0] * value.ndim)
            self._read(LoadItemType.TENSOR, MetadataIndex(name, zeros), zeros, value)
            return value
        nothing = torch.empty(0)
        return self._read(LoadItemType.BYTE_IO, MetadataIndex(name), torch.Size([0]), nothing)

    def _read(
        self, kind: LoadItemType, index: MetadataIndex, starts: torch.Size, target: Tensor
    ) -> Any:
        """Read a part of an entry into `target`, or return the value of one that is no tensor."""
        zeros = torch.Size([0] * len(starts))
        item = ReadItem(kind, index, zeros, index, starts, target.shape)
        planner = _OneEntry(target)
        self._reader.read_data(LoadPlan([item]), planner).wait()
        return planner.value

    def _index(self, key: Key, bounds: Bounds) -> MetadataIndex:
        return MetadataIndex(self._names[key], torch.Size(start for start, _ in bounds))


class _OneEntry(DefaultLoadPlanner):
    """Takes one entry from torch's reader: a tensor into `target`, anything else as `value`."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target, self.value = target, None

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self._target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the tensor is the target itself."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self.value = from_file(value)
