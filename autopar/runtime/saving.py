"""Saving: a parallel module and its optimizer as a checkpoint that loads under any other plan.

    save("run/100", pm, optimizer, extra={"step": 100})
    step = load("run/100", pm, optimizer)["step"]

Tensors are those of the whole model, under its names: each rank writes some of the pieces that it
holds, every piece once, and reads what its own cover of them. So it makes no difference on which
mesh, in how many stages or processes, and on which backend a checkpoint was written.
"""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar._torch import local_of
from autopar.errors import InvalidInput
from autopar.runtime import checkpoint_files as files
from autopar.runtime.checkpoint_files import Beside, Checkpoint
from autopar.runtime.checkpoint_writing import Job, Key, Part, Saving, divided
from autopar.runtime.module import ParallelModule
from autopar.runtime.optimizer_states import (
    States,
    load_states,
    merged,
    require_loadable,
    states_of,
)
from autopar.runtime.placing import bounds_of
from autopar.runtime.safetensors import (
    INDEX,
    Held,
    forget_shards,
    in_shards,
    index_of,
    open_weights,
    require_dtype,
    require_folder,
    write,
)
from autopar.runtime.together import gathered, handed_out, on_all, rank_of


@dataclass(frozen=True)
class Listing:
    """What a rank has to save."""

    parts: tuple[Part, ...]
    optimizer: files.SavedOptimizer | None


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
    """Write a checkpoint between two steps: parameters, buffers, what the optimizer keeps with the
    options of its groups, the loss scale, the state of random numbers, the plan, and rank 0's
    `extra`, plain data and tensors. All ranks save together, into one folder; gradients are left.

    It takes the place of an earlier one at this path when it is whole, and not before.
    `asynchronous`: values are copied to the host, and a thread writes them; training may go on.
    What is given back then has `wait()`; the next save of the module waits for this one by itself.
    """
    path = _accepted(path, module)
    _finish_earlier(module)
    job = _prepared(path, module, optimizer, extra)
    if asynchronous:
        job.copy()
        _under_way[module] = saving = Saving(module, job)
        return saving
    on_all(module.backend, job.write)
    on_all(module.backend, job.commit if job.rank == 0 else _nothing)
    return None


