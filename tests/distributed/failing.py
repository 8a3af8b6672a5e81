"""Worlds in which one rank fails, and what the others say before they end."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar as ap
from tests import models
from tests.annotations import megatron

RANKS = 4
FAILING = 3  # shares no group with rank 0
TIMEOUT = 20.0  # seconds that a rank waits for another
OPERATORS = {"mesh": ap.Mesh(dp=2, tp=2)}
PIPELINE = {"mesh": ap.Mesh(pp=4), "schedule": "1f1b", "microbatches": 8}


def reports(way: str, folder: Path, options: dict[str, Any] = OPERATORS) -> list[str | None]:
    """What each rank of a world said, if it could, when rank 3 failed in this `way`.

    `options` say how the model is made parallel.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["autopar"])
    ranks: list[Any] = [
        context.Process(target=_live, args=(rank, way, folder, options), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    if way == "stop":
        for process in ranks[:FAILING]:
            process.join(100)
        ranks[FAILING].kill()
    for process in ranks:
        process.join(100)
    assert not any(process.is_alive() for process in ranks), "ranks hang"
    files = [folder / f"report {rank}" for rank in range(RANKS)]
    return [file.read_text() if file.exists() else None for file in files]


def _live(rank: int, way: str, folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    wait = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=wait)
    try:
        _train(rank, way, options)
    except Exception as error:
        (folder / f"report {rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


def _train(rank: int, way: str, options: dict[str, Any]) -> None:
    case = models.gpt(layers=4) if "schedule" in options else megatron(models.gpt(layers=1))
    model, args = Fails(case.model), case.args
    module = ap.parallelize(model, args, mode="propagate", **options)
    module.step(*args)
    if rank == FAILING:
        if way == "input":
            args = tuple(value[:3] for value in args)
        global _way
        _way = way
    module.step(*args)


_way = ""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@torch.library.custom_op("tests_failing::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    return x.clone()


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    if _way == "backward":
        raise ZeroDivisionError("deliberate")
    if _way in SIGNALS:
        os.kill(os.getpid(), SIGNALS[_way])
    return grad


fails.register_fake(torch.empty_like)
fails.register_autograd(_backward)
ap.register_rule(fails, "... -> ...", passes="all")


class Fails(nn.Module):
    """A model whose backward fails in the middle when it is told to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        layers = model.get_submodule("layers")
        layers.register_forward_hook(lambda module, args, result: result)
        norm = model.get_submodule("layers")[-1].norm2  # type: ignore[index]
        norm.register_forward_hook(lambda module, args, result: fails(result))

    def forward(self, *args: Any) -> Any:
        return self.model(*args)
