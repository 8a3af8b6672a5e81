"""Save a parallel module and its optimizer as a checkpoint that loads under any other plan.

    save("run/100", pm, optimizer, extra={"step": 100})
    step = load("run/100", pm, optimizer)["step"]

Tensors have the names and shapes of the whole model. Every piece is written once, by one of the
ranks that hold it, and each rank reads the parts that it needs. So the mesh, the stages, the
processes and the backend may differ between saving and loading.
"""

from __future__ import annotations

import atexit
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar._torch.tensors import local_of
from autopar.base.files import NewFile, writing
from autopar.errors import InvalidInput
from autopar.runtime.checkpoints.checkpoint_files import (
    Beside,
    Checkpoint,
    Key,
    SavedOptimizer,
    require_storable,
    sha256_of,
)
from autopar.runtime.checkpoints.checkpoint_folders import (
    VERSION,
    SaveFolders,
    find_folder,
    require_elsewhere,
    resolve_path,
)
from autopar.runtime.checkpoints.checkpoint_writing import (
    Job,
    Part,
    Saving,
    SharedFiles,
    divide_parts,
    join_writer,
    require_complete,
)
from autopar.runtime.checkpoints.plain_data import plain
from autopar.runtime.module.call_agreement import (
    gather_values,
    rank_of,
    run_on_all_ranks,
    scatter_values,
    work_share,
)
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.optimizer_states import (
    collect_states,
    load_states,
    merge_saved,
    require_loadable,
)
from autopar.runtime.parameters.placing import Bounds, is_convertible, local_boxes
from autopar.runtime.parameters.weight_files import (
    CHECKPOINT,
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


@dataclass(frozen=True)
class RankContents:
    """The path of a save, and the tensors and optimizer data that a rank holds."""

    path: Path
    tensors: Mapping[Part, Tensor]
    optimizer: SavedOptimizer | None


class _Arrangement(NamedTuple):
    """Rank 0's folders, its shared files, and the parts that each rank writes."""

    folders: SaveFolders
    shared: SharedFiles
    shares: list[list[tuple[str, Part]]]


@atexit.register
def _print_failures() -> None:
    for saving in _under_way.values():
        saving.print_failure()


_under_way: weakref.WeakKeyDictionary[ParallelModule, Saving] = weakref.WeakKeyDictionary()


def save(
    path: str | PathLike[str],
    module: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    asynchronous: bool = False,
) -> Saving | None:
    """Write a checkpoint between two steps. All ranks save together, into one folder.

    It holds parameters, buffers, optimizer states with the options of groups, the loss scale, the
    state of random numbers and the plan, but no gradients. It takes the place of an earlier
    checkpoint at this path once it is complete; anything else at the path is never replaced.

    Args:
        path: The folder of the checkpoint, which all ranks reach.
        module: The parallel module.
        optimizer: An optimizer of the module's parameters. None: its states are not saved.
        extra: Plain data and tensors of the caller's, such as the step; rank 0's are saved.
        asynchronous: Copy values to the host and let a thread write them, so that training goes
            on. Default: False. The next save of the module waits for this one by itself.

    Returns:
        A `Saving` with `wait()` if `asynchronous`, else None.
    """
    _require_module(module)
    if (earlier := _under_way.pop(module, None)) is not None and not earlier.is_over:
        earlier.wait()
    call = f"ap.save(asynchronous={bool(asynchronous)})"
    job = _prepared(path, module, optimizer, extra, call)
    try:
        if asynchronous:
            run_on_all_ranks(module.backend, job.copy)
            _under_way[module] = saving = Saving(module, job)
            return saving
        run_on_all_ranks(module.backend, job.write)
        run_on_all_ranks(module.backend, job.commit)
    except Exception:
        job.discard()
        raise
    return None


def load(
    path: str | PathLike[str],
    module: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Load a checkpoint that `save` wrote, under any plan and on any number of ranks.

    All ranks load together. A checkpoint that does not fit is refused before anything changes.
    Random numbers go on on all ranks as those of rank 0 did.

    Args:
        path: The folder of the checkpoint.
        module: A parallel module of the same model, which takes the saved values.
        optimizer: An optimizer of the saved class, with the same parameters in its groups. Their
            options become the saved ones. None: optimizer states are not loaded.

    Returns:
        The `extra` that was saved.
    """
    _require_module(module)
    backend = module.backend

    def resolve() -> Path:
        resolved = resolve_path(path)
        join_writer(resolved)
        return resolved

    def open_checkpoint() -> Checkpoint:
        saved = Checkpoint(resolved)
        saved.require_unchanged(*work_share(backend))
        _require_fitting(saved, module, local_tensors)
        if optimizer is not None:
            require_loadable(saved, optimizer, parameters)
        return saved

    def load_tensors() -> None:
        for name, value in local_tensors.items():
            boxes, dim = local_boxes(value)
            read = [saved.read(Key(name), bounds) for bounds in boxes]
            local_of(value).copy_(torch.cat(read, dim) if len(read) > 1 else read[0])
        if saved.beside.loss_scale is not None and module.loss_scale is not None:
            module.loss_scale = saved.beside.loss_scale
        torch.set_rng_state(saved.beside.random)

    with torch.inference_mode(False), torch.no_grad():
        resolved = run_on_all_ranks(backend, resolve, "ap.load()")
        local_tensors, parameters = _local_tensors(module), dict(module.named_parameters())
        saved = run_on_all_ranks(backend, open_checkpoint)
        opened = gather_values(backend, (saved.contents.id, optimizer is not None))
        run_on_all_ranks(backend, lambda: _require_same(opened))
        if optimizer is not None:
            before = dict(vars(optimizer))
            try:
                run_on_all_ranks(backend, lambda: load_states(saved, optimizer, parameters))
            except Exception:
                optimizer.__dict__ = before
                raise
        run_on_all_ranks(backend, load_tensors)
    return saved.beside.extra


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
    _require_module(module)
    backend, is_first = module.backend, rank_of(module.backend) == 0

    place = run_on_all_ranks(backend, lambda: resolve_path(path), "ap.save_safetensors()")
    local_tensors = _local_tensors(module)
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


def is_saved(path: str | PathLike[str]) -> bool:
    """Return whether a path holds a checkpoint whose files and pieces exist in full length.

    A damaged checkpoint gives a warning. The bytes of pieces are only checked by `load`.

    Args:
        path: The folder that was given to `save`.
    """
    place = resolve_path(path)
    try:
        Checkpoint(place)
    except InvalidInput as error:
        if find_folder(place) or (place / CHECKPOINT).exists():
            warnings.warn(str(error), stacklevel=2)
        return False
    return True


def _prepared(
    path: Any,
    module: ParallelModule,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    call: str,
) -> Job:
    """Return the part of a save that this rank writes; rank 0 has made its folder."""
    backend, rank = module.backend, rank_of(module.backend)

    def collect() -> RankContents:
        resolved = resolve_path(path)
        require_elsewhere(resolved)
        tensors = {Key(name): value for name, value in _local_tensors(module).items()}
        saved_optimizer = None
        if optimizer is not None:
            states = collect_states(optimizer, dict(module.named_parameters()))
            saved_optimizer = states.saved
            tensors |= states.tensors
        for key, value in tensors.items():
            require_storable(key, value.dtype)
        pieces = {
            Part(key, tuple(value.shape), value.dtype, bounds): piece
            for key, value in tensors.items()
            for bounds, piece in _pieces(value)
        }
        return RankContents(resolved, pieces, saved_optimizer)

    local = run_on_all_ranks(backend, collect, call)
    ranks = gather_values(backend, (tuple(local.tensors), local.optimizer), everywhere=False)

    def arrange() -> _Arrangement | None:
        if rank != 0:
            return None
        join_writer(local.path)
        folders = SaveFolders(local.path)
        merged_optimizer = merge_saved([optimizer for _, optimizer in ranks])
        scale = None if module.loss_scale is None else replace(module.loss_scale)
        random, data = torch.get_rng_state(), plain(extra, "extra")
        file = Beside(VERSION, folders.id, random, scale, merged_optimizer, data).to_bytes()
        shares, index = divide_parts([parts for parts, _ in ranks], folders.id, sha256_of(file))
        require_complete(index, module.saved_names)
        index = replace(index, plan=sha256_of(module.plan.file))
        folders.begin()
        return _Arrangement(folders, SharedFiles(index, file, module.plan.file), shares)

    arranged = run_on_all_ranks(backend, arrange)
    messages = [] if arranged is None else [(arranged.folders.id, s) for s in arranged.shares]
    save, share = scatter_values(backend, messages)
    folders = SaveFolders(local.path, save) if arranged is None else arranged.folders
    values = {key: (part, local_of(local.tensors[part]).detach()) for key, part in share}
    job = Job(folders, rank, values, None if arranged is None else arranged.shared)
    try:
        run_on_all_ranks(backend, folders.require_seen)
    except Exception:
        job.discard()
        raise
    return job


def _pieces(value: Tensor) -> list[tuple[Bounds, Tensor]]:
    """Return the pieces of a tensor that this rank holds, with their bounds in the full one."""
    boxes, dim = local_boxes(value)
    if len(boxes) == 1:
        return [(boxes[0], value)]
    pieces = local_of(value).detach().split([bounds[dim][1] for bounds in boxes], dim)
    return list(zip(boxes, pieces))


def _local_tensors(module: ParallelModule) -> dict[str, Tensor]:
    """Return the tensors of the state dict that this rank holds, each once."""
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= module.named_buffers(remove_duplicate=False)
    return {name: tensors[name] for name in module.saved_names if name in tensors}


def _require_module(module: Any) -> None:
    if not isinstance(module, ParallelModule):
        raise InvalidInput(
            "what is saved and loaded is a parallel module",
            got=f"a value of type {type(module).__name__}",
            remedy="give what parallelize() has made; torch.save(model.state_dict()) is for others",
        )


def _require_same(opened: list[tuple[str, bool]]) -> None:
    """Refuse a load in which ranks opened different checkpoints, or only some an optimizer."""
    if len(set(opened)) == 1:
        return
    descriptions = [
        f"rank {rank}: save {save}, {'with' if has_optimizer else 'without'} an optimizer"
        for rank, (save, has_optimizer) in enumerate(opened)
    ]
    raise InvalidInput(
        "all ranks load one checkpoint, all with an optimizer or all without",
        got="\n".join(descriptions),
        remedy="give all ranks the same path on a disk that they share, and the same arguments",
    )


def _require_fitting(
    saved: Checkpoint, module: ParallelModule, tensors: Mapping[str, Tensor]
) -> None:
    """Refuse the checkpoint of another model."""
    stored, names = saved.contents.values, module.saved_names
    wrong = [f"missing: {name}" for name in names if name not in stored]
    wrong += [f"unexpected: {name}" for name in stored if name not in set(names)]
    for name, value in tensors.items():
        if name in stored:
            shape, dtype = stored[name].shape, stored[name].dtype
            if shape != tuple(value.shape) or not is_convertible(dtype, value.dtype):
                expected = f"{list(value.shape)} {value.dtype}"
                wrong.append(f"misshapen: {name} {list(shape)} {dtype}, not {expected}")
    if wrong:
        raise InvalidInput(
            "a checkpoint has the names and shapes of the model's parameters and buffers, and "
            "their dtypes, but for the precision of floating-point numbers",
            got="\n".join(wrong[:8]),
            remedy="load it into the model that was saved",
        )
