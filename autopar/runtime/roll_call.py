"""Roll call: who of the world is still there, though it may say nothing because it waits.

A thread of every rank waits at the store for its bell. A rank that fails, or whose collective
broke, rings them all; whoever lives answers, and says where it is. Who gives no answer was killed
or stopped. Every word with the store has a deadline of its own, kept by a thread that may be left
behind: the process that holds the store may be the one that was lost.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store

from autopar._torch import another_connection
from autopar.lines import caller

WAITS = "waits for others"
_FIRST = "first_failure"
_ENDLESS = timedelta(days=365)
_PAUSE = 0.05  # seconds between two looks

T = TypeVar("T")


class RollCall:
    """One rank's part in it."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """`store`: the world's, under a prefix that no earlier world has used."""
        self.store, self.rank, self.size = store, rank, size
        self.waits = 0  # how many guards the main thread is in
        self.first: str | None = None  # the first failure, once this rank has heard of it
        self._listener = threading.Thread(
            target=self._listen, args=(another_connection(store),), daemon=True
        )
        self._listener.start()
        atexit.register(self.leave)

    def report(self, mine: str, patience: float) -> str:
        """Write down that this rank failed, unless another was first; the first failure.

        Others are told before this process ends, since the store may end with it.
        """

        def write(store: Store) -> None:
            self.first = store.compare_set(_FIRST, "", mine).decode()
            self._call(store, patience)

        self._within(2 * patience, write)
        return self.first or mine

    def ask(self, patience: float) -> dict[int, str] | None:
        """Where each other rank that answers is; None if the store does not answer.

        It ends early once somebody says that it failed first: see `first`.
        """
        return self._within(2 * patience, lambda store: self._call(store, patience, full=True))

    def leave(self) -> None:
        """Let the listener end: a thread must not come back while the interpreter ends."""
        atexit.unregister(self.leave)
        if not self._listener.is_alive():
            return
        self._within(1.0, lambda store: store.set(_bell(self.rank), "leaves"))
        self._listener.join(1.0)

    def _call(self, store: Store, patience: float, full: bool = False) -> dict[int, str]:
        """Ring all bells and collect answers; `full`: wait for a first failure all the time."""
        store.set(_answer(self.rank), WAITS)
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            store.set(_bell(rank), "rings")
        found: dict[int, str] = {}
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and (full or len(found) < len(others)):
            if full and store.check([_FIRST]):
                self.first = store.get(_FIRST).decode()
                break
            for rank in others:
                if rank not in found and store.check([_answer(rank)]):
                    found[rank] = store.get(_answer(rank)).decode()
            time.sleep(_PAUSE)
        return found

    def _listen(self, store: Store) -> None:
        with suppress(Exception):  # the store may go with the process that holds it
            store.wait([_bell(self.rank)], _ENDLESS)
            if store.check([_FIRST]):
                self.first = store.get(_FIRST).decode()
            store.set(_answer(self.rank), WAITS if self.waits else _main_thread_is_at())

    def _within(self, seconds: float, work: Callable[[Store], T]) -> T | None:
        """What `work` gives; None if the store does not answer by then."""
        done = attempt(seconds, lambda: work(another_connection(self.store)))
        return None if done is None or done.exception() else done.result()


def attempt(seconds: float, work: Callable[[], T]) -> Future[T] | None:
    """`work`, done in a thread of its own; None if it is not done by then."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    wait([done], seconds)
    return done if done.done() else None


def _bell(rank: int) -> str:
    return f"bell/{rank}"


def _answer(rank: int) -> str:
    return f"here/{rank}"


def _main_thread_is_at() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return f"is at {caller(frame) or 'no line of the program'}" if frame else "is ending"
