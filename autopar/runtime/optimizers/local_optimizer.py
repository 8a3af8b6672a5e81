"""Run an optimizer of torch on the tensors of this rank, under the parameters of a parallel module.

    optimizer.param_groups, .state      the module's parameters (DTensors), and states like them
    while step() runs                   the local tensors of the same parameters, and their states

A step of DTensors costs Python for each operator of each parameter; a step of local tensors is one
fused or foreach call. Both views share memory. The class of the optimizer is a subclass of the
user's, with its name, so that schedules, checkpoints and `isinstance` see what they expect.

A parameter that an owner updates whole (`owner_exchange.py`) has states on that rank alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from autopar._torch.optimizers import step_without_hooks
from autopar._torch.tensors import local_of, piece_of, placement_of, plain_attributes
from autopar.errors import InvalidInput
from autopar.runtime.optimizers.owner_exchange import OwnerExchange, PieceView
from autopar.runtime.parameters.placing import narrow_to, read_piece

_GRADIENT = attrgetter("grad")


@dataclass(frozen=True, eq=False)
class UpdatedParameter:
    """A parameter of the module, and the tensor that the optimizer updates in its place."""

    parameter: Tensor
    tensor: Tensor  # in the memory of this rank's piece; or whole, at its owner
    is_owned: bool = False  # a rank that owns it updates it whole

    @property
    def has_states(self) -> bool:
        """Return whether this rank keeps the states of the parameter."""
        return not self.tensor.is_meta

    def shown_state(self, value: Any) -> Any:
        """Return a state as a DTensor like the parameter; one that an owner keeps unchanged."""
        parameter = self.parameter
        is_cut = isinstance(value, Tensor) and value.ndim and not self.is_owned
        if not is_cut or not isinstance(parameter, DTensor):
            return value
        mesh, options = parameter.device_mesh, dict[str, Any](run_check=False)
        if value.shape != self.tensor.shape:
            return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, **options)
        options |= {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(value, mesh, parameter.placements, **options)

    def local_state(self, value: Any) -> Any:
        """Return this rank's part of a state that is given as a DTensor or as a whole tensor."""
        parameter = self.parameter
        if not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
            return value
        if not isinstance(value, DTensor):
            if self.is_owned or not value.ndim or value.shape != parameter.shape:
                return value
            view = PieceView.of(parameter)
            read = partial(narrow_to, value)
            return read_piece(read, view.layout, value.shape, view.mesh, view.rank).clone()
        is_like = value.shape == parameter.shape and value.placements == parameter.placements
        if self.is_owned or not (is_like or all(p.is_replicate() for p in value.placements)):
            raise InvalidInput(
                "a state is placed as its parameter is, or replicated",
                got=f"{value.placements} for a parameter of {parameter.placements}",
                remedy="ap.save() and ap.load(), which load states under any other plan",
            )
        return local_of(value)


class UpdatedGroup:
    """The parameters of one group of an optimizer, with the tensors that it updates."""

    def __init__(self, updated: Sequence[UpdatedParameter], *, has_fused: bool) -> None:
        """`has_fused`: fused kernels are used, unless the user chooses otherwise."""
        self.updated, self.has_fused = updated, has_fused
        self.parameters = [item.parameter for item in updated]
        self.tensors = [item.tensor for item in updated]
        placed = [item for item in updated if isinstance(item.parameter, DTensor)]
        self._placed = [item.parameter for item in placed]
        self._placements = [*map(placement_of, self._placed)]
        self._pieces = [*map(local_of, self._placed)]
        # Those that are updated where they lie.
        self._targets = [None if item.is_owned else item.tensor for item in placed]

    @property
    def cut_without_owner(self) -> list[Tensor]:
        """Return the tensors that are pieces of larger ones."""
        pairs = zip(self._placed, self._targets)
        return [to for whole, to in pairs if to is not None and to.shape != whole.shape]

    def begin(self) -> bool:
        """Let the local tensors have the memory and the gradients of the parameters.

        Return False, without a change, if gradients are not placed like their parameters. No line
        of Python runs for a parameter beyond setting its gradient."""
        with plain_attributes():
            gradients = [*map(_GRADIENT, self._placed)]
            present = [gradient for gradient in gradients if gradient is not None]
            placements, targets = self._placements, self._targets
            if len(present) < len(gradients):
                placements = [at for at, g in zip(placements, gradients) if g is not None]
                targets = [target for target, g in zip(targets, gradients) if g is not None]
            are_placed = all(map(isinstance, present, repeat(DTensor)))
            if not (are_placed and all(map(is_, map(placement_of, present), placements))):
                pairs = [(p, g) for p, g in zip(self._placed, gradients) if g is not None]
                if not all(map(_is_placed_like, *zip(*pairs))):
                    return False
            pieces = [*map(piece_of, self._placed)]
            if not all(map(is_, pieces, self._pieces)):
                self._pieces = pieces
                for target, piece in zip(self._targets, pieces):
                    if target is not None:
                        target.data = piece
            for target, gradient in zip(targets, map(piece_of, present)):
                if target is not None:
                    target.grad = gradient
        return True

    def complete_gradients(self) -> None:
        """Bring gradients to the places of their parameters; all ranks do so together."""
        for parameter in self._placed:
            gradient = parameter.grad
            if gradient is None:
                continue
            if not isinstance(gradient, DTensor):
                raise InvalidInput(
                    "the gradient of a DTensor is a DTensor",
                    got=f"a {type(gradient).__name__} for a parameter of {list(parameter.shape)}",
                    remedy="DTensor.from_local(piece, parameter.device_mesh, parameter.placements)",
                )
            if not _is_placed_like(parameter, gradient):
                placed: Any = parameter
                parameter.grad = gradient.redistribute(placements=placed.placements)

    def end(self) -> None:
        """Let go of the gradients."""
        for target in self._targets:
            if target is not None:
                target.grad = None


