"""Equal parts: how an operator takes a cut of each of several equal parts of a dim.

    cat of two f32[8@x, 4]               gives f32[16@/2@x, 4]
    a slice of its second half           takes it, and gives f32[8@x, 4]
    a reshape of it to [2, 8, 4]         gives f32[2, 8@x, 4]
    linear, norms, convolutions ...      take it through

Values say of which dims they have parts (`info.parts`). From these, and from its line, follows what
an axis may be given to besides the factors of a rule (`Rule.parts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.layout import Parts
from autopar.strategies.rule import Dim, Rule
from autopar.strategies.strategy import PartsCut, TensorCut


def parts_of_tensors(rule: Rule, known: Mapping[int, Parts]) -> dict[str, PartsCut]:
    """Return the cuts in parts by name, of a call whose tensors, inputs first, have these parts.
    A tensor that is not known to have the parts of a cut has no layout for it."""
    tensors = (*rule.inputs, *rule.outputs)
    cuts = dict[str, PartsCut]()
    for number, parts in known.items():
        for dim, count in parts:
            cut = in_parts(rule, tensors[number][dim], count)
            if cut is not None and cut.name is not None and _is_known(rule, cut, known):
                cuts.setdefault(cut.name, cut)
    return cuts


def _is_known(rule: Rule, cut: PartsCut, known: Mapping[int, Parts]) -> bool:
    every = zip((*rule.inputs, *rule.outputs), (*cut.inputs, *cut.outputs))
    for number, (dims, taken) in enumerate(every):
        if taken is not None and taken[1] > 1 and number in known:
            dim = next(at for at, group in enumerate(dims) if taken[0] in group)
            if (dim, taken[1]) not in known[number]:
                return False
    return True


def choice_of(rule: Rule, dim: Dim, number: int) -> str | None:
    """Return what an axis is given to that cuts a dim in so many parts; in one: as a whole."""
    cut = in_parts(rule, dim, number) if rule.parts else None
    if cut is not None and cut.name in rule.parts:
        return cut.name
    # The outermost factor of more than one element is cut as a whole.
    return next((f for f in dim if rule.sizes[f] > 1), None) if number == 1 else None


def in_parts(rule: Rule, dim: Dim, number: int) -> PartsCut | None:
    """Return what an axis cuts of each tensor that cuts a dim of one of them in so many parts.

    `None` where the operator needs more than a piece of each part. In one part is as a whole.
    """
    factors = _factors_cut(rule, dim, number)
    inputs, outputs = (
        tuple(_cut_of(rule, dims, factors) for dims in tensors)
        for tensors in (rule.inputs, rule.outputs)
    )
    cut = PartsCut(tuple(factors.items()), inputs, outputs)
    return cut if factors and _is_possible(rule, cut) else None


def _factors_cut(rule: Rule, dim: Dim, number: int) -> dict[str, int]:
    """Return the factors that are cut, with their numbers of parts; none if parts do not fit."""
    outer = 1
    for factor in dim:
        size = rule.sizes[factor]
        if number < outer * size:
            break
        outer *= size
    else:
        return {}
    count, rest = divmod(number, outer)
    if rest or size % count:
        return {}
    if factor not in rule.spans:
        return {factor: count}
    part = size // count
    sizes = {other: rule.sizes.get(other, 1) for other in rule.spans}
    if any(start % part or sizes[other] % part for other, start in rule.spans.items()):
        return {}
    return {other: size // part for other, size in sizes.items()}


def _cut_of(rule: Rule, dims: Sequence[Dim], cut: dict[str, int]) -> TensorCut:
    """Return the cut of one tensor; factors outside of the cut one in its dim count as parts."""
    for dim in dims:
        for place, factor in enumerate(dim):
            if factor in cut:
                return factor, cut[factor] * math.prod(rule.sizes[f] for f in dim[:place])
    return None


def _is_possible(rule: Rule, cut: PartsCut) -> bool:
    factors, has_parts = cut.factors, cut.name is not None
    if any(factor in rule.whole and factor not in rule.spans for factor in factors):
        return False
    if has_parts and not factors.isdisjoint({*rule.kernels, *rule.gathered}):
        return False  # kernels look at the place of a piece
    if all(cut.outputs) or factors & (rule.sums | rule.gathered):
        return True
    return not any(cut.outputs) and all(cut.inputs)  # a sum over all parts
