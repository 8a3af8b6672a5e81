"""Contractions: linear, matmul and its relatives, einsum.

One factor that all inputs have and the output lacks: cutting it gives a partial sum. All are
linear in each input, so a partial sum in one of them passes through.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.strategies.language import ELLIPSIS
from autopar.strategies.registry import OperatorCall, Traits, aten, register_rule
from autopar.strategies.rule import Dim, ExtraTensor, Rule, Saved, broadcast, names
from autopar.strategies.strategy import JointCut


def _linear(call: OperatorCall) -> Rule:
    if call["bias"] is not None:
        return call.parse("... i, o i, o -> ... o", saved="0 1")
    rule = call.parse("... i, o i -> ... o", passes="each", saved="0 1")
    if len(call.shape) < 2:
        return rule
    (rows,) = rule.inputs[0][-2] or (None,)
    joints = {
        "gather": JointCut("gathered_product", (rows, "o"), ("o",)),
        "scatter": JointCut("scattered_product", ("i", "i"), (rows,)),
    }
    return replace(rule, joints=joints if rows is not None else {})


def _matmul(call: OperatorCall) -> Rule:
    left, right = (len(shape) for shape in call.shapes)
    line = {
        (True, True): "k, k -> ",
        (True, False): "k, ... k n -> ... n",
        (False, True): "... m k, k -> ... m",
        (False, False): "... m k, ... k n -> ... m n",
    }[left == 1, right == 1]
    return call.parse(line, passes="each", saved="0 1")


def _product_and_sum(call: OperatorCall) -> Rule:
    """Return the rule of addmm: every rank would add the summand if k were cut."""
    batch: list[Dim] = [("b",)] if len(call.shape) == 3 else []
    out: list[Dim] = [*batch, ("m",), ("n",)]
    inputs = [broadcast(out, call.shapes[0]), [*batch, ("m",), ("k",)], [*batch, ("k",), ("n",)]]
    flops = 2.0 * math.prod(call.shape) * call.shapes[1][-1]
    return call.rule(inputs, out, whole=["k"], flops=flops, product=True, saved=Saved((1, 2)))


def _einsum(call: OperatorCall) -> Rule | None:
    terms, right = subscripts(call["equation"])
    if any(len(set(term)) != len(term) for term in (t.replace("...", "") for t in terms)):
        return None  # a diagonal

    names = _without_broadcast([list(t.replace("...", "\0")) for t in terms], call.shapes)
    common = set.intersection(*map(set, names))

    def written(term: Sequence[str]) -> str:
        # All are linear in each term, so each may be summed in pieces.
        marked = [name + "+" * (name not in [*common, *right, "\0"]) for name in term]
        return " ".join(marked).replace("\0", "...")

    line = f"{', '.join(map(written, names))} -> {written(right.replace('...', chr(0)))}"
    every = " ".join(str(index) for index in range(len(terms)))
    return call.parse(line, passes="each", saved=every)


def _cross(call: OperatorCall) -> Rule:
    """Return the rule of a cross product: the dim of the vectors stays whole."""
    dims, dim = names(len(call.shape)), call.dim(call["dim"], len(call.shape))
    inputs = [broadcast(dims, shape) for shape in call.shapes]
    both = Saved((0, 1))
    return call.rule(inputs, dims, whole=dims[dim], passes=[(0,), (1,)], saved=both)


def _cosines(call: OperatorCall) -> Rule | None:
    """Return the rule of cosine_similarity: the dim of the vectors stays whole; None of numbers."""
    rank = max(map(len, call.shapes))
    if not rank:
        return None
    dims, dim = names(rank), call.dim(call["dim"], rank)
    rest = [d for i, d in enumerate(dims) if i != dim]
    inputs = [broadcast(dims, shape) for shape in call.shapes]
    extra = (*[ExtraTensor(tuple(dims))] * 2, *[ExtraTensor(tuple(rest))] * 4)
    return call.rule(inputs, rest, whole=[dims[dim]], saved=Saved((0, 1), extra=extra))


def subscripts(equation: str) -> tuple[list[str], str]:
    """Return the subscripts of each operand of an einsum, and of its output, even if left out."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = left.replace(",", "").replace(ELLIPSIS, "")
        once = sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        right = ELLIPSIS * (ELLIPSIS in left) + "".join(once)
    return left.split(","), right


def _without_broadcast(
    terms: list[list[str]], shapes: Sequence[tuple[int, ...]]
) -> list[list[str]]:
    """Return the subscripts of each term; one that is broadcast gets a name of its own."""
    sizes: dict[str, int] = {}
    places: list[tuple[int, int, int]] = []
    for number, (term, shape) in enumerate(zip(terms, shapes)):
        dim = 0
        for index, name in enumerate(term):
            if name == "\0":
                dim += len(shape) - len(term) + 1
                continue
            sizes[name] = max(sizes.get(name, shape[dim]), shape[dim])
            places += [(number, index, shape[dim])]
            dim += 1
    renamed = [list(term) for term in terms]
    for number, index, size in places:
        if size != sizes[terms[number][index]]:
            renamed[number][index] = f"one{number}_{index}"
    return renamed


_PRODUCT = Traits(leading="", makes_new=True)
register_rule("aten.linear", _linear, traits=replace(_PRODUCT, takes_nothing=True))
register_rule("aten.matmul", _matmul, traits=_PRODUCT)
register_rule(aten("dot vdot mv"), _matmul)
register_rule("aten.mm", "m k, k n -> m n", passes="each", saved="0 1")
register_rule("aten.bmm", "b m k, b k n -> b m n", passes="each", saved="0 1")
register_rule("aten.outer", "m, n -> m n", passes="each", saved="0 1")
register_rule(aten("addmm baddbmm"), _product_and_sum)
register_rule("aten.linalg_cross", _cross)
register_rule("aten.cosine_similarity", _cosines)
register_rule("aten.einsum", _einsum)
register_rule("aten.bilinear", "... i!, ... j!, o i! j!, o -> ... o", saved="0 1 2")
