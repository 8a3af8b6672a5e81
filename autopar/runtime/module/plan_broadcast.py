"""Plan broadcast: all ranks of a world carry out one plan, that of rank 0.

Rank 0 plans and sends its decisions as plain data. Every other rank attaches them to the model that
it has itself, which compares the two models; or, if it brought a plan, compares the two plans. A
rank that disagrees, or that refuses what it was called with, is named on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import AutoparError, InvalidInput, said
from autopar.plan.plan import Plan, SavedPlan
from autopar.plan.plan_diff import compare, setting_name
from autopar.plan.saved_value import deciding
from autopar.runtime.backends.world import joined

T = TypeVar("T")
_ONE_CALL = (
    "all ranks make the same calls in the same order: steps, evaluation, and what saves or gathers"
)


def require_same_call(check_alone: Callable[[], None], **alike: Hashable) -> None:
    """Before rank 0 plans: what `check_alone` raises on one rank is refused on all.

    `alike`: options that are equal on all ranks, since they say when ranks wait for one another.
    """
    _, error = _attempt(check_alone)
    here = joined()
    calls = 0 if here is None else here.liveness.call_count
    told = gather_from_ranks((None if error is None else _failure_text(error), alike, calls))
    if here is not None:  # whatever calls they came from, the next one has one number
        here.liveness.call_count = max(calls for _, _, calls in told)
    if error is not None:
        raise error
    if wrong := _by_rank([text for text, _, _ in told]):
        raise InvalidInput(
            "what one rank refuses, all ranks refuse",
            got=wrong,
            remedy="make the same call on all ranks, and mend what failed there",
        )
    for name in alike:
        given = [options[name] for _, options, _ in told]
        if len(set(given)) > 1:
            is_call = name == "call"
            raise InvalidInput(
                _ONE_CALL if is_call else f"all ranks give the same {name}",
                got="\n".join(
                    f"rank {rank}: {one if is_call else f'{name}={one}'}"
                    for rank, one in enumerate(given)
                ),
                remedy="make the same call on all ranks",
            )


def agree_on_plan(make: Callable[[], Plan], attach: Callable[[SavedPlan], Plan]) -> Plan:
    """The plan of this rank. Rank 0 calls `make`, the others `attach` what it made."""
    plan: Plan | None
    if dist.get_rank() == 0:

        def first() -> tuple[Plan, Any]:
            plan = make()
            return plan, SavedPlan.of(plan).to_json()

        made, error = _attempt(first)
        plan, data = made or (None, {"error": "" if error is None else _failure_text(error)})
        broadcast_from_rank0(data)
    else:
        received = broadcast_from_rank0(None)

        def other() -> Plan:
            if "error" not in received:
                return attach(SavedPlan.from_json(received, "the plan of rank 0"))
            raise InvalidInput(
                "rank 0 makes the plan for all ranks",
                got=f"on rank 0: {received['error']}",
                remedy="mend what failed there",
            )

        plan, error = _attempt(other)
    texts = gather_from_ranks(None if error is None else _failure_text(error))
    if error is not None and (dist.get_rank() == 0 or texts[0] is not None):
        raise error
    if wrong := _by_rank(texts):
        raise InvalidInput(
            "all ranks have one model, inputs of one shape, and one plan",
            got=wrong,
            remedy="build the model and its example inputs in the same way on every rank",
        )
    assert plan is not None
    return plan


def require_equal_plan(own: Plan, first: SavedPlan) -> Plan:
    """`own`, if it does what the plan of rank 0 does: what machines were taken to be, and the times
    that follow from that, are for each to know."""
    differences = own.fingerprint.differences(first.fingerprint)
    if not differences:
        diff = compare(own, first)
        own_of_ranks = {setting_name(one) for one in deciding() if one.metadata.get("is_of_rank")}
        if _stage_order(own) == _stage_order(first):
            own_of_ranks.add("pipeline")
        settings = {name: pair for name, pair in diff.settings.items() if name not in own_of_ranks}
        pairs = {**settings, **diff.regions, **diff.parameters, **diff.values}
        differences = [f"{name}: {one}, not {two}" for name, (one, two) in pairs.items()][:4]
    if differences:
        raise InvalidInput(
            "the plan of every rank is that of rank 0",
            got="\n".join(differences),
            remedy="plan in the same way on every rank, or leave planning to parallelize()",
        )
    return own


def _stage_order(plan: Plan | SavedPlan) -> object:
    """Its pipeline but for what its stages take."""
    one = plan.pipelining
    return one and (replace(one, stages=()), [stage.starts for stage in one.stages])


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What this rank makes, or why not: the others are to hear of that before it is raised."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def broadcast_from_rank0(data: Any) -> Any:
    """What rank 0 gives, on every rank."""
    box = [data]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_from_ranks(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What all ranks give, by rank, in the world of now or another group of all of them."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=group)
    return found


def _by_rank(texts: Sequence[str | None]) -> str:
    return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)


def _failure_text(error: Exception) -> str:
    if isinstance(error, AutoparError):
        given = f": {error.got}" if error.got is not None else ""
        return f"{error.rule}{given}"
    return said(error)
