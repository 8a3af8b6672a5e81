"""What a rule says autograd keeps is what autograd keeps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.strategies.rule_cases import CASES
from tests.strategies.rule_law import Case, Reference, leaf, run_call

aten = torch.ops.aten
# Operators that torch makes of parts, of which some keep values in between.
OF_PARTS = (
    aten.kl_div.default,
    aten.hinge_embedding_loss.default,
    aten.poisson_nll_loss.default,
    aten.margin_ranking_loss.default,
    aten.cosine_embedding_loss.default,
    aten.triplet_margin_loss.default,
    aten.multilabel_margin_loss.default,
    aten.rms_norm.default,  # on the CPU
    aten.einsum.default,  # permutes copies
)
SCALARS = 32  # bytes of numbers that some operators keep, whatever their size


def is_exact(case: Case) -> bool:
    """Whether torch runs the operator as one piece on any device, with all inputs learning."""
    if case.target is aten.scaled_dot_product_attention.default:
        return len(case.args) == 3 and case.args[0].dim() == 4 and case.args[1].shape[0] > 1
    if case.target is aten.mul.Tensor:
        return case.args[0].is_floating_point()
    if case.target is aten.matmul.default:
        return case.args[0].shape[0] > 1  # else torch copies the broadcast batch
    return case.target not in OF_PARTS


@pytest.mark.parametrize("case", list(filter(is_exact, CASES)), ids=lambda case: case.name)
def test_saved(case: Case) -> None:
    reference = Reference(case)
    if not reference.outputs[0].requires_grad:
        return
    leaves = [leaf(value, index, case) for index, value in enumerate(reference.values)]
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        node = reference.node
        values = dict(zip(reference.nodes, leaves))
        output = run_call(case.target, node.args, node.kwargs, values)[0]
    place = {leaf.untyped_storage().data_ptr(): index for index, leaf in enumerate(leaves)}
    inputs, extra, has_output = set(), {}, False
    for value in kept:
        pointer = value.untyped_storage().data_ptr()
        if pointer in place:
            inputs.add(place[pointer])
        elif pointer == output.untyped_storage().data_ptr():
            has_output = True
        elif value.numel():
            extra[pointer] = value.numel() * value.element_size()
    rule = reference.rule
    expected = sum(
        math.prod(rule.sizes[factor] for dim in dims for factor in dim) for dims in rule.saved.extra
    )
    assert inputs == set(rule.saved.inputs)
    assert has_output == rule.saved.output
    assert abs(sum(extra.values()) - expected * output.element_size()) <= SCALARS
