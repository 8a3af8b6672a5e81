"""Collect the states of an optimizer by parameter names, and load them into another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from autopar._torch.tensors import local_of
from autopar.errors import InvalidInput, error_text
from autopar.runtime.checkpoints.checkpoint_files import (
    Checkpoint,
    Key,
    ParameterGroup,
    SavedOptimizer,
)
from autopar.runtime.checkpoints.plain_data import plain
from autopar.runtime.optimizers.local_optimizer import LocalOptimizer
from autopar.runtime.parameters.placing import local_boxes
from autopar.text.units import counted

Parameters = Mapping[str, Tensor]
NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True)
class OptimizerStates:
    """The states of one optimizer on one rank: tensors, and all that is saved beside them."""

    tensors: dict[Key, Tensor]
    saved: SavedOptimizer


def collect_states(optimizer: torch.optim.Optimizer, parameters: Parameters) -> OptimizerStates:
    """Collect what `optimizer` keeps of `parameters`, or refuse it."""
    groups = group_names(optimizer, parameters)
    state_dict = _read_state_dict(optimizer, groups)
    tensors: dict[Key, Tensor] = {}
    others: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(name for names in groups for name in names):
        holder = _state_holder(optimizer, parameters[name])
        for key, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor):
                if holder is None or not _is_distribution_known(value, holder):
                    raise _unknown_distribution(name, key, value, parameters[name])
                tensors[Key(name, key)] = value
            elif any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                raise InvalidInput(
                    "a checkpoint holds what an optimizer keeps of one parameter each, as tensors",
                    got=f"{key} of {type(optimizer).__name__}: a {type(value).__name__} of tensors",
                    remedy="use another optimizer, or save the module without it",
                )
            else:
                others.setdefault(name, {})[key] = plain(value, f"{key} of {name}")
    saved_groups = []
    for number, (names, group) in enumerate(zip(groups, state_dict["param_groups"])):
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        options = plain(options, f"the options of group {number}")
        saved_groups.append(ParameterGroup(tuple(names), options))
    saved = SavedOptimizer(_class_name(optimizer), tuple(saved_groups), others)
    return OptimizerStates(tensors, saved)


def _read_state_dict(
    optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return an optimizer's state dict; refuse one with more than groups and parameters' states."""
    state_dict: Any = optimizer.state_dict()
    kind, keys = type(optimizer).__name__, {"state", "param_groups"}
    sizes = [len(names) for names in groups]
    wrong = ""
    if not isinstance(state_dict, dict) or state_dict.keys() != keys:
        is_dict = isinstance(state_dict, dict)
        other = set(state_dict) - keys if is_dict else type(state_dict).__name__
        wrong = f"a state_dict() with {other or 'less'}"
    elif [len(group["params"]) for group in state_dict["param_groups"]] != sizes:
        wrong = "a state_dict() with other groups than it has"
    else:
        for number, states in state_dict["state"].items():
            if type(number) is not int or not 0 <= number < sum(sizes):
                wrong = f"a state under {number!r}, which is no parameter"
            elif not isinstance(states, dict) or not all(isinstance(key, str) for key in states):
                odd = next((key for key in states if not isinstance(key, str)), states)
                wrong = f"a state of a parameter under {odd!r}, which is no name"
    if wrong:
        raise InvalidInput(
            "an optimizer keeps what it keeps of one parameter each, under names",
            got=f"{kind}: {wrong}",
            remedy="use another optimizer, or save the module without it, and the rest as extra=",
        )
    return state_dict


