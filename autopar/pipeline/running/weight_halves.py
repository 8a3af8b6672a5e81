"""Weight halves: the parts of backward that schedules with a split backward defer.

    halves = WeightHalves()
    y = halves.deferring(linear, WeightInputs((1,), product=True))(x, w)

Backward through y gives the gradient of x. The small graph of this one operator and the gradient of
y, from which the gradient of w follows, stay in `halves`; autograd has freed everything else.
Where the gradient of w costs no product (norms, biases, tables) it comes with the gradient of x. It
then waits only if w is computed from parameters, through which backward goes once.
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
    """Hold the part of one operator's backward that is still to be done."""

    weights: list[Tensor | GradientEdge]
    # The operator's graph: edges of its results, and of its weights. None: gradients are computed.
    product: tuple[list[GradientEdge | None], list[GradientEdge]] | None = None
    gradients: list[Tensor | None] = field(default_factory=list)  # of results, or of the weights

    def of_weights(self) -> list[Tensor | None]:
        """Return the gradients of the weights, and release the operator's graph."""
        gradients, self.gradients = self.gradients, []
        if self.product is not None:
            results, inputs = self.product
            self.product = None
            gradients = list(_gradients(results, inputs, gradients, retain=False))
        return gradients


def add_weight_gradients(halves: Sequence[WeightHalf]) -> None:
    """Add the gradients of weights to those of parameters, the last of the program first.

    Each is added alone, except those of weights that are computed from parameters: these, and those
    of the parameters behind them, come last in one pass, so that each parameter is reached by one.
    """
    count = Counter(id(w) for half in halves for w in half.weights if isinstance(w, Tensor))
    edges = [w for half in halves for w in half.weights if not isinstance(w, Tensor)]
    behind = _parameters_behind(edges)
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
        targets, gradients = zip(*waiting)
        torch.autograd.backward(targets, gradients)


def _parameters_behind(edges: Iterable[GradientEdge]) -> set[int]:
    """Return the identities of the parameters from which values are computed."""
    parameters: set[int] = set()
    seen = {edge.node for edge in edges}
    nodes = list(seen)
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            parameters.add(id(leaf))
        more = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= more
        nodes += more
    return parameters


class WeightHalves:
    """Record the weight halves of the operators that run."""

    def __init__(self) -> None:
        self._recorded: list[WeightHalf] = []
        # An empty tensor that requires a gradient, so that results computed with it do.
        self._anchor = torch.empty(0, requires_grad=True)

    def take(self) -> list[WeightHalf]:
        """Return the halves recorded since the last call, in the order of forward."""
        taken, self._recorded = self._recorded, []
        return taken

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Discard the halves of operators that run again in backward: their first run deferred."""
        before, self._recorded = self._recorded, []
        try:
            yield
        finally:
            self._recorded = before

    def deferring(
        self, function: Callable[..., Tensor], weights: WeightInputs
    ) -> Callable[..., Tensor]:
        """Return `function` with its weight gradients deferred to a recorded half."""

        def run(*args: Any, **kwargs: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            leaves, spec = _flattened(args, kwargs)
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            # A parameter may have been frozen after the capture.
            learning = [at for at in weights.positions if leaves[places[at]].requires_grad]
            if not learning:
                return function(*args, **kwargs)
            chosen = [places[position] for position in learning]
            half = WeightHalf([_gradient_target(leaves[place]) for place in chosen])
            self._recorded.append(half)

            def call(tensors: Sequence[Tensor]) -> Tensor:
                arguments = leaves.copy()
                for place, tensor in zip(places, tensors):
                    arguments[place] = tensor
                if spec is None:
                    return function(*arguments)
                inner, keywords = pytree.tree_unflatten(arguments, spec)
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
    """Run backward only as far as the inputs that are not weights."""

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
            entries = [
                _Entry.apply(anchor, tensor.detach())
                if place in weights or tensor.requires_grad
                else tensor
                for place, tensor in enumerate(tensors)
            ]
            result = call(entries)
            several = isinstance(result, tuple)
            results = list(result) if several else [result]
            ends = [get_gradient_edge(y) if y.requires_grad else None for y in results]
            edges = {
                place: get_gradient_edge(tensor)
                for place, tensor in enumerate(entries)
                if tensor.requires_grad
            }
        half.product = ends, [edges.pop(place) for place in weights]
        ctx.half, ctx.ends, ctx.inputs, ctx.count = half, ends, edges, len(tensors)
        ctx.set_materialize_grads(False)
        outputs = [y.detach() for y in results]
        ctx.mark_non_differentiable(*(y for y, end in zip(outputs, ends) if end is None))
        return tuple(outputs) if several else outputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.half.gradients = [None if g is None else _with_own_memory(g) for g in gradients]
        inputs = list(ctx.inputs.values())
        by_place = dict(zip(ctx.inputs, _gradients(ctx.ends, inputs, gradients, retain=True)))
        count, ctx.half, ctx.ends, ctx.inputs = ctx.count, None, None, None
        return None, None, None, None, *(by_place.get(place) for place in range(count))


def _gradients(
    results: Sequence[GradientEdge | None],
    inputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    *,
    retain: bool,
) -> Sequence[Tensor | None]:
    """Return the gradients of a small graph's inputs, from those of its results that arrived."""
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
    """Stop backward at weights, and store their gradients for later."""

    @staticmethod
    def forward(ctx: Any, half: WeightHalf, anchor: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        half.gradients = [None] * len(weights)
        ctx.half = half
        ctx.set_materialize_grads(False)
        return tuple(weight.detach() for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.half.gradients = [None if g is None else _with_own_memory(g) for g in gradients]
        return None, None, *(None for _ in gradients)


class _Entry(torch.autograd.Function):
    """Begin a separate graph at the data of a tensor; unlike a leaf, the graph does not keep it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _gradient_target(weight: Tensor) -> Tensor | GradientEdge:
    """Return the target of a weight's gradient: a leaf itself, of other tensors only the edge."""
    return weight if weight.is_leaf else get_gradient_edge(weight)


def _flattened(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec | None]:
    """Return the leaves of a call, and its structure; None if the leaves are its arguments."""
    if not kwargs and not any(isinstance(argument, list | tuple | dict) for argument in args):
        return list(args), None
    return pytree.tree_flatten((args, kwargs))


def _with_own_memory(gradient: Tensor) -> Tensor:
    """Return a gradient that keeps only its own memory alive: a copy of a piece."""
    is_piece = gradient.untyped_storage().nbytes() > gradient.numel() * gradient.itemsize
    return gradient.clone() if is_piece else gradient
