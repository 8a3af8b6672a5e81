"""Gradient accumulation: gradients add up on each rank until a later pass sums them over ranks.

    with pm.no_sync():
        criterion(pm(x), y).backward()      # parameter.grad is a partial sum over the ranks
    criterion(pm(x), y).backward()          # sums both at once

Such a gradient is a DTensor with `Partial()` over the axes over which it is summed later: reading
and dropping it work. A pass that sums starts from the waiting gradients; a pass of another program
on the same parameters sums them first. Gradients that are kept in pieces through a step, or add up
in another dtype, do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch.tensors import local_of
from autopar.errors import InvalidInput
from autopar.runtime.parameters.gradient_buckets import GradientSync
from autopar.runtime.parameters.local_parameters import LocalParameters
from autopar.runtime.parameters.parameter_movement import ParameterMovement
from autopar.runtime.parameters.placing import dtensor_wrapper


class GradientAccumulation:
    """Gives parameters the gradients of backward passes, summed over ranks or still partial."""

    def __init__(
        self,
        leaves: LocalParameters,
        parameter_movements: Mapping[str, ParameterMovement],
        device_mesh: DeviceMesh,
    ) -> None:
        self._leaves, self._movements, self._device_mesh = leaves, parameter_movements, device_mesh

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defer sums of gradients inside, for all programs on the same parameters."""
        before, self._leaves.is_deferred = self._leaves.is_deferred, True
        try:
            yield
        finally:
            self._leaves.is_deferred = before

    @property
    def waiting(self) -> frozenset[str]:
        """Return the parameters whose gradient is still a partial sum."""
        parameters, names = self._leaves.parameters, self._leaves.unsummed
        names.intersection_update([n for n in names if is_partial(parameters[n].grad)])
        return frozenset(names)

    def start(self, sync: GradientSync, reached: Set[str], *, is_first: bool = True) -> None:
        """Begin a pass that reaches the parameters `reached`, or some of them.

        Sums are deferred only inside `no_sync()`, if `is_first`, and if no parameter has a summed
        gradient. `is_first` is False if gradients were set aside."""
        waiting = self.waiting
        with torch.no_grad():
            for entry in sync.entries if waiting else ():
                gradient = entry.parameter.grad
                if entry.name in waiting and gradient is not None:
                    entry.leaf.grad = local_of(gradient).clone()
        gradients = (entry.parameter.grad for entry in sync.entries)
        waits = self._leaves.is_deferred and is_first
        is_deferred = waits and all(grad is None or is_partial(grad) for grad in gradients)
        sync.start(reached, is_deferred=is_deferred)

    def finish(self, sync: GradientSync, reached: Set[str]) -> None:
        """End a pass: give the parameters `reached` their gradients."""
        parameters, unsummed = self._leaves.parameters, self._leaves.unsummed
        reached = (self.waiting & {entry.name for entry in sync.entries}) | reached
        for name, gradient in sync.finish(reached).items():
            parameter = parameters[name]
            if name not in unsummed and is_partial(parameter.grad):  # deferred by another program
                earlier, at = cast(DTensor, parameter.grad), cast(DTensor, parameter).placements
                parameter.grad = earlier.redistribute(placements=at)
            if parameter.grad is None or name in unsummed:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
            unsummed.discard(name)
        for entry, local in sync.take_deferred(reached):
            parameters[entry.name].grad = self._partial(entry.name, local)
            unsummed.add(entry.name)

    def _partial(self, name: str, local: Tensor) -> DTensor:
        movement, parameter = self._movements[name], self._leaves.parameters[name]
        layout = movement.leaf.with_partial(movement.pending)
        return dtensor_wrapper(layout, tuple(parameter.shape), self._device_mesh)(local)

    def sum_waiting(self, sync_of: Callable[[frozenset[str]], GradientSync]) -> None:
        """Sum the gradients that wait, without a pass; all ranks call this together."""
        waiting = self.waiting
        if not waiting:
            return
        sync = sync_of(waiting)
        if len(sync.entries) < len(waiting):
            raise InvalidInput(
                "gradients of no_sync() are summed before their parameters are frozen",
                got=", ".join(sorted(waiting - {entry.name for entry in sync.entries})),
                remedy="a pass outside of no_sync(), or zero_grad(), before requires_grad_()",
            )
        waits, self._leaves.is_deferred = self._leaves.is_deferred, False
        try:
            with torch.no_grad():
                self.start(sync, waiting)
                self.finish(sync, waiting)
        finally:
            self._leaves.is_deferred = waits


def is_partial(gradient: Tensor | None) -> bool:
    """Return whether a gradient is a partial sum over ranks."""
    return isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)
