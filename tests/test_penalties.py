"""A whole gradient is one rank's term of the sum that other readers ask for: states stay cut."""

from __future__ import annotations

import pytest
import torch

import autopar as ap
from autopar.collectives import Movement, move
from autopar.strategies.node_info import info
from tests.parity import assert_parity
from tests.penalties import penalised


@pytest.mark.parametrize("mesh", [ap.Mesh(dp=3), ap.Mesh(dp=2, tp=2)])
@pytest.mark.parametrize(
    ("states", "microbatches"), [("whole", 2), ("zero1", 1), ("zero2", 2), ("zero3", 2)]
)
def test_a_penalty_on_weights_leaves_states_cut(
    mesh: ap.Mesh, states: str, microbatches: int
) -> None:
    case = penalised().fresh()
    microbatches = microbatches if "tp" in mesh else 1
    if "tp" in mesh:
        ap.shard(case.model.inner.layers[0], params={"weight": ("tp", None), "bias": ("tp",)})
    module = assert_parity(case, mesh, states=states, microbatches=microbatches)
    graph = module.plan.rewritten
    for node in graph.find_nodes(op="placeholder"):
        if (places := info(node).places) is not None:
            assert "dp" in {*info(node).sync, *places.storage.axes}
            assert ("dp" in places.optimizer.axes) == (states != "whole")
    sums = [n for n in graph.nodes if info(n).movement is not None and info(n).movement.is_sum_back]
    assert not sums, "gradients are summed once, when backward has gone past them"


def test_what_is_whole_is_the_term_of_one_rank() -> None:
    leaves = [torch.ones(3, requires_grad=True) for _ in range(4)]
    whole = move(Movement("identity", ("b",)), leaves, ap.Mesh(a=2, b=2))
    torch.autograd.backward(whole, [torch.full((3,), 2.0)] * 4)
    assert [leaf.grad.tolist() for leaf in leaves] == [[2.0] * 3, [0.0] * 3] * 2
