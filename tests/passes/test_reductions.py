"""Reductions: which movements and linears of a rank's program become one call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import autopar as ap
from autopar.collectives.deferred_linears import linears
from autopar.cost.deferred_reductions import mergeable_linears
from autopar.passes import LocalContext, localize
from autopar.passes.linear_reductions import hide_reductions
from tests import models
from tests.annotations import megatron, sequence
from tests.models import Case
from tests.runtime.acts import tree

own = torch.ops.autopar


def joined(
    case: Case, mesh: ap.Mesh, split: bool = False, rank: int = 0, **options: object
) -> list[fx.Node]:
    """Return the calls in the program of a rank."""
    options = {"mode": "propagate", **options}
    plan = ap.plan(case.model, case.args, case.kwargs, mesh=mesh, **options)  # type: ignore[arg-type]
    graph = localize(plan.program.graph, plan.mesh, rank, torch.device("cpu"), "+".join)
    hide_reductions(graph, LocalContext(is_differentiated_once=True, is_split=split))
    graph.lint()
    if not split:  # the plan counts on the same
        together = mergeable_linears(plan.program.graph.nodes)
        counts = [len(node.args[3:]) // 2 for node in graph.nodes if node.target is linears]
        assert [len(readers) for readers in together] == counts
    return [node for node in graph.nodes if node.target is linears]


def test_columns_sum_the_gradient_of_what_they_read_beside_those_of_weights() -> None:
    found = joined(megatron(models.gpt(layers=2)), ap.Mesh(tp=2))
    assert [node.args[1] for node in found] == [own.identity.default] * 4
    assert [len(node.args[3:]) // 2 for node in found] == [3, 1] * 2  # q, k, v; up


def test_under_sequence_parallelism_the_gradient_is_scattered_beside_them() -> None:
    found = joined(sequence(megatron(models.gpt(layers=1))), ap.Mesh(tp=2))
    assert [node.args[1] for node in found] == [own.all_gather.default] * 2


def test_readers_of_one_value_are_joined() -> None:
    found = joined(megatron(models.llama(layers=1)), ap.Mesh(tp=2))
    assert [len(node.args[3:]) // 2 for node in found] == [3, 2]  # q, k, v; gate and up
    assert [len(node.users) for node in found] == [3, 2]


def test_backward_that_is_split_stays_as_it_is() -> None:
    assert not joined(megatron(models.gpt(layers=1)), ap.Mesh(tp=2), split=True)


def test_ranks_without_elements_join_the_same() -> None:
    """Otherwise these ranks would call the collectives of backward in another order."""
    found = [joined(tree(), ap.Mesh(d=4), rank=rank) for rank in range(4)]  # of six columns
    names = [[(node.name, node.args[1]) for node in nodes] for nodes in found]
    assert len(names[0]) == 1
    assert names == [names[0]] * 4


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_joined_call_stays_in_its_region(recompute: str) -> None:
    found = joined(megatron(models.gpt(layers=2)), ap.Mesh(tp=2), recompute=recompute)
    assert len(found) == 4
    assert all(node.meta["region"] is not None for node in found)


class Read(nn.Module):
    """Read one value by a linear that is cut by columns, and by another reader."""

    def __init__(self, also: bool, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.up = nn.Linear(4, 4), nn.Linear(4, 8)
        self.up.weight.requires_grad_(not frozen)
        self.also = also

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.up(x)
        return (
            (y.square() * torch.matmul(x, self.up.weight.t().tanh())).mean()
            if self.also
            else y.mean()
        )


@pytest.mark.parametrize(
    ("also", "frozen", "count"), [(False, False, 1), (True, False, 0), (False, True, 0)]
)
def test_other_readers_and_frozen_weights_leave_it_alone(also, frozen, count) -> None:
    model = Read(also, frozen)
    ap.shard(model.up, params={"weight": ("tp", None), "bias": ("tp",)})
    plan = ap.plan(model, (torch.randn(3, 4),), mesh=ap.Mesh(tp=2), mode="propagate")
    graph = localize(plan.program.graph, plan.mesh, 0, torch.device("cpu"), "+".join)
    hide_reductions(graph, LocalContext(is_differentiated_once=True))
    assert sum(node.target is linears for node in graph.nodes) == count
