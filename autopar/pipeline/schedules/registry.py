"""The registry of schedule generators, and the checks and orders that they share."""

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
class Period:
    """Describe how a schedule grows: by a part that is repeated on each rank.

    A schedule of at least `settled` micro-batches has the actions of one with `microbatches` fewer,
    and on each rank the actions of so many micro-batches more, somewhere in the middle.
    """

    microbatches: int
    settled: int


@dataclass(frozen=True)
class Generator:
    """Hold a function that makes schedules, the option sets that a search tries, and the period."""

    generate: Generate
    weighed: tuple[dict[str, Any], ...]
    period: Callable[..., Period | None]  # by the number of stages and the options
    is_asynchronous: bool = False  # gradients are older than the weights that they change
    updates_each: bool = False  # each micro-batch is an update

    @cached_property
    def options(self) -> tuple[str, ...]:
        """Return the names of the options that users may give."""
        return tuple(inspect.signature(self.generate).parameters)[2:]


GENERATORS: dict[str, Generator] = {}


def no_period(stages: int, **options: Any) -> None:
    """Return None, as a schedule does that repeats nothing."""


def generator(
    name: str,
    *weighed: dict[str, Any],
    period: Callable[..., Period | None] = no_period,
    is_asynchronous: bool = False,
    updates_each: bool = False,
) -> Callable[[Generate], Generate]:
    """Register the decorated function as the schedule `name`.

    `weighed`: option sets, each of which is tried where a plan may choose any schedule. `period`:
    how it grows, by the number of stages and the options; None: each action is looked at.
    `is_asynchronous`: its gradients are older than the weights that they change. `updates_each`:
    each micro-batch is an update.
    """

    def register(function: Generate) -> Generate:
        known = GENERATORS.get(name)
        if known is not None and known.generate.__module__ != function.__module__:
            raise InvalidInput(
                "a schedule has a name of its own",
                got=f"{name!r}, which {known.generate.__module__} has registered",
                remedy=f'@generator("my-{name}")',
            )
        GENERATORS[name] = Generator(function, weighed, period, is_asynchronous, updates_each)
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
    """Return `ahead` forwards, then forwards and backwards in turn, then the backwards left."""
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        order += forward, backward
    return order + backwards[len(forwards) - ahead :]


def straight(ranks: int) -> list[int]:
    """Return the placement of stage s on rank s."""
    return list(range(ranks))


def reverse(ranks: int) -> list[int]:
    """Return the placement with stage 0 on the last rank."""
    return list(range(ranks - 1, -1, -1))


def vee(ranks: int) -> list[int]:
    """Return the placement of two chunks in a V: to the last rank and back to the first."""
    return straight(ranks) + reverse(ranks)


def leave_out(order: Iterable[Action], microbatches: int) -> list[Action]:
    """Return the order without micro-batches from `microbatches` on.

    A schedule stays sound without a micro-batch: the other actions keep their order.
    """
    return [action for action in order if action.microbatches[0] < microbatches]


def walk_chunks(stages: int, microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """Return the chunks and micro-batches that a rank goes through, in whole groups.

    A group of as many micro-batches as there are stages runs on its first chunk, then on its next.
    """
    return [
        (chunk, group * stages + member)
        for group in range(-(-microbatches // stages))
        for chunk in range(chunks)
        for member in range(stages)
    ]
