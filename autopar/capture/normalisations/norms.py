"""Batch norm in steps that can be cut, its running statistics as visible writes; RMS norm."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, Site, rewrites
from autopar.capture.values import refresh
from autopar.errors import InvalidInput
from autopar.strategies import OperatorCall
from autopar.strategies.kernels import (
    batch_normalize,
    batch_sums,
    rms_norm,
    running_mean,
    running_var,
)
from autopar.strategies.node_info import info

aten = torch.ops.aten


def batch_norms(builder: GraphBuilder) -> None:
    """Statistics of the batch as sums, then the normalisation; with given statistics, a scale."""
    if any(builder.calls(aten.batch_norm.default)):
        _in_steps(builder)
        refresh(builder)  # in-place operators after a norm share the storage of its new result
    if any(builder.calls(aten.instance_norm.default)):
        _with_running_statistics(builder)
        refresh(builder)
    for node in builder.calls(*_WRITE_UNSAID):
        if any(
            OperatorCall(node).get(name) is not None for name in ("running_mean", "running_var")
        ):
            raise InvalidInput(
                "running statistics are changed by batch_norm and instance_norm",
                got=f"{node.target}, which writes to them and does not say so",
                remedy="torch.nn.functional.batch_norm, or a module such as nn.BatchNorm2d",
                source=info(node).source,
            )


_WRITE_UNSAID = (
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
    aten.batch_norm_update_stats.default,
)


@rewrites(aten.batch_norm.default)
def _in_steps(call: Site) -> fx.Node | None:
    if len(call.shape) < 2:
        return None  # of no elements
    is_given = call["running_mean"] is not None and not call["training"]
    return _with_given_statistics(call) if is_given else _with_batch_statistics(call)


@rewrites(aten.instance_norm.default)
def _with_running_statistics(call: Site) -> fx.Node | None:
    """By given statistics a scale; by its own they are written, in the mean of all samples."""
    x, weight, bias, mean, var, by_own, momentum, epsilon, _ = call.arguments.values()
    if mean is None:
        return None
    if not by_own:
        return _with_given_statistics(call)
    read = call.make(aten.detach.default, x)
    if info(x).val.dtype != info(mean).val.dtype:
        read = call.make(aten.to.dtype, read, info(mean).val.dtype)
    space = list(range(2, len(call.shape)))
    own_mean = call.make(aten.mean.dim, read, [0, *space])
    own_var = call.make(aten.mean.dim, call.make(aten.var.correction, read, space), [0])
    for kept, own in ((mean, own_mean), (var, own_var)):
        moved = call.make(aten.mul.Tensor, own, momentum)
        stayed = call.make(aten.mul.Tensor, kept, 1 - momentum)
        call.make(aten.copy_.default, kept, call.make(aten.add.Tensor, stayed, moved))
    of_own = (None, None, True, momentum, epsilon, False)
    return call.make(aten.instance_norm.default, x, weight, bias, *of_own)


@rewrites(aten.rms_norm.default)
def rms_norms(call: Site) -> fx.Node:
    """RMS norm is one operator on every device, that keeps the same."""
    return call.make(rms_norm, *call.arguments.values())


def _with_batch_statistics(call: Site) -> fx.Node:
    x, weight, bias, mean, var, training, momentum, epsilon, _ = call.arguments.values()
    count = prod(call.shape) // max(call.shape[1], 1)
    sums = call.make(batch_sums, x, mean)
    result = call.make(batch_normalize, x, sums, mean, weight, bias, count, epsilon)
    if mean is not None and training:
        new_mean = call.make(running_mean, mean, sums, mean, None, momentum, count)
        new_var = call.make(running_var, var, sums, mean, None, momentum, count)
        call.make(aten.copy_.default, mean, new_mean)
        call.make(aten.copy_.default, var, new_var)
    return result


def _with_given_statistics(call: Site) -> fx.Node:
    """x * scale + offset, both of them vectors of channels."""
    x, weight, bias, mean, var, *_, epsilon, _ = call.arguments.values()
    column = [call.shape[1]] + [1] * (len(call.shape) - 2)
    scale = call.make(aten.rsqrt.default, call.make(aten.add.Tensor, var, epsilon))
    if weight is not None:
        scale = call.make(aten.mul.Tensor, weight, scale)
    offset = call.make(aten.mul.Tensor, mean, scale)
    if bias is None:
        offset = call.make(aten.neg.default, offset)
    else:
        offset = call.make(aten.sub.Tensor, bias, offset)
    if len(call.shape) > 2:
        scale = call.make(aten.reshape.default, scale, column)
        offset = call.make(aten.reshape.default, offset, column)
    result = call.make(aten.add.Tensor, call.make(aten.mul.Tensor, x, scale), offset)
    dtype = call.outputs[0].dtype
    return result if info(result).val.dtype == dtype else call.make(aten.to.dtype, result, dtype)