class LocalOptimizer(Optimizer):
    """An optimizer whose steps work on local tensors; a subclass has the user's class as well."""

    user_class: ClassVar[type[Optimizer]]
    updated_groups: list[UpdatedGroup]
    exchanges: list[OwnerExchange]
    sum_waiting: Callable[[], None]  # completes gradients that are partial sums
    place_group: Callable[[Mapping[str, Any]], tuple[UpdatedGroup, list[OwnerExchange]]]

    def begin_inside(self, groups: Sequence[UpdatedGroup], exchanges: list[OwnerExchange]) -> None:
        """Prepare for the constructor of the user's class, which sees local tensors."""
        self.updated_groups, self.exchanges = [*groups], exchanges
        self._is_inside, self._checked = True, 0
        for exchange in exchanges:
            exchange.gather(has_gradients=False)

    def end_inside(self) -> None:
        """Show the module's parameters from now on."""
        for exchange in self.exchanges:
            exchange.release()
        self._leave()

    def _enter(self) -> None:
        self.state = self._states
        for group, updated in zip(self.param_groups, self.updated_groups):
            group["params"] = updated.tensors
        self._is_inside = True

    def _leave(self) -> None:
        self._states: defaultdict[Tensor, Any] = self.state
        for group, updated in zip(self.param_groups, self.updated_groups):
            group["params"] = updated.parameters
        self._is_inside = False
        shown: Any = StatesView(self._states, self.updated_groups)
        self.state = shown

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Show local tensors and states, to the methods of the user's class."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; `closure` computes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._inside():
            fused = [
                group
                for group, updated in zip(self.param_groups, self.updated_groups)
                if updated.has_fused and group.get("fused") is group.get("foreach") is None
            ]
            try:
                for group in fused:
                    group["fused"] = True
                if not all(map(UpdatedGroup.begin, self.updated_groups)):
                    self._complete_gradients()
                for exchange in self.exchanges:
                    exchange.gather(has_gradients=True)
                step_without_hooks(self.user_class)(self)
                for exchange in self.exchanges:
                    exchange.scatter()
            finally:
                for group in fused:
                    group["fused"] = None
                for updated in self.updated_groups:
                    updated.end()
                for exchange in self.exchanges:
                    exchange.release()
        if len(self._states) != self._checked:
            self._require_like_states()
        return loss

    def _complete_gradients(self) -> None:
        """Bring gradients to the places of their parameters; all ranks do so together."""
        self.sum_waiting()
        for updated in self.updated_groups:
            updated.complete_gradients()
            updated.begin()

    def _require_like_states(self) -> None:
        """Refuse states that show that an update depends on more than its element after all."""
        self._checked = len(self._states)
        for tensor in [t for group in self.updated_groups for t in group.cut_without_owner]:
            for key, value in self._states.get(tensor, {}).items():
                if isinstance(value, Tensor) and value.ndim and value.shape != tensor.shape:
                    raise InvalidInput(
                        "what an optimizer does with large parameters is what it did in a trial "
                        "with at most 256 elements in each dim",
                        got=f"{type(self).__name__}: {key} of shape {list(value.shape)} for a "
                        f"piece of {list(tensor.shape)}, and element by element in the trial",
                        remedy='states="whole" with mode="data", under which no parameter is cut',
                    )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the parameters, or set them to zero."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        with plain_attributes():
            for group in self.updated_groups:
                for parameter in group.parameters:
                    parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the same module, by their names or themselves."""
        if self._is_inside:  # in the constructor
            super().add_param_group(param_group)
            return
        updated, exchanges = self.place_group(param_group)
        for exchange in exchanges:
            exchange.gather(has_gradients=False)
        with self._inside():
            super().add_param_group({**param_group, "params": updated.tensors})
            self.updated_groups.append(updated)
            self.exchanges += exchanges
        for exchange in exchanges:
            exchange.release()

    def state_dict(self) -> dict[str, Any]:
        """Return options and states; states of this rank's pieces are DTensors.

        States that an owner keeps are on that rank alone: `ap.save` saves those of all ranks.
        """
        state_dict = super().state_dict()
        states = state_dict["state"].items()
        held = {k: dict(v) if isinstance(v, ParameterStates) else v for k, v in states}
        return {**state_dict, "state": held}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned, or states in whole tensors."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        items = [item for group in self.updated_groups for item in group.updated]
        updated = dict(zip(numbers, items))
        states = {
            number: {key: updated[number].local_state(value) for key, value in held.items()}
            if number in updated
            else held
            for number, held in state_dict["state"].items()
            if number not in updated or updated[number].has_states
        }
        with self._inside():
            super().load_state_dict({**state_dict, "state": states})
        self._checked = 0

    def state_holder(self, parameter: Tensor) -> Tensor | None:
        """Return the tensor like which this rank keeps states of a parameter; None: it keeps none.

        It is the parameter, or at the owner of the parameter the whole tensor."""
        item = next(i for g in self.updated_groups for i in g.updated if i.parameter is parameter)
        if not item.is_owned:
            return parameter
        return item.tensor if item.has_states else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidInput(
            "an optimizer of a parallel module is bound to the ranks that run it",
            got=f"copy.deepcopy or pickle of {type(self).__name__}",
            remedy="save and load its state_dict(), or ap.save() and ap.load()",
        )


def _is_placed_like(parameter: Any, gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and gradient.placements == parameter.placements


@cache
def local_class(kind: type[Optimizer]) -> type[LocalOptimizer]:
    """Return a subclass of a class of optimizers that runs it on local tensors."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    contents = {**names, "__doc__": kind.__doc__, "user_class": kind}
    return type(kind.__name__, (LocalOptimizer, kind), contents)


