"""What an optimizer keeps, by the names of a model's parameters: out of it, and into another."""

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
from autopar.runtime.checkpoints.checkpoint_files import Checkpoint, Group, Key, SavedOptimizer
from autopar.runtime.checkpoints.plain_data import plain
from autopar.runtime.parameters.placing import local_boxes
from autopar.text.units import counted

Parameters = Mapping[str, Tensor]
NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True)
class OptimizerStates:
    """Of one optimizer, on one rank."""

    tensors: dict[Key, Tensor]
    saved: SavedOptimizer


def collect_states(optimizer: torch.optim.Optimizer, parameters: Parameters) -> OptimizerStates:
    """What `optimizer` keeps of `parameters`; or refuse it."""
    groups = group_names(optimizer, parameters)
    given = _read_state_dict(optimizer, groups)
    tensors: dict[Key, Tensor] = {}
    others: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(name for names in groups for name in names):
        for key, value in given["state"].get(number, {}).items():
            if isinstance(value, Tensor):
                if not _is_distribution_known(value, parameters[name]):
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
    made = []
    for number, (names, group) in enumerate(zip(groups, given["param_groups"])):
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        made.append(Group(tuple(names), plain(options, f"the options of group {number}")))
    return OptimizerStates(tensors, SavedOptimizer(_class_name(optimizer), tuple(made), others))


def _read_state_dict(
    optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """The state dict of an optimizer that has nothing but groups, and by the number of a parameter
    what it keeps of this one; or refuse it."""
    given: Any = optimizer.state_dict()
    kind, keys = type(optimizer).__name__, {"state", "param_groups"}
    wrong = ""
    if not isinstance(given, dict) or given.keys() != keys:
        other = set(given) - keys if isinstance(given, dict) else type(given).__name__
        wrong = f"a state_dict() with {other or 'less'}"
    elif [len(group["params"]) for group in given["param_groups"]] != [len(one) for one in groups]:
        wrong = "a state_dict() with other groups than it has"
    else:
        count = sum(len(names) for names in groups)
        for number, states in given["state"].items():
            if type(number) is not int or not 0 <= number < count:
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
    return given


def group_names(optimizer: Any, parameters: Parameters) -> list[list[str]]:
    """The names of the parameters in each group."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInput(
            "an optimizer is a torch.optim.Optimizer",
            got=f"a value of type {type(optimizer).__name__}",
            remedy="give the optimizer that was made of this module's parameters(); of several, "
            "save and load each with the module under a path of its own",
        )
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    if any("" in group for group in found):
        raise InvalidInput(
            "an optimizer is saved and loaded with the module whose parameters it updates",
            got=f"{type(optimizer).__name__} with parameters that are not this module's",
            remedy="make it of this module's parameters(), after parallelize()",
        )
    return found


def merge_saved(everyones: Sequence[SavedOptimizer | None]) -> SavedOptimizer | None:
    """That of all ranks, which hold the parameters of different stages."""
    given = [one for one in everyones if one is not None]
    if not given:
        return None
    kinds = {(one.kind, len(one.groups)) for one in given}
    if len(given) != len(everyones) or len(kinds) != 1:
        raise InvalidInput(
            "all ranks save an optimizer of one class, with as many groups",
            got=", ".join(
                f"{kind} with {counted(count, 'group')}" for kind, count in sorted(kinds)
            ),
            remedy="make the optimizer in the same way on every rank; a group may be empty",
        )
    groups = tuple(
        Group(tuple(dict.fromkeys(name for one in same for name in one.names)), same[0].options)
        for same in zip(*(one.groups for one in given))
    )
    others = {name: states for one in given for name, states in one.others.items()}
    return SavedOptimizer(given[0].kind, groups, others)


def require_loadable(
    saved: Checkpoint, optimizer: torch.optim.Optimizer, parameters: Parameters
) -> None:
    """Refuse an optimizer that is not like the one that was saved."""
    groups, there = group_names(optimizer, parameters), saved.beside.optimizer
    if there is None:
        raise InvalidInput(
            "an optimizer is loaded from a checkpoint that was saved with one",
            got=f"{saved.folder}, without an optimizer",
            remedy="load(path, module), or save(path, module, optimizer)",
        )
    if there.kind != _class_name(optimizer):
        raise InvalidInput(
            "an optimizer is of the class that was saved",
            got=f"{_class_name(optimizer)}; {saved.folder} has {there.kind}",
            remedy="make that one, or load the module without an optimizer",
        )
    here = [set(names) for names in groups]
    asked = [{*group.names} & parameters.keys() for group in there.groups]
    if here != asked:
        only = [
            f"group {number}: {_first_names(own - other)}; saved were {_first_names(other - own)}"
            for number, (own, other) in enumerate(zip(here, asked))
            if own != other
        ]
        raise InvalidInput(
            "an optimizer has the parameters of the one that was saved, in the same groups",
            got="\n".join(only) or f"{counted(len(here), 'group')}; saved were {len(asked)}",
            remedy="make its groups as they were when it was saved",
        )


def load_states(
    saved: Checkpoint, optimizer: torch.optim.Optimizer, parameters: Parameters
) -> None:
    """Give an optimizer that was found to be loadable what was saved."""
    there = saved.beside.optimizer
    assert there is not None
    state: dict[int, dict[str, Any]] = {}
    groups, every = group_names(optimizer, parameters), []
    numbers = iter(range(sum(map(len, groups))))
    for names, group in zip(groups, there.groups):
        every.append({**group.options, "params": [next(numbers) for _ in names]})
        for number, name in zip(every[-1]["params"], names):
            own = dict(there.others.get(name, {}))
            for key in saved.contents.states.get(name, {}):
                own[key] = _read_state(saved, Key(name, key), parameters[name])
            if own:
                state[number] = own
    try:
        optimizer.load_state_dict({"state": state, "param_groups": every})
    except Exception as error:
        raise InvalidInput(
            "an optimizer takes up the states that it gave",
            got=f"{type(optimizer).__name__}.load_state_dict(): {error_text(error)}",
            remedy="load the module without it",
        ) from error
    for number, name in enumerate(name for names in groups for name in names):
        kept = optimizer.state[parameters[name]] if number in state else {}
        for key, value in state.get(number, {}).items():
            # Torch brings states to the dtype of their parameter: a float32 master would be lost.
            if isinstance(value, Tensor) and key in kept and kept[key].dtype != value.dtype:
                kept[key] = value


def _read_state(saved: Checkpoint, key: Key, parameter: Tensor) -> Tensor:
    """A state, where its parameter lies if it has its shape; others are whole everywhere."""
    shape = saved.stored(key).shape
    whole = tuple((0, size) for size in shape)
    device = local_of(parameter).device
    is_like = key.state != "step" and shape == tuple(parameter.shape)
    if not isinstance(parameter, DTensor) or not (is_like or shape):
        value = saved.read(key, whole)
        return value if key.state == "step" else value.to(device)
    boxes, dim = local_boxes(parameter) if is_like else ([whole], 0)
    read = [saved.read(key, bounds) for bounds in boxes]
    value = (torch.cat(read, dim) if len(read) > 1 else read[0]).to(device)
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements if is_like else [Replicate()] * parameter.device_mesh.ndim,
        run_check=False,
        shape=torch.Size(shape),
        stride=parameter.stride() if is_like else value.stride(),
    )


def _is_distribution_known(value: Tensor, parameter: Tensor) -> bool:
    """Whether it is certain what a rank has of a state."""
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
