"""What only processes can show: messages, replicas that stay equal, what ranks hold."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar as ap
from autopar.pipeline import simulate
from autopar.runtime.backends.stage_messages import Messages
from tests.annotations import megatron
from tests.distributed.forked import launch_forked
from tests.held import held_in_a_step, predicted_course
from tests.models import Case, gpt, mlp
from tests.parity import Outcome, assert_equal, parallel_outcome, single_outcome
from tests.pipeline.models import residuals
from tests.sampling import some

Form = tuple[str, int, dict[str, Any]]
CHIMERAS: list[Form] = [
    ("chimera", 4, {}),
    ("chimera", 8, {"pipes": 4}),
    ("chimera", 8, {"scale": "direct"}),
    ("chimera", 8, {"scale": "doubling"}),
    ("chimera", 4, {"scale": "halving"}),
    ("chimera", 8, {"scale": "list"}),
]
OTHERS: list[Form] = [("1f1b", 8, {}), ("interleaved", 8, {}), ("zb-h1", 8, {}), ("zb-v", 8, {})]
ON_EIGHT = [CHIMERAS[1], OTHERS[0], OTHERS[3]]  # all four pipes, one, and two chunks a rank
WATCHED = "1f1b", "zb-h1"  # of which what ranks hold is followed
pytestmark = pytest.mark.usefixtures("warm_ranks")


@cache
def small(layers: int, chain: bool = False) -> Case:
    """A GPT, whose embedding is tied, or a chain of linear layers, which has less to send."""
    if chain:
        return mlp(layers=layers + 1, hidden=16)
    return gpt(layers=layers, batch=8, hidden=16, heads=2, sequence=4, vocabulary=19)


@cache
def outcome(layers: int, chain: bool = False, clip: tuple[float, float] | None = None) -> Outcome:
    """What one device does, once for all ranks."""
    return single_outcome(small(layers, chain).fresh(), clip=clip)


def forms_on(ranks: int) -> list[Form]:
    """The chimeras and the others of today on four ranks, and a few on eight."""
    if ranks == 8:
        return ON_EIGHT
    return some(CHIMERAS, 2, "chimeras") + some(OTHERS, 2, "other schedules")


@cache
def planned(ranks: int) -> list[tuple[bool, ap.Plan]]:
    """A plan of every form, made once for all ranks, which are one pipeline: of a GPT where
    replicas of its embedding, or what ranks hold, are looked at, and else of a chain."""
    found = []
    for form in forms_on(ranks):
        schedule, microbatches, options = form
        chain = ranks > 4 or not (form == CHIMERAS[0] or schedule in WATCHED)
        case = small(2 * ranks, chain)
        plan = ap.plan(
            case.model,
            case.args,
            case.kwargs,
            mode="propagate",
            mesh=ap.Mesh(pp=ranks),
            microbatches=microbatches,
            schedule=schedule,
            schedule_options=options,
        )
        found.append((chain, plan))
    return found


def of_forms(ranks: int) -> list[tuple[Case, None]]:
    """What is known before the ranks are there."""
    for chain, _ in planned(ranks):
        outcome(2 * ranks, chain)
    return []


def train(say, tags: bool):
    """Every form; without tags, as by NCCL, order is all there is."""
    if not tags:
        Messages._tag = lambda self, key, number: 0
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for chain, plan in planned(ranks):
        case = small(2 * ranks, chain)
        module = ap.parallelize(case.model, case.args, case.kwargs, plan=plan)
        assert_equal(parallel_outcome(module, case), outcome(2 * ranks, chain))
        made = module.plan.pipelining.schedule
        recorded = module.backend.recorded[rank]
        assert tuple(recorded.order) == made.orders[rank]
        assert recorded.peak_activations == simulate(made).peak_activations[rank]
        if ranks == 4 and made.name in WATCHED:
            predicted = predicted_course(module, rank)
            assert held_in_a_step(module, case) == [sum(moment.values()) for moment in predicted]
        held = {name: value.to_local().clone() for name, value in module.named_parameters()}
        everyones = [None] * ranks
        dist.all_gather_object(everyones, held)
        for other in everyones:
            for name, value in other.items():
                assert name not in held or torch.equal(held[name], value), name
        say(made.name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ranks", "tags"), [(4, False), (8, True)], ids=["4", "8"])
def test_parity_on_real_ranks(ranks, tags):
    heard: list[str] = []
    cases = partial(of_forms, ranks)
    launch_forked(cases, train, ranks, tags, heard=lambda rank, form: heard.append(form))
    assert len(heard) == ranks * len(forms_on(ranks))


@cache
def cut_inside() -> Case:
    return megatron(gpt(layers=4, batch=8, hidden=16, heads=2, sequence=4, vocabulary=19))


def of_four() -> list[tuple[Case, None]]:
    return [(small(4), None), (cut_inside(), None), (with_norms(), None)]


def train_inside(say):
    case = cut_inside()
    module = ap.parallelize(
        case.model,
        case.args,
        case.kwargs,
        mode="propagate",
        mesh=ap.Mesh(dp=2, pp=2, tp=2),
        microbatches=4,
        schedule="chimera",
    )
    assert_equal(parallel_outcome(module, case), outcome(4))


def test_data_and_tensor_parallel_inside_stages():
    launch_forked(of_four, train_inside, 8)


CLIPS = [(0.05, 2.0), (0.01, float("inf"))]


def train_clipped(say):
    """The embedding is tied, every stage lies on two ranks, or is cut inside: counted once."""
    for clip in CLIPS:
        for mesh, schedule in [({"pp": 4}, "chimera"), ({"pp": 2, "tp": 2}, "1f1b")]:
            case = small(4) if "tp" not in mesh else cut_inside()
            module = ap.parallelize(
                case.model,
                case.args,
                case.kwargs,
                mode="propagate",
                mesh=ap.Mesh(**mesh),
                microbatches=4,
                schedule=schedule,
            )
            assert_equal(parallel_outcome(module, case, clip=clip), outcome(4, clip=clip))


def test_gradients_are_clipped_by_the_norm_of_all_stages():
    for clip in CLIPS:
        assert min(outcome(4, clip=clip).losses[1::2]) > clip[0]  # norms, before they are clipped
    launch_forked(of_four, train_clipped, 4)


with_norms = cache(partial(residuals, batch=8, layers=2))


def train_norms(say):
    """Replicas of a stage see other micro-batches, and keep the same running statistics."""
    case = with_norms()
    options = {"mode": "propagate", "mesh": ap.Mesh(pp=2), "microbatches": 4, "schedule": "chimera"}
    real, virtual = (
        ap.parallelize(case.model, case.args, backend=backend, **options)
        for backend in ("torch", "virtual")
    )
    assert_equal(parallel_outcome(real, case), parallel_outcome(virtual, case), 1e-12)


def test_batch_norm_between_replicas():
    launch_forked(of_four, train_norms, 2)
