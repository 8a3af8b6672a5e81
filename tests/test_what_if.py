"""Decisions of a plan cost elsewhere what the same decisions, made there by hand, cost."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autopar as ap
from autopar.candidates.candidate import Candidate
from autopar.candidates.moved import idle_axes
from autopar.capture import capture
from autopar.capture.sizes import Sizes, sizes_of
from autopar.cluster.machines import Link, Node
from autopar.errors import InvalidInput
from autopar.plans.plan import Plan, SavedPlan
from autopar.plans.situation import Situation, WhatIf
from autopar.text.units import read_rate
from tests import models
from tests.pipeline.models import share_captures  # noqa: F401
from tests.test_mixed_machines import FAST, SLOWEST, cluster

CASES: dict[str, dict[str, Any]] = {
    "tensor": {"mode": "propagate", "mesh": ap.Mesh(dp=2, tp=2), "states": "zero2"},
    "parts": {"mode": "data", "mesh": ap.Mesh(dp=4), "states": "zero3", "microbatches": 2}
    | {"recompute": "full", "precision": ap.Precision(compute=torch.bfloat16)},
    "pipeline": {"mode": "propagate", "mesh": ap.Mesh(pp=2, dp=2), "schedule": "chimera"}
    | {"microbatches": 4},
}


def machines(nodes: int = 2, bandwidth: float = 10e9, inside: float = 300e9) -> ap.Cluster:
    device = ap.Cluster.preset("dgx-a100").device
    node = Node(device, 2, Link(1e-6, inside))
    return ap.Cluster((node,) * nodes, Link(1e-5, bandwidth), "small")


class Squared(nn.Sequential):
    """A chain of linears."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(1024, 1024) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@lru_cache
def plain() -> models.Case:
    return models.gpt(batch=16, sequence=16, layers=2, tied=False)


@lru_cache
def cut() -> models.Case:
    """With linears that are cut over `tp`."""
    made = models.gpt(batch=16, sequence=16, layers=2, tied=False)
    for block in made.model.layers:
        for linear in (block.attention.q, block.attention.k, block.attention.v, block.up):
            ap.shard(linear, params={"weight": ("tp", None)})
        ap.shard(block.down, params={"weight": (None, "tp")})
    return made


def planned(name: str, cluster: ap.Cluster, rows: int = 16, length: int = 16) -> Plan:
    about = CASES[name]
    case = cut() if "tp" in about["mesh"] else plain()
    values = [value.repeat(2, 1)[:rows, :length] for value in case.args]
    return ap.plan(case.model, tuple(values), cluster=cluster, progress=False, **about)


@lru_cache
def made(name: str) -> Plan:
    return planned(name, machines())


def assert_priced_as(found: Situation | None, plan: Candidate) -> None:
    """To the last part of time and memory, but for the order of sums."""
    assert found is not None
    wanted = plan.alternative(found.limit)
    assert found.way == replace(wanted, seconds=found.way.seconds)
    assert found.way.seconds == pytest.approx(wanted.seconds, rel=1e-12)
    assert asdict(found.way.held) == asdict(wanted.held)
    for part, seconds in wanted.cost.parts.items():
        assert found.way.cost.parts[part] == pytest.approx(seconds, rel=1e-9, abs=1e-15), part


@pytest.mark.parametrize("name", CASES)
def test_an_unchanged_situation_costs_what_the_plan_costs(name) -> None:
    plan = made(name)
    same = {"nodes": 2, "bandwidth": "1x", "inside": 300e9, "batch": 16, "sequence": "1x"}
    what = plan.what_if(**same)
    assert_priced_as(what.then, plan)
    assert_priced_as(what.now, plan)


