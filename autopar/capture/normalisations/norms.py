"""Batch norm in steps that can be cut, its running statistics as visible writes; RMS norm."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, argument, shape_of
from autopar.capture.values import refresh
from autopar.errors import InvalidInput
from autopar.strategies.kernels import (
    batch_normalize,
    batch_sums,
    rms_norm,
    running_mean,
    running_var,
)
from autopar.strategies.node_info import info

aten = torch.ops.aten


def batch_norms(draft: GraphBuilder) -> None:
    """Statistics of the batch as sums, then the normalisation; with given statistics, a scale."""
    norms = list(draft.calls(aten.batch_norm.default))
    for node in norms:
        with draft.graph.inserting_before(node):
            mean = argument(node, "running_mean")
            if argument(node, "training") or mean is None:
                result = _with_batch_statistics(draft, node)
            else:
                result = _with_given_statistics(draft, node)
        draft.substitute(node, result)
    if norms:
        refresh(draft)  # in-place operators after a norm share the storage of its new result
    for node in draft.calls(aten.instance_norm.default):
        if argument(node, "running_mean") is not None:
            raise InvalidInput(
                "instance norm is captured without running statistics",
                got="track_running_stats=True",
                remedy="build the module with track_running_stats=False",
                source=info(node).source,
            )


def rms_norms(draft: GraphBuilder) -> None:
    """RMS norm is one operator on every device, that keeps the same."""
    names = ("input", "normalized_shape", "weight", "eps")
    for node in draft.calls(aten.rms_norm.default):
        draft.replace(node, rms_norm, *(argument(node, name) for name in names))


def _with_batch_statistics(draft: GraphBuilder, node: fx.Node) -> fx.Node:
    x = node.args[0]
    names = ("weight", "bias", "running_mean", "running_var", "momentum", "eps")
    weight, bias, mean, var, momentum, epsilon = (argument(node, name) for name in names)
    shape = shape_of(x)
    count = prod(shape) // max(shape[1], 1)
    sums = draft.call(node, batch_sums, x, mean)
    result = draft.call(node, batch_normalize, x, sums, mean, weight, bias, count, epsilon)
    if mean is not None and argument(node, "training"):
        new_mean = draft.call(node, running_mean, mean, sums, mean, None, momentum, count)
        new_var = draft.call(node, running_var, var, sums, mean, None, momentum, count)
        draft.call(node, aten.copy_.default, mean, new_mean)
        draft.call(node, aten.copy_.default, var, new_var)
    return result


def _with_given_statistics(draft: GraphBuilder, node: fx.Node) -> fx.Node:
    """x * scale + offset, both of them vectors of channels."""
    x, names = node.args[0], ("weight", "bias", "running_mean", "running_var", "eps")
    weight, bias, mean, var, epsilon = (argument(node, name) for name in names)
    shape = shape_of(x)
    column = [shape[1]] + [1] * (len(shape) - 2)

    def call(target: object, *args: object) -> fx.Node:
        return draft.call(node, target, *args)  # type: ignore[arg-type]

    scale = call(aten.rsqrt.default, call(aten.add.Tensor, var, epsilon))
    if weight is not None:
        scale = call(aten.mul.Tensor, weight, scale)
    offset = call(aten.mul.Tensor, mean, scale)
    if bias is None:
        offset = call(aten.neg.default, offset)
    else:
        offset = call(aten.sub.Tensor, bias, offset)
    if len(shape) > 2:
        scale = call(aten.reshape.default, scale, column)
        offset = call(aten.reshape.default, offset, column)
    result = call(aten.add.Tensor, call(aten.mul.Tensor, x, scale), offset)
    if info(result).val.dtype != info(node).val.dtype:
        result = call(aten.to.dtype, result, info(node).val.dtype)
    return result
