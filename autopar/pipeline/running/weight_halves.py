"""Weight halves: the parts of backward that schedules with a split backward put off.

    halves = WeightHalves()
    y = halves.apart(linear, WeightInputs((1,), product=True))(x, w)

Backward through y gives the gradient of x. What that of w is made of, the small graph of this one
operator and the gradient of y, stays in `halves`; all else that autograd kept is free by then.
Where the gradient of w costs no product (norms, biases, tables) it comes with that of x. It then
waits only if w is itself made of parameters, whose backward is gone through once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from autopar.strategies.node_info import WeightInputs


@dataclass
class WeightHalf:
    """What is left to do of the backward of one operator."""

    weights: list[Tensor | GradientEdge]
    # The operator's own graph: its results, and what stands for its weights. None: they are done.
    product: tuple[list[GradientEdge | None], list[GradientEdge]] | None = None
    gradients: list[Tensor | None] = field(default_factory=list)  # of results, or of the weights

    def of_weights(self) -> list[Tensor | None]:
        """The gradients of the weights; lets go of them and of all else."""
        found, self.gradients = self.gradients, []
        if self.product is not None:
            results, inside = self.product
            self.product = None
            found = list(_gradients(results, inside, found, False))
        return found


def finish(halves: Sequence[WeightHalf]) -> None:
    """Add the gradients of weights to those of parameters, the last of the program first.

    One at a time; but those of weights that are made of others come at the end in one pass, and
    with them those of parameters that this pass reaches: each parameter has all its gradients
    within one pass.
    """
    count = Counter(id(w) for half in halves for w in half.weights if isinstance(w, Tensor))
    made = [w for half in halves for w in half.weights if not isinstance(w, Tensor)]
    behind = _parameters_behind(made)
    waiting: list[tuple[Tensor | GradientEdge, Tensor]] = []
    for half in reversed(halves):
        weights = half.weights
        for weight, gradient in zip(weights, half.of_weights()):
            if gradient is None:
                continue
            if not isinstance(weight, Tensor) or count[id(weight)] > 1 or id(weight) in behind:
                waiting.append((weight, gradient))
            else:
                torch.autograd.backward(weight, gradient)
            del gradient
    if waiting:
        edges, gradients = zip(*waiting)
        torch.autograd.backward(edges, gradients)


def _parameters_behind(made: Iterable[GradientEdge]) -> set[int]:
    """The identities of the parameters that values are made of."""
    found: set[int] = set()
    seen = {edge.node for edge in made}
    nodes = list(seen)
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        more = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= more
        nodes += more
    return found


class WeightHalves:
    """Records the weight halves of the operators that run."""

    def __init__(self) -> None:
        self._recorded: list[WeightHalf] = []
        # Nothing, that takes a gradient: what is made with it does too.
        self._anchor = torch.empty(0, requires_grad=True)

    def take(self) -> list[WeightHalf]:
        """Those recorded since the last time, in the order of forward."""
        taken, self._recorded = self._recorded, []
        return taken

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What runs again in backward puts nothing off: its first run has."""
        before, self._recorded = self._recorded, []
        try:
            yield
        finally:
            self._recorded = before

    def apart(
        self, function: Callable[..., Tensor], weights: WeightInputs
    ) -> Callable[..., Tensor]:
        """`function`, whose gradients of weights are left for later."""

        def run(*args: Any, **kwargs: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            leaves, spec = _flattened(args, kwargs)
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            # A parameter may be frozen since.
            learning = [at for at in weights.positions if leaves[places[at]].requires_grad]
            if not learning:
                return function(*args, **kwargs)
            chosen = [places[position] for position in learning]
            half = WeightHalf([_end(leaves[place]) for place in chosen])
            self._recorded.append(half)

            def call(tensors: Sequence[Tensor]) -> Tensor:
                given = leaves.copy()
                for place, tensor in zip(places, tensors):
                    given[place] = tensor
                if spec is None:
                    return function(*given)
                inner, keywords = pytree.tree_unflatten(given, spec)
                return function(*inner, **keywords)

            for place in chosen:
                leaves[place] = leaves[place].detach()
            if weights.product:
                tensors = [leaves[place] for place in places]
                return _Product.apply(call, half, learning, self._anchor, *tensors)
            gated = _Gate.apply(half, self._anchor, *(leaves[place] for place in chosen))
            for place, tensor in zip(chosen, gated):
                leaves[place] = tensor
            return call([leaves[place] for place in places])

        return run


class _Product(torch.autograd.Function):
    """Backward as far as the inputs that are no weights."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Callable[[Sequence[Tensor]], Tensor],
        half: WeightHalf,
        weights: list[int],
        anchor: Tensor,
        *tensors: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        with torch.enable_grad():
            given = [
                _Entry.apply(anchor, tensor.detach())
                if place in weights or tensor.requires_grad
                else tensor
                for place, tensor in enumerate(tensors)
            ]
            result = call(given)
            several = isinstance(result, tuple)
            results = list(result) if several else [result]
            ends = [get_gradient_edge(y) if y.requires_grad else None for y in results]
            edges = {
                place: get_gradient_edge(tensor)
                for place, tensor in enumerate(given)
                if tensor.requires_grad
            }
        half.product = ends, [edges.pop(place) for place in weights]
        ctx.half, ctx.ends, ctx.inputs, ctx.count = half, ends, edges, len(tensors)
        ctx.set_materialize_grads(False)
        given_out = [y.detach() for y in results]
        ctx.mark_non_differentiable(*(y for y, end in zip(given_out, ends) if end is None))
        return tuple(given_out) if several else given_out[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.half.gradients = [None if one is None else _own(one) for one in gradients]
        inputs = list(ctx.inputs.values())
        found = dict(zip(ctx.inputs, _gradients(ctx.ends, inputs, gradients, True)))
        count, ctx.half, ctx.ends, ctx.inputs = ctx.count, None, None, None
        return None, None, None, None, *(found.get(place) for place in range(count))


def _gradients(
    results: Sequence[GradientEdge | None],
    inputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    retain: bool,
) -> Sequence[Tensor | None]:
    """Of the inputs of a small graph, from those of its results that came."""
    pairs = [
        (result, gradient)
        for result, gradient in zip(results, gradients)
        if result is not None and gradient is not None
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    ends, seeds = zip(*pairs)
    return torch.autograd.grad(ends, inputs, seeds, retain_graph=retain, allow_unused=True)


class _Gate(torch.autograd.Function):
    """Backward stops here; what came is summed for later."""

    @staticmethod
    def forward(ctx: Any, half: WeightHalf, anchor: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        half.gradients = [None] * len(weights)
        ctx.half = half
        ctx.set_materialize_grads(False)
        return tuple(weight.detach() for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.half.gradients = [None if one is None else _own(one) for one in gradients]
        return None, None, *(None for _ in gradients)


class _Entry(torch.autograd.Function):
    """The same data, where a graph of its own begins: unlike a leaf, the graph does not keep it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _end(weight: Tensor) -> Tensor | GradientEdge:
    """Where the gradient of a weight goes: a parameter lives anyway, all else is let go."""
    return weight if weight.is_leaf else get_gradient_edge(weight)


def _flattened(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec | None]:
    """The leaves of a call; no structure if they are its arguments one by one."""
    if not kwargs and not any(isinstance(argument, list | tuple | dict) for argument in args):
        return list(args), None
    return pytree.tree_flatten((args, kwargs))


def _own(gradient: Tensor) -> Tensor:
    """A gradient that keeps no more memory than its own."""
    is_piece = gradient.untyped_storage().nbytes() > gradient.numel() * gradient.itemsize
    return gradient.clone() if is_piece else gradient
