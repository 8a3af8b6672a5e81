"""What only processes can show: messages, replicas that stay equal, what ranks hold, a lost one."""

from __future__ import annotations

import io
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import autopar as ap
from autopar import planning
from autopar.errors import ExecutionError
from autopar.pipeline import simulate
from autopar.runtime.launch import launch
from autopar.runtime.messages import Messages
from tests.annotations import megatron
from tests.held import held_in_a_step, predicted_course
from tests.models import gpt, mlp
from tests.parity import Outcome, assert_equal, parallel_outcome, single_outcome
from tests.pipeline.models import residuals

CHIMERAS = [
    ("chimera", 4, {}),
    ("chimera", 8, {"pipes": 4}),
    ("chimera", 8, {"scale": "direct"}),
    ("chimera", 8, {"scale": "doubling"}),
    ("chimera", 4, {"scale": "halving"}),
    ("chimera", 8, {"scale": "list"}),
]
OTHERS = [("1f1b", 8, {}), ("interleaved", 8, {}), ("zb-h1", 8, {}), ("zb-v", 8, {})]


def small(layers: int):
    """A GPT, or where many ranks plan many layers a chain of linear layers."""
    if layers > 8:
        return mlp(layers=layers, hidden=16)
    return gpt(layers=layers, batch=8, hidden=16, heads=2, sequence=4, vocabulary=19)


def packed(outcome: Outcome) -> bytes:
    """Tensors as plain bytes, which travel to any number of processes."""
    buffer = io.BytesIO()
    torch.save((outcome.losses, outcome.grads, outcome.state), buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Outcome:
    return Outcome(*torch.load(io.BytesIO(data)))


def train(say, layers, forms, reference: bytes, tags: bool):
    """Every form on all ranks as one pipeline; without tags, as by NCCL, order is all there is."""
    if not tags:
        Messages._tag = lambda self, key, number: 0
    expected = unpacked(reference)
    case = small(layers)
    captured = planning.capture(case.model, case.args, case.kwargs)
    planning.capture = lambda *call: captured
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for schedule, microbatches, options in forms:
        module = ap.parallelize(
            case.model,
            case.args,
            case.kwargs,
            mode="propagate",
            mesh=ap.Mesh(pp=ranks),
            microbatches=microbatches,
            schedule=schedule,
            schedule_options=options,
        )
        assert_equal(parallel_outcome(module, case), expected)
        made = module.plan.pipelining.schedule
        recorded = module.backend.recorded[rank]
        assert tuple(recorded.order) == made.orders[rank]
        assert recorded.peak_activations == simulate(made).peak_activations[rank]
        if layers <= 8 and schedule in ("1f1b", "zb-h1"):
            predicted = predicted_course(module, rank)
            assert held_in_a_step(module, case) == [sum(moment.values()) for moment in predicted]
        held = {name: value.to_local().clone() for name, value in module.named_parameters()}
        everyones = [None] * ranks
        dist.all_gather_object(everyones, held)
        for other in everyones:
            for name, value in other.items():
                assert name not in held or torch.equal(held[name], value), name
        say((schedule, microbatches, options))


@pytest.mark.parametrize(
    ("ranks", "layers", "tags"),
    [(4, 8, False), (8, 17, True)],
)
def test_parity_on_real_ranks(ranks, layers, tags):
    expected = packed(single_outcome(small(layers)))
    forms, heard = CHIMERAS + OTHERS, []
    launch(train, ranks, layers, forms, expected, tags, heard=lambda rank, form: heard.append(form))
    assert len(heard) == ranks * len(forms)


def train_inside(say, expected: bytes):
    case = megatron(small(4))
    module = ap.parallelize(
        case.model,
        case.args,
        case.kwargs,
        mode="propagate",
        mesh=ap.Mesh(dp=2, pp=2, tp=2),
        microbatches=4,
        schedule="chimera",
    )
    assert_equal(parallel_outcome(module, case), unpacked(expected))


def test_data_and_tensor_parallel_inside_stages():
    launch(train_inside, 8, packed(single_outcome(small(4))))


CLIPS = [(0.05, 2.0), (0.01, float("inf"))]


def train_clipped(say, references: list[bytes]):
    """The embedding is tied, every stage lies on two ranks, or is cut inside: counted once."""
    for clip, reference in zip(CLIPS, references):
        for mesh, schedule in [({"pp": 4}, "chimera"), ({"pp": 2, "tp": 2}, "1f1b")]:
            case = small(4) if "tp" not in mesh else megatron(small(4))
            module = ap.parallelize(
                case.model,
                case.args,
                case.kwargs,
                mode="propagate",
                mesh=ap.Mesh(**mesh),
                microbatches=4,
                schedule=schedule,
            )
            assert_equal(parallel_outcome(module, case, clip=clip), unpacked(reference))


def test_gradients_are_clipped_by_the_norm_of_all_stages():
    expected = [single_outcome(small(4), clip=clip) for clip in CLIPS]
    for (most, _), outcome in zip(CLIPS, expected):
        assert min(outcome.losses[1::2]) > most  # norms, before they are clipped
    launch(train_clipped, 4, [packed(outcome) for outcome in expected])


def train_norms(say):
    """Replicas of a stage see other micro-batches, and keep the same running statistics."""
    case = residuals(batch=8, layers=2)
    options = {"mode": "propagate", "mesh": ap.Mesh(pp=2), "microbatches": 4, "schedule": "chimera"}
    real, virtual = (
        ap.parallelize(case.model, case.args, backend=backend, **options)
        for backend in ("torch", "virtual")
    )
    assert_equal(parallel_outcome(real, case), parallel_outcome(virtual, case), 1e-12)


def test_batch_norm_between_replicas():
    launch(train_norms, 2)


def lose_one(say):
    case = small(4)
    module = ap.parallelize(
        case.model,
        case.args,
        case.kwargs,
        mode="propagate",
        mesh=ap.Mesh(pp=4),
        microbatches=8,
        schedule="1f1b",
    )
    module.step(*case.args, **case.kwargs)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        module.step(*case.args, **case.kwargs)
    except ExecutionError as error:
        say(str(error))


def test_a_killed_rank_ends_all_others():
    heard = {}
    start = time.monotonic()
    with pytest.raises(ExecutionError, match="rank 2: ended with exit code -9"):
        launch(lose_one, 4, heard=lambda rank, text: heard.setdefault(rank, text), timeout=30.0)
    assert time.monotonic() - start < 100
