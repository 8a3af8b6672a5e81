"""From first: what comes of a loop over something that stands on rank 0 alone, on all ranks.

Every rank asks for the next one, in the same order: rank 0 makes it and sends it over the host, in
a group of its own, so that it may come in another thread than the program runs in. The end of the
loop and an error in it come on all ranks too. What rank 0 draws of random numbers meanwhile is
drawn on each rank whose generators stood as its own did, so that a script that draws alike on all
ranks goes on to do so. Loops are numbered: a rank that has left one earlier than others finds what
it is sent to be of another, and all stop.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import InvalidInput, error_text
from autopar.runtime.backends import process_generators
from autopar.runtime.backends.world import World
from autopar.runtime.launching.failures import stop_all_on_failure

_END = "end"


class FromFirst:
    """Gives on all ranks what `given` gives on rank 0; those of other ranks are not read."""

    def __init__(self, given: Any, here: World, taken: Callable[[Any], Any]) -> None:
        """`taken`: what this rank takes of each."""
        self._given, self._here, self._taken = given, here, taken

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[Any]:
        self._here.loops += 1
        return self._read(self._here.loops)

    def _read(self, loop: int) -> Iterator[Any]:
        coming = _sent(self._given) if self._here.rank == 0 else None
        turn = 0
        while True:
            turn += 1
            data, error = (b"", None) if coming is None else next(coming)
            value, told = self._exchanged((loop, turn), data)
            if error is not None:
                raise error
            if told == _END:
                return
            if told:
                raise InvalidInput(
                    "rank 0 says in which order samples come, for all ranks",
                    got=f"on rank 0: {told}",
                    remedy="mend what failed there",
                )
            yield self._taken(value)

    def _exchanged(self, place: tuple[int, int], data: bytes) -> tuple[Any, str]:
        """What rank 0 has sent at this place; or why there is nothing."""
        here = self._here
        with stop_all_on_failure(here):
            box: list[Any] = [(place, data)]
            dist.broadcast_object_list(box, 0, here.host_group, torch.device("cpu"))
            (loop, turn), data = box[0]
            value, told, drawn = pickle.loads(data)
            if (loop, turn) != place:
                raise InvalidInput(
                    "all ranks take the same batches of a split loader, in the same order",
                    got=f"rank {here.rank} asks for batch {place[1]} of loop {place[0]} over one, "
                    f"rank 0 for batch {turn} of loop {loop}",
                    remedy="begin and leave loops over it on all ranks alike",
                )
        if here.rank != 0:
            process_generators.follow(drawn)
        return value, told


def _sent(given: Any) -> Iterator[tuple[bytes, Exception | None]]:
    """What rank 0 sends of it, with what was drawn for it, and the error that ends it."""
    before = process_generators.states()

    def packed(value: Any, told: str) -> bytes:
        return pickle.dumps((value, told, process_generators.moved(before)))

    try:
        for value in given:
            yield packed(value, ""), None
            before = process_generators.states()
    except Exception as error:
        yield packed(None, error_text(error)), error
        return
    yield packed(None, _END), None
