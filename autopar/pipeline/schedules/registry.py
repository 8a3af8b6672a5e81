"""Where generators register, and the checks that they share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopar.base.schema import is_count
from autopar.errors import InvalidInput
from autopar.pipeline.schedule import Action, Schedule

Generate = Callable[..., Schedule]


@dataclass(frozen=True)
class Generator:
    """A way to make schedules, and the options with which it is weighed where none is named."""

    generate: Generate
    weighed: tuple[dict[str, Any], ...]

    @cached_property
    def options(self) -> tuple[str, ...]:
        """The names of the options that users may give."""
        return tuple(inspect.signature(self.generate).parameters)[2:]


GENERATORS: dict[str, Generator] = {}


def generator(name: str, *weighed: dict[str, Any]) -> Callable[[Generate], Generate]:
    """Register the decorated function as the schedule `name`.

    `weighed`: options with each of which it is tried where a plan may have any schedule.
    """

    def register(function: Generate) -> Generate:
        GENERATORS[name] = Generator(function, weighed)
        return function

    return register


def even_stages(name: str, stages: int) -> None:
    """Refuse an odd number of stages: the two directions would meet on the same slot of a rank."""
    if stages % 2:
        raise InvalidInput(
            f"{name} runs two directions over an even number of stages",
            got=f"stages={stages}",
            remedy=f"use {stages - 1 or 2} or {stages + 1} stages",
        )


def positive(name: str, option: str, value: object) -> None:
    """Refuse an option that is not a whole number of at least 1."""
    if not is_count(value):
        raise InvalidInput(
            f"{option} of {name}: a whole number, at least 1",
            got=f"{option}={value!r}",
            remedy=f"give {option} as 1, 2, ...",
        )


def in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """So many forwards, then a backward and a forward in turn, then what is left of backwards."""
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        order += forward, backward
    return order + backwards[len(forwards) - ahead :]


def straight(ranks: int) -> list[int]:
    """Stage s on rank s."""
    return list(range(ranks))


def reverse(ranks: int) -> list[int]:
    """Stage 0 on the last rank."""
    return list(range(ranks - 1, -1, -1))


def vee(ranks: int) -> list[int]:
    """Two chunks in a V: down to the last rank and back to the first."""
    return straight(ranks) + reverse(ranks)


def leave_out(order: Iterable[Action], microbatches: int) -> list[Action]:
    """The order without micro-batches from `microbatches` on.

    Leaving whole micro-batches out keeps a schedule sound: what is left still runs in the order in
    which it ran among the others.
    """
    return [action for action in order if action.microbatches[0] < microbatches]
