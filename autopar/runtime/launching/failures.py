"""When one rank fails, all stop, soon, and say which failed first.

A rank that fails by itself writes its name and its error to the store of the world, where an error
of the user's own loop is written too before it ends the process; then it leaves its process groups,
which ends the collectives that others wait in (over gloo, when the process ends). A rank whose
collective broke leaves too, and reads who was first. If nobody says so, a rank was lost without a
word: one that gives no answer to a roll call.

What a rank refuses by itself, before it waits for others, ends nothing if all ranks refuse it. If
others went on with that call, or do not come to it, the world is apart: the rank leaves when it
comes to its next call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import torch.distributed as dist

from autopar._torch import raised_while_waiting, world_timeout
from autopar._torch_groups import abort_groups
from autopar.errors import AutoparError, ExecutionError, InvalidInput, said
from autopar.lines import caller
from autopar.runtime.backends.world import World, joined, require_living
from autopar.runtime.launching.rank_liveness import WAITS

_PATIENCE = 5.0  # seconds to wait for the others' word once a collective has broken


@contextmanager
def local_checks(here: World) -> Iterator[None]:
    """Around what looks at a call on this rank alone, before ranks wait for one another."""
    _settle(here)
    try:
        yield
    except Exception as error:
        here.roll.refuse(_text(here, error), _PATIENCE)
        raise
    here.roll.calls += 1


@contextmanager
def one_fails_all_stop(here: World | None = None, agreed: bool = False) -> Iterator[None]:
    """Around everything in which ranks wait for one another, in the world `here` or that of now.

    `agreed`: what is no broken collective is raised on all ranks alike, and the world goes on.
    """
    here = here or joined()
    if here is None:
        require_living()
        yield
        return
    _settle(here)
    here.roll.waits += 1
    try:
        yield
    except Exception as error:
        if joined() is not here or isinstance(error, RankStopped):
            raise
        if is_collective(error):
            raise _after_collective(here, error) from error
        if agreed:
            raise
        mine = _text(here, error)
        first = here.roll.report(mine, _PATIENCE)
        _leave(here, first)
        if _without_rank(first) == _without_rank(mine):  # this one, or one that all ranks have
            raise
        raise _stopped_by(first) from error
    finally:
        here.roll.waits -= 1


def tell_call(here: World, said: str, text: str) -> list[str]:
    """What each rank says of the call that comes: inside `local_checks`, where all come to say it,
    or none. `text` is what a person reads of it."""
    if here.size == 1:
        return [said]
    words = here.roll.tell_call(said, world_timeout().total_seconds())
    if isinstance(words, str):
        raise InvalidInput(
            "a call that needs a new program is made on all ranks: they make it together",
            got=f"on rank {here.rank} {text}\n{words}",
            remedy="make the same call on all ranks, in the same modes",
        )
    return words


def tell_uncaught_errors() -> None:
    """From now on, an error that ends this process is told to the other ranks first."""
    previous = sys.excepthook
    if getattr(previous, "tells_other_ranks", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tell(error)
        previous(kind, error, trace)

    hook.tells_other_ranks = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def tell(error: BaseException) -> None:
    """Tell the other ranks of the error by which this one ends."""
    here = joined()
    if here is not None:
        here.roll.report(_text(here, error), _PATIENCE)


def _settle(here: World) -> None:
    """Before ranks wait for one another: have all of them refused what this one refused last?"""
    require_living(here)
    refusal = here.roll.open
    if refusal is not None and (others := here.roll.not_refused(world_timeout().total_seconds())):
        mine = f"{refusal}\n{others}"
        first = here.roll.report(mine, _PATIENCE)
        _leave(here, first)
        raise _refused_alone(mine) if first == mine else _stopped_by(first)


class RankStopped(ExecutionError):
    """Raised on ranks that stop because another failed."""


def _stopped_by(first: str) -> RankStopped:
    return RankStopped(
        "another rank failed first, so this one stopped",
        got=first,
        remedy="mend what failed there",
    )


def _refused_alone(mine: str) -> RankStopped:
    return RankStopped(
        "all ranks refuse a call, or none, within the timeout of the world",
        got=mine,
        remedy="make the same calls on all ranks, with inputs that all accept or refuse",
    )


def _after_collective(here: World, error: Exception) -> RankStopped:
    """Leave, and find out why the others left."""
    _leave(here, _text(here, error))
    answers = here.roll.ask(_PATIENCE)
    if here.roll.first is not None:
        here.ended_by = here.roll.first
        return _stopped_by(here.roll.first)
    rule, remedy = (
        "a rank was lost in the middle of a step",
        "look at the output of these: one was killed or stopped, ended early, or came too late",
    )
    if answers is None:
        holder = here.store_holder
        lost = "the process that started the ranks" if holder is None else f"rank {holder}"
        lost = f"no word from {lost}, which holds the store of the world"
    elif silent := [r for r in range(here.size) if r != here.rank and r not in answers]:
        lost = f"no word from rank {', '.join(map(str, silent))}"
    else:
        told = {here.rank: f"{WAITS} at {caller()}", **answers}
        places = [f"rank {r} {where}" for r, where in sorted(told.items())]
        busy = [one for one in places if WAITS not in one]
        lost = "; ".join(busy or ["all ranks live, and all wait for others", *places])
        rule = "ranks wait for one another no longer than the timeout of the world"
        remedy = "have all ranks make the same calls, or give init_process_group a longer timeout"
    here.ended_by = f"{rule}: {lost}"
    return RankStopped(rule, got=f"{lost}; on rank {here.rank}: {error}", remedy=remedy)


def is_collective(error: Exception) -> bool:
    """Whether the error came out of a collective, whose cause may lie on another rank.

    Its type says so; or the place that it comes from, since gloo raises plain RuntimeErrors.
    """
    if isinstance(error, AutoparError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or raised_while_waiting(error)


def _text(here: World, error: BaseException) -> str:
    return f"rank {here.rank}: {said(error)}"


def _without_rank(text: str) -> str:
    return text.partition(": ")[2]


def _leave(here: World, first: str) -> None:
    """Leave all process groups, so that nobody waits for this rank any more."""
    here.ended_by = first
    if here.is_beside:  # its groups go when it ends, and the world goes on
        return
    with suppress(Exception):
        here.left = abort_groups()