def load(
    path: str | PathLike[str],
    module: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Take up a checkpoint that `save` wrote, under any plan and on any number of ranks: its
    `extra`. All ranks load together. What does not fit is refused before anything has changed.

    The optimizer is of the class that was saved, with the same parameters in its groups; their
    options become those that were saved. Random numbers go on on all ranks as rank 0's did.
    """
    path = _accepted(path, module)
    _finish_earlier(module)

    def prepare() -> tuple[Checkpoint, dict[str, Tensor]]:
        saved = Checkpoint(path)
        held = _held(module)
        _require_fitting(saved, module, held)
        if optimizer is not None:
            require_loadable(saved, optimizer, dict(module.named_parameters()))
        return saved, held

    saved, held = on_all(module.backend, prepare)

    def take() -> None:
        with torch.no_grad():
            for name, value in held.items():
                part = saved.read(name, "", bounds_of(value))
                local_of(value).copy_(part)
        if optimizer is not None:
            load_states(saved, optimizer, dict(module.named_parameters()))
        if saved.beside.loss_scale is not None and module.loss_scale is not None:
            module.loss_scale = saved.beside.loss_scale
        torch.set_rng_state(saved.beside.random)

    on_all(module.backend, take)
    return saved.beside.extra


def save_safetensors(
    path: str | PathLike[str], module: ParallelModule, *, max_shard_size: float | None = None
) -> None:
    """Write the whole model as a safetensors file under its original names, as `weights=` and
    other programs read it; what is tied stands under its first name. All ranks write together: they
    send rank 0 one tensor at a time.

    `max_shard_size`: the path is a folder, of files with at most as many bytes and an index of
    them, under the names that other programs look for; other files in it stay."""
    path, backend, held = _accepted(path, module), module.backend, _held(module)
    kinds = {name: Held(tuple(v.shape), v.dtype) for name, v in held.items()}
    everyones = gathered(backend, kinds)
    every = {name: kind for one in everyones for name, kind in one.items()}
    kinds = {name: every[name] for name in module.saved_names}

    def whole(names: Iterable[str]) -> Iterator[Tensor]:
        for name in names:
            yield backend.collect({name: held[name]} if name in held else {})[name]

    def accept() -> dict[str, dict[str, Held]]:
        for name, kind in kinds.items():
            require_dtype(name, kind.dtype)
        if max_shard_size is not None:
            require_folder(path, max_shard_size)
        elif path.exists():
            open_weights(path)  # anything else does not go away
        folder.mkdir(parents=True, exist_ok=True)
        return {path.name: kinds} if max_shard_size is None else in_shards(kinds, max_shard_size)

    folder = path.parent if max_shard_size is None else path
    shards = on_all(backend, accept)
    is_first = rank_of(backend) == 0
    with backend.guard():
        for file, those in shards.items():
            if is_first:
                write(files.beside(folder / file, "new"), those, whole(those))
            else:
                deque(whole(those), maxlen=0)
        if is_first:
            if max_shard_size is not None:
                forget_shards(folder, shards)
            for file in shards:
                files.beside(folder / file, "new").replace(folder / file)
            if len(shards) > 1:
                files.put(folder, INDEX, index_of(shards))
            files.sync(folder)
    on_all(backend, _nothing)


def is_saved(path: str | PathLike[str]) -> bool:
    """Whether `save` has written a checkpoint there that is whole, which `load` would take up."""
    return files.is_there(_whole_path(path))


def _prepared(
    path: Path, module: ParallelModule, optimizer: torch.optim.Optimizer | None, extra: Any
) -> Job:
    """What this rank is to write, into a folder that is there."""
    backend, rank = module.backend, rank_of(module.backend)

    def alone() -> tuple[dict[Key, Tensor], States | None]:
        parameters = dict(module.named_parameters())
        states = None if optimizer is None else states_of(optimizer, parameters)
        tensors: dict[Key, Tensor] = {(name, ""): value for name, value in _held(module).items()}
        if states is not None:
            tensors |= states.tensors
        for (name, state), value in tensors.items():
            require_dtype(files.label_of(name, state), value.dtype)
        _require_plain(extra)
        return tensors, states

    tensors, states = on_all(backend, alone)
    parts = {Part(key, tuple(v.shape), v.dtype, bounds_of(v)): v for key, v in tensors.items()}
    own = Listing(tuple(parts), None if states is None else states.saved)
    listings = gathered(backend, own, everywhere=False)
    shares, contents = divided([one.parts for one in listings]) if rank == 0 else ([], None)
    share = handed_out(backend, shares)
    others: dict[str, Any] = {"plan": module.plan}

    def start() -> None:
        if rank == 0:
            saved = merged([one.optimizer for one in listings])
            scale = None if module.loss_scale is None else replace(module.loss_scale)
            made = Beside(torch.get_rng_state(), scale, saved, extra)
            others["beside"] = made.to_bytes()
            files.begin(path)

    on_all(backend, start)
    on_all(backend, lambda: files.require_seen(path))
    return Job(
        path,
        rank,
        {key: (part, local_of(parts[part]).detach()) for key, part in share},
        contents,
        others,
    )


def _held(module: ParallelModule) -> dict[str, Tensor]:
    """What of the state dict lies here, each tensor once."""
    named = [module.named_parameters, module.named_buffers]
    every = {name: value for each in named for name, value in each(remove_duplicate=False)}
    return {name: every[name] for name in module.saved_names if name in every}


def _accepted(path: Any, module: Any) -> Path:
    """The whole of a path; or refuse what is no path, or no parallel module."""
    whole = _whole_path(path)
    if not isinstance(module, ParallelModule):
        raise InvalidInput(
            "what is saved and loaded is a parallel module",
            got=f"a value of type {type(module).__name__}",
            remedy="give what parallelize() has made; torch.save(model.state_dict()) is for others",
        )
    return whole


def _whole_path(path: Any) -> Path:
    if not isinstance(path, str | PathLike):
        raise InvalidInput(
            "a checkpoint has a path",
            got=f"a value of type {type(path).__name__}",
            remedy='ap.save("run/100", module)',
        )
    return Path(path).absolute()


def _finish_earlier(module: ParallelModule) -> None:
    """What a thread still writes of this module is whole before anything else."""
    if (earlier := _under_way.pop(module, None)) is not None:
        earlier.wait()


def _require_plain(extra: Any) -> None:
    if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(extra)):
        raise InvalidInput(
            "extra holds plain tensors, which are rank 0's",
            got="a DTensor in extra",
            remedy="give its full_tensor()",
        )


def _require_fitting(saved: Checkpoint, module: ParallelModule, held: Mapping[str, Tensor]) -> None:
    """Refuse the checkpoint of another model."""
    there, here = saved.contents.values, module.saved_names
    wrong = [f"missing: {name}" for name in here if name not in there]
    wrong += [f"unexpected: {name}" for name in there if name not in set(here)]
    for name, value in held.items():
        if name in there:
            shape, dtype = there[name].shape, saved.dtype(name)
            if shape != tuple(value.shape) or not torch.can_cast(dtype, value.dtype):
                own = f"{list(value.shape)} {value.dtype}"
                wrong.append(f"misshapen: {name} {list(shape)} {dtype}, not {own}")
    if wrong:
        raise InvalidInput(
            "a checkpoint has the names and shapes of the model's parameters and buffers",
            got="\n".join(wrong[:8]),
            remedy="load it into the model that was saved",
        )


def _nothing() -> None:
    return
