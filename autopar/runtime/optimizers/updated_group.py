"""Hold the parameters of an optimizer's groups, and the tensors of this rank that it updates.

parameter   a DTensor of the module, with its gradient
tensor      in the memory of this rank's piece; or the whole tensor, at its owner
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch.tensors import local_of, piece_of, placement_of, plain_attributes
from autopar.errors import InvalidInput
from autopar.runtime.optimizers.owner_exchange import PieceView
from autopar.runtime.parameters.placing import narrow_to, read_piece

_GRADIENT = attrgetter("grad")


@dataclass(frozen=True, eq=False)
class UpdatedParameter:
    """A parameter of the module, and the tensor that the optimizer updates in its place."""

    parameter: Tensor
    tensor: Tensor  # in the memory of this rank's piece; or whole, at its owner
    is_owned: bool = False  # a rank that owns it updates it whole
    has_fused: bool = False  # by fused kernels, unless the user chooses otherwise

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

    def __init__(self, updated: Sequence[UpdatedParameter]) -> None:
        self.updated = updated
        self.has_fused = bool(updated) and all(item.has_fused for item in updated)
        self.tensors = [item.tensor for item in updated]
        self._parameters = [item.parameter for item in updated]
        self._tensors = [*self.tensors]
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

    def is_of(self, group: Mapping[str, Any]) -> bool:
        """Return whether a group of the optimizer has these parameters now, in this order."""
        return has_items(group["params"], self._parameters)

    def has_tensors(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the tensors of the group, as they were to begin with."""
        return has_items(tensors, self._tensors)

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


class KnownParameters:
    """All parameters that an optimizer was ever given, with what it updates in their place."""

    def __init__(self) -> None:
        self._by_parameter: dict[int, UpdatedParameter] = {}
        self._by_tensor: dict[int, UpdatedParameter] = {}

    def add(self, updated: Iterable[UpdatedParameter]) -> None:
        """Remember parameters; those that are known already stay as they are."""
        for item in updated:
            if id(item.parameter) not in self._by_parameter:
                self._by_parameter[id(item.parameter)] = item
                self._by_tensor[id(item.tensor)] = item

    def of_parameter(self, parameter: Any) -> UpdatedParameter | None:
        """Return what stands for a parameter of the module; None for anything else."""
        return self._by_parameter.get(id(parameter))

    def of_tensor(self, tensor: Any) -> UpdatedParameter | None:
        """Return what has this tensor in place of a parameter; None for anything else."""
        return self._by_tensor.get(id(tensor))

    def parameters(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters for which tensors stand; other tensors as they are."""
        items = [(self.of_tensor(tensor), tensor) for tensor in tensors]
        return [tensor if item is None else item.parameter for item, tensor in items]

    def group(self, group: Mapping[str, Any]) -> UpdatedGroup:
        """Return the tensors to update of a group; refuse parameters that nobody has added."""
        items = []
        for parameter in group["params"]:
            item = self.of_parameter(parameter)
            if item is None:
                what = type(parameter).__name__
                if isinstance(parameter, Tensor):
                    what += f" of shape {list(parameter.shape)}"
                raise InvalidInput(
                    "the groups of an optimizer have parameters that it was given",
                    got=f"a {what} that was put into param_groups, and is none of them",
                    remedy='optimizer.add_param_group({"params": [...]})',
                )
            items.append(item)
        return UpdatedGroup(items)


def has_items(values: Sequence[Any], items: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects in the same order."""
    return len(values) == len(items) and all(map(is_, values, items))


def local_parameter(parameter: Tensor) -> Tensor:
    """Return a parameter in the memory of this rank's piece; a plain tensor itself."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(local_of(parameter), requires_grad=parameter.requires_grad)


def _is_placed_like(parameter: Any, gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and gradient.placements == parameter.placements
