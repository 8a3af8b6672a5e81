"""PipeDream-2BW (Narayanan et al. 2021): 1F1B without a flush, two versions of the weights.

The gradients of a step's micro-batches, at least as many as stages, are added up and applied by one
update. All stages read the weights of one update ago. The next step begins before this one has
drained, so only the first one waits: `steps` lists several.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import InvalidInput
from autopar.pipeline.schedule import UPDATE, Action, Schedule, make
from autopar.pipeline.schedules.one_f_one_b import one_f_one_b
from autopar.pipeline.schedules.registry import generator, positive, straight
from autopar.text.units import counted


@generator("pipedream-2bw", {}, is_asynchronous=True)
def pipedream_2bw(stages: int, microbatches: int, steps: int = 1) -> Schedule:
    """Return `steps` steps of so many micro-batches each."""
    positive("pipedream-2bw", "steps", steps)
    if microbatches < stages:
        raise InvalidInput(
            "pipedream-2bw keeps two versions of the weights: a step has at least as many "
            "micro-batches as stages",
            got=f"{counted(microbatches, 'micro-batch')} for {counted(stages, 'stage')}",
            remedy=f"microbatches={stages} or more",
        )
    count, orders = steps * microbatches, []
    for stage, order in enumerate(one_f_one_b(stages, count).orders):
        updated = list[Action]()
        for action in order:
            updated.append(action)
            last = action.microbatches[0] + 1
            if action.kind == "B" and last % microbatches == 0:
                step = tuple(range(last - microbatches, last))
                updated.append(Action(UPDATE, 0, stage, step))
        orders.append(updated)
    options = {"steps": steps} if steps > 1 else {}
    listed = make("pipedream-2bw", count, [straight(stages)], orders, **options)
    return replace(listed, delays=(1,) * stages)
