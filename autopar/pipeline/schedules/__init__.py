"""The schedules by name. To add one, add a file here with one generator:

    @generator("my-schedule", {"chunks": 2}, {"chunks": 4})
    def my_schedule(stages: int, microbatches: int, chunks: int = 2) -> Schedule: ...

Its keyword parameters are the options that users may give. A plan that may have any schedule weighs
it with each of the options beside its name.

>>> schedule("interleaved", stages=4, microbatches=8, chunks=2).stages
8
"""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress
from math import prod
from typing import Any

from autopar.base.schema import is_count
from autopar.errors import InvalidInput, require_one_of
from autopar.pipeline.checker import check
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedules.registry import GENERATORS, positive

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

_COUNTS = ("stages", "microbatches", "chunks")  # whose product is the number of forwards
MOST_FORWARDS = 1 << 20
_MOST_WEIGHED = 1 << 12  # of a schedule with as many chunks as there are blocks
NAMES = tuple(sorted(GENERATORS))
FROM_FILE = "what autopar.pipeline.load reads from a file"


def schedule(name: str, *, stages: int, microbatches: int, **options: Any) -> Schedule:
    """The schedule `name` for a pipeline of `stages` ranks and `microbatches` in a step.

    `microbatches` counts all pipes together. A schedule with several chunks on a rank cuts the
    model into `stages` x chunks stages.
    """
    require_one_of("a schedule", name, known_names(), FROM_FILE)
    for label, value in (("stages", stages), ("microbatches", microbatches)):
        positive("a schedule", label, value)
    known = option_names(name)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise InvalidInput(
            f"schedule {name} takes {'the options ' + ', '.join(known) if known else 'no options'}",
            got=", ".join(f"{option}={options[option]!r}" for option in unknown),
            remedy="leave the others out",
        )
    sizes = {"stages": stages, "microbatches": microbatches, **options}
    counts = {word: size for word, size in sizes.items() if word in _COUNTS and is_count(size)}
    if prod(map(int, counts.values())) > MOST_FORWARDS:
        raise InvalidInput(
            f"a schedule lists every action of a step, at most {MOST_FORWARDS} forwards",
            got=", ".join(f"{word}={size}" for word, size in counts.items()),
            remedy="fewer of them",
        )
    return GENERATORS[name].generate(stages, microbatches, **options)


def known_names() -> list[str]:
    """The schedules that are there by now, with those that a user has registered."""
    return sorted(GENERATORS)


def option_names(name: str) -> tuple[str, ...]:
    """The options that schedule `name` takes."""
    return GENERATORS[name].options


def most_chunks(stages: int, microbatches: int, blocks: int) -> int:
    """How many chunks on each rank are weighed at most, of a program of so many equal blocks."""
    return max(2, min(blocks // stages, _MOST_WEIGHED // (stages * microbatches)))


def weighed_schedules(stages: int, microbatches: int, blocks: int = 0) -> list[Schedule]:
    """The schedules to weigh, those that exist for these numbers, the plainest first; of those
    that are one order under several names, the first. `blocks`: of these each chunk has one at
    least, and as many chunks as that gives are weighed, too."""
    made: list[Schedule] = []
    most = most_chunks(stages, microbatches, blocks)
    for name in NAMES:
        weighed = GENERATORS[name].weighed
        if any(0 < options.get("chunks", 0) < most for options in weighed):
            weighed = *weighed, {"chunks": most}
        for options in weighed:
            with suppress(InvalidInput):
                one = schedule(name, stages=stages, microbatches=microbatches, **options)
                check(one)
                made.append(one)
    made.sort(key=lambda one: (one.pipes, len(one.split_stages) > 0, one.chunks))
    known = {(one.placement, one.orders, one.parts): one for one in reversed(made)}
    return [one for one in made if one is known[one.placement, one.orders, one.parts]]