@pytest.mark.parametrize("name", CASES)
def test_other_links_cost_what_the_same_decisions_cost_on_them(name) -> None:
    plan = made(name)
    example = plan.original.example
    by_hand = replace(SavedPlan.of(plan), cluster=machines(bandwidth=40e9, inside=150e9))
    attached = by_hand.attach(example.model, example.args, example.kwargs)
    what = plan.what_if(bandwidth=40e9, inside="0.5x")
    assert_priced_as(what.then, attached)
    assert what.then.way.seconds != plan.cost.seconds


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_other_nodes_cost_what_a_plan_for_them_costs(name, nodes, monkeypatch) -> None:
    mesh, plan = CASES[name]["mesh"], made(name)
    grown = ap.Mesh(**{**mesh.sizes, "dp": mesh["dp"] * nodes // 2})
    # With two ranks for `tp` alone, no replicas are left that states are cut over.
    states = {"states": "whole"} if (name, nodes) == ("tensor", 1) else {}
    monkeypatch.setitem(CASES, name, {**CASES[name], "mesh": grown, **states})
    for batch in {16, 4 * nodes}:  # the global batch stays, or is another
        what = plan.what_if(nodes=nodes, batch=batch)
        assert_priced_as(what.then, planned(name, machines(nodes), rows=batch))
        assert f"dp, which cuts the batch, goes from {mesh['dp']} to {grown['dp']}" in str(what)


@pytest.mark.parametrize("name", CASES)
def test_other_sizes_cost_what_a_plan_for_them_costs(name) -> None:
    for sizes, rows, length in (({"sequence": "0.5x"}, 16, 8), ({"batch": 32}, 32, 16)):
        what = made(name).what_if(**sizes)
        assert_priced_as(what.then, planned(name, machines(), rows, length))
        tokens = rows * length / what.then.way.seconds
        assert what.then.rate == pytest.approx(tokens)


def test_a_search_finds_what_a_plan_for_it_finds() -> None:
    mlp = models.mlp(batch=1 << 16)
    plan = ap.plan(mlp.model, mlp.args, cluster=machines(1), progress=False)
    what = plan.what_if(nodes=2, bandwidth=1e9, search=True)
    there = ap.plan(mlp.model, mlp.args, cluster=machines(2, 1e9), progress=False)
    assert_priced_as(what.searched, there)
    assert what.searched.unit == "samples"
    assert what.then is not None
    assert what.searched.way.seconds <= what.then.way.seconds * (1 + 1e-9)


def test_where_decisions_cannot_be_taken_over_a_search_still_answers() -> None:
    small = models.mlp(batch=4)
    plan = ap.plan(small.model, small.args, cluster=machines(), mesh=ap.Mesh(dp=4), mode="data")
    what = plan.what_if(nodes=4, search=True)
    assert what.then is None
    assert "as many elements as pieces" in what.refused
    assert " ".join(what.refused.split()) in " ".join(str(what).split())
    assert what.searched is not None
    assert what.searched.devices == 8
    too_large = replace(plan, limit=1e4).what_if(nodes=1, search=True)
    assert not too_large.then.way.fits
    assert too_large.searched is None
    assert "fit" in too_large.not_found
    assert " ".join(too_large.not_found.split()) in " ".join(str(too_large).split())


def test_it_prints_and_becomes_json() -> None:
    what = made("pipeline").what_if(nodes=4, bandwidth="2x")
    text, data = str(what), json.loads(json.dumps(what.to_json()))
    for words in ("nodes 4, bandwidth 2x", "stays 16", "tokens/s", "chimera, 2 pipes", "bubble"):
        assert words in text
    assert data["then"]["seconds"] == what.then.way.seconds
    assert sum(data["then"]["parts"].values()) == pytest.approx(data["then"]["seconds"])
    assert data["then"]["tokens_per_second"] == what.then.rate
    assert data["searched"] is None
    assert isinstance(what, WhatIf)


def test_numbers_are_said_as_people_write_them() -> None:
    plan = made("tensor")
    written = {"nodes": "4", "bandwidth": "100GB/s", "batch": "2x"}
    for asked, words in (
        (written, "what if: nodes 4, bandwidth 100GB/s, batch 2x"),
        ({"nodes": 4.0, "bandwidth": 100e9, "batch": 32}, "nodes 4, bandwidth 100 GB/s, batch 32"),
    ):
        what = plan.what_if(**asked)
        assert words in str(what)
        then = what.then
        assert (then.nodes, then.bandwidth, then.sizes.batch) == (4, 100e9, 32)


def test_machines_that_a_plan_leaves_unused_are_not_told_of() -> None:
    """Nor are their links: what a step takes does not follow from them."""
    case, some = models.mlp(layers=4, batch=16), cluster((FAST, 4), (SLOWEST, 2))
    plan = ap.plan(case.model, case.args, case.kwargs, cluster=some)
    assert plan.cluster.in_use.nodes == some.nodes[:1]
    found = plan.what_if(inside="0.5x")
    assert (found.now.nodes, found.now.devices) == (1, 4)
    assert found.now.inside == some.nodes[0].link.bandwidth == 2 * found.then.inside
    assert found.then.way.seconds >= found.now.way.seconds
    with pytest.raises(InvalidInput, match="bandwidth is that between nodes"):
        plan.what_if(bandwidth="2x")


def test_what_does_not_fit_is_said() -> None:
    about = {"cluster": machines(), "mesh": ap.Mesh(dp=4), "mode": "data", "memory": 3e6}
    plan = ap.plan(plain().model, plain().args, **about)
    what = plan.what_if(batch="32x")
    assert what.now.way.fits
    assert not what.then.way.fits
    assert str(what).splitlines()[-1].split() == ["fits", "yes", "no"]


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("memory", ["2x", "0.5x", "160GB", 20e9])
def test_the_same_decisions_fit_into_other_memory_or_not(memory, is_own) -> None:
    plan = replace(made("tensor"), limit=None if is_own else 40e9)
    now = plan.cluster.device.usable_memory if is_own else 40e9
    what = plan.what_if(memory=memory)
    times = {"2x": 2 * now, "0.5x": now / 2, "160GB": 160e9, 20e9: 20e9}
    assert what.now.limit == now
    assert what.then.limit == times[memory]
    assert what.then.way == what.now.way
    tight = plan.what_if(memory=what.now.way.memory - 1)
    assert (tight.now.way.fits, tight.then.way.fits) == (True, False)


def test_a_search_keeps_to_other_memory() -> None:
    about = {"cluster": machines(1), "progress": False}
    gpt = plain()
    plan = ap.plan(gpt.model, gpt.args, mesh=ap.Mesh(dp=2), mode="data", **about)
    limit = 0.9 * plan.memory.peak
    what = plan.what_if(memory=limit, search=True)
    assert not what.then.way.fits
    assert what.searched.way.memory <= limit
    assert_priced_as(what.searched, ap.plan(gpt.model, gpt.args, memory=limit, **about))


class Wide(nn.Module):
    """All that it learns is cut, and no axis cuts its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)).square().mean()


class Reading(nn.Module):
    """Reads its first input by some layers, in the order of their results."""

    def __init__(self, *layers: nn.Module, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.layers, self.dtype = nn.Sequential(*layers), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x if self.dtype is None else x.to(self.dtype)).square().mean()


class Shifted(nn.Module):
    """Takes its tokens and its labels from one input."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.table(ids[:, :-1]))
        return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


TOKENS, FLOATS = torch.ones(4, 6, dtype=torch.long), torch.randn(4, 6, 5)


@pytest.mark.parametrize(
    ("model", "x", "sequence"),
    [
        (Reading(nn.Embedding(8, 4), nn.Linear(4, 4)), TOKENS, 6),
        (Shifted(), TOKENS, 6),
        (Reading(nn.Embedding(8, 4), nn.Flatten(1), nn.Linear(24, 4)), TOKENS, None),  # categories
        (Reading(nn.Linear(6, 4), dtype=torch.float32), TOKENS, None),
        (Reading(nn.Linear(6, 4), dtype=torch.float32), TOKENS.bool(), None),
        (Reading(nn.LayerNorm(5), nn.Linear(5, 4)), FLOATS, 6),
        (Reading(nn.Flatten(1), nn.Linear(30, 4)), FLOATS, None),  # pictures
        (Reading(nn.Conv1d(6, 4, 3)), FLOATS, None),  # channels
        (Reading(nn.Linear(6, 4)), FLOATS[..., 0], None),  # features
    ],
)
def test_a_sequence_is_told_from_features(model, x, sequence) -> None:
    captured = capture(model, (x,))
    assert sizes_of(captured) == Sizes(4, sequence)


@lru_cache
def wide() -> Plan:
    model = Wide()
    ap.shard(model.up, params={"weight": ("tp", None)})
    ap.shard(model.down, params={"weight": (None, "tp")})
    about = {"mesh": ap.Mesh(tp=4), "cluster": machines(), "mode": "propagate"}
    return ap.plan(model, (torch.randn(8, 16),), **about)


@pytest.mark.parametrize(
    ("plan", "changes", "words"),
    [
        (lambda: made("tensor"), {}, "is told what is different"),
        (lambda: made("tensor"), {"nodes": 0}, "nodes is a number above 0"),
        (lambda: made("tensor"), {"nodes": "0.3x"}, "whole number"),
        (lambda: made("tensor"), {"nodes": True}, "nodes is a number above 0"),
        (lambda: made("tensor"), {"bandwidth": "fast"}, 'bandwidth="2x"'),
        (lambda: made("tensor"), {"bandwidth": "100 per second"}, 'bandwidth="100GB/s"'),
        (lambda: made("tensor"), {"nodes": "4GB"}, "nodes is a number above 0"),
        (lambda: made("tensor"), {"nodes": 1, "bandwidth": "2x"}, "inside="),
        (lambda: made("tensor"), {"nodes": 32}, "batch='2x'"),
        (lambda: made("pipeline"), {"batch": 10}, "equal parts of the batch"),
        (lambda: made("pipeline"), {"nodes": 3, "batch": "many"}, "batch is a number above 0"),
        (lambda: wide(), {"nodes": 4}, "search=True"),
        (
            lambda: wide(),
            {"sequence": 4},
            r"a sequence: the second dim.*\n.*for f32\[8, 16\], which",
        ),
        (lambda: made("tensor"), {"bandwidth": "400gb/s"}, 'or "400Gb/s", of bits'),
        (lambda: made("tensor"), {"bandwidth": 2.0}, "bandwidth is a number above 1000"),
        (lambda: made("tensor"), {"memory": "40Gb"}, "memory is a number above 1000"),
        (lambda: made("tensor"), {"memory": "lots"}, 'memory="100GB", or memory="2x"'),
        (lambda: made("tensor"), {"memory": "40GB/s"}, "memory is a number above 1000"),
        (lambda: made("tensor"), {"node": 4}, r"takes nodes, .*memory, .*node=4\n.*nodes=\.\.\."),
        (lambda: SavedPlan.of(made("tensor")), {"nodes": 4}, "attach it"),
    ],
)
def test_what_cannot_be_asked_is_refused(plan, changes, words) -> None:
    with pytest.raises(InvalidInput, match="(?s)" + words.replace("(", r"\(")):
        plan().what_if(**changes)


@pytest.mark.parametrize("words", ["400Gb/s", "400 Gbit/s", "400Gbps", "50GB/s", "50GBps", 50e9])
def test_what_is_said_in_bits_is_an_eighth_of_that_in_bytes(words: str | float) -> None:
    assert read_rate(words) == 50e9


def test_fewer_nodes_leave_out_what_all_ranks_do_the_same() -> None:
    """Before they leave out ranks that are of use."""
    with torch.device("meta"):
        model, x = Squared(), torch.empty(2048, 1024)
    node = Node(ap.Cluster.preset("dgx-a100").device, 4, Link(1e-6, 300e9))
    slow = ap.Cluster((node,) * 4, Link(1e-5, 1e7), "slow")
    plan = ap.plan(model, (x,), cluster=slow, mesh=ap.Mesh(x=4, y=4), microbatches=1)
    assert idle_axes(plan) == ["x"]
    what = plan.what_if(nodes=2)
    assert what.then is not None
    assert what.then.way.mesh == ap.Mesh(x=2, y=4)
    assert what.then.way.seconds == pytest.approx(plan.seconds)
    assert "x, along which all ranks do the same, goes from 4 to 2 ranks" in str(what)


def test_arguments_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"explain\(\) takes name\n.*names='head'"):
        made("tensor").explain(names="head")
    with pytest.raises(InvalidInput, match="missing a required argument: 'name'"):
        made("tensor").explain()


class Placed(nn.Module):
    """Tokens in their places, of which it knows sixteen."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.tokens, self.head = kind, nn.Embedding(8, 4), nn.Linear(4, 8)
        self.places = nn.Embedding(16, 4)
        self.register_buffer("turns", torch.randn(16, 4))
        self.register_buffer("mask", torch.ones(1, 16, 16).tril())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, length = self.tokens(ids), ids.shape[1]
        if self.kind == "looked up":
            x = x + self.places(torch.arange(length, device=ids.device))
        elif self.kind == "looked up further on":
            x = x + self.places.weight[torch.arange(2 * length)[None, length - 1 : -1]]
        elif self.kind == "selected":
            x = x + self.places.weight.index_select(0, torch.ones(length).long().cumsum(0) - 1)
        elif self.kind == "the first of them":
            x = x + self.places.weight[:length]
        elif self.kind == "turned":
            x = x * self.turns[:length].cos()
        else:
            x = (x @ x.mT * self.mask[:, :length, :length]) @ x
        return cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("looked up", 16),
        ("looked up further on", 8),
        ("selected", 16),
        ("the first of them", 16),
        ("turned", 16),
        ("masked", 16),
    ],
)
def test_a_sequence_beyond_the_places_that_a_model_knows_is_refused(kind, most) -> None:
    plan = ap.plan(Placed(kind), (TOKENS,), cluster=machines(1), mesh=ap.Mesh(dp=2), mode="data")
    assert plan.what_if(sequence=most).then.sizes.sequence == most
    with pytest.raises(InvalidInput, match=f"a sequence of {most + 1}") as caught:
        plan.what_if(sequence=most + 1)
    assert "test_what_if.py" in caught.value.source
    is_lookup = kind in ("looked up", "looked up further on", "selected")
    if is_lookup:
        assert "row 16 of 16" in str(caught.value)
        assert "self.places" in str(caught.value)


def test_uneven_growth_and_nodes_of_several_kinds_are_refused() -> None:
    plan = made("tensor")
    with pytest.raises(InvalidInput, match="in proportion"):
        plan.with_program(cluster=machines(4)).what_if(nodes=3)
    fast, slow = machines().nodes[0], machines(inside=1e9).nodes[0]
    with pytest.raises(InvalidInput, match="equal ones"):
        plan.with_program(cluster=ap.Cluster((fast, slow), Link(1e-5, 1e9))).what_if(nodes=4)
