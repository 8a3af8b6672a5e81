"""Experts: tokens can be cut, the experts themselves, and the rows inside of them.

A rank that has some of the experts and all tokens gives a term of the sum. Where one axis cuts
both, tokens go to the ranks that have their experts (`kernels/experts/routed_experts.py`). FLOPs
and memory are those of balanced routing, the same number of tokens for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from autopar.strategies.intermediate_work import IntermediateWork
from autopar.strategies.kernels.experts.capacity import WITHIN_CAPACITY
from autopar.strategies.kernels.experts.chosen_products import CHOSEN_PRODUCTS
from autopar.strategies.kernels.experts.expert_kernels import EXPERTS
from autopar.strategies.registry import OperatorCall, Traits, register_rule
from autopar.strategies.rule import Rule
from autopar.strategies.strategy import JointCut

LAYERS = {
    "apart": "e+ f+ h!, e+ f+ h!, e+ f+, e+ f+",
    "halves": "e+ (two! f) h!, e+ f+ h!, e+ (two! f), e+ f+",
    "interleaved": "e+ (f two!)+ h!, e+ f+ h!, e+ (f two!)+, e+ f+",
}


def _experts(call: OperatorCall) -> Rule:
    tokens = [f"d{index}" for index in range(len(call.shape) - 1)]
    is_joined = call["columns"] != "apart"
    layers = 2 if is_joined or call["up"] is not None else 1
    before = " ".join([*tokens, "k f" + " two" * is_joined])  # `inner`
    rows, hidden, inside = prod(call.shapes[1]), call.shape[-1], call.shapes[3][-1]
    flops = 2.0 * rows * hidden * inside * (layers + 1)
    rule = call.parse(
        f"... h!, ... k!, ... k!, e+ h! f+, {LAYERS[call['columns']]} -> ... h!",
        sizes={"two": 2} if is_joined else {},
        kernels={"e": "some_experts"},
        flops=flops,
        saved="0 1 2 3 4 5 6 7",
        extra=", ".join([before] * (1 if is_joined else layers)),
    )
    # Rows are gathered, pass through `inner`, and are weighted and added.
    size = rows * call.outputs[0].itemsize
    forward = size * (5.0 * hidden + (2.0 + layers) * inside)
    intermediate = IntermediateWork(forward, 2 * forward, forward, 2 * forward)
    joints = {} if rule.sizes.get("e", 1) == 1 else dict(_joints(rule, tokens))
    return replace(rule, backward_flops=2 * flops, intermediate=intermediate, joints=joints)


def _joints(rule: Rule, tokens: Sequence[str]) -> Iterator[tuple[str, JointCut]]:
    """Yield a joint of experts with each dim of the tokens."""
    cuttable = [token for token in tokens if rule.sizes.get(token, 1) > 1]
    for index, token in enumerate(cuttable):
        inputs = (token,) * 3 + ("e",) * (len(rule.inputs) - 3)
        # The rows that arrive: as many as choices, if each goes to another rank.
        rows = ((*tokens, "k", "h"),)
        joint = JointCut("routed_experts", inputs, (token,), keeps=rows, follows=True)
        yield f"experts{index or ''}", joint


register_rule(EXPERTS, _experts, traits=Traits(leading=""))
register_rule(
    CHOSEN_PRODUCTS,
    "r i, e+ o i, r -> r o",
    flops=lambda sizes: 2.0 * sizes.get("r", 1) * sizes.get("o", 1) * sizes.get("i", 1),
    passes=[(0,), (1,)],
    kernels={"e": "some_products"},
    saved="0 1 2",
)
register_rule(WITHIN_CAPACITY, "... t! k! -> ... t! k!")
