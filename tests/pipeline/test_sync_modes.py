"""Where gradient sums start: as actions of a schedule, in simulation, and on real ranks."""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import autopar as ap
from autopar.errors import InvalidInput
from autopar.pipeline import check, from_csv, from_text, schedule, simulate, to_csv, to_text
from autopar.pipeline.schedule import SUM, Schedule
from autopar.pipeline.simulation.synchronization import MODES
from autopar.pipeline.sums import place_sums, without_sums
from autopar.report.run_charts import measured_gantt
from autopar.report.trace import ACTIONS, MOVEMENTS
from tests.annotations import megatron
from tests.distributed.forked import launch_forked
from tests.models import Case, gpt
from tests.parity import Outcome, assert_equal, parallel_outcome, single_outcome

FORMS = [("chimera", {"sync": mode}) for mode in MODES]
FORMS += [("interleaved-zb", {}), ("interleaved-zb", {"sync": "lazy"})]


def listed(made: Schedule, rank: int) -> list[str]:
    return [str(action) for action in made.orders[rank]]


def test_sums_are_actions_of_each_rank():
    made = schedule("interleaved-zb", stages=2, microbatches=2, sync="eager")
    assert listed(made, 0)[-3:] == ["0I1", "0W1", "0REDUCE_GRAD"]
    assert listed(made, 0).index("2REDUCE_GRAD") == listed(made, 0).index("2W1") + 1
    lazy = schedule("interleaved-zb", stages=2, microbatches=2, sync="lazy")
    assert listed(lazy, 0)[-3:] == ["0W1", "0REDUCE_GRAD", "2REDUCE_GRAD"]
    assert lazy.sum_positions[0] == {0: 11, 2: 13}  # 0W1 is the rank's last action
    # A sum that is listed right behind the last backward starts inside of it, as one that is not.
    for some in (made, schedule("interleaved-zb", stages=2, microbatches=2)):
        complete = {stage: at[-1] for stage, at in some.gradient_positions[0].items()}
        assert some.sum_positions[0] == complete


@pytest.mark.parametrize("p", [4, 6, 8, 12])
def test_chimera_sums_early_where_it_helps_beyond_the_middle(p):
    made = schedule("chimera", stages=p, microbatches=p, sync="eager-where-it-helps")
    for rank, order in enumerate(made.orders):
        for stage, at in made.sum_positions[rank].items():
            if stage > p // 2:
                assert at == made.gradient_positions[rank][stage][-1]
                assert order[at + 1].kind == SUM
            else:
                assert {action.kind for action in order[at + 1 :]} <= {SUM}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["1f1b", "chimera", "interleaved-zb", "gems", "dualpipe"])
def test_listed_sums_survive_files_and_change_no_time_of_an_action(name, mode):
    made, plain = (
        schedule(name, stages=4, microbatches=8, **sync) for sync in ({"sync": mode}, {})
    )
    check(made)
    assert from_text(to_text(made)) == made
    assert from_csv(to_csv(made)) == made
    assert without_sums(made).orders == plain.orders
    assert simulate(made).makespan == simulate(plain).makespan
    assert simulate(made).peak_activations == simulate(plain).peak_activations
    # A schedule's own list is what the simulator reads where it is told nothing else.
    named, read = simulate(plain, sync=mode, sync_cost=0.5), simulate(made, sync_cost=0.5)
    assert named.synchronizations == read.synchronizations
    assert [len(order) for order in named.schedule.orders] == list(map(len, made.orders))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0 0REDUCE_GRAD 0B0", "0REDUCE_GRAD comes before 0B0"),
        ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "0REDUCE_GRAD stands there twice"),
        ("0F0 0B0 1REDUCE_GRAD", "there are 1 pipe of 1 stage"),
        ("0F0 0B0 0REDUCE_GRAD0", "'0REDUCE_GRAD0'"),
    ],
)
def test_sums_that_are_refused(row, message):
    with pytest.raises(InvalidInput) as error:
        from_text(f"microbatches: 1\npipe 0: 0\nrank 0: {row}")
    assert message in str(error.value)


def test_a_mode_that_is_refused():
    for make in (
        partial(schedule, "1f1b", stages=2, microbatches=2, sync="after"),
        partial(simulate, schedule("1f1b", stages=2, microbatches=2), sync="after"),
    ):
        with pytest.raises(InvalidInput, match="'eager', 'eager-where-it-helps', 'lazy'"):
            make()


def test_where_a_sum_starts_decides_what_is_left_of_it():
    """Worked by hand: chimera of 8 stages, two on each rank, sums of 3 seconds."""
    left = [
        simulate(schedule("chimera", stages=8, microbatches=8, sync=mode), sync_cost=3)
        for mode in MODES
    ]
    assert [timeline.uncovered_sync for timeline in left] == [3, 3, 6]
    long = [
        simulate(schedule("chimera", stages=8, microbatches=80), sync=m, sync_cost=3) for m in MODES
    ]
    assert [timeline.uncovered_sync for timeline in long] == [3, 3, 6]
    assert all(a.step_time <= b.step_time for a, b in pairwise(left))


def test_a_sum_may_stand_anywhere_behind_its_gradient():
    made = place_sums(schedule("chimera", stages=4, microbatches=4), early={3})
    check(made)
    (sum_of_3,) = (s for s in simulate(made, sync_cost=0.1).synchronizations if s.stages == (3,))
    assert sum_of_3.early


