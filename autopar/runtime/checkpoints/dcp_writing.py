"""DCP writing: a checkpoint that torch.distributed.checkpoint reads without autopar.

    run/100/__0_0.distcp      pieces of parameters, buffers and optimizer states of rank 0
            .metadata         torch's index of these files
            beside.pt, plan.json, checkpoint.json      as in a checkpoint in autopar's own form

Ranks write without a collective, so that a thread can write while training goes on: each leaves a
file with the places of its entries, which rank 0 reads for the index.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from autopar._torch.distributed_checkpoint import make_place, place_of
from autopar.base.files import sync
from autopar.runtime.checkpoints.checkpoint_files import Contents, Stored
from autopar.runtime.checkpoints.checkpoint_folders import dcp_file_name, write_in_folder
from autopar.runtime.checkpoints.checkpoint_writing import Job, Part
from autopar.runtime.checkpoints.dcp_entries import (
    METADATA,
    EntryPath,
    entry_name,
    other_entries,
    path_of,
)
from autopar.runtime.parameters.placing import Bounds


class DcpJob(Job):
    """The part of a save in DCP form that one rank writes."""

    def write(self) -> None:
        """Write this rank's file, and one with the places of its entries."""
        pieces = {
            _index_of(path_of(part.key), part.bounds): (part, value)
            for part, value in self._parts.values()
        }
        planner = _PiecePlanner({index: value for index, (_, value) in pieces.items()})
        items = [_item(index, part) for index, (part, _) in pieces.items()]
        if self._shared is not None:
            items += planner.plan_others(other_entries(self._shared.optimizer))
        with self.folders.writing():
            writer = FileSystemWriter(self.folders.new)
            named_by_rank = writer.prepare_global_plan([SavePlan(items)] * (self.rank + 1))
            results = writer.write_data(named_by_rank[self.rank], planner).wait() if items else []
            places = [
                (result.index.fqn, result.index.offset, *place_of(result)) for result in results
            ]
            write_in_folder(self.folders.new, _places(self.rank), json.dumps(places).encode())
        self._parts.clear()

    def written_names(self, contents: Contents) -> list[str]:
        return [_places(rank) for rank in range(contents.files)]

    def complete(self, contents: Contents) -> list[str]:
        """Write torch's index from what the ranks left, and return the names of all files."""
        shared, folder = self._shared, self.folders.new
        assert shared is not None
        names, storage = [METADATA], dict[MetadataIndex, Any]()
        for rank in range(contents.files):
            places = json.loads((folder / _places(rank)).read_bytes())
            (folder / _places(rank)).unlink()
            names += [dcp_file_name(rank)] if places else []
            for name, offset, start, length in places:
                index = MetadataIndex(name, None if offset is None else torch.Size(offset))
                storage[index] = make_place(dcp_file_name(rank), start, length)
        planner = _PiecePlanner({})
        entries: dict[str, Any] = {}
        for item in planner.plan_others(other_entries(shared.optimizer)):
            entries[item.index.fqn] = _entry_of(item)
        paths: dict[str, EntryPath] = dict(planner.mappings)
        for key, stored in contents.tensors.items():
            names_of_tensor = [path_of(key)]
            if key.state is None:
                aliases = (alias for alias, first in shared.tied.items() if first == key.name)
                names_of_tensor += [path_of(key._replace(name=alias)) for alias in aliases]
            for path in names_of_tensor:  # tied tensors are stored once, under all of their names
                paths[entry_name(path)] = path
                entries[entry_name(path)] = _tensor_entry(stored)
                for piece in stored.pieces:
                    first = storage[_index_of(names_of_tensor[0], piece.bounds)]
                    storage[_index_of(path, piece.bounds)] = first
        metadata = Metadata(entries, planner_data=paths, storage_data=storage)
        write_in_folder(folder, METADATA, pickle.dumps(metadata))
        sync(folder)
        return names


class _PiecePlanner(DefaultSavePlanner):
    """Hands pieces of tensors in memory to torch's writer, and the entries of a state dict."""

    def __init__(self, pieces: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._pieces = pieces
        self.mappings = {}

    def plan_others(self, state_dict: dict[str, Any]) -> list[WriteItem]:
        """Return the items of a nested state dict."""
        if not state_dict:
            return []
        self.set_up_planner(state_dict, is_coordinator=True)
        return self.create_local_plan().items

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the value of an item."""
        piece = self._pieces.get(write_item.index)
        return super().resolve_data(write_item) if piece is None else piece


def _places(rank: int) -> str:
    """Return the name of the file with the places of the entries that a rank has written."""
    return f"written-{rank}"


def _index_of(path: EntryPath, bounds: Bounds) -> MetadataIndex:
    return MetadataIndex(entry_name(path), torch.Size(start for start, _ in bounds))


def _item(index: MetadataIndex, part: Part) -> WriteItem:
    data = TensorWriteData(
        _chunk(part.bounds), TensorProperties(dtype=part.dtype), torch.Size(part.shape)
    )
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _chunk(bounds: Bounds) -> ChunkStorageMetadata:
    starts, lengths = (torch.Size(pair[side] for pair in bounds) for side in (0, 1))
    return ChunkStorageMetadata(starts, lengths)


def _tensor_entry(stored: Stored) -> TensorStorageMetadata:
    chunks = [_chunk(piece.bounds) for piece in stored.pieces]
    return TensorStorageMetadata(TensorProperties(stored.dtype), torch.Size(stored.shape), chunks)


def _entry_of(item: WriteItem) -> BytesStorageMetadata | TensorStorageMetadata:
    data = item.tensor_data
    if data is None:
        return BytesStorageMetadata()
    return TensorStorageMetadata(data.properties, data.size, [data.chunk])
