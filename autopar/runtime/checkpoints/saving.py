"""Saving: a parallel module and its optimizer as a checkpoint that loads under any other plan.

    save("run/100", pm, optimizer, extra={"step": 100})
    step = load("run/100", pm, optimizer)["step"]

Tensors are those of the whole model, under its names: each rank writes some of the pieces that it
holds, every piece once, and reads what its own cover of them. So it makes no difference on which
mesh, in how many stages or processes, and on which backend a checkpoint was written.
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
from typing import Any

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
    digest,
    require_storable,
)
from autopar.runtime.checkpoints.checkpoint_folders import (
    VERSION,
    Place,
    accepted,
    is_there,
    require_apart,
)
from autopar.runtime.checkpoints.checkpoint_writing import (
    Job,
    Part,
    Saving,
    Whole,
    await_thread,
    divided,
    require_makes_whole,
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
    OptimizerStates,
    Parameters,
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
class Listing:
    """What a rank has to save."""

    parts: tuple[Part, ...]
    optimizer: SavedOptimizer | None


def _tell_of_failures() -> None:
    """Those that nobody waited for."""
    for saving in _under_way.values():
        saving.tell()


atexit.register(_tell_of_failures)
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

    def ready() -> Path:
        whole = accepted(path)
        await_thread(whole)
        return whole

    def prepare() -> tuple[Checkpoint, dict[str, Tensor], Parameters]:
        saved, held = Checkpoint(where), _held(module)
        saved.require_unchanged(*work_share(backend))
        parameters = dict(module.named_parameters())
        _require_fitting(saved, module, held)
        if optimizer is not None:
            require_loadable(saved, optimizer, parameters)
        return saved, held, parameters

    def take() -> None:
        for name, value in held.items():
            boxes, dim = local_boxes(value)
            read = [saved.read(Key(name), bounds) for bounds in boxes]
            local_of(value).copy_(torch.cat(read, dim) if len(read) > 1 else read[0])
        if saved.beside.loss_scale is not None and module.loss_scale is not None:
            module.loss_scale = saved.beside.loss_scale
        torch.set_rng_state(saved.beside.random)

    with torch.inference_mode(False), torch.no_grad():
        where = run_on_all_ranks(backend, ready, "ap.load()")
        saved, held, parameters = run_on_all_ranks(backend, prepare)
        opened = gather_values(backend, (saved.contents.id, optimizer is not None))
        run_on_all_ranks(backend, lambda: _require_same(opened))
        if optimizer is not None:
            before = dict(vars(optimizer))
            try:
                run_on_all_ranks(backend, lambda: load_states(saved, optimizer, parameters))
            except Exception:
                vars(optimizer).clear()
                vars(optimizer).update(before)
                raise
        run_on_all_ranks(backend, take)
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

    def look() -> tuple[Path, dict[str, Tensor]]:
        return accepted(path), _held(module)

    place, held = run_on_all_ranks(backend, look, "ap.save_safetensors()")
    everyones = gather_values(
        backend, {n: StoredTensor(tuple(v.shape), v.dtype) for n, v in held.items()}
    )
    every = {name: kind for one in everyones for name, kind in one.items()}
    kinds = {name: every[name] for name in module.saved_names}
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
        return (
            {place.name: kinds} if max_shard_size is None else split_shards(kinds, max_shard_size)
        )

    def whole(names: Iterable[str]) -> Iterator[Tensor]:
        for name in names:
            yield backend.collect({name: held[name]} if name in held else {})[name]

    shards = run_on_all_ranks(backend, accept)
    files = _Files(folder)

    def take_places() -> None:
        if is_first:
            files.take_places(shards, place)

    try:
        with backend.guard():
            for name, those in shards.items():
                values = whole(those)
                if is_first:
                    files.write(name, those, values)
                deque(values, maxlen=0)  # ranks make all of them together, also on a full disk
        run_on_all_ranks(backend, take_places)
    finally:
        files.discard()


class _Files:
    """Files of weights in a folder, which take their places when all are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._new: list[NewFile] = []
        self._failed: OSError | None = None

    def write(self, name: str, kinds: Mapping[str, StoredTensor], values: Iterator[Tensor]) -> None:
        """Write one of them, until the disk refuses it."""
        if self._failed is None:
            try:
                self._new.append(new := NewFile(self._folder / name))
                write_safetensors(new.file, kinds, values)
                new.finish()
            except OSError as error:
                self._failed = error

    def take_places(self, shards: Mapping[str, Mapping[str, StoredTensor]], place: Path) -> None:
        """Replace an earlier model, whose index goes first and comes last."""
        with writing(place, "a whole model"):
            if self._failed is not None:
                raise self._failed
            if len(shards) > 1:
                self._new.append(new := NewFile(self._folder / INDEX))
                new.file.write(make_index(shards))
                new.finish()
            if place == self._folder:
                remove_old_shards(self._folder, shards)
            for new in self._new:
                new.take_place()

    def discard(self) -> None:
        """Delete what has not taken its place."""
        for new in self._new:
            new.discard()


