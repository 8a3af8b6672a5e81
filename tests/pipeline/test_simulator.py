"""Costs by stage, latency, memory, synchronisation, drawing."""

from __future__ import annotations

import pytest

from autopar.cost.rooflines import COLLECTIVES
from autopar.errors import InvalidInput
from autopar.pipeline import from_text, schedule, simulate
from autopar.pipeline.simulation.action_times import MessageCost, time_actions
from autopar.pipeline.simulation.synchronization import early_stages
from autopar.pipeline.simulation.timeline import draw


def test_starts_and_ends_are_those_of_the_actions():
    made = schedule("1f1b", stages=2, microbatches=2)
    timeline = simulate(made, forward=1, backward=2)
    assert timeline.starts == [[0, 1, 4, 7], [1, 2, 4, 5]]
    assert timeline.ends == [[1, 2, 6, 9], [2, 4, 5, 7]]
    assert timeline.makespan == 9
    assert timeline.idle == (3, 3)
    assert timeline.bubble_ratio == pytest.approx(1 / 3)


def test_costs_of_each_stage():
    made = schedule("gpipe", stages=3, microbatches=4)
    timeline = simulate(made, forward=[1, 3, 1], backward=[2, 6, 2])
    assert timeline.makespan == 1 + 4 * 3 + 1 + 2 + 4 * 6 + 2
    even = simulate(made, forward=[1, 1, 1], backward=[2, 2, 2])
    assert even.starts == simulate(made).starts


def test_a_number_is_shared_by_chunks_and_a_list_is_not():
    made = schedule("interleaved", stages=2, microbatches=2, chunks=2)
    assert simulate(made).starts == simulate(made, [0.5] * 4, [1.0] * 4).starts


def test_backward_weight_is_the_part_that_is_split_off():
    made = schedule("zb-h1", stages=2, microbatches=4)
    timeline = simulate(made, 1, 2, backward_weight=0.5)
    assert sum(timeline.busy) == pytest.approx(2 * 4 * 3)
    lengths = {
        action.kind: end - start
        for action, start, end in zip(made.orders[0], timeline.starts[0], timeline.ends[0])
    }
    assert lengths == {"F": 1, "I": 1.5, "W": 0.5}


def test_messages_inside_a_rank_take_no_time():
    made = schedule("zb-v", stages=1, microbatches=3)
    assert simulate(made, latency=5).makespan == 9


def test_a_message_leaves_when_the_one_before_has_left_and_not_arrived():
    cost = MessageCost(leaves=3.0, alpha=10.0)
    made = schedule("gpipe", stages=2, microbatches=2)
    costs = {(0, 0, True): cost, (0, 1, False): cost}
    times = time_actions(made, {"F": [1.0, 1.0], "B": [1.0, 1.0]}, costs)
    assert times.starts[1][:2] == [1 + 3 + 10, 1 + 3 + 3 + 10]


def test_activations_are_kept_until_the_weight_gradient():
    text = "microbatches: 2\npipe 0: 0\nrank 0: 0F0 0I0 0F1 0I1 0W0 0W1"
    assert simulate(from_text(text)).peak_activations == (2,)
    text = "microbatches: 2\npipe 0: 0\nrank 0: 0F0 0I0 0W0 0F1 0B1"
    assert simulate(from_text(text)).peak_activations == (1,)


def test_activation_of_each_stage():
    made = schedule("1f1b", stages=3, microbatches=8)
    assert simulate(made, activation=[5, 1, 2]).peak_activations == (15, 2, 2)


def test_overlapping_actions_wait_and_send_together():
    apart = from_text(
        "microbatches: 2\npipe 0: 0 1\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1"
    )
    joined = from_text(
        "microbatches: 2\npipe 0: 0 1\nrank 0: 0F0 0F1 0B0 0B1\n"
        "rank 1: 1F0 (1F1;1B0)OVERLAP_F_B 1B1"
    )
    assert simulate(apart).starts[1] == simulate(joined).starts[1]
    late = simulate(joined, forward=[3, 1])
    assert late.starts[1][1] == 6  # its own input comes last
    path = late.critical_path
    assert sum({"F": 1, "B": 2}[a.kind] + 2 * (str(a) in ("0F0", "0F1")) for a in path.actions) == (
        late.makespan
    )


def test_a_path_without_gaps_is_critical():
    for name in ("gpipe", "1f1b", "interleaved", "gems", "chimera", "dualpipe", "zb-v"):
        made = schedule(name, stages=4, microbatches=8)
        chunks = made.chunks
        timeline = simulate(made, latency=0.25)
        path = timeline.critical_path
        times = {"F": 1, "B": 2, "I": 1, "W": 1}
        length = sum(times[action.kind] for action in path.actions) / chunks
        assert length + path.messages * 0.25 == timeline.makespan


