"""Processes: work by name, each in a forked process of its own with a limit of CPU seconds.

>>> for name, line in lines_of({"a": lambda: iter([{"stage": "done"}])}, workers=2, seconds=60):
...     print(name, line)
a {'stage': 'done'}

A process hands over what it knows each time that it knows more; where it ends early or takes too
long, what it handed over last stands, with an `error`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

PATIENCE = 10  # times the limit of CPU seconds, where other processes have the processor
Line = dict[str, Any]
Work = Callable[[], Iterator[Line]]


@dataclass
class Running:
    """A process with the last line that it sent."""

    name: str
    process: BaseProcess
    pipe: Connection
    deadline: float
    line: Line

    def read(self) -> bool:
        """Take the lines that were sent, and return whether the process has ended."""
        try:
            while self.pipe.poll():
                self.line = self.pipe.recv()
        except EOFError:
            return True
        if time.monotonic() > self.deadline:
            self.process.kill()
            self.line["error"] = "took longer than its time limit"
            return True
        return False


def lines_of(work: Mapping[str, Work], workers: int, seconds: float) -> Iterator[tuple[str, Line]]:
    """Yield the last line of each work with its name, in the order in which they end."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(work)[::-1], list[Running]()
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(work[name], theirs, seconds))
            process.start()
            theirs.close()
            deadline = time.monotonic() + PATIENCE * seconds
            running.append(Running(name, process, ours, deadline, {"stage": "start"}))
        wait([process.pipe for process in running], timeout=1.0)
        for ended in [process for process in running if process.read()]:
            ended.process.join()
            running.remove(ended)
            ended.pipe.close()
            if ended.line["stage"] != "done":
                ended.line.setdefault("error", "its process ended")
            yield ended.name, ended.line


def _send(work: Work, pipe: Connection, seconds: float) -> None:
    """Send the lines of a work; what libraries print or warn of is dropped."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(open(os.devnull, "w")), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for line in work():
            pipe.send(line)
