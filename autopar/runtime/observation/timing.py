"""Timing: what steps of a module take, the slowest rank's; several modules in turns."""

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
    """Of one step without gradients from before, on all ranks the slowest one's."""
    backend = module.backend
    here = backend.world if isinstance(backend, TorchBackend) else None
    module.zero_grad(set_to_none=True)
    _slowest(0.0, here)  # all begin together
    started = time.perf_counter()
    module.step(*args, **(kwargs or {})).item()
    if backend.device.type == "cuda":
        torch.cuda.synchronize(backend.device)
    return _slowest(time.perf_counter() - started, here)


def _slowest(seconds: float, here: World | None) -> float:
    if here is None or here.size == 1:
        return seconds
    told = torch.tensor([seconds], device=here.carrier, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=here.group)
    return float(told)


def in_turns(
    steps: Sequence[Callable[[], float]],
    rounds: int,
    warm: int = 2,
    begin: Callable[[int], object] = lambda number: None,
) -> list[list[float]]:
    """The seconds of each of some steps in so many rounds, after `warm` ones that do not count.

    Every round runs each once, and begins with another one: what else a machine does meets all
    alike. `begin` is told the number of a round.
    """
    found: list[list[float]] = [[] for _ in steps]
    for number in range(warm + rounds):
        begin(number)
        for place in range(len(steps)):
            at = (number + place) % len(steps)
            taken = steps[at]()
            if number >= warm:
                found[at].append(taken)
    return found
