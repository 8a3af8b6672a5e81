"""Saving and loading of a GPT and its AdamW by autopar and by torch, paired in one run.

    torchrun --nproc-per-node 2 -m benchmarks.saving [--rounds 8] [--hidden 512] [--layers 5]

autopar (states="zero3") is beside FSDP2 with torch.distributed.checkpoint (DCP): as many bytes, in
as many pieces. Every round runs each contestant once, in turn, on ranks that start together; wall
seconds are those of the slowest rank, CPU seconds those of the calling thread alone. A case prints
one line of JSON with medians, and medians of the ratios within a round.

    save      until the checkpoint is complete: ap.save in both formats, dcp.save
    stall     until training goes on: ap.save(asynchronous=True) in both formats, dcp.async_save
    load      ap.load of both formats, dcp.load
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar as ap
from benchmarks.gpt import Sizes, batch, gpt
from benchmarks.states import ADAMW, fsdp2

End = Callable[[], Any]  # waits until what a call has begun is over
Call = Callable[[], End | None]
OTHER = "dcp"


class Contestants:
    """A module of autopar and one of FSDP2 that have trained for a step."""

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        self.folder = folder
        given, mesh = batch(sizes), ap.Mesh(dp=dist.get_world_size())
        options: dict[str, Any] = {"mesh": mesh, "mode": "data", "states": "zero3"}
        self.module = ap.parallelize(gpt(sizes), given, **options)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), **ADAMW)
        self.module.step(*given)
        self.optimizer.step()
        self.model, self.update = fsdp2(True)(gpt(sizes))
        self.model(*(piece.chunk(mesh.size)[dist.get_rank()] for piece in given)).backward()
        self.update.step()
        self.writers = dist.new_group(backend="gloo")

    @property
    def state(self) -> dict[str, Any]:
        values, states = get_state_dict(self.model, self.update)
        return {"model": values, "optimizer": states}

    def save(self, form: Any) -> None:
        ap.save(self.folder / form, self.module, self.optimizer, format=form)

    def save_by_dcp(self) -> None:
        dcp.save(self.state, checkpoint_id=self.folder / "torch")

    def begin(self, form: Any) -> End:
        saving = ap.save(
            self.folder / form, self.module, self.optimizer, format=form, asynchronous=True
        )
        assert saving is not None
        return saving.wait

    def begin_by_dcp(self) -> End:
        path, group = self.folder / "torch", self.writers
        written = dcp.async_save(self.state, checkpoint_id=path, process_group=group)
        assert isinstance(written, Future)
        return written.result

    def load(self, form: str) -> None:
        ap.load(self.folder / form, self.module, self.optimizer)

    def load_by_dcp(self) -> None:
        state = self.state
        dcp.load(state, checkpoint_id=self.folder / "torch")
        set_state_dict(
            self.model,
            self.update,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def cases(self) -> dict[str, dict[str, Call]]:
        forms = {"autopar": "autopar", "autopar, format dcp": "dcp"}
        return {
            "save": {
                **{n: partial(self.save, f) for n, f in forms.items()},
                OTHER: self.save_by_dcp,
            },
            "stall": {
                **{n: partial(self.begin, f) for n, f in forms.items()},
                OTHER: self.begin_by_dcp,
            },
            "load": {
                **{n: partial(self.load, f) for n, f in forms.items()},
                OTHER: self.load_by_dcp,
            },
        }


def measured(calls: Mapping[str, Call], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds of each call by round; the first round is not counted."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.thread_time()
            end = call()
            taken = torch.tensor([time.perf_counter() - wall, time.thread_time() - cpu])
            if end is not None:
                end()
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number:
                seconds[name].append((float(taken[0]), float(taken[1])))
    return seconds


def report(
    case: str, sizes: Sizes, megabytes: float, calls: Mapping[str, Call], rounds: int
) -> None:
    """Measure one case and print its line."""
    seconds = measured(calls, rounds)

    def medians(side: int) -> dict[str, float]:
        return {
            n: round(statistics.median(pair[side] for pair in s), 3) for n, s in seconds.items()
        }

    def over(side: int) -> dict[str, float]:
        others = [pair[side] for pair in seconds[OTHER]]
        ratios = {
            name: [pair[side] / other for pair, other in zip(pairs, others)]
            for name, pairs in seconds.items()
            if name != OTHER
        }
        return {name: round(statistics.median(each), 2) for name, each in ratios.items()}

    line = {
        "case": case,
        "model": f"{sizes.name}, {sizes.layers} layers",
        "megabytes": megabytes,
        "ranks": dist.get_world_size(),
        "rounds": rounds,
        "wall_seconds": medians(0),
        "cpu_seconds_of_the_caller": medians(1),
        "over_dcp": over(0),
        "over_dcp_cpu": over(1),
    }
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    sizes = Sizes(hidden=arguments.hidden, heads=8, sequence=64, batch=4, layers=arguments.layers)
    contestants = Contestants(sizes, Path(box[0]))
    bytes_ = 3 * sum(p.numel() * p.element_size() for p in contestants.model.parameters())
    for case, calls in contestants.cases().items():
        report(case, sizes, round(bytes_ / 1e6), calls, arguments.rounds)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(box[0], ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
