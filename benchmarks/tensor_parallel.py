"""One training step of a GPT in parallel, by autopar and by three others, paired in one run.

    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel [--rounds 40] [--optimizer]

What is timed: clearing the gradients, forward and backward of one global batch, on ranks that
start together; with --optimizer also a step of AdamW. Every round runs each contestant once, in
shuffled order, and counts its slowest rank. Each process computes with one thread. A case prints
one line of JSON: medians in milliseconds, and medians of the ratios within a round. What planning
and rewriting take is apart from it.

    tensor parallel   autopar (annotated Megatron), by_hand (f and g), dtensor (parallelize_module)
    reductions        autopar, waiting (autopar, gradients of weights after reductions): the same
                      plan, and with the residual cut along the sequence
    products          autopar with its rows cut along the sequence, by collectives, and by products
                      in steps around the axis (gathers, scatters, both), by_hand
    data parallel     autopar (mode="data"), ddp, ddp_views (gradient_as_bucket_view=True)
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import autopar as ap
from autopar import passes
from autopar.passes.linear_reductions import hide_reductions
from autopar.strategies import Strategy
from benchmarks.gpt import GPT, Sizes, batch, gpt
from benchmarks.megatron import by_hand

CASES = (
    Sizes(hidden=64, heads=4, sequence=32, batch=4),
    Sizes(hidden=128, heads=4, sequence=64, batch=4),
    Sizes(hidden=256, heads=4, sequence=128, batch=4),
    Sizes(hidden=512, heads=8, sequence=128, batch=8),
    Sizes(hidden=1024, heads=16, sequence=128, batch=8),
)
Step = Callable[[], Tensor]


def annotated(model: GPT) -> GPT:
    """Megatron's plan: columns, then rows."""
    for block in model.blocks:
        for columns in (block.qkv, block.up):
            ap.shard(columns, params={"weight": ("tp", None), "bias": ("tp",)})
        for rows in (block.out, block.down):
            ap.shard(rows, params={"weight": (None, "tp")})
    return model


def along_sequence(model: GPT) -> GPT:
    """The same with the inputs of norms cut along the sequence."""
    for block in annotated(model).blocks:
        for norm in (block.norm1, block.norm2):
            ap.shard(norm, ((None, "tp", None),))
    return model


@contextmanager
def reductions_first() -> Iterator[None]:
    """Ranks whose programs are made here wait for reductions before they go on."""
    others = tuple(one for one in passes.LOCAL_PASSES if one.run is not hide_reductions)
    with patch.object(passes, "LOCAL_PASSES", others):
        yield


def as_dtensors(model: GPT) -> nn.Module:
    """The same plan in torch's own words."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "qkv": ColwiseParallel(),
        "out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def around_the_axis(plan: ap.Plan, factors: Mapping[str, str]) -> ap.Plan:
    """The same with products in steps, by the factor that `tp` cuts now."""
    joints = {Strategy.of(**{factor: "tp"}): name for factor, name in factors.items()}
    strategies = {
        name: Strategy.of(**{joints[strategy]: "tp"}) if strategy in joints else strategy
        for name, strategy in plan.decisions.strategies.items()
    }
    return plan.with_program(decisions=replace(plan.decisions, strategies=strategies))


def autopar_steps(
    sizes: Sizes,
    optimizer: bool,
    model: GPT,
    around: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> tuple[Step, dict[str, float]]:
    """A step by autopar, and the seconds that planning and the rest of the road took."""
    start = time.perf_counter()
    plan = around_the_axis(ap.plan(model, batch(sizes), **options), around)
    planned = time.perf_counter()
    program = plan.program
    rewritten = time.perf_counter()
    module = ap.parallelize(model, batch(sizes), plan=plan)
    seconds = {
        "plan": planned - start,
        "rewrite": rewritten - planned,
        "place": time.perf_counter() - rewritten,
    }
    assert program is plan.program
    ids, labels = batch(sizes)
    return _step(module, optimizer, lambda: module.step(ids, labels)), seconds


def torch_step(module: nn.Module, ids: Tensor, labels: Tensor, optimizer: bool) -> Step:
    """The same step as one writes it in torch."""

    def forward_and_backward() -> Tensor:
        loss = module(ids, labels)
        loss.backward()
        return loss.detach()

    return _step(module, optimizer, forward_and_backward)


def _step(module: nn.Module, optimizer: bool, forward_and_backward: Step) -> Step:
    # Tiny steps: the numbers stay close to those of the first.
    update = torch.optim.AdamW(module.parameters(), lr=1e-6) if optimizer else None

    def step() -> Tensor:
        module.zero_grad(set_to_none=True)
        loss = forward_and_backward()
        if update is not None:
            update.step()
        return loss

    return step


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, those of the slowest rank."""
    return measure_both(steps, rounds)[0]


