"""Files of torch.distributed.pipelining: every action of every schedule class is read."""

from __future__ import annotations

import csv
import inspect
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from autopar.errors import InvalidInput
from autopar.pipeline import check, from_csv, schedule, simulate, to_csv
from autopar.pipeline.torch_notation import read_cells

RANKS, MICROBATCHES = 4, 8
CLASSES = [
    each
    for each in vars(torchs).values()
    if inspect.isclass(each)
    and issubclass(each, torchs._PipelineSchedule)
    and not inspect.isabstract(each)
    # Without an order of its own.
    and each not in (torchs.PipelineScheduleMulti, torchs._PipelineScheduleRuntime)
    and each is not torchs._ScheduleForwardOnly
]


@dataclass
class FakeStage:
    """What a schedule class reads of a stage; there is no process group."""

    stage_index: int
    num_stages: int
    group_size: int = RANKS
    group_rank: int = 0
    has_backward: bool = True
    device: str = "cpu"
    submod: object = None
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


def built(kind: type) -> Any:
    """A schedule of torch, with two stages on a rank if it takes several."""
    if issubclass(kind, torchs.PipelineScheduleSingle):
        return kind(FakeStage(0, RANKS), MICROBATCHES, loss_fn=max)
    stages = [FakeStage(RANKS * chunk, 2 * RANKS) for chunk in range(2)]
    return kind(stages, MICROBATCHES, loss_fn=max)


def orders_of(made: Any) -> dict[int, list[Any]]:
    """All actions of each rank, communication among them."""
    if isinstance(made, torchs.PipelineScheduleMulti):
        return made.pipeline_order_with_comms
    orders = made._get_pipeline_order()
    last = orders[RANKS - 1]
    if str(last[0]) == f"{RANKS - 1}F1":  # torch 2.13 counts them from 1 there alone
        is_late = [a is not None and a.computation_type == torchs.F for a in last]
        orders[RANKS - 1] = [
            a._replace(microbatch_index=a.microbatch_index - 1) if late else a
            for a, late in zip(last, is_late)
        ]
    return orders


def written(orders: dict[int, list[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out)
    for rank in sorted(orders):
        writer.writerow(["" if action is None else action for action in orders[rank]])
    return out.getvalue()


def computing(cells: list[str]) -> list[str]:
    """What is left without communication and sums: torch's compute-only form."""
    return [
        str(c) for c in map(torchs._Action.from_str, cells) if c is not None and c.is_compute_op
    ]


def test_every_class_of_the_installed_torch_is_among_them():
    assert {each.__name__ for each in CLASSES} >= {
        "Schedule1F1B", "ScheduleGPipe", "ScheduleLoopedBFS", "ScheduleInterleaved1F1B",
        "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV",
    }  # fmt: skip


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type, tmp_path: Path):
    made = built(kind)
    orders = orders_of(made)
    read = from_csv(written(orders))
    check(read)
    # torch starts each sum right after the last backward: the eager mode, listed.
    kinds = {action.kind for _, action in read.actions}
    assert "REDUCE_GRAD" in kinds
    assert from_csv(to_csv(read)) == read
    back = list(csv.reader(io.StringIO(to_csv(read, header=False))))
    for rank, row in enumerate(back):
        assert computing(row) == computing([str(a or "") for a in orders[rank]])
    if isinstance(made, torchs._PipelineScheduleRuntime):
        (tmp_path / "back.csv").write_text(to_csv(read, header=False))
        again = built(kind)
        again._load_csv(str(tmp_path / "back.csv"))
        assert again.pipeline_order_with_comms == made.pipeline_order_with_comms


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (torchs.ScheduleGPipe, "gpipe"),
        (torchs.ScheduleInterleaved1F1B, "interleaved"),
        (torchs.ScheduleInterleavedZeroBubble, "interleaved-zb"),
        (torchs.ScheduleZBVZeroBubble, "zb-v"),
    ],
)
def test_the_schedule_of_the_same_name_takes_and_keeps_as_much(kind: type, name: str):
    theirs = simulate(from_csv(written(orders_of(built(kind)))))
    ours = simulate(schedule(name, stages=RANKS, microbatches=MICROBATCHES))
    assert ours.makespan <= theirs.makespan
    assert ours.peak_activations == theirs.peak_activations


def test_a_sum_that_torch_puts_elsewhere_stays_there():
    rows = "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    rows += "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1REDUCE_GRAD,1SEND_B1\n"
    read = from_csv(rows)
    assert " ".join(map(str, read.orders[1])) == "1F0 1B0 1F1 1B1 1REDUCE_GRAD"
    timeline = simulate(read, sync_cost=[0, 4])  # 1B1 ends at 10, 0B1 at 12
    starts = {sync.stages: sync.start for sync in timeline.synchronizations}
    assert starts == {(0,): 12, (1,): 10}


def test_the_names_of_torch_2_5():
    """There B was the gradients of inputs where a W stands, and BW the whole backward."""
    assert read_cells(["0F0", "0F1", "0B0", "0W0", "0BW1"]) == ["0F0", "0F1", "0I0", "0W0", "0B1"]
    old = from_csv("0F0,0F1,0BW0,0B1,0W1\n1F0,1F1,1B0,1W0,1BW1\n")
    new = from_csv("0F0,0F1,0B0,0I1,0W1\n1F0,1F1,1I0,1W0,1B1\n")
    assert old == new


@pytest.mark.parametrize(
    "row",
    [
        "0SEND_F0,0F0,0B0",
        "0F0,0B0,0RECV_B0",
        "0F0,0RECV_F0,0B0",
        "0F0,0SEND_B0,0B0",
        "0F0,0B0,0SEND_F1",
    ],
)
def test_messages_that_contradict_the_order_are_refused(row: str):
    with pytest.raises(InvalidInput, match="a message is sent behind the action"):
        from_csv(row)
