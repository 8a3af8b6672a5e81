"""Compare replicas on the virtual mesh, so that a wrong rule or kernel fails at its node.

    parallelize(model, inputs, mesh=mesh, backend="virtual", check=True)

Every value must have the shape of its layout on every rank, with equal replicas. Their gradients
must be equal too, except over axes on which a gradient is still a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from autopar.errors import ExecutionError
from autopar.mesh import Mesh
from autopar.passes.gradient_sync import pending_axes
from autopar.strategies.node_info import info
from autopar.strategies.results import has_results
from autopar.verification.tolerance import eps_of, to_double_precision


class ReplicaCheck:
    """Checks the values of one program on the virtual mesh."""

    def __init__(self, graph: fx.Graph, mesh: Mesh) -> None:
        self.mesh = mesh
        self._shapes = {node: _shapes(node, mesh) for node in graph.nodes if _is_checked(node)}
        pending = pending_axes(graph)
        self._forward = {n: _leaders(mesh, info(n).type.layout.axes) for n in self._shapes}
        self._backward = {
            node: _leaders(mesh, (*info(node).type.layout.gradient.axes, *pending[node]))
            for node in self._shapes
        }

    def __call__(self, node: fx.Node, values: Sequence[Tensor]) -> None:
        """Check the values of all ranks now, and their gradients when backward brings them."""
        if node not in self._shapes:
            return
        for rank, (value, shape) in enumerate(zip(values, self._shapes[node])):
            if tuple(value.shape) != shape:
                raise ExecutionError(
                    "every rank's piece has the shape that the layout says",
                    got=f"{tuple(value.shape)} on rank {rank}; {node.name} is "
                    f"{info(node).type}, which is {shape} there",
                    remedy="correct the rule or the kernel of this operator",
                    source=info(node).source,
                )
        for rank, leader in enumerate(self._forward[node]):
            self._require_equal(node, "value", (leader, rank), (values[leader], values[rank]))
        arrived: dict[int, Tensor] = {}
        for rank, leader in enumerate(self._backward[node]):
            if values[rank].requires_grad:
                values[rank].register_hook(self._gradient_hook(node, rank, leader, arrived))

    def _gradient_hook(
        self, node: fx.Node, rank: int, leader: int, arrived: dict[int, Tensor]
    ) -> Callable[[Tensor | None], None]:
        shape = self._shapes[node][rank]

        def arrive(grad: Tensor | None) -> None:
            if grad is None:  # torch's form of zeros
                grad = torch.zeros(shape, dtype=info(node).type.dtype)
            first = arrived.setdefault(leader, grad.detach())
            self._require_equal(node, "gradient", (leader, rank), (first, grad))

        return arrive

    def _require_equal(
        self, node: fx.Node, what: str, ranks: tuple[int, int], values: tuple[Tensor, Tensor]
    ) -> None:
        if values[0] is values[1] or are_replicas(*values):
            return
        raise ExecutionError(
            f"replicas of one {what} are equal on all ranks",
            got=f"ranks {ranks[0]} and {ranks[1]} differ in the {what} of {node.name}, "
            f"{info(node).type}, by {_difference(*values):.3g}",
            remedy="correct the rule or the kernel of this operator or of those that read it",
            source=info(node).source,
        )


def _is_checked(node: fx.Node) -> bool:
    """Return whether a node has one tensor as its value."""
    return "type" in node.meta and not has_results(node)


def are_replicas(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding that memory alignment may cause."""
    eps = eps_of(first.dtype)
    if not eps:
        return torch.equal(first, second)
    if first.dtype.itemsize > 1 and torch.equal(first, second):  # float8 has no equal
        return True
    first, second = to_double_precision(first), to_double_precision(second)
    finite = first[first.isfinite()].abs()
    share = min(1e4 * eps, max(2**-4, eps))  # coarse numbers: some units in the last place
    tolerance = share * float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(first, second, 0, tolerance, equal_nan=True)


def _difference(first: Tensor, second: Tensor) -> float:
    return float((to_double_precision(first) - to_double_precision(second)).abs().max())


def _shapes(node: fx.Node, mesh: Mesh) -> list[tuple[int, ...]]:
    type_ = info(node).type
    return [type_.layout.local_shape(type_.shape, mesh, rank) for rank in range(mesh.size)]


def _leaders(mesh: Mesh, axes: Sequence[str]) -> list[int]:
    """Return for each rank the first rank with the same coordinates on `axes`."""
    others = tuple(name for name in mesh if name not in axes)
    first = {rank: ranks[0] for ranks in mesh.groups(others) for rank in ranks}
    return [first[rank] for rank in range(mesh.size)]
