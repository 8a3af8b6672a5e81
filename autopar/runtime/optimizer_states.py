"""What an optimizer keeps, by the names of a model's parameters: out of it, and into another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar._torch import local_of
from autopar.errors import InvalidInput
from autopar.runtime.checkpoint_files import Checkpoint, Group, SavedOptimizer
from autopar.runtime.placing import bounds_of

Parameters = Mapping[str, Tensor]
NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True)
class States:
    """Of one optimizer, on one rank."""

    tensors: dict[tuple[str, str], Tensor]  # by parameter and state
    saved: SavedOptimizer


def states_of(optimizer: torch.optim.Optimizer, parameters: Parameters) -> States:
    """What `optimizer` keeps of `parameters`; or refuse it."""
    groups = names_in(optimizer, parameters)
    tensors: dict[tuple[str, str], Tensor] = {}
    others: dict[str, dict[str, Any]] = {}
    for name in (name for names in groups for name in names):
        for key, value in optimizer.state.get(parameters[name], {}).items():
            if isinstance(value, Tensor):
                if not _is_known(key, value, parameters[name]):
                    raise _unknown(name, key, value.shape, parameters[name])
                tensors[name, key] = value
            elif any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                raise InvalidInput(
                    "a checkpoint holds what an optimizer keeps of one parameter each, as tensors",
                    got=f"{key} of {type(optimizer).__name__}: a {type(value).__name__} of tensors",
                    remedy="use another optimizer, or save the module without it",
                )
            else:
                others.setdefault(name, {})[key] = value
    options = [
        {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        for group in optimizer.param_groups
    ]
    made = tuple(Group(tuple(names), given) for names, given in zip(groups, options))
    return States(tensors, SavedOptimizer(_kind(optimizer), made, others))


def names_in(optimizer: Any, parameters: Parameters) -> list[list[str]]:
    """The names of the parameters in each group."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInput(
            "an optimizer is a torch.optim.Optimizer",
            got=f"a value of type {type(optimizer).__name__}",
            remedy="give the optimizer that was made of this module's parameters()",
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


def merged(everyones: Sequence[SavedOptimizer | None]) -> SavedOptimizer | None:
    """That of all ranks, which hold the parameters of different stages."""
    given = [one for one in everyones if one is not None]
    if not given:
        return None
    kinds = {(one.kind, len(one.groups)) for one in given}
    if len(given) != len(everyones) or len(kinds) != 1:
        raise InvalidInput(
            "all ranks save an optimizer of one class, with as many groups",
            got=", ".join(f"{kind} with {count} groups" for kind, count in sorted(kinds)),
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
    groups, there = names_in(optimizer, parameters), saved.beside.optimizer
    if there is None:
        raise InvalidInput(
            "an optimizer is loaded from a checkpoint that was saved with one",
            got=f"{saved.folder}, without an optimizer",
            remedy="load(path, module), or save(path, module, optimizer)",
        )
    if there.kind != _kind(optimizer):
        raise InvalidInput(
            "an optimizer is of the class that was saved",
            got=f"{_kind(optimizer)}; {saved.folder} has {there.kind}",
            remedy="make that one, or load the module without an optimizer",
        )
    here = [set(names) for names in groups]
    asked = [{*group.names} & parameters.keys() for group in there.groups]
    if here != asked:
        only = [
            f"group {number}: {_some(own - other)}; saved were {_some(other - own)}"
            for number, (own, other) in enumerate(zip(here, asked))
            if own != other
        ]
        raise InvalidInput(
            "an optimizer has the parameters of the one that was saved, in the same groups",
            got="\n".join(only) or f"{len(here)} groups; saved were {len(asked)}",
            remedy="make its groups as they were when it was saved",
        )
    for name in (name for names in groups for name in names):
        for key, stored in saved.contents.states.get(name, {}).items():
            is_piece = isinstance(parameters[name], DTensor) and len(stored.shape)
            if is_piece and not _is_like(key, stored.shape, parameters[name]):
                raise _unknown(name, key, stored.shape, parameters[name])


def load_states(
    saved: Checkpoint, optimizer: torch.optim.Optimizer, parameters: Parameters
) -> None:
    """Give an optimizer that was found to be loadable what was saved."""
    there = saved.beside.optimizer
    assert there is not None
    state: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    for names, group in zip(names_in(optimizer, parameters), there.groups):
        groups.append({**group.options, "params": [*range(number, number + len(names))]})
        for name in names:
            own = dict(there.others.get(name, {}))
            for key in saved.contents.states.get(name, {}):
                own[key] = _placed(saved, name, key, parameters[name])
            if own:
                state[number] = own
            number += 1
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _placed(saved: Checkpoint, name: str, key: str, parameter: Tensor) -> Tensor:
    """A state, where its parameter lies if it has its shape; counters are whole everywhere."""
    shape = saved.stored(name, key).shape
    if not isinstance(parameter, DTensor) or not _is_like(key, shape, parameter):
        return saved.read(name, key, tuple((0, size) for size in shape))
    local = saved.read(name, key, bounds_of(parameter)).to(local_of(parameter).device)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _is_like(key: str, shape: Sequence[int], parameter: Tensor) -> bool:
    """Whether a state has an element for each of its parameter's; "step" is torch's counter."""
    return key != "step" and tuple(shape) == tuple(parameter.shape)


def _is_known(key: str, value: Tensor, parameter: Tensor) -> bool:
    """Whether it is certain what a rank has of a state."""
    if isinstance(value, DTensor) and isinstance(parameter, DTensor):
        is_there = value.placements == parameter.placements
        return is_there and _is_like(key, value.shape, parameter)
    return not isinstance(parameter, DTensor) or not value.ndim


def _unknown(name: str, key: str, shape: Sequence[int], parameter: Tensor) -> InvalidInput:
    return InvalidInput(
        "a state of an optimizer is a number, or has the shape and the place of its parameter",
        got=f"{key} of {name}, of shape {list(shape)} for a parameter of {list(parameter.shape)}",
        remedy="use another optimizer, or save and load the module without it",
    )


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:4]) or "none"
