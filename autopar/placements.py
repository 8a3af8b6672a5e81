"""Conversion between layouts and DTensor's placements, one placement for each axis of a mesh.

>>> to_placements(Layout(("/3", "tp"), None), Mesh(dp=2, tp=2))
(Replicate(), _StridedShard(dim=0, sf=3))
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import placement_types as dtensor

from autopar._torch.tensors import StridedShard
from autopar.errors import InvalidInput
from autopar.layout import Layout, axes_of, parts_of
from autopar.mesh import Mesh


def to_placements(layout: Layout, mesh: Mesh) -> tuple[dtensor.Placement, ...]:
    """Return DTensor's placements, one for each mesh axis; they keep the order of axes on a dim."""
    placements: list[dtensor.Placement] = []
    for position, axis in enumerate(mesh.names):
        dim = layout.dim_of(axis)
        if dim is None:
            placements.append(Partial() if axis in layout.partial else Replicate())
            continue
        outer = axes_of(layout.dims[dim])
        outer = outer[: outer.index(axis)]
        # DTensor cuts from the left of the mesh to the right; an axis that cuts after one
        # on its right is strided by the sizes of those. Parts come before all axes.
        factor = mesh.degree(a for a in outer if mesh.names.index(a) > position)
        factor *= parts_of(layout.dims[dim]) or 1
        placements.append(Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor))
    return tuple(placements)


def from_placements(placements: Sequence[dtensor.Placement], mesh: Mesh, ndim: int) -> Layout:
    """Return the layout that DTensor's placements describe."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    partial = []
    for axis, placement in reversed(list(zip(mesh.names, placements))):
        if placement.is_partial():
            if getattr(placement, "reduce_op", "sum") != "sum":
                raise InvalidInput(
                    "a partial layout is a sum",
                    got=str(placement),
                    remedy="reduce the tensor before handing it over",
                )
            partial.append(axis)
            continue
        if placement.is_replicate():
            continue
        dim = placement.dim % ndim  # type: ignore[attr-defined]
        factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
        if not dims[dim] and factor > 1:
            # The last axis is strided by nothing but parts.
            dims[dim] = [f"/{factor}", axis]
            continue
        first = 1 if parts_of(dims[dim]) else 0
        factor, rest = divmod(factor, parts_of(dims[dim]) or 1)
        at = first
        while at < len(dims[dim]) and mesh.degree(dims[dim][first:at]) != factor:
            at += 1
        if rest or mesh.degree(dims[dim][first:at]) != factor:
            raise InvalidInput(
                "a strided placement must skip whole axes of the mesh, and parts alike",
                got=f"{placement} on {axis!r} of {mesh}",
                remedy="redistribute the tensor to Shard or Replicate first",
            )
        dims[dim].insert(at, axis)
    return Layout(*map(tuple, dims), partial=partial)
