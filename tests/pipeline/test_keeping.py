"""What ranks keep is what the executor keeps, and plans count on it, recomputing or not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from torch import Tensor

import autopar as ap
from autopar.pipeline.memory.activation_counts import peak_counts
from autopar.pipeline.running.worker import Worker
from tests import models
from tests.held import HeldByWorkers, predicted_course
from tests.pipeline.models import made_of_weights, share_captures, shared  # noqa: F401

RANKS = 4


# Not GPT-2: its loss copies labels that are a slice of longer ones, which are counted.
CASES = {
    "gpt": lambda: models.gpt(layers=8, batch=16, hidden=16, heads=2, sequence=8, vocabulary=31),
    "mlp": lambda: models.mlp(batch=32, layers=16, hidden=16),
    "residuals": lambda: shared("residuals", batch=16),
    "made of weights": made_of_weights,
}
made_once = cache(lambda name: CASES[name]())
FORMS = [
    ("gpipe", {}),
    ("1f1b", {}),
    ("interleaved", {"chunks": 2}),
    ("zb-h1", {}),
    ("zb-v", {}),
    ("chimera", {"scale": "halving"}),
    ("chimera-zb", {}),
    ("dualpipe", {}),
]
SAMPLED = [
    (name, *FORMS[(2 * number + turn) % len(FORMS)], recompute)
    for number, name in enumerate(CASES)
    for turn, recompute in ((3, False), (4, True), (6, False), (7, True))
]


@pytest.mark.filterwarnings("ignore:batch norm")
@pytest.mark.parametrize(("name", "schedule", "options", "recompute"), SAMPLED)
def test_ranks_hold_what_is_predicted(name, schedule, options, recompute) -> None:
    case = made_once(name)
    module = ap.parallelize(
        case.model,
        case.args,
        case.kwargs,
        mesh=ap.Mesh(pp=RANKS),
        mode="propagate",
        backend="virtual",
        schedule=schedule,
        schedule_options=options,
        microbatches=8,
        recompute=recompute,
    )
    pipelining, workers = module.plan.pipelining, module.backend.workers
    made = pipelining.schedule

    def outside() -> Iterator[Tensor]:
        yield from (*module.parameters(), *module.buffers())
        for stage in module.backend.stages.values():
            for batch in stage.batches.values():
                yield from batch.values()
            for values in stage.graph_run._constants.values():
                yield from values

    held = HeldByWorkers(outside)
    seen: list[list[dict[int, int]]] = [[] for _ in range(RANKS)]

    def look(worker: Worker) -> None:
        (here,) = (key for key, value in workers.items() if value is worker)
        rank, found = made.rank_of(*here), {}
        for pipe, stage in made.local_stages(rank):
            for slice_ in range(made.all_parts):
                really, counted = held.of(workers[pipe, stage], slice_)
                assert really <= counted
                found[stage] = found.get(stage, 0) + counted
        seen[rank].append(found)

    with held.watching(look):
        module.step(*case.args, **case.kwargs)
    for rank in range(RANKS):
        assert seen[rank] == predicted_course(module, rank)
    assert not any(held.of(worker, slice_)[0] for worker in workers.values() for slice_ in range(8))
    each = sum(stage.seconds for stage in pipelining.stages)
    assert sum(module.plan.timeline.busy) == pytest.approx(made.all_parts * each)


def test_moments_that_another_contains_are_left_out() -> None:
    made = ap.pipeline.schedule("zb-h1", stages=2, microbatches=4)
    assert peak_counts(made, recompute=False) == [
        {0: (1, 1, 1, 0, 0)},
        {0: (2, 2, 0, 0, 0)},
        {1: (0, 0, 2, 0, 0)},
        {1: (1, 1, 1, 0, 0)},
    ]
    found = peak_counts(made, recompute=True)
    assert all(len(moment) == 1 for moment in found)
    assert {0: (2, 2, 0, 0, 1)} in found


@cache
def four_layers() -> models.Case:
    return models.gpt(layers=4)


def planned(**options: object) -> ap.Plan:
    case = four_layers()
    options = {"mesh": ap.Mesh(pp=2), "mode": "propagate", "microbatches": 8, **options}
    return ap.plan(case.model, case.args, case.kwargs, **options)


@pytest.mark.parametrize(("schedule", "spares"), [("1f1b", True), ("zb-h1", False)])
def test_recomputation_takes_its_forward_and_spares_its_memory(tmp_path, schedule, spares) -> None:
    plain, again = (planned(schedule=schedule, recompute=given) for given in (None, "full"))
    stages, repeated = plain.pipelining.stages, again.pipelining.stages
    assert [stage.starts for stage in stages] == [stage.starts for stage in repeated]
    for one, other in zip(stages, repeated):
        assert other.backward == pytest.approx(one.backward + other.again)
        assert 0.5 * one.forward < other.again < one.forward
    extra = [8 * stage.again for stage in repeated]
    busy = [one + more for one, more in zip(plain.timeline.busy, extra)]
    assert again.timeline.busy == pytest.approx(busy)
    assert again.cost.seconds > plain.cost.seconds
    # From I to W, what gradients of weights are made of is kept of all that was made again.
    assert (again.memory.peak < 0.97 * plain.memory.peak) == spares
    again.save(tmp_path / "plan.json")
    case = four_layers()
    loaded = ap.Plan.load(tmp_path / "plan.json").attach(case.model, case.args, case.kwargs)
    assert loaded.cost == again.cost
    assert loaded.memory == again.memory


def test_a_limit_that_only_recomputation_meets() -> None:
    limit = planned(schedule="gpipe", recompute="full").memory.peak
    assert planned(schedule="gpipe", recompute="full", memory=limit).memory.peak <= limit
    assert planned(schedule="gpipe", memory=limit).memory.peak <= limit
    with pytest.raises(ap.InvalidInput, match="fits into the memory") as error:
        planned(schedule="gpipe", memory=limit, recompute=None, states="whole")
    assert 'recompute="auto"' in error.value.remedy
