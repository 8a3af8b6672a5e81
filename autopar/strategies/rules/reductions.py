"""Reductions: a sum over a cut dim is a partial sum; others combine the results of the pieces.

A few (argmax, median) need their dims whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from autopar.strategies.kernels.reduction_kernels import correction_of
from autopar.strategies.node_info import info
from autopar.strategies.registry import OperatorCall, Traits, aten, register_rule
from autopar.strategies.rule import ExtraTensor, Rule, Saved, names
from autopar.strategies.rules.shapes import FIRST, along_dims
from autopar.strategies.strategy import JointCut

INPUT_AND_OUTPUT = Saved((0,), output=True)


def _reduction(
    call: OperatorCall,
    *,
    summed: bool = False,
    passes: Sequence[Sequence[int]] = (),
    saved: Saved = Saved(),  # noqa: B008 (frozen)
    kernel: str = "",
) -> Rule:
    """Return the rule of a reduction; `kernel` is the joint one for a reduced dim that is cut."""
    reduced, dims = set(call.dims()), names(len(call.shapes[0]))
    out = [() if i in reduced else dim for i, dim in enumerate(dims)]
    if not call.get("keepdim", False):
        out = [dim for i, dim in enumerate(dims) if i not in reduced]
    is_sum = summed and call.outputs[0].dtype != torch.bool  # a sum of bools is their `any`
    whole = [] if is_sum else [f"d{i}" for i in reduced]
    rule = call.rule([dims], out, whole=whole, passes=passes, saved=saved)
    if not kernel or not _has_kernel(call, rule):
        return rule
    cut = [f"d{i}" for i in sorted(reduced) if call.shapes[0][i] > 1]
    joints = {f"over_{dim}": JointCut(kernel, (dim,), (None,)) for dim in cut}
    return replace(
        rule,
        joints=joints,
        saved_by_joint=dict.fromkeys(joints, _saved_by_kernel(call, rule, kernel)),
    )


def _saved_by_kernel(call: OperatorCall, rule: Rule, kernel: str) -> Saved:
    """Return what a joint kernel keeps: its piece, the wide result, mostly a column besides."""
    dtype = call.outputs[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    is_single = kernel == "cut_logsumexp" or (kernel == "cut_norm" and not math.isinf(call["ord"]))
    extra = (ExtraTensor(rule.outputs[0], wide),) * ((wide != dtype) + (not is_single))
    return Saved((0,), output=wide == dtype, extra=extra)


def _has_kernel(call: OperatorCall, rule: Rule) -> bool:
    """Return whether a joint kernel serves: of real numbers, and enough for a deviation."""
    before, after = info(call.inputs[0]).val.dtype, call.outputs[0].dtype
    if not before.is_floating_point or not after.is_floating_point:
        return (
            before == after and before in (torch.int32, torch.int64) and "ord" not in call.arguments
        )
    is_spread = not call.arguments.keys().isdisjoint(("unbiased", "correction"))
    count = math.prod(call.shapes[0][dim] for dim in call.dims())
    return not is_spread or count > correction_of(call.arguments)


def _softmax(call: OperatorCall, kernel: str = "") -> Rule:
    """Return the rule of softmax; along a cut dim ranks share the largest element and the sum."""
    rule, dims = along_dims(call, passes=(), flops=None, saved=Saved(output=True)), call.dims()
    reals = all(v.dtype.is_floating_point for v in (info(call.inputs[0]).val, *call.outputs))
    if not kernel or not reals or not dims or not rule.inputs[0][dims[0]]:
        return rule
    (cut,) = rule.inputs[0][dims[0]]
    # One number of each row travels: a piece one element long.
    return replace(
        rule, joints={f"over_{cut}": JointCut(kernel, (cut,), (cut,), travelling_rows=1)}
    )


def _with_indices(call: OperatorCall) -> Rule:
    """Return the rule of values and their indices: two results; backward keeps the indices."""
    if len(call.outputs) == 1:
        return _reduction(call, saved=INPUT_AND_OUTPUT)  # of all elements
    rule = _reduction(call)
    return replace(rule, saved=Saved(extra=(ExtraTensor(rule.outputs[1], torch.int64),)))


def _softmax_backward(call: OperatorCall) -> Rule:
    """Return the rule of the backward of softmax, which reads the output, too."""
    dims, dim = names(len(call.shape)), call.dim(call["dim"])
    return call.rule([dims, dims], dims, whole=dims[dim], saved=Saved((0, 1)))


register_rule("aten.sum", partial(_reduction, summed=True, passes=FIRST))
register_rule("aten.nansum", partial(_reduction, summed=True, saved=Saved((0,))))
register_rule("aten.count_nonzero", partial(_reduction, summed=True))
register_rule("aten.mean", partial(_reduction, passes=FIRST))
register_rule("aten.var", partial(_reduction, saved=Saved((0,)), kernel="cut_var"))
for _names, _kernel in {
    "std": "std",
    "linalg_vector_norm": "norm",
    "amax": "amax",
    "amin": "amin",
    "max.default": "max",
    "min.default": "min",
    "logsumexp": "logsumexp",
    "prod": "prod",
}.items():
    register_rule(
        f"aten.{_names}", partial(_reduction, saved=INPUT_AND_OUTPUT, kernel=f"cut_{_kernel}")
    )
register_rule("aten.aminmax", partial(_reduction, saved=INPUT_AND_OUTPUT))
register_rule(aten("argmax argmin any all"), _reduction)
register_rule(aten("median nanmedian mode kthvalue"), _with_indices)
for _names, _kernel in {
    "softmax _softmax": "cut_softmax",
    "log_softmax _log_softmax": "cut_log_softmax",
    "_safe_softmax": "",
}.items():
    register_rule(aten(_names), partial(_softmax, kernel=_kernel), traits=Traits(leading="dim"))
register_rule(aten("_softmax_backward_data _log_softmax_backward_data"), _softmax_backward)
