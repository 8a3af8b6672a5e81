"""Movement: one row of the table of movements, on one tensor over some axes.

On each axis a value is replicated, cut or a partial sum. A consumer that works on cut data gives
its replicated inputs a gradient that is a partial sum; such a replica is *pending*: it reads like
any other, and its gradient has still to be summed. Every row says how a value moves forward and
how its gradient moves back:

    forward                 becomes pending   not pending
    identity       R -> R   all_reduce        (nothing to do)
    all_reduce     P -> R   all_reduce        identity
    all_gather     S -> R   reduce_scatter    slice
    reduce_scatter P -> S                     all_gather
    slice          R -> S                     all_gather
    all_to_all     S -> S                     all_to_all
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.layout import Layout, Placement

KINDS = ("identity", "all_reduce", "all_gather", "reduce_scatter", "slice", "all_to_all")

_BACKWARD = {
    ("identity", True): "all_reduce",
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

    @property
    def backward(self) -> str:
        """The kind of collective that carries the gradient back."""
        return _BACKWARD[self.kind, self.pending]

    @property
    def reversed(self) -> Movement:
        """What carries the gradient back, as a movement with a backward of its own.

        Every term of a sum receives the same gradient, and uses it in its own way."""
        dim, to_dim = self.dim, self.to_dim
        if self.kind == "all_to_all":
            dim, to_dim = to_dim, dim
        is_of_terms = self.kind in ("all_reduce", "reduce_scatter")
        return Movement(self.backward, self.axes, dim, to_dim, pending=is_of_terms)

    def apply(self, layout: Layout) -> Layout:
        """The layout of the value after this movement."""
        if self.kind in ("all_reduce", "reduce_scatter"):
            layout = layout.with_partial(a for a in layout.partial if a not in self.axes)
        if self.kind in ("all_gather", "all_to_all"):
            assert self.dim is not None
            assert self.axes
            assert layout.dims[self.dim][-len(self.axes) :] == self.axes
            layout = layout.with_dim(self.dim, layout.dims[self.dim][: -len(self.axes)])
        if self.kind in ("reduce_scatter", "slice", "all_to_all"):
            dim = self.to_dim if self.kind == "all_to_all" else self.dim
            assert dim is not None
            layout = layout.with_dim(dim, layout.dims[dim] + self.axes)
        return layout

    def place(self, placement: Placement) -> Placement:
        """Where the value is after this movement."""
        pending = self.axes if self.pending else ()
        return Placement(self.apply(placement.layout), (*placement.pending, *pending))
