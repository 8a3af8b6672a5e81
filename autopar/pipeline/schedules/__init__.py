"""Schedules by name: one file with one generator each, found when this package is imported.

    @generator("my-schedule", {"chunks": 2}, {"chunks": 4})
    def my_schedule(stages: int, microbatches: int, chunks: int = 2) -> Schedule: ...

The generator's further parameters are the options that users may give. Every synchronous schedule
takes `sync`, too: where its gradient sums start (see `simulation.synchronization`). A plan that may
choose any schedule tries this one with each of the option sets beside its name. Read `registry.py`
first, then `gpipe.py` and `one_f_one_b.py`; `chimera*.py` and `two_lanes.py` need more.

>>> schedule("interleaved", stages=4, microbatches=8, chunks=2).stages
8
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Any

from autopar.base.schema import is_count
from autopar.errors import InvalidInput, require_one_of
from autopar.pipeline.checker import check
from autopar.pipeline.schedule import RepeatedOrders, Schedule
from autopar.pipeline.schedules.registry import GENERATORS, Generate, positive
from autopar.pipeline.simulation.simulator import simulate
from autopar.pipeline.simulation.synchronization import with_sums
from autopar.text.units import counted

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

# Whose product is the number of forwards.
_COUNTS = ("stages", "microbatches", "chunks", "steps", "slices")
MOST_FORWARDS = 1 << 20
# Forwards of a schedule with as many chunks as blocks, or of one that repeats nothing.
_MOST_WEIGHED = 1 << 12
# The times, with their defaults, for which a schedule may be planned.
_PLANNED_FOR = {"forward": 1, "backward": 2, "backward_weight": None, "latency": 0}
_MOST_CHUNKS = 8  # more hardly shorten the wait, and messages take their time
NAMES = tuple(sorted(GENERATORS))
FROM_FILE = "what autopar.pipeline.load reads from a file"


def schedule(name: str, *, stages: int, microbatches: int, **options: Any) -> Schedule:
    """Return schedule `name` for a pipeline of `stages` ranks and `microbatches` in a step.

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
            f"schedule {name} takes the options {', '.join(known)}",
            got=", ".join(f"{option}={options[option]!r}" for option in unknown),
            remedy="leave the others out",
        )
    sync = options.pop("sync", None)
    sizes = {"stages": stages, "microbatches": microbatches, **options}
    counts = {word: size for word, size in sizes.items() if word in _COUNTS and is_count(size)}
    if prod(map(int, counts.values())) > MOST_FORWARDS:
        raise InvalidInput(
            f"a schedule lists every action of a step, at most {MOST_FORWARDS} forwards",
            got=", ".join(f"{word}={size}" for word, size in counts.items()),
            remedy="fewer of them",
        )
    generated = _generated(name, stages, microbatches, **options)
    if sync is None:
        return generated
    times: dict[str, Any] = {cost: options.get(cost, time) for cost, time in _PLANNED_FOR.items()}
    summed = with_sums(generated, sync, partial(simulate, generated, **times))
    return replace(summed, options=tuple(sorted({**dict(generated.options), "sync": sync}.items())))


def _generated(name: str, stages: int, microbatches: int, **options: Any) -> Schedule:
    """Return a schedule without listed sums."""
    generate = GENERATORS[name].generate
    is_known = all(isinstance(value, Hashable) for value in options.values())
    period = GENERATORS[name].period(stages, **options) if is_known else None
    if period is None or microbatches < period.settled + period.microbatches:
        return generate(stages, microbatches, **options)
    repeats = (microbatches - period.settled) // period.microbatches
    fewest = microbatches - repeats * period.microbatches
    short = _short(generate, stages, fewest, **options)
    listed = partial(generate, stages, microbatches, **options)
    orders = RepeatedOrders(short, period.microbatches, repeats, listed)
    return replace(short, microbatches=microbatches, orders=orders)


