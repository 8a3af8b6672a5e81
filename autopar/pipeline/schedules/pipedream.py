"""PipeDream (Narayanan et al. 2019): 1F1B without a flush, an update after every backward.

A micro-batch reads the newest weights of each stage, and goes back with the same: stage s of p
stashes up to p - s versions, and its gradients are p - 1 - s updates old. With `vertical_sync` all
stages read the version that the first one read, p - 1 updates old; each then holds p versions.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import InvalidInput
from autopar.pipeline.schedule import UPDATE, Action, Option, Schedule, make
from autopar.pipeline.schedules.one_f_one_b import one_f_one_b
from autopar.pipeline.schedules.registry import generator, positive, straight


@generator("pipedream", is_asynchronous=True, updates_each=True)
def pipedream(
    stages: int, microbatches: int, vertical_sync: bool = False, steps: int = 1
) -> Schedule:
    """Return `steps` steps of so many micro-batches each, of which each is an update."""
    positive("pipedream", "steps", steps)
    if not isinstance(vertical_sync, bool):
        raise InvalidInput(
            "vertical_sync of pipedream is True or False",
            got=f"vertical_sync={vertical_sync!r}",
            remedy="vertical_sync=True",
        )
    count, orders = steps * microbatches, []
    for order in one_f_one_b(stages, count).orders:
        updated = list[Action]()
        for action in order:
            updated.append(action)
            if action.kind == "B":
                updated.append(Action(UPDATE, 0, action.stage, action.microbatches))
        orders.append(updated)
    options: dict[str, Option] = {"vertical_sync": True} if vertical_sync else {}
    options |= {"steps": steps} if steps > 1 else {}
    listed = make("pipedream", count, [straight(stages)], orders, **options)
    last = stages - 1
    delays = (last - stage * (not vertical_sync) for stage in range(stages))
    return replace(listed, delays=tuple(delays))
