"""Shared sizes: of programs that differ in sizes of inputs alone, one serves other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from autopar.capture.effects_between import may_read
from autopar.runtime.backends.distributed_backend import is_among_others
from autopar.runtime.module.resizing import ALIKE
from autopar.runtime.module.running_program import ModuleCall, RunningProgram

_MOST_TRIED = 3  # programs that a new one is laid beside


def differs_in_sizes(running: RunningProgram, call: ModuleCall) -> bool:
    """Return whether the call that a program was made for differs in sizes of inputs alone."""
    return bool(running.takes(call) and running.signature.differing_dims(call.signature))


def share_sizes(programs: Sequence[RunningProgram], running: RunningProgram) -> None:
    """Have a new program serve other sizes, if two of the latest of its kind and it show how.
    None does that may read what another program leaves behind. Ranks do so together."""
    effects = [effect for known in programs for effect in known.plan.original.effects]
    for known in programs:
        if may_read(known.plan.original, effects):
            known.resizing = None
    if may_read(running.plan.original, effects):
        return
    kinds: dict[Any, list[RunningProgram]] = {}
    for known in programs:
        if dims := known.signature.differing_dims(running.signature):
            kinds.setdefault(dims, []).append(known)
    backend = programs[0].backend
    for members in kinds.values():
        for others in itertools.combinations(members[-_MOST_TRIED:], ALIKE - 1):
            with backend.guard(agreed=True):
                resizing = running.resize_with(others)
                if is_among_others(backend):
                    served = backend.world.gather_numbers(int(resizing is not None))
                    resizing = resizing if all(served) else None
            if resizing is not None:
                running.resizing = resizing
                return
