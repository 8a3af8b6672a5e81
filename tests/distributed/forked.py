"""Worlds whose ranks are forked from one process that has captured their models.

    def cases(): return [models.shared("mlp"), models.shared("gpt", layers=2)]
    assert_all_pass(cases, CHECKS, 4)

Captures are most of what such checks would compute on each rank anew. What ranks then run is theirs
alone: planning, rewriting and steps. That ranks capture for themselves is what `placing.py`,
`failing.py` and the examples show.
"""

from __future__ import annotations

import gc
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch

from autopar import planning
from autopar.precision import Precision
from autopar.runtime.launching import launch as launching
from tests.captures import shared_captures
from tests.models import Case

Check = Callable[..., None]


def assert_all_pass(
    cases: Callable[[], Iterable[tuple[Case, Precision | None]]],
    checks: Sequence[Check],
    ranks: int,
    *arguments: Any,
) -> None:
    """Every check, called with `arguments`, passes on every rank of a world."""
    heard: dict[int, list[str]] = {}
    launch_forked(
        cases,
        run_all,
        ranks,
        checks,
        arguments,
        heard=lambda rank, name: heard.setdefault(rank, []).append(name),
    )
    assert heard == {rank: [check.__name__ for check in checks] for rank in range(ranks)}


def run_all(say: Callable[[str], None], checks: Sequence[Check], arguments: tuple) -> None:
    """Each check says its name when it has passed."""
    warnings.simplefilter("ignore")
    for check in checks:
        check(*arguments)
        say(check.__name__)


def launch_forked(
    cases: Callable[[], Iterable[tuple[Case, Precision | None]]],
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    heard: Callable[[int, Any], None] = lambda rank, value: None,
) -> list[Any]:
    """As `launch`, in a process of its own, which captures `cases` and then forks the ranks."""
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(writer, cases, function, ranks, arguments))
    process.start()
    writer.close()
    try:
        while True:
            kind, value = reader.recv()
            if kind == "said":
                heard(*value)
            elif kind == "done":
                return value
            else:
                raise AssertionError(value)
    finally:
        process.terminate()
        process.join()


def _main(
    writer: Connection,
    cases: Callable[[], Iterable[tuple[Case, Precision | None]]],
    function: Callable[..., Any],
    ranks: int,
    arguments: tuple,
) -> None:
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    try:
        with shared_captures(), patch.object(launching, "_context", lambda: fork):
            for case, precision in cases():
                planning.capture(case.model, case.args, case.kwargs, precision)
            gc.collect()
            gc.freeze()  # what is here now is not looked at again
            result = launching.launch(
                function,
                ranks,
                *arguments,
                heard=lambda rank, value: writer.send(("said", (rank, value))),
            )
        writer.send(("done", result))
    except BaseException:
        writer.send(("failed", traceback.format_exc()))
    finally:
        writer.close()
