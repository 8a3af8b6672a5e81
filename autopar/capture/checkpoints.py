"""Checkpoints: what the user wrapped in torch.utils.checkpoint, seen while a model is exported.

    y = checkpoint(block, x)    ──▶    border(0, True, -1), the operators, border(0, False, -1)

What stands between two borders is a region that a plan recomputes. A border has the number of the
policy by which the checkpoint saves results, or -1. Eager code never runs a border.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import CheckpointFunction, noop_context_fn

from autopar.capture.captured import Captured
from autopar.capture.hooks import replaced
from autopar.capture.policies import NO_POLICY, CheckpointPolicies
from autopar.strategies.node_info import info
from autopar.text.source_lines import frames_to_caller


@torch.library.custom_op("autopar::border", mutates_args=())
def border(number: int, opens: bool, policy: int) -> None:
    """Where the region of a checkpoint begins or ends, and which policy it has."""


@border.register_fake
def _(number: int, opens: bool, policy: int) -> None:
    return None


BORDER = torch.ops.autopar.border.default
fx.node.has_side_effect(BORDER)  # it stays in the graph, though nobody reads it


@contextmanager
def checkpoints_marked(policies: CheckpointPolicies) -> Iterator[None]:
    """While forward runs, put borders around what is checkpointed; of nested ones the outermost.

    Note in `policies` by what they save."""
    numbers, depth = itertools.count(), 0

    @contextmanager
    def marked(context: Any = noop_context_fn) -> Iterator[None]:
        nonlocal depth
        number = next(numbers) if depth == 0 and torch.is_grad_enabled() else None
        if number is not None:
            BORDER(number, True, policies.number_of(context))
        depth += 1
        try:
            yield
        finally:
            depth -= 1
        if number is not None:
            BORDER(number, False, NO_POLICY)

    def beside(
        function: Callable[..., Any], preserve: bool = True, context: Any = noop_context_fn, *_: Any
    ) -> Iterator[None]:
        """What torch does before and after a function whose forward runs again."""
        with marked(context):
            yield

    def reentrant(cls: type, function: Callable[..., Any], _: bool, *args: Any) -> Any:
        """What a reentrant checkpoint computes: no gradient if none of its inputs has one."""
        leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        learns = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
        with torch.set_grad_enabled(learns), marked():
            return function(*args)

    with ExitStack() as stack:
        # Seen in torch 2.11 to 2.13: a generator that runs on both sides of the function.
        name = "_checkpoint_without_reentrant_generator"
        stack.enter_context(replaced(torchs, name, lambda *args, **_: beside(*args)))
        stack.enter_context(replaced(CheckpointFunction, "apply", classmethod(reentrant)))
        yield


def warn_of_buffers(captured: Captured) -> None:
    """Tell that what a checkpoint changes is not changed once more where its forward runs again."""
    numbers = {node.name: info(node) for node in captured.operators}
    changed = {name: numbers.get(node) for name, node in captured.mutations.items()}
    found = {name: of.source for name, of in changed.items() if of and of.checkpoint is not None}
    if not found:
        return
    (first, line), *others = found.items()
    more, where = f" and {len(others)} more" if others else "", f" ({line})" if line else ""
    warnings.warn(
        f"{first}{more}, changed in a checkpoint{where}: a step changes it once; torch does so "
        "again in backward, when the forward of a checkpoint runs again",
        stacklevel=frames_to_caller(),
    )
