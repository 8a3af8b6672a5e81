"""Trials: a few steps of each of some plans, on the machines that are there.

    found = run_trials(plans, build, args, kwargs, report)      # of each a Trial, in their order

Each plan is built, run and let go of before the next one is: no more is held than it needs itself.
So it goes round several times, and what a machine does besides meets all plans alike; what is
clearly slower after the first round is not run again. On processes this is in a world beside that
of now. A rank that runs out of memory ends that one, and all ranks leave the plan out; the next
one has another world.
"""

from __future__ import annotations

import gc
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from autopar._torch.process_groups import created_group_count, set_created_group_count
from autopar.errors import AutoparError, ExecutionError, said
from autopar.plan.plan import Plan
from autopar.planner.trial import Trial
from autopar.runtime.backends.world import World, world_beside
from autopar.runtime.launching.failures import RankStopped, stop_all_on_failure
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.plan_broadcast import gather_from_ranks
from autopar.runtime.observation.timing import step_seconds
from autopar.runtime.parameters.placing import dtensor_wrapper
from autopar.text.progress import Report

ROUNDS, STEPS = 3, 3  # of each round: steps that count
MOST_WARM = 6  # of those before them, which go on as long as they get faster
_FASTER = 0.7  # times as long as the step before
_SLOW = 1.5  # times as long as the fastest: what takes that in the first round is not run again
_NO_MEMORY = "out of memory", "can't allocate memory", "ALLOC_FAILED"  # as torch says it

Build = Callable[[Plan], ParallelModule]


def run_trials(
    plans: Sequence[Plan],
    build: Build,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    report: Report,
    whole: World | None,
    device: torch.device,
) -> list[Trial]:
    """What steps of each take; all ranks of the world `whole` do this together, and are told the
    same. Random numbers are what they were."""
    ways = [plan.alternative(plan.limit or 0.0).how for plan in plans]
    seconds: list[list[float]] = [[] for _ in plans]
    why = [""] * len(plans)

    def steps(plan: Plan) -> list[float]:
        with build(plan) as module:
            step = partial(step_seconds, module, args, kwargs)
            before, last = math.inf, step()
            for _ in range(MOST_WARM - 1):
                before, last = last, step()
                if last > _FASTER * before:
                    break
            return [step() for _ in range(STEPS)]

    with _isolated(device), _TrialWorld(whole, device) as place:
        for turn in range(ROUNDS):
            first = [median(taken) for taken in seconds if taken]
            for number in range(len(plans)):
                at = (turn + number) % len(plans)
                if why[at] or (turn and median(seconds[at]) > _SLOW * min(first)):
                    continue
                report("profile", f"round {turn + 1} of {ROUNDS}, {ways[at]}")
                found, why[at] = place.attempt(partial(steps, plans[at]))
                seconds[at] += found or ()
    return [
        Trial(way, plan.seconds, None if wrong else median(taken), wrong)
        for way, plan, taken, wrong in zip(ways, plans, seconds, why)
    ]


def fastest_trial(trials: Sequence[Trial]) -> int:
    """The number of the fastest; or refuse them all."""
    ran = [number for number, one in enumerate(trials) if one.measured is not None]
    if not ran:
        raise ExecutionError(
            "some of the plans that are run have room on the machines that are there",
            got="\n".join(map(str, trials)),
            remedy="memory= with the bytes that are free, so that others are looked for",
        )
    return min(ran, key=lambda number: trials[number].order)


@contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Random numbers go on as if nothing had been drawn; what was told of modules is told again of
    the one that stays."""
    own = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(own), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class _TrialWorld:
    """Where plans are tried: in this process, or in a world beside the whole one."""

    whole: World | None
    device: torch.device
    _beside: ExitStack = field(default_factory=ExitStack)
    _is_open: bool = False

    def __enter__(self) -> _TrialWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def attempt(self, work: Callable[[], list[float]]) -> tuple[list[float], str]:
        """What `work` gives, or else where there was no memory for it: the same on all ranks."""
        found: list[float] = []
        kind, text, error = "", "", None
        try:
            found = self._inside(work)
        except Exception as raised:
            error, kind, text = raised, _failure_kind(raised), said(raised)
            _clear_frames(raised)
            self._close()
        _collect(self.device)  # others may wait in a group until nothing here holds it
        kinds, texts = self._everyones(kind, text)
        if not any(kinds):
            return found, ""
        self._close()
        if "error" not in kinds and "memory" in kinds:
            ranks = ", ".join(str(rank) for rank, one in enumerate(kinds) if one == "memory")
            return [], "out of memory" + f" on rank {ranks}" * (self.whole is not None)
        if error is not None and ("error" not in kinds or kind == "error"):
            raise error
        raise ExecutionError(
            "plans are tried on all ranks together",
            got="\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text),
            remedy="mend what failed there, or parallelize without profile=",
        )

    def _everyones(self, kind: str, text: str) -> tuple[list[str], list[str]]:
        """What all ranks say, which from then on name groups alike."""
        if self.whole is None:
            return [kind], [text]
        kinds, texts, counts = zip(
            *gather_from_ranks((kind, text, created_group_count()), self.whole.group)
        )
        set_created_group_count(max(counts))
        return list(kinds), list(texts)

    def _inside(self, work: Callable[[], list[float]]) -> list[float]:
        if self.whole is None:
            return work()
        if not self._is_open:
            self._is_open = True
            self._beside.enter_context(world_beside())
        with stop_all_on_failure():
            return work()

    def _close(self) -> None:
        self._beside.close()
        self._is_open = False
        dtensor_wrapper.cache_clear()  # a mesh is equal to one whose groups have gone


def _failure_kind(error: Exception) -> str:
    """How a rank failed: without memory, because another one failed, or else."""
    seen: BaseException | None = error
    while seen is not None:
        is_torch = isinstance(seen, RuntimeError) and not isinstance(seen, AutoparError)
        is_plain = is_torch and any(words in str(seen) for words in _NO_MEMORY)
        if is_plain or isinstance(seen, torch.OutOfMemoryError | MemoryError):
            return "memory"
        seen = seen.__cause__
    return "stopped" if isinstance(error, RankStopped) else "error"


def _clear_frames(error: BaseException | None) -> None:
    """Of all that the frames hold that an error went through."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