@cache
def case() -> Case:
    """A GPT whose embedding is tied, cut inside, with dropout."""
    return megatron(
        gpt(layers=4, batch=8, hidden=16, heads=2, sequence=4, vocabulary=19, dropout=0.2)
    )


def outcome(module: ap.ParallelModule, of: Case) -> Outcome:
    torch.manual_seed(4)
    return parallel_outcome(module, of)


@cache
def expected() -> Outcome:
    """The program of one device with its micro-batches, whose draws are those of every program."""
    alone = case().fresh()
    module = ap.parallelize(alone.model, alone.args, alone.kwargs, mesh=ap.Mesh(tp=1))
    return outcome(module, alone)


INSIDE = [(form, "zero2") for form in FORMS]
INSIDE += [(FORMS[2], states) for states in ("whole", "zero1", "zero3")] + [(FORMS[3], "zero3")]


@pytest.mark.parametrize(("form", "states"), INSIDE, ids=str)
def test_parity_inside_stages(form, states):
    name, options = form
    module = ap.parallelize(
        case().model, case().args, case().kwargs, mode="propagate", backend="virtual", check=True,
        mesh=ap.Mesh(pp=2, dp=2, tp=2), microbatches=4, states=states,
        schedule=name, schedule_options=options,
    )  # fmt: skip
    assert module.plan.pipelining.schedule.name == name
    assert_equal(outcome(module, case()), expected())


@cache
def small() -> Case:
    return gpt(layers=4, batch=8, hidden=16, heads=2, sequence=4, vocabulary=19)


def smalls() -> list[tuple[Case, None]]:
    """What is captured before the ranks are there."""
    return [(small(), None)]


WAYS = {
    2: [({"pp": 2}, "whole", form) for form in FORMS],
    4: [
        *(({"pp": 4}, "whole", form) for form in FORMS[:3]),
        *(({"pp": 2, "dp": 2}, "zero2", form) for form in FORMS),
        ({"pp": 2, "dp": 2}, "zero1", FORMS[2]),
        ({"pp": 2, "dp": 2}, "zero3", FORMS[1]),
    ],
}


def train(say, ranks):
    for sizes, states, (name, options) in WAYS[ranks]:
        module = ap.parallelize(
            small().model, small().args, small().kwargs, mode="propagate",
            mesh=ap.Mesh(**sizes), microbatches=4, states=states,
            schedule=name, schedule_options=options,
        )  # fmt: skip
        assert_equal(parallel_outcome(module, small()), single_outcome(small().fresh()))
        place = module.plan.place_of(dist.get_rank())
        recorded = tuple(module.backend.recorded[place].order)
        assert recorded == module.plan.pipelining.schedule.orders[place]
        say(f"{name} {options}")


@pytest.mark.parametrize("ranks", WAYS)
def test_parity_on_real_ranks(ranks):
    heard: list[str] = []
    launch_forked(smalls, train, ranks, ranks, heard=lambda rank, form: heard.append(form))
    assert len(heard) == ranks * len(WAYS[ranks])


def record(say):
    """Gathers and sums begin and end on pages and in traces; lazy sums follow all actions."""
    for mode in MODES:
        module = ap.parallelize(
            small().model, small().args, small().kwargs, mode="propagate",
            mesh=ap.Mesh(pp=2, dp=2), microbatches=4, states="zero3",
            schedule="chimera", schedule_options={"sync": mode},
        )  # fmt: skip
        recording = module.record(steps=2)
        for _ in range(2):
            module.step(*small().args, **small().kwargs)
        events = [event for event in recording.events() if event.args["step"] == 1]
        moved = [event for event in events if event.track >= MOVEMENTS]
        assert all(event.start <= event.end for event in moved)
        for rank in range(4):
            local = [event for event in moved if event.rank == rank]
            assert {event.name.partition(" of ")[0] for event in local} == {"gather", "sum"}
            actions = [event for event in events if (event.rank, event.track) == (rank, ACTIONS)]
            first, last = actions[0].start, actions[-1].end
            assert all(event.start >= first for event in local)
            # Each backward's sum over dp goes on at once, whatever starts the sum over pipes.
            sums = [event for event in local if event.name.startswith("sum")]
            assert min(event.start for event in sums) < last
            is_late = [event.start >= last for event in sums]
            assert sum(is_late) >= len(module.plan.pipelining.stages) * (mode == "lazy")
            tracks: dict[int, list[float]] = {}
            for event in sorted(local, key=lambda event: event.start):
                ends = tracks.setdefault(event.track, [0.0])
                assert event.start >= ends[-1]
                ends.append(event.end)
        gantt = measured_gantt(recording.events(), module.plan)
        assert gantt is not None
        assert {name.partition(" of ")[0] for name, *_ in gantt.after} == {"gather", "sum"}
        assert gantt.drawn().file().count("sum of ") > 0
        say(mode)


def test_recordings_show_gathers_and_sums_from_begin_to_end():
    heard: list[str] = []
    launch_forked(smalls, record, 4, heard=lambda rank, mode: heard.append(mode))
    assert len(heard) == 4 * len(MODES)
