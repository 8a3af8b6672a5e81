"""Requested schedule: the one that options name, as a mapping or as a finished schedule.

    requested_schedule("chimera", {"pipes": 4}, ranks=8, count=16)

Asynchronous schedules are taken where they are allowed, and only those of one update in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import InvalidInput
from autopar.pipeline.checker import check
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedules import known_names, microbatches_of_step, option_names, schedule
from autopar.pipeline.weight_versions import count_updates
from autopar.text.units import counted

DEFAULT_SCHEDULE = "1f1b"


def requested_schedule(
    request: str | Mapping[str, Any] | Schedule | None,
    settings: Mapping[str, Any] | None,
    *,
    ranks: int,
    count: int | None,
    asynchronous: bool,
) -> Schedule:
    """Return the checked schedule for so many ranks; `count`: of micro-batches, None: to choose.

    `request` "auto" or None is the default one, with `settings` as its options."""
    value = None if request == "auto" else request
    options = dict(settings or {})
    if isinstance(value, Schedule):
        count = value.microbatches if count is None else count
        if options or value.ranks != ranks or count not in (1, value.microbatches):
            raise InvalidInput(
                "a finished schedule fits the mesh and the micro-batches, and takes no options",
                got=f"a schedule of {counted(value.ranks, 'rank')} and "
                f"{counted(value.microbatches, 'micro-batch')} for {counted(ranks, 'rank')} and "
                f"{counted(count, 'micro-batch')}, options {options}",
                remedy="make the schedule for this mesh, or give its name",
            )
        requested = value
    else:
        if isinstance(value, Mapping):
            options = {**value, **options}
            value = options.pop("name", DEFAULT_SCHEDULE)
        name = DEFAULT_SCHEDULE if value is None else value
        count = microbatches_of_step(name, ranks) if count is None else count
        requested = schedule(name, stages=ranks, microbatches=count, **options)
    check(requested)
    _require_runnable(requested, asynchronous=asynchronous)
    return requested


def sliced_by_price(
    request: str | Mapping[str, Any] | Schedule | None, settings: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the options of a schedule whose slices are "auto". None: of no such."""
    if not isinstance(settings, Mapping | None):
        return None
    name, options = request, dict(settings or {})
    if isinstance(request, Mapping):
        options = {**request, **options}
        name = options.pop("name", DEFAULT_SCHEDULE)
    if not isinstance(name, str) or options.get("slices") != "auto" or name not in known_names():
        return None
    return (name, options) if "slices" in option_names(name) else None


def _require_runnable(requested: Schedule, *, asynchronous: bool) -> None:
    """Refuse several updates in a step, and stale gradients that are not allowed."""
    if count_updates(requested) > 1:
        raise InvalidInput(
            "a step makes one update; schedules with several are checked, simulated and drawn",
            got=f"schedule={requested.name!r} with {counted(count_updates(requested), 'update')}",
            remedy='microbatches=1 with schedule="pipedream", which updates after each '
            'micro-batch; "pipedream-2bw" without steps, which updates once a step',
        )
    if any(requested.delays) and not asynchronous:
        raise InvalidInput(
            "an asynchronous schedule is taken where it is allowed: its gradients are older than "
            "the weights that they change, so the optimizer takes another trajectory",
            got=f"schedule={requested.name!r}",
            remedy=f'asynchronous=True beside it, or schedule="{DEFAULT_SCHEDULE}"',
        )
