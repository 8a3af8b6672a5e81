"""Python programs in processes forked from one that has imported torch, as imports cost seconds.

>>> run([{}], ["examples/auto.py"], Path("/a/checkout"), Path("/for/what/they/print"))
('...', '')
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import warnings
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.unhurried import weigh_all

STREAMS = {"out": 1, "err": 2}
Environment = dict[str, str]


def torchrun(ranks: int) -> list[Environment]:
    """What torchrun tells the processes of one machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    numbers = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    shared = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
    shared |= {name: str(value) for name, value in numbers.items()}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def run(
    environments: Sequence[Environment],
    words: list[str],
    where: Path,
    folder: Path,
    strict: bool = False,
) -> tuple[str, str]:
    """What the processes of a program print, and their errors; `strict`: a warning is one."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["autopar"])
    outputs = [folder / f"process {number}" for number in range(len(environments))]
    processes = [
        context.Process(target=_process, args=(words, where, environment, output, strict))
        for environment, output in zip(environments, outputs)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
    finally:
        for process in processes:
            process.kill()
    printed, errors = (
        "".join(Path(f"{output}.{name}").read_text() for output in outputs) for name in STREAMS
    )
    assert [process.exitcode for process in processes] == [0] * len(processes), errors
    return printed, errors


def _process(
    words: list[str], where: Path, environment: Environment, output: Path, strict: bool
) -> None:
    """What Python does with a file, or `-m` and a module, and arguments."""
    os.chdir(where)
    os.environ.update(environment, OMP_NUM_THREADS="1")
    weigh_all()
    torch.set_num_threads(1)  # who is forked has read how many already
    for name, stream in STREAMS.items():
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    if strict:
        warnings.simplefilter("error", UserWarning)
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    sys.path.insert(0, str(where if is_module else Path(words[0]).absolute().parent))
    try:
        (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")
    finally:
        sys.stdout.flush()
