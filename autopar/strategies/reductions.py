"""Reductions: a sum over a cut dim is a partial sum; every other kind needs its dims whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from autopar.strategies.registry import Call, Traits, aten, register_rule
from autopar.strategies.rule import Rule, Saved, names
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
    whole = [] if summed else [f"d{i}" for i in reduced]
    return call.rule([dims], kept, whole=whole, passes=passes, saved=saved)


register_rule("aten.sum", partial(_reduction, summed=True, passes=FIRST))
register_rule("aten.mean", partial(_reduction, passes=FIRST))
register_rule("aten.var", partial(_reduction, saved=Saved((0,))))
register_rule(
    aten("amax amin logsumexp prod std linalg_vector_norm max.default min.default"),
    partial(_reduction, saved=KEPT),
)
register_rule(aten("argmax argmin any all"), _reduction)
register_rule(
    aten("softmax log_softmax _softmax _log_softmax"),
    partial(along, passes=(), flops=None, saved=Saved(output=True)),
    traits=Traits(leading="dim"),
)
