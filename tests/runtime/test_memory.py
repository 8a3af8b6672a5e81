"""What a parallel module says that its ranks hold."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

import autopar as ap
from autopar.runtime.observation.memory_in_use import MemoryWatch, local_bytes
from tests import models
from tests.toy import machines


def trained(**options: object) -> tuple[ap.ParallelModule, torch.optim.Optimizer]:
    case = models.shared("gpt", layers=2)
    module = ap.parallelize(case.model, case.args, case.kwargs, backend="virtual", **options)
    optimizer = torch.optim.AdamW(module.parameters())
    module.step(*case.args, **case.kwargs)
    optimizer.step()
    return module, optimizer


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": ap.Mesh(dp=2), "mode": "data", "states": "zero3"},
        {"mesh": ap.Mesh(pp=2), "mode": "propagate", "microbatches": 2},
    ],
    ids=str,
)
def test_ranks_of_the_virtual_mesh_hold_what_the_plan_says(options: dict) -> None:
    module, optimizer = trained(**options)
    memory = module.memory(optimizer)
    assert list(memory) == list(memory.ranks) == [0, 1]
    assert list(memory[0]) == list(memory[0].kinds)
    numbers = 8 * len(list(module.parameters()))  # of steps, which AdamW counts for each
    for rank in memory.ranks:
        for kind in ("parameters", "gradients", "buffers"):
            assert memory[rank][kind].held == memory[rank][kind].planned
        kept = memory[rank]["optimizer"]
        assert 0 < kept.held - kept.planned <= numbers
        assert memory[rank]["peak"].planned == (
            module.plan.memories[rank if "pp" in options["mesh"] else 0].peak
            - module.plan.memory.inputs
        )


def test_what_nobody_knows_is_said_to_be_unknown() -> None:
    module, optimizer = trained(mesh=ap.Mesh(dp=2), mode="data")
    with module.watching_memory():
        pass
    first = module.memory()[0]
    assert first["optimizer"].held is None
    assert first["peak"].held is None
    assert first["peak"].planned < module.memory(optimizer)[0]["peak"].planned
    assert first.to_json()["parameters"] == {"held": first["parameters"].held} | {
        "planned": first["parameters"].planned
    }
    text = str(module.memory())
    assert "rank 1" in text
    assert "not known" in text
    assert text.count("planned peak is without the optimizer's states") == 1
    assert "without" not in str(module.memory(optimizer))
    optimizer.zero_grad()
    assert module.memory()[0]["gradients"].held == 0


def test_what_is_no_memory_of_this_module_is_refused() -> None:
    module, _ = trained(mesh=ap.Mesh(dp=2), mode="data")
    other = torch.optim.SGD(models.shared("mlp").model.parameters())
    asked = {
        "of type str": lambda: module.memory("x"),
        "has none of the module's parameters": lambda: module.memory(other),
        "one of 0, 1": lambda: module.memory()[7],
        "a kind of memory is one of": lambda: module.memory()[0]["params"],
    }
    for said, ask in asked.items():
        with pytest.raises(ap.InvalidInput, match=said):
            ask()


@pytest.mark.parametrize("where", ["optimizer", "parameters and optimizer"])
def test_gradients_that_go_to_a_host_which_is_the_device_are_planned_once(where: str) -> None:
    case = models.mlp(layers=3)
    with_parameters = {"parameters_device": "host"} if "parameters" in where else {}
    states = ap.States("all", "all", "all", optimizer_device="host", **with_parameters)
    about = {"cluster": machines(4, 1e9, 1e-6), "pipeline": None, "states": states}
    module = ap.parallelize(case.model, case.args, case.kwargs, backend="virtual", **about)
    module.step(*case.args, **case.kwargs)
    held = module.memory()
    for gradients in (held[rank]["gradients"] for rank in range(4)):
        assert gradients.held == gradients.planned


def test_what_another_thread_frees_is_gone_from_the_peak() -> None:
    with MemoryWatch(torch.device("cpu")) as watch:
        for _ in range(3):
            last_holder = [torch.empty(1000)]
            thread = Thread(target=last_holder.clear)
            thread.start()
            thread.join()
            torch.empty(500)
    assert watch.most == 4000


def test_memory_that_tensors_share_is_counted_once() -> None:
    weight = torch.zeros(4, 4)
    tensors = {"parameters": [weight, weight[0]], "buffers": [weight.T]}
    held = local_bytes(tensors, torch.device("cpu"))
    assert held == {"parameters": weight.nbytes, "buffers": 0}
