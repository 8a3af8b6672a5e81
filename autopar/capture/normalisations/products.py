"""Products of several tensors, and of several dims, are taken apart into products of two.

They come in the order in which torch makes them, so that each can be cut by its own rule.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import fx

from autopar.capture.graph_builder import Site, rewrites, shape_of
from autopar.strategies.rules.contractions import ELLIPSIS, subscripts

aten = torch.ops.aten


@rewrites(aten.einsum.default)
def products_of_two(call: Site) -> fx.Node | None:
    """einsum of more than two operands: what is in no other operand is summed with each pair."""
    operands = list(call["tensors"])
    terms, right = subscripts(call["equation"])
    if len(operands) < 3 or (ELLIPSIS in "".join(terms) and ELLIPSIS not in right):
        return None
    path = call["path"] or [0, 1] * (len(operands) - 1)
    for first, second in zip(path[::2], path[1::2]):
        places = sorted((first, second), reverse=True)
        (second_term, b), (first_term, a) = [(terms.pop(p), operands.pop(p)) for p in places]
        kept = _kept(first_term, second_term, [right, *terms]) if terms else right
        product = call.make(aten.einsum.default, f"{first_term},{second_term}->{kept}", [a, b])
        at = len(terms) if call["path"] else 0
        operands.insert(at, product)
        terms.insert(at, kept)
    made: fx.Node = operands[0]
    return made


def _kept(first: str, second: str, others: Sequence[str]) -> str:
    """The subscripts of a product that others still read, those of the output before the rest."""
    read = dict.fromkeys("".join(others).replace(ELLIPSIS, ""))
    own = {*first, *second}
    dots = ELLIPSIS * (ELLIPSIS in first or ELLIPSIS in second)
    return dots + "".join(letter for letter in read if letter in own)


@rewrites(aten.tensordot.default)
def dims_contracted_together(call: Site) -> fx.Node:
    """tensordot is an einsum of two operands."""
    letters = iter(string.ascii_letters)
    left, right = ([next(letters) for _ in shape] for shape in call.shapes)
    summed = set()
    for dim, other in zip(call["dims_self"], call["dims_other"]):
        right[other] = left[dim]
        summed.add(left[dim])
    out = "".join(letter for letter in left + right if letter not in summed)
    equation = f"{''.join(left)},{''.join(right)}->{out}"
    return call.make(aten.einsum.default, equation, list(call.inputs))


@rewrites(aten.linalg_multi_dot.default, aten.chain_matmul.default)
def chains_of_products(call: Site) -> fx.Node:
    """multi_dot: products of two, in the order that takes the fewest FLOPs."""
    matrices = list(call.inputs)
    if len(call.shapes[0]) == 1:
        matrices[0] = call.make(aten.reshape.default, matrices[0], [1, *call.shapes[0]])
    if len(call.shapes[-1]) == 1:
        matrices[-1] = call.make(aten.reshape.default, matrices[-1], [*call.shapes[-1], 1])
    sizes = _sizes(matrices)
    if len(matrices) == 3 and _parted(sizes, 2) == _cheapest(sizes)[0]:
        # As torch, which takes the left product first if both orders are even.
        matrices[:2] = [call.make(aten.matmul.default, *matrices[:2])]
    product = _chain(call, matrices)
    if shape_of(product) == call.shape:
        return product
    return call.make(aten.reshape.default, product, list(call.shape))


def _chain(call: Site, matrices: Sequence[fx.Node]) -> fx.Node:
    """The product of a chain, and of each part of it: parted where that takes the fewest FLOPs."""
    if len(matrices) == 1:
        return matrices[0]
    at = _cheapest(_sizes(matrices))[1]
    left, right = _chain(call, matrices[:at]), _chain(call, matrices[at:])
    return call.make(aten.matmul.default, left, right)


def _sizes(matrices: Sequence[fx.Node]) -> tuple[int, ...]:
    return *(shape_of(matrix)[0] for matrix in matrices), shape_of(matrices[-1])[1]


@lru_cache(maxsize=1024)
def _cheapest(sizes: tuple[int, ...]) -> tuple[int, int]:
    """The FLOPs of a chain of matrices with these sizes, and before which matrix it is parted."""
    if len(sizes) == 2:
        return 0, 0
    ways = ((_parted(sizes, at), at) for at in range(1, len(sizes) - 1))
    return min(ways)


def _parted(sizes: tuple[int, ...], at: int) -> int:
    """The FLOPs of a chain that is parted before a matrix."""
    product = sizes[0] * sizes[at] * sizes[-1]
    return _cheapest(sizes[: at + 1])[0] + _cheapest(sizes[at:])[0] + product
