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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from autopar._torch.tensors import local_of
from autopar.errors import InvalidInput
from autopar.runtime.checkpoints.checkpoint_files import (
    Beside,
    Checkpoint,
    Contents,
    Key,
    SavedOptimizer,
    require_storable,
    sha256_of,
)
from autopar.runtime.checkpoints.checkpoint_folders import (
    DCP_INDEX,
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
from autopar.runtime.parameters.weight_files import CHECKPOINT

SaveFormat = Literal["autopar", "dcp"]


@dataclass(frozen=True)
class RankContents:
    """The path of a save, and the tensors and optimizer data that a rank holds."""

    path: Path
    tensors: Mapping[Part, Tensor]
    optimizer: SavedOptimizer | None


@dataclass(frozen=True)
class _Division:
    """The parts of a module's tensors that each rank writes, until the tensors change."""

    parts_by_rank: list[tuple[Part, ...]]
    shares: list[list[tuple[str, Part]]]
    contents: Contents

    @classmethod
    def of(cls, parts_by_rank: list[tuple[Part, ...]], names: Sequence[str]) -> _Division:
        """Divide the parts that ranks hold; refuse parts that do not make whole tensors."""
        shares, contents = divide_parts(parts_by_rank)
        require_complete(contents, names)
        return cls(parts_by_rank, shares, contents)


@dataclass(frozen=True)
class _LastSave:
    """A rank's memory of the last save of a module, which spares the next one."""

    parts: tuple[Part, ...]  # that it held
    share: list[tuple[str, Part]]  # that it wrote
    division: _Division | None  # None except on rank 0


class _Arrangement(NamedTuple):
    """Rank 0's folders, its shared files, and the parts that each rank writes."""

    folders: SaveFolders
    shared: SharedFiles
    division: _Division


@atexit.register
def _print_failures() -> None:
    for saving in _under_way.values():
        saving.print_failure()


_under_way: weakref.WeakKeyDictionary[ParallelModule, Saving] = weakref.WeakKeyDictionary()
_last_saves: weakref.WeakKeyDictionary[ParallelModule, _LastSave] = weakref.WeakKeyDictionary()


def save(
    path: str | PathLike[str],
    module: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    asynchronous: bool = False,
    format: SaveFormat = "autopar",
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
        format: "autopar", or "dcp", which `torch.distributed.checkpoint.load` reads without
            autopar, under the names "model" and "optimizer".

    Returns:
        A `Saving` with `wait()` if `asynchronous`, else None.
    """
    require_module(module)
    _require_format(format)
    if (earlier := _under_way.pop(module, None)) is not None and not earlier.is_over:
        earlier.wait()
    call = f"ap.save(asynchronous={bool(asynchronous)}, format={format!r})"
    job = _prepared(path, module, optimizer, extra, call=call, format=format)
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

    Or one of torch.distributed.checkpoint: of `dcp.save({"model": ..., "optimizer": ...})` with
    the state dicts of `get_state_dict(model, optimizer)`, or of `dcp.save(model.state_dict())`.

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
    require_module(module)
    backend = module.backend

    def resolve() -> Path:
        resolved = resolve_path(path)
        join_writer(resolved)
        return resolved

    def open_and_check() -> Checkpoint:
        saved = open_checkpoint(resolved)
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
        backend.stale_weights.clear()
        if saved.beside.loss_scale is not None and module.loss_scale is not None:
            module.loss_scale = saved.beside.loss_scale
        if saved.beside.random is not None:
            torch.set_rng_state(saved.beside.random)

    with torch.inference_mode(False), torch.no_grad():
        resolved = run_on_all_ranks(backend, resolve, "ap.load()")
        local_tensors, parameters = local_tensors_of(module), dict(module.named_parameters())
        saved = run_on_all_ranks(backend, open_and_check)
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


def is_saved(path: str | PathLike[str]) -> bool:
    """Return whether a path holds a checkpoint whose files and pieces exist in full length.

    A damaged checkpoint gives a warning. The bytes of pieces are only checked by `load`.

    Args:
        path: The folder that was given to `save`.
    """
    place = resolve_path(path)
    try:
        open_checkpoint(place)
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
    *,
    call: str,
    format: SaveFormat,
) -> Job:
    """Return the part of a save that this rank writes; rank 0 has made its folder."""
    backend, rank = module.backend, rank_of(module.backend)

    def collect() -> RankContents:
        resolved = resolve_path(path)
        require_elsewhere(resolved)
        tensors = {Key(name): value for name, value in local_tensors_of(module).items()}
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
    last, parts = _last_saves.get(module), tuple(local.tensors)
    changed = parts if last is None or last.parts != parts else None
    ranks = gather_values(backend, (changed, local.optimizer), everywhere=False)

    def arrange() -> _Arrangement | None:
        if rank != 0:
            return None
        join_writer(local.path)
        folders = SaveFolders(local.path)
        merged_optimizer = merge_saved([optimizer for _, optimizer in ranks])
        scale = None if module.loss_scale is None else replace(module.loss_scale)
        random, data = torch.get_rng_state(), plain(extra, "extra")
        file = Beside(VERSION, folders.id, random, scale, merged_optimizer, data).to_bytes()
        division = None if last is None else last.division
        if division is None or any(new is not None for new, _ in ranks):
            old_parts = [()] * len(ranks) if division is None else division.parts_by_rank
            new_parts = [old if new is None else new for (new, _), old in zip(ranks, old_parts)]
            division = _Division.of(new_parts, module.saved_names)
        index = replace(
            division.contents,
            id=folders.id,
            beside=sha256_of(file),
            plan=sha256_of(module.plan.file),
            form="dcp" if format == "dcp" else "safetensors",
        )
        folders.begin()
        tied = module.program.captured.tied
        files = SharedFiles(index, file, module.plan.file, merged_optimizer, tied)
        return _Arrangement(folders, files, division)

    arranged = run_on_all_ranks(backend, arrange)
    messages: list[tuple[str, list[tuple[str, Part]] | None]] = []
    if arranged is not None:
        division = arranged.division
        is_known = last is not None and division is last.division  # ranks remember their shares
        messages = [(arranged.folders.id, None if is_known else s) for s in division.shares]
    save, share = scatter_values(backend, messages)
    if share is None:
        assert last is not None
        share = last.share
    _last_saves[module] = _LastSave(parts, share, None if arranged is None else arranged.division)
    folders = SaveFolders(local.path, save) if arranged is None else arranged.folders
    values = {key: (part, local_of(local.tensors[part]).detach()) for key, part in share}
    job = _job_class(format)(folders, rank, values, None if arranged is None else arranged.shared)
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


def local_tensors_of(module: ParallelModule) -> dict[str, Tensor]:
    """Return the tensors of the state dict that this rank holds, each once."""
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= module.named_buffers(remove_duplicate=False)
    return {name: tensors[name] for name in module.saved_names if name in tensors}


def _job_class(format: SaveFormat) -> type[Job]:
    if format == "autopar":
        return Job
    from autopar.runtime.checkpoints.dcp_writing import DcpJob  # loads torch's checkpoints

    return DcpJob


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint in the form that it has."""
    if not ((find_folder(path) or path) / DCP_INDEX).is_file():
        return Checkpoint(path)
    from autopar.runtime.checkpoints.dcp_reading import DcpCheckpoint  # loads torch's checkpoints

    return DcpCheckpoint(path)


def _require_format(format: Any) -> None:
    if format not in get_args(SaveFormat):
        raise InvalidInput(
            "a checkpoint is in autopar's form or in that of torch.distributed.checkpoint",
            got=f"format={format!r}",
            remedy='format="autopar" or format="dcp"; ap.save_safetensors writes weights alone',
        )


def require_module(module: Any) -> None:
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
    known = {*names, *module.program.captured.tied}
    wrong += [f"unexpected: {name}" for name in stored if name not in known]
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
