"""What a step takes is the same on a program that is short and on the long one it stands for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

import autopar.cost.bucket_prices
from autopar import Cluster, Mesh
from autopar.candidates.candidate import Candidate
from autopar.candidates.unfolded import longer
from autopar.capture import capture
from autopar.capture.folding import fold
from autopar.capture.regions import blocks
from autopar.cluster.cluster_part import PipelineLine
from autopar.cost.footprint import program_memory
from autopar.passes.microbatches import cut_batch
from autopar.passes.stages import Stage, StageCut, cut_stage
from autopar.pipeline.memory.memory_items import MemoryItem
from autopar.pipeline.memory.step_memory import StageMemory
from autopar.recompute import Recompute
from autopar.search.constraints import Constraints
from autopar.search.layout_search import LayoutSearch
from autopar.states import States
from autopar.strategies.node_info import info
from tests import models

LAYERS, MESH = 20, Mesh(x=2, y=2)
CLUSTER, LINE = Cluster.local(8, measure=False), PipelineLine("pp", 2, MESH.size)
MAKERS = {"gpt2": models.gpt2, "llama": models.llama}
RECOMPUTED = {
    "": None,
    "full": Recompute("full"),
    "selective": Recompute("selective"),
    "on the host": Recompute("full", keep="host"),
    "in pieces": Recompute("selective", keep="cut"),
}
WAYS = [
    ("gpt2", "", "whole"),
    ("gpt2", "", "zero1"),
    ("gpt2", "full", "zero2"),
    ("gpt2", "", "zero3"),
    ("gpt2", "selective", "zero3"),
    ("llama", "", "zero2"),
    ("llama", "full", "zero3"),
    ("llama", "selective", "zero1"),
    ("llama", "on the host", "whole"),
    ("llama", "in pieces", "zero3"),
]


class Both(NamedTuple):
    """The short program and the long one, of the same decisions."""

    short: Candidate
    long: Candidate
    times: int


@cache
def laid(model: str) -> Both:
    case = MAKERS[model](layers=LAYERS)
    captured = capture(case.model, case.args, case.kwargs)
    short = fold(captured)
    assert short.is_folded
    small, large = cut_batch(short, 2), cut_batch(captured, 2)
    search = LayoutSearch(small.captured, CLUSTER, lambda mesh: Constraints(), microbatches=2)
    decided = search.run([MESH]).decisions
    about = {"line": LINE}
    return Both(
        Candidate.laid_out(small.captured, CLUSTER, decided, small, **about),
        Candidate.laid_out(
            large.captured,
            CLUSTER,
            longer(decided, short, large.captured, {}),
            large,
            **about,
        ),
        max(info(node).count for node in short.graph.nodes),
    )


@cache
def placed(model: str, recompute: str, states: str, buffer_bytes: int | None = None) -> Both:
    both, how = laid(model), RECOMPUTED[recompute]
    wanted = States.of(states)
    wanted = wanted if buffer_bytes is None else replace(wanted, buffer_bytes=buffer_bytes)
    made = [candidate.placed(wanted) for candidate in both[:2]]
    if how is not None:
        made = [one.recomputed(dict.fromkeys(blocks(one.captured), how)) for one in made]
    return Both(*made, both.times)


def assert_same(found: StageMemory, wanted: StageMemory) -> None:
    for part in MemoryItem:
        assert found.by_item[part] == pytest.approx(wanted.by_item[part], rel=1e-9), part
    assert found.host == pytest.approx(wanted.host, rel=1e-9)
    assert found.groups == wanted.groups
    for names, others in (found.learned, wanted.learned), (found.at_once, wanted.at_once):
        sizes = sum(found.learned[name] for name in names)
        assert sizes == pytest.approx(sum(wanted.learned[name] for name in others), rel=1e-9)
    assert np.any(found.sizes)


def assert_as_large(found: list[tuple[str, float]], wanted: list[tuple[str, float]]) -> None:
    for (kind, size), (other, expected) in zip(found, wanted, strict=True):
        assert (kind, size) == (other, pytest.approx(expected, rel=1e-9))


def in_step(candidate: Candidate) -> StageMemory:
    found = candidate.program_memory
    assert found is not None
    return found


def held(candidate: Candidate) -> list[tuple[str, float]]:
    found = program_memory(candidate.rewritten, MESH, candidate.states.buffer_bytes).to_json()
    return [*found.pop("at_peak").items(), *found.items()]


@pytest.mark.parametrize(("model", "recompute", "states"), WAYS)
def test_programs_take_the_same(model: str, recompute: str, states: str) -> None:
    both = placed(model, recompute, states)
    assert_same(in_step(both.short), in_step(both.long))
    assert_as_large(held(both.short), held(both.long))


@pytest.mark.parametrize("states", ["whole", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("buffer_bytes", [10_000, 60_000])
def test_buckets_and_groups_of_any_size_are_the_same(
    monkeypatch: pytest.MonkeyPatch, states: str, buffer_bytes: int
) -> None:
    monkeypatch.setattr(autopar.cost.bucket_prices, "MIN_SHARDED_BYTES", 20_000)
    both = placed("gpt2", "", states, buffer_bytes)
    assert_same(in_step(both.short), in_step(both.long))
    assert_as_large(held(both.short), held(both.long))


def between(candidate: Candidate, start: int, end: int, counts: tuple[int, ...] = ()) -> Stage:
    """The blocks from one to another, the first with what comes before them, the last with what
    comes after; a block may stand for another number of them."""
    flow = candidate.flow

    def place(block: int) -> int:
        modules = [f".{info(node).module}." for node in flow.activations]
        return next(at for at, module in enumerate(modules) if f".{block}." in module)

    points = [0, *(place(block) for block in (start, end) if 0 < block < LAYERS)]
    ends, places = (*points, len(flow.activations)), (tuple(range(len(points))),)
    return cut_stage(StageCut(flow, ends, places, counts=counts), 1 if start else 0)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("model", "recompute", "states"), WAYS[1::2])
def test_stages_take_the_same(model: str, recompute: str, states: str, is_split: bool) -> None:
    short, long, times = placed(model, recompute, states)
    options = {"travel": short.travel, "is_split": is_split}
    # Of the short program, from where to where; of the long one, with how many blocks less.
    for start, end, less in (1, LAYERS - 2, 9), (0, LAYERS - 1, 8), (2, LAYERS, 11):
        ends = (start, end - less) if end < LAYERS else (start + less, end)
        stage = between(short, start, end, (times - less,))
        found = StageMemory.of_stage(stage, MESH, **options)
        assert_same(found, StageMemory.of_stage(between(long, *ends), MESH, **options))
