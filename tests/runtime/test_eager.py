"""Eager programs join the operators that capture took apart, and defer their sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autopar as ap
from autopar.passes import LocalContext, localize
from autopar.passes.recombine import recombine, reduced_cross_entropy
from autopar.runtime.execution.eager_program import compile_graph

LABELS = torch.tensor([[1, 2, -100], [0, -100, 3]])


class Unbound(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.view(2, 3, 4).unbind(1)
        return (q * k + v).sum()


class Split(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b, c = x.split([3, 7, 2], -1)
        return a.sum() + (b * 2).sum() + (c * 3).sum()


class PartlySplit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3].sum() + x[:, 4:].sum()


class MeanLoss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(x.view(2, 3, 2, 2).flatten(2).transpose(1, 2), LABELS)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean(-1, keepdim=True).sum()


def program(model: nn.Module, x: Tensor) -> fx.Graph:
    """The program of the only rank."""
    plan = ap.plan(model, (x,), mesh=ap.Mesh(d=1), mode="propagate")
    return localize(plan.program.graph, plan.mesh, 0, torch.device("cpu"), lambda axes: "")


def results(run: object, graph: fx.Graph, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of x."""
    constants = [n for n in graph.nodes if n.op == "placeholder" and n.meta["origin"][0] != "input"]
    x = x.detach().clone().requires_grad_()
    (loss,) = run(*([LABELS] * len(constants)), x)  # type: ignore[operator]
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


@pytest.mark.parametrize(
    ("model", "joined"),
    [
        (Unbound(), torch.unbind),
        (Split(), torch.split_with_sizes),
        (PartlySplit(), None),
        (MeanLoss(), reduced_cross_entropy),
        (Mean(), torch.mean),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_capture_took_apart_is_joined_and_computes_the_same(model, joined):
    torch.manual_seed(0)
    x = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    graph = program(model, x)
    before = results(fx.GraphModule({}, graph).forward, graph, model, x)
    after = results(compile_graph(graph), graph, model, x)
    torch.testing.assert_close(after, before, rtol=1e-14, atol=1e-14)
    recombine(graph, LocalContext())
    graph.lint()
    new = {torch.unbind, torch.split_with_sizes, reduced_cross_entropy, torch.mean}
    assert {node.target for node in graph.nodes} & new == ({joined} if joined else set())


class Positions(nn.Module):
    """Reads a table whole and adds it to a batch."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 4))
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        y = (x + self.table.tanh()).sum()
        return y + self.table.sum() if self.tied else y


def test_a_sum_behind_a_parameter_is_lifted_to_it():
    x = torch.randn(4, 3, 4)
    plan = ap.plan(Positions(tied=False), (x,), mesh=ap.Mesh(dp=2), mode="data")
    assert [m.forward for m in plan.movements()] == ["all_reduce"]  # that of the loss
    (table,) = (node for node in plan.program.graph.nodes if node.name == "p_table")
    assert table.meta["sync"] == ("dp",)


def test_numbers_that_hang_on_inputs_alone_are_not_summed():
    class Loss(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(x, labels)

    x = torch.randn(4, 5, requires_grad=True)
    plan = ap.plan(Loss(), (x, torch.tensor([1, 2, -100, 3])), mesh=ap.Mesh(dp=2), mode="data")
    assert len(plan.movements()) == 2  # of the loss and of the count
    local = localize(plan.program.graph, plan.mesh, 0, torch.device("cpu"), lambda axes: "dp")
    late: list = []
    whole = compile_graph(local, late=late, outputs=1, whole=plan.program.graph, mesh=plan.mesh)
    assert whole.whole_inputs == ("labels",)
    labels = torch.tensor([1, 2, -100, 3])
    (loss,) = whole(x[:2], labels[:2], labels)  # no group is there: nothing may be summed
    assert len(late) == 1
    expected = F.cross_entropy(x[:2], labels[:2], reduction="sum") / 3
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(late[0].tensor, expected.detach())
