"""Matrices: decompositions and what is solved by them need each matrix whole; the batch is cut.

Of several right sides each is solved on its own: their columns are cut as well.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autopar.strategies.language import Pattern
from autopar.strategies.registry import OperatorCall, aten, register_rule
from autopar.strategies.rule import ExtraTensor, Rule, Saved

# By line: the kept inputs and output, further kept tensors, and the operators.
TABLE = {
    "... m! n! -> ... a! b!": {
        ("output", ""): "linalg_cholesky cholesky linalg_inv inverse",
        ("0", ""): "linalg_matrix_exp",
        ("0 output", ""): "cholesky_inverse",
    },
    "... m! n! -> ... a! b!, ...": {("output", ""): "linalg_cholesky_ex linalg_inv_ex"},
    "... m! n! -> ... a! b!, ... c! d!": {("output", ""): "linalg_qr qr"},
    "... m! n! -> ... k!, ... a! b!": {("output", ""): "linalg_eigh linalg_eig"},
    "... m! n! -> ... a! b!, ... k!, ... c! d!": {("output", ""): "linalg_svd svd"},
    "... m! n! -> ... k!": {
        ("output", "... n! k!"): "linalg_eigvals linalg_eigvalsh",
        ("output", "... m! k!, ... k! n!"): "linalg_svdvals",
    },
    "... m! n! -> ...": {
        ("0 output", "int32: ... m!, ... m! n!"): "linalg_det det",
        ("0", "int32: ... m!, ... m! n!, bool: ..., ..."): "logdet",
    },
    "... m! n! -> ..., ...": {("0", "int32: ... m!, ... m! n!, ..."): "linalg_slogdet slogdet"},
    "... m! n!, ..., ... -> ...": {("", ""): "linalg_matrix_rank"},
    "... m! n!, ..., ... -> ... n! m!": {("0 output", ""): "linalg_pinv"},
    "... m! n! -> ... a! b!, ... k!": {
        ("output", "int32: ... k!"): "linalg_lu_factor",
        ("", ""): "linalg_ldl_factor geqrf",
    },
    "... m! n! -> ... a! b!, ... k!, ...": {
        ("output", "int32: ... k!"): "linalg_lu_factor_ex _lu_with_info",
        ("", ""): "linalg_ldl_factor_ex",
    },
    "... m! n! -> ... a! a2!, ... c! d!, ... e! f!": {("output", "... a! a2!"): "linalg_lu"},
    "... m! n!, ... k! -> ... a! a2!, ... c! d!, ... e! f!": {("", ""): "lu_unpack"},
    "... m! n!, ... k! -> ... m! a!": {("0 1 output", ""): "linalg_householder_product orgqr"},
    "... a! b!, ... k!, ... m! n! -> ... m! n!": {("0 1 2 output", ""): "ormqr"},
    "... n! q, ... n! m! -> ... n! q": {("0 1 output", ""): "cholesky_solve"},
    "... n! q!, ... n! m! -> ... n! q!, ... n! m!": {("0 1", "... n! q!"): "triangular_solve"},
    "... n! q, ... n! m!, ... n! -> ... n! q": {("1 2 output", ""): "lu_solve"},
    "... n! m!, ... n!, ... n! q -> ... n! q": {("", ""): "linalg_ldl_solve"},
}


def cubic(rule: Rule) -> Rule:
    """Return the rule with the FLOPs of a decomposition.

    They are those of a product of its three largest sizes, and of two products for the gradient.
    """
    sides = sorted(size for name, size in rule.sizes.items() if not _of_batch(name))
    batch = (size for name, size in rule.sizes.items() if _of_batch(name))
    flops = 2.0 * math.prod(batch) * math.prod(sides[-3:])
    return replace(rule, flops=flops, backward_flops=2 * flops, product=True)


def _of_batch(name: str) -> bool:
    return name[0] == "d" and name[1:].isdigit()


def _of_matrices(call: OperatorCall, line: Pattern, **options: Any) -> Rule | None:
    """Return the rule by a line; None if a result is left out, which torch makes one empty dim."""
    for dims, value in zip(line.outputs, call.outputs):
        if value.dim() < len(dims) - 1:
            return None
    return cubic(call.parse(line, **options))


def _solved(call: OperatorCall) -> Rule:
    """Return the rule of A x = B, or x A = B, of which each column, or row, is independent."""
    matrix, right = call.shapes
    is_vector = len(right) == 1 or (len(matrix) - 1 == len(right) and matrix[:-1] == right)
    side = "n!" if is_vector else "n! q" if call["left"] else "q n!"
    infos = ", ..." * (len(call.outputs) - 1)
    line = Pattern.read(f"... n! m!, ... {side} -> ... {side}{infos}")
    rule = cubic(call.parse(line, passes=[(1,)]))
    factors = ExtraTensor(rule.inputs[0]), ExtraTensor(rule.inputs[0][:-1], torch.int32)
    return replace(rule, saved=Saved((0,), output=True, extra=factors))


def _solved_by_factors(call: OperatorCall) -> Rule:
    """Return the rule of a solve by factors: columns of B, or rows, are independent."""
    side = "n! q" if call["left"] else "q n!"
    if "pivots" in call.arguments:
        line, saved = f"... n! m!, ... n!, ... {side} -> ... {side}", "0 1 output"
    else:
        line, saved = f"... n! m!, ... {side} -> ... {side}", "0 output"
    return cubic(call.parse(line, saved=saved, passes=[(len(call.shapes) - 1,)]))


for _line, _operators in TABLE.items():
    for (_saved, _extra), _names in _operators.items():
        register_rule(
            aten(_names),
            partial(_of_matrices, line=Pattern.read(_line), saved=_saved, extra=_extra),
        )
register_rule(aten("linalg_solve linalg_solve_ex"), _solved)
register_rule(aten("linalg_solve_triangular linalg_lu_solve"), _solved_by_factors)
register_rule("aten.cdist", "... m d!, ... n d! -> ... m n", saved="0 1 output")
