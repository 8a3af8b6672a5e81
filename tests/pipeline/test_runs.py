"""Runs: steps of asynchronous pipelines that follow one another without a drain.

A single process that applies the same delayed updates is the reference, for losses, the gradients
of every step, and the parameters after five updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.errors import InvalidInput
from autopar.pipeline.continued_steps import ContinuedSteps, continued
from autopar.pipeline.schedule import Action
from tests.annotations import megatron
from tests.distributed.forked import launch_forked
from tests.models import Case, gpt
from tests.parity import Outcome, assert_equal
from tests.pipeline.test_delayed_updates import DELAYED, OPTIMIZERS, Optimizer, delayed
from tests.pipeline.test_delayed_updates import case as tied_case

STEPS = 5
ON_HOST = {"parameters_device": "host", "optimizer_device": "host"}
STASHED = {"schedule": "pipedream", "microbatches": 1}


def batches(of: Case, count: int = STEPS) -> list[tuple[Tensor, ...]]:
    """Return another batch for each step."""
    return [tuple(tensor.roll(t, 0).roll(t, 1) for tensor in of.args) for t in range(count)]


def outcome(
    losses: Iterator[Tensor],
    gradients: Callable[[], dict[str, Tensor]],
    state: Callable[[], dict[str, Tensor]],
) -> Outcome:
    """Follow a run: at each loss the gradients are those of its batch."""
    found, by_step = list[Tensor](), dict[str, Tensor]()
    for t, loss in enumerate(losses):
        found.append(loss.detach())
        by_step |= {f"{t}.{name}": gradient.clone() for name, gradient in gradients().items()}
    return Outcome(found, by_step, {name: value.clone() for name, value in state().items()})


def run(module: ap.ParallelModule, of: Case, optimizer: torch.optim.Optimizer) -> Outcome:
    torch.manual_seed(4)
    losses = module.run(batches(of), optimizer)
    return outcome(losses, module.full_grads, module.full_state_dict)


def delayed_losses(
    step: Callable[..., Tensor], parameters: Iterable[nn.Parameter], make: Optimizer, of: Case
) -> Iterator[Tensor]:
    """Yield the losses of one process whose gradients are one update old."""
    parameters = list(parameters)
    stale, optimizer = delayed(step, parameters), make(parameters)
    torch.manual_seed(4)
    for batch in batches(of):
        optimizer.zero_grad()
        loss = stale(*batch)
        optimizer.step()
        yield loss


def plain_outcome(of: Case, make: Optimizer, delays: Mapping[str, int]) -> Outcome:
    """Train the original model in one process; `delays`: how many updates old the values are at
    which a step takes its gradients, by parameter."""
    alone = of.fresh()
    model, versions = alone.model, list[dict[str, Tensor]]()
    parameters = dict(model.named_parameters())
    optimizer = make(parameters.values())

    def losses() -> Iterator[Tensor]:
        for t, batch in enumerate(batches(of)):
            versions.append({name: p.detach().clone() for name, p in parameters.items()})
            optimizer.zero_grad()
            put({name: versions[max(0, t - delays[name])][name] for name in parameters})
            loss = alone.loss(model(*batch))
            loss.backward()
            put(versions[-1])
            optimizer.step()
            yield loss

    def put(values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(values[name])

    def gradients() -> dict[str, Tensor]:
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}

    return outcome(losses(), gradients, model.state_dict)


@cache
def expected(name: str) -> Outcome:
    """Return what a delay of one update leaves behind."""
    names = [name for name, _ in tied_case().model.named_parameters()]
    return plain_outcome(tied_case(), OPTIMIZERS[name], dict.fromkeys(names, 1))


def delays_of(module: ap.ParallelModule) -> dict[str, int]:
    """Return the delay of each parameter, by its stage."""
    program = module.program
    return {
        name: delay
        for stage, delay in zip(program.stages, program.schedule.delays)
        for name in stage.holds("parameter")
    }


@cache
def dropping() -> Outcome:
    """A synchronous program of one device, whose draws are those of every program."""
    alone = tied_case(0.2).fresh()
    module = ap.parallelize(alone.model, alone.args, mesh=ap.Mesh(tp=1))
    make = OPTIMIZERS["adamw"]
    losses = delayed_losses(module.step, module.parameters(), make, alone)
    return outcome(losses, module.full_grads, module.full_state_dict)


def pipeline(of: Case | None = None, **options: Any) -> ap.ParallelModule:
    of = of or tied_case()
    options = {"mode": "propagate", "microbatches": 4, "backend": "virtual", **DELAYED, **options}
    return ap.parallelize(of.model, of.args, **options)


@pytest.mark.parametrize(
    ("p", "microbatches", "name"),
    [(2, 2, "sgd"), (2, 4, "adamw"), (3, 4, "momentum"), (4, 4, "adamw"), (4, 8, "sgd")],
)
def test_parity(p: int, microbatches: int, name: str) -> None:
    module = pipeline(mesh=ap.Mesh(pp=p), microbatches=microbatches)
    optimizer = OPTIMIZERS[name](module.parameters())
    assert_equal(run(module, tied_case(), optimizer), expected(name))


@pytest.mark.parametrize("states", ["whole", "zero1", "zero3"])
def test_parity_inside_stages(states: str) -> None:
    of = megatron(tied_case(0.2).fresh())
    module = pipeline(of, mesh=ap.Mesh(pp=2, dp=2, tp=2), states=states, check=True)
    assert_equal(run(module, of, OPTIMIZERS["adamw"](module.parameters())), dropping())


@pytest.mark.parametrize("p", [2, 3, 4])
def test_stashing_reads_the_newest_weights_of_each_stage(p: int) -> None:
    """An update follows each batch, of gradients that are p - 1 - s updates old on stage s."""
    module = pipeline(untied(), mesh=ap.Mesh(pp=p), **STASHED)
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    reference = plain_outcome(untied(), OPTIMIZERS["adamw"], delays_of(module))
    assert_equal(run(module, untied(), optimizer), reference)
    for rank, memory in module.memory(optimizer).ranks.items():
        names = module.program.stages[rank].holds("parameter")
        one = sum(p.nbytes for n, p in module.named_parameters() if n in names)
        assert memory["parameters"].held == memory["parameters"].planned == (p - rank) * one


def test_vertical_synchronisation_reads_one_version_on_all_stages() -> None:
    options = {**STASHED, "schedule_options": {"vertical_sync": True}}
    module = pipeline(mesh=ap.Mesh(pp=3), **options)
    optimizer = OPTIMIZERS["momentum"](module.parameters())
    assert {*delays_of(module).values()} == {2}
    reference = plain_outcome(tied_case(), OPTIMIZERS["momentum"], delays_of(module))
    assert_equal(run(module, tied_case(), optimizer), reference)


def test_each_rank_does_the_actions_of_the_schedule_without_a_drain() -> None:
    module = pipeline(mesh=ap.Mesh(pp=4))
    orders: dict[int, list[Action]] = {rank: [] for rank in range(4)}
    peaks = dict.fromkeys(range(4), 0.0)
    for _ in module.run(batches(tied_case()), OPTIMIZERS["sgd"](module.parameters())):
        for rank, record in module.backend.recorded.items():
            orders[rank] += record.order
            peaks[rank] = max(peaks[rank], record.peak_activations)
    whole = continued(module.plan.pipelining.schedule, STEPS)
    assert [tuple(order) for order in orders.values()] == [*whole.orders]
    assert tuple(peaks.values()) == ap.pipeline.simulate(whole).peak_activations == (4, 3, 2, 1)


@pytest.mark.parametrize(("name", "m"), [("pipedream-2bw", 5), ("pipedream", 1)])
def test_endless_steps_are_those_that_the_checker_has_seen(name: str, m: int) -> None:
    schedule = ap.pipeline.schedule(name, stages=4, microbatches=m)
    steps, whole = ContinuedSteps(schedule), continued(schedule, 7)
    for rank in range(4):
        orders = [steps.order(rank, step, 7) for step in range(7)]
        assert sum(orders, ()) == whole.orders[rank]
        endless = [a for step in range(12) for a in steps.order(rank, step)]
        for at, action in enumerate(endless):
            assert steps.place(rank, action.kind, action.stage, action.microbatches[0]) == at
        assert steps.last_place(rank, 11) == len(endless) - 1


def test_a_loop_that_ends_early_goes_on_with_another_run() -> None:
    module, reference = pipeline(mesh=ap.Mesh(pp=4)), expected("adamw")
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    losses = list[Tensor]()
    for loss in module.run(batches(tied_case()), optimizer):
        losses.append(loss)
        if len(losses) == 2:
            break
    optimizer.zero_grad()
    losses.append(module.step(*batches(tied_case())[2]))
    optimizer.step()
    losses += module.run(iter(batches(tied_case())[3:]), optimizer)
    actual = Outcome(losses, {}, module.full_state_dict())
    assert_equal(actual, Outcome(reference.losses, {}, reference.state))


def test_a_synchronous_plan_runs_step_by_step() -> None:
    def losses(loop: Callable[..., Iterable[Tensor]]) -> list[float]:
        module = pipeline(mesh=ap.Mesh(pp=2), schedule="1f1b", asynchronous=False)
        optimizer = OPTIMIZERS["sgd"](module.parameters())
        return [float(loss) for loss in loop(module, optimizer)]

    def by_hand(module: ap.ParallelModule, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        for batch in batches(tied_case()):
            optimizer.zero_grad()
            yield module.step(*batch)
            optimizer.step()

    assert losses(by_hand) == losses(lambda module, o: module.run(batches(tied_case()), o))


def cases() -> list[tuple[Case, None]]:
    """Return what is captured before the ranks are there."""
    return [(tied_case(), None), (untied(), None)]


@cache
def untied() -> Case:
    sizes = {"layers": 4, "batch": 8, "hidden": 16, "heads": 2, "sequence": 4, "vocabulary": 19}
    return gpt(**sizes, tied=False)


WORLDS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("adamw", {"mesh": ap.Mesh(pp=2), "microbatches": 2}),
        ("adamw", {"mesh": ap.Mesh(pp=2), **STASHED}),
    ],
    4: [
        ("momentum", {"mesh": ap.Mesh(pp=4), "microbatches": 4}),
        ("momentum", {"mesh": ap.Mesh(pp=4), **STASHED}),
        ("adamw", {"mesh": ap.Mesh(pp=2, dp=2), "microbatches": 2, "states": "zero1"}),
        ("adamw", {"mesh": ap.Mesh(pp=2, dp=2), "microbatches": 2, "states": "zero3"}),
    ],
}


def on_ranks(say: Callable[[str], None], ranks: int) -> None:
    """Compare runs with one process, one of them in two parts."""
    for name, options in WORLDS[ranks]:
        of = untied() if "schedule" in options else tied_case()
        module = pipeline(of, backend="torch", **options)
        optimizer = OPTIMIZERS[name](module.parameters())
        reference = plain_outcome(of, OPTIMIZERS[name], delays_of(module))
        assert_equal(run(module, of, optimizer), reference)
        (held,) = module.memory(optimizer).ranks.values()
        assert held["parameters"].held == held["parameters"].planned
        module.close()
        say(f"{name} {options}")
    module = pipeline(backend="torch", **WORLDS[ranks][0][1])
    optimizer = OPTIMIZERS[WORLDS[ranks][0][0]](module.parameters())
    losses = list[Tensor]()
    for loss in module.run(batches(tied_case()), optimizer):
        losses.append(loss)
        if len(losses) == 2:
            break
    losses += module.run(batches(tied_case())[2:], optimizer)
    reference = expected(WORLDS[ranks][0][0])
    actual = Outcome(losses, {}, module.full_state_dict())
    assert_equal(actual, Outcome(reference.losses, {}, reference.state))
    say("in two parts")


@pytest.mark.parametrize("ranks", WORLDS)
def test_parity_on_processes(ranks: int) -> None:
    heard = dict[int, int]()

    def count(rank: int, _: str) -> None:
        heard[rank] = heard.get(rank, 0) + 1

    launch_forked(cases, partial(on_ranks, ranks=ranks), ranks, heard=count)
    assert heard == dict.fromkeys(range(ranks), len(WORLDS[ranks]) + 1)


def test_what_is_refused() -> None:
    of = tied_case()
    module = pipeline(mesh=ap.Mesh(pp=2))
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    for inside, message in (
        (lambda: module.step(*of.args), "inside of module.run"),
        (lambda: module.load_state_dict(module.full_state_dict()), "loaded inside of module.run"),
    ):
        for _ in module.run(batches(of), optimizer):
            with pytest.raises(InvalidInput, match=message):
                inside()
            break
    odd = [*batches(of)[:2], tuple(tensor[:4] for tensor in of.args)]
    with pytest.raises(InvalidInput, match="sizes, dtypes and plain values of the first"):
        list(module.run(odd, optimizer))
    assert list(module.run([], optimizer)) == []
    hosted = pipeline(mesh=ap.Mesh(pp=2), states=ap.States(**ON_HOST))
    with pytest.raises(InvalidInput, match="on the host"):
        list(hosted.run(batches(of), OPTIMIZERS["sgd"](hosted.parameters())))


def test_the_predicted_time_is_that_of_steps_without_a_drain() -> None:
    def plan(**options: Any) -> ap.Plan:
        options = {"mode": "propagate", "mesh": ap.Mesh(pp=4), "microbatches": 4, **options}
        return ap.plan(untied().model, untied().args, **options)

    drained, full = plan(schedule="1f1b"), plan(**DELAYED)
    timeline = full.step.timeline
    assert timeline is not None
    assert full.seconds == pytest.approx(full.step.cost.seconds, rel=1e-9)
    assert full.seconds == pytest.approx(timeline.step_time - timeline.drain)
    assert max(timeline.busy) <= full.seconds < 0.8 * drained.seconds
    stashed = plan(**STASHED, asynchronous=True)
    assert [*stashed.pipelining.schedule.delays] == [3, 2, 1, 0]
    assert stashed.seconds < 0.5 * stashed.step.timeline.step_time


def test_the_automatic_choice_weighs_it_only_where_it_is_allowed() -> None:
    options: dict[str, Any] = {"mesh": ap.Mesh(pp=2), "microbatches": 4}
    of = untied()
    allowed = ap.plan(of.model, of.args, asynchronous=True, **options)
    others = ap.plan(of.model, of.args, **options)
    assert allowed.pipelining.schedule.name == "pipedream-2bw"
    assert not any(others.pipelining.schedule.delays)
    assert allowed.seconds < others.seconds
