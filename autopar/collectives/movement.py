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

from autopar.layout import Layout, Placement, axes_of, parts_of

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


@dataclass(frozen=True)
class Movement:
    """One collective over `axes` (one group, in the order of the mesh), with its backward."""

    kind: str
    axes: tuple[str, ...]
    dim: int | None = None  # the dim that is gathered, scattered, sliced or (all_to_all) joined
    to_dim: int | None = None  # all_to_all: the dim that is cut instead
    pending: bool = False  # the value's gradient arrives as a partial sum over `axes`
    parts: tuple[int, int] | None = None  # which of its dims is cut in parts, and their number

    @property
    def backward(self) -> str:
        """The kind of collective that carries the gradient back."""
        return _BACKWARD[self.kind, self.pending]

    @property
    def is_sum_back(self) -> bool:
        """Whether it moves nothing, and sums the gradient."""
        return self.kind == "identity" and self.pending

    @property
    def hands_back(self) -> bool:
        """Whether the gradient lies where that of its result was."""
        return self.is_sum_back or self.kind == "all_reduce"

    @property
    def reversed(self) -> Movement:
        """What carries the gradient back, as a movement with a backward of its own.

        Every term of a sum receives the same gradient, and uses it in its own way."""
        dim, to_dim = self.dim, self.to_dim
        if self.kind == "all_to_all":
            dim, to_dim = to_dim, dim
        is_of_terms = self.kind in ("all_reduce", "reduce_scatter")
        return Movement(self.backward, self.axes, dim, to_dim, is_of_terms, self.parts)

    @property
    def seen(self) -> Movement:
        """The same on what `apart` gives: nothing is in parts there."""
        if self.parts is None:
            return self
        at, _ = self.parts
        dim, to_dim = (d if d is None else d + (d >= at) for d in (self.dim, self.to_dim))
        return Movement(self.kind, self.axes, dim, to_dim, self.pending)

    def apart(self, value: Tensor) -> Tensor:
        """A value, or its piece, with a dim for the parts."""
        return value if self.parts is None else value.unflatten(self.parts[0], (self.parts[1], -1))

    def together(self, value: Tensor) -> Tensor:
        """Without that dim."""
        return value if self.parts is None else value.flatten(self.parts[0], self.parts[0] + 1)

    def apply(self, layout: Layout) -> Layout:
        """The layout of the value after this movement."""
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
        is_in_parts = self.parts is not None and self.parts[0] == dim
        return (f"/{self.parts[1]}",) if is_in_parts else ()  # type: ignore[index]

    def place(self, placement: Placement) -> Placement:
        """Where the value is after this movement."""
        pending = {*placement.pending} - {*self.axes} | {*(self.axes if self.pending else ())}
        return Placement(self.apply(placement.layout), pending)
