"""Random operators: elements are cut as those of any operator; each draws as in the whole.

The key is the same everywhere. Dropout is linear: the terms of a sum lose the same elements.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.strategies.intermediate_work import IntermediateWork
from autopar.strategies.kernels import keyed_draws
from autopar.strategies.language import Passes, Pattern
from autopar.strategies.registry import OperatorCall, RuleFunction, register_rule
from autopar.strategies.rule import Rule

COST = 16.0  # operations for the bits of an element
# Bytes of the passes that make these bits, of 4 bytes each: the first, three rounds of four, the
# other half of a row's, and the choice by them; on a host measured, in units of a copy.
BITS, HOST_BITS = 4.0 + 3 * 36 + 8 + 5, 85.0


def _of_elements(line: str, passes: Passes = (), extra: str = "") -> RuleFunction:
    """Return the rule function of elements that are scaled, and chosen by draws.

    Backward chooses again, which takes a host as long as the draw.
    """
    pattern = Pattern.read(line)

    def rule(call: OperatorCall) -> Rule:
        parsed = call.parse(pattern, cost=COST, passes=passes, extra=extra)
        size = call.outputs[0].itemsize
        once = IntermediateWork(BITS + 2 * size + 1, 2 * size + 1, HOST_BITS, HOST_BITS)
        return replace(parsed, intermediate=once.times(call.outputs[0].numel()))

    return rule


def _of_features(call: OperatorCall) -> Rule:
    """Return the rule of a draw for each channel of each sample."""
    passes = [(0,)] if call.node.target is keyed_draws.feature_dropout else []
    return call.parse("n c ..., key! -> n c ...", passes=passes, extra="bool: n c", cost=2.0)


register_rule(
    keyed_draws.dropout, _of_elements("..., key! -> ...", passes=[(0,)], extra="bool: ...")
)
register_rule(keyed_draws.alpha_dropout, _of_elements("..., key! -> ...", extra="bool: ..."))
register_rule([keyed_draws.feature_dropout, keyed_draws.feature_alpha_dropout], _of_features)
register_rule(keyed_draws.rrelu, _of_elements("..., key! -> ...", extra="..., bool: ..."))
register_rule(keyed_draws.native_dropout, _of_elements("..., key! -> ..., ...", extra="bool: ..."))
_BY_NUMBERS = (
    *(
        keyed_draws.chosen,
        keyed_draws.uniform_like,
        keyed_draws.normal_like,
        keyed_draws.log_normal_like,
    ),
    *(
        keyed_draws.exponential_like,
        keyed_draws.cauchy_like,
        keyed_draws.geometric_like,
    ),
)
register_rule(_BY_NUMBERS, "..., key! -> ...", cost=COST)
register_rule(
    [keyed_draws.bernoulli, keyed_draws.normal_around, keyed_draws.whole_like],
    "..., ..., key! -> ...",
    cost=COST,
)
register_rule(keyed_draws.poisson, "..., key! -> ...", cost=64 * COST)
register_rule(keyed_draws.permutation, "n!, key! -> n!", cost=COST)
register_rule(keyed_draws.multinomial, "... n!, key! -> ... picked!", cost=COST)
