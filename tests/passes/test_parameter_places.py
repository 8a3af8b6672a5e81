"""A parameter is stored, worked with, summed and optimized in four places, tied or apart."""

from dataclasses import replace

import pytest

import autopar as ap
from autopar.layout import Layout, ParameterPlacement
from autopar.search.decisions import Decisions
from autopar.strategies.node_info import info
from tests import models
from tests.annotations import megatron
from tests.parity import assert_parity

MESH = ap.Mesh(dp=2, tp=2)


def cut_over_dp(layout: Layout) -> Layout:
    """The same with its first dim also cut over the ranks of `dp`, if there is one."""
    first, *others = layout.dims or ((),)
    return Layout((*first, "dp"), *others) if layout.dims else layout


@pytest.fixture
def apart(monkeypatch):
    """Parameters are stored in pieces over `dp`, and gathered for those who read them."""

    def places(self: Decisions, placeholder: str) -> ParameterPlacement:
        working = self.placeholders[placeholder]
        stored = cut_over_dp(working)
        return ParameterPlacement(stored, working, stored, stored)

    monkeypatch.setattr(Decisions, "parameter", places)


@pytest.mark.parametrize("name", ["gpt", "resnet"])
@pytest.mark.parametrize("annotate", [lambda case: case, megatron], ids=["plain", "megatron"])
def test_what_is_stored_apart_is_gathered_once_for_its_readers(apart, name, annotate):
    module = assert_parity(annotate(models.ZOO[name]()), MESH)
    nodes = list(module.program.graph.nodes)
    read = [node.name for node in nodes if info(node).places and node.users]
    gathered = [
        node.all_input_nodes[0].name
        for node in nodes
        if info(node).movement is not None
        and info(node).movement.kind == "all_gather"
        and info(node).movement.axes == ("dp",)
    ]
    assert sorted(gathered) == sorted(read)


def test_what_an_optimizer_keeps_follows_its_own_place(monkeypatch):
    def memory(*apart: str):
        def places(self: Decisions, placeholder: str) -> ParameterPlacement:
            tied = ParameterPlacement.tied(self.placeholders[placeholder])
            return replace(tied, **dict.fromkeys(apart, cut_over_dp(tied.storage)))

        monkeypatch.setattr(Decisions, "parameter", places)
        return ap.plan(case.model, case.args, case.kwargs, mesh=MESH, mode="propagate").memory

    case = models.gpt()
    tied, optimizer, gradient = memory(), memory("optimizer"), memory("gradient", "optimizer")
    assert tied.optimizer == 2 * tied.gradients == 2 * tied.parameters
    assert gradient.gradients < 0.51 * tied.gradients
    assert optimizer == replace(tied, optimizer=2 * gradient.gradients)
    assert gradient == replace(optimizer, gradients=gradient.gradients)
