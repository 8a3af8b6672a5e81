"""Reductions: a sum over a cut dim is a partial sum; every other kind needs its dims whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from autopar.strategies.registry import Call, Traits, aten, register_rule
from autopar.strategies.rule import Extra, Rule, Saved, names
from autopar.strategies.shapes import FIRST, along

KEPT = Saved((0,), output=True)


def _reduction(
    call: Call,
    summed: bool = False,
    passes: Sequence[Sequence[int]] = (),
    saved: Saved = Saved(),  # noqa: B008 (frozen)
) -> Rule:
    reduced, dims = set(call.dims()), names(len(call.shapes[0]))
    kept = [() if i in reduced else dim for i, dim in enumerate(dims)]
    if not call.get("keepdim", False):
        kept = [dim for i, dim in enumerate(dims) if i not in reduced]
    is_sum = summed and call.outputs[0].dtype != torch.bool  # which says whether any is
    whole = [] if is_sum else [f"d{i}" for i in reduced]
    return call.rule([dims], kept, whole=whole, passes=passes, saved=saved)


def _with_places(call: Call) -> Rule:
    """Values and where they stand: two results, of which backward keeps places."""
    if len(call.outputs) == 1:
        return _reduction(call, saved=KEPT)  # of all elements
    rule = _reduction(call)
    return replace(rule, saved=Saved(extra=(Extra(rule.outputs[1], torch.int64),)))


def _slope_of_softmax(call: Call) -> Rule:
    """Of what backward reads besides, its output, the dim is whole as well."""
    dims, dim = names(len(call.shape)), call.dim(call["dim"])
    return call.rule([dims, dims], dims, whole=dims[dim], saved=Saved((0, 1)))


register_rule("aten.sum", partial(_reduction, summed=True, passes=FIRST))
register_rule("aten.nansum", partial(_reduction, summed=True, saved=Saved((0,))))
register_rule("aten.count_nonzero", partial(_reduction, summed=True))
register_rule("aten.mean", partial(_reduction, passes=FIRST))
register_rule("aten.var", partial(_reduction, saved=Saved((0,))))
register_rule(
    aten("amax amin logsumexp prod std linalg_vector_norm max.default min.default aminmax"),
    partial(_reduction, saved=KEPT),
)
register_rule(aten("argmax argmin any all"), _reduction)
register_rule(aten("median nanmedian mode kthvalue"), _with_places)
register_rule(
    aten("softmax log_softmax _softmax _log_softmax _safe_softmax"),
    partial(along, passes=(), flops=None, saved=Saved(output=True)),
    traits=Traits(leading="dim"),
)
register_rule(aten("_softmax_backward_data _log_softmax_backward_data"), _slope_of_softmax)
