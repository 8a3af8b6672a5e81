"""Pace: how much longer work takes on a machine than its constants say, as whole steps showed.

Constants are published, or measured on single operators and collectives that run over and over. In
a step these find cold caches and busy neighbours. Two factors, one for computing and one for
communication, correct all plans of a machine.
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
    """Factors on predicted seconds: 1 as the constants say, 2 twice as long."""

    compute: float = 1.0
    communication: float = 1.0

    def __post_init__(self) -> None:
        factors = self.compute, self.communication
        if not all(isinstance(factor, int | float) and 0 < factor < math.inf for factor in factors):
            raise InvalidInput(
                "work takes a positive number of times as long",
                got=f"Pace({self.compute!r}, {self.communication!r})",
                remedy="Pace(1.5, 2.0)",
            )

    def link(self, link: Link) -> Link:
        """Return a link at this pace."""
        factor = self.communication
        measured = {key: (a * factor, b / factor) for key, (a, b) in link.measured.items()}
        return Link(link.alpha * factor, link.bandwidth / factor, measured)

    def level(self, level: Level) -> Level:
        """Return a level of links at this pace."""
        factor = self.communication
        return replace(level, alpha=level.alpha * factor, bandwidth=level.bandwidth / factor)

    def device(self, device: Device) -> Device:
        """Return a device at this pace."""
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
        """Return a host at the device's pace: such a host's cores are the device."""
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
    """Return a node at a pace."""
    return replace(node, device=pace.device(node.device), link=pace.link(node.link))


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was run: seconds predicted by parts, and seconds measured."""

    compute: float  # and what waits for it
    communication: float  # that nothing hides
    measured: float

    def predicted(self, pace: Pace) -> float:
        """Return the predicted seconds at a pace."""
        return self.compute * pace.compute + self.communication * pace.communication


def fit_pace(steps: Sequence[MeasuredStep]) -> Pace:
    """Return the pace with the least mean deviation of predicted from measured seconds. A factor of
    which no step has a part is 1."""
    steps = [step for step in steps if step.predicted(Pace()) > 0]
    if not steps:
        return Pace()
    compute, communication, measured = np.array(
        [(step.compute, step.communication, step.measured) for step in steps]
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
    """Return the pace that was cached for so many of these devices; 1 where there is none."""
    return read_cached(_cache_name(device, devices), _pace_of_factors, lambda: asdict(Pace()))


def cache_pace(pace: Pace, device: str, devices: int) -> None:
    """Write a pace to the cache of this machine."""
    read_cached(_cache_name(device, devices), _pace_of_factors, lambda: asdict(pace), again=True)


def _pace_of_factors(factors: dict[str, float]) -> Pace:
    return Pace(**factors)


def _cache_name(device: str, devices: int) -> str:
    kind = hashlib.sha256(device.encode()).hexdigest()[:8]
    return f"pace-{kind}-{devices}-{machine_id()}.json"
