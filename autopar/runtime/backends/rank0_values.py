"""Iterate on all ranks over values that rank 0 alone computes, such as a sampler's indices.

Rank 0 sends each value over the host, in a separate group, so that another thread may receive it.
It also sends the end of the loop, errors, and the moves of random generators, which ranks in the
same state repeat: a script that draws the same numbers on all ranks continues to do so. Loops are
numbered: if a rank has left a loop early, the numbers differ and all ranks stop.
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


class Rank0Values:
    """Yields on all ranks the values of an iterable on rank 0; other ranks do not read theirs."""

    def __init__(self, values: Any, world: World, select: Callable[[Any], Any]) -> None:
        """`select`: a function that returns this rank's part of a value."""
        self._values, self._world, self._select = values, world, select

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        self._world.loops += 1
        return self._read(self._world.loops)

    def _read(self, loop: int) -> Iterator[Any]:
        messages = _messages(self._values) if self._world.rank == 0 else None
        turn = 0
        while True:
            turn += 1
            data, error = (b"", None) if messages is None else next(messages)
            value, ending = self._exchange(loop, turn, data)
            if error is not None:
                raise error
            if ending == _END:
                return
            if ending:
                raise InvalidInput(
                    "rank 0 says in which order samples come, for all ranks",
                    got=f"on rank 0: {ending}",
                    remedy="mend what failed there",
                )
            yield self._select(value)

    def _exchange(self, loop: int, turn: int, data: bytes) -> tuple[Any, str]:
        """Return the value that rank 0 sent at this turn, and `_END` or an error's text, or ""."""
        world = self._world
        with stop_all_on_failure(world):
            box: list[Any] = [((loop, turn), data)]
            dist.broadcast_object_list(box, 0, world.host_group, torch.device("cpu"))
            (sent_loop, sent_turn), data = box[0]
            value, ending, moves = pickle.loads(data)
            if (sent_loop, sent_turn) != (loop, turn):
                raise InvalidInput(
                    "all ranks take the same batches of a split loader, in the same order",
                    got=f"rank {world.rank} asks for batch {turn} of loop {loop} over one, "
                    f"rank 0 for batch {sent_turn} of loop {sent_loop}",
                    remedy="begin and leave loops over it on all ranks alike",
                )
        if world.rank != 0:
            process_generators.follow(moves)
        return value, ending


def _messages(values: Any) -> Iterator[tuple[bytes, Exception | None]]:
    """Yield rank 0's message for each value and for the end, with the error that ends the loop."""
    before = process_generators.states()

    def pack(value: Any, ending: str) -> bytes:
        return pickle.dumps((value, ending, process_generators.moves_since(before)))

    try:
        for value in values:
            yield pack(value, ""), None
            before = process_generators.states()
    except Exception as error:
        yield pack(None, error_text(error)), error
        return
    yield pack(None, _END), None
