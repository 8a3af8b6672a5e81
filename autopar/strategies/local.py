"""Local calls: what one rank runs of a node, when its inputs and output are cut.

Most operators take the pieces as they are. Those that carry sizes (reshapes, expand, creation) or
counts of channels (grouped convolution, group norm) get those of the rank's piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.layout import TensorType
from autopar.mesh import Mesh
from autopar.strategies.kernels import KERNELS, no_results, nothing
from autopar.strategies.node_info import flat, info
from autopar.strategies.registry import Call
from autopar.strategies.results import has_results, is_result
from autopar.strategies.rule import Rule, Strategy

aten = torch.ops.aten
Types = TensorType | tuple[TensorType, ...]
LocalCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
# Which argument holds the shape of the output.
_SHAPE_ARGUMENT = {
    aten.view: "size",
    aten.reshape: "shape",
    aten._unsafe_view: "size",
    aten.expand: "size",
    aten.zeros: "size",
    aten.ones: "size",
    aten.full: "size",
    aten.empty: "size",
    aten.new_zeros: "size",
    aten.new_ones: "size",
    aten.new_full: "size",
    aten.new_empty: "size",
}
# Which argument counts groups of channels of the output.
_COUNT_ARGUMENT = {
    aten.conv1d: "groups",
    aten.conv2d: "groups",
    aten.conv3d: "groups",
    aten.conv_transpose1d: "groups",
    aten.conv_transpose2d: "groups",
    aten.conv_transpose3d: "groups",
    aten.convolution: "groups",
    aten.group_norm: "num_groups",
}
# Reshapes that would read a piece of size 1 as a dim to drop, or that want certain strides.
_AS_RESHAPE = {aten.squeeze, aten.view, aten._unsafe_view, aten.unflatten}


def local_function(target: Any) -> Any:
    """The function to call on pieces: every reshape that looks at sizes becomes `reshape`."""
    return aten.reshape.default if _packet(target) in _AS_RESHAPE else target


def localize_arguments(
    node: fx.Node, types: Types, mesh: Mesh, rank: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `local_function(node.target)` on `rank`, tensors still the nodes' own.

    `types` are the global shapes of the outputs and their layouts.
    """
    output_type = flat(types)[0]
    args, kwargs = tuple(node.args), dict(node.kwargs)
    if is_result(node):
        return args, kwargs
    packet = _packet(node.target)
    shape = list(output_type.layout.local_shape(output_type.shape, mesh, rank))
    if packet in _AS_RESHAPE:
        return (args[0], shape), {}
    if packet in _SHAPE_ARGUMENT:
        return _replaced(node, _SHAPE_ARGUMENT[packet], shape)
    if shape == list(output_type.shape):
        return args, kwargs
    if packet is aten.repeat:
        # What is copied is whole: the piece has so many copies.
        repeats = [
            length * times // size if times > 1 else times
            for length, size, times in zip(shape, output_type.shape, Call(node)["repeats"])
        ]
        return _replaced(node, "repeats", repeats)
    if packet is aten.repeat_interleave:
        return _repeated(node, output_type, shape)
    name = _COUNT_ARGUMENT.get(packet)
    count = 1 if name is None else Call(node)[name]
    if name is not None and count > 1:
        channels = 1 if name == "num_groups" else len(shape) - 1 - _space(node)
        return _replaced(node, name, shape[channels] * count // output_type.shape[channels])
    return args, kwargs


def local_call(node: fx.Node, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int) -> LocalCall:
    """Function and arguments on `rank`; not for strategies whose kernel expands."""
    types = tuple(
        TensorType(tuple(value.shape), value.dtype, layout)
        for value, layout in zip(Call(node).outputs, rule.signature(strategy).outputs)
    )
    output_types = types if has_results(node) else types[0]
    needed = rule.kernel(strategy)
    if needed is None:
        return piece_call(node, rule, strategy, output_types, mesh, rank)
    factor, name = needed
    kernel = KERNELS[name]
    if kernel.expand is not None:
        raise ValueError(f"{name} expands into several nodes; see autopar/strategies/kernels")
    args, kwargs = localize_arguments(node, output_types, mesh, rank)
    start, _ = rule.bounds(factor, strategy, mesh, rank)
    return kernel.function, args, {**kwargs, "start": start}


def piece_call(
    node: fx.Node,
    rule: Rule | None,
    strategy: Strategy | None,
    types: Types,
    mesh: Mesh,
    rank: int,
) -> LocalCall:
    """The same for calls without a kernel of their own; without a rule, whole on every rank."""
    if rule is not None and strategy is not None and node.all_input_nodes:
        lengths = [rule.bounds(factor, strategy, mesh, rank)[1] for factor, _ in strategy.cuts]
        if 0 in lengths:
            shapes = [list(t.layout.local_shape(t.shape, mesh, rank)) for t in flat(types)]
            dtypes = [type_.dtype for type_ in flat(types)]
            learns = info(node).differentiable
            if has_results(node):
                return no_results, (shapes, dtypes, learns, *node.all_input_nodes), {}
            return nothing, (shapes[0], dtypes[0], learns, *node.all_input_nodes), {}
    return local_function(node.target), *localize_arguments(node, types, mesh, rank)


def _repeated(
    node: fx.Node, output_type: TensorType, shape: list[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A dim of size 1 is repeated as often as the piece is long; a given size is the piece's."""
    call = Call(node)
    dim = call.dim(call["dim"])
    repeats = shape[dim] if output_type.shape[dim] == call["repeats"] else call["repeats"]
    return (call["self"], repeats, call["dim"]), {}


def _packet(target: Any) -> Any:
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target


def _space(node: fx.Node) -> int:
    """The number of dims that a convolution slides over."""
    return len(info(Call(node)["weight"]).val.shape) - 2


def _replaced(node: fx.Node, name: str, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with one changed, wherever it stands."""
    args, kwargs = list(node.args), dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index(name)
    if name not in kwargs and place < len(args):
        args[place] = value
    else:
        kwargs[name] = value
    return tuple(args), kwargs
