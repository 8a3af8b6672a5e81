"""TeraPipe (Li et al. 2021): each sequence is cut into slices of tokens, which follow one another.

Causal attention reads keys and values of earlier slices alone, so that a stage goes forward with a
slice when the stage before has done it, and back from the last slice to the first. With K stages
and times t_j of the slices, forward takes sum t_j + (K - 1) max t_j for one sequence: a pipeline is
busy with a batch of 1. Several micro-batches go as in 1F1B, forwards a sequence ahead: stage s
keeps M + K - 1 - s slices, of M in a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsInt

from autopar.base.schema import is_count
from autopar.errors import InvalidInput
from autopar.pipeline.schedule import Action, Option, Schedule, make
from autopar.pipeline.schedules.registry import generator, in_turn, straight


@generator("terapipe")
def terapipe(stages: int, microbatches: int, slices: int | Sequence[int] | None = None) -> Schedule:
    """`slices`: how many equal ones, or their lengths in order; None: as many as stages."""
    lengths = _lengths(stages if slices is None else slices)
    count, orders = len(lengths), []
    numbers = range(microbatches * count)
    backwards_of = [first + count - 1 - at for first in numbers[::count] for at in range(count)]
    for stage in range(stages):
        forwards = [Action("F", 0, stage, (n,)) for n in numbers]
        backwards = [Action("B", 0, stage, (n,)) for n in backwards_of]
        ahead = min(stages - 1 - stage + count - 1, len(forwards))
        orders.append(in_turn(forwards, backwards, ahead))
    options: dict[str, Option] = {}
    if slices is not None:
        options["slices"] = lengths if isinstance(slices, Sequence) else count
    return make("terapipe", microbatches, [straight(stages)], orders, 1, lengths, **options)


def _lengths(slices: object) -> tuple[int, ...]:
    """Return the lengths of the slices, in proportion."""
    if isinstance(slices, SupportsInt) and is_count(slices):
        return (1,) * int(slices)
    lengths = tuple(slices) if isinstance(slices, Sequence) and not isinstance(slices, str) else ()
    if not lengths or not all(is_count(length) for length in lengths):
        raise InvalidInput(
            "the slices of terapipe are a number of equal ones, or the length of each in tokens",
            got=f"slices={slices!r}",
            remedy='slices=4, slices=[600, 424], or in a plan slices="auto"',
        )
    return tuple(map(int, lengths))