def is_saved(path: str | PathLike[str]) -> bool:
    """Return whether a path holds a checkpoint whose files and pieces exist in full length.

    A damaged checkpoint gives a warning. The bytes of pieces are only checked by `load`.

    Args:
        path: The folder that was given to `save`.
    """
    place = accepted(path)
    try:
        Checkpoint(place)
    except InvalidInput as error:
        if is_there(place) or (place / CHECKPOINT).exists():
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
    """What this rank is to write, into a folder that is there."""
    backend, rank = module.backend, rank_of(module.backend)

    def alone() -> tuple[Path, dict[Key, Tensor], OptimizerStates | None]:
        where = accepted(path)
        require_apart(where)
        states = None
        if optimizer is not None:
            states = collect_states(optimizer, dict(module.named_parameters()))
        tensors = {Key(name): value for name, value in _held(module).items()}
        tensors |= {} if states is None else states.tensors
        for key, value in tensors.items():
            require_storable(key, value.dtype)
        return where, tensors, states

    where, tensors, states = run_on_all_ranks(backend, alone, call)
    parts = {
        Part(key, tuple(value.shape), value.dtype, bounds): piece
        for key, value in tensors.items()
        for bounds, piece in _pieces(value)
    }
    own = Listing(tuple(parts), None if states is None else states.saved)
    listings = gather_values(backend, own, everywhere=False)

    def arrange() -> tuple[Place, Whole, list[list[tuple[str, Part]]]] | None:
        if rank != 0:
            return None
        await_thread(where)
        place = Place(where)
        saved = merge_saved([one.optimizer for one in listings])
        scale = None if module.loss_scale is None else replace(module.loss_scale)
        random, given = torch.get_rng_state(), plain(extra, "extra")
        beside = Beside(VERSION, place.id, random, scale, saved, given).to_bytes()
        shares, contents = divided([one.parts for one in listings], place.id, digest(beside))
        require_makes_whole(contents, module.saved_names)
        contents = replace(contents, plan=digest(module.plan.file))
        whole = Whole(contents, beside, module.plan.file)
        place.begin()
        return place, whole, shares

    arranged = run_on_all_ranks(backend, arrange)
    whole = None if arranged is None else arranged[1]
    given = [] if arranged is None else [(arranged[0].id, share) for share in arranged[2]]
    save, share = scatter_values(backend, given)
    place = Place(where, save) if arranged is None else arranged[0]
    mine = {key: (part, local_of(parts[part]).detach()) for key, part in share}
    job = Job(place, rank, mine, whole)
    try:
        run_on_all_ranks(backend, place.require_seen)
    except Exception:
        job.discard()
        raise
    return job


def _pieces(value: Tensor) -> list[tuple[Bounds, Tensor]]:
    """What lies here of a tensor: a piece of the whole, or several."""
    boxes, dim = local_boxes(value)
    if len(boxes) == 1:
        return [(boxes[0], value)]
    pieces = local_of(value).detach().split([bounds[dim][1] for bounds in boxes], dim)
    return list(zip(boxes, pieces))


def _held(module: ParallelModule) -> dict[str, Tensor]:
    """What of the state dict lies here, each tensor once."""
    named = [module.named_parameters, module.named_buffers]
    every = {name: value for each in named for name, value in each(remove_duplicate=False)}
    return {name: every[name] for name in module.saved_names if name in every}


def _require_module(module: Any) -> None:
    if not isinstance(module, ParallelModule):
        raise InvalidInput(
            "what is saved and loaded is a parallel module",
            got=f"a value of type {type(module).__name__}",
            remedy="give what parallelize() has made; torch.save(model.state_dict()) is for others",
        )


def _require_same(opened: list[tuple[str, bool]]) -> None:
    """Refuse what ranks have opened if it is not one checkpoint, for the same things."""
    if len(set(opened)) == 1:
        return
    told = [
        f"rank {rank}: save {save}, {'with' if has_optimizer else 'without'} an optimizer"
        for rank, (save, has_optimizer) in enumerate(opened)
    ]
    raise InvalidInput(
        "all ranks load one checkpoint, all with an optimizer or all without",
        got="\n".join(told),
        remedy="give all ranks the same path on a disk that they share, and the same arguments",
    )


def _require_fitting(saved: Checkpoint, module: ParallelModule, held: Mapping[str, Tensor]) -> None:
    """Refuse the checkpoint of another model."""
    there, here = saved.contents.values, module.saved_names
    wrong = [f"missing: {name}" for name in here if name not in there]
    wrong += [f"unexpected: {name}" for name in there if name not in set(here)]
    for name, value in held.items():
        if name in there:
            shape, dtype = there[name].shape, there[name].dtype
            if shape != tuple(value.shape) or not is_convertible(dtype, value.dtype):
                own = f"{list(value.shape)} {value.dtype}"
                wrong.append(f"misshapen: {name} {list(shape)} {dtype}, not {own}")
    if wrong:
        raise InvalidInput(
            "a checkpoint has the names and shapes of the model's parameters and buffers, and "
            "their dtypes, but for the precision of floating-point numbers",
            got="\n".join(wrong[:8]),
            remedy="load it into the model that was saved",
        )
