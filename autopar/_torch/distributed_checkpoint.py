"""Private parts of torch.distributed.checkpoint: where a file holds an entry, and safe metadata."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as metadata_classes
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

_PLAIN_CLASSES = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}


def place_of(result: WriteResult) -> tuple[int, int]:
    """Return the first byte of a written entry in its file, and its number of bytes."""
    info: _StorageInfo = result.storage_data
    return info.offset, info.length


def make_place(file: str, offset: int, length: int) -> Any:
    """Return what metadata records of an entry: its file, first byte and number of bytes."""
    return _StorageInfo(file, offset, length)


def end_of_place(place: Any) -> tuple[str, int]:
    """Return the file of an entry that metadata records, and the byte after its last."""
    return place.relative_path, place.offset + place.length


def read_metadata(path: Path) -> Metadata:
    """Read the metadata of a checkpoint, which is a pickle, and run no other code of it."""
    with open(path, "rb") as file:
        metadata = _Unpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path.name} holds a {type(metadata).__name__}")
    return metadata


class _Unpickler(pickle.Unpickler):
    """Reads only what metadata consists of."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of metadata, a dtype, or one of a few plain classes; refuse the rest."""
        if module == metadata_classes.__name__ and "." not in name:
            kind = getattr(metadata_classes, name, None)
            if isinstance(kind, type) and kind.__module__ == module:
                return kind
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) in _PLAIN_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"metadata of a checkpoint has no {module}.{name}")
