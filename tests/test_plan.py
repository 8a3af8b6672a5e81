"""The plan as a person meets it: printed, explained, compared, saved, carried to another model."""

from __future__ import annotations

import copy
import inspect
import json
import math
import pickle
import re
from dataclasses import fields, replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

import autopar as ap
from autopar.admission import RunOptions, comparable_option
from autopar.capture.dynamic import DynamicShapes, Range
from autopar.cluster import Device, Link, Node
from autopar.options import OPTION_CHECKS, PlanOptions
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.schedules import schedule as make_schedule
from autopar.pipeline.stages.stage_cost import StageCost
from autopar.planner.layouts import Layouts
from autopar.plans.plan import SavedPlan
from autopar.plans.plan_diff import compare
from autopar.plans.saved_value import deciding
from autopar.runtime.module.plan_broadcast import require_equal_plan
from autopar.search.decisions import TypedDecisions
from autopar.search.layout_search import SearchCache
from autopar.search.smallest_footprint import SmallestFootprint
from autopar.text.progress import fit_line
from autopar.text.units import seconds_text
from tests.models import gpt, mlp
from tests.parity import assert_equal, parallel_outcome, single_outcome

# Slow enough that the work of small models counts.
DEVICE = Device("small", {"f32": 1e12, "f64": 1e12}, memory=16e9, bandwidth=1e11, overhead=1e-6)
CLUSTER = ap.Cluster((Node(DEVICE, 4, Link(1e-6, 1e10)),), Link(1e-6, 1e9), "four")
PAIR = ap.Cluster((Node(DEVICE, 2, Link(1e-6, 1e10)),), Link(1e-6, 1e9), "two")
MESH = ap.Mesh(dp=2, tp=2)


