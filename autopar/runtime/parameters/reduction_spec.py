"""Reduction specs: the groups over which gradients are summed, and the actions that start it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist

from autopar.runtime.backends.host_copies import HostLink


@dataclass(frozen=True, kw_only=True)
class ReductionSpec:
    """The groups, times and host link by which some gradients are summed over the same ranks."""

    all_reduce_group: dist.ProcessGroup | None = None  # for gradients that no other group sums
    backward_group: dist.ProcessGroup | None = None  # reduce-scatters after each backward
    step_group: dist.ProcessGroup | None = None  # reduce-scatters at the end of the step
    # Positions that complete gradients -> True if the action is one backward pass, so arrivals can
    # be counted.
    completing_actions: Mapping[int, bool]
    # Starts the sum of the step's gradients: the last of these, or a later one; -1: before all.
    last_action: int
    is_accumulated: bool = False  # each backward's gradients are added to the bucket's buffer
    link: HostLink | None = None  # to the host, where the sums belong; None: they stay

    @property
    def is_cut(self) -> bool:
        """Return whether the sums are kept in pieces."""
        return self.backward_group is not None or self.step_group is not None

    @property
    def may_wait(self) -> bool:
        """Return whether gradients may add up in the leaf of each rank, and be summed later."""
        return self.backward_group is None and not self.is_accumulated and self.link is None

    @property
    def is_by_backward(self) -> bool:
        """Return whether the gradients of each backward are taken at once."""
        return self.backward_group is not None or self.is_accumulated

    @cached_property
    def reduce_actions(self) -> dict[int, bool]:
        """Return the actions after which there is something to sum, as `completing_actions`."""
        actions = {*self.completing_actions} if self.is_by_backward else set()
        actions.add(self.last_action)
        return {at: self.completing_actions.get(at, False) for at in sorted(actions)}
