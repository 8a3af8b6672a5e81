"""Normalisation: what is averaged over stays whole, except in batch norm, where it is summed.

Batch norm in training comes as two plain functions (see kernels/batch_statistics.py): the sums
over batch and space are a partial sum when these are cut, and everything else is elementwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from autopar.strategies.kernels import (
    batch_normalize,
    batch_sums,
    rms_norm,
    running_mean,
    running_var,
)
from autopar.strategies.registry import OperatorCall, Traits, register_rule
from autopar.strategies.rule import Dim, ExtraTensor, Rule, Saved, broadcast, names
from autopar.strategies.strategy import JointCut


def statistics_dtype(call: OperatorCall) -> torch.dtype:
    """Return the dtype of means and deviations: half precision is summed in float32."""
    return torch.promote_types(call.outputs[0].dtype, torch.float32)


def _over_last_dims(call: OperatorCall, stats: int = 2) -> Rule:
    """Return the rule of layer_norm and rms_norm: normalised dims and parameters stay whole."""
    dims, rows = names(len(call.shape)), len(call.shape) - len(call["normalized_shape"])
    parameters = [dims[rows:]] * (len(call.shapes) - 1)
    # The mean and the inverse deviation of each row may be results, too.
    statistics = [broadcast(dims, value.shape) for value in call.outputs[1:]]
    extra = (ExtraTensor(tuple(dims[:rows]), statistics_dtype(call)),) * stats
    return call.rule(
        [dims, *parameters],
        dims,
        more=statistics,
        whole=dims[rows:],
        flops=5.0 * call.outputs[0].numel(),
        saved=Saved((*range(len(call.shapes)),), extra=extra),
    )


def _group_norm(call: OperatorCall) -> Rule:
    """Return the rule of group_norm; channels are (g c), and groups can be cut evenly."""
    space = names(len(call.shape) - 2, "x")
    dims: list[Dim] = [("n",), ("g", "c"), *space]
    parameters: list[list[Dim]] = [[("g", "c")]] * (len(call.shapes) - 1)
    statistics = (ExtraTensor((("n",), ("g",)), statistics_dtype(call)),) * 2
    whole = (None,) * len(parameters)
    return call.rule(
        [dims, *parameters],
        dims,
        {"g": call["num_groups"]},
        whole=["c", *space],
        flops=5.0 * call.outputs[0].numel(),
        even=frozenset("g"),
        saved=Saved((0, *((1,) if parameters else ())), extra=statistics),
        joints={
            f"space{dim[0][1:]}": JointCut("cut_group_norm", (dim[0], *whole), (dim[0],))
            for dim in space
        },
    )


def _groups_of_piece(call: OperatorCall, shape: Sequence[int]) -> int:
    groups: int = call["num_groups"]
    return groups if groups == 1 else shape[1] * groups // call.shape[1]


def _with_statistics(call: OperatorCall) -> Rule:
    """Return the rule of a group norm that gives its means and deviations, too."""
    space = names(len(call.shape) - 2, "x")
    dims: list[Dim] = [("n",), ("g", "c"), *space]
    parameters: list[list[Dim]] = [[("g", "c")]] * (len(call.shapes) - 1)
    statistics: list[Dim] = [("n",), ("g",)]
    return call.rule(
        [dims, *parameters],
        dims,
        {"g": call["group"]},
        more=[statistics, statistics],
        whole=["c", *space],
        flops=5.0 * call.outputs[0].numel(),
        even=frozenset("g"),
        saved=Saved(
            (0, *((1,) if 1 in call.slots else ())),
            extra=(ExtraTensor(tuple(statistics), statistics_dtype(call)),) * 2,
        ),
    )


def _weight_norm(call: OperatorCall) -> Rule:
    """Return the rule of a weight scaled to norms, one an index of `dim`; -1: one for all."""
    one_for_all = call["dim"] == -1
    scaled_dim = None if one_for_all else call["dim"] % len(call.shape)
    dims = names(len(call.shape))
    norms = [dim if i == scaled_dim else () for i, dim in enumerate(dims)][: len(call.shapes[1])]
    held = [dim for i, dim in enumerate(dims) if i != scaled_dim]
    extra = ExtraTensor(tuple(dim for dim in norms if dim), statistics_dtype(call))
    saved = Saved((0, 1), extra=(extra,) * (2 if one_for_all else 1))
    return call.rule([dims, norms], dims, whole=held, saved=saved)


def _batch_norm(call: OperatorCall) -> Rule | None:
    """Return the rule of batch norm by running statistics; None in training."""
    if call.get("training") or call.get("use_input_stats") or len(call.shape) < 2:
        return None
    dims = names(len(call.shape))
    vectors = [[dims[1]]] * (len(call.shapes) - 1)
    saved = tuple(index for index, slot in enumerate(call.slots) if slot != 2)  # not the bias
    return call.rule([dims, *vectors], dims, saved=Saved(saved))


def _instance_norm(call: OperatorCall) -> Rule:
    """Return the rule of instance_norm, which keeps two statistics and a copy of the scales."""
    dims = names(len(call.shape))
    vectors = [[dims[1]]] * (len(call.shapes) - 1)
    extra = (ExtraTensor(tuple(dims[:2]), statistics_dtype(call)),) * (3 if 1 in call.slots else 2)
    return call.rule([dims, *vectors], dims, whole=dims[2:], saved=Saved((0,), extra=extra))


register_rule("aten.layer_norm", _over_last_dims, traits=Traits(leading=""))
register_rule("aten.native_layer_norm", _over_last_dims)
register_rule(rms_norm, partial(_over_last_dims, stats=1))
register_rule(
    "aten.group_norm", _group_norm, traits=Traits(of_piece={"num_groups": _groups_of_piece})
)
register_rule(
    "aten.native_group_norm",
    _with_statistics,
    traits=Traits(
        of_piece={
            "N": lambda call, shape: shape[0],
            "C": lambda call, shape: shape[1],
            "group": lambda call, shape: call["group"] * shape[1] // max(call.shape[1], 1),
        }
    ),
)
register_rule("aten.batch_norm", _batch_norm)
register_rule("aten._weight_norm", _weight_norm)
register_rule("aten.instance_norm", _instance_norm)
# The running mean is the shift, which keeps digits.
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