class StatesView(MutableMapping[Any, Any]):
    """The states of an optimizer by parameters of the module; changes reach the optimizer."""

    def __init__(self, states: MutableMapping[Any, Any], groups: Sequence[UpdatedGroup]) -> None:
        """`states`: those of local tensors, and of keys that are no tensors."""
        self._states, self._groups = states, groups

    @cached_property
    def _by_parameter(self) -> dict[Any, UpdatedParameter]:
        return {item.parameter: item for group in self._groups for item in group.updated}

    @cached_property
    def _by_tensor(self) -> dict[Any, UpdatedParameter]:
        return {item.tensor: item for group in self._groups for item in group.updated}

    def __getitem__(self, key: Any) -> Any:
        if key not in self._by_parameter:
            return self._states[key]
        item = self._by_parameter[key]
        if item.tensor not in self._states:
            raise KeyError(key)
        return ParameterStates(self._states[item.tensor], item)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self._by_parameter:
            item = self._by_parameter[key]
            key, value = item.tensor, {k: item.local_state(v) for k, v in value.items()}
        self._states[key] = value

    def __delitem__(self, key: Any) -> None:
        item = self._by_parameter.get(key)
        del self._states[key if item is None else item.tensor]

    def __iter__(self) -> Iterator[Any]:
        for key in self._states:
            item = self._by_tensor.get(key)
            if item is None or item.has_states:
                yield key if item is None else item.parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ParameterStates(MutableMapping[str, Any]):
    """The states of one parameter, as DTensors like it; changes reach the optimizer."""

    def __init__(self, states: MutableMapping[str, Any], updated: UpdatedParameter) -> None:
        self._states, self._updated = states, updated

    def __getitem__(self, key: str) -> Any:
        return self._updated.shown_state(self._states[key])

    def __setitem__(self, key: str, value: Any) -> None:
        self._states[key] = self._updated.local_state(value)

    def __delitem__(self, key: str) -> None:
        del self._states[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return repr(dict(self))


def local_parameter(parameter: Tensor) -> Tensor:
    """Return a parameter in the memory of this rank's piece; a plain tensor itself."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(local_of(parameter), requires_grad=parameter.requires_grad)
