"""One training step of a GPT that recomputes its blocks, beside torch.utils.checkpoint, paired.

    python -m benchmarks.recompute [--rounds 20]

One process, one thread. Every round runs each contestant once, in shuffled order. A case prints one
line of JSON: medians in milliseconds, medians of the ratios to `plain` within a round, and the most
bytes of tensors that live at a time in a step, above what lives before it.

    plain, checkpoint       the model as it is; each block in torch.utils.checkpoint
    none, selective, full   autopar on one rank
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import autopar as ap
from benchmarks.gpt import GPT, Sizes, batch, gpt

CASES = (
    Sizes(hidden=128, heads=4, sequence=128, batch=4, layers=4),
    Sizes(hidden=256, heads=4, sequence=256, batch=4, layers=4),
    Sizes(hidden=512, heads=8, sequence=256, batch=4, layers=4),
)
Step = Callable[[], Tensor]


class Checkpointed(GPT):
    """The same model, its blocks wrapped by hand."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        for block in self.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class Peak(TorchDispatchMode):
    """The most bytes of what operators make that live at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.living[StorageWeakRef(storage)] = storage.nbytes()
        self.living = {ref: size for ref, size in self.living.items() if not ref.expired()}
        self.most = max(self.most, sum(self.living.values()))
        return result


def contestants(sizes: Sizes) -> dict[str, Step]:
    """The steps to compare, on the same parameters and inputs."""
    args = batch(sizes)

    def plain(model: torch.nn.Module) -> Tensor:
        model.zero_grad()
        loss = model(*args)
        loss.backward()
        return loss

    def parallel(module: ap.ParallelModule) -> Tensor:
        module.zero_grad()
        return module.step(*args)

    model = gpt(sizes)
    torch.manual_seed(0)
    found: dict[str, Step] = {
        "plain": partial(plain, copy.deepcopy(model)),
        "checkpoint": partial(plain, Checkpointed(sizes)),
    }
    for kind in (None, "selective", "full"):
        module = ap.parallelize(
            copy.deepcopy(model), args, mesh=ap.Mesh(one=1), mode="data", recompute=kind
        )
        found[kind or "none"] = partial(parallel, module)
    return found


def peak(step: Step) -> int:
    """The most bytes above what lives before a step."""
    step()
    with Peak() as seen:
        step()
    return seen.most


def compare(sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Medians of paired rounds."""
    steps = contestants(sizes)
    bytes_ = {name: peak(step) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    ratios = {
        name: statistics.median(one / other for one, other in zip(taken, seconds["plain"]))
        for name, taken in seconds.items()
    }
    return {
        "case": sizes.name,
        "ms": {name: round(1e3 * statistics.median(s), 2) for name, s in seconds.items()},
        "ratio": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "peak MB": {name: round(size / 1e6, 2) for name, size in bytes_.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    for sizes in CASES:
        print(json.dumps(compare(sizes, rounds)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
