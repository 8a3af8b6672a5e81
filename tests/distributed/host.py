"""States on the host, on processes: what they compute, and what they hold on each side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import autopar as ap
from autopar.precision import Precision
from autopar.runtime.backends.host_copies import HostLink
from tests import models
from tests.distributed.memory import case_of, measured
from tests.distributed.states import parity
from tests.held import copies_of, held_by
from tests.models import Case
from tests.test_host import with_buffers_there


def cases() -> list[tuple[Case, Precision | None]]:
    """What is captured before the ranks are there."""
    ours = [small(), models.shared("gpt", layers=1), models.shared("gpt", layers=2), with_buffers()]
    ours += [embedded(), partly_there(), case_of("gpt")]
    return [*((case, None) for case in ours), (models.shared("gpt", layers=1), WIDE)]


small = partial(models.shared, "mlp", hidden=10, layers=4)
with_buffers = cache(with_buffers_there)
WIDE = Precision(compute=torch.float32, reduce=torch.float64)


ON_HOST = {"parameters_device": "host", "optimizer_device": "host"}
SETTINGS = [
    ap.States(optimizer_device="host"),
    ap.States(optimizer="all", optimizer_device="host"),
    ap.States("all", "all", "all", optimizer_device="host"),
    ap.States(**ON_HOST),
    ap.States(1, "all", "all", **ON_HOST),
    ap.States("all", "all", "all", **ON_HOST),
]
# The copies are slices of what hosts update.
SLICED = [
    ap.States("all", 1, 1, optimizer_device="host"),
    ap.States("all", 1, 1, **ON_HOST),
]


def trains_like_one_device(ranks: int) -> None:
    mesh = ap.Mesh(dp=ranks)
    for number, states in enumerate(SETTINGS):
        if number % 3:
            parity(small(), states, mesh=mesh)
        else:
            parity(models.shared("gpt", layers=1), states, mesh=mesh, microbatches=2)
    for states in SLICED:
        parity(small(), states, mesh=mesh, microbatches=2)
    parity(
        models.shared("gpt", layers=2), SETTINGS[-1], mesh=mesh, microbatches=2, recompute="full"
    )


def trains_in_pipelines(ranks: int) -> None:
    for schedule, states in (("zb-h1", SETTINGS[3]), ("chimera", SETTINGS[0])):
        options = {"schedule": schedule, "microbatches": 2, "mesh": ap.Mesh(pp=2)}
        parity(models.shared("gpt", layers=2), states, **options)


def computes_in_another_dtype(ranks: int) -> None:
    """The copies on either side are in the compute dtype."""
    case, mesh = models.shared("gpt", layers=1), ap.Mesh(dp=ranks)
    found = []
    for states in ("zero3", SETTINGS[5], ap.States("all", 1, 1), *SLICED):
        options = {"mesh": mesh, "mode": "data", "precision": WIDE, "states": states}
        module = ap.parallelize(case.model, case.args, case.kwargs, **options)
        module.step(*case.args, **case.kwargs)
        found.append(module.full_grads())
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=0)


@contextmanager
def crossing() -> Iterator[dict[str, list[int]]]:
    """The bytes that go up to the device and down to the host."""
    found: dict[str, list[int]] = {"up": [], "down": []}
    up, down = HostLink.upload, HostLink.download

    def counted_up(link: HostLink, targets: Any, sources: Any) -> Any:
        found["up"].append(sum(target.nbytes for target in targets))
        return up(link, targets, sources)

    def counted_down(link: HostLink, source: Any) -> Any:
        found["down"].append(source.nbytes)
        return down(link, source)

    with (
        patch.object(HostLink, "upload", counted_up),
        patch.object(HostLink, "download", counted_down),
    ):
        yield found


def holds_what_was_predicted(ranks: int) -> None:
    """To the byte, on each side."""
    for states in (SETTINGS[1], SETTINGS[5]):
        case = case_of("gpt")
        options = {"mesh": ap.Mesh(dp=ranks), "mode": "data", "states": states}
        module = ap.parallelize(case.model, case.args, case.kwargs, **options)
        optimizer = torch.optim.AdamW(module.parameters())
        with crossing() as crossed:
            module.step(*case.args, **case.kwargs)
        memory = module.plan.memory
        parameters = list(module.parameters())
        assert held_by(parameters) == memory.host_parameters
        assert held_by([p.grad for p in parameters]) == memory.host_gradients
        optimizer.step()
        kept = [v for one in optimizer.state.values() for v in one.values() if v.ndim]
        assert held_by(kept) == memory.host_optimizer
        assert memory.parameters == memory.optimizer == 0
        assert not held_by(copies_of(module)), "nothing stays on the device between steps"
        # What is cut alone crosses: down once, up once, or for forward and for backward.
        times = 1 if states.parameters_device == "device" else 2
        size = memory.host_parameters
        assert sum(crossed["down"]) == size
        assert size <= sum(crossed["up"]) <= times * size
        assert (sum(crossed["up"]) > size) == (times == 2)


def takes_what_was_predicted(ranks: int) -> None:
    """At most; here the host is the same memory."""
    for states in (SETTINGS[1], SETTINGS[3]):
        found, planned = measured(case_of("gpt"), states=states)
        assert abs(found / planned - 1) < 0.05, (str(states), found / planned)


def collects_and_loads(ranks: int) -> None:
    """Whole values, and clipping, as of a module on the device."""
    case = small()
    found = []
    for states in ("whole", SETTINGS[5]):
        options = {"mesh": ap.Mesh(dp=ranks), "mode": "data", "states": states}
        module = ap.parallelize(case.model, case.args, case.kwargs, **options)
        module.step(*case.args, **case.kwargs)
        norm = module.clip_grad_norm_(0.01)
        other = nn.utils.clip_grad_norm_(module.parameters(), 0.005)
        torch.optim.SGD(module.parameters(), 0.1, momentum=0.9).step()
        state = module.full_state_dict()
        module.load_state_dict({name: value + 1 for name, value in state.items()})
        found.append((norm, getattr(other, "full_tensor", lambda x=other: x)(), state))
        found.append(module.full_state_dict())
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[3])


@cache
def partly_there() -> Case:
    """An embedding, tied to what is on the device, and all of a block but its attention."""
    case = models.gpt(layers=1)
    ap.shard(case.model.tokens, device="host")
    ap.shard(case.model.layers[0], device="host")
    ap.shard(case.model.layers[0].attention, device="device")
    return case


@cache
def embedded() -> Case:
    case = models.gpt(layers=2)
    ap.shard(case.model.tokens, device="host")
    return case


def runs_modules_there(ranks: int) -> None:
    parity(partly_there(), SETTINGS[-1], mesh=ap.Mesh(dp=ranks), microbatches=2)
    options = {"schedule": "1f1b", "microbatches": 2, "mesh": ap.Mesh(pp=2)}
    parity(embedded(), "whole", **options)


def keeps_buffers_there(ranks: int) -> None:
    parity(with_buffers(), "zero1", mesh=ap.Mesh(dp=ranks))


CHECKS = (
    keeps_buffers_there,
    runs_modules_there,
    trains_like_one_device,
    trains_in_pipelines,
    computes_in_another_dtype,
    holds_what_was_predicted,
    takes_what_was_predicted,
    collects_and_loads,
)
