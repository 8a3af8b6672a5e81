"""PipeDream-2BW's rule: a step's gradients are those of the weights of the step before.

    W(t+1) = W(t) - lr * grad(W(t-1)),  W(-1) = W(0)

A single process that applies the same rule is the reference, for losses, every gradient of every
step, and the parameters after four updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import autopar as ap
from autopar.errors import InvalidInput
from autopar.pipeline import schedule
from tests.annotations import megatron
from tests.distributed.forked import launch_forked
from tests.models import Case, gpt
from tests.parity import Outcome, assert_equal

UPDATES = 4
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.2),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),
}
DELAYED = {"schedule": "pipedream-2bw", "asynchronous": True}


@cache
def case(dropout: float = 0.0) -> Case:
    """A GPT whose embedding is tied, so that the first and last stage share it."""
    sizes = {"layers": 4, "batch": 8, "hidden": 16, "heads": 2, "sequence": 4, "vocabulary": 19}
    return gpt(**sizes, dropout=dropout)


def batches(of: Case) -> list[tuple[Tensor, ...]]:
    """Another batch for each step."""
    return [tuple(tensor.roll(t, 0).roll(t, 1) for tensor in of.args) for t in range(UPDATES)]


def train(
    step: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    grads: Callable[[], dict[str, Tensor]],
    state: Callable[[], dict[str, Tensor]],
    of: Case,
) -> Outcome:
    torch.manual_seed(4)
    losses, gradients = list[Tensor](), dict[str, Tensor]()
    for t, batch in enumerate(batches(of)):
        losses.append(step(*batch).detach())
        gradients |= {f"{t}.{name}": gradient.clone() for name, gradient in grads().items()}
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(losses, gradients, {name: value.clone() for name, value in state().items()})


def parallel(module: ap.ParallelModule, of: Case, optimizer: torch.optim.Optimizer) -> Outcome:
    return train(module.step, optimizer, module.full_grads, module.full_state_dict, of)


def delayed(step: Callable[..., Tensor], parameters: Iterable[nn.Parameter]):
    """Return a step of one process at the values that the parameters had in the step before."""
    parameters = list(parameters)
    before: list[list[Tensor]] = []

    def run(*batch: Tensor) -> Tensor:
        newest = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, value in zip(parameters, before[-1] if before else newest):
                parameter.copy_(value)
        loss = step(*batch)
        with torch.no_grad():
            for parameter, value in zip(parameters, newest):
                parameter.copy_(value)
        before.append(newest)
        return loss

    return run


def plain_outcome(of: Case, make: Optimizer) -> Outcome:
    """The original model on one device."""
    alone = of.fresh()
    model = alone.model

    def step(*batch: Tensor) -> Tensor:
        loss = alone.loss(model(*batch))
        loss.backward()
        return loss

    def grads() -> dict[str, Tensor]:
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    run = delayed(step, model.parameters())
    return train(run, make(model.parameters()), grads, model.state_dict, of)


@cache
def expected(name: str) -> Outcome:
    return plain_outcome(case(), OPTIMIZERS[name])


@cache
def dropping() -> Outcome:
    """A synchronous program of one device, whose draws are those of every program."""
    alone = case(0.2).fresh()
    module = ap.parallelize(alone.model, alone.args, mesh=ap.Mesh(tp=1))
    run = delayed(module.step, module.parameters())
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    return train(run, optimizer, module.full_grads, module.full_state_dict, alone)


def pipeline(of: Case | None = None, **options) -> ap.ParallelModule:
    of = of or case()
    options = {"mode": "propagate", "microbatches": 4, "backend": "virtual", **DELAYED, **options}
    return ap.parallelize(of.model, of.args, **options)


@pytest.mark.parametrize(
    ("p", "microbatches", "name"),
    [(2, 2, "sgd"), (2, 4, "adamw"), (3, 4, "momentum"), (4, 4, "adamw"), (4, 8, "sgd")],
)
def test_parity_with_delayed_updates(p, microbatches, name):
    module = pipeline(mesh=ap.Mesh(pp=p), microbatches=microbatches)
    assert_equal(parallel(module, case(), OPTIMIZERS[name](module.parameters())), expected(name))
    made = module.plan.pipelining.schedule
    assert [*made.orders] == [tuple(r.order) for _, r in sorted(module.backend.recorded.items())]


@pytest.mark.parametrize("states", ["zero1", "zero3"])
def test_parity_inside_stages(states):
    of = megatron(case(0.2).fresh())
    module = pipeline(of, mesh=ap.Mesh(pp=2, dp=2, tp=2), states=states, check=True)
    assert_equal(parallel(module, of, OPTIMIZERS["adamw"](module.parameters())), dropping())


def cases() -> list[tuple[Case, None]]:
    """What is captured before the ranks are there."""
    return [(case(), None)]


def on_ranks(say: Callable[[str], None]) -> None:
    for make in (partial(ap.optimizer, torch.optim.AdamW), torch.optim.AdamW):
        module = ap.parallelize(
            case().model, case().args, mode="propagate", mesh=ap.Mesh(pp=2), microbatches=2,
            states="zero1", **DELAYED,
        )  # fmt: skip
        optimizer = make(module.parameters(), lr=1e-2, eps=1e-4)
        assert_equal(parallel(module, case(), optimizer), expected("adamw"))
        (held,) = module.memory(optimizer).ranks.values()
        assert held["parameters"].held == held["parameters"].planned
        say("done")


def test_parity_on_two_processes():
    heard: list[int] = []
    launch_forked(cases, on_ranks, 2, heard=lambda rank, _: heard.append(rank))
    assert sorted(heard) == [0, 0, 1, 1]


def test_the_second_version_is_planned_and_held(tmp_path):
    planned = pipeline(mesh=ap.Mesh(pp=2))
    planned.plan.save(tmp_path / "plan.json")
    two = ap.parallelize(
        case().model, case().args, plan=ap.Plan.load(tmp_path / "plan.json"), backend="virtual"
    )
    assert two.plan.pipelining.schedule == planned.plan.pipelining.schedule
    one = pipeline(mesh=ap.Mesh(pp=2), schedule="1f1b")
    two.step(*case().args)
    for rank, memory in two.memory().ranks.items():
        alone = one.memory().ranks[rank]["parameters"].held
        assert memory["parameters"].held == memory["parameters"].planned == 2 * alone
    assert "so another optimizer trajectory follows" in " ".join(str(two.plan).split())
    assert "trajectory" not in str(one.plan)
    two.close()


def test_a_loaded_state_begins_with_one_version(tmp_path):
    module, first = pipeline(mesh=ap.Mesh(pp=2)), batches(case())[0]
    start = module.full_state_dict()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)

    def losses() -> list[float]:
        found = []
        for _ in range(3):
            found.append(float(module.step(*first)))
            optimizer.step()
            optimizer.zero_grad()
        return found

    ap.save(tmp_path / "start", module)
    trained = losses()
    assert trained[0] == trained[1] != trained[2]  # W(-1) = W(0)
    module.load_state_dict(start)
    assert losses() == trained
    ap.load(tmp_path / "start", module)
    assert losses() == trained


@pytest.mark.parametrize("name", ["layers.0.up.weight", "norm.weight"])
def test_what_stops_to_learn_is_read_as_it_was_before(name):
    """A step after the freeze reads the others as they were an update ago, and this one, too."""
    alone = case().fresh()
    module, model = pipeline(mesh=ap.Mesh(pp=2)), alone.model
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2) for m in (module, model)]

    def plain_step(*batch: Tensor) -> Tensor:
        loss = alone.loss(model(*batch))
        loss.backward()
        return loss

    reference = delayed(plain_step, model.parameters())
    for t, batch in enumerate(2 * batches(alone)):
        for one in (module, model):
            dict(one.named_parameters())[name].requires_grad_(t not in (2, 3, 4, 6))
        assert_close(module.step(*batch), reference(*batch).detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = module.full_state_dict()
        for key, value in model.state_dict().items():
            assert_close(state[key], value)


def test_a_step_that_breaks_off_changes_no_version(monkeypatch):
    module, reference = pipeline(mesh=ap.Mesh(pp=2)), expected("sgd")
    optimizer, losses = OPTIMIZERS["sgd"](module.parameters()), []
    torch.manual_seed(4)
    for batch in batches(case()):
        with monkeypatch.context() as patched:
            patched.setattr(module.backend, "_carry_out", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                module.step(*batch)
        losses.append(module.step(*batch))
        with pytest.raises(InvalidInput, match="makes an update of each step"):
            module.step(*batch)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(Outcome(losses, {}, module.full_state_dict()), Outcome(
        reference.losses, {}, reference.state
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"asynchronous": False}, "remedy: asynchronous=True beside it"),
        ({"schedule": "pipedream"}, 'microbatches=1 with schedule="pipedream"'),
        ({"schedule": "pipedream", "microbatches": 1}, "stages 0 and 1, which share parameters"),
        ({"schedule_options": {"steps": 2}}, "a step makes one update"),
        ({"microbatches": 1}, "microbatches=2 or more"),
        ({"asynchronous": 1}, "asynchronous is True or False"),
        ({"schedule": schedule("pipedream", stages=2, microbatches=4)}, "a step makes one update"),
        ({"mesh": ap.Mesh(dp=2), "schedule": "auto"}, "asynchronous=True with"),
    ],
    ids=str,
)
def test_what_is_refused(options, message):
    with pytest.raises(InvalidInput) as error:
        pipeline(**{"mesh": ap.Mesh(pp=2), **options})
    assert message in str(error.value)


def test_verify_compares_one_step():
    options = {"mode": "propagate", "mesh": ap.Mesh(pp=2), "microbatches": 2, **DELAYED}
    assert ap.verify(case().model, case().args, steps=1, **options).ok
    with pytest.raises(InvalidInput, match="steps=1"):
        ap.verify(case().model, case().args, steps=2, **options)