def group_names(optimizer: Any, parameters: Parameters) -> list[list[str]]:
    """Return the names of the parameters in each group; refuse foreign parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInput(
            "an optimizer is a torch.optim.Optimizer",
            got=f"a value of type {type(optimizer).__name__}",
            remedy="give the optimizer that was made of this module's parameters(); of several, "
            "save and load each with the module under a path of its own",
        )
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    if any("" in group for group in groups):
        raise InvalidInput(
            "an optimizer is saved and loaded with the module whose parameters it updates",
            got=f"{type(optimizer).__name__} with parameters that are not this module's",
            remedy="make it of this module's parameters(), after parallelize()",
        )
    return groups


def merge_saved(by_rank: Sequence[SavedOptimizer | None]) -> SavedOptimizer | None:
    """Merge the optimizers of all ranks, whose stages have different parameters."""
    optimizers = [optimizer for optimizer in by_rank if optimizer is not None]
    if not optimizers:
        return None
    kinds = {(optimizer.kind, len(optimizer.groups)) for optimizer in optimizers}
    if len(optimizers) != len(by_rank) or len(kinds) != 1:
        raise InvalidInput(
            "all ranks save an optimizer of one class, with as many groups",
            got=", ".join(
                f"{kind} with {counted(count, 'group')}" for kind, count in sorted(kinds)
            ),
            remedy="make the optimizer in the same way on every rank; a group may be empty",
        )
    groups = tuple(
        ParameterGroup(tuple(dict.fromkeys(n for p in parts for n in p.names)), parts[0].options)
        for parts in zip(*(optimizer.groups for optimizer in optimizers))
    )
    others = {name: states for rank in optimizers for name, states in rank.others.items()}
    return SavedOptimizer(optimizers[0].kind, groups, others)


def require_loadable(
    saved: Checkpoint, optimizer: torch.optim.Optimizer, parameters: Parameters
) -> None:
    """Refuse an optimizer of another class or with other groups than the saved one."""
    groups, saved_optimizer = group_names(optimizer, parameters), saved.beside.optimizer
    if saved_optimizer is None:
        raise InvalidInput(
            "an optimizer is loaded from a checkpoint that was saved with one",
            got=f"{saved.folder}, without an optimizer",
            remedy="load(path, module), or save(path, module, optimizer)",
        )
    if saved_optimizer.kind not in ("", _class_name(optimizer)):  # "": another program saved it
        raise InvalidInput(
            "an optimizer is of the class that was saved",
            got=f"{_class_name(optimizer)}; {saved.folder} has {saved_optimizer.kind}",
            remedy="make that one, or load the module without an optimizer",
        )
    present = [set(names) for names in groups]
    expected = [{*group.names} & parameters.keys() for group in saved_optimizer.groups]
    if present != expected:
        only = [
            f"group {number}: {_first_names(now - then)}; saved were {_first_names(then - now)}"
            for number, (now, then) in enumerate(zip(present, expected))
            if now != then
        ]
        raise InvalidInput(
            "an optimizer has the parameters of the one that was saved, in the same groups",
            got="\n".join(only) or f"{counted(len(present), 'group')}; saved were {len(expected)}",
            remedy="make its groups as they were when it was saved",
        )


def load_states(
    saved: Checkpoint, optimizer: torch.optim.Optimizer, parameters: Parameters
) -> None:
    """Load the saved states into an optimizer that `require_loadable` has accepted."""
    saved_optimizer = saved.beside.optimizer
    assert saved_optimizer is not None
    state: dict[int, dict[str, Any]] = {}
    groups, param_groups = group_names(optimizer, parameters), []
    numbers = iter(range(sum(map(len, groups))))
    for names, group in zip(groups, saved_optimizer.groups):
        param_groups.append({**group.options, "params": [next(numbers) for _ in names]})
        for number, name in zip(param_groups[-1]["params"], names):
            if (holder := _state_holder(optimizer, parameters[name])) is None:
                continue
            values = dict(saved_optimizer.others.get(name, {}))
            for key in saved.contents.states.get(name, {}):
                values[key] = _read_state(saved, Key(name, key), holder)
            if values:
                state[number] = values
    try:
        optimizer.load_state_dict({"state": state, "param_groups": param_groups})
    except Exception as error:
        raise InvalidInput(
            "an optimizer takes up the states that it gave",
            got=f"{type(optimizer).__name__}.load_state_dict(): {error_text(error)}",
            remedy="load the module without it",
        ) from error
    for number, name in enumerate(name for names in groups for name in names):
        loaded = optimizer.state[parameters[name]] if number in state else {}
        for key, value in state.get(number, {}).items():
            # Torch brings states to the dtype of their parameter: a float32 master would be lost.
            if isinstance(value, Tensor) and key in loaded and loaded[key].dtype != value.dtype:
                loaded[key] = value


def _state_holder(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """Return the tensor like which this rank keeps states of a parameter; None: it keeps none."""
    if isinstance(optimizer, LocalOptimizer):
        return optimizer.state_holder(parameter)
    return parameter


def _read_state(saved: Checkpoint, key: Key, parameter: Tensor) -> Tensor:
    """Read a state, cut like its parameter if it has its shape, and else replicated."""
    shape = saved.stored(key).shape
    full = tuple((0, size) for size in shape)
    device = local_of(parameter).device
    is_like = key.state != "step" and shape == tuple(parameter.shape)
    if not isinstance(parameter, DTensor) or not (is_like or shape):
        value = saved.read(key, full)
        return value if key.state == "step" else value.to(device)
    boxes, dim = local_boxes(parameter) if is_like else ([full], 0)
    pieces = [saved.read(key, bounds) for bounds in boxes]
    value = (torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]).to(device)
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements if is_like else [Replicate()] * parameter.device_mesh.ndim,
        run_check=False,
        shape=torch.Size(shape),
        stride=parameter.stride() if is_like else value.stride(),
    )


def _is_distribution_known(value: Tensor, parameter: Tensor) -> bool:
    """Return whether it is certain which part of a state this rank has."""
    if isinstance(value, DTensor):
        is_sum = any(placement.is_partial() for placement in value.placements)
        return isinstance(parameter, DTensor) and not is_sum
    return not isinstance(parameter, DTensor) or not value.ndim


def _unknown_distribution(name: str, key: str, value: Tensor, parameter: Tensor) -> InvalidInput:
    where = value.placements if isinstance(value, DTensor) else "a plain tensor"
    return InvalidInput(
        "a state of an optimizer is a number, or a DTensor that is no sum of what ranks have",
        got=f"{key} of {name}, of shape {list(value.shape)}, {where}, for a parameter of "
        f"{list(parameter.shape)}",
        remedy="use another optimizer, or save and load the module without it",
    )


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _first_names(names: set[str]) -> str:
    return ", ".join(sorted(names)[:4]) or "none"
