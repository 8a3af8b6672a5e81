"""Direct calls on processes: their backward passes, which give parameters their gradients.

A call may be differentiated by any of its outputs, or by several one after another. At the end of a
backward pass every parameter that it reaches gets its gradient, summed over ranks. In a pass
restricted to some inputs, as by `torch.autograd.grad`, torch itself returns their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar._torch.autograd import backward_pass_number, call_after_backward, will_receive_gradient
from autopar.collectives import require_single_gradient
from autopar.errors import InvalidInput
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.world import World, require_living
from autopar.runtime.launching.failures import stop_all_on_failure
from autopar.runtime.module.gradient_accumulation import GradientAccumulation
from autopar.runtime.module.submodule_view import refuse_gradient_hooks
from autopar.runtime.parameters.gathered_copies import changed_before_backward
from autopar.runtime.parameters.gradient_buckets import BucketEntry, GradientSync
from autopar.runtime.parameters.local_parameters import LocalParameters


class DirectCalls:
    """Handles the backward passes through the outputs of one program."""

    def __init__(
        self,
        program: RuntimeProgram,
        leaves: LocalParameters,
        world: World,
        accumulation: GradientAccumulation,
    ) -> None:
        self._program, self._leaves, self._world = program, leaves, world
        self._accumulation = accumulation
        self._sync: GradientSync | None = None
        self._last = 0  # the action before the backward pass
        self._pending = False  # whether a backward pass is under way
        self._reached: frozenset[str] = frozenset()  # parameters that it reaches
        # A pass that is restricted to some inputs does not reach the anchor.
        self._anchor = torch.empty(0, requires_grad=True)

    def close(self) -> None:
        """Release the parameters; a later backward pass is refused."""
        self._sync = None

    def watch(self, outputs: list[Tensor], sync: GradientSync, last: int) -> list[Tensor]:
        """Return the outputs of a call, through which `sync` sums gradients of backward passes.

        Backward comes after the action `last` of a step."""
        self._sync, self._last = sync, last
        self._pending, self._reached = False, frozenset()
        return [
            self._with_notice(output, [e for e in sync.entries if e.name in names], names)
            if output.requires_grad
            else output
            for output, names in zip(outputs, self._program.parameters_by_output)
        ]

    def _with_notice(
        self, output: Tensor, entries: list[BucketEntry], names: frozenset[str]
    ) -> Tensor:
        on_backward = partial(
            self._begin_backward, get_gradient_edge(output), entries, names, self._leaves.age
        )
        parameters = [entry.parameter for entry in entries]
        return _BackwardNotice.apply(on_backward, output, self._anchor, *parameters)

    def _begin_backward(
        self,
        output: GradientEdge,
        entries: list[BucketEntry],
        names: frozenset[str],
        age: int,
        grad: Tensor,
    ) -> list[Tensor | None]:
        """Begin a backward pass through an output that reaches the parameters `names`.

        A restricted pass reaches some of them; their gradients are computed here and returned to
        torch. All ranks decide alike between the two. `age` is that of the leaves when the output
        was computed.
        """
        require_single_gradient(grad)
        if torch.is_grad_enabled():
            raise InvalidInput(
                "on processes a call has gradients, and these have none of their own",
                got="a backward pass with create_graph=True",
                remedy='backend="virtual", or a penalty that is part of forward',
            )
        if age != self._leaves.age:
            raise changed_before_backward()
        assert self._sync is not None
        refuse_gradient_hooks({entry.name: entry.parameter for entry in entries})
        self._leaves.last_backward = backward_pass_number()
        window = self._leaves.window
        window.gather_step_long()
        if not self._pending:
            call_after_backward(window.reset)
        if not will_receive_gradient(self._anchor):
            return self._restricted_gradients(output, entries, grad)
        self._reached |= names
        if not self._pending:
            require_living(self._world)
            self._pending = True
            self._accumulation.start(self._sync, {entry.name for entry in self._sync.entries})
            self._sync.action_done(self._last)
            call_after_backward(self._finish)
        return [None] * len(entries)

    def _restricted_gradients(
        self, output: GradientEdge, entries: list[BucketEntry], grad: Tensor
    ) -> list[Tensor | None]:
        """Return the gradients of the parameters that a restricted pass reaches.

        The pass continues to inputs by itself; the inner pass here changes nothing else."""
        reached = [entry for entry in entries if will_receive_gradient(entry.parameter)]
        if not reached:
            return [None] * len(entries)
        assert self._sync is not None
        require_living(self._world)
        names = frozenset(entry.name for entry in reached)
        with stop_all_on_failure(self._world):
            self._sync.start(names)
            self._sync.action_done(self._last)
            leaves = [entry.leaf for entry in reached]
            self._leaves.has_inner_backward = True
            try:
                torch.autograd.backward(output, grad, retain_graph=True, inputs=leaves)
            finally:
                self._leaves.has_inner_backward = False
            with torch.no_grad():
                gradients = self._sync.finish(names)
                self._sync.clear()
        return [gradients.get(entry.name) for entry in entries]

    def _finish(self) -> None:
        """Give every parameter its gradient of this backward pass."""
        assert self._sync is not None
        self._pending = False
        with torch.no_grad(), stop_all_on_failure(self._world):
            self._accumulation.finish(self._sync, self._reached)
            self._sync.clear()
        self._reached = frozenset()


class _BackwardNotice(torch.autograd.Function):
    """Returns its value and calls `on_backward` with the gradient in a backward pass.

    The result also depends on an anchor and on parameters; `on_backward` returns their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        on_backward: Callable[[Tensor], list[Tensor | None]],
        value: Tensor,
        *others: Tensor,
    ) -> Tensor:
        ctx.on_backward = on_backward
        return value.detach()  # no view: the caller may change the output in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad, None, *ctx.on_backward(grad)
