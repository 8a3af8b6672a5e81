"""Inputs whose layouts are fixed: layouts are chosen from where they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.candidates.candidate import Candidate
from autopar.capture import capture
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.search.constraints import Constraints, LayoutConstraint
from autopar.search.layout_search import LayoutSearch
from autopar.search.propagation import propagate
from autopar.strategies.node_info import info
from tests.toy import EVEN, machines

MESH = Mesh(dp=2, tp=2)
X, UP, DOWN = (
    (("dp", None), ("tp", "dp")),
    ((None, "tp"), ("tp", None)),
    ((None, None), (None, "tp")),
)


class FeedForward(nn.Module):
    def forward(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return torch.relu(x @ up) @ down


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("x", X)
@pytest.mark.parametrize("up", UP)
@pytest.mark.parametrize("down", DOWN)
def test_inputs_are_read_where_they_are(
    learns: bool, x: tuple[str | None, ...], up: tuple, down: tuple
) -> None:
    inputs = [torch.empty(s, device="meta") for s in ((256, 512), (512, 2048), (2048, 512))]
    captured = capture(FeedForward(), tuple(value.requires_grad_(learns) for value in inputs))
    layouts = {
        name: Layout(*dims)
        for name, dims in zip(captured.inputs, (x, up, down))
        if name is not None
    }
    fixed = {name: LayoutConstraint(layout, "an argument") for name, layout in layouts.items()}
    constraints, cluster = Constraints(inputs=fixed), machines(4, *EVEN)
    chosen = LayoutSearch(captured, cluster, lambda _: constraints).run([MESH]).decisions
    spread = propagate(captured, MESH, constraints, batch=False)
    ways = [Candidate.laid_out(captured, cluster, decisions) for decisions in (chosen, spread)]
    for node in ways[0].rewritten.find_nodes(op="placeholder"):
        assert info(node).type.layout == layouts[node.name]
    assert ways[0].seconds <= ways[1].seconds * (1 + 1e-9)
