"""Roll call: who of the world is still there, though it may say nothing because it waits.

A thread of every rank waits at the store for its bell. A rank that fails, or whose collective
broke, rings them all; whoever lives answers, and says where it is. Who gives no answer was killed
or stopped. Every word with the store has a deadline of its own, kept by a thread that may be left
behind: the process that holds the store may be the one that was lost.

Ranks count the calls of the program. One that refuses a call writes that down; before its next call
it asks whether all ranks refused that one, and rings those that have not: who went on with it says
so, and who has not come to it is waited for. A call that nobody refuses costs no word, but for one
that wants a new program: all ranks say so, and make it together.
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
_RINGS = "rings"  # or the number of a call that another rank refused
_ENDLESS = timedelta(days=365)
_SILENCE = "the store of the world does not answer"
_PAUSE = 0.05  # seconds between two looks
_ANSWERS_WITHIN = 5.0  # seconds

T = TypeVar("T")


class RollCall:
    """One rank's part in it."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """`store`: the world's, under a prefix that no earlier world has used."""
        self.store, self.rank, self.size = store, rank, size
        self.waits = 0  # how many guards the main thread is in
        self.first: str | None = None  # the first failure, once this rank has heard of it
        self.calls = 0  # how many this rank has gone on with or refused
        self.refused: set[int] = set()  # the numbers of those that it refused
        self.open: str | None = None  # why it refused the last one, until it knows of the others
        self._ends = False
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

    def refuse(self, mine: str, patience: float) -> None:
        """Write down that this rank refuses the call that comes now."""
        number = self.calls + 1
        self.refused.add(number)
        self.calls, self.open = number, mine

        def write(store: Store) -> None:
            store.compare_set(_refusal(number), "", mine)
            store.set(_refused_by(number, self.rank), "")

        self._within(patience, write)

    def not_refused(self, patience: float) -> str:
        """What others did with the call that this rank refused last; empty if all refused it."""
        number, self.open = self.calls, None

        def hear(store: Store) -> str:
            return self._until_all(store, number, _refused_by, patience)

        found = self._within(3 * patience, hear)
        return _SILENCE if found is None else found

    def tell_call(self, mine: str, patience: float) -> list[str] | str:
        """What each rank says of the call that comes now, of which this one says `mine`; or what
        others do that say nothing."""
        number = self.calls + 1

        def hear(store: Store) -> list[str] | str:
            store.set(_told_by(number, self.rank), mine)
            wrong = self._until_all(store, number, _told_by, patience)
            ranks = range(self.size)
            return wrong or [store.get(_told_by(number, rank)).decode() for rank in ranks]

        found = self._within(3 * patience, hear)
        return _SILENCE if found is None else found

    def _until_all(
        self, store: Store, number: int, word: Callable[[int, int], str], patience: float
    ) -> str:
        """Wait until the others have written their word on a call; or what they do instead."""
        deadline, pause = time.monotonic() + patience, _PAUSE
        missing = self._others()
        while time.monotonic() < deadline:
            # Before the words: who went on has written its own, and has seen those of all.
            has_gone = store.check([_went_on(number)])
            missing = [rank for rank in missing if not store.check([word(number, rank)])]
            if not missing:
                return ""
            if has_gone:
                return f"rank {store.get(_went_on(number)).decode()}"
            if store.check([_FIRST]):
                return "a rank has failed since"
            if number not in self.refused and store.check([_refusal(number)]):
                return f"refused on {store.get(_refusal(number)).decode()}"
            for rank in missing:
                store.compare_set(_bell(rank), "", str(number))  # a roll call goes first
            time.sleep(pause)  # a wait at the store would warn of each that ends
            pause = min(1.5 * pause, 0.25)
        answers = self._call(store, min(patience, _ANSWERS_WITHIN))
        where = [f"rank {r} {answers.get(r, 'says nothing')}" for r in missing]
        return f"{patience:g} s later others have not come to that call: {'; '.join(where)}"

    def leave(self) -> None:
        """Let the listener end: a thread must not come back while the interpreter ends."""
        atexit.unregister(self.leave)
        self._ends = True
        if not self._listener.is_alive():
            return
        self._within(1.0, lambda store: store.set(_bell(self.rank), _RINGS))
        self._listener.join(1.0)

    def _call(self, store: Store, patience: float, full: bool = False) -> dict[int, str]:
        """Ring all bells and collect answers; `full`: wait for a first failure all the time."""
        store.set(_answer(self.rank), self._where())
        others = self._others()
        for rank in others:
            store.set(_bell(rank), _RINGS)
        found: dict[int, str] = {}
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and (full or len(found) < len(others)):
            said = [key for key in (_FIRST, _refusal(self.calls)) if full and store.check([key])]
            if said:
                self.first = store.get(said[0]).decode()
                break
            for rank in others:
                if rank not in found and store.check([_answer(rank)]):
                    found[rank] = store.get(_answer(rank)).decode()
            time.sleep(_PAUSE)
        return found

    def _listen(self, store: Store) -> None:
        with suppress(Exception):  # the store may go with the process that holds it
            while True:
                store.wait([_bell(self.rank)], _ENDLESS)
                word = store.get(_bell(self.rank)).decode()
                store.delete_key(_bell(self.rank))
                if self._ends:
                    return
                if store.check([_FIRST]):
                    self.first = store.get(_FIRST).decode()
                if word == _RINGS:
                    store.set(_answer(self.rank), self._where())
                elif self._went_on_with(int(word)):
                    went_on = f"{self.rank} went on with that call, and {self._where()}"
                    store.set(_went_on(int(word)), went_on)

    def _where(self) -> str:
        place = _main_thread_is_at()
        return f"{WAITS} {place.removeprefix('is ')}" if self.waits else place

    def _went_on_with(self, call: int) -> bool:
        return self.calls >= call and call not in self.refused

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

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


def _refusal(call: int) -> str:
    return f"refused/{call}"


def _refused_by(call: int, rank: int) -> str:
    return f"refused/{call}/{rank}"


def _told_by(call: int, rank: int) -> str:
    return f"told/{call}/{rank}"


def _went_on(call: int) -> str:
    return f"went_on/{call}"


def _main_thread_is_at() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return f"is at {caller(frame) or 'no line of the program'}" if frame else "is ending"
