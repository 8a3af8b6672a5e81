"""Constants: what depends on no input is computed now, if it is small."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.capture.graph_builder import GraphBuilder, Recipe, ValueFact
from autopar.capture.listing import operator_name
from autopar.capture.randomness import may_be_random
from autopar.strategies import traits_of
from autopar.strategies.node_info import info
from autopar.strategies.results import has_results, maker, tensors_of

aten = torch.ops.aten

LARGEST_CONSTANT = 1 << 20  # bytes kept with the graph
LARGEST_EVALUATED = 1 << 28  # bytes of any value computed on the way


def fold_constants(builder: GraphBuilder) -> None:
    """Small values that depend on no input become constants."""
    evaluator = Evaluator(builder)
    for node in builder.calls():
        value = info(node).val
        is_small = isinstance(value, torch.Tensor) and value.nbytes <= LARGEST_CONSTANT
        if not is_small or not evaluator.is_constant(node):
            continue
        if all(evaluator.is_constant(user) for user in node.users):
            continue  # an inner value of a larger constant, unless that one is too large
        real = evaluator.value(node)
        if real is not None:
            constant = builder.constant(operator_name(node.target), real.contiguous(), node)
            builder.recipes[constant.name] = evaluator.recipe(node)
            info(constant).val = value
            evaluator.know(constant, real)
            node.replace_all_uses_with(constant)


class Evaluator:
    """Computes the values of nodes that depend on no input, on the CPU.

    Values are kept small: a dim along which a value does not change is kept as one entry,
    expanded. A causal mask of a large batch is so computed once, not for each sequence.
    """

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder = builder
        self.values: dict[fx.Node, torch.Tensor | None] = {}
        self.constant: dict[fx.Node, bool] = {}
        for node in builder.graph.nodes:
            self.constant[node] = self._is_constant(node)

    def is_constant(self, node: fx.Node) -> bool:
        """Whether `node` depends on no input, parameter or buffer."""
        return self.constant.get(node, False)

    def _is_constant(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            value = self.builder.constants.get(node.name)
            return value is not None and value.device.type == "cpu" and type(value) is torch.Tensor
        target = maker(node).target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            return False
        if may_be_random(node) or "empty" in str(target):
            return False
        if traits_of(node).shape_only:
            return not info(node).differentiable  # a gradient of zeros is one
        return all(self.constant[source] for source in node.all_input_nodes)

    def ask(self, node: fx.Node, question: Callable[[torch.Tensor], Any]) -> Any:
        """The answer of a constant node's value to a question that decides how the program goes on;
        None for a value that is too large to compute. The question is noted."""
        value = self.value(node)
        if value is None:
            return None
        answer = question(value)
        self.builder.value_facts.append(ValueFact(self.recipe(node), question, answer))
        return answer

    def recipe(self, node: fx.Node) -> Recipe:
        """The calls that make a constant node, of tensors that forward makes of numbers."""
        recipe = Recipe(fx.Graph(), {})
        recipe.graph.output(self._copy(node, recipe, {}))
        return recipe

    def _copy(self, node: fx.Node, recipe: Recipe, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Copy a call to a recipe, and all that it reads."""
        if node in copies:
            return copies[node]
        graph = recipe.graph
        if node.op == "placeholder":
            known = self.builder.recipes.get(node.name)
            if known is not None:
                result: Any = known.graph.output_node().args[0]
                return self._copy(result, recipe, copies)
            copies[node] = placeholder = graph.placeholder(node.name)
            recipes = self.builder.recipes.values()  # they hold what has been dropped since
            everywhere = [self.builder.constants, *(recipe.constants for recipe in recipes)]
            recipe.constants[placeholder.name] = next(
                values[node.name] for values in everywhere if node.name in values
            )
            return placeholder
        args, kwargs = _on_host(node)
        if "val" in node.meta and traits_of(node).shape_only and isinstance(args[0], fx.Node):
            like = info(args[0]).val
            args = (graph.call_function(_blank, (tuple(like.shape), like.dtype)), *args[1:])
        else:
            copy = partial(self._copy, recipe=recipe, copies=copies)
            args, kwargs = fx.map_arg((args, kwargs), copy)
        copies[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        return copies[node]

    def know(self, node: fx.Node, value: torch.Tensor) -> None:
        """Add a constant made since."""
        self.constant[node], self.values[node] = True, value

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The value of a constant node, or None if it is too large to compute."""
        if node not in self.values:
            self.values[node] = self._evaluate(node)
        return self.values[node]

    def _evaluate(self, node: fx.Node) -> torch.Tensor | None:
        if node.op == "placeholder":
            return self.builder.constants[node.name]
        args, kwargs = _on_host(node)
        if traits_of(node).shape_only and isinstance(args[0], fx.Node):
            source = info(args[0]).val
            args = (_blank(source.shape, source.dtype), *args[1:])
        inputs = {
            source: self.value(source)
            for source in node.all_input_nodes
            if self.is_constant(source)
        }
        if any(value is None for value in inputs.values()):
            return None
        args, kwargs = fx.map_arg((args, kwargs), lambda source: inputs[source])
        return self._compute(node, args, kwargs)

    def _compute(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if has_results(node):
            total = sum(tensor.nbytes for tensor in tensors_of(node))
            return node.target(*args, **kwargs) if total <= LARGEST_EVALUATED else None  # type: ignore[operator]
        value = info(node).val
        shape = value.shape
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            same = [
                dim
                for dim in range(-len(shape), 0)
                if all(_is_constant_along(t, dim) for t in tensors)
            ]
            args = pytree.tree_map_only(torch.Tensor, lambda t: _narrowed(t, same), args)
            size = value.dtype.itemsize
            for dim in range(-len(shape), 0):
                size *= 1 if dim in same else shape[dim]
            if size > LARGEST_EVALUATED:
                return None
            return node.target(*args, **kwargs).expand(shape)  # type: ignore[operator]
        if value.nbytes > LARGEST_EVALUATED and node.target is not aten.expand.default:
            return None
        return _compressed(node.target(*args, **kwargs))  # type: ignore[operator]


def _on_host(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call on the CPU."""
    kwargs = {key: value for key, value in node.kwargs.items() if key != "pin_memory"}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    return node.args, kwargs


def _blank(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of which only the shape and dtype matter."""
    return torch.zeros((), dtype=dtype).expand(shape)


def _is_constant_along(value: torch.Tensor, dim: int) -> bool:
    return -dim > value.ndim or value.shape[dim] == 1 or value.stride(dim) == 0


def _narrowed(value: torch.Tensor, dims: list[int]) -> torch.Tensor:
    for dim in dims:
        if -dim <= value.ndim and value.shape[dim] > 1:
            value = value.narrow(dim, 0, 1)
    return value


def _compressed(value: torch.Tensor) -> torch.Tensor:
    """The same value, expanded along the dims along which it does not change."""
    shape = value.shape
    for dim in range(value.ndim):
        if shape[dim] > 1 and value.numel() <= 1 << 24:
            first = value.narrow(dim, 0, 1)
            if value.stride(dim) == 0 or torch.equal(first.expand_as(value), value):
                value = first
    return value.expand(shape)
