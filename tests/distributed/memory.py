"""What ranks hold at most in a step, as torch's allocator tells, beside what the plan says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import autopar as ap
from tests import models
from tests.models import Case
from tests.test_precision import in_float32

# In float32: convolutions in float64 take room of their own on a CPU.
CASES = {
    "gpt": lambda: in_float32(models.gpt(hidden=128, sequence=64, vocabulary=256)),
    "llama": lambda: in_float32(models.llama(hidden=128, sequence=64, vocabulary=256)),
    "resnet": lambda: in_float32(models.resnet(width=32, size=16)),
}
case_of = cache(lambda name: CASES[name]())
WAYS = [
    ("gpt", {"states": "whole"}),
    ("gpt", {"states": "zero1"}),
    ("gpt", {"recompute": "full"}),
    ("gpt", {"recompute": "selective"}),
    ("gpt", {"microbatches": 2}),
    ("llama", {"states": "zero2"}),
    ("resnet", {"states": "zero1"}),
    ("gpt", {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 4}),
    ("gpt", {"mesh": ap.Mesh(pp=2), "schedule": "zb-h1", "microbatches": 4, "recompute": "full"}),
    ("llama", {"mesh": ap.Mesh(pp=2), "schedule": "zb-h1", "microbatches": 4}),
]


def cases() -> list[tuple[Case, None]]:
    """What is captured before the ranks are there."""
    return [(case_of(name), None) for name in CASES]


def most_made(run: Callable[[], object]) -> int:
    """The most bytes that are allocated at one time in a call, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    made = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        made += event.nbytes()
        most = max(most, made)
    return most


def held(tensors: list[Tensor]) -> int:
    """Bytes of the storages of this rank's pieces."""
    pieces = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = [piece.untyped_storage() for piece in pieces]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measured(case: Case, **options: object) -> tuple[int, float]:
    """Bytes at the peak of a step, in which an optimizer has states, and those of the plan for
    this rank."""
    options = {"mesh": ap.Mesh(dp=2), "mode": "data"} | options
    module = ap.parallelize(case.model, case.args, case.kwargs, **options)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    for _ in range(2):
        module.step(*case.args, **case.kwargs)
        optimizer.step()
        optimizer.zero_grad()
    states = [v for kept in optimizer.state.values() for v in kept.values()]
    before = held([*module.parameters(), *module.buffers(), *states])
    made = most_made(lambda: module.step(*case.args, **case.kwargs))
    place = module.plan.whole_mesh.coordinate(dist.get_rank()).get("pp", 0)
    memory = module.plan.memories[place]
    module.close()
    there = memory.host_parameters + memory.host_optimizer  # here the host is the same memory
    return before + made, memory.peak - memory.inputs + there  # inputs were there before


def run(say: Callable[[str], None]) -> list[tuple[str, float]]:
    """Of every way, the measured bytes over the planned ones, on the rank that holds most."""
    warnings.simplefilter("ignore")
    ratios = []
    for name, options in WAYS:
        found, planned = measured(case_of(name), **options)
        ratio = torch.tensor(found / planned)
        dist.all_reduce(ratio, dist.ReduceOp.MAX)
        ratios.append((f"{name} {options}", float(ratio)))
    return ratios
