"""Smallest footprint: if no plan fits into memory, the least that one takes, and a remedy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.errors import InvalidInput
from autopar.text.units import bytes_text


@dataclass(frozen=True)
class SmallestFootprint:
    """Describe the plan that takes the least memory if none fits, or a bound for its mesh."""

    how: str  # its mesh, and its schedule if it has one
    devices: int
    memory: float  # bytes on each device
    states: float  # the part of it that parameters, gradients and optimizer take
    microbatches: int = 1
    is_bound: bool = False  # it adds up what layouts need at least, and is no plan's
    rows: int = 0  # of the batch, if that is known: micro-batches have one at least
    untried: tuple[str, ...] = ()  # the options that the caller has taken away, and could give

    def in_stages(self, stages: int) -> SmallestFootprint:
        """Return what each of `stages` stages needs at least, if this is of the whole model."""
        if stages == 1:
            return self
        return replace(
            self,
            how=f"{stages} equal stages, each on {self.how}",
            devices=stages * self.devices,
            memory=self.memory / stages,
            states=self.states / stages,
        )

    def description(self, limit: float) -> str:
        """Describe the least memory to a user whose `limit` in bytes is lower."""
        if not self.is_bound:
            return f"the least that was found takes {bytes_text(self.memory, 4)}, on {self.how}"
        if self.memory <= limit:
            return f"nothing that fits was found on {self.how}"
        return f"at least {bytes_text(self.memory, 4)} are needed on {self.how}"

    def remedy(self, limit: float) -> str:
        """Suggest what may help, by what takes most."""
        activations = self.memory - self.states
        untried = f"{' or '.join(self.untried)} may make room; " if self.untried else ""
        if self.states >= limit:
            devices = math.ceil(self.devices * self.memory / limit)
            return (
                f"{untried}more devices: parameters, gradients and optimizer alone take "
                f"{bytes_text(self.states, 4)} on each, {devices} or more devices could hold these "
                "and activations; or devices with more memory"
            )
        if self.memory <= limit:
            return f"{untried}a smaller batch, more devices, or devices with more memory"
        count = math.ceil(self.microbatches * activations / (limit - self.states))
        fitting = (n for n in range(count, self.rows + 1) if self.rows % n == 0)
        count = next(fitting, count)
        smaller = f"microbatches={count} (or a smaller batch)"
        if self.rows and count > self.rows:
            smaller = "a smaller sequence or model"  # one row is too large
        return (
            f"{bytes_text(activations, 4)} of it are activations: {untried}{smaller} may make "
            "room; else more devices, or devices with more memory"
        )


class NothingFits(InvalidInput):
    """Refuse a memory limit that no plan meets."""

    smallest: SmallestFootprint  # the least of what was weighed

    @classmethod
    def of(cls, limit: float, smallest: SmallestFootprint) -> NothingFits:
        """Build the error that names the least memory and what may help."""
        error = cls(
            "a plan fits into the memory of every device",
            got=f"a limit of {bytes_text(limit, 4)}; {smallest.description(limit)}",
            remedy=smallest.remedy(limit),
        )
        error.smallest = smallest
        return error
