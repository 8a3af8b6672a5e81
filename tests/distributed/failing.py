"""Worlds in which one rank fails, and what the others say before they end.

`way`: "init" raises where values are made, "input" and "backward" in a step, "loop" between two;
"caught" goes on after a step that it alone refused; "kill" and "stop" lose the rank in its
backward, "early" before it has a module.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar as ap
from tests import models
from tests.annotations import megatron

RANKS = 4
LAST = 3  # shares no group with rank 0
# Seconds that a rank waits for another: only who is stopped is waited for so long.
TIMEOUT = {"stop": 30.0}
LONG = 120.0
OPERATORS = {"mesh": ap.Mesh(dp=2, tp=2)}
PIPELINE = {"mesh": ap.Mesh(pp=4), "schedule": "1f1b", "microbatches": 8}


def reports(
    way: str, folder: Path, options: dict[str, Any] = OPERATORS, failing: int = LAST
) -> list[str | None]:
    """What each rank of a world said, if it could, when one failed in this `way`.

    `options` say how the model is made parallel. The world meets in a file, or where rank 0 fails
    at rank 0.
    """
    port = _free_port() if failing == 0 else None
    context = get_context("forkserver")
    ranks: list[Any] = [
        context.Process(target=_live, args=(rank, way, folder, options, failing, port), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    if way == "stop":
        for rank in set(range(RANKS)) - {failing}:
            ranks[rank].join(100)
        ranks[failing].kill()
    for process in ranks:
        process.join(100)
    assert not any(process.is_alive() for process in ranks), "ranks hang"
    files = [folder / f"report {rank}" for rank in range(RANKS)]
    return [file.read_text() if file.exists() else None for file in files]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _live(
    rank: int, way: str, folder: Path, options: dict[str, Any], failing: int, port: int | None
) -> None:
    torch.set_num_threads(1)
    store: dist.Store = (
        dist.FileStore(str(folder / "store"), RANKS)
        if port is None
        else dist.TCPStore("127.0.0.1", port, RANKS, rank == 0)
    )
    wait = timedelta(seconds=TIMEOUT.get(way, LONG))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=wait)
    try:
        _train(rank == failing, way, options)
    except Exception as error:
        if way == "caught":
            _is_refused_ever_after(options)
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a program
        dist.destroy_process_group()  # of a world that has ended too
        (folder / f"report {rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


def _train(fails: bool, way: str, options: dict[str, Any]) -> None:
    case = models.gpt(layers=4) if "schedule" in options else megatron(models.gpt(layers=1))
    model, args = Fails(case.model), case.args
    if fails and way == "early":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "init":

        def fill(module: nn.Module) -> None:
            """Fails where it runs, not where it is tried."""
            if fails and isinstance(module, nn.Embedding):
                module.weight.numpy()
                raise KeyError("std")

        model.to("meta")
        options = options | {"init": fill}
    module = ap.parallelize(model, args, mode="propagate", **options)
    module.step(*args)
    if fails and way == "loop":
        raise EOFError("no batch is left")
    if fails:
        if way in ("input", "caught"):
            args = tuple(value[:3] for value in args)
        global _way
        _way = way
    try:
        module.step(*args)
    except ap.InvalidInput:
        if way != "caught":
            raise
        module.step(*case.args)


def _is_refused_ever_after(options: dict[str, Any]) -> None:
    case = models.mlp()
    with pytest.raises(ap.ExecutionError, match="rank 3: InvalidInput: a call that"):
        ap.parallelize(case.model, case.args, mode="propagate", **options)


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
