"""Layout: where one tensor lives on a mesh. Placement adds its gradient, TensorType its shape.

A layout names for each dim the axes that cut it, outermost first, and the axes over which the
tensor is a partial sum. Every other axis holds a replica.

A dim of several equal parts, such as a weight for queries, keys and values, may be cut *in parts*:
a rank holds its piece of every part. Their number is written before the axes, as `/3`.

>>> layout = Layout("dp", None, ("tp",))
>>> print(TensorType.parse("f32[8@dp, 128, 1024]{+tp}"))
f32[8@dp, 128, 1024]{+tp}
>>> layout.local_shape((8, 128, 4096), Mesh(dp=2, tp=4), rank=0)
(4, 128, 1024)
>>> Layout(("/3", "tp")).boxes((12,), Mesh(tp=2), rank=1)
[((2, 2),), ((6, 2),), ((10, 2),)]
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from autopar.errors import InvalidInput
from autopar.mesh import Mesh, NamesElsewhere, axes_elsewhere

AxisNames = str | Sequence[str] | None
Parts = tuple[tuple[int, int], ...]  # dims of equal parts, each with their number


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and length of piece `index` of `parts`, the last ones shorter, as in DTensor."""
    full = -(-size // parts)
    start = min(full * index, size)
    return start, min(full, size - start)


class Layout:
    """The layout of one tensor. Equal layouts are one object: made and compared at no cost."""

    __slots__ = ("dims", "partial", "parts")
    FORM: ClassVar = tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]  # in files
    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...]
    parts: Parts  # the dims that are cut in parts
    _known: ClassVar[dict[tuple[object, ...], Layout]] = {}  # by what was given, and as it is

    def __new__(cls, *dims: AxisNames, partial: Iterable[str] = ()) -> Layout:
        return cls._of(tuple([_axis_names(dim) for dim in dims]), _axis_names(partial))

    @classmethod
    def _of(cls, dims: tuple[tuple[str, ...], ...], partial: tuple[str, ...]) -> Layout:
        known = cls._known.get((dims, partial))
        if known is None:
            new = cls._make(dims, partial)
            known = cls._known[dims, partial] = cls._known.setdefault(new.to_form(), new)
        return known

    @classmethod
    def _make(cls, dims: tuple[tuple[str, ...], ...], partial: tuple[str, ...]) -> Layout:
        self = super().__new__(cls)
        self.partial = tuple(sorted(partial))
        self.dims = tuple(dim if axes_of(dim) else () for dim in dims)
        in_parts = [dim for dim in self.dims if any(axis.startswith("/") for axis in dim)]
        if not all(_IN_PARTS.match("@".join(dim)) for dim in in_parts):
            raise InvalidInput(
                "a dim that is cut in parts names their number once, before its axes",
                got=repr(self),
                remedy='("/3", "tp")',
            )
        counts = enumerate(map(parts_of, self.dims))
        self.parts = tuple((dim, count) for dim, count in counts if count)
        if twice := sorted({axis for axis in self.axes if self.axes.count(axis) > 1}):
            raise InvalidInput(
                "an axis may be used once on one tensor: it cuts one dim or holds a partial sum",
                got=f"{self}, which uses {', '.join(map(repr, twice))} more than once",
                remedy="keep one of the uses",
            )
        return self

    def to_form(self) -> tuple[object, ...]:
        return self.dims, self.partial

    @classmethod
    def of_form(cls, form: tuple) -> Layout:
        dims, partial = form
        return cls(*dims, partial=partial)

    @classmethod
    def replicated(cls, ndim: int) -> Layout:
        """Return the layout of a tensor that is whole on every rank."""
        return cls(*(None,) * ndim)

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that cuts a dim or holds a partial sum."""
        return tuple(axis for dim in self.dims for axis in axes_of(dim)) + self.partial

    def with_part_dims(
        self, shape: Sequence[int], parts: Parts | None = None
    ) -> tuple[Layout, tuple[int, ...]]:
        """Return the layout and shape of a view with another dim before each dim in parts.

        The other dim counts the parts. `parts`: the dims that get one; None: those of this layout.
        """
        counts = dict(self.parts if parts is None else parts)
        if not counts:
            return self, tuple(shape)
        dims: list[tuple[str, ...]] = []
        sizes: list[int] = []
        for dim, (axes, size) in enumerate(zip(self.dims, shape)):
            count = counts.get(dim)
            dims += [axes] if count is None else [(), axes_of(axes)]
            sizes += [size] if count is None else [count, size // count]
        return Layout(*dims, partial=self.partial), tuple(sizes)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.dims)

    def dim_of(self, axis: str) -> int | None:
        """Return the dim that `axis` cuts; None if it cuts none."""
        return next((index for index, dim in enumerate(self.dims) if axis in dim), None)

    def with_dim(self, dim: int, axes: AxisNames) -> Layout:
        """Return this layout with `dim` cut by `axes`."""
        dims = (*self.dims[:dim], _axis_names(axes), *self.dims[dim + 1 :])
        return Layout._of(dims, self.partial)

    def with_partial(self, axes: Iterable[str]) -> Layout:
        """Return this layout with exactly `axes` as partial sums."""
        return Layout._of(self.dims, _axis_names(axes))

    def cuts_into(self, finer: Layout) -> bool:
        """Return whether `finer` equals this layout, or cuts one dim of its pieces further."""
        if self.partial != finer.partial or self.ndim != finer.ndim:
            return False
        pairs = [(axes, more) for axes, more in zip(self.dims, finer.dims) if axes != more]
        return len(pairs) <= 1 and all(
            more[: len(axes)] == axes and parts_of(more) == parts_of(axes) for axes, more in pairs
        )

    def nests_with(self, other: Layout) -> bool:
        """Return whether one of two layouts equals the other, or cuts one dim of it further."""
        return self.cuts_into(other) or other.cuts_into(self)

    def over_axes(self, axes: Iterable[str]) -> Layout:
        """Return this layout over `axes` alone; it is replicated over the others."""
        names = set(axes)
        return Layout(
            *(tuple(a for a in dim if a in names or a.startswith("/")) for dim in self.dims),
            partial=(axis for axis in self.partial if axis in names),
        )

    def renamed(self, names: NamesElsewhere) -> Layout:
        """Return this layout with other names of axes."""
        dims = (axes_elsewhere(dim, names) for dim in self.dims)
        return Layout(*dims, partial=axes_elsewhere(self.partial, names))

    @property
    def gradient(self) -> Layout:
        """The layout of the gradient: replicas and partial sums have replicas, cuts have cuts."""
        return self.with_partial(())

    def local_bounds(
        self, shape: Sequence[int], mesh: Mesh, rank: int
    ) -> tuple[tuple[int, int], ...]:
        """Return start and length of `rank`'s piece of each dim; no dim is cut in parts."""
        assert not self.parts, self
        place = mesh.coordinate(rank)
        bounds = []
        for size, axes in zip(shape, self.dims):
            start, length = 0, size
            for axis in axes:
                offset, length = chunk(length, mesh[axis], place[axis])
                start += offset
            bounds.append((start, length))
        return tuple(bounds)

    def bounds_in(self, dim: int, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[int, int]:
        """Return start and length of the piece of one dim, which is not in parts."""
        return Layout(self.dims[dim]).local_bounds((shape[dim],), mesh, rank)[0]

    def local_shape(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Return the shape of the piece that `rank` holds."""
        layout, sizes = self.with_part_dims(shape)
        lengths = iter([length for _, length in layout.local_bounds(sizes, mesh, rank)])
        return tuple(next(lengths) * (next(lengths) if parts_of(axes) else 1) for axes in self.dims)

    def boxes(
        self, shape: Sequence[int], mesh: Mesh, rank: int
    ) -> list[tuple[tuple[int, int], ...]]:
        """Return start and length in each dim of every box that `rank` holds.

        A dim that is cut in parts gives a box for each part. Boxes of later dims change fastest.
        """
        layout, sizes = self.with_part_dims(shape)
        bounds, pieces = iter(layout.local_bounds(sizes, mesh, rank)), []
        for size, axes in zip(shape, self.dims):
            count = next(bounds)[1] if parts_of(axes) else 1
            start, length = next(bounds)
            pieces.append([(part * (size // count) + start, length) for part in range(count)])
        return list(itertools.product(*pieces))

    def largest_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of the largest piece: rank 0's."""
        return self.local_shape(shape, mesh, 0)

    def validate(self, shape: Sequence[int], mesh: Mesh, source: str | None = None) -> None:
        """Refuse a layout that does not fit the tensor or the mesh."""
        if len(shape) != self.ndim:
            raise InvalidInput(
                "a layout names every dim of its tensor, once",
                got=f"{self}, and the tensor has shape {tuple(shape)}",
                remedy=f"give {len(shape)} entries, None for a dim that is not cut",
                source=source,
            )
        for axis in self.axes:
            if axis not in mesh:
                raise InvalidInput(
                    "an axis of a layout must be one of the mesh's",
                    got=f"{axis!r} in {self}; the mesh is {mesh}",
                    remedy=f"use one of {', '.join(map(repr, mesh.names))}",
                    source=source,
                )
        for at, count in self.parts:
            pieces = count * mesh.degree(axes_of(self.dims[at]))
            if shape[at] % pieces:
                raise InvalidInput(
                    "a dim that is cut in parts has equal pieces",
                    got=f"{self} of shape {tuple(shape)} on {mesh}: {shape[at]} in {pieces} pieces",
                    remedy="use fewer axes on it, or leave the parts out",
                    source=source,
                )

    def __reduce__(self) -> tuple[object, ...]:
        return Layout.of_form, (self.to_form(),)

    def __repr__(self) -> str:
        dims = ", ".join("@".join(("", *dim)) if dim else "_" for dim in self.dims)
        return f"[{dims}]{partial_suffix(self.partial)}"


class Placement:
    """A layout, and the axes on which it is *pending*: replicas whose gradient is a partial sum.

    Equal placements are one object: made and compared at no cost.
    """

    __slots__ = ("layout", "pending")
    FORM: ClassVar = tuple[
        tuple[tuple[str, ...], ...], tuple[str, ...], tuple[str, ...]
    ]  # in files
    layout: Layout
    pending: tuple[str, ...]
    _known: ClassVar[dict[tuple[Layout, tuple[str, ...]], Placement]] = {}

    def __new__(cls, layout: Layout, pending: Iterable[str] = ()) -> Placement:
        key = layout, tuple(sorted((pending,) if isinstance(pending, str) else pending))
        if key not in cls._known:
            if taken := sorted(set(key[1]) & set(layout.axes)):
                raise InvalidInput(
                    "a gradient is a partial sum only over axes on which the value is a replica",
                    got=f"pending {', '.join(map(repr, key[1]))} with {layout}",
                    remedy=f"leave {', '.join(map(repr, taken))} out",
                )
            new = super().__new__(cls)
            new.layout, new.pending = key
            cls._known.setdefault(key, new)
        return cls._known[key]

    def to_form(self) -> tuple[object, ...]:
        return self.dims, self.partial, self.pending

    @classmethod
    def of_form(cls, form: tuple) -> Placement:
        dims, partial, pending = form
        return cls(Layout(*dims, partial=partial), pending)

    @classmethod
    def whole(cls, ndim: int) -> Placement:
        """Return the placement of a replica on every rank, whose gradient is one, too."""
        return cls(Layout.replicated(ndim))

    def renamed(self, names: NamesElsewhere) -> Placement:
        """Return this placement with other names of axes."""
        return Placement(self.layout.renamed(names), axes_elsewhere(self.pending, names))

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        return self.layout.dims

    @property
    def partial(self) -> tuple[str, ...]:
        return self.layout.partial

    def __reduce__(self) -> tuple[object, ...]:
        return Placement, (self.layout, self.pending)

    def __repr__(self) -> str:
        return f"{self.layout}{f', pending {self.pending}' if self.pending else ''}"


Place = Literal["storage", "working", "gradient", "optimizer"]
ALL_PLACES: tuple[Place, ...] = get_args(Place)
# The sets of places of a parameter that may be on the host.
ON_HOST: tuple[tuple[Place, ...], ...] = (
    (),
    ("optimizer",),
    ("storage", "optimizer"),
    ALL_PLACES,
)


@dataclass(frozen=True)
class ParameterPlacement:
    """The four places of a parameter: they may differ, and `tied` is where they do not.

    All cut one dim further than `working`, and pieces nest. A parameter goes from `optimizer` to
    `storage` by an all-gather, or by a slice where storage is cut further, and to `working` by an
    all-gather. A gradient goes from one place to the next by a reduce-scatter. Some may be on the
    host: of the way of the parameter the first part; all four where its readers run there.
    """

    storage: Layout  # the copy that lives through a step: gathered at its start where it differs
    working: Layout  # what its readers start from: gathered for each use where it differs
    gradient: Layout  # where the gradients of micro-batches are summed, and add up
    optimizer: Layout  # from step to step: what an optimizer is handed, and what it keeps of it
    on_host: tuple[Place, ...] = ()  # those of the four that are on the host

    @classmethod
    def tied(cls, layout: Layout, on_host: tuple[Place, ...] = ()) -> ParameterPlacement:
        return cls(layout, layout, layout, layout, on_host)

    def renamed(self, names: NamesElsewhere) -> ParameterPlacement:
        """Return these places with other names of axes."""
        return ParameterPlacement(
            self.storage.renamed(names),
            self.working.renamed(names),
            self.gradient.renamed(names),
            self.optimizer.renamed(names),
            self.on_host,
        )

    @property
    def is_tied(self) -> bool:
        return self == ParameterPlacement.tied(self.working)

    @property
    def is_nested(self) -> bool:
        """Return whether one collective, or a slice, leads from each place to the next."""
        return (
            self.on_host in ON_HOST
            and self.gradient.cuts_into(self.optimizer)
            and self.storage.nests_with(self.optimizer)
            and self.storage.nests_with(self.gradient)
            and self.working.cuts_into(self.storage)
            and self.working.cuts_into(self.gradient)
        )

    @property
    def scattered_axes(self) -> tuple[str, ...]:
        """The axes over which the gradient of a gathered copy is scattered at each use."""
        cut = {*self.storage.axes} - {*self.working.axes}
        return tuple(axis for axis in self.gradient.axes if axis in cut)

    @property
    def goes_up(self) -> tuple[Place, Place] | None:
        """The two places between which a parameter is copied from the host to the device."""
        if not self.on_host or "working" in self.on_host:
            return None
        return ("storage", "working") if "storage" in self.on_host else ("optimizer", "storage")


_IN_PARTS = re.compile(r"/([2-9]|[1-9]\d+)(@[^/@]+)+$")


def parts_of(dim: Sequence[str]) -> int:
    """Return the number of parts in which a dim is cut; 0 if it is cut as a whole, or not."""
    return int(dim[0][1:]) if dim and dim[0].startswith("/") else 0


def axes_of(dim: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes that cut a dim, without its number of parts."""
    return dim[1:] if dim and dim[0].startswith("/") else dim


def partial_suffix(partial: tuple[str, ...]) -> str:
    return "{" + ", ".join(f"+{axis}" for axis in partial) + "}" if partial else ""


def _axis_names(dim: AxisNames | Iterable[str]) -> tuple[str, ...]:
    if dim is None:
        return ()
    return (dim,) if isinstance(dim, str) else tuple(dim)
