"""Room: what is said to have no room, or to take too long in what there is, is in no plan."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

import autopar as ap
from autopar.capture import capture
from autopar.options import PlanOptions, read_request
from autopar.pipeline.schedules import schedule
from autopar.planner.ideal import Ideal
from autopar.planner.ledger import Ledger
from autopar.planner.recomputation import Regions
from autopar.planner.room import Offer, Room, least_seconds, most_held
from tests import large_models
from tests.models import gpt
from tests.toy import EVEN, machines


def test_a_stage_in_turn_holds_what_its_depth_asks_for() -> None:
    """Of 1F1B the first of p ranks holds p micro-batches, the last holds one: however stages share
    what they keep, some rank holds one part of 1 + 1/2 + ... + 1/p."""
    for stages in (2, 4, 8):
        made = schedule("1f1b", stages=stages, microbatches=2 * stages)
        least = 1 / sum(1 / depth for depth in range(1, stages + 1))
        assert most_held(made, False, 0.0) == pytest.approx(least, rel=1e-5)
    deep = schedule("gpipe", stages=4, microbatches=8)
    assert most_held(deep, False, 0.0) == pytest.approx(8 / 4, rel=1e-5)
    assert most_held(deep, False, 4.0) == pytest.approx(8 / 4 + 4 / 4, rel=1e-5)


@pytest.mark.parametrize(("share", "least"), [(0.25, 1), (0.5, 3), (0.8, 3)])
def test_every_way_that_fits_was_said_to_have_room(share: float, least: int, monkeypatch) -> None:
    """And to take no less than it was said to: bounds are asked about each way that was found."""
    case, cluster = gpt(layers=2, batch=8), machines(4, *EVEN)
    memory = share * ap.plan(case.model, case.args, case.kwargs, cluster=cluster).memory.peak
    ideals: list[Ideal] = []
    init, kept = Ideal.__init__, Ledger.add
    checked = []

    def made(self: Ideal, *about) -> None:
        init(self, *about)
        ideals.append(self)

    def add(self: Ledger, figures, candidate, finished) -> None:
        if candidate.fits(memory):
            pipelining, parts = candidate.pipelining, candidate.microbatches
            made = None if pipelining is None else [pipelining.schedule]
            size = 1 if pipelining is None else pipelining.schedule.ranks, parts
            is_hosted = candidate.states.optimizer_device == "host"
            limit = candidate.seconds * (1 + 1e-6)
            assert ideals[-1].may_win(*size, made, limit, is_hosted=is_hosted), str(figures)
            checked.append(size)
        kept(self, figures, candidate, finished)
        self.fastest = math.inf  # all ways are weighed

    monkeypatch.setattr(Ideal, "__init__", made)
    monkeypatch.setattr(Ledger, "add", add)
    monkeypatch.setattr("autopar.planner.choose.Planner._may_win", lambda *_: True)
    monkeypatch.setattr(Ideal, "is_slower", lambda *_, **__: False)
    ap.plan(case.model, case.args, case.kwargs, cluster=cluster, memory=memory)
    assert len(checked) >= least


def test_a_call_with_several_results_runs_again_once() -> None:
    """As that which chooses experts."""
    case = large_models.mixtral(batch=8, sequence=64, layers=2)
    captured = capture(case.model, case.args, case.kwargs)
    request = read_request(PlanOptions(cluster=machines(4, *EVEN), memory=1e6))
    room = Room(captured, request, Regions(captured, request.recompute, []))
    assert 0 < room.least_again(1, 4) <= room.again(4) < room.again(2)


def _least_of_all(offers: tuple[Offer, ...], wanted: float, host: float) -> float:
    """Of every way to treat each region, the seconds of the fastest that spares as much."""
    every = [one for one in offers for _ in range(one.count)]
    least = math.inf
    ways = [
        (c, d) for c, d in product(("kept", "again", "host"), repeat=2) if d != "again" or c == d
    ]
    for chosen in product(ways, repeat=len(every)):
        spared = copied = seconds = 0.0
        for one, (cheap, dear) in zip(every, chosen):
            spared += (cheap != "kept") * one.cheap + (dear != "kept") * one.dear
            copied += (cheap == "host") * one.cheap + (dear == "host") * one.dear
            seconds += {"again": one.some, "host": one.cheap_copied}.get(cheap, 0.0)
            seconds += {"again": one.more, "host": one.dear_copied}.get(dear, 0.0)
        if spared >= wanted and copied <= host:
            least = min(least, seconds)
    return least


def test_what_has_to_run_again_takes_no_less_in_any_way() -> None:
    draw = random.Random(0)
    tight = 0
    for _ in range(120):
        sizes = [draw.choice([1, 1, 2]) for _ in range(draw.choice([1, 2]))]
        offers = tuple(Offer(n, *(draw.uniform(0, 1) for _ in range(6))) for n in sizes)
        most = sum(one.count * (one.cheap + one.dear) for one in offers)
        wanted, host = draw.uniform(0, most), draw.choice([0.0, draw.uniform(0, most)])
        least, bound = _least_of_all(offers, wanted, host), least_seconds(offers, wanted, host)
        assert 0 < bound <= least * (1 + 1e-9)
        tight += bound > 0.5 * least
    assert tight > 60
