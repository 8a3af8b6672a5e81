"""Launch: one process starts several ranks on this machine, listens to them and ends them.

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
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch.export_graph import LOADED_BY_EXPORT
from autopar.errors import ExecutionError
from autopar.runtime.launching.failures import report_failure

Say = Callable[[Any], None]
_HOST = "127.0.0.1"
# Texts in the error of a rank that another one ended: by autopar, or by a broken connection.
_ENDED_BY_OTHER = ("another rank failed first", "closed by peer", "reset by peer")


def launch(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    heard: Callable[[int, Any], None] | None = None,
    timeout: float = 120.0,
    gpus: bool = False,
) -> list[Any]:
    """Run `function(say, *arguments)` on `ranks` processes that form a world; return the results.

    A value that a rank hands to `say` arrives as `heard(rank, value)`. Ranks run on the CPU with
    one thread, over gloo; with `gpus` they see this machine's GPUs, and share them. The first rank
    to fail ends all others, and its error is raised here. Ranks wait `timeout` seconds for others.
    """
    context = _context()
    processes: list[Any] = []
    pipes: dict[Connection, int] = {}
    try:
        environment = _rank_environment(has_gpus=gpus)
        with _environment(environment):
            for rank in range(ranks):
                parent_end, child_end = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(
                        child_end,
                        _RankPlace(rank, ranks, timeout),
                        environment,
                        function,
                        arguments,
                    ),
                    daemon=True,
                )
                process.start()
                child_end.close()
                processes.append(process)
                pipes[parent_end] = rank
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
    """Return the results by rank once every rank has ended well; raise the first failure."""
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
                # The rank that failed first reports its error, or ends without a result.
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


@dataclass(frozen=True)
class _RankPlace:
    rank: int
    world_size: int
    timeout: float  # seconds that a rank waits for another


def _rank_main(
    pipe: Connection,
    place: _RankPlace,
    environment: dict[str, str],
    function: Callable,
    arguments: tuple,
) -> None:
    """Join the world as one rank, run `function`, and send its result or its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launching process's business
    os.environ.update(environment)  # the process that it was forked from may have had others
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore(_HOST, pipe.recv(), is_master=False),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=place.timeout),
        )
        result = function(lambda value: pipe.send(("said", value)), *arguments)
        pipe.send(("done", result))
        dist.barrier()  # no rank leaves while another still needs it
    except BaseException as error:
        report_failure(error)
        with suppress(OSError):
            pipe.send(("failed", traceback.format_exc(limit=-3)))
    finally:
        pipe.close()
        if dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()


def _context() -> Any:
    """Return the multiprocessing context: a fork server with common modules, or spawn."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autopar", *LOADED_BY_EXPORT])
    return context


def _rank_environment(*, has_gpus: bool) -> dict[str, str]:
    """Return variables for one thread, GPUs or none, and gloo on the loopback device, where host
    names need not resolve."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    interface = {"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}
    all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
    visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus) if has_gpus else ""
    return {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": visible_gpus, **interface}


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that processes inherit which start inside of the block."""
    previous = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)
