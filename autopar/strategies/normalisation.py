"""Normalisation: what is averaged over stays whole, except in batch norm, where it is summed.

Batch norm in training comes as two plain functions (see kernels/batch_statistics.py): the sums
over batch and space are a partial sum when these are cut, and everything else is elementwise.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.strategies.kernels import (
    batch_normalize,
    batch_sums,
    rms_norm,
    running_mean,
    running_var,
)
from autopar.strategies.registry import Call, Traits, register_rule
from autopar.strategies.rule import Dim, Extra, Rule, Saved, render
from autopar.strategies.shapes import names, sizes_of


def statistics_dtype(call: Call) -> torch.dtype:
    """In which means and deviations are kept: half precision is summed in float32."""
    return torch.promote_types(call.outputs[0].dtype, torch.float32)


def _over_last_dims(call: Call, stats: int) -> Rule:
    """layer_norm and rms_norm: the normalised dims and the parameters stay whole."""
    shape = call.shapes[0]
    count = len(call["normalized_shape"])
    dims = names(len(shape))
    held = dims[len(dims) - count :]
    sizes = sizes_of(dims, shape)
    parameters = [held] * (len(call.shapes) - 1)
    extra = (Extra(tuple(dims[: len(dims) - count]), statistics_dtype(call)),) * stats
    return call.rule(
        [dims, *parameters],
        dims,
        sizes,
        whole=[dim[0] for dim in held],
        flops=5.0 * call.outputs[0].numel(),
        saved=Saved((*range(len(call.shapes)),), extra=extra),
    )


def _layer_norm(call: Call) -> Rule:
    return _over_last_dims(call, stats=2)


def _layer_norm_with_statistics(call: Call) -> Rule:
    """The mean and the inverse deviation of each row are results, too."""
    rule = _layer_norm(call)
    rows = len(call.shape) - len(call["normalized_shape"])
    (out,) = rule.outputs
    statistic = tuple(dim if index < rows else () for index, dim in enumerate(out))
    outputs = (out, statistic, statistic)
    return replace(rule, outputs=outputs, text=render(rule.inputs, outputs, rule.whole))


def _rms_norm(call: Call) -> Rule:
    return _over_last_dims(call, stats=1)


def _group_norm(call: Call) -> Rule:
    """The channels are (g c): groups can be cut evenly."""
    shape, groups = call.shapes[0], call["num_groups"]
    space: list[Dim] = [(f"x{i}",) for i in range(len(shape) - 2)]
    sizes = {"n": shape[0], "g": groups, "c": shape[1] // groups}
    sizes |= {dim[0]: size for dim, size in zip(space, shape[2:])}
    dims: list[Dim] = [("n",), ("g", "c"), *space]
    parameters: list[list[Dim]] = [[("g", "c")]] * (len(call.shapes) - 1)
    statistics = (Extra((("n",), ("g",)), statistics_dtype(call)),) * 2
    return call.rule(
        [dims, *parameters],
        dims,
        sizes,
        whole=["c", *(dim[0] for dim in space)],
        flops=5.0 * call.outputs[0].numel(),
        even=frozenset("g"),
        saved=Saved((0, *((1,) if parameters else ())), extra=statistics),
    )


def _weight_norm(call: Call) -> Rule:
    """A weight scaled to given norms, one for each index of `dim`, or one for all if it is -1."""
    one_for_all = call["dim"] == -1
    own = None if one_for_all else call["dim"] % len(call.shape)
    dims = names(len(call.shape))
    sizes = sizes_of(dims, call.shape)
    norms = [factor if i == own else () for i, factor in enumerate(dims)][: len(call.shapes[1])]
    held = [factor for i, (factor,) in enumerate(dims) if i != own]
    extra = Extra(tuple(dim for dim in norms if dim), statistics_dtype(call))
    saved = Saved((0, 1), extra=(extra,) * (2 if one_for_all else 1))
    return call.rule([dims, norms], dims, sizes, whole=held, saved=saved)


def _batch_norm(call: Call) -> Rule | None:
    """Batch norm by running statistics is elementwise; in training capture splits it."""
    if call.get("training") or call.get("use_input_stats"):
        return None
    dims = names(len(call.shape))
    sizes = sizes_of(dims, call.shape)
    vectors = [[dims[1]]] * (len(call.shapes) - 1)
    kept = tuple(index for index, slot in enumerate(call.slots) if slot != 2)  # not the bias
    return call.rule([dims, *vectors], dims, sizes, saved=Saved(kept))


def _instance_norm(call: Call) -> Rule:
    """Every channel of every sample apart; kept are two statistics, and a copy of the scales."""
    dims = names(len(call.shape))
    sizes = sizes_of(dims, call.shape)
    vectors = [[dims[1]]] * (len(call.shapes) - 1)
    kept = (Extra(tuple(dims[:2]), statistics_dtype(call)),) * (3 if 1 in call.slots else 2)
    whole = [dim[0] for dim in dims[2:]]
    saved = Saved((0,), extra=kept)
    return call.rule([dims, *vectors], dims, sizes, whole=whole, saved=saved)


register_rule("aten.layer_norm", _layer_norm)
register_rule("aten.native_layer_norm", _layer_norm_with_statistics)
register_rule(rms_norm, _rms_norm)
register_rule("aten.group_norm", _group_norm, traits=Traits(groups="num_groups"))
register_rule("aten.batch_norm", _batch_norm)
register_rule("aten._weight_norm", _weight_norm)
register_rule("aten.instance_norm", _instance_norm)
# The running mean keeps digits where it is taken off.
register_rule(
    batch_sums,
    "n+ c ...+, c -> two! c",
    cost=4,
    saved="0 1 output",
    traits=Traits(shift=1, statistics=True),
)
register_rule(
    batch_normalize,
    "n c ..., two! c, c, c, c -> n c ...",
    cost=4,
    saved="0 1 2 3",
    extra="c, c",
    traits=Traits(shift=2, count=5),
)
register_rule([running_mean, running_var], "c, two! c, c,  -> c", traits=Traits(shift=2, count=5))
