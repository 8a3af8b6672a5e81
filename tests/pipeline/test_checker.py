"""Every schedule is sound at every size, and what is not sound is refused with its actions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.errors import InvalidInput
from autopar.pipeline import (
    NAMES,
    Action,
    Schedule,
    check,
    from_csv,
    from_text,
    schedule,
    simulate,
    to_csv,
    to_text,
)
from autopar.pipeline.schedule import forward_only

EVEN = ("gems", "chimera", "chimera-zb", "dualpipe")


def variants(name: str, p: int) -> list[dict]:
    pipes = [2 * k for k in range(1, p // 2 + 1) if p // 2 % k == 0]
    return {
        "interleaved": [{"chunks": 2}, {"chunks": 3}],
        "chimera": [
            {"pipes": count, "scale": scale}
            for count in pipes
            for scale in ("direct", "doubling", "halving", "list")
        ],
        "chimera-zb": [{"pipes": count} for count in pipes],
        "dualpipe": [{"overlap": True}, {"overlap": False}],
    }.get(name, [{}])


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_sound_and_survives_text_and_csv(name, p):
    if name in EVEN and p % 2:
        pytest.skip("needs an even number of stages")
    sizes = range(1, 4 * p + 1) if p <= 4 else [1, 2, p - 1, p, p + 1, 2 * p, 2 * p + 3, 3 * p]
    for m in sizes if name != "pipedream-2bw" else filter(p.__le__, sizes):
        for options in variants(name, p):
            made = schedule(name, stages=p, microbatches=m, **options)
            check(made)
            assert made.ranks == p
            assert from_text(to_text(made)) == made
            assert from_csv(to_csv(made)) == made


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_sound_at_sixteen_stages(name):
    for m in (7, 16, 41) if name != "pipedream-2bw" else (16, 41):
        for options in variants(name, 16)[:2]:
            check(schedule(name, stages=16, microbatches=m, **options))


def edit(made: Schedule, rank: int, order: list[Action]) -> Schedule:
    orders = list(made.orders)
    orders[rank] = tuple(order)
    return replace(made, orders=tuple(orders))


@pytest.fixture
def chimera() -> Schedule:
    return schedule("chimera", stages=4, microbatches=4)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_or_doubled_action_is_named(name):
    made = schedule(name, stages=4, microbatches=8)
    generator = random.Random(0)
    for _ in range(20):
        rank = generator.randrange(4)
        order = list(made.orders[rank])
        position = generator.randrange(len(order))
        action = order[position]
        for changed in (order[:position] + order[position + 1 :], [*order, action]):
            with pytest.raises(InvalidInput) as error:
                check(edit(made, rank, changed))
            message = str(error.value)
            assert f"rank {rank}" in message
            number = str(action.microbatches[0])
            assert str(action) in message or number in message


def test_backward_before_forward(chimera):
    order = list(chimera.orders[0])
    order.insert(0, order.pop(6))
    with pytest.raises(InvalidInput, match=r"rank 0: 0B0 comes before 0F0"):
        check(edit(chimera, 0, order))


def test_input_gradient_before_forward():
    made = schedule("zb-h1", stages=2, microbatches=2)
    first, second, *others = made.orders[1]
    with pytest.raises(InvalidInput, match=r"rank 1: 1I0 comes before 1F0"):
        check(edit(made, 1, [second, first, *others]))


def test_weight_before_input_gradient():
    made = schedule("zb-h1", stages=2, microbatches=2)
    order = list(made.orders[1])
    order.insert(0, order.pop())
    with pytest.raises(InvalidInput, match="W follows I"):
        check(edit(made, 1, order))


def test_deadlock_shows_who_waits_for_whom():
    made = schedule("1f1b", stages=2, microbatches=2)
    order = [made.orders[0][i] for i in (0, 2, 1, 3)]  # 0F0 0B0 0F1 0B1
    last = [made.orders[1][i] for i in (0, 2, 1, 3)]  # 1F0 1F1 1B0 1B1
    check(edit(made, 0, order))
    stuck = edit(edit(made, 0, order), 1, last)
    with pytest.raises(InvalidInput) as error:
        check(stuck)
    assert "rank 0: 0B0 waits for 1B0 of rank 1" in str(error.value)
    assert "rank 1: 1F1 waits for 0F1 of rank 0" in str(error.value)
    with pytest.raises(InvalidInput):
        simulate(stuck)


def test_an_action_on_the_wrong_rank(chimera):
    order = [*chimera.orders[0], Action("F", 0, 1, (0,))]
    with pytest.raises(InvalidInput, match="1F0 belongs on rank 1"):
        check(edit(chimera, 0, order))


@pytest.mark.parametrize(
    "action",
    [
        Action("F", 5, 0, (0,)),
        Action("F", 0, 9, (0,)),
        Action("F", 0, 0, (4,)),
        Action("F", 0, 0, ()),
        Action("F", 0, 0, (1, 1)),
        Action("X", 0, 0, (0,)),  # type: ignore[arg-type]
    ],
)
def test_an_action_that_names_what_is_not_there(chimera, action):
    with pytest.raises(InvalidInput, match="rank 0"):
        check(edit(chimera, 0, [*chimera.orders[0], action]))


def test_a_microbatch_in_two_pipes(chimera):
    order = [
        replace(action, pipe=1, stage=3) if str(action) == "0F0" else action
        for action in chimera.orders[0]
    ]
    with pytest.raises(InvalidInput, match="one pipe"):
        check(edit(chimera, 0, order))


def test_groups_that_do_not_match():
    made = schedule("gpipe", stages=2, microbatches=2)
    order = [Action("F", 0, 0, (0, 1)), *made.orders[0][2:]]
    with pytest.raises(InvalidInput, match="sends together"):
        check(edit(made, 0, order))
    last = [Action("F", 0, 1, (0, 1)), *made.orders[1][2:]]
    check(edit(edit(made, 0, order), 1, last))


def test_two_copies_of_a_stage_on_one_rank(chimera):
    placement = (chimera.placement[0], chimera.placement[0])
    with pytest.raises(InvalidInput, match="holds stage 0 twice"):
        check(replace(chimera, placement=placement))


def test_pipes_of_different_depth(chimera):
    with pytest.raises(InvalidInput, match="pipe 1 has 3 stages"):
        check(replace(chimera, placement=(chimera.placement[0], chimera.placement[1][:3])))


def test_a_rank_that_runs_nothing() -> None:
    made = schedule("1f1b", stages=2, microbatches=2)
    with pytest.raises(InvalidInput, match="rank 2 runs nothing"):
        check(replace(made, orders=(*made.orders, ())))
    idle_pipe = replace(made, placement=((0, 1), (2, 3)), orders=(*made.orders, (), ()))
    with pytest.raises(InvalidInput, match="rank 3 runs nothing"):
        check(idle_pipe)


def test_overlap_with_the_wrong_partner():
    made = schedule("1f1b", stages=2, microbatches=2)
    order = [replace(made.orders[1][0], overlaps=True), *made.orders[1][1:]]
    with pytest.raises(InvalidInput, match="its own backward"):
        check(edit(made, 1, order))
    order = [replace(made.orders[0][0], overlaps=True), *made.orders[0][1:]]
    with pytest.raises(InvalidInput, match="0F0 with 0F1"):
        check(edit(made, 0, order))


def test_a_call_goes_forward_alone() -> None:
    made = forward_only(((0, 1), (1, 0)), 4)
    check(made, of_call=True)
    assert from_text(to_text(made), of_call=True) == made
    for refused in (lambda: check(made), lambda: from_text(to_text(made))):
        with pytest.raises(InvalidInput, match="one F, and one B"):
            refused()
    less = replace(made, orders=(made.orders[0][1:], made.orders[1]))
    with pytest.raises(InvalidInput, match="no 0F0"):
        check(less, of_call=True)
