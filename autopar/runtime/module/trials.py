"""Trials: a few steps of each of several plans on the present machines.

    trials = run_trials(plans, build, args=..., ...)            # a Trial for each plan, in order

Each plan is built, run and released before the next one, so that none needs more memory. Several
rounds make other work of the machine slow all plans alike. A plan that is clearly slower in the
first round is not run again. On processes trials run in a second world. A rank that runs out of
memory ends that world, all ranks drop the plan, and the next plan gets a new world.
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
from autopar.candidates.trial import Trial
from autopar.errors import AutoparError, ExecutionError, error_text
from autopar.plans.plan import Plan
from autopar.runtime.backends.world import World, second_world
from autopar.runtime.launching.failures import RankStopped, stop_all_on_failure
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.plan_broadcast import gather_from_ranks
from autopar.runtime.observation.timing import step_seconds
from autopar.runtime.parameters.placing import dtensor_wrapper
from autopar.text.progress import Report

ROUNDS, STEPS = 3, 3  # rounds, and steps that count in each
MOST_WARM = 6  # most uncounted steps before, which stop when they get no faster
_FASTER = 0.7  # times as long as the step before
_SLOW = 1.5  # times the fastest: a plan slower than that in the first round is dropped
_NO_MEMORY = "out of memory", "can't allocate memory", "ALLOC_FAILED"  # texts of torch's errors

Build = Callable[[Plan], ParallelModule]


def run_trials(
    plans: Sequence[Plan],
    build: Build,
    *,
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    report: Report,
    world: World | None,
    device: torch.device,
) -> list[Trial]:
    """Return the measured seconds of a step of each plan; random number generators stay as they
    were. All ranks of `world` call this together and get the same result; None: one process."""
    descriptions = [plan.alternative(plan.limit or 0.0).how for plan in plans]
    seconds: list[list[float]] = [[] for _ in plans]
    failures = [""] * len(plans)

    def steps(plan: Plan) -> list[float]:
        with build(plan) as module:
            step = partial(step_seconds, module, args, kwargs)
            before, last = math.inf, step()
            for _ in range(MOST_WARM - 1):
                before, last = last, step()
                if last > _FASTER * before:
                    break
            return [step() for _ in range(STEPS)]

    with _isolated(device), _TrialWorld(world, device) as trial_world:
        for round_ in range(ROUNDS):
            first = [median(times) for times in seconds if times]
            for number in range(len(plans)):
                index = (round_ + number) % len(plans)
                if failures[index] or (round_ and median(seconds[index]) > _SLOW * min(first)):
                    continue
                report("profile", f"round {round_ + 1} of {ROUNDS}, {descriptions[index]}")
                result, failures[index] = trial_world.attempt(partial(steps, plans[index]))
                seconds[index] += result or ()
    return [
        Trial(description, plan.seconds, None if failure else median(times), failure)
        for description, plan, times, failure in zip(descriptions, plans, seconds, failures)
    ]


def fastest_trial(trials: Sequence[Trial]) -> int:
    """Return the index of the fastest trial; refuse if none ran."""
    ran = [number for number, trial in enumerate(trials) if trial.measured is not None]
    if not ran:
        raise ExecutionError(
            "some of the plans that are run have room on the machines that are there",
            got="\n".join(map(str, trials)),
            remedy="memory= with the bytes that are free, so that others are looked for",
        )
    return min(ran, key=lambda number: trials[number].order)


@contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Restore random number generators afterwards, and silence warnings, which the final module
    repeats."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class _TrialWorld:
    """Runs trials of plans: in this process, or in a second world on the ranks of the first."""

    world: World | None  # None: one process
    device: torch.device
    _second_world: ExitStack = field(default_factory=ExitStack)
    _is_open: bool = False

    def __enter__(self) -> _TrialWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def attempt(self, work: Callable[[], list[float]]) -> tuple[list[float], str]:
        """Return the result of `work` and "", or no result and the ranks without memory for it; the
        same on all ranks."""
        result: list[float] = []
        kind, text, error = "", "", None
        try:
            result = self._run(work)
        except Exception as raised:
            error, kind, text = raised, _failure_kind(raised), error_text(raised)
            _clear_frames(raised)
            self._close()
        _collect(self.device)  # others may wait in a group until no object here holds it
        kinds, texts = self._exchange_errors(kind, text)
        if not any(kinds):
            return result, ""
        self._close()
        if "error" not in kinds and "memory" in kinds:
            ranks = ", ".join(
                str(rank) for rank, error_kind in enumerate(kinds) if error_kind == "memory"
            )
            return [], "out of memory" + f" on rank {ranks}" * (self.world is not None)
        if error is not None and ("error" not in kinds or kind == "error"):
            raise error
        raise ExecutionError(
            "plans are tried on all ranks together",
            got="\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text),
            remedy="mend what failed there, or parallelize without profile=",
        )

    def _exchange_errors(self, kind: str, text: str) -> tuple[list[str], list[str]]:
        """Return the kinds and texts of all ranks' errors, and align their names of new groups."""
        if self.world is None:
            return [kind], [text]
        kinds, texts, counts = zip(
            *gather_from_ranks((kind, text, created_group_count()), self.world.group)
        )
        set_created_group_count(max(counts))
        return list(kinds), list(texts)

    def _run(self, work: Callable[[], list[float]]) -> list[float]:
        if self.world is None:
            return work()
        if not self._is_open:
            self._is_open = True
            self._second_world.enter_context(second_world())
        with stop_all_on_failure():
            return work()

    def _close(self) -> None:
        self._second_world.close()
        self._is_open = False
        dtensor_wrapper.cache_clear()  # a mesh is equal to one whose groups have gone


def _failure_kind(error: Exception) -> str:
    """Return how a rank failed: "memory", "stopped" because another one failed, or "error"."""
    seen: BaseException | None = error
    while seen is not None:
        is_torch = isinstance(seen, RuntimeError) and not isinstance(seen, AutoparError)
        is_plain = is_torch and any(words in str(seen) for words in _NO_MEMORY)
        if is_plain or isinstance(seen, torch.OutOfMemoryError | MemoryError):
            return "memory"
        seen = seen.__cause__
    return "stopped" if isinstance(error, RankStopped) else "error"


def _clear_frames(error: BaseException | None) -> None:
    """Release all objects in the frames that an error went through."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