def wide() -> nn.Module:
    """So wide, for so small a batch, that its weights are cut."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 8192), nn.GELU(), nn.Linear(8192, 256)).double()


WIDE_INPUT = torch.ones(4, 256, dtype=torch.float64)


@pytest.fixture(scope="module")
def made() -> ap.Plan:
    return ap.plan(wide(), (WIDE_INPUT,), cluster=CLUSTER, mesh=MESH, mode="auto")


@pytest.fixture(scope="module")
def spread() -> ap.Plan:
    options = {"mesh": MESH, "mode": "data", "states": "whole"}
    return ap.plan(wide(), (WIDE_INPUT,), cluster=CLUSTER, **options)


@pytest.mark.parametrize("door", [ap.plan, ap.parallelize, ap.verify])
def test_the_doors_spell_out_the_same_options(door):
    shown = inspect.signature(door).parameters
    for option in fields(PlanOptions):
        assert shown[option.name].default == option.default
        assert shown[option.name].annotation == option.type
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown.values())
    with pytest.raises(TypeError, match=rf"{door.__name__}\(\) got .*mash"):
        door(wide(), (WIDE_INPUT,), mash=MESH)


def test_ranks_say_all_that_parallelize_takes_about_running():
    kinds = {one.name for one in fields(RunOptions)}
    plain = {
        "model",
        "args",
        "kwargs",
        "plan",
        "init",
        "weights",
    }  # rank 0's, or compared by itself
    taken = inspect.signature(ap.parallelize).parameters.keys()
    assert kinds == taken - plain - {one.name for one in fields(PlanOptions)}
    modes = ({"mode": mode, "options": {"a": 1, "b": nn.Linear}} for mode in ("x", "x", "y"))
    said = [RunOptions(None, False, "whole", False, mode).comparable for mode in modes]
    assert said[0].keys() == kinds
    assert said[0] == said[1] != said[2]
    turned = {"options": {"b": nn.Linear, "a": 1}, "mode": "x"}
    assert comparable_option(turned) == said[0]["compile"]


def test_every_option_has_a_kind_which_its_default_is_of():
    assert list(OPTION_CHECKS) == [option.name for option in fields(PlanOptions)]
    PlanOptions().require_kinds()


def test_verify_takes_what_parallelize_takes():
    taken = inspect.signature(ap.parallelize).parameters
    shown = inspect.signature(ap.verify).parameters
    # What it compares with is the plain model, which has its values; whole tensors; and the program
    # itself, not what a compiler makes of it, nor what it takes.
    of_others = {"init", "weights", "outputs", "compile", "profile"}
    assert {name for name in shown if name != "steps"} == taken.keys() - of_others


def test_the_account_of_the_search(made, spread):
    assert made.search.gap == 0
    assert made.search.bound == pytest.approx(made.search.objective)
    assert made.search.seconds > 0
    assert made.search.sizes.nodes > 0
    assert made.search.sizes.pruned_strategies <= made.search.sizes.strategies
    assert spread.search is None
    assert spread.cost.seconds > made.cost.seconds
    assert spread.memory.peak > 0


def test_blocks_print_as_one():
    case = gpt()
    text = str(
        ap.plan(case.model, case.args, case.kwargs, cluster=CLUSTER, mesh=MESH, mode="propagate")
    )
    assert "layers.{0..1}.up.weight" in text
    assert "layers.0.up.weight" not in text
    assert text.splitlines()[0].startswith("plan on Mesh(dp=2, tp=2), four")


def test_a_mesh_of_some_devices_says_which_are_used():
    about = {"cluster": ap.Cluster.preset("dgx-a100", nodes=2), "mesh": ap.Mesh(dp=5)}
    plan = ap.plan(wide(), (torch.randn(20, 256, dtype=torch.float64),), **about)
    lines = str(plan).splitlines()
    assert "5 of 16 devices used, 5 x A100 80 GB in 1 node" in lines[0]
    assert "  not used   3 of 8 x A100 80 GB in node 0" in lines
    assert "  not used   8 of 8 x A100 80 GB in node 1" in lines


def test_a_model_without_a_loss_says_what_is_priced():
    model, x = nn.Linear(16, 16), torch.randn(8, 16)
    for learns in (True, False):
        plan = ap.plan(model.requires_grad_(learns), (x,), cluster=CLUSTER, mesh=MESH)
        text = " ".join(str(plan).split())
        assert " loss none in the model: priced are forward, " in text
        assert ("backward of all its outputs, " in text) == learns
    case = mlp()
    assert "none in the model" not in str(
        ap.plan(case.model, case.args, cluster=CLUSTER, mesh=MESH)
    )


def test_the_page_as_json(made):
    data = json.loads(json.dumps(made.to_json()))
    assert data["cost"]["seconds"] == made.cost.seconds
    assert data["parameters"]["0.weight"] == str(made.types["0.weight"])
    assert data["search"]["gap"] == 0
    assert len(data["movements"]) == len(made.movements())


# explain


def test_every_candidate_is_explained(made):
    why = made.explain("0")
    assert why.what == "linear"
    assert sum(candidate.chosen for candidate in why.candidates) == 1
    for candidate in why.candidates:
        assert candidate.own == candidate.forward + candidate.backward + candidate.inside
        assert candidate.step >= why.chosen.step - 1e-15
        assert "Max((F + F_half)/P, (M + M_half)/W)" in candidate.formulas[0]
    assert why.chosen.step == pytest.approx(made.search.objective, rel=1e-6)
    formulas = [f for c in why.candidates for edge in c.edges for f in edge.formulas]
    shown = "reduce_scatter = a*log(p)/log(2) + V*(p - 1)/(B*p) = 1e-6*log(2)"
    assert any(shown in formula for formula in formulas)
    json.dumps(why.to_json(), allow_nan=False)


@pytest.mark.parametrize("parts", [1, 2])
def test_what_forcing_another_costs_adds_up(parts):
    """A table by the places of rows is read by nobody else: all else stays as it is."""
    case = gpt(layers=1)
    options = {"cluster": CLUSTER, "mesh": ap.Mesh(x=2), "mode": "auto", "microbatches": parts}
    plan = ap.plan(case.model, case.args, **options)
    why = plan.explain("positions.weight")
    assert why.times == parts
    (rows,) = (c for c in why.candidates if c.output.startswith("f64[8@x"))
    assert why.rest(rows) == 0
    assert {*why.symbols} == {"a", "B", "p", "V"}
    assert why.penalty(rows) == pytest.approx(parts * (rows.total - why.chosen.total))
    heaviest = plan.explain("layers.0.up")
    others = [c for c in heaviest.candidates if heaviest.rest(c)]
    assert others
    for other in others:
        own = parts * (other.total - heaviest.chosen.total)
        assert heaviest.penalty(other) == pytest.approx(own + heaviest.rest(other))
    text = " ".join(str(heaviest).split())
    assert "all else, chosen anew, " in text
    for words in ("where a = latency of a link, s", "p = ranks", "t0 = seconds to start"):
        assert words in text


def test_forcing_another_costs_what_planning_with_it_costs(made):
    """An annotation that asks for a candidate leads to the time that was said of it."""
    why = made.explain("0.weight")
    for dims, output in ((("tp", None), "f64[8192@tp, 256]"), ((None, "dp"), "f64[8192, 256@dp]")):
        model = wide()
        ap.shard(model[0], params={"weight": dims})
        forced = ap.plan(model, (WIDE_INPUT,), cluster=CLUSTER, mesh=MESH, mode="auto")
        candidate = next(c for c in why.candidates if c.output == output)
        assert forced.search.objective == pytest.approx(candidate.step, rel=1e-6)


def test_parameters_are_explained_by_where_they_are_kept(made):
    why = made.explain("0.weight")
    assert why.what == "parameter"
    assert why.chosen.output == str(made.types["0.weight"])
    assert why.chosen.step == pytest.approx(made.search.objective, rel=1e-6)
    whole = next(c for c in why.candidates if c.output == "f64[8192, 256]")
    assert whole.memory == 8192 * 256 * 8 * 4


def test_what_follows_from_the_inputs_alone_says_why_it_is_whole():
    case = gpt(layers=1)
    plan = ap.plan(case.model, case.args, cluster=CLUSTER, mesh=MESH, mode="auto")
    shifted = next(n for n in plan.decisions.strategies if n in plan.cost_graph.prologue)
    why = plan.explain(shifted)
    assert why.chosen.step == pytest.approx(plan.search.objective, rel=1e-6)
    others = [candidate for candidate in why.candidates if not candidate.chosen]
    assert others
    for candidate in others:
        assert "follows from the inputs alone is whole on every rank" in candidate.excluded
    assert "follows from the inputs alone" in why.why
    assert "not possible" not in str(why)


def test_nodes_and_plans_without_a_search(spread):
    name = next(n for n in spread.decisions.strategies if n.startswith("gelu"))
    why = spread.explain(name)
    assert why.what == "gelu"
    assert why.chosen.step is None
    assert "without a search" in why.why
    assert str(why)


def test_annotations_are_named_with_their_line():
    model = wide()
    ap.shard(model[0], ((None, "tp"),), params={"weight": (None, "tp")})
    plan = ap.plan(model, (WIDE_INPUT,), cluster=CLUSTER, mesh=MESH, mode="auto")
    why = plan.explain("0")
    assert "test_plan.py" in why.bound[0]
    excluded = [candidate for candidate in why.candidates if candidate.excluded]
    assert excluded
    assert "test_plan.py" in plan.explain("0.weight").bound[0]


def test_unknown_names_meet_close_ones(made):
    with pytest.raises(ap.InvalidInput, match=r"0\.weight"):
        made.explain("0.wieght")
    for name, close in (("weight", "0.weight, "), ("stage", "stages")):
        with pytest.raises(ap.InvalidInput, match=f"close to it: {close}"):
            made.explain(name)
    for name in ("nonsense", "memory"):
        with pytest.raises(
            ap.InvalidInput, match=r"a parameter, as 0\.weight, a module, as"
        ) as error:
            made.explain(name)
        assert "close" not in str(error.value)
        assert "stages, schedule" in str(error.value)


# diff


def test_two_plans_side_by_side(made, spread):
    diff = made.diff(spread)
    assert diff.parameters["0.weight"] == (str(made.types["0.weight"]), "f64[8192, 256]")
    assert diff.cost["seconds"] == (made.cost.seconds, spread.cost.seconds)
    assert diff.memory["peak"] == (made.memory.peak, spread.memory.peak)
    assert diff.settings == {"mode": ("auto", "data")}
    assert "0.weight" in str(diff)
    json.dumps(diff.to_json())
    assert made.diff(made).is_empty
    assert "decide the same" in str(made.diff(made))


def test_equal_blocks_differ_in_one_line():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(wide() for _ in range(6))), torch.ones(64, 256).double()
    plans = [
        ap.plan(model, (x,), cluster=CLUSTER, mesh=mesh, mode="data")
        for mesh in (ap.Mesh(dp=4), MESH)
    ]
    lines = str(compare(*plans)).splitlines()
    assert "  {0..5}.0.add: f64[64@dp, 8192] | f64[64@dp@tp, 8192]" in lines
    saved = str(compare(*map(SavedPlan.of, plans))).splitlines()
    assert "  gelu_{1..5}: f64[64@dp, 8192] | f64[64@dp@tp, 8192]" in saved
    assert len(compare(*plans).values) == 18


def test_every_field_that_decides_stands_in_files_diffs_and_what_ranks_compare(made):
    saved = SavedPlan.of(made)
    name, type_ = next(iter(saved.others.items()))
    steered = replace(made.decisions, ways={("a", "b", 0): ()})
    schedule = make_schedule("gpipe", stages=2, microbatches=2)
    stages = (StageCost("linear", "0", 1.0, 1.0, *[0] * 16),) * 2
    others = {
        "mode": "data",
        "limit": 1e9,
        "microbatch_count": 2,
        "typed": TypedDecisions.of(steered, made.types),
        "cluster": replace(CLUSTER, network=Link(1e-6, 2e9)),
        "precision": ap.Precision(loss_scale="dynamic"),
        "pipelining": Pipelining("pp", ap.Mesh(pp=2), schedule, stages),
        "states": ap.States(buffer_bytes=16),
        "others": {**saved.others, name: replace(type_, dtype=torch.float16)},
        "dynamic": DynamicShapes((), {"batch": Range(1, 8)}),
        "strict": True,
        "fingerprint": replace(saved.fingerprint, torch="1.0"),
        "saved_results": ("mm",),
    }
    assert others.keys() == {one.name for one in deciding()}
    stored = saved.to_json()
    for one in deciding():
        other = replace(saved, **{one.name: others[one.name]})
        diff = made.diff(other)
        assert not diff.is_empty, one.name
        json.dumps(diff.to_json())
        assert "decide the same" not in str(diff)
        assert one.metadata.get("key", one.name) in stored
        if one.name in ("cluster", "limit"):  # each rank may know its own
            assert require_equal_plan(made, other) is made
            continue
        with pytest.raises(ap.InvalidInput, match="the plan of every rank is that of rank 0"):
            require_equal_plan(made, other)
    assert require_equal_plan(made, SavedPlan.from_json(stored)) is made
    scaled = (replace(saved, precision=one) for one in (ap.Precision(), others["precision"]))
    assert list(compare(*scaled).settings) == ["precision"]


# save and load


def test_a_plan_survives_its_file(made, tmp_path):
    path, again = tmp_path / "plan.json", tmp_path / "again.json"
    made.save(path)
    loaded = ap.Plan.load(path)
    assert loaded.layouts == made.layouts
    assert loaded.search == made.search
    assert "0.weight" in str(loaded)
    assert loaded.diff(made).is_empty
    attached = loaded.attach(wide(), (WIDE_INPUT,))
    assert attached.decisions == made.decisions
    assert attached.cost == made.cost
    assert attached.memory == made.memory
    attached.save(again)
    assert path.read_text() == again.read_text()
    with patch.object(SavedPlan, "to_json", side_effect=AssertionError):  # made once
        made.save(again)
    assert path.read_bytes() == again.read_bytes()


def test_a_plan_is_pickled_as_its_file(made):
    loaded = pickle.loads(pickle.dumps(made))
    assert isinstance(loaded, SavedPlan)
    assert loaded.to_bytes() == made.file
    assert not hasattr(loaded, "cost")
    for name in ("cost", "graph", "report", "movements"):
        with pytest.raises(ap.InvalidInput, match="computed for the model") as error:
            getattr(loaded, name)
        assert "attach it" in str(error.value)
    with pytest.raises(AttributeError, match="a plan has no 'costs'"):
        getattr(loaded, "costs".lower())
    assert pickle.loads(pickle.dumps(loaded)).to_bytes() == made.file
    assert copy.deepcopy(made) is copy.copy(made) is made
    assert loaded.attach(wide(), (WIDE_INPUT,)).cost == made.cost


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "auto"},
        {"mode": "auto", "microbatches": 2},
        {"mode": "propagate", "mesh": ap.Mesh(pp=2, tp=2), "microbatches": 2, "schedule": "1f1b"},
        {"mesh": ap.Mesh(pp=2, dp=2), "mode": "auto"},
    ],
    ids=["auto", "microbatches", "pipeline", "weighed"],
)
def test_a_loaded_plan_trains_as_one_device_does(options, tmp_path):
    case = gpt(batch=4)
    plan = ap.plan(case.model, case.args, case.kwargs, **{"mesh": MESH, **options})
    plan.save(tmp_path / "plan.json")
    fresh = case.fresh()
    module = ap.parallelize(
        fresh.model, fresh.args, fresh.kwargs, plan=ap.Plan.load(tmp_path / "plan.json")
    )
    assert module.plan.microbatches == plan.microbatches
    assert_equal(parallel_outcome(module, fresh), single_outcome(case.fresh()))


def test_a_plan_made_on_the_meta_device_runs_the_real_model():
    with torch.device("meta"):
        meta = wide()
    plan = ap.plan(meta, (WIDE_INPUT.to("meta"),), cluster=CLUSTER, mesh=MESH, mode="auto")
    saved = SavedPlan.from_json(json.loads(json.dumps(SavedPlan.of(plan).to_json())))
    module = ap.parallelize(wide(), (WIDE_INPUT,), plan=saved)
    torch.testing.assert_close(module(WIDE_INPUT), wide()(WIDE_INPUT))


def test_what_needs_the_model_says_so(made):
    saved = SavedPlan.of(made)
    for ask in (
        lambda: saved.cost,
        lambda: saved.memory,
        lambda: saved.explain("0"),
        lambda: saved.movements(),
    ):
        with pytest.raises(ap.InvalidInput, match="attach it"):
            ask()


@pytest.mark.parametrize(
    ("model", "inputs", "named"),
    [
        (lambda: nn.Sequential(nn.Linear(256, 8)).double(), WIDE_INPUT, "2.weight"),
        (wide, WIDE_INPUT[:2], r"input .*f64\[2, 256\], not f64\[4, 256\]"),
        (lambda: wide().float(), WIDE_INPUT.float(), r"f32\[4, 256\], not f64\[4, 256\]"),
        (
            lambda: nn.Sequential(wide()[0], nn.ReLU(), wide()[2]),
            WIDE_INPUT,
            r"relu\(",
        ),
    ],
    ids=["model", "shape", "dtype", "operator"],
)
def test_another_model_is_refused_by_name(made, model, inputs, named):
    with pytest.raises(ap.InvalidInput, match=named):
        made.attach(model(), (inputs,))


def test_another_torch_is_refused_by_name(made):
    data = SavedPlan.of(made).to_json()
    data["model"]["torch"] = "2.0"
    with pytest.raises(ap.InvalidInput, match=r"torch 2\.\d+, not 2\.0"):
        SavedPlan.from_json(data).attach(wide(), (WIDE_INPUT,))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda data: data.update(format="recipe"), "holds something else"),
        (lambda data: data.update(version=99), "of version 99"),
        (lambda data: data.pop("cluster"), "needs the key 'cluster'"),
        (lambda data: data["types"].update({"0.weight": "f64[8192@zz, 256]"}), "'zz'"),
        (lambda data: data["types"].update({"0.weight": "f64[8192@]"}), "size@axis|zz|axis"),
        (lambda data: data["decisions"].update(strategies=3), "plan.json"),
    ],
    ids=["format", "version", "missing", "axis", "type", "kind"],
)
def test_malformed_files_are_refused(made, tmp_path, change, named):
    data = SavedPlan.of(made).to_json()
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ap.InvalidInput, match=named):
        ap.Plan.load(path)


def test_files_that_are_no_plans(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(ap.InvalidInput, match="No such file"):
        ap.Plan.load(path)
    path.write_text("{")
    with pytest.raises(ap.InvalidInput, match="no JSON"):
        ap.Plan.load(path)
    path.write_text("[1]")
    with pytest.raises(ap.InvalidInput, match="something else"):
        ap.Plan.load(path)


def test_strategies_that_the_rules_do_not_allow_are_refused(made):
    data = SavedPlan.of(made).to_json()
    name = next(n for n in data["decisions"]["strategies"] if n.startswith("linear"))
    data["decisions"]["strategies"][name]["cuts"] = {"nothing": ["tp"]}
    with pytest.raises(ap.InvalidInput, match="nothing"):
        SavedPlan.from_json(data).attach(wide(), (WIDE_INPUT,))


def test_annotations_are_part_of_what_a_plan_is_for():
    def annotated(dims) -> nn.Module:
        model = wide()
        ap.shard(model[0], (dims,), params={"weight": (None, "tp")})
        return model

    plan = ap.plan(annotated((None, "tp")), (WIDE_INPUT,), cluster=CLUSTER, mesh=MESH, mode="auto")
    saved = SavedPlan.from_json(SavedPlan.of(plan).to_json())
    again = saved.attach(annotated((None, "tp")), (WIDE_INPUT,))
    assert again.explain("0").bound == plan.explain("0").bound
    assert again.explain("0.weight").bound == plan.explain("0.weight").bound
    for model in (wide(), annotated(("dp", "tp"))):
        with pytest.raises(ap.InvalidInput, match="annotate"):
            saved.attach(model, (WIDE_INPUT,))


# limits, conflicts, interrupts and fallbacks


def test_annotations_that_contradict_are_both_named():
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))
            self.product = ap.shard(torch.matmul, ((None, "tp"), ("dp", None)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.product(x, self.weight)

    with pytest.raises(ap.InvalidInput, match="contradict") as error:
        ap.plan(Product(), (torch.ones(8, 8),), cluster=CLUSTER, mesh=MESH, mode="auto")
    assert "'tp' for input 0" in str(error.value)
    assert "'dp' for input 1" in str(error.value)


def test_a_limit_that_nothing_meets_says_what_would_help():
    case = mlp()
    options = {"cluster": CLUSTER, "mesh": MESH, "mode": "auto"}
    with pytest.raises(ap.InvalidInput) as error:
        ap.plan(case.model, case.args, memory=1000, **options)
    assert "the least that was found takes" in str(error.value)
    assert "more devices could hold these and activations" in str(error.value)
    of_parts = SmallestFootprint(str(MESH), MESH.size, memory=100.0, states=40.0, microbatches=2)
    assert f" {math.ceil(MESH.size * 100 / 30)} or more" in of_parts.remedy(30.0)
    assert "microbatches=6 " in of_parts.remedy(60.0)
    below = replace(of_parts, is_bound=True)
    assert "at least 100 bytes are needed" in below.description(60.0)
    assert "100" not in below.description(200.0) + below.remedy(200.0)
    for pipeline in ("auto", 2):
        options = {"cluster": PAIR, "pipeline": pipeline, "memory": 1000}
        with pytest.raises(ap.InvalidInput) as error:
            ap.plan(case.model, case.args, **options)
        assert error.value.rule == "a plan fits into the memory of every device"
        assert "the least that was found takes" in str(error.value)
        assert "more devices could hold these and activations" in str(error.value)


@pytest.mark.parametrize("mode", ["data", "auto"])
def test_what_recomputation_leaves_is_named_where_nothing_fits(mode):
    case = mlp()
    options = {"cluster": CLUSTER, "mesh": MESH, "mode": mode, "memory": 40_000, "states": "whole"}
    options["microbatches"] = 1
    with pytest.raises(ap.InvalidInput) as error:
        ap.plan(case.model, tuple(arg.repeat(512, 1) for arg in case.args), **options)
    assert error.value.rule == "a plan fits into the memory of every device"
    assert "recomputed" in error.value.got
    assert 'states="auto" may make room' in error.value.remedy


def test_an_interrupt_between_questions_keeps_the_best_so_far():
    def interrupt(phase: str, detail: str) -> None:
        if phase == "plan" and "best so far" in detail:
            raise KeyboardInterrupt

    options = {"cluster": CLUSTER, "mode": "auto", "microbatches": 1}
    plan = ap.plan(wide(), (WIDE_INPUT,), progress=interrupt, **options)
    assert plan.search.interrupted
    assert len(plan.alternatives) == 1
    least = ap.plan(wide(), (WIDE_INPUT,), **options).seconds
    assert 0.0 < plan.search.bound <= least  # what is left takes that at least
    assert "ended early: what was not weighed may be better" in " ".join(str(plan).split())


def test_an_interrupt_while_a_mesh_is_solved_keeps_the_best_so_far():
    options = {"cluster": CLUSTER, "mode": "auto", "pipeline": None, "microbatches": 1}
    solved: list[str] = []

    def interrupt(phase: str, detail: str) -> None:
        if phase == "mesh" and "best so far" in detail:
            solved.append(detail)
            raise KeyboardInterrupt

    plan = ap.plan(wide(), (WIDE_INPUT,), progress=interrupt, **options)
    assert plan.search.interrupted
    assert len(solved) == 1
    assert 0.0 < plan.search.bound <= plan.seconds


def test_an_interrupt_while_nothing_fits_yet_refuses(monkeypatch):
    case = gpt(layers=1)
    monkeypatch.setattr(Layouts, "_graphs", lambda *_: SearchCache())

    def interrupt(phase: str, detail: str) -> None:
        if "layouts in" in detail:  # the next question, as the first one found nothing
            raise KeyboardInterrupt

    options = {"cluster": CLUSTER, "mode": "auto", "pipeline": None, "states": "whole"}
    options |= {"microbatches": 1, "recompute": None}
    limit = ap.plan(case.model, case.args, **options).memory.peak * 0.7
    with pytest.raises(ap.ExecutionError, match="before the first one was found"):
        ap.plan(case.model, case.args, memory=limit, progress=interrupt, **options)


def test_the_bound_holds_for_every_mesh_that_was_weighed():
    case = mlp()
    plan = ap.plan(case.model, case.args, cluster=CLUSTER, mode="auto", pipeline=None)
    priced = [c.seconds for c in plan.search.considered if c.seconds is not None]
    assert len(priced) > 1
    assert plan.search.bound <= min(priced)
    assert plan.search.gap == pytest.approx(1 - plan.search.bound / plan.search.objective)


@pytest.mark.parametrize("words", ["1 of 1", "pricing operators", "layouts"])
def test_an_interrupt_before_the_first_plan_is_a_clean_error(words):
    def interrupt(phase: str, detail: str) -> None:
        if phase == "mesh" and words in detail:
            raise KeyboardInterrupt

    with pytest.raises(ap.ExecutionError, match="before the first one was found"):
        ap.plan(wide(), (WIDE_INPUT,), cluster=CLUSTER, mesh=MESH, mode="auto", progress=interrupt)


def test_progress_is_silent_told_or_printed(capsys):
    phases = []
    options = {"cluster": CLUSTER, "mesh": MESH, "mode": "auto"}
    ap.plan(wide(), (WIDE_INPUT,), progress=lambda p, d: phases.append(p), **options)
    assert set(phases) == {"capture", "plan", "mesh"}
    for progress in (None, False):
        ap.plan(wide(), (WIDE_INPUT,), progress=progress, **options)
        assert capsys.readouterr().err == ""
    ap.plan(wide(), (WIDE_INPUT,), progress=True, **options)
    assert "capture: Sequential\n" in capsys.readouterr().err
    with pytest.raises(ap.InvalidInput, match="progress is"):
        ap.plan(wide(), (WIDE_INPUT,), progress="yes", **options)


def test_progress_says_what_is_looked_at_and_the_best_so_far():
    told = []
    case = mlp()
    about = {"cluster": CLUSTER, "progress": lambda *words: told.append(": ".join(words))}
    plan = ap.plan(case.model, case.args, **about)
    # Under a limit, too.
    ap.plan(case.model, case.args, **about, memory=0.9 * plan.memory.peak)
    asked = re.compile(
        r"plan: Mesh\([^)]*\), (no pipeline|[0-9]+ stages, [^;]*), [0-9]+ micro-batch(es)?"
    )
    assert all(asked.match(line) for line in told if line.startswith("plan: "))
    best = f"best so far {seconds_text(plan.alternatives[0].seconds)}"
    assert any(line.startswith("plan: ") and line.endswith(best) for line in told)
    meshes = [line for line in told if line.startswith("mesh: 1 of ")]
    assert meshes
    jargon = re.compile("fold|prune|eliminat|multiplier|CP-SAT|branch|gap|strateg|cost graph")
    assert not [line for line in told if jargon.search(line)]


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "mesh: 1 of 3: Mesh(x=8); 2 stages, 4 micro-batches; best so far 7.45 ms"),
        (60, "mesh: 1 of 3: Mesh(x=8); best so far 7.45 ms"),
        (36, "mesh: 1 of 3: …; best so far 7.45 ms"),
        (20, "mesh: 1 of 3: Mesh(…"),
        (1, "…"),
    ],
)
def test_progress_stays_on_one_line_of_a_terminal(width, line):
    told = "mesh: 1 of 3: Mesh(x=8); 2 stages, 4 micro-batches; best so far 7.45 ms"
    assert fit_line(told, width) == line
    assert fit_line("capture: Model", max(width, 14)) == "capture: Model"


class Sorted(nn.Module):
    """Uses an operator that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return torch.linalg.tensorinv(h, ind=1).mean()


