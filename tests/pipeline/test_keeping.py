"""What ranks keep is what the executor keeps, and plans count on it, recomputing or not."""

from __future__ import annotations

import pytest

import autopar as ap
from autopar.pipeline.keeping import course, moments
from autopar.pipeline.worker import Worker
from tests import models
from tests.pipeline.models import share_captures, shared  # noqa: F401

RANKS = 4


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("interleaved", {"chunks": 2}),
        ("zb-h1", {}),
        ("zb-v", {}),
        ("chimera", {"scale": "halving"}),
        ("dualpipe", {}),
    ],
)
def test_the_executor_keeps_what_is_counted(monkeypatch, schedule, options, recompute) -> None:
    case = shared("gpt2", batch=32)
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
    seen: list[list[dict[int, tuple[int, int]]]] = [[] for _ in range(RANKS)]

    def look(worker: Worker) -> None:
        (here,) = (key for key, value in workers.items() if value is worker)
        found = {stage: [0, 0] for _, stage in made.held_by(made.rank_of(*here))}
        for pipe, stage in made.held_by(made.rank_of(*here)):
            for kept in workers[pipe, stage].kept.values():
                size = sum(value[0].nbytes for value in kept.received)
                assert size == pipelining.stages[stage].receives
                found[stage][0] += bool(kept.roots or kept.gradients)
                found[stage][1] += recompute
        seen[made.rank_of(*here)].append({stage: tuple(both) for stage, both in found.items()})

    def watched(name: str) -> None:
        original = getattr(Worker, name)

        def run(worker: Worker, *args: object) -> object:
            result = original(worker, *args)
            look(worker)
            return result

        monkeypatch.setattr(Worker, name, run)

    watched("forward")
    if recompute:
        watched("_run")
    module.step(*case.args, **case.kwargs)
    for rank in range(RANKS):
        assert seen[rank] == list(course(made, rank, recompute))
    each = sum(stage.seconds for stage in pipelining.stages)
    assert sum(module.plan.timeline.busy) == pytest.approx(made.slices * each)


def test_moments_that_another_contains_are_left_out() -> None:
    made = ap.pipeline.schedule("zb-h1", stages=2, microbatches=4)
    assert moments(made, recompute=False) == [{0: (2, 0)}, {1: (2, 0)}]
    found = moments(made, recompute=True)
    assert all(len(moment) == 1 for moment in found)
    assert {0: (1, 2)} in found or {0: (2, 2)} in found


def planned(**options: object) -> ap.Plan:
    case = models.gpt(layers=4)
    options = {"mesh": ap.Mesh(pp=2), "mode": "propagate", "microbatches": 8, **options}
    return ap.plan(case.model, case.args, case.kwargs, **options)


@pytest.mark.parametrize(("schedule", "spares"), [("1f1b", True), ("zb-h1", False)])
def test_recomputation_takes_its_forward_and_spares_its_memory(tmp_path, schedule, spares) -> None:
    plain, again = (planned(schedule=schedule, recompute=given) for given in (False, True))
    stages, repeated = plain.pipelining.stages, again.pipelining.stages
    assert [stage.starts for stage in stages] == [stage.starts for stage in repeated]
    for one, other in zip(stages, repeated):
        assert other.backward == pytest.approx(one.backward + one.forward)
    extra = [8 * stage.forward for stage in stages]
    busy = [one + more for one, more in zip(plain.timeline.busy, extra)]
    assert again.timeline.busy == pytest.approx(busy)
    assert again.cost.seconds > plain.cost.seconds
    assert again.cost.backward == pytest.approx(plain.cost.backward + plain.cost.forward)
    # From I to W, all that was made again is kept.
    assert (again.memory.activations < plain.memory.activations) == spares
    again.save(tmp_path / "plan.json")
    case = models.gpt(layers=4)
    loaded = ap.Plan.load(tmp_path / "plan.json").attach(case.model, case.args, case.kwargs)
    assert loaded.cost == again.cost
    assert loaded.memory == again.memory


def test_a_limit_that_only_recomputation_meets() -> None:
    limit = planned(schedule="gpipe", recompute=True).memory.peak
    assert planned(schedule="gpipe", recompute=True, memory=limit).memory.peak <= limit
    with pytest.raises(ap.InvalidInput, match="cut so that the stages fit"):
        planned(schedule="gpipe", memory=limit)
