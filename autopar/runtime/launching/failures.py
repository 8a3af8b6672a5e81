"""Failures: when one rank fails, all ranks stop soon and name the rank that failed first.

A rank that fails writes its error to the store of the world, also an error of the user's own loop
that ends the process. Then it leaves its process groups, which ends the collectives that others
wait in (over gloo, when the process ends). A rank whose collective broke leaves too, and reads the
first failure. If there is none, a rank was lost: one that does not answer when all bells are rung.

A call that a rank refuses before it waits for others ends nothing if all ranks refuse it. If others
continued that call, or do not come to it, the rank leaves the world at its next call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import torch.distributed as dist

from autopar._torch.communication import is_raised_by_collective, world_timeout
from autopar._torch.process_groups import abort_groups
from autopar.errors import AutoparError, ExecutionError, InvalidInput, error_text
from autopar.runtime.backends.world import World, joined, require_living
from autopar.runtime.launching.rank_liveness import WAITS
from autopar.text.source_lines import caller

_PATIENCE = 5.0  # seconds to wait for the others' answers once a collective has broken


@contextmanager
def local_checks(world: World) -> Iterator[None]:
    """Check a call on this rank alone, before ranks wait for one another; record a refusal."""
    _require_common_refusal(world)
    try:
        yield
    except Exception as error:
        world.liveness.record_refusal(_text(world, error), _PATIENCE)
        raise
    world.liveness.call_count += 1


@contextmanager
def stop_all_on_failure(world: World | None = None, *, agreed: bool = False) -> Iterator[None]:
    """Guard code in which ranks of a world, by default the current one, wait for one another.

    `agreed`: all ranks raise the same error, unless a collective broke, and the world goes on.
    """
    world = world or joined()
    if world is None:
        require_living()
        yield
        return
    _require_common_refusal(world)
    world.liveness.open_guards += 1
    try:
        yield
    except Exception as error:
        if joined() is not world or isinstance(error, RankStopped):
            raise
        if is_collective_error(error):
            raise _leave_after_collective(world, error) from error
        if agreed:
            raise
        failure = _text(world, error)
        first = world.liveness.report_failure(failure, _PATIENCE)
        _leave_groups(world, first)
        if _without_rank(first) == _without_rank(failure):  # the error of this rank, or of all
            raise
        raise _stopped_by(first) from error
    finally:
        world.liveness.open_guards -= 1


def exchange_call(world: World, message: str, description: str) -> list[str]:
    """Return the messages of all ranks about a call that needs a new program, inside of
    `local_checks`. Refuse a call that others do not make; `description` names it in the error."""
    if world.size == 1:
        return [message]
    messages = world.liveness.exchange_call(message, world_timeout().total_seconds())
    if isinstance(messages, str):
        raise InvalidInput(
            "a call that needs a new program is made on all ranks: they make it together",
            got=f"on rank {world.rank} {description}\n{messages}",
            remedy="make the same call on all ranks, in the same modes",
        )
    return messages


def report_uncaught_errors() -> None:
    """Have an error that ends this process reported to the other ranks first, from now on."""
    previous = sys.excepthook
    if getattr(previous, "tells_other_ranks", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report_failure(error)
        previous(kind, error, trace)

    hook.tells_other_ranks = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def report_failure(error: BaseException) -> None:
    """Report the error by which this rank ends to the other ranks."""
    world = joined()
    if world is not None:
        world.liveness.report_failure(_text(world, error), _PATIENCE)


def _require_common_refusal(world: World) -> None:
    """Raise `RankStopped` unless all ranks refused the call that this rank refused last."""
    require_living(world)
    refusal = world.liveness.pending_refusal
    if refusal is None:
        return
    if others := world.liveness.await_refusals(world_timeout().total_seconds()):
        failure = f"{refusal}\n{others}"
        first = world.liveness.report_failure(failure, _PATIENCE)
        _leave_groups(world, first)
        raise _refused_alone(failure) if first == failure else _stopped_by(first)


class RankStopped(ExecutionError):
    """Raised on ranks that stop because another failed."""


def _stopped_by(first: str) -> RankStopped:
    return RankStopped(
        "another rank failed first, so this one stopped",
        got=first,
        remedy="mend what failed there",
    )


def _refused_alone(failure: str) -> RankStopped:
    return RankStopped(
        "all ranks refuse a call, or none, within the timeout of the world",
        got=failure,
        remedy="make the same calls on all ranks, with inputs that all accept or refuse",
    )


def _leave_after_collective(world: World, error: Exception) -> RankStopped:
    """Leave the process groups and return an error with the reason why the others left."""
    _leave_groups(world, _text(world, error))
    answers = world.liveness.ask_positions(_PATIENCE)
    if world.liveness.first_failure is not None:
        world.ended_by = world.liveness.first_failure
        return _stopped_by(world.liveness.first_failure)
    rule, remedy = (
        "a rank was lost in the middle of a step",
        "look at the output of these: one was killed or stopped, ended early, or came too late",
    )
    if answers is None:
        holder = world.store_holder
        lost = "the process that started the ranks" if holder is None else f"rank {holder}"
        lost = f"no word from {lost}, which holds the store of the world"
    elif silent := [r for r in range(world.size) if r != world.rank and r not in answers]:
        lost = f"no word from rank {', '.join(map(str, silent))}"
    else:
        positions = {world.rank: f"{WAITS} at {caller()}", **answers}
        texts = [f"rank {r} {position}" for r, position in sorted(positions.items())]
        busy_ranks = [text for text in texts if WAITS not in text]
        lost = "; ".join(busy_ranks or ["all ranks live, and all wait for others", *texts])
        rule = "ranks wait for one another no longer than the timeout of the world"
        remedy = "have all ranks make the same calls, or give init_process_group a longer timeout"
    world.ended_by = f"{rule}: {lost}"
    return RankStopped(rule, got=f"{lost}; on rank {world.rank}: {error}", remedy=remedy)


def is_collective_error(error: Exception) -> bool:
    """Return whether an error came out of a collective, so that another rank may be the cause.

    Its type tells, or the place that raised it, since gloo raises plain RuntimeErrors.
    """
    if isinstance(error, AutoparError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or is_raised_by_collective(error)


def _text(world: World, error: BaseException) -> str:
    return f"rank {world.rank}: {error_text(error)}"


def _without_rank(text: str) -> str:
    return text.partition(": ")[2]


def _leave_groups(world: World, first: str) -> None:
    """Leave all process groups, so that no rank waits for this one any more."""
    world.ended_by = first
    if world.is_second:  # its groups end with it, and the whole world goes on
        return
    with suppress(Exception):
        world.left = abort_groups()
