"""Tolerance: the error that rounding may cause, for each result of a program on its own.

A program in float64 with a part in bfloat16 is compared to 1e-9 wherever that part does not reach.
Other results are compared to the movement that `rounding.measure_tolerances` has seen. Where that
exceeds `PROVING_LIMIT`, equality proves a result right, a larger difference proves it wrong, and
anything between proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.captured import Captured
from autopar.strategies.node_info import info

PROVING_LIMIT = 0.1  # a relative error that is allowed beyond this proves nothing
SAFETY_FACTOR = 8  # what is allowed, in moves that were measured
ResultKey = tuple[str, str]  # kind and name, as of a `Comparison`


@dataclass(frozen=True)
class Tolerance:
    """The error that rounding may cause in one result."""

    relative: float  # to the largest element of a tensor
    floor: float  # a tensor counts as this large, a gradient as this share of the largest one

    @classmethod
    def of(cls, eps: float) -> Tolerance:
        """Return 1e-9 for float64, 2e-5 for float32, 6e-2 for bfloat16, by their `eps`.

        Some gradients are zero but for the rounding of larger ones: softmax does not see the bias
        of keys. Their floor is a few units in the last place of the largest gradient.
        """
        relative = max(eps**0.5 / 16, 8 * eps, 1e-9)
        return cls(relative, max(8 * eps / relative, 1e-4))


@dataclass(frozen=True)
class Tolerances:
    """The tolerance of each result of one program."""

    strict: Tolerance  # of what no coarse number reaches
    coarse: Tolerance  # the widest
    eps: float  # numbers with a larger one are coarse
    moved: Mapping[ResultKey, float] = field(default_factory=dict)  # by rounding, relative

    @classmethod
    def at_most(cls, captured: Captured, own: torch.dtype) -> Tolerances:
        """Return the widest tolerances of a program in dtype `own`, before measuring."""
        coarsest = max(map(eps_of, _computed_dtypes(captured)), default=0.0)
        eps = min(eps_of(own), coarsest)
        return cls(Tolerance.of(eps), Tolerance.of(coarsest), eps)

    @property
    def are_one(self) -> bool:
        return self.strict == self.coarse

    def of(self, kind: str, name: str) -> Tolerance:
        """Return the tolerance of one result."""
        moved = SAFETY_FACTOR * self.moved.get((kind, name), 0.0)
        if not moved:
            return self.strict
        relative = min(max(moved, self.strict.relative), self.coarse.relative)
        return Tolerance(relative, self.coarse.floor)

    def inside(self, graph: fx.Graph) -> dict[str, Tolerance]:
        """Return the tolerance of each value of a graph, to find where a difference begins."""
        coarse = Tolerance(min(self.coarse.relative, PROVING_LIMIT), self.coarse.floor)
        tolerances: dict[str, Tolerance] = {}
        for node in graph.nodes:
            dtypes = _dtypes_of(node) if node.op == "call_function" else []
            is_coarse = any(eps_of(dtype) > self.eps for dtype in dtypes)
            reached = is_coarse or any(tolerances[n.name] is coarse for n in node.all_input_nodes)
            tolerances[node.name] = coarse if reached else self.strict
        return tolerances


def eps_of(dtype: torch.dtype) -> float:
    """Return the distance of 1 from the next number; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def to_double_precision(value: Tensor) -> Tensor:
    """Return a value in double precision: float8 has not even `equal`."""
    return value.detach().to(torch.complex128 if value.is_complex() else torch.float64)


def _computed_dtypes(captured: Captured) -> set[torch.dtype]:
    """Return the dtypes that a program computes, with those of its parameters and buffers."""
    states = captured.parameters.keys() | captured.buffers.keys()
    nodes = (n for n in captured.graph.nodes if n.op == "call_function" or n.name in states)
    return {dtype for node in nodes for dtype in _dtypes_of(node)}


def _dtypes_of(node: fx.Node) -> list[torch.dtype]:
    leaves = pytree.tree_leaves(info(node).val)
    return [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)]
