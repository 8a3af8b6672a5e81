"""What ranks hold at most in a step, as torch's allocator tells, beside what the plan says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar as ap
from tests import models, unlearned
from tests.annotations import megatron
from tests.models import Case
from tests.test_precision import in_float32

# In float32, as models are.
CASES = {
    "gpt": lambda: in_float32(models.gpt(hidden=128, sequence=64, vocabulary=256)),
    # Whose two gradients of one parameter, and their sum, are more than anything else.
    "tied": lambda: in_float32(models.gpt(sequence=2, vocabulary=4096)),
    "llama": lambda: in_float32(models.llama(hidden=128, sequence=64, vocabulary=256)),
    "resnet": lambda: in_float32(models.resnet(width=32, size=16)),
    "megatron": lambda: megatron(CASES["gpt"]()),
    # In micro-batches of one row weights take most, and what runs again.
    "small-gpt2": lambda: models.gpt2(batch=8, layers=4),
    "small-llama": lambda: models.llama(batch=8, layers=4),
    "head": lambda: unlearned.pair("head", width=64, batch=4096)[0],
    "detached": lambda: unlearned.pair("detached", width=64, batch=4096)[0],
}
# A thread of a process group lets go of what it has sent when it is run again: on a busy machine
# later than the step goes on. The step that waits least for it shows what the program holds.
STEPS = 3
case_of = cache(lambda name: CASES[name]())
Ways = list[tuple[str, dict[str, Any]]]
WAYS: Ways = [
    ("gpt", {"states": "whole"}),
    ("gpt", {"states": "zero1"}),
    ("gpt", {"recompute": "full"}),
    ("gpt", {"recompute": "selective"}),
    ("gpt", {"microbatches": 2}),
    ("gpt", {"states": "zero2", "microbatches": 2}),
    ("gpt", {"states": "zero3", "recompute": "full"}),
    ("gpt", {"states": ap.States("all", 1, "all"), "microbatches": 2}),
    ("gpt", {"states": ap.States("all", 1, 1)}),
    ("gpt", {"recompute": ap.Recompute("full", keep="host")}),
    ("gpt", {"mesh": ap.Mesh(tp=2), "recompute": ap.Recompute("full", keep="cut")}),
    ("tied", {"states": "whole"}),
    ("tied", {"states": "zero2"}),
    ("tied", {"microbatches": 4}),
    ("tied", {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 4}),
    ("llama", {"states": "zero2"}),
    ("llama", {"states": "zero3", "recompute": "full"}),
    ("resnet", {"states": "zero1"}),
    ("resnet", {"states": "zero3", "recompute": "full"}),
    ("head", {"states": "whole"}),
    ("detached", {"states": "zero3"}),
    ("megatron", {"mesh": ap.Mesh(tp=2), "mode": "auto"}),
    ("megatron", {"mesh": ap.Mesh(tp=2), "mode": "auto", "recompute": "full"}),
    ("gpt", {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 4}),
    ("gpt", {"mesh": ap.Mesh(pp=2), "schedule": "zb-h1", "microbatches": 4, "recompute": "full"}),
    ("llama", {"mesh": ap.Mesh(pp=2), "schedule": "zb-h1", "microbatches": 4}),
    ("resnet", {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 4}),
]


# On one rank, where nothing is sent, to a thousandth.
ALONE: Ways = [
    ("tied", {}),
    ("tied", {"microbatches": 4, "recompute": "full"}),
    ("small-gpt2", {"microbatches": 4, "recompute": "selective"}),
    ("small-llama", {"microbatches": 4, "recompute": "selective"}),
    ("small-llama", {"microbatches": 4, "recompute": "full"}),
    ("gpt", {"recompute": "selective"}),
]


def cases(ways: Ways) -> list[tuple[Case, None]]:
    """What is captured before the ranks are there."""
    return [(case_of(name), None) for name in dict.fromkeys(name for name, _ in ways)]


def measured(case: Case, **options: object) -> tuple[float, float]:
    """Bytes at the peak of a step, in which an optimizer has states, and those of the plan for
    this rank."""
    options = {"mesh": ap.Mesh(dp=2), "mode": "data"} | options
    module = ap.parallelize(case.model, case.args, case.kwargs, **options)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    peaks = []
    for _ in range(1 + STEPS):
        with module.watching_memory():
            module.step(*case.args, **case.kwargs)
        found = module.memory(optimizer)[dist.get_rank()]
        peaks.append(found["peak"].held)
        optimizer.step()
        optimizer.zero_grad()
    module.close()
    for kind in ("parameters", "optimizer", "buffers"):
        assert found[kind].held == pytest.approx(found[kind].planned, rel=1e-3), (options, kind)
    assert found["gathered"].held == 0
    # A bucket of gradients also has the sum of the loss.
    assert 0 < found["gradients"].held <= found["gradients"].planned + 8
    return min(peaks[1:]), found["peak"].planned


def run(say: Callable[[str], None], ways: Ways) -> list[tuple[str, float]]:
    """Of every way, the measured bytes over the planned ones, on the rank that holds most."""
    warnings.simplefilter("ignore")
    ratios = []
    for name, options in ways:
        found, planned = measured(case_of(name), **options)
        ratio = torch.tensor(found / planned)
        dist.all_reduce(ratio, dist.ReduceOp.MAX)
        ratios.append((f"{name} {options}", float(ratio)))
    return ratios


def alone(say: Callable[[str], None], ways: Ways) -> list[tuple[str, float]]:
    """The same on one rank."""
    warnings.simplefilter("ignore")
    ratios = []
    for name, options in ways:
        found, planned = measured(case_of(name), **{"mesh": ap.Mesh(x=1), **options})
        ratios.append((f"{name} {options}", found / planned))
    return ratios
