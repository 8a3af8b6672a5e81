"""Draws: what random numbers are drawn for is cut as any elements are; pieces are of one whole.

The key is the same everywhere. Dropout is linear: the terms of a sum lose the same elements.
"""

from __future__ import annotations

from autopar.strategies.kernels import draws
from autopar.strategies.registry import Call, register_rule
from autopar.strategies.rule import Rule

COST = 16.0  # operations for the bits of an element


def _of_features(call: Call) -> Rule:
    """One number for each channel of each sample."""
    passes = [(0,)] if call.node.target is draws.feature_dropout else []
    return call.parse("n c ..., key! -> n c ...", passes=passes, extra="bool: n c", cost=2.0)


register_rule(draws.dropout, "..., key! -> ...", passes=[(0,)], extra="bool: ...", cost=COST)
register_rule(draws.alpha_dropout, "..., key! -> ...", extra="bool: ...", cost=COST)
register_rule([draws.feature_dropout, draws.feature_alpha_dropout], _of_features)
register_rule(draws.rrelu, "..., key! -> ...", extra="..., bool: ...", cost=COST)
register_rule(draws.native_dropout, "..., key! -> ..., ...", extra="bool: ...", cost=COST)
_BY_NUMBERS = (
    *(draws.chosen, draws.uniform_like, draws.normal_like, draws.log_normal_like),
    *(draws.exponential_like, draws.cauchy_like, draws.geometric_like),
)
register_rule(_BY_NUMBERS, "..., key! -> ...", cost=COST)
register_rule(
    [draws.bernoulli, draws.normal_around, draws.whole_like], "..., ..., key! -> ...", cost=COST
)
register_rule(draws.poisson, "..., key! -> ...", cost=64 * COST)
register_rule(draws.permutation, "n!, key! -> n!", cost=COST)
register_rule(draws.multinomial, "... n!, key! -> ... picked!", cost=COST)
