"""Joint kernels keep the bytes that their rules predict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from autopar.collectives import joint_kernels
from autopar.cost.operator_costs import ShardSizes, extra_saved_bytes
from autopar.mesh import Mesh
from autopar.strategies import KernelCall, Strategy
from autopar.strategies.rule import Facts
from tests.strategies.rule_cases import CASES
from tests.strategies.rule_law import Case, Reference

# A piece has as many rows as its experts are chosen; an even share is predicted.
BY_VALUES = ("routed_experts",)


def joint_calls(reference: Reference, mesh: Mesh) -> Iterator[tuple[Strategy, KernelCall]]:
    for strategy in reference.rule.strategies(mesh):
        call = KernelCall.of(reference.rule, strategy)
        if call is not None and call.kernel.joint is not None:
            yield strategy, call


def facts_of(reference: Reference) -> Facts:
    case, values = reference.case, reference.values
    reals = [value.is_floating_point() or value.is_complex() for value in values]
    learn = tuple(real and at not in case.constants for at, real in enumerate(reals))
    dtypes = tuple(output.dtype for output in reference.outputs)
    sizes = tuple(value.itemsize for value in values)
    return Facts(reference.rule, sizes, learn, dtypes, is_view=False)


def has_joints(case: Case) -> bool:
    rule = Reference(case).rule
    return bool(rule.joints)


WITH_JOINTS = [case for case in CASES if has_joints(case)]


@pytest.mark.parametrize("case", WITH_JOINTS, ids=lambda case: case.name)
def test_kept(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, kept_bytes = Reference(case), list[int]()
    facts, forward = facts_of(reference), joint_kernels._JointFunction.forward

    def watched(ctx: Any, call: Any, *tensors: Any) -> Any:
        outputs, saved = forward(ctx, call, *tensors), iter(())
        saved = iter(getattr(ctx, "to_save", None) or ())
        for count in ctx.counts:
            storages = [next(saved).untyped_storage() for _ in range(count)]
            kept_bytes.append(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
        return outputs

    monkeypatch.setattr(joint_kernels._JointFunction, "forward", staticmethod(watched))
    for mesh in (Mesh(x=2), Mesh(x=3)):
        for strategy, call in joint_calls(reference, mesh):
            if not any(facts.differentiable) or call.kernel.name in BY_VALUES:
                continue
            kept_bytes.clear()
            reference.check(strategy, mesh)
            pieces = ShardSizes(facts.rule, [strategy], mesh)
            special, usual = facts.rule.saved_under(strategy), facts.rule.saved
            # A search has one answer for all strategies, and adds the rest.
            inputs = {*special.inputs_for(facts.differentiable)}
            besides = inputs & {*usual.inputs_for(facts.differentiable)}
            predicted = extra_saved_bytes(facts, pieces)[0]
            predicted += sum(pieces.inputs(facts)[place][0] for place in besides)
            if special.output and usual.output:
                predicted += sum(size[0] for size in pieces.outputs(facts))
            assert max(kept_bytes) == predicted, (call.kernel.name, str(strategy), mesh.size)