def measure_both(
    steps: dict[str, Step], rounds: int, between: Callable[[], None] = lambda: None
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each contestant in each round, those of the slowest rank; and seconds that
    processors computed, those of all ranks, of which other programs on the machine take fewer.

    `between`: what is run before each contestant, and not counted."""
    for step in [*steps.values()] * 3:
        step()
    names = list(steps)
    # In shuffled order, the same on all ranks: a step finds the memory that the last one left.
    order = random.Random(0)
    passed: dict[str, list[float]] = {name: [] for name in names}
    computed: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            between()
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            steps[name]()
            computed[name].append(time.process_time() - busy)
            passed[name].append(time.perf_counter() - start)
    slowest = torch.tensor([passed[name] for name in names])
    of_all = torch.tensor([computed[name] for name in names])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(of_all)
    return dict(zip(names, slowest.tolist())), dict(zip(names, of_all.tolist()))


def report(
    kind: str, sizes: Sizes, steps: dict[str, Step], rounds: int, road: dict[str, float]
) -> None:
    """Check that all compute the same loss, measure, print the line of one case."""
    losses = {name: float(step()) for name, step in steps.items()}
    if kind == "data":  # DDP's loss is that of a rank's own slice
        losses = {name: _mean(loss) for name, loss in losses.items()}
    reference = losses["autopar"]
    wrong = {name: loss for name, loss in losses.items() if abs(loss - reference) > 1e-4}
    if wrong:
        raise SystemExit(f"the losses differ: {losses}")
    seconds = measure(steps, rounds)
    own = seconds["autopar"]
    line = {
        "kind": kind,
        "case": sizes.name,
        "milliseconds": {n: round(1e3 * statistics.median(s), 3) for n, s in seconds.items()},
        "autopar_over": {
            name: round(statistics.median(a / b for a, b in zip(own, other)), 3)
            for name, other in seconds.items()
            if name != "autopar"
        },
        "seconds_before": {name: round(value, 3) for name, value in road.items()},
    }
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)


def _mean(loss: float) -> float:
    total = torch.tensor(loss)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def tensor_parallel(sizes: Sizes, rounds: int, optimizer: bool) -> None:
    """autopar's Megatron against two others."""
    ids, labels = batch(sizes)
    mesh = ap.Mesh(tp=dist.get_world_size())
    own, road = autopar_steps(sizes, optimizer, annotated(gpt(sizes)), mesh=mesh, mode="propagate")
    steps = {
        "autopar": own,
        "by_hand": torch_step(by_hand(gpt(sizes)), ids, labels, optimizer),
        "dtensor": torch_step(as_dtensors(gpt(sizes)), ids, labels, optimizer),
    }
    report("tensor", sizes, steps, rounds, road)


def reductions(sizes: Sizes, rounds: int, optimizer: bool) -> None:
    """Reductions beside the gradients of weights against reductions before them."""
    options: dict[str, Any] = {"mesh": ap.Mesh(tp=dist.get_world_size()), "mode": "propagate"}
    for kind, shard in (("reduced", annotated), ("scattered", along_sequence)):
        own, road = autopar_steps(sizes, optimizer, shard(gpt(sizes)), **options)
        with reductions_first():
            other, _ = autopar_steps(sizes, optimizer, shard(gpt(sizes)), **options)
            other()
        report(kind, sizes, {"autopar": own, "waiting": other}, rounds, road)


def products(sizes: Sizes, rounds: int, optimizer: bool) -> None:
    """Products in steps around the axis against collectives before and after them."""
    ids, labels = batch(sizes)
    mesh = ap.Mesh(tp=dist.get_world_size())
    ways: dict[str, dict[str, str]] = {
        "autopar": {},
        "gathers": {"o": "gather"},
        "scatters": {"i": "scatter"},
        "both": {"o": "gather", "i": "scatter"},
    }
    steps = {}
    for name, around in ways.items():
        model = along_sequence(gpt(sizes))
        about: dict[str, Any] = {"mesh": mesh, "mode": "propagate"}
        steps[name], _ = autopar_steps(sizes, optimizer, model, around, **about)
    steps["by_hand"] = torch_step(by_hand(gpt(sizes)), ids, labels, optimizer)
    report("products", sizes, steps, rounds, {})


def data_parallel(sizes: Sizes, rounds: int, optimizer: bool) -> None:
    """autopar's data parallelism against torch's."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ids, labels = (piece.chunk(world)[rank] for piece in batch(sizes))
    own, road = autopar_steps(sizes, optimizer, gpt(sizes), mesh=ap.Mesh(dp=world), mode="data")
    ddp = DistributedDataParallel(gpt(sizes))
    ddp_views = DistributedDataParallel(copy.deepcopy(gpt(sizes)), gradient_as_bucket_view=True)
    steps = {
        "autopar": own,
        "ddp": torch_step(ddp, ids, labels, optimizer),
        "ddp_views": torch_step(ddp_views, ids, labels, optimizer),
    }
    report("data", sizes, steps, rounds, road)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--optimizer", action="store_true", help="time a step of AdamW as well")
    parser.add_argument("--hidden", type=int, help="only the case of this size")
    parser.add_argument(
        "--kind", choices=("tensor", "reductions", "products", "data"), help="only this comparison"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for sizes in CASES:
        if arguments.hidden in (None, sizes.hidden):
            if arguments.kind in (None, "tensor"):
                tensor_parallel(sizes, arguments.rounds, arguments.optimizer)
            if arguments.kind in (None, "reductions"):
                reductions(sizes, arguments.rounds, arguments.optimizer)
            if arguments.kind in (None, "products"):
                products(sizes, arguments.rounds, arguments.optimizer)
            if arguments.kind in (None, "data"):
                data_parallel(sizes, arguments.rounds, arguments.optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
