"""Patience: a choice ends with its seconds, and says what it left."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

import autopar as ap
from autopar.candidates.patience import Patience
from autopar.cluster import Device, Link, Node
from autopar.errors import Interrupted, InvalidInput
from autopar.options import PlanOptions
from autopar.planning import make_plans
from tests.models import Case, gpt, mlp
from tests.parity import assert_equal, parallel_outcome, single_outcome

NODE = ap.Cluster.preset("dgx-h100").nodes[0]
CLUSTER = replace(ap.Cluster.preset("dgx-h100"), nodes=(replace(NODE, devices=4),))
LINK = Link(1e-7, 1e9)
SLOW = Device("slow", {"f32": 1e9, "f64": 1e9}, 1e9, 4e9, overhead=0.0, efficiency=1.0)
FAST = replace(SLOW, name="fast", flops={"f32": 3e9, "f64": 3e9}, bandwidth=12e9)
AT_ONCE = 1e-9  # seconds: the first way is taken
CASES: dict[str, Callable[[], Case]] = {
    "mlp": cache(lambda: mlp(layers=4)),
    "gpt": cache(lambda: gpt(layers=2, batch=8)),
}


def plan(case: Case, **options: object) -> ap.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ap.plan(case.model, case.args, case.kwargs, **{"cluster": CLUSTER, **options})


def told_plan(case: Case, **options: object) -> tuple[ap.Plan, float]:
    """What is taken at once, and how much faster the rest is said to be at most."""
    options = {"cluster": CLUSTER, "seconds": AT_ONCE, **options}
    with pytest.warns(UserWarning, match="ended with its") as told:
        made = ap.plan(case.model, case.args, case.kwargs, **options)
    said = re.search(r"by <?([0-9.]+)% at most", str(told[0].message))
    return made, 1.0 if said is None else (float(said[1]) + 0.5) / 100


PARTS = [("mlp", None), ("mlp", 0.5), ("gpt", None), ("gpt", 0.5)]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_what_is_taken_at_once_fits_and_no_better_one_is_below_its_bound(name, part) -> None:
    case = CASES[name]()
    whole = plan(case, seconds=None)
    memory = None if part is None else part * whole.memory.peak
    try:
        best = plan(case, seconds=None, memory=memory)
    except InvalidInput:
        with pytest.raises(InvalidInput, match="fits into the memory"):
            plan(case, seconds=AT_ONCE, memory=memory)
        return
    made, told = told_plan(case, memory=memory)
    assert not best.search.interrupted
    assert made.search.interrupted
    assert made.memory.peak <= (memory or CLUSTER.device.memory)
    assert made.search.bound <= best.seconds <= made.seconds
    assert 1 - best.seconds / made.seconds <= told
    assert len(made.alternatives) < len(best.alternatives)


@pytest.mark.parametrize("options", [{"pipeline": 2}, {"pipeline": 2, "microbatches": 8}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_of_pipelines_too_no_more_is_left_than_is_told(name, options) -> None:
    """The bound has no stage that waits, and the plan has."""
    best = plan(CASES[name](), seconds=None, **options)
    made, told = told_plan(CASES[name](), **options)
    assert made.search.bound <= best.seconds
    assert 1 - best.seconds / made.seconds <= told


def test_what_is_taken_at_once_computes_the_same() -> None:
    case = CASES["gpt"]()
    made = plan(case, seconds=AT_ONCE, cluster=ap.Cluster.preset("dgx-h100"))
    module = ap.parallelize(case.model, plan=made, backend="virtual")
    assert_equal(parallel_outcome(module, case), single_outcome(case))


def test_a_warning_and_the_pages_say_that_it_ended_early() -> None:
    case = CASES["mlp"]()
    with pytest.warns(UserWarning, match="ended with its 1e-09 seconds.*may be faster") as told:
        made = ap.plan(case.model, case.args, cluster=CLUSTER, seconds=AT_ONCE)
    assert [one.filename for one in told] == [__file__]
    assert "ended early: what was not weighed may be better" in " ".join(str(made).split())
    assert "the search ended early" in str(made.explain("stages"))


def test_enough_seconds_are_as_good_as_no_end() -> None:
    case = CASES["gpt"]()
    some, every = plan(case, seconds=600), plan(case, seconds=None)
    assert str(some.decisions) == str(every.decisions)
    assert not some.search.interrupted


@pytest.mark.parametrize("given", [0, -1, "10", True, float("nan"), -(10**400)])
def test_seconds_are_a_number_above_zero(given) -> None:
    case = CASES["mlp"]()
    with pytest.raises(InvalidInput, match="seconds is a number above 0"):
        ap.plan(case.model, case.args, cluster=CLUSTER, seconds=given)
    with pytest.raises(InvalidInput, match="seconds is a number above 0"):
        plan(case).what_if(nodes=4, search=True, seconds=given)


def test_more_than_a_computer_counts_is_no_end() -> None:
    assert not plan(CASES["mlp"](), seconds=10**400).search.interrupted


def test_asking_what_if_keeps_to_seconds_too() -> None:
    made = plan(CASES["mlp"](), seconds=None)
    found = made.what_if(nodes=4, search=True, seconds=AT_ONCE)
    assert "ended early" in found.note
    assert "ended early" not in made.what_if(nodes=4, search=True, seconds=None).note


def test_time_is_left_to_make_the_program_of_what_was_chosen() -> None:
    assert not Patience.begun(20.0, captured=1e6).is_over()  # half of it at most
    assert Patience.begun(None) == Patience.begun(1e13) == Patience.begun(10**400) == Patience()
    assert not Patience.begun(None).is_over()
    short = Patience.begun(1e-9)
    assert short.is_over()
    assert not short.is_late()
    assert Patience(1e-9, until=-1e9).is_late()


UNLIKE = {
    "one and two": (Node(SLOW, 1, LINK), Node(FAST, 2, LINK)),
    "four and eight": (Node(FAST, 4, LINK), Node(SLOW, 8, LINK)),
}


@pytest.mark.parametrize("wanted", [1, 3])
@pytest.mark.parametrize("nodes", UNLIKE)
def test_on_unlike_machines_it_ends_on_all_of_their_parts(nodes, wanted) -> None:
    """Time is over when the first part has a way: no other is begun, and nothing is known of it."""
    case = CASES["mlp"]()
    machines = ap.Cluster(UNLIKE[nodes], Link(1e-6, 1e8), "unlike")
    options = PlanOptions(cluster=machines, seconds=AT_ONCE)
    told, whole = list[str](), list[str]()
    all_told = {"progress": lambda phase, detail: whole.append(phase)}
    best = plan(case, cluster=machines, seconds=None, **all_told)
    options = replace(options, progress=lambda phase, detail: told.append(phase))
    with pytest.warns(UserWarning, match="ended with its"):
        made = make_plans(case.model, case.args, case.kwargs, options, wanted)[0]
    assert made.search.interrupted
    assert made.search.bound <= best.seconds <= made.seconds
    assert told.count("plan") < whole.count("plan")


@pytest.mark.parametrize("after", range(1, 12))
def test_ctrl_c_leaves_a_bound_that_holds_too(after) -> None:
    case, told = CASES["gpt"](), []

    def interrupt(phase: str, detail: str) -> None:
        told.append(phase)
        if len(told) == 5 * after:
            raise KeyboardInterrupt

    try:
        made = plan(case, seconds=None, progress=interrupt)
    except ap.ExecutionError:
        return  # before the first one was found
    assert made.search.interrupted == (len(told) >= 5 * after)
    assert made.search.bound <= plan(case, seconds=None).seconds


def test_ctrl_c_while_layouts_that_fit_are_looked_for_is_told() -> None:
    """After a first one was found; before that there is nothing to return."""
    case, outcomes = CASES["gpt"](), []
    options = {"pipeline": None, "microbatches": 1, "recompute": None, "states": "whole"}
    limit = 0.7 * plan(case, **options).memory.peak
    for after in range(2, 8):
        told = []

        def interrupt(phase: str, detail: str, told=told, after=after) -> None:
            if "layouts that fit" in detail:
                told.append(detail)
                if len(told) == after:
                    raise KeyboardInterrupt

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                options |= {"memory": limit, "progress": interrupt, "cluster": CLUSTER}
                made = ap.plan(case.model, case.args, **options)
            except Interrupted:  # before the first one was found
                outcomes.append("nothing found")
                continue
        is_told = any("was interrupted" in str(one.message) for one in warned)
        outcomes.append("told" if is_told else "finished")
        assert is_told == made.search.interrupted == (len(told) == after)
        assert made.memory.peak <= limit
    assert "told" in outcomes
