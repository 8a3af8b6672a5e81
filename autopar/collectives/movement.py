"""Movement: one row of the table of movements, on one tensor over some axes.

On each axis a value is replicated, cut or a partial sum. A consumer that works on cut data gives
its replicated inputs a gradient that is a partial sum; such a replica is *pending*: it reads like
any other, and its gradient has still to be summed. A reader whose gradient is whole reads it by an
`identity` that is not pending: one rank's term of the sum is that gradient, the others are zero.
Every row says how a value moves forward and how its gradient moves back:

    forward                 becomes pending   not pending
    identity       R -> R   all_reduce        first_term
    first_term     R -> P                     identity
    all_reduce     P -> R   all_reduce        identity
    all_gather     S -> R   reduce_scatter    slice
    reduce_scatter P -> S                     all_gather
    slice          R -> S                     all_gather
    all_to_all     S -> S                     all_to_all
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from autopar.layout import Layout, Parts, Placement, axes_of, parts_of

_BACKWARD = {
    ("identity", True): "all_reduce",
    ("identity", False): "first_term",
    ("first_term", False): "identity",
    ("all_reduce", True): "all_reduce",
    ("all_reduce", False): "identity",
    ("all_gather", True): "reduce_scatter",
    ("all_gather", False): "slice",
    ("reduce_scatter", False): "all_gather",
    ("slice", False): "all_gather",
    ("all_to_all", False): "all_to_all",
}


def split_parts(value: Tensor, parts: Parts) -> Tensor:
    """Return a value, or a piece of it, with a dim before each dim in parts, for their number."""
    for dim, count in reversed(parts):
        value = value.unflatten(dim, (count, -1))
    return value


def join_parts(value: Tensor, parts: Parts) -> Tensor:
    """Undo `split_parts`."""
    for dim, _ in parts:
        value = value.flatten(dim, dim + 1)
    return value


@dataclass(frozen=True)
class Movement:
    """One collective over `axes` (one group, in the order of the mesh), with its backward."""

    kind: str
    axes: tuple[str, ...]
    dim: int | None = None  # the dim that is gathered, scattered, sliced or (all_to_all) joined
    to_dim: int | None = None  # all_to_all: the dim that is cut instead
    pending: bool = False  # the value's gradient arrives as a partial sum over `axes`
    parts: Parts = ()  # which of its dims are cut in parts, and their numbers

    @property
    def backward(self) -> str:
        """Return the kind of collective that carries the gradient back."""
        return _BACKWARD[self.kind, self.pending]

    @property
    def is_sum_back(self) -> bool:
        """Return whether forward moves nothing, and backward sums the gradient."""
        return self.kind == "identity" and self.pending

    @property
    def hands_back(self) -> bool:
        """Return whether the gradient lies in the memory of its result's gradient."""
        return self.is_sum_back or self.kind == "all_reduce"

    @property
    def reversed(self) -> Movement:
        """Return the movement that carries the gradient back, with a backward of its own.

        Every term of a sum receives the same gradient, and uses it in its own way.
        """
        dim, to_dim = self.dim, self.to_dim
        if self.kind == "all_to_all":
            dim, to_dim = to_dim, dim
        is_of_terms = self.kind in ("all_reduce", "reduce_scatter")
        return Movement(self.backward, self.axes, dim, to_dim, is_of_terms, self.parts)

    @property
    def seen(self) -> Movement:
        """Return the movement of values after `split_parts`, where no dim is in parts."""
        if not self.parts:
            return self
        dim, to_dim = (
            d if d is None else d + sum(at <= d for at, _ in self.parts)
            for d in (self.dim, self.to_dim)
        )
        return Movement(self.kind, self.axes, dim, to_dim, self.pending)

    def apply(self, layout: Layout) -> Layout:
        """Return the layout of the value after this movement."""
        if self.kind in ("all_reduce", "reduce_scatter"):
            layout = layout.with_partial(a for a in layout.partial if a not in self.axes)
        if self.kind == "first_term":
            layout = layout.with_partial((*layout.partial, *self.axes))
        if self.kind in ("all_gather", "all_to_all"):
            assert self.dim is not None
            assert self.axes
            assert axes_of(layout.dims[self.dim])[-len(self.axes) :] == self.axes
            assert parts_of(layout.dims[self.dim]) == parts_of(self._prefix(self.dim))
            layout = layout.with_dim(self.dim, layout.dims[self.dim][: -len(self.axes)])
        if self.kind in ("reduce_scatter", "slice", "all_to_all"):
            dim = self.to_dim if self.kind == "all_to_all" else self.dim
            assert dim is not None
            prefix = layout.dims[dim] or self._prefix(dim)
            assert parts_of(prefix) == parts_of(self._prefix(dim))
            layout = layout.with_dim(dim, prefix + self.axes)
        return layout

    def _prefix(self, dim: int) -> tuple[str, ...]:
        return tuple(f"/{count}" for at, count in self.parts if at == dim)

    def place(self, placement: Placement) -> Placement:
        """Return the placement of the value after this movement."""
        pending = {*placement.pending} - {*self.axes} | {*(self.axes if self.pending else ())}
        return Placement(self.apply(placement.layout), pending)
