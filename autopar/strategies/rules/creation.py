"""Creation: a tensor of one constant can be made in pieces; a count such as arange is made whole.

A tensor that is only asked for its dtype (`new_ones`) stays whole; one that is asked for its shape
(`ones_like`) is cut like the output.
"""

from __future__ import annotations

from functools import partial

from autopar.strategies.registry import OperatorCall, Traits, aten, register_rule, shape_of_piece
from autopar.strategies.rule import Rule, names


def _constant(call: OperatorCall, *, is_count: bool = False) -> Rule:
    """Return a rule whose inputs stay whole; so does the result if it counts, as arange."""
    out = names(len(call.shape))
    inputs = [names(len(shape), f"other{number}_") for number, shape in enumerate(call.shapes)]
    whole = [dim for dims in inputs + [out] * is_count for dim in dims]
    return call.rule(inputs, out, whole=whole, flops=0.0)


register_rule(
    aten("zeros ones full empty new_zeros new_ones new_full new_empty"),
    _constant,
    traits=Traits(of_piece={"size": shape_of_piece}, shape_only=True),
)
register_rule(
    aten("zeros_like ones_like full_like empty_like zero fill.Scalar"),
    "... -> ...",
    cost=0,
    traits=Traits(shape_only=True),
)
register_rule("aten.fill.Tensor", "..., -> ...", cost=0)
register_rule(aten("arange linspace eye scalar_tensor"), partial(_constant, is_count=True))
