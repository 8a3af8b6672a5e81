"""Plan broadcast: all ranks of a world carry out one plan, that of rank 0.

Rank 0 plans and sends its decisions as plain data. Every other rank captures its own model in the
meantime and attaches the decisions to it, which compares the two models. A rank that brought a plan
compares the two plans. A rank that disagrees, or that refuses its arguments, is named on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import AutoparError, InvalidInput, error_text
from autopar.plans.plan import Plan, SavedPlan
from autopar.plans.plan_diff import compare, setting_name
from autopar.plans.saved_value import deciding
from autopar.runtime.backends.world import joined

T = TypeVar("T")
Attach = Callable[[SavedPlan], Plan]
_ONE_CALL = (
    "all ranks make the same calls in the same order: steps, evaluation, and what saves or gathers"
)


def require_same_call(check_alone: Callable[[], None], **alike: Hashable) -> None:
    """Refuse, on all ranks, an error of `check_alone` on one rank, and differing calls.

    `alike` are options that must be equal on all ranks, since they decide when ranks wait.
    """
    _, error = _attempt(check_alone)
    world = joined()
    calls = 0 if world is None else world.liveness.call_count
    from_ranks = gather_from_ranks((None if error is None else _failure_text(error), alike, calls))
    if world is not None:  # the next call has one number on all ranks
        world.liveness.call_count = max(calls for _, _, calls in from_ranks)
    if error is not None:
        raise error
    if wrong := _by_rank([text for text, _, _ in from_ranks]):
        raise InvalidInput(
            "what one rank refuses, all ranks refuse",
            got=wrong,
            remedy="make the same call on all ranks, and mend what failed there",
        )
    for name in alike:
        values = [options[name] for _, options, _ in from_ranks]
        if len(set(values)) > 1:
            is_call = name == "call"
            raise InvalidInput(
                _ONE_CALL if is_call else f"all ranks give the same {name}",
                got="\n".join(
                    f"rank {rank}: {value if is_call else f'{name}={value}'}"
                    for rank, value in enumerate(values)
                ),
                remedy="make the same call on all ranks",
            )


def agree_on_plan(make: Callable[[], Plan], prepare: Callable[[], Attach]) -> Plan:
    """Return the plan of this rank, which rank 0 makes.

    While rank 0 calls `make`, the other ranks call `prepare`. It returns the function that attaches
    the plan of rank 0 to what a rank has prepared.
    """
    plan: Plan | None
    if dist.get_rank() == 0:

        def first() -> tuple[Plan, Any]:
            plan = make()
            return plan, SavedPlan.of(plan).to_json()

        result, error = _attempt(first)
        plan, data = result or (None, {"error": "" if error is None else _failure_text(error)})
        broadcast_from_rank0(data)
    else:
        attach, unprepared = _attempt(prepare)
        received = broadcast_from_rank0(None)

        def other() -> Plan:
            if "error" in received:
                raise InvalidInput(
                    "rank 0 makes the plan for all ranks",
                    got=f"on rank 0: {received['error']}",
                    remedy="mend what failed there",
                )
            if attach is None:
                assert unprepared is not None
                raise unprepared
            return attach(SavedPlan.from_json(received, "the plan of rank 0"))

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


def require_equal_plan(plan: Plan, first: SavedPlan) -> Plan:
    """Return this rank's plan if it does the same as the plan of rank 0; refuse it otherwise.

    Assumptions about machines, and the times that follow from them, may differ.
    """
    differences = plan.fingerprint.differences(first.fingerprint)
    if not differences:
        diff = compare(plan, first)
        local_settings = {
            setting_name(setting) for setting in deciding() if setting.metadata.get("is_of_rank")
        }
        if _stage_order(plan) == _stage_order(first):
            local_settings.add("pipeline")
        settings = {
            name: pair for name, pair in diff.settings.items() if name not in local_settings
        }
        pairs = {**settings, **diff.regions, **diff.parameters, **diff.values}
        differences = [f"{name}: {setting}, not {two}" for name, (setting, two) in pairs.items()][
            :4
        ]
    if differences:
        raise InvalidInput(
            "the plan of every rank is that of rank 0",
            got="\n".join(differences),
            remedy="plan in the same way on every rank, or leave planning to parallelize()",
        )
    return plan


def _stage_order(plan: Plan | SavedPlan) -> object:
    """Return the pipeline of a plan without the costs of its stages."""
    pipelining = plan.pipelining
    return pipelining and (
        replace(pipelining, stages=()),
        [stage.starts for stage in pipelining.stages],
    )


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `work`, or its error, which the others learn before it is raised."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def broadcast_from_rank0(data: Any) -> Any:
    """Return the `data` of rank 0 on every rank."""
    box = [data]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_from_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, by rank, over the world or another group of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def _by_rank(texts: Sequence[str | None]) -> str:
    return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)


def _failure_text(error: Exception) -> str:
    if isinstance(error, AutoparError):
        got = f": {error.got}" if error.got is not None else ""
        return f"{error.rule}{got}"
    return error_text(error)
