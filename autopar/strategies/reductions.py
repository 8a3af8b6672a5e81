"""Reductions: a sum over a cut dim is a partial sum; every other kind needs its dims whole."""

from __future__ import annotations

from autopar.strategies.registry import Call, aten, register_rule
from autopar.strategies.rule import Rule, Saved
from autopar.strategies.shapes import FIRST, names, sizes_of


def _reduced(call: Call) -> set[int]:
    dims = call.get("dim")
    if dims is None or dims == []:
        return set(range(len(call.shapes[0])))
    return {call.dim(dim) for dim in ([dims] if isinstance(dims, int) else dims)}


def _reduction(
    call: Call,
    *,
    summed: bool,
    linear: bool,
    saved: Saved = Saved(),  # noqa: B008
) -> Rule:
    shape, reduced = call.shapes[0], _reduced(call)
    dims = names(len(shape))
    kept = [() if i in reduced else dim for i, dim in enumerate(dims)]
    if not call.get("keepdim", False):
        kept = [dim for i, dim in enumerate(dims) if i not in reduced]
    whole = [] if summed else [f"d{i}" for i in reduced]
    return call.rule(
        [dims],
        kept,
        sizes_of(dims, shape),
        whole=whole,
        passes=FIRST if linear else (),
        saved=saved,
    )


def _sum(call: Call) -> Rule:
    return _reduction(call, summed=True, linear=True)


def _mean(call: Call) -> Rule:
    return _reduction(call, summed=False, linear=True)


def _other(call: Call) -> Rule:
    return _reduction(call, summed=False, linear=False)


def _kept(call: Call) -> Rule:
    return _reduction(call, summed=False, linear=False, saved=Saved((0,), output=True))


def _spread(call: Call) -> Rule:
    return _reduction(call, summed=False, linear=False, saved=Saved((0,)))


def _softmax(call: Call) -> Rule:
    dims = names(len(call.shape))
    whole = [f"d{call.dim(call['dim'])}"]
    sizes = sizes_of(dims, call.shape)
    return call.rule([dims], dims, sizes, whole=whole, saved=Saved(output=True))


register_rule("aten.sum", _sum)
register_rule("aten.mean", _mean)
register_rule("aten.var", _spread)
register_rule(aten("amax amin logsumexp prod std linalg_vector_norm"), _kept)
register_rule(aten("max.default min.default"), _kept)
register_rule(aten("argmax argmin any all"), _other)
register_rule(aten("softmax log_softmax _softmax _log_softmax"), _softmax)
