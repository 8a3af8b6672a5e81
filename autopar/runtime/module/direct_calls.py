"""Direct calls on processes: their backward passes, which give parameters their gradients.

A call may be differentiated by any of its outputs, or by several one after another. At the end of a
pass every parameter that it leads to gets its gradient, summed over ranks. Of a pass that is
restricted, as by `torch.autograd.grad`, torch itself gives the gradients that are asked for.
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
from autopar.plan.runtime_program import Program
from autopar.runtime.backends.world import World, require_living
from autopar.runtime.launching.failures import stop_all_on_failure
from autopar.runtime.module.gradient_accumulation import GradientAccumulation
from autopar.runtime.module.submodule_view import refuse_gradient_hooks
from autopar.runtime.parameters.gathered_copies import changed_before_backward
from autopar.runtime.parameters.gradient_buckets import BucketEntry, GradientSync
from autopar.runtime.parameters.local_parameters import LocalParameters


class DirectCalls:
    """Those of one program."""

    def __init__(
        self,
        program: Program,
        leaves: LocalParameters,
        world: World,
        passes: GradientAccumulation,
    ) -> None:
        self._program, self._leaves, self._world, self._passes = program, leaves, world, passes
        self._sync: GradientSync | None = None
        self._last = 0  # the action after which a pass begins
        self._pending = False  # a backward pass is under way
        self._reached: frozenset[str] = frozenset()  # parameters that it leads to
        # Of passes that are restricted to some inputs, none reaches it.
        self._anchor = torch.empty(0, requires_grad=True)

    def close(self) -> None:
        """Let go of parameters; a backward pass that comes later is refused."""
        self._sync = None

    def watch(self, outputs: list[Tensor], sync: GradientSync, last: int) -> list[Tensor]:
        """Have `sync` sum what any backward pass through these outputs of a call makes; it comes
        after the action `last` of a step."""
        self._sync, self._last = sync, last
        self._pending, self._reached = False, frozenset()
        return [
            self._watched(output, [slot for slot in sync.entries if slot.name in names], names)
            if output.requires_grad
            else output
            for output, names in zip(outputs, self._program.learned)
        ]

    def _watched(self, output: Tensor, slots: list[BucketEntry], names: frozenset[str]) -> Tensor:
        come = partial(self._comes, get_gradient_edge(output), slots, names, self._leaves.age)
        parameters = [slot.parameter for slot in slots]
        return _BackwardNotice.apply(come, output, self._anchor, *parameters)

    def _comes(
        self,
        output: GradientEdge,
        slots: list[BucketEntry],
        names: frozenset[str],
        age: int,
        grad: Tensor,
    ) -> list[Tensor | None]:
        """A backward pass goes through an output: to the parameters `names`, or to some that are
        asked for, whose gradients are made here and given to torch. `age` is that of the leaves
        when the output was made.

        Which it is is the same on all ranks, whatever each of them finds there.
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
        refuse_gradient_hooks({slot.name: slot.parameter for slot in slots})
        self._leaves.last_backward = backward_pass_number()
        window = self._leaves.window
        window.gather_step_long()
        if not self._pending:
            call_after_backward(window.reset)
        if not will_receive_gradient(self._anchor):
            return self._to_some(output, slots, grad)
        self._reached |= names
        if not self._pending:
            require_living(self._world)
            self._pending = True
            self._passes.start(self._sync, {slot.name for slot in self._sync.entries})
            self._sync.after(self._last)
            call_after_backward(self._finish)
        return [None] * len(slots)

    def _to_some(
        self, output: GradientEdge, slots: list[BucketEntry], grad: Tensor
    ) -> list[Tensor | None]:
        """The gradients of those parameters that a restricted pass is to reach.

        It goes on to inputs by itself, so this one inside of it leaves everything as it is."""
        asked = [slot for slot in slots if will_receive_gradient(slot.parameter)]
        if not asked:
            return [None] * len(slots)
        assert self._sync is not None
        require_living(self._world)
        names = frozenset(slot.name for slot in asked)
        with stop_all_on_failure(self._world):
            self._sync.start(names)
            self._sync.after(self._last)
            leaves = [slot.leaf for slot in asked]
            self._leaves.has_inner_backward = True
            try:
                torch.autograd.backward(output, grad, retain_graph=True, inputs=leaves)
            finally:
                self._leaves.has_inner_backward = False
            with torch.no_grad():
                found = self._sync.finish(names)
                self._sync.clear()
        return [found.get(slot.name) for slot in slots]

    def _finish(self) -> None:
        """Give every parameter its gradient of this backward pass."""
        assert self._sync is not None
        self._pending = False
        with torch.no_grad(), stop_all_on_failure(self._world):
            self._passes.finish(self._sync, self._reached)
            self._sync.clear()
        self._reached = frozenset()


class _BackwardNotice(torch.autograd.Function):
    """The same value, of which a backward pass is told; it leads to an anchor and to parameters
    too, which have their gradients from `come`."""

    @staticmethod
    def forward(
        ctx: Any, come: Callable[[Tensor], list[Tensor | None]], value: Tensor, *others: Tensor
    ) -> Tensor:
        ctx.come = come
        return value.detach()  # no view: the caller may change what he gets in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad, None, *ctx.come(grad)
