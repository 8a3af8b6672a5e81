"""Measure this machine: run as a program, print JSON. It needs torch and no more of autopar.

One clean process imports torch, then forks one process a device, so that the import is paid once.
All devices work at the same time, as they will in training: what they share, they share here too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
BYTES = (1 << 12, 1 << 20, 1 << 22)  # of the whole tensor of a collective
FAR_COLUMNS = 8192, 24576  # of layers that are larger than caches
BUDGET = 0.08  # seconds for one figure


def median_seconds(work: Callable[[], object], budget: float = BUDGET) -> float:
    """Return the median seconds of `work`, after equally many runs on all ranks."""
    work()
    start = time.perf_counter()
    work()
    once = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    runs = max(3, min(50, int(budget / max(float(once), 1e-7))))
    seconds = []
    dist.barrier()
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[runs // 2]


def measure_far() -> list[tuple[float, float]]:
    """Measure products of few rows in two large layers: the bytes of their matrices, and the
    seconds beyond those of as many FLOPs on matrices that caches hold."""
    square = torch.ones(384, 384)
    layers = [(torch.ones(32, 256), torch.ones(columns, 256).t()) for columns in FAR_COLUMNS]
    works = [partial(torch.matmul, *pair) for pair in ((square, square), *layers)]
    rounds = [[median_seconds(work, BUDGET / 2) for work in works] for _ in range(5)]
    rate, *taken = map(min, zip(*rounds))
    each_flop = rate / (2 * 384**3)
    return [
        (left.nbytes + right.nbytes + 4 * 32 * right.shape[1], t - each_flop * 64 * right.numel())
        for (left, right), t in zip(layers, taken)
    ]


def measure_device() -> dict[str, object]:
    """Measure rates of large work, the work that reaches half, and operator overhead."""
    figures: dict[str, object] = {}
    flops = {}
    for name, dtype in DTYPES.items():
        size = 384 if name != "bf16" else 256
        left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
        flops[name] = 2 * size**3 / median_seconds(partial(torch.matmul, left, right))
    flops["f16"] = flops["bf16"]
    figures["far_points"] = measure_far()
    small = torch.ones(1)
    overhead = median_seconds(lambda: [small + small for _ in range(100)]) / 100
    matrix = torch.ones(64, 64)
    half = max(0.0, median_seconds(lambda: matrix @ matrix) - overhead) * flops["f32"] - 2 * 64**3
    large = torch.ones(1 << 22)
    out = torch.empty_like(large)
    bandwidth = 3 * large.nbytes / median_seconds(lambda: torch.add(large, large, out=out))
    copies = [median_seconds(partial(out[:n].copy_, large[:n])) for n in (1, len(large))]
    figures.update(copy=(copies[0], large.nbytes / max(copies[1] - copies[0], copies[1] / 2)))
    figures.update(flops=flops, overhead=overhead, half_flops=max(0.0, half), bandwidth=bandwidth)
    return figures


def collective(
    kind: str, size: int, total: int, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    """Return a function that runs a collective over `size` ranks, with `total` bytes on a rank
    before or after it."""
    elements = total // 4 // size * size
    whole, piece = torch.zeros(elements), torch.zeros(elements // size)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, piece, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(piece, whole, group=group)
    other = torch.zeros_like(whole)
    if kind == "shift":
        return partial(ring_shift, whole, other, size, group)
    return lambda: dist.all_to_all_single(other, whole, group=group)


def ring_shift(
    sent: torch.Tensor, received: torch.Tensor, size: int, group: dist.ProcessGroup | None
) -> None:
    """Send `sent` to the next rank of a group and receive from the one before."""
    place = dist.get_rank(group)
    after, before = ((place + step) % size for step in (1, -1))
    moves = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=after),
        dist.P2POp(dist.irecv, received, group=group, group_peer=before),
    ]
    for under_way in dist.batch_isend_irecv(moves):
        under_way.wait()


def measure_links(ranks: int) -> list[tuple[str, int, int, float]]:
    """Return kind, group size, bytes and seconds of collectives, all groups busy."""
    rows = []
    rank = dist.get_rank()
    for size in [n for n in range(2, ranks + 1) if ranks % n == 0]:
        groups = [dist.new_group(range(at, at + size)) for at in range(0, ranks, size)]
        group = groups[rank // size]
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift"):
            for total in BYTES:
                try:
                    seconds = median_seconds(collective(kind, size, total, group), BUDGET / 2)
                except RuntimeError:  # a collective that this build of torch does not have
                    continue
                rows.append((kind, size, total, seconds))
    return rows


def overlap_share(alone: float, moved: float, together: float) -> float:
    """Return the share of its speed that computing keeps beside a collective: the part of the
    seconds `moved` that running both does not add to computing `alone`."""
    return max(0.0, min(1.0, (alone + moved - together) / moved))


def measure_overlap(rounds: int = 15) -> float:
    """Measure an all-reduce beside products that take longer: each alone, and both together."""
    message, matrix = torch.zeros(BYTES[-1] // 4), torch.ones(256, 256)
    take_turns = [partial(dist.all_reduce, message), partial(torch.matmul, matrix, matrix)]
    moved, product = slowest_rank([median_seconds(work) for work in take_turns])
    count = 1 + int(2 * moved / product)

    def compute() -> None:
        for _ in range(count):
            matrix @ matrix

    def both() -> None:
        under_way = dist.all_reduce(message, async_op=True)
        compute()
        under_way.wait()

    table = []
    for _ in range(rounds):  # the best of each: others may be at work on the machine
        seconds = []
        for each in (compute, take_turns[0], both):
            dist.barrier()
            start = time.perf_counter()
            each()
            seconds.append(time.perf_counter() - start)
        table.append(slowest_rank(seconds))
    return overlap_share(*map(min, zip(*table)))


def slowest_rank(seconds: list[float]) -> list[float]:
    """Return the largest of each figure over all ranks."""
    table = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return table.tolist()


def nested_medians(samples: list[Any]) -> Any:
    """Return the medians of equally nested figures that were measured several times."""
    first = samples[0]
    if isinstance(first, dict):
        return {name: nested_medians([sample[name] for sample in samples]) for name in first}
    if isinstance(first, list | tuple):
        return [nested_medians(list(parts)) for parts in zip(*samples)]
    return first if isinstance(first, str) else sorted(samples)[len(samples) // 2]


def measure_on_rank(rank: int, ranks: int, times: int, store: str) -> None:
    """Measure on one process; the first prints the figures as JSON."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    samples = []
    for _ in range(times):
        figures = measure_device()
        figures["collectives"] = measure_links(ranks)
        figures["overlap"] = measure_overlap() if ranks > 1 else 0.0
        samples.append(figures)
    dist.barrier()
    if rank == 0:
        print(json.dumps(nested_medians(samples)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(ranks: int, times: int) -> None:
    """Fork a process for each rank, each of which measures `times` times, and wait for them."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        fork = multiprocessing.get_context("fork").Process
        children = [
            fork(target=measure_on_rank, args=(rank, ranks, times, store)) for rank in range(ranks)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
        if failed := sum(child.exitcode != 0 for child in children):
            sys.exit(f"{failed} of {ranks} measuring processes failed")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
