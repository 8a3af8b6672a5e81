"""Pace: how much longer work takes on a machine than its constants say, as whole steps showed.

Constants are measured, or published, of single operators and collectives that run over and over; in
a step they find cold caches, and neighbours. Two factors for all plans of a machine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from autopar.cluster.calibration import machine_id, read_cached
from autopar.cluster.machines import Device, Host, Level, Link, Node
from autopar.errors import InvalidInput

_RANGE = (0.2, 5.0)  # beyond it, constants are of another machine
_FINE = 121  # values of each factor that are tried


@dataclass(frozen=True)
class Pace:
    """1: as the constants say; 2: twice as long."""

    compute: float = 1.0
    communication: float = 1.0

    def __post_init__(self) -> None:
        factors = self.compute, self.communication
        if not all(isinstance(one, int | float) and 0 < one < math.inf for one in factors):
            raise InvalidInput(
                "work takes a positive number of times as long",
                got=f"Pace({self.compute!r}, {self.communication!r})",
                remedy="Pace(1.5, 2.0)",
            )

    def link(self, link: Link) -> Link:
        """A link at this pace."""
        factor = self.communication
        measured = {key: (a * factor, b / factor) for key, (a, b) in link.measured.items()}
        return Link(link.alpha * factor, link.bandwidth / factor, measured)

    def level(self, level: Level) -> Level:
        """A level of links at this pace."""
        factor = self.communication
        return replace(level, alpha=level.alpha * factor, bandwidth=level.bandwidth / factor)

    def device(self, device: Device) -> Device:
        """A device at this pace."""
        factor, host = self.compute, device.host
        return replace(
            device,
            flops={dtype: rate / factor for dtype, rate in device.flops.items()},
            bandwidth=device.bandwidth / factor,
            far_seconds=device.far_seconds * factor,
            overhead=device.overhead * factor,
            host=self._host(host) if host.is_device else host,
        )

    def _host(self, host: Host) -> Host:
        """The host that is the device: its copies stay in the memory that it computes on."""
        factor = self.compute
        return replace(
            host,
            copy_alpha=host.copy_alpha * factor,
            copy_bandwidth=host.copy_bandwidth / factor,
            flops=host.flops / factor,
            bandwidth=host.bandwidth / factor,
            overhead=host.overhead * factor,
        )


def node_at_pace(node: Node, pace: Pace) -> Node:
    """A node at a pace."""
    return replace(node, device=pace.device(node.device), link=pace.link(node.link))


@dataclass(frozen=True)
class MeasuredStep:
    """Seconds of a step: what was predicted, by parts, and what was measured."""

    compute: float  # and what waits for it
    communication: float  # that nothing hides
    measured: float

    def predicted(self, pace: Pace) -> float:
        """What is predicted at a pace."""
        return self.compute * pace.compute + self.communication * pace.communication


def fit_pace(steps: Sequence[MeasuredStep]) -> Pace:
    """The pace at which predictions are least off, in the mean of their ratios; of a part that no
    step has, 1."""
    steps = [one for one in steps if one.predicted(Pace()) > 0]
    if not steps:
        return Pace()
    compute, communication, measured = np.array(
        [(one.compute, one.communication, one.measured) for one in steps]
    ).T
    factors = np.geomspace(*_RANGE, _FINE)
    predicted = (
        factors[:, None, None] * compute + factors[None, :, None] * communication
    )  # of each pair of factors
    off = np.abs(np.log(measured / predicted)).mean(axis=2)
    # Where nothing is computed, or communicated, each factor of it is as good: the nearest to none.
    near = 1e-9 * np.abs(np.log(factors))
    off = off + near[:, None] + near[None, :]
    first, second = np.unravel_index(off.argmin(), off.shape)
    return Pace(float(factors[first]), float(factors[second]))


def cached_pace(device: str, devices: int) -> Pace:
    """What was kept of so many of these devices of this machine."""
    return read_cached(_cache_name(device, devices), _pace_of_factors, lambda: asdict(Pace()))


def cache_pace(pace: Pace, device: str, devices: int) -> None:
    """Keep it, from now on."""
    read_cached(_cache_name(device, devices), _pace_of_factors, lambda: asdict(pace), again=True)


def _pace_of_factors(factors: dict[str, float]) -> Pace:
    return Pace(**factors)


def _cache_name(device: str, devices: int) -> str:
    kind = hashlib.sha256(device.encode()).hexdigest()[:8]
    return f"pace-{kind}-{devices}-{machine_id()}.json"
