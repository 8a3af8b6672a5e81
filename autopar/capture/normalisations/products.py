"""Products of several tensors, and of several dims, are taken apart into products of two.

They come in the order in which torch makes them, so that each can be cut by its own rule.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import cache

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, argument, shape_of

aten = torch.ops.aten

ELLIPSIS = "..."


def products_of_two(draft: GraphBuilder) -> None:
    """einsum of more than two operands: what is in no other operand is summed with each pair."""
    for node in draft.calls(aten.einsum.default):
        operands = list(argument(node, "tensors"))
        left, arrow, right = argument(node, "equation").replace(" ", "").partition("->")
        if len(operands) < 3 or (arrow and ELLIPSIS in left and ELLIPSIS not in right):
            continue
        terms = left.split(",")
        right = right if arrow else _implicit(terms)
        path = argument(node, "path") or [0, 1] * (len(operands) - 1)
        with draft.graph.inserting_before(node):
            for first, second in zip(path[::2], path[1::2]):
                places = sorted((first, second), reverse=True)
                (second_term, b), (first_term, a) = [
                    (terms.pop(p), operands.pop(p)) for p in places
                ]
                kept = _kept(first_term, second_term, [right, *terms]) if terms else right
                equation = f"{first_term},{second_term}->{kept}"
                product = draft.call(node, aten.einsum.default, equation, [a, b])
                at = len(terms) if argument(node, "path") else 0
                operands.insert(at, product)
                terms.insert(at, kept)
        draft.substitute(node, operands[0])


def _implicit(terms: Sequence[str]) -> str:
    """The subscripts of an output that none are given for."""
    letters = "".join(terms).replace(ELLIPSIS, "")
    once = sorted(letter for letter in set(letters) if letters.count(letter) == 1)
    return ELLIPSIS * any(ELLIPSIS in term for term in terms) + "".join(once)


def _kept(first: str, second: str, others: Sequence[str]) -> str:
    """The subscripts of a product that others still read, those of the output before the rest."""
    read = dict.fromkeys("".join(others).replace(ELLIPSIS, ""))
    own = {*first, *second}
    dots = ELLIPSIS * (ELLIPSIS in first or ELLIPSIS in second)
    return dots + "".join(letter for letter in read if letter in own)


def dims_contracted_together(draft: GraphBuilder) -> None:
    """tensordot, and the sum of a batch of products, are an einsum of two operands."""
    for node in draft.calls(aten.tensordot.default):
        x, y = argument(node, "self"), argument(node, "other")
        letters = iter(string.ascii_letters)
        left = [next(letters) for _ in shape_of(x)]
        right = [next(letters) for _ in shape_of(y)]
        summed = set()
        for dim, other in zip(argument(node, "dims_self"), argument(node, "dims_other")):
            right[other] = left[dim]
            summed.add(left[dim])
        out = "".join(letter for letter in left + right if letter not in summed)
        equation = f"{''.join(left)},{''.join(right)}->{out}"
        draft.replace(node, aten.einsum.default, equation, [x, y])


def chains_of_products(draft: GraphBuilder) -> None:
    """multi_dot: products of two, in the order that takes the fewest FLOPs."""
    for node in draft.calls(aten.linalg_multi_dot.default, aten.chain_matmul.default):
        matrices = list(node.args[0])  # type: ignore[arg-type]
        with draft.graph.inserting_before(node):
            if len(shape_of(matrices[0])) == 1:
                row = [1, *shape_of(matrices[0])]
                matrices[0] = draft.call(node, aten.reshape.default, matrices[0], row)
            if len(shape_of(matrices[-1])) == 1:
                column = [*shape_of(matrices[-1]), 1]
                matrices[-1] = draft.call(node, aten.reshape.default, matrices[-1], column)
            product = _chain(draft, node, matrices)
            shape = list(shape_of(node))
            if list(shape_of(product)) != shape:
                product = draft.call(node, aten.reshape.default, product, shape)
        draft.substitute(node, product)


def _chain(draft: GraphBuilder, node: fx.Node, matrices: Sequence[fx.Node]) -> fx.Node:
    sizes = [shape_of(matrix)[0] for matrix in matrices] + [shape_of(matrices[-1])[1]]

    @cache
    def best(first: int, last: int) -> tuple[int, int]:
        """The FLOPs of a part of the chain, and after which matrix it is parted."""
        if first == last:
            return 0, first
        return min(
            (
                best(first, at)[0]
                + best(at + 1, last)[0]
                + sizes[first] * sizes[at + 1] * sizes[last + 1],
                at,
            )
            for at in range(first, last)
        )

    def made(first: int, last: int) -> fx.Node:
        if first == last:
            return matrices[first]
        _, at = best(first, last)
        if len(matrices) == 3 and best(0, 2)[0] == _from_left(sizes):
            at = last - 1  # as torch, which takes the left product first if both orders are even
        return draft.call(node, aten.matmul.default, made(first, at), made(at + 1, last))

    return made(0, len(matrices) - 1)


def _from_left(sizes: Sequence[int]) -> int:
    """The FLOPs of (A B) C."""
    a, b, c, d = sizes
    return a * b * c + a * c * d