@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_what_runs_replicated_is_listed_with_its_cost():
    plan = ap.plan(Sorted(), (torch.ones(16, 16),), cluster=CLUSTER, mesh=MESH, mode="auto")
    (fallback,) = plan.fallbacks
    assert fallback.cost > 0
    assert "replicated for want of a rule: 1" in str(plan)
    assert "no rule" in plan.explain(fallback.node).chosen.strategy
    assert plan.to_json()["fallbacks"][0]["cost"] == fallback.cost


def test_without_a_mesh_data_is_cut_over_all_devices_and_nothing_is_spread() -> None:
    case, cluster = mlp(batch=8), ap.Cluster.preset("dgx-a100")
    options = {"args": case.args, "kwargs": case.kwargs, "cluster": cluster}
    assert ap.plan(case.model, mode="data", **options).mesh == ap.Mesh(dp=8)
    with pytest.raises(ap.InvalidInput, match="over a mesh that is given"):
        ap.plan(case.model, mode="propagate", **options)


def test_axes_along_which_all_ranks_do_the_same_are_told() -> None:
    """Launches take longer than the work of such a model: more devices are of no use."""
    case, cluster = mlp(batch=16), ap.Cluster.preset("dgx-v100", nodes=2)
    plan = ap.plan(case.model, case.args, case.kwargs, cluster=cluster, pipeline=None)
    assert "do the same: 1 device would do as well" in " ".join(str(plan).split())
    cut = ap.plan(case.model, case.args, case.kwargs, cluster=cluster, mode="data")
    assert "do the same" not in str(cut)
