"""One training step of a GPT whose states are cut, by autopar and by torch, paired in one run.

    torchrun --nproc-per-node 2 -m benchmarks.states [--rounds 20] [--hidden 256]

What is timed: clearing the gradients, forward and backward of one global batch, and a step of
AdamW, on ranks that start together; and the same without AdamW. The parameters of autopar and FSDP2
are DTensors: torch's optimizers handle them one by one in Python, fused ones together, so all are
fused here. Every round runs each contestant once, in shuffled order, and counts its slowest rank.
Each process computes with one thread. Memory is counted apart, by torch's profiler: the most bytes
that a contestant has allocated at a time, from its making on.

    zero3            autopar (states="zero3"), fsdp2 (fully_shard, block by block)
    zero3, a step    autopar (copies live a step), fsdp2 (reshard_after_forward=False)
    zero1            autopar (states="zero1"), ddp with ZeroRedundancyOptimizer
    whole            autopar (states="whole"), ddp

A case prints one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import autopar as ap
from benchmarks.gpt import GPT, Sizes, batch, gpt
from benchmarks.tensor_parallel import Step, measure

CASES = (
    Sizes(hidden=64, heads=4, sequence=32, batch=4, layers=4),
    Sizes(hidden=256, heads=4, sequence=128, batch=4, layers=4),
    Sizes(hidden=512, heads=8, sequence=128, batch=8, layers=4),
)
STEP = ap.States("all", "all", "all", lifetime="step")
ADAMW: dict[str, Any] = {"lr": 1e-6, "fused": True}
Made = tuple[nn.Module, Step, Step]  # a whole step; without the optimizer


def autopar_step(sizes: Sizes, states: Any) -> Made:
    """A step of autopar with a setting of its states; no rank ever has the whole model."""
    with torch.device("meta"):
        model = GPT(sizes)
    mesh = ap.Mesh(dp=dist.get_world_size())
    ids, labels = batch(sizes)
    torch.manual_seed(0)
    module = ap.parallelize(model, (ids, labels), mesh=mesh, mode="data", states=states)
    update = torch.optim.AdamW(module.parameters(), **ADAMW)
    return module, *steps(module, update, lambda: module.step(ids, labels))


def torch_step(sizes: Sizes, wrap: Callable[[GPT], tuple[nn.Module, Any]]) -> Made:
    """The same by torch, on this rank's part of the batch."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ids, labels = (piece.chunk(world)[rank] for piece in batch(sizes))
    module, update = wrap(gpt(sizes))

    def forward_and_backward() -> Tensor:
        loss = module(ids, labels)
        loss.backward()
        return loss.detach()

    return module, *steps(module, update, forward_and_backward)


def steps(module: nn.Module, update: Any, forward_and_backward: Step) -> tuple[Step, Step]:
    def without_update() -> Tensor:
        module.zero_grad(set_to_none=True)
        return forward_and_backward()

    def step() -> Tensor:
        loss = without_update()
        update.step()
        return loss

    return step, without_update


def fsdp2(reshard: bool) -> Callable[[GPT], tuple[nn.Module, Any]]:
    """Each block, and the rest, in a group."""

    def wrap(model: GPT) -> tuple[nn.Module, Any]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return model, torch.optim.AdamW(model.parameters(), **ADAMW)

    return wrap


def ddp(model: GPT) -> tuple[nn.Module, Any]:
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return module, torch.optim.AdamW(module.parameters(), **ADAMW)


def ddp_with_zero(model: GPT) -> tuple[nn.Module, Any]:
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(module.parameters())
    return module, ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **ADAMW)


KINDS: dict[str, dict[str, Callable[[Sizes], Made]]] = {
    "zero3": {
        "autopar": lambda sizes: autopar_step(sizes, "zero3"),
        "fsdp2": lambda sizes: torch_step(sizes, fsdp2(True)),
    },
    "zero3, a step": {
        "autopar": lambda sizes: autopar_step(sizes, STEP),
        "fsdp2": lambda sizes: torch_step(sizes, fsdp2(False)),
    },
    "zero1": {
        "autopar": lambda sizes: autopar_step(sizes, "zero1"),
        "ddp_zero": lambda sizes: torch_step(sizes, ddp_with_zero),
    },
    "whole": {
        "autopar": lambda sizes: autopar_step(sizes, "whole"),
        "ddp": lambda sizes: torch_step(sizes, ddp),
    },
}


def peak(make: Callable[[Sizes], Made], sizes: Sizes) -> int:
    """The most bytes that one contestant has allocated at a time in its third step."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        module, step, _ = make(sizes)
        for _ in range(2):
            step()
        with record_function("measured"):
            step()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    found = profiled.profiler.kineto_results.experimental_event_tree()
    events = []
    while found:
        event = found.pop()
        events.append(event)
        found += event.children
    begin = next(event.start_time_ns for event in events if event.name == "measured")
    most = 0
    held: dict[int, int] = {}  # bytes by address
    for event in sorted(events, key=lambda event: event.start_time_ns):
        kind, allocation = event.typed
        if kind == _EventType.Allocation:
            start, end = allocation.ptr, allocation.ptr + abs(allocation.alloc_size)
            # What a thread of gloo frees is not told: it is when others have its place.
            for other in [o for o, size in held.items() if o < end and start < o + size]:
                del held[other]
            if allocation.alloc_size > 0:
                held[start] = allocation.alloc_size
            if event.start_time_ns >= begin:
                most = max(most, sum(held.values()))
    del module, step
    return most


def report(kind: str, sizes: Sizes, rounds: int) -> None:
    """Check that both compute the same loss, measure, print the line of one case."""
    bytes_ = {name: peak(make, sizes) for name, make in KINDS[kind].items()}
    made = {name: make(sizes) for name, make in KINDS[kind].items()}
    losses = {}
    for name, (_, step, _) in made.items():
        loss = step().clone()
        if name != "autopar":  # that of a rank's own slice
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses[name] = float(loss)
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"the losses differ: {losses}")
    whole = measure({name: step for name, (_, step, _) in made.items()}, rounds)
    alone = measure({name: step for name, (_, _, step) in made.items()}, rounds)
    (other,) = set(made) - {"autopar"}

    def ratio(seconds: dict[str, list[float]]) -> float:
        return statistics.median(a / b for a, b in zip(seconds["autopar"], seconds[other]))

    line = {
        "kind": kind,
        "case": sizes.name,
        "ranks": dist.get_world_size(),
        "milliseconds": {n: round(1e3 * statistics.median(s), 3) for n, s in whole.items()},
        "autopar_over_other": round(ratio(whole), 3),
        "without_adamw": {n: round(1e3 * statistics.median(s), 3) for n, s in alone.items()},
        "without_adamw_over_other": round(ratio(alone), 3),
        "peak_megabytes": {name: round(one / 2**20, 3) for name, one in bytes_.items()},
    }
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--hidden", type=int, help="only the case of this size")
    parser.add_argument("--kind", choices=KINDS, help="only this comparison")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for sizes in CASES:
        if arguments.hidden in (None, sizes.hidden):
            for kind in KINDS:
                if arguments.kind in (None, kind):
                    report(kind, sizes, arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
