"""Local calls: the function and arguments that one rank runs for a node.

Most operators take the pieces as they are. Those that carry sizes (reshapes, expand, creation) or
counts of channels (grouped convolution, group norm) get those of the rank's piece; those that draw
random numbers get the place where it starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.layout import Layout, axes_of
from autopar.mesh import Mesh
from autopar.strategies.kernels import zero_result, zero_results
from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.strategies.node_info import flat_values, info
from autopar.strategies.registry import OperatorCall, traits_of
from autopar.strategies.results import has_results
from autopar.strategies.rule import Rule
from autopar.strategies.strategy import Strategy
from autopar.tensor_type import TensorType

Types = TensorType | tuple[TensorType, ...]
LocalCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def localize_arguments(
    node: fx.Node, types: Types, mesh: Mesh, rank: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call on `rank`; its tensors are still the nodes.

    `types` are the global shapes of the outputs and their layouts.
    """
    output_type = flat_values(types)[0]
    shape = output_type.layout.local_shape(output_type.shape, mesh, rank)
    if shape == output_type.shape and not traits_of(node).as_reshape:
        return node.args, dict(node.kwargs)
    return arguments_of_piece(node, shape)


def arguments_of_piece(
    node: fx.Node, shape: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call whose (first) output has a piece's shape."""
    traits, args, kwargs = traits_of(node), list(node.args), dict(node.kwargs)
    if traits.as_reshape:
        return (args[0], list(shape)), {}
    for name, of_piece in traits.of_piece.items():
        call = OperatorCall(node)
        value, place = of_piece(call, shape), list(call.arguments).index(name)
        if name not in kwargs and place < len(args):
            args[place] = value
        elif value != call[name]:
            kwargs[name] = value
    return tuple(args), kwargs


def joint_arguments(node: fx.Node, types: Types, mesh: Mesh) -> dict[str, Any]:
    """Return the arguments, by name, of a call that ranks carry out together.

    Counts of channels and the like are the same on all ranks: such dims are cut evenly.
    """
    args, kwargs = localize_arguments(node, types, mesh, 0)
    defaults = OperatorCall(node).arguments
    return {**defaults, **dict(zip(defaults, args)), **kwargs}


def placed_arguments(
    arguments: Mapping[str, Any], rule: Rule, strategy: Strategy, mesh: Mesh, rank: int
) -> dict[str, Any]:
    """Return `arguments` as `rank` gives them, each `DrawPlace` that of the rank's piece."""
    return {name: _of_piece(a, rule, strategy, mesh, rank) for name, a in arguments.items()}


def piece_call(
    node: fx.Node,
    rule: Rule | None,
    strategy: Strategy | None,
    *,
    types: Types,
    mesh: Mesh,
    rank: int,
) -> LocalCall:
    """Return the function and arguments on `rank`; without a rule the call is whole."""
    traits = traits_of(node)
    takes_all = traits.takes_nothing or not node.all_input_nodes
    if rule is not None and strategy is not None and not takes_all:
        lengths = [
            rule.bounds(factor, strategy, mesh, rank)[1] for factor in rule.cuts_of(strategy)
        ]
        if 0 in lengths:
            shapes = [list(t.layout.local_shape(t.shape, mesh, rank)) for t in flat_values(types)]
            dtypes = [type_.dtype for type_ in flat_values(types)]
            learns = {"learns": info(node).differentiable}
            if has_results(node):
                return zero_results, (shapes, dtypes, *node.all_input_nodes), learns
            return zero_result, (shapes[0], dtypes[0], *node.all_input_nodes), learns
    # Every reshape that looks at sizes becomes `reshape`.
    function = torch.ops.aten.reshape.default if traits.as_reshape else node.target
    args, kwargs = localize_arguments(node, types, mesh, rank)
    if rule is not None and strategy is not None:
        args = tuple(_of_piece(a, rule, strategy, mesh, rank) for a in args)
    return function, args, kwargs  # type: ignore[return-value]


def _of_piece(argument: Any, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int) -> Any:
    if isinstance(argument, DrawPlace):
        return draw_place_of_piece(argument, rule, strategy, mesh, rank)
    return argument


def draw_place_of_piece(
    place: DrawPlace, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int
) -> DrawPlace:
    """Return the place of a rank's piece in the whole that is drawn, in the output's first dims."""
    starts = []
    for dim, size in zip(rule.outputs[0], place.shape):
        first = rule.bounds(dim[0], strategy, mesh, rank)[0] if dim and size > 1 else 0
        starts.append(first * math.prod(rule.sizes[factor] for factor in dim[1:]))
    if place.sliced is not None:
        starts[place.sliced[0]] += place.sliced[1]
    parts = [1] * len(starts)
    layout = rule.signature(strategy).outputs[0]
    for at, count in layout.parts:
        if at < len(starts) and place.shape[at] > 1:
            size = math.prod(rule.sizes[factor] for factor in rule.outputs[0][at]) // count
            cut = Layout(axes_of(layout.dims[at]))
            starts[at], parts[at] = cut.bounds_in(0, (size,), mesh, rank)[0], count
    return place._replace(starts=tuple(starts), parts=tuple(parts) if layout.parts else ())