@lru_cache(maxsize=64, typed=True)
def _short(generate: Generate, stages: int, microbatches: int, **options: Any) -> Schedule:
    """Return the schedule of which longer ones repeat a part."""
    return generate(stages, microbatches, **options)


def schedule_of_parts(name: str, *, stages: int, parts: int, **options: Any) -> Schedule:
    """Return schedule `name` for a batch in so many parts: micro-batches, or halves of them."""
    generated = schedule(name, stages=stages, microbatches=parts, **options)
    if generated.parts == 1:
        return generated
    if parts % generated.parts:
        raise InvalidInput(
            f"schedule {name} cuts each micro-batch into {generated.parts} parts",
            got=f"a batch in {counted(parts, 'part')}",
            remedy=f"a multiple of {generated.parts}",
        )
    return schedule(name, stages=stages, microbatches=parts // generated.parts, **options)


def known_names() -> list[str]:
    """Return the names of all schedules, those that a user has registered among them."""
    return sorted(GENERATORS)


def option_names(name: str) -> tuple[str, ...]:
    """Return the options that schedule `name` takes."""
    generator = GENERATORS[name]
    # Of an asynchronous schedule each update follows the sum of its gradient.
    return generator.options if generator.is_asynchronous else (*generator.options, "sync")


def most_chunks(stages: int, microbatches: int, blocks: int) -> int:
    """Return the most chunks on a rank that are tried for a program of `blocks` equal blocks."""
    short = min(microbatches, 4 * stages)  # of an interleaved schedule, of which it repeats a part
    most = min(_MOST_CHUNKS, blocks // stages, _MOST_WEIGHED // (stages * short))
    even = (chunks for chunks in range(most, 2, -1) if blocks % (stages * chunks) == 0)
    return next(even, max(2, most))  # all chunks have as many blocks, if some number allows it


def microbatches_of_step(name: str, stages: int) -> int:
    """Return how many micro-batches a step has if nobody says: one if each is an update, or its
    slices keep all stages busy."""
    known = GENERATORS.get(name)
    is_enough = known is not None and (known.updates_each or "slices" in known.options)
    return 1 if is_enough else 2 * stages


def weighed_names(
    stages: int, microbatches: int, blocks: int = 0, *, asynchronous: bool = False
) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and options of the schedules to weigh for these numbers.

    `microbatches`: those of the batch, or the halves of some schedules.

    Schedules with chunks are tried with as many as `blocks` equal blocks allow, too. Those that
    repeat nothing are left out where they have many actions. `asynchronous`: whether gradients may
    be older than the weights that they change.
    """
    names: list[tuple[str, Mapping[str, Any]]] = []
    most = most_chunks(stages, microbatches, blocks)
    for name, generator in sorted(GENERATORS.items()):
        weighed = generator.weighed if asynchronous or not generator.is_asynchronous else ()
        if any(0 < options.get("chunks", 0) < most for options in weighed):
            weighed = *weighed, {"chunks": most}
        for options in weighed:
            repeats = generator.period(stages, **options) is not None
            if repeats or stages * microbatches <= _MOST_WEIGHED:
                names.append((name, options))
    return names


def weighed_schedules(stages: int, microbatches: int, blocks: int = 0) -> list[Schedule]:
    """Return the schedules to weigh that exist for these numbers, the plainest first.

    Of equal orders under several names only the first is returned. Schedules with chunks are tried
    with as many as `blocks` equal blocks allow, too.
    """
    schedules: list[Schedule] = []
    for name, options in weighed_names(stages, microbatches, blocks):
        with suppress(InvalidInput):
            candidate = schedule_of_parts(name, stages=stages, parts=microbatches, **options)
            _check_short(candidate.short)
            schedules.append(candidate)
    schedules.sort(key=lambda s: (s.pipes, len(s.split_stages) > 0, s.chunks))
    first = {(s.placement, s.short.orders, s.parts): s for s in reversed(schedules)}
    return [s for s in schedules if s is first[s.placement, s.short.orders, s.parts]]


_check_short = lru_cache(maxsize=64)(check)
