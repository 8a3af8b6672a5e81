"""One training step of a GPT whose states are cut, by autopar and by torch, paired in one run.

    torchrun --nproc-per-node 2 benchmarks/states.py [--rounds 20] [--hidden 256]

What is timed: clearing the gradients, forward and backward of one global batch, and a step of
AdamW, on ranks that start together. Every round runs each contestant once, in shuffled order, and
counts its slowest rank. Each process computes with one thread. Memory is counted apart, by
torch's profiler: the most bytes that a contestant has allocated at a time, from its making on.

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
from gpt import GPT, Sizes, batch, gpt
from tensor_parallel import Step, measure
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import autopar as ap

CASES = (
    Sizes(hidden=64, heads=4, sequence=32, batch=4, layers=4),
    Sizes(hidden=256, heads=4, sequence=128, batch=4, layers=4),
    Sizes(hidden=512, heads=8, sequence=128, batch=8, layers=4),
)
STEP = ap.States("all", "all", "all", lifetime="step")
Made = tuple[nn.Module, Step]


def autopar_step(sizes: Sizes, states: Any) -> Made:
    """A step of autopar with a setting of its states; no rank ever has the whole model."""
    with torch.device("meta"):
        model = GPT(sizes)
    mesh = ap.Mesh(dp=dist.get_world_size())
    ids, labels = batch(sizes)
    torch.manual_seed(0)
    module = ap.parallelize(model, (ids, labels), mesh=mesh, mode="data", states=states)
    update = torch.optim.AdamW(module.parameters(), lr=1e-6)
    return module, _step(module, update, lambda: module.step(ids, labels))


def torch_step(sizes: Sizes, wrap: Callable[[GPT], tuple[nn.Module, Any]]) -> Made:
    """The same by torch, on this rank's part of the batch."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ids, labels = (piece.chunk(world)[rank] for piece in batch(sizes))
    module, update = wrap(gpt(sizes))

    def forward_and_backward() -> Tensor:
        loss = module(ids, labels)
        loss.backward()
        return loss.detach()

    return module, _step(module, update, forward_and_backward)


def _step(module: nn.Module, update: Any, forward_and_backward: Step) -> Step:
    def step() -> Tensor:
        module.zero_grad(set_to_none=True)
        loss = forward_and_backward()
        update.step()
        return loss

    return step


def fsdp2(reshard: bool) -> Callable[[GPT], tuple[nn.Module, Any]]:
    """Each block, and the rest, in a group."""

    def wrap(model: GPT) -> tuple[nn.Module, Any]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-6)

    return wrap


def ddp(model: GPT) -> tuple[nn.Module, Any]:
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-6)


def ddp_with_zero(model: GPT) -> tuple[nn.Module, Any]:
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(module.parameters())
    return module, ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-6)


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
        module, step = make(sizes)
        for _ in range(2):
            step()
        with record_function("measured"):
            step()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == "measured")
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held if event.start_ns() >= begin else 0)
    del module, step
    return most


def report(kind: str, sizes: Sizes, rounds: int) -> None:
    """Check that both compute the same loss, measure, print the line of one case."""
    bytes_ = {name: peak(make, sizes) for name, make in KINDS[kind].items()}
    steps = {name: make(sizes)[1] for name, make in KINDS[kind].items()}
    losses = {}
    for name, step in steps.items():
        loss = step().clone()
        if name != "autopar":  # that of a rank's own slice
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses[name] = float(loss)
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"the losses differ: {losses}")
    seconds = measure(steps, rounds)
    (other,) = set(steps) - {"autopar"}
    ratios = [a / b for a, b in zip(seconds["autopar"], seconds[other])]
    line = {
        "kind": kind,
        "case": sizes.name,
        "ranks": dist.get_world_size(),
        "milliseconds": {n: round(1e3 * statistics.median(s), 3) for n, s in seconds.items()},
        "autopar_over_other": round(statistics.median(ratios), 3),
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
