"""SmallestFootprint: where no plan fits into memory, the least that one needs, and a remedy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.errors import InvalidInput
from autopar.units import bytes_text


@dataclass(frozen=True)
class SmallestFootprint:
    """The plan that needs the least memory, where none fits."""

    how: str  # its mesh, and its schedule if it has one
    devices: int
    memory: float  # bytes on each device
    states: float  # the part of it that parameters, gradients and optimizer take
    microbatches: int = 1
    may_recompute: bool = False  # the caller could ask for it, and has not

    def in_stages(self, stages: int) -> SmallestFootprint:
        """What each of so many stages needs at least, of a model that was searched as a whole."""
        if stages == 1:
            return self
        return replace(
            self,
            how=f"{stages} equal stages, each on {self.how}",
            devices=stages * self.devices,
            memory=self.memory / stages,
            states=self.states / stages,
        )

    def remedy(self, limit: float) -> str:
        """What would help, by what takes most."""
        activations = self.memory - self.states
        if self.states >= limit:
            devices = math.ceil(self.devices * self.states / limit)
            return (
                f"more devices: parameters, gradients and optimizer alone take "
                f"{bytes_text(self.states, 4)} on each, {devices} or more devices could hold them; "
                "or devices with more memory"
            )
        count = math.ceil(self.microbatches * activations / (limit - self.states))
        recompute = 'recompute="auto" may make room; ' if self.may_recompute else ""
        return (
            f"{bytes_text(activations, 4)} of it are activations: {recompute}microbatches={count} "
            "(or a smaller batch) would make room; else more devices, or devices with more memory"
        )


class NothingFits(InvalidInput):
    """A memory limit that nothing meets."""

    smallest: SmallestFootprint  # the least of what was weighed

    @classmethod
    def of(cls, limit: float, smallest: SmallestFootprint) -> NothingFits:
        """The error that says the least, and what would help."""
        error = cls(
            "a plan fits into the memory of every device",
            got=f"a limit of {bytes_text(limit, 4)}; the least that any plan needs is "
            f"{bytes_text(smallest.memory, 4)}, on {smallest.how}",
            remedy=smallest.remedy(limit),
        )
        error.smallest = smallest
        return error
