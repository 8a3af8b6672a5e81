"""A parameter is stored, worked with, summed and optimized in four places, tied or apart."""

from dataclasses import replace

import pytest

import autopar as ap
from autopar.layout import Layout, ParameterPlacement
from autopar.plan.plan import SavedPlan
from autopar.search.constraints import Constraints
from autopar.strategies.node_info import info
from tests import models
from tests.annotations import megatron
from tests.parity import assert_parity

MESH = ap.Mesh(dp=2, tp=2)


def cut_over_dp(layout: Layout) -> Layout:
    """The same with its first dim also cut over the ranks of `dp`, if that may be."""
    first, *others = layout.dims or ((),)
    may_be = layout.dims and "dp" not in layout.axes
    return Layout((*first, "dp"), *others) if may_be else layout


@pytest.fixture
def apart(monkeypatch):
    """Parameters are stored in pieces over `dp`, and gathered for those who read them."""

    def places(self: Constraints, working: Layout) -> ParameterPlacement:
        stored = cut_over_dp(working)
        return ParameterPlacement(stored, working, stored, stored)

    monkeypatch.setattr(Constraints, "places", places)


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


@pytest.mark.parametrize("options", [{"mode": "auto"}, {"microbatches": 2}], ids=str)
def test_whatever_decides_the_places_hold(apart, options):
    assert_parity(models.gpt(), MESH, **options)


def test_in_stages(apart):
    mesh = ap.Mesh(pp=2, dp=2)
    assert_parity(models.gpt(), mesh, schedule="1f1b", microbatches=2)


def test_a_file_has_all_places(apart, monkeypatch):
    case = models.gpt()
    plan = ap.plan(case.model, case.args, case.kwargs, mesh=MESH, mode="propagate")
    saved = SavedPlan.from_json(SavedPlan.of(plan).to_json())
    monkeypatch.undo()
    again = saved.attach(case.model, case.args, case.kwargs)
    assert again.decisions == plan.decisions
    assert again.types == plan.types == saved.types
    assert again.memory == plan.memory


@pytest.mark.parametrize("place", ["storage", "working", "gradient", "optimizer"])
def test_places_that_contradict_one_another_are_refused(apart, place):
    case = models.gpt()
    plan = ap.plan(case.model, case.args, case.kwargs, mesh=MESH, mode="propagate")
    data = SavedPlan.of(plan).to_json()
    name = next(
        name for name, places in plan.decisions.apart.items() if len(places.storage.dims) > 1
    )
    at = data["decisions"]["apart"][name]
    dims, _ = at[place]
    at[place] = [[*dims[:-1], ["dp"]] if place != "working" else at["storage"][0], []]
    if place != "working":
        at[place][0][0] = []
    with pytest.raises(ap.InvalidInput, match="a parameter is read where the plan says"):
        SavedPlan.from_json(data)


def test_places_of_no_parameter_are_refused(apart):
    case = models.gpt()
    plan = ap.plan(case.model, case.args, case.kwargs, mesh=MESH, mode="propagate")
    data = SavedPlan.of(plan).to_json()
    data["decisions"]["apart"]["nobody"] = next(iter(data["decisions"]["apart"].values()))
    with pytest.raises(ap.InvalidInput, match="nobody"):
        SavedPlan.from_json(data)


def test_what_an_optimizer_keeps_follows_its_own_place(monkeypatch):
    def memory(*apart: str):
        def places(self: Constraints, working: Layout) -> ParameterPlacement:
            tied = ParameterPlacement.tied(working)
            return replace(tied, **dict.fromkeys(apart, cut_over_dp(working)))

        monkeypatch.setattr(Constraints, "places", places)
        return ap.plan(case.model, case.args, case.kwargs, mesh=MESH, mode="propagate").memory

    case = models.gpt()
    tied, zero1, zero2 = memory(), memory("optimizer"), memory("gradient", "optimizer")
    cut, whole = zero2.gradients, tied.gradients
    assert tied.optimizer == 2 * tied.gradients == 2 * tied.parameters
    assert cut < 0.51 * whole
    assert zero1 == replace(tied, parameters=cut, optimizer=2 * cut, gathered=whole)
    assert zero2 == replace(zero1, gradients=cut)
    zero3 = memory("storage", "gradient", "optimizer")
    assert zero3 == replace(zero2, gathered=0, activations=zero3.activations)


def test_places_are_nested():
    working, cut, further = Layout("tp"), Layout(("tp", "dp")), Layout(("tp", "dp", "x"))
    assert ParameterPlacement(cut, working, working, further).is_nested
    assert ParameterPlacement(working, working, cut, further).is_nested
    assert not ParameterPlacement(further, working, working, cut).is_nested
    assert not ParameterPlacement(cut, working, working, Layout(("tp", "x"))).is_nested
    two = Layout("tp", None)
    assert not ParameterPlacement(Layout("tp", "x"), two, two, Layout(("tp", "x"), None)).is_nested
    assert not ParameterPlacement(two, two, two, Layout(("tp", "x"), "dp")).is_nested