def test_large_schedules():
    made = schedule("chimera", stages=64, microbatches=1024)
    timeline = simulate(made)
    assert timeline.makespan == 1024 * 3 + 62 * (16 + 1)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": [1, 2, 3]}, "forward is one number, or one for each of 4 stages"),
        ({"backward": -1}, "backward is a time"),
        ({"backward": float("nan")}, "backward is a time"),
        ({"backward_weight": 3}, "split off"),
        ({"latency": [1]}, "latency is one number"),
        ({"sync": "sometimes"}, "eager-where-it-helps"),
        ({"forward": "fast"}, "forward is one number"),
    ],
)
def test_bad_costs(costs, message):
    with pytest.raises(InvalidInput, match=message):
        simulate(schedule("1f1b", stages=4, microbatches=4), **costs)


@pytest.mark.parametrize("p", [4, 6, 8, 10, 12, 16])
def test_early_synchronisation_helps_beyond_the_middle(p):
    timeline = simulate(schedule("chimera", stages=p, microbatches=p))
    assert early_stages(timeline) == tuple(range(p // 2 + 1, p))


def test_early_synchronisation_helps_nothing_without_idle_time():
    assert early_stages(simulate(schedule("1f1b", stages=4, microbatches=8))) == ()


def test_uncovered_synchronisation():
    made = schedule("chimera", stages=8, microbatches=8)

    def uncovered(mode, cost):
        return simulate(made, sync=mode, sync_cost=cost).uncovered_sync

    assert simulate(made).uncovered_sync == 0
    assert uncovered("lazy", 3) == 6  # two stages on each rank
    assert uncovered("eager", 3) == 3
    assert uncovered("eager-where-it-helps", 3) == 3
    for cost in (0.5, 2, 8):
        modes = [uncovered(mode, cost) for mode in ("eager", "eager-where-it-helps", "lazy")]
        assert modes == sorted(modes)
    timeline = simulate(made, sync="eager", sync_cost=[1, 2, 3, 4, 5, 6, 7, 8])
    assert timeline.step_time == timeline.makespan + timeline.uncovered_sync
    spans = {sync.stages: sync for sync in timeline.synchronizations}
    assert spans[7,].ranks == (0, 7)
    assert spans[7,].early
    assert not spans[0,].early
    assert all(sync.end - sync.start == sync.stages[0] + 1 for sync in spans.values())


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_sum_begins_when_all_replicas_have_the_gradient(mode):
    """One direction of GEMS has a micro-batch more than the other, and ends later."""
    made = schedule("gems", stages=4, microbatches=5)
    timeline = simulate(made, sync=mode, sync_cost=0.5)
    assert len(timeline.synchronizations) == 4
    for sync in timeline.synchronizations:
        for rank in sync.ranks:
            last = made.gradient_positions[rank][sync.stages[0]][-1]
            assert timeline.ends[rank][last] <= sync.start


def test_what_follows_on_sums_begins_when_a_rank_has_summed_all():
    """Not between a stage's own sum and one that it shares, which others would wait for."""
    made = schedule("1f1b", stages=4, microbatches=4)
    alone = simulate(made, sync="eager", sync_cost=1.0, shared_sync={(0, 3): 2.0})
    assert alone.updates == ()
    assert alone.last_update is None
    found = simulate(
        made, sync="eager", sync_cost=1.0, shared_sync={(0, 3): 2.0}, after_sync=[5, 0, 0, 7]
    )
    assert found.synchronizations == alone.synchronizations
    first, last = found.updates
    for update, seconds in ((first, 5), (last, 7)):
        own = [sync.end for sync in found.synchronizations if update.rank in sync.ranks]
        assert update.start == max(own)
        assert update.end == update.start + seconds
    assert found.last_update is last
    assert found.step_time == alone.step_time + 7


def test_last_backwards_are_where_a_gradient_is_complete():
    made = schedule("zb-h1", stages=2, microbatches=2)
    (positions,) = made.gradient_positions[1].values()
    assert str(made.orders[1][positions[-1]]) == "1W1"
    alone = schedule("chimera", stages=2, microbatches=1)
    assert alone.gradient_positions == ({0: (1,)}, {1: (1,)})


def test_time_of_an_all_reduce():
    all_reduce = COLLECTIVES["all_reduce"]
    assert all_reduce(p=1, V=100, B=1, a=1) == 0
    assert all_reduce(p=8, V=800, B=100, a=0.5) == 2 * 3 * 0.5 + 2 * 7 / 8 * 0.01 * 800


def test_drawing():
    timeline = simulate(schedule("1f1b", stages=2, microbatches=2))
    assert str(timeline) == "\n".join(
        [
            "1f1b: 2 ranks, 2 micro-batches, makespan 9, bubble 33.3%",
            "rank 0 |F0 F1 ......B0    ...B1    |",
            "rank 1 |...F0 B0    F1 B1    ......|",
        ]
    )
    narrow = draw(timeline, width=9 + len("rank 0 ||")).splitlines()
    assert narrow[1:] == ["rank 0 |FF..BB.BB|", "rank 1 |.FBBFBB..|"]
