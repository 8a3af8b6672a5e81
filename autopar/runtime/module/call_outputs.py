"""Call outputs: the form in which a call on processes returns a value that ranks hold in pieces.

    parallelize(model, inputs)                        whole, plain tensors, as on one device
    parallelize(model, inputs, outputs="dtensor")     DTensors, without gathering
    parallelize(model, inputs, outputs="local")       this rank's piece, a plain tensor

A local piece has this rank's samples alone. Gradients of pieces are summed over ranks, as over the
samples of one device, so a mean over a piece must be divided by the number of pieces too.

A whole output is a replica, and so is its gradient, since every rank computes it from the whole:
backward takes this rank's piece of it and moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.key_value_caches import keep_caches
from autopar.collectives.movement import join_parts, split_parts
from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.process_groups import Groups
from autopar.runtime.parameters.placing import dtensor_wrapper
from autopar.tensor_type import TensorType

OutputsLike = Literal["whole", "dtensor", "local"]
OUTPUT_FORMS: tuple[OutputsLike, ...] = get_args(OutputsLike)


class CallOutputs:
    """Returns the outputs of one program in the requested form."""

    def __init__(self, form: OutputsLike, mesh: DeviceMesh, groups: Groups, rank: int) -> None:
        """Take this rank's position on the mesh, and the groups over single axes."""
        self.form, self._mesh, self._groups, self._rank = form, mesh, groups, rank

    def __call__(self, value: Tensor, type_: TensorType) -> Tensor:
        """Return an output in the requested form, with a gradient if this rank's piece has one."""
        if self.form == "local" or type_.layout.is_replicated:
            return value
        if self.form == "dtensor":
            return dtensor_wrapper(type_.layout, type_.shape, self._mesh)(value)
        return self.whole(value, type_)

    def whole(self, value: Tensor, type_: TensorType) -> Tensor:
        """Return an output as a whole tensor, whatever the requested form is."""
        return join_pieces(
            value, type_, Mesh.from_device_mesh(self._mesh), self._groups, self._rank
        )


def user_outputs(
    program: RuntimeProgram, args: tuple, kwargs: Mapping[str, Any], outputs: Sequence[Any]
) -> Any:
    """Return the outputs of a call as forward does, with the caller's own caches among them."""
    call = args, dict(program.in_order(kwargs))
    return keep_caches(call, program.structure(outputs), program.original.caches)


def join_pieces(piece: Tensor, type_: TensorType, mesh: Mesh, groups: Groups, rank: int) -> Tensor:
    """Return the tensor of which `rank` has a piece: dim by dim, the innermost cut first."""
    layout: Layout = type_.layout
    if parts := layout.parts:
        inside, shape = layout.with_part_dims(type_.shape)
        seen = TensorType(shape, type_.dtype, inside)
        return join_parts(join_pieces(split_parts(piece, parts), seen, mesh, groups, rank), parts)
    for dim, axes in enumerate(layout.dims):
        for count in reversed(range(len(axes))):
            axis, layout = axes[count], layout.with_dim(dim, axes[:count])
            size = layout.local_shape(type_.shape, mesh, rank)[dim]
            name, position = groups.name((axis,)), mesh.position(rank, (axis,))
            piece = torch.ops.autopar.all_gather(
                piece, dim, size, name, mesh[axis], position, False
            )
    return piece


def wants_outputs(outputs: object) -> bool:
    """Return whether a step returns its outputs, from a caller's `outputs=` or None."""
    if outputs is None:
        return False
    if not isinstance(outputs, bool):
        raise InvalidInput(
            "outputs= of a step says whether it gives them",
            got=f"outputs= of type {type(outputs).__name__}",
            remedy="outputs=True",
        )
    return outputs
