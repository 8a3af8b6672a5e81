"""Direct calls on processes: their backward passes, which give parameters their gradients.

A call may be differentiated by any of its outputs, or by several one after another. At the end of a
pass every parameter that it leads to gets its gradient, summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar._torch import call_after_backward, will_reach
from autopar.errors import InvalidInput
from autopar.plan.program import Program
from autopar.runtime.buckets import GradientSync
from autopar.runtime.copies import changed_in_between
from autopar.runtime.failures import one_fails_all_stop
from autopar.runtime.leaves import Leaves
from autopar.runtime.world import World, require_living


class DirectCalls:
    """Those of one program."""

    def __init__(
        self,
        program: Program,
        leaves: Leaves,
        world: World,
        give: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        """`give`: takes gradients to their parameters."""
        self._program, self._leaves, self._world, self._give = program, leaves, world, give
        self._sync: GradientSync | None = None
        self._last = 0  # the action after which a pass begins
        self._pending = False  # a backward pass is under way
        self._reached: frozenset[str] = frozenset()  # parameters that it leads to
        # Of passes that are restricted to some inputs, none reaches it.
        self._anchor = torch.empty(0, requires_grad=True)

    def watch(self, outputs: list[Tensor], sync: GradientSync, last: int) -> list[Tensor]:
        """Have `sync` sum what any backward pass through these outputs of a call makes; it comes
        after the action `last` of a step."""
        self._sync, self._last = sync, last
        self._pending, self._reached = False, frozenset()
        parameters, come = [slot.parameter for slot in sync.slots], self._comes
        age = self._leaves.age
        return [
            _Watched.apply(partial(come, names, age), output, self._anchor, *parameters)
            if output.requires_grad
            else output
            for output, names in zip(outputs, self._program.learned)
        ]

    def _comes(self, names: frozenset[str], age: int) -> None:
        """A backward pass goes through an output: to the parameters `names`, or to inputs alone.
        `age` is that of the leaves when the output was made.

        Which of the two is the same on all ranks, whatever each of them finds there.
        """
        assert self._sync is not None
        if torch.is_grad_enabled():
            raise InvalidInput(
                "on processes a call has gradients, and these have none of their own",
                got="a backward pass with create_graph=True",
                remedy='backend="virtual", or a penalty that is part of forward',
            )
        if age != self._leaves.age:
            raise changed_in_between()
        window = self._leaves.window
        window.bring_lasting()
        if not self._pending:
            call_after_backward(window.forget)
        if not will_reach(self._anchor):
            self._require_inputs_alone(self._sync)
            return
        self._reached |= names
        if not self._pending:
            require_living(self._world)
            self._pending = True
            self._sync.start({slot.name for slot in self._sync.slots})
            self._sync.after(self._last)
            call_after_backward(self._finish)

    def _require_inputs_alone(self, sync: GradientSync) -> None:
        asked = [slot.name for slot in sync.slots if will_reach(slot.parameter)]
        if asked:
            raise InvalidInput(
                "on processes a backward pass goes to all parameters, or to inputs alone",
                got=f"a pass to {', '.join(asked)} alone",
                remedy="backward() without inputs=, and drop the gradients not wanted",
            )

    def _finish(self) -> None:
        """Give every parameter its gradient of this backward pass."""
        assert self._sync is not None
        self._pending = False
        with torch.no_grad(), one_fails_all_stop(self._world):
            self._give(self._sync.finish(self._reached))
            self._sync.clear()
        self._reached = frozenset()


class _Watched(torch.autograd.Function):
    """The same value, of which a backward pass is told; it leads to `others` too."""

    @staticmethod
    def forward(ctx: Any, come: Callable[[], None], value: Tensor, *others: Tensor) -> Tensor:
        ctx.come, ctx.count = come, len(others)
        return value.detach()  # no view: the caller may change what he gets in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.come()
        return None, grad, *[None] * ctx.count
