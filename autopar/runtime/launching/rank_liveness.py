"""Rank liveness: which ranks of the world still live, though a rank that waits is silent.

A thread of every rank waits at the store for its bell. A rank that fails, or whose collective
broke, rings all bells; each rank that lives answers with its position in the program. A rank that
does not answer was killed or stopped. Every exchange with the store has a deadline and a thread of
its own, since the process that holds the store may be the lost one.

Ranks count the calls of the program. A rank that refuses a call writes that down; before its next
call it checks that all ranks refused it, and rings those that did not. An accepted call costs
nothing, except one that needs a new program: all ranks exchange it and build the program together.
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

from autopar._torch.communication import another_connection
from autopar.text.source_lines import caller

WAITS = "waits for others"
_FIRST = "first_failure"
_RINGS = "rings"  # or the number of a call that another rank refused
_NO_TIMEOUT = timedelta(days=365)
_SILENCE = "the store of the world does not answer"
_PAUSE = 0.05  # seconds between two reads of the store
_ANSWERS_WITHIN = 5.0  # seconds

T = TypeVar("T")


class RankLiveness:
    """One rank's thread that answers for it, and its questions to the other ranks."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Start to listen at the world's `store`, under a prefix that no earlier world used."""
        self.store, self.rank, self.size = store, rank, size
        self.open_guards = 0  # guards around collectives that the main thread is in
        self.first_failure: str | None = None  # of the world, once this rank knows it
        self.call_count = 0  # calls that this rank continued or refused
        self.refused_calls: set[int] = set()  # their numbers
        self.pending_refusal: str | None = None  # of the last call, until the others are known
        self._is_closing = False
        self._listener = threading.Thread(
            target=self._listen, args=(another_connection(store),), daemon=True
        )
        self._listener.start()
        atexit.register(self.close)

    def report_failure(self, failure: str, patience: float) -> str:
        """Write down that this rank failed, unless another was first; return the first failure.

        The others learn it before this process ends, since the store may end with it.
        """

        def write(store: Store) -> None:
            self.first_failure = store.compare_set(_FIRST, "", failure).decode()
            self._ring_all(store, patience)

        self._within(2 * patience, write)
        return self.first_failure or failure

    def ask_positions(self, patience: float) -> dict[int, str] | None:
        """Return the position of each other rank that answers; None if the store does not answer.

        Stop early once a rank reports that it failed first, and set `first_failure`.
        """
        return self._within(
            2 * patience, lambda store: self._ring_all(store, patience, until_failure=True)
        )

    def record_refusal(self, refusal: str, patience: float) -> None:
        """Write down that this rank refuses the current call."""
        number = self.call_count + 1
        self.refused_calls.add(number)
        self.call_count, self.pending_refusal = number, refusal

        def write(store: Store) -> None:
            store.compare_set(_refusal(number), "", refusal)
            store.set(_refusal_of(number, self.rank), "")

        self._within(patience, write)

    def await_refusals(self, patience: float) -> str:
        """Return what others did with the call that this rank refused last; empty if all did."""
        number, self.pending_refusal = self.call_count, None

        def wait_for_refusals(store: Store) -> str:
            return self._wait_for_all(store, number, _refusal_of, patience)

        others = self._within(3 * patience, wait_for_refusals)
        return _SILENCE if others is None else others

    def exchange_call(self, message: str, patience: float) -> list[str] | str:
        """Send `message` about the current call, and return the messages of all ranks by rank; or a
        text on what the ranks do that sent none."""
        number = self.call_count + 1

        def collect_messages(store: Store) -> list[str] | str:
            store.set(_message_of(number, self.rank), message)
            obstacle = self._wait_for_all(store, number, _message_of, patience)
            ranks = range(self.size)
            return obstacle or [store.get(_message_of(number, rank)).decode() for rank in ranks]

        messages = self._within(3 * patience, collect_messages)
        return _SILENCE if messages is None else messages

    def _wait_for_all(
        self, store: Store, number: int, key_of: Callable[[int, int], str], patience: float
    ) -> str:
        """Wait until all others set their key for a call; return what they did instead, if they did
        not."""
        deadline, pause = time.monotonic() + patience, _PAUSE
        missing = self._others()
        while time.monotonic() < deadline:
            # Before the keys: a rank that continued has set its key and has seen those of all.
            has_continued = store.check([_continued(number)])
            missing = [rank for rank in missing if not store.check([key_of(number, rank)])]
            if not missing:
                return ""
            if has_continued:
                return f"rank {store.get(_continued(number)).decode()}"
            if store.check([_FIRST]):
                return "a rank has failed since"
            if number not in self.refused_calls and store.check([_refusal(number)]):
                return f"refused on {store.get(_refusal(number)).decode()}"
            for rank in missing:
                store.compare_set(_bell(rank), "", str(number))  # a ring of all ranks goes first
            time.sleep(pause)  # a wait at the store would warn of every timeout
            pause = min(1.5 * pause, 0.25)
        answers = self._ring_all(store, min(patience, _ANSWERS_WITHIN))
        positions = [f"rank {r} {answers.get(r, 'says nothing')}" for r in missing]
        return f"{patience:g} s later others have not come to that call: {'; '.join(positions)}"

    def close(self) -> None:
        """Let the listener end: a thread must not come back while the interpreter ends."""
        atexit.unregister(self.close)
        self._is_closing = True
        if not self._listener.is_alive():
            return
        self._within(1.0, lambda store: store.set(_bell(self.rank), _RINGS))
        self._listener.join(1.0)

    def _ring_all(
        self, store: Store, patience: float, *, until_failure: bool = False
    ) -> dict[int, str]:
        """Ring all bells and return the answers by rank; `until_failure`: wait for a failure."""
        store.set(_answer(self.rank), self._position())
        others = self._others()
        for rank in others:
            store.set(_bell(rank), _RINGS)
        answers: dict[int, str] = {}
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and (until_failure or len(answers) < len(others)):
            keys = (_FIRST, _refusal(self.call_count)) if until_failure else ()
            failure_keys = [key for key in keys if store.check([key])]
            if failure_keys:
                self.first_failure = store.get(failure_keys[0]).decode()
                break
            for rank in others:
                if rank not in answers and store.check([_answer(rank)]):
                    answers[rank] = store.get(_answer(rank)).decode()
            time.sleep(_PAUSE)
        return answers

    def _listen(self, store: Store) -> None:
        with suppress(Exception):  # the store may go with the process that holds it
            while True:
                store.wait([_bell(self.rank)], _NO_TIMEOUT)
                ring = store.get(_bell(self.rank)).decode()
                store.delete_key(_bell(self.rank))
                if self._is_closing:
                    return
                if store.check([_FIRST]):
                    self.first_failure = store.get(_FIRST).decode()
                if ring == _RINGS:
                    store.set(_answer(self.rank), self._position())
                elif self._has_continued(int(ring)):
                    text = f"{self.rank} went on with that call, and {self._position()}"
                    store.set(_continued(int(ring)), text)

    def _position(self) -> str:
        position = _main_thread_position()
        return f"{WAITS} {position.removeprefix('is ')}" if self.open_guards else position

    def _has_continued(self, call: int) -> bool:
        return self.call_count >= call and call not in self.refused_calls

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _within(self, seconds: float, work: Callable[[Store], T]) -> T | None:
        """Return the result of `work`; None if the store does not answer within `seconds`."""
        future = run_within(seconds, lambda: work(another_connection(self.store)))
        return None if future is None or future.exception() else future.result()


def run_within(seconds: float, work: Callable[[], T]) -> Future[T] | None:
    """Do `work` in a thread of its own and return its future; None if it takes longer."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    wait([future], seconds)
    return future if future.done() else None


def _bell(rank: int) -> str:
    return f"bell/{rank}"


def _answer(rank: int) -> str:
    return f"here/{rank}"


def _refusal(call: int) -> str:
    return f"refused/{call}"


def _refusal_of(call: int, rank: int) -> str:
    return f"refused/{call}/{rank}"


def _message_of(call: int, rank: int) -> str:
    return f"told/{call}/{rank}"


def _continued(call: int) -> str:
    return f"went_on/{call}"


def _main_thread_position() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return f"is at {caller(frame) or 'no line of the program'}" if frame else "is ending"
