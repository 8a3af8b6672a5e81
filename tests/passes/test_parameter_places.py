"""A parameter is stored, worked with, summed and optimized in four places, tied or apart."""

from dataclasses import replace

import pytest

import autopar as ap
from autopar.cluster import Link
from autopar.layout import Layout, ParameterPlacement
from autopar.plans.plan import SavedPlan
from autopar.strategies.node_info import info
from tests import models
from tests.annotations import megatron
from tests.parity import assert_parity
from tests.toy import machines

MESH = ap.Mesh(dp=2, tp=2)


def planned(**options) -> ap.Plan:
    case = models.gpt()
    options = {"mesh": MESH, "mode": "propagate", **options}
    return ap.plan(case.model, case.args, case.kwargs, **options)


@pytest.mark.parametrize("name", ["gpt", "resnet"])
@pytest.mark.parametrize("annotate", [lambda case: case, megatron], ids=["plain", "megatron"])
def test_what_is_stored_apart_is_gathered_once_for_its_readers(name, annotate):
    module = assert_parity(annotate(models.ZOO[name]()), MESH, states="zero3")
    nodes = list(module.program.graph.nodes)
    apart = [n for n in nodes if info(n).places and info(n).places.storage != info(n).type.layout]
    assert not apart
    stored = [n for n in nodes if info(n).places and not info(n).places.is_tied]
    assert stored
    for node in stored:
        (gather,) = node.users
        while info(gather).type.layout != info(node).places.working:
            (gather,) = gather.users
        assert info(gather).movement.backward == "reduce_scatter"
        assert not info(node).sync


def test_a_file_has_all_places():
    case, plan = models.gpt(), planned(states=ap.States(1, 2, 4))
    saved = SavedPlan.from_json(SavedPlan.of(plan).to_json())
    again = saved.attach(case.model, case.args, case.kwargs)
    assert again.decisions == plan.decisions
    assert again.types == plan.types == saved.types
    assert (again.memory, again.cost, again.states) == (plan.memory, plan.cost, plan.states)


@pytest.mark.parametrize("place", ["storage", "working", "gradient", "optimizer"])
def test_places_that_contradict_one_another_are_refused(place):
    plan = planned(states="zero3")
    data = SavedPlan.of(plan).to_json()
    name = next(
        name for name, places in plan.decisions.apart.items() if len(places.storage.dims) > 1
    )
    at = data["decisions"]["apart"][name]
    dims, _ = at["storage"]
    at[place] = [dims if place == "working" else dims[::-1], []]
    with pytest.raises(ap.InvalidInput, match="a parameter is read where the plan says"):
        SavedPlan.from_json(data)


def test_places_of_no_parameter_are_refused():
    data = SavedPlan.of(planned(states="zero1")).to_json()
    data["decisions"]["apart"]["nobody"] = next(iter(data["decisions"]["apart"].values()))
    with pytest.raises(ap.InvalidInput, match="nobody"):
        SavedPlan.from_json(data)


def test_what_is_kept_follows_its_own_place():
    """Buffers are small beside the model: only a part of it waits in them."""
    whole, zero1, zero2, zero3 = (
        planned(mesh=ap.Mesh(dp=2), states=replace(ap.States.of(name), buffer_bytes=1 << 14)).memory
        for name in ("whole", "zero1", "zero2", "zero3")
    )
    full, cut = whole.gradients, zero2.gradients
    assert whole.optimizer == 2 * whole.gradients == 2 * whole.parameters
    assert cut < 0.51 * full
    kinds = {"parameters": cut, "optimizer": 2 * cut, "gathered": full}
    assert zero1 == replace(whole, **kinds, at_peak=zero1.at_peak)
    assert zero2 == replace(zero1, gradients=cut, at_peak=zero2.at_peak)
    # Two groups at a time.
    assert zero3 == replace(zero2, gathered=zero3.gathered, at_peak=zero3.at_peak)
    assert zero3.gathered < full
    assert zero3.peak < zero2.peak <= zero1.peak < whole.peak


def test_places_are_nested():
    working, cut, further = Layout("tp"), Layout(("tp", "dp")), Layout(("tp", "dp", "x"))
    assert ParameterPlacement(cut, working, working, further).is_nested
    assert ParameterPlacement(working, working, cut, further).is_nested
    assert ParameterPlacement(further, working, working, cut).is_nested
    assert ParameterPlacement(further, working, cut, cut).is_nested
    assert not ParameterPlacement(cut, working, further, cut).is_nested
    assert not ParameterPlacement(working, cut, cut, working).is_nested
    assert not ParameterPlacement(Layout(("tp", "x")), working, working, cut).is_nested
    assert not ParameterPlacement(cut, working, working, Layout(("tp", "x"))).is_nested
    two = Layout("tp", None)
    assert not ParameterPlacement(Layout("tp", "x"), two, two, Layout(("tp", "x"), None)).is_nested
    assert not ParameterPlacement(two, two, two, Layout(("tp", "x"), "dp")).is_nested


def test_gradients_of_pieces_are_scattered_where_summing_them_whole_was_measured_faster():
    """Summing them whole would bring copies one by one, and whole gradients on each rank."""
    measured = {("all_reduce", 2): (1e-5, 1e9), ("reduce_scatter", 2): (1e-3, 1e6)}
    here = machines(2).nodes[0]
    link = Link(1e-5, 1e9, measured)
    cluster = ap.Cluster((replace(here, link=link),), link, "slow to scatter")
    case = models.mlp()
    about = {"cluster": cluster, "mesh": ap.Mesh(dp=2), "mode": "data", "states": "zero3"}
    plan = ap.plan(case.model, case.args, **about)
    ways = {(one.forward, one.backward) for one in plan.movements()}
    assert ways == {("all_gather", "reduce_scatter"), ("all_reduce", "identity")}
