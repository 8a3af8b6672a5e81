"""A program that is written out is the one that is rewritten with all blocks, in every fact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import fx

import autopar as ap
from autopar.passes.microbatches import cut_batch
from autopar.program.equal_blocks import is_regular
from tests.pipeline.models import share_captures  # noqa: F401
from tests.program.test_folding import CASES
from tests.toy import EVEN, machines

NETS = ["in turn", "dropout", "a mask that all read"]
NAMES = ["gpt", "gpt2", "llama", "t5", "vit", "mixtral", *NETS, "the sum of two values"]
MACHINES = machines(4, *EVEN, memory=1e15)
MESH = {"mesh": ap.Mesh(dp=2, tp=2)}
WAYS: list[dict[str, Any]] = [
    {**MESH, "states": "zero3"},
    {**MESH, "states": "zero1", "microbatches": 2, "recompute": "full"},
    {**MESH, "states": "whole", "recompute": ap.Recompute("selective", keep="host")},
    {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "1f1b", "microbatches": 2, "states": "zero2"},
]
# Models take turns over the ways.
TURNS = [(name, WAYS[(number + turn) % 4]) for number, name in enumerate(NAMES) for turn in (0, 1)]


@pytest.mark.parametrize(("name", "way"), TURNS)
def test_what_is_written_out_is_what_is_rewritten(name: str, way: dict[str, Any]) -> None:
    case = CASES[name]()
    plan = ap.plan(case.model, case.args, case.kwargs, cluster=MACHINES, **way)
    program = plan.whole_step.program
    assert program.folded is not None
    plain = program.folded.with_recomputation({})
    assert is_regular(plain.rewritten)
    whole = replace(program, folded=None)
    assert_equal([*program.rewritten.nodes], [*whole.rewritten.nodes])
    if (batches := plan.whole_step.batches) is not None:
        one, other = batches.captured, cut_batch(batches.whole, batches.count).captured
        assert_equal([*one.graph.nodes], [*other.graph.nodes])
        assert (one.parameters, one.buffers, one.classes) == (
            other.parameters,
            other.buffers,
            other.classes,
        )
        assert [*map(str, one.output_leaves)] == [*map(str, other.output_leaves)]


def assert_equal(nodes: list[fx.Node], others: list[fx.Node]) -> None:
    """Compare every fact of every node, its name and those who read it."""
    assert len(nodes) == len(others)
    for node, other in zip(nodes, others):
        assert (node.op, node.name, node.target) == (other.op, other.name, other.target)
        assert str((node.args, node.kwargs)) == str((other.args, other.kwargs))
        assert {user.name for user in node.users} == {user.name for user in other.users}
        assert facts_of(node) == facts_of(other), node


def facts_of(node: fx.Node) -> dict[str, str]:
    return {name: str(fact) for name, fact in node.meta.items()}
