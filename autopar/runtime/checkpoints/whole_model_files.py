"""Whole model files: the weights of a parallel module in one safetensors file, or in shards.

Other programs read them, `from_pretrained` of transformers among them, and so does `weights=`.
Optimizer states are not in them; a checkpoint has those (saving.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path

from torch import Tensor

from autopar.base.files import NewFile, writing
from autopar.runtime.checkpoints.checkpoint_folders import resolve_path
from autopar.runtime.checkpoints.saving import local_tensors_of, require_module
from autopar.runtime.module.call_agreement import gather_values, rank_of, run_on_all_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.weight_files import (
    INDEX,
    StoredTensor,
    make_index,
    remove_old_shards,
    require_dtype,
    require_file,
    require_folder,
    split_shards,
    write_safetensors,
)


def save_safetensors(
    path: str | PathLike[str], module: ParallelModule, *, max_shard_size: float | None = None
) -> None:
    """Write the whole model as a safetensors file, as `weights=` and other programs read it.

    All ranks take part: they send rank 0 one tensor at a time. Tensors have their original names;
    tied ones stand under their first name.

    Args:
        path: The file, or with `max_shard_size` a folder, in which other files stay.
        module: The parallel module.
        max_shard_size: The most bytes of each of several files, which have an index and the names
            that other programs look for. None: one file.
    """
    require_module(module)
    backend, is_first = module.backend, rank_of(module.backend) == 0

    place = run_on_all_ranks(backend, lambda: resolve_path(path), "ap.save_safetensors()")
    local_tensors = local_tensors_of(module)
    local_kinds = {n: StoredTensor(tuple(v.shape), v.dtype) for n, v in local_tensors.items()}
    all_kinds = {
        name: k for rank in gather_values(backend, local_kinds) for name, k in rank.items()
    }
    kinds = {name: all_kinds[name] for name in module.saved_names}
    folder = place.parent if max_shard_size is None else place

    def accept() -> dict[str, dict[str, StoredTensor]]:
        for name, kind in kinds.items():
            require_dtype(name, kind.dtype)
        if max_shard_size is None:
            require_file(place)
        else:
            require_folder(place, max_shard_size)
        if is_first:
            with writing(place, "a whole model"):
                folder.mkdir(parents=True, exist_ok=True)
        size = max_shard_size
        return {place.name: kinds} if size is None else split_shards(kinds, size)

    def full_tensors(names: Iterable[str]) -> Iterator[Tensor]:
        for name in names:
            local = {name: local_tensors[name]} if name in local_tensors else {}
            yield backend.collect(local)[name]

    shards = run_on_all_ranks(backend, accept)
    files = _Files(folder)

    try:
        with backend.guard():
            for name, shard in shards.items():
                values = full_tensors(shard)
                if is_first:
                    files.write(name, shard, values)
                deque(values, maxlen=0)  # ranks collect all tensors together, also on a full disk
        run_on_all_ranks(backend, lambda: files.take_places(shards, place) if is_first else None)
    finally:
        files.discard()


class _Files:
    """Weight files in a folder, which replace earlier ones when all are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._new: list[NewFile] = []
        self._error: OSError | None = None

    def write(self, name: str, kinds: Mapping[str, StoredTensor], values: Iterator[Tensor]) -> None:
        """Write a file, unless the disk has refused an earlier one."""
        if self._error is None:
            try:
                self._new.append(new := NewFile(self._folder / name))
                write_safetensors(new.file, kinds, values)
                new.finish()
            except OSError as error:
                self._error = error

    def take_places(self, shards: Mapping[str, Mapping[str, StoredTensor]], place: Path) -> None:
        """Replace an earlier model: delete its index first, and write the new one last."""
        with writing(place, "a whole model"):
            if self._error is not None:
                raise self._error
            if len(shards) > 1:
                self._new.append(new := NewFile(self._folder / INDEX))
                new.file.write(make_index(shards))
                new.finish()
            if place == self._folder:
                remove_old_shards(self._folder, shards)
            for new in self._new:
                new.take_place()

    def discard(self) -> None:
        """Delete the files that have not taken their places."""
        for new in self._new:
            new.discard()
