"""Launch: several ranks on this machine, started, heard and ended by one process.

    losses = launch(train, 4, steps)                        # runs train(say, steps) on 4 ranks

For demonstrations, checks and tests. Training belongs to torchrun, which also restarts ranks and
spans machines.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import LOADED_BY_EXPORT
from autopar.errors import ExecutionError
from autopar.runtime.launching.failures import tell

Say = Callable[[Any], None]
_HOST = "127.0.0.1"
# What a rank says that was ended by another: autopar's words, or those of a broken connection.
_ENDED_BY_OTHER = ("another rank failed first", "closed by peer", "reset by peer")


def launch(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    heard: Callable[[int, Any], None] | None = None,
    timeout: float = 120.0,
    gpus: bool = False,
) -> list[Any]:
    """Run `function(say, *arguments)` on `ranks` processes that form a world; their results.

    What a rank hands to `say` comes here as `heard(rank, value)`. Ranks run on the CPU with one
    thread, over gloo; `gpus`: they see this machine's GPUs, and share them. The first rank to fail
    ends all others, and its error is raised here. `timeout`: seconds that a rank waits for another.
    """
    context = _context()
    processes: list[Any] = []
    pipes: dict[Connection, int] = {}
    try:
        environment = _rank_environment(gpus)
        with _environment(environment):
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(theirs, (rank, ranks, timeout), environment, function, arguments),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes[ours] = rank
        # After every rank: a store is a thread, which may hold a lock that a fork would keep.
        store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        for pipe in pipes:
            with suppress(OSError):  # a rank that has ended is found below
                pipe.send(store.port)
        return _collect(pipes, processes, heard or (lambda rank, value: None))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _collect(
    pipes: dict[Connection, int], processes: list[Any], heard: Callable[[int, Any], None]
) -> list[Any]:
    """Listen until every rank has ended well, or one has failed."""
    results: dict[int, Any] = {}
    followers: dict[int, str] = {}
    while pipes:
        for pipe in wait(list(pipes)):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                del pipes[pipe]
                if rank not in results and rank not in followers:
                    processes[rank].join()
                    code = processes[rank].exitcode
                    raise _failure(rank, f"ended with exit code {code}") from None
                continue
            if kind == "said":
                heard(rank, value)
            elif kind == "done":
                results[rank] = value
            elif any(text in value for text in _ENDED_BY_OTHER):
                # The one that failed first will speak, or be missed.
                followers[rank] = value
            else:
                raise _failure(rank, value)
    for rank, text in followers.items():
        raise _failure(rank, text)
    return [results[rank] for rank in sorted(results)]


def _failure(rank: int, text: str) -> ExecutionError:
    return ExecutionError(
        "every process of a local world ends well",
        got=f"rank {rank}: {text.strip()}",
        remedy="mend what failed there; `autopar doctor` checks this machine",
    )


def _rank_main(
    pipe: Connection,
    place: tuple[int, int, float],
    environment: dict[str, str],
    function: Callable,
    arguments: tuple,
) -> None:
    """The life of one rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launching process's business
    rank, ranks, timeout = place
    os.environ.update(environment)  # the process that it was forked from may have had another
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore(_HOST, pipe.recv(), is_master=False),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
        result = function(lambda value: pipe.send(("said", value)), *arguments)
        pipe.send(("done", result))
        dist.barrier()  # nobody leaves while another still needs it
    except BaseException as error:
        tell(error)
        with suppress(OSError):
            pipe.send(("failed", traceback.format_exc(limit=-3)))
    finally:
        pipe.close()
        if dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()


def _context() -> Any:
    """How processes start: forked, where that exists, from one that has loaded what all need."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autopar", *LOADED_BY_EXPORT])
    return context


def _rank_environment(gpus: bool) -> dict[str, str]:
    """One thread, which GPUs, and gloo on the loopback device: host names need not resolve."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    interface = {"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}
    every = ",".join(map(str, range(torch.cuda.device_count())))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", every) if gpus else ""
    return {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": seen, **interface}


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """The environment that processes started inside inherit."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
