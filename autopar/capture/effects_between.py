"""Effects between programs: what one program leaves behind in Python changes no other program.

    if x.shape[1] > self.longest:
        self.longest = x.shape[1]        # left by the program of a long batch
    return self.up(x) * self.longest     # read by that of a short one, which was captured before

`python_changes.py` compares two calls of one program. Here forward is rehearsed for each of two
programs as the other leaves the model, and once as both were captured: another course is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree

from autopar.capture.captured import Captured
from autopar.capture.effects import Effect
from autopar.capture.holders import Module
from autopar.capture.python_changes import ALIKE, BUFFER
from autopar.capture.rehearsal import Rehearsal
from autopar.errors import InvalidInput


def may_read(captured: Captured, effects: Sequence[Effect]) -> bool:
    """Return whether forward of a program may read what another program leaves behind."""
    return any(
        not isinstance(effect.holder, Module) or effect.key in captured.attributes_read
        for effect in effects
    )


def require_independent(first: Captured, second: Captured) -> None:
    """Refuse two programs of which one computes something else after the other."""
    if [*map(str, first.effects)] == [*map(str, second.effects)]:
        return
    for captured, other in ((first, second), (second, first)):
        if not may_read(captured, other.effects):
            continue
        rehearsal, leaves = Rehearsal(captured), _leaves(captured)
        plain = rehearsal.run(leaves, allows_changes=True)
        after = rehearsal.run(leaves, allows_changes=True, left=other)
        if plain is None or after is None or not plain.is_same(after.calls, after.numbers):
            blamed = next(effect for effect in other.effects if may_read(captured, [effect]))
            raise InvalidInput(
                ALIKE,
                got=f"{blamed.name}, which a call changes, so that one of other sizes, modes or "
                "values computes something else",
                remedy=BUFFER,
                source=blamed.source,
            )


def _leaves(captured: Captured) -> list[Any]:
    example = captured.example
    return pytree.tree_leaves((example.args, dict(example.kwargs)))
