"""Timing: the seconds of steps on the slowest rank, of one module or of several in rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.backends.world import World
from autopar.runtime.module.parallel_module import ParallelModule


def step_seconds(
    module: ParallelModule, args: tuple = (), kwargs: Mapping[str, Any] | None = None
) -> float:
    """Return the seconds of a step without earlier gradients, on all ranks the slowest rank's."""
    backend = module.backend
    world = backend.world if isinstance(backend, TorchBackend) else None
    module.zero_grad(set_to_none=True)
    _slowest(0.0, world)  # all begin together
    started = time.perf_counter()
    module.step(*args, **(kwargs or {})).item()
    if backend.device.type == "cuda":
        torch.cuda.synchronize(backend.device)
    return _slowest(time.perf_counter() - started, world)


def _slowest(seconds: float, world: World | None) -> float:
    if world is None or world.size == 1:
        return seconds
    slowest = torch.tensor([seconds], device=world.carrier, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=world.group)
    return float(slowest)


def time_in_rounds(
    steps: Sequence[Callable[[], float]],
    rounds: int,
    warm: int = 2,
    begin: Callable[[int], object] = lambda number: None,
) -> list[list[float]]:
    """Return the seconds of each of several steps in `rounds` rounds, after `warm` uncounted ones.

    Every round runs each step once and begins with another one, so that other work of the machine
    slows all alike. `begin` is called with the number of each round.
    """
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(warm + rounds):
        begin(number)
        for position in range(len(steps)):
            index = (number + position) % len(steps)
            duration = steps[index]()
            if number >= warm:
                seconds[index].append(duration)
    return seconds
