"""Mesh: named axes over ranks, row-major, the last axis on the nearest neighbours.

>>> mesh = Mesh(dp=2, tp=4)
>>> mesh.size, mesh.coordinate(6)
(8, {'dp': 1, 'tp': 2})
>>> mesh.groups(("dp",))[0]
(0, 4)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from autopar.base.schema import Count, is_count
from autopar.errors import InvalidInput

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The axes of a mesh that is chosen: they cut the batch, the experts, the sequence, and tensors.
AXIS_NAMES = ("dp", "ep", "sp", "tp")
_NAMES_BY_COUNT = {1: ("dp",), 2: ("dp", "tp"), 3: ("dp", "sp", "tp"), 4: AXIS_NAMES}

# What axes are called elsewhere: by one name, or by several where an axis is split.
NamesElsewhere = Mapping[str, tuple[str, ...]]


def axes_elsewhere(axes: Iterable[str], names: NamesElsewhere) -> tuple[str, ...]:
    """Return what some axes are called elsewhere."""
    return tuple(name for axis in axes for name in names.get(axis, (axis,)))


class Mesh:
    """A frozen grid of ranks. An *axis* belongs to the mesh; a *dim* belongs to a tensor."""

    FORM = Mapping[str, Count]  # in files: the sizes of the axes, in their order

    def __init__(self, /, **axes: int) -> None:
        for name, size in axes.items():
            if not is_count(size):
                raise InvalidInput(
                    "each axis of a mesh has a whole number of ranks, at least 1",
                    got=f"{name}={size!r}",
                    remedy="Mesh(dp=2, tp=4)",
                )
        self.names: tuple[str, ...] = tuple(axes)
        self.shape: tuple[int, ...] = tuple(map(int, axes.values()))

    @classmethod
    def of_sizes(cls, sizes: Iterable[int]) -> Mesh:
        """Return a mesh of so many ranks along its axes, at most four, named as they mostly are
        used: the last joins nearest neighbours."""
        sizes = tuple(sizes)
        return cls(**dict(zip(_NAMES_BY_COUNT[len(sizes)], sizes)))

    def renamed(self, names: Mapping[str, str]) -> Mesh:
        """Return this mesh with other names of axes."""
        return Mesh(**{names.get(axis, axis): size for axis, size in self.sizes.items()})

    def names_in(self, split: Mesh) -> NamesElsewhere:
        """Return what the axes of this mesh are called in another, in which some are split."""
        return {axis: split.split_axes(axis) for axis in self.names if axis not in split}

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Ranks by axis, in the order of the axes."""
        return dict(zip(self.names, self.shape))

    def to_form(self) -> Mapping[str, int]:
        return self.sizes

    @classmethod
    def of_form(cls, sizes: Mapping[str, int]) -> Mesh:
        return cls(**sizes)

    def __getitem__(self, axis: str) -> int:
        """The number of ranks along `axis`."""
        if axis not in self.sizes:
            raise InvalidInput(
                "an axis must be one of the mesh's",
                got=f"{axis!r}; the mesh is {self}",
                remedy=f"use one of {', '.join(map(repr, self.names)) or 'none: it is empty'}",
            )
        return self.sizes[axis]

    def __contains__(self, axis: object) -> bool:
        return axis in self.sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def degree(self, axes: Iterable[str]) -> int:
        """Return the number of pieces into which `axes` cut together."""
        return math.prod(self[axis] for axis in axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` along each axis."""
        place: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.shape)):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in self.names}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank that stands at `coordinate`."""
        return self._index(coordinate, self.names)

    def position(self, rank: int, axes: tuple[str, ...]) -> int:
        """Return the index of `rank` inside its group over `axes` (outermost first)."""
        return self._index(self.coordinate(rank), axes)

    def _index(self, place: Mapping[str, int], axes: tuple[str, ...]) -> int:
        index = 0
        for axis in axes:
            index = index * self[axis] + place[axis]
        return index

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ only along `axes`, ordered outermost first."""

        def places(names: Sequence[str]) -> list[dict[str, int]]:
            sizes = [range(self[name]) for name in names]
            return [dict(zip(names, place)) for place in itertools.product(*sizes)]

        fixed = places([name for name in self.names if name not in axes])
        return tuple(tuple(self.rank(at | inside) for inside in places(axes)) for at in fixed)

    def split(self, axis: str, outer: int) -> Mesh:
        """Split an axis in two: `outer` groups of neighbours, and the ranks of one group.

        The parts of an axis `dp` are called `dp.0`, `dp.1`, ..., outermost first.
        """
        base, sizes = axis.partition(".")[0], {}
        parts = [
            size
            for name in self.split_axes(base)
            for size in ((outer, self[axis] // outer) if name == axis else (self[name],))
        ]
        for name in self.names:
            if name not in self.split_axes(base):
                sizes[name] = self[name]
            elif f"{base}.0" not in sizes:
                sizes |= {f"{base}.{number}": size for number, size in enumerate(parts)}
        return Mesh(**sizes)

    def split_axes(self, axis: str) -> tuple[str, ...]:
        """Return the axes that an axis was split into, outermost first: itself, if it was not."""
        if axis in self:
            return (axis,)
        return tuple(name for name in self.names if name.partition(".")[0] == axis)

    def without(self, *axes: str) -> Mesh:
        """Return the mesh that is left when `axes` are taken away."""
        return Mesh(**{name: size for name, size in self.sizes.items() if name not in axes})

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """Return the mesh of a torch `DeviceMesh`; unnamed axes become `axis0`, `axis1`, ..."""
        names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(device_mesh.ndim))
        return cls(**dict(zip(names, device_mesh.shape)))

    def to_device_mesh(self, device_type: str) -> DeviceMesh:
        """Return a torch `DeviceMesh` of this shape over the ranks of the running process group."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, self.shape, mesh_dim_names=self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self.names, self.shape) == (other.names, other.shape)

    def __hash__(self) -> int:
        return hash((self.names, self.shape))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"


@lru_cache(1 << 9)
def meshes(devices: int, most_axes: int, per_node: int) -> tuple[Mesh, ...]:
    """Return all meshes of `devices` ranks with at most `most_axes` axes, fewest axes first.

    The last axis joins nearest neighbours, so the order of the sizes is also their placement on the
    levels of links. A mesh with an axis that has more ranks on one node of `per_node` ranks than on
    another is left out, where another arrangement has none.
    """
    every = [sizes for sizes in _factorisations(devices) if len(sizes) <= most_axes]
    even = [sizes for sizes in every if _respects_nodes(sizes, per_node)]
    unsorted = map(Mesh.of_sizes, even or every)
    return tuple(sorted(unsorted, key=lambda mesh: len(mesh.names)))


def _factorisations(number: int) -> Iterator[tuple[int, ...]]:
    """Yield every ordered way to write `number` as a product of factors from 2."""
    yield (number,)
    for factor in range(2, number // 2 + 1):
        if number % factor == 0:
            for rest in _factorisations(number // factor):
                yield (factor, *rest)


def _respects_nodes(sizes: tuple[int, ...], per_node: int) -> bool:
    """Return whether each axis lies inside nodes, or as many of its ranks on each of several."""
    stride = 1
    for size in reversed(sizes):
        inside = per_node % (stride * size) == 0
        is_even = stride % per_node == 0 or per_node % stride == 0
        across = is_even and (stride * size) % per_node == 0
        if not (inside or across):
            return False
        stride *= size
    return True
