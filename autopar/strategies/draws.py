"""Draws: what random numbers are drawn for can be cut as any elements: a piece is that of the whole.

The key is the same everywhere. Dropout is linear: the terms of a sum lose the same elements.
"""

from __future__ import annotations

from autopar.strategies.kernels import draws
from autopar.strategies.registry import register_rule

COST = 16.0  # operations for the bits of an element

register_rule(
    [draws.dropout, draws.feature_dropout],
    "..., key! -> ...",
    passes=[(0,)],
    extra="bool: ...",
    cost=COST,
)
register_rule(
    [draws.alpha_dropout, draws.feature_alpha_dropout],
    "..., key! -> ...",
    extra="bool: ...",
    cost=COST,
)
register_rule(draws.rrelu, "..., key! -> ...", saved="0", extra="..., bool: ...", cost=COST)
register_rule(
    [draws.bernoulli, draws.chosen, draws.uniform_like, draws.normal_like, draws.whole_like],
    "..., key! -> ...",
    cost=COST,
)
register_rule(draws.permutation, "n!, key! -> n!", cost=COST)
register_rule(draws.multinomial, "... n!, key! -> ... picked!", cost=COST)
