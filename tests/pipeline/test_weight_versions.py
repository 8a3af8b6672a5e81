"""Updates as actions of a schedule: versions of weights, their staleness and their number."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from autopar.errors import InvalidInput
from autopar.pipeline import check, from_csv, from_text, schedule, simulate, to_csv, to_text
from autopar.pipeline.schedule import UPDATE, Schedule
from autopar.pipeline.weight_versions import update_numbers, versions_alive, versions_read

FORMS = [("pipedream", {}), ("pipedream", {"vertical_sync": True}), ("pipedream-2bw", {"steps": 3})]


def read_by_microbatch(made: Schedule, rank: int) -> dict[int, int]:
    read = versions_read(made, rank)
    order = made.orders[rank]
    return {order[at].microbatches[0]: version for at, (version,) in read.items()}


@pytest.mark.parametrize(("name", "options"), FORMS)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_updates_survive_files_and_take_no_place_of_an_action(name, options, p):
    made = schedule(name, stages=p, microbatches=6, **options)
    check(made)
    assert from_text(to_text(made)) == made
    assert from_csv(to_csv(made)) == made
    plain = schedule("1f1b", stages=p, microbatches=made.microbatches)
    worked = [tuple(a for a in order if a.kind != UPDATE) for order in made.orders]
    assert worked == [*plain.orders]
    assert simulate(made).makespan == simulate(plain).makespan
    assert simulate(made).peak_activations == simulate(plain).peak_activations
    assert simulate(made).critical_path == simulate(plain).critical_path


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_stashing_reads_the_newest_weights_of_each_stage(p):
    """Micro-batch n reads w_i^(n - (p - 1 - i)) on stage i: what its stage has at that moment."""
    made = schedule("pipedream", stages=p, microbatches=3 * p)
    for rank, order in enumerate(made.orders):
        read, newest = read_by_microbatch(made, rank), 0
        for action in order:
            if action.kind == "F":
                assert read[action.microbatches[0]] == newest
            newest += action.kind == UPDATE
        assert read == {n: max(0, n - (p - 1 - rank)) for n in range(3 * p)}
    assert versions_alive(made) == tuple(p - i for i in range(p))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_vertical_synchronisation_reads_one_version_on_all_stages(p):
    made = schedule("pipedream", stages=p, microbatches=3 * p, vertical_sync=True)
    for rank in range(p):
        assert read_by_microbatch(made, rank) == {n: max(0, n - p + 1) for n in range(3 * p)}
    assert versions_alive(made) == (p,) * p


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 4), (4, 4), (4, 7)])
def test_two_versions_with_a_delay_of_one(p, m):
    made = schedule("pipedream-2bw", stages=p, microbatches=m, steps=5)
    for rank in range(p):
        read = read_by_microbatch(made, rank)
        assert read == {n: max(0, n // m - 1) for n in range(5 * m)}
    assert all(set(numbers.values()) == {*range(5)} for numbers in update_numbers(made).values())
    assert versions_alive(made) == (2,) * p
    assert simulate(made).weight_versions == (2,) * p
    assert simulate(made).peak_activations == tuple(map(float, range(p, 0, -1)))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 6)])
def test_the_steady_state_has_no_bubble(p, m):
    """Only the first step waits: T steps take T m (f + b), and p - 1 times f + b once."""
    for steps in range(1, 6):
        two = simulate(schedule("pipedream-2bw", stages=p, microbatches=m, steps=steps))
        assert two.makespan == (steps * m + p - 1) * 3
        stashed = simulate(schedule("pipedream", stages=p, microbatches=steps * m))
        assert stashed.makespan == two.makespan
    flushed = simulate(schedule("1f1b", stages=p, microbatches=m))
    assert flushed.makespan == (m + p - 1) * 3


def changed(made: Schedule, rank: int, row: str) -> str:
    lines = to_text(made).splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(f"rank {rank}:"))
    lines[at] = f"rank {rank}: {row}"
    return "\n".join(lines)


TWO = schedule("pipedream-2bw", stages=1, microbatches=1, steps=3)
ROW = "0F0 0B0 0U0 0F1 0B1 0U1 0F2 0B2 0U2"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0 0U0 0B0 0F1 0B1 0U1 0F2 0B2 0U2", "0U0 comes before 0B0"),
        ("0F0 0B0 0U0 0F1 0B1 0U1 0F2 0B2 0U2 0U2", "0U2 applies micro-batch 2 again"),
        ("0F0 0B0 0U0 0F1 0B1 0U1 0F2 0B2", "no U of stage 0 applies micro-batch 2"),
        ("0F0 0B0 0U0 0F1 0B1 0U1 0F2 0B2 0U3", "0U3: micro-batches are 0 to 2"),
        ("0F0 0B0 0U0 0F1 0B1 0U1 0F2 0B2 0U2 0REDUCE_GRAD", "0REDUCE_GRAD comes after 0U"),
        ("0F0 0F1 0F2 0B0 0U0 0B1 0U1 0B2 0U2", "0F2 reads version 1, there is 0"),
        ("0F0+1 0B0+1 0U0 0U1 0F2 0B2 0U2", ""),
        ("0F0 0B0 0F1+2 0B1+2 0U0 0U1 0U2", "0F1+2 reads versions [0, 1] at once"),
    ],
)
def test_the_checker_proves_the_staleness(row, message):
    assert to_text(TWO).endswith(ROW)
    if not message:
        check(from_text(changed(TWO, 0, row)))
        return
    with pytest.raises(InvalidInput) as error:
        from_text(changed(TWO, 0, row))
    assert message in str(error.value)


def test_a_shorter_delay_than_the_order_allows_is_refused():
    made = schedule("pipedream-2bw", stages=3, microbatches=3, steps=4)
    check(replace(made, delays=(2, 1, 3)))
    for delays, message in (
        ((0, 1, 1), "0F3 reads version 1, there is 0"),
        ((1, 1), "delays 1 1"),
        ((1, 1, -1), "delays 1 1 -1"),
    ):
        with pytest.raises(InvalidInput) as error:
            check(replace(made, delays=delays))
        assert message in str(error.value)
    with pytest.raises(InvalidInput, match="no update"):
        check(replace(schedule("1f1b", stages=2, microbatches=2), delays=(1, 1)))


def test_a_synchronous_schedule_may_list_its_update():
    text = "microbatches: 2\npipe 0: 0\nrank 0: 0F0 0F1 0B0 0B1 0REDUCE_GRAD 0U0+1"
    made = from_text(text)
    assert versions_alive(made) == (1,)
    assert simulate(made, sync_cost=2, after_sync=1).step_time == 6 + 3
    with pytest.raises(InvalidInput, match="0F1 reads version 1, there is 0"):
        from_text("microbatches: 2\npipe 0: 0\nrank 0: 0F0 0F1 0B0 0U0 0B1 0U1")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(schedule, "pipedream-2bw", stages=4, microbatches=3), "microbatches=4 or more"),
        (partial(schedule, "pipedream-2bw", stages=2, microbatches=2, steps=0), "at least 1"),
        (partial(schedule, "pipedream", stages=2, microbatches=2, sync="lazy"), "vertical_sync"),
        (
            partial(schedule, "pipedream", stages=2, microbatches=2, vertical_sync=2),
            "True or False",
        ),
        (partial(simulate, schedule("pipedream", stages=2, microbatches=2), sync_cost=1), "update"),
        (partial(to_csv, TWO, header=False), "have no updates"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(InvalidInput) as error:
        make()
    assert message in str(error.value)


def test_updates_are_drawn_and_listed():
    timeline = simulate(schedule("pipedream-2bw", stages=2, microbatches=2, steps=2))
    assert str(timeline).splitlines()[1:] == [
        "rank 0 |F0 F1 ......B0    F2 B1    F3 B2    ...B3    |",
        "rank 1 |...F0 B0    F1 B1    F2 B2    F3 B3    ......|",
    ]
    picture = timeline.gantt().drawn().file()
    assert picture.count("update of weights of micro-batch 0 and 1, stage") == 2
