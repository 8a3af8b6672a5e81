"""Machines: a device, its host, a link, a node of devices, and the link that a group of ranks
has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from autopar.base.schema import Count, NotNegative, Part, Positive
from autopar.cluster.collective_counts import PASSES
from autopar.errors import InvalidInput
from autopar.tensor_type import DTYPE_NAMES
from autopar.text.units import bytes_text

COST = {"worst": max}  # of what is worse the more there is of it
# Of a device whose rates were measured: they are what it reaches.
REACHED: Mapping[str, Any] = {"efficiency": 1.0, "bandwidth_efficiency": 1.0}


@dataclass(frozen=True)
class Host:
    """The share of its machine that each device has: memory, a link to it, and cores."""

    memory: Positive = 64e9  # bytes
    copy_alpha: NotNegative = field(default=10e-6, metadata=COST)  # seconds to start a copy
    copy_bandwidth: Positive = 12e9  # bytes/s from pinned memory to the device, and back
    bandwidth: Positive = 20e9  # bytes/s of elementwise work and lookups by its cores
    flops: Positive = 0.5e12  # FLOP/s in f32 that large products on its cores reach
    overhead: NotNegative = field(default=5e-6, metadata=COST)  # seconds to start an operator
    # Whether the device is the host's own cores, as a process on the CPU is: they share `memory`.
    is_device: bool = field(default=False, metadata={"worst": max})

    @classmethod
    def weakest(cls, kinds: Sequence[Host]) -> Host:
        """Return a host as weak in each respect as the weakest of several."""
        return cls(**_extremes(cls, kinds))

    @classmethod
    def strongest(cls, kinds: Sequence[Host]) -> Host:
        """Return a host as strong in each respect as the strongest of several."""
        return cls(**_extremes(cls, kinds, is_best=True))

    @cached_property
    def link(self) -> Device:
        """Return the link to the device, as a device that reads what it copies and writes it."""
        rates = {"f32": self.flops}
        more = {"overhead": self.copy_alpha, **REACHED, "overlap": 0.0}
        return Device("host link", rates, self.memory, 2 * self.copy_bandwidth, **more, host=self)

    @cached_property
    def processor(self) -> Device:
        """Return the host's cores as a device that runs operators."""
        rates = {"f32": self.flops, "f64": self.flops / 2}
        more = {"overhead": self.overhead, **REACHED, "overlap": 0.0}
        return Device("host", rates, self.memory, self.bandwidth, **more, host=self)

    def copied(self, bytes_: float, copies: float = 1) -> float:
        """Return the seconds of `copies` copies to or from the device, of `bytes_` in all."""
        return copies * self.copy_alpha + bytes_ / self.copy_bandwidth


@dataclass(frozen=True)
class Device:
    """One accelerator. Small work runs slower: work W takes as long as W + half at full speed."""

    name: str
    flops: Mapping[str, Positive] = field(hash=False)  # FLOP/s by dtype: {"f32": 67e12, ...}
    memory: Positive  # bytes
    bandwidth: Positive  # bytes/s of its memory
    overhead: NotNegative = field(default=5e-6, metadata=COST)  # seconds to start an operator
    efficiency: Positive = 0.7  # the part of `flops` that large matrix products reach
    bandwidth_efficiency: Positive = 0.75  # the part of `bandwidth` that large passes reach
    # FLOPs of a product in the fastest dtype that reaches half; bytes of an operator that reaches
    # half of `throughput`.
    half_flops: NotNegative = field(default=0.0, metadata=COST)
    half_bytes: NotNegative = field(default=0.0, metadata=COST)
    # Bytes of a product's matrices that caches hold, and seconds to take in each of the others, if
    # that is not done beside its arithmetic.
    near_bytes: NotNegative = 0.0
    far_seconds: NotNegative = field(default=0.0, metadata=COST)
    # How fast computing goes while a collective runs beside it, of its speed alone; 0: they take
    # turns. 1/1.19 is the mean over A100, H100, MI210 and MI250 (arXiv 2507.03114).
    overlap: Part = 0.84
    host: Host = Host()
    # Bytes of its memory that no plan counts on unless it is told to: what the driver, groups of
    # ranks and an allocator take besides tensors.
    reserve: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.reserve >= self.memory:
            raise InvalidInput(
                "a reserve leaves some of a device's memory for tensors",
                got=f"{bytes_text(self.reserve)} of {self.name}'s {bytes_text(self.memory)}",
                remedy="a smaller reserve, or 0 for none",
            )
        if "f32" not in self.flops:
            raise InvalidInput(
                "a device has a rate for f32, which stands for all that have none",
                got=f"{self.name} with {', '.join(self.flops) or 'none'}",
                remedy="add f32 = ...",
            )

    @classmethod
    def weakest(cls, kinds: Sequence[Device]) -> Device:
        """Return a device as weak in each respect as the weakest of several."""
        worst = _extremes(cls, kinds, besides=("name", "flops", "host", "reserve"))
        worst["reserve"] = worst["memory"] - min(kind.usable_memory for kind in kinds)
        flops = {
            dtype: min(kind.peak(dtype) for kind in kinds) / worst["efficiency"]
            for dtype in _dtypes(kinds)
        }
        worst["bandwidth"] = min(kind.throughput for kind in kinds) / worst["bandwidth_efficiency"]
        host = Host.weakest([kind.host for kind in kinds])
        return cls(" | ".join(kind.name for kind in kinds), flops, **worst, host=host)

    @classmethod
    def strongest(cls, kinds: Sequence[Device]) -> Device:
        """Return a device as strong in each respect as the strongest of several: none is faster."""
        left_out = ("name", "flops", "host", "half_flops", "reserve")
        best = _extremes(cls, kinds, is_best=True, besides=left_out)
        best["reserve"] = best["memory"] - max(kind.usable_memory for kind in kinds)
        peaks = {dtype: max(kind.peak(dtype) for kind in kinds) for dtype in _dtypes(kinds)}
        # What it takes a product to get going is the same time in every dtype.
        start = min(kind.half("f32") / kind.peak("f32") for kind in kinds)
        best["half_flops"] = start * max(peaks.values())
        fastest = max(kind.throughput for kind in kinds)
        best["bandwidth"] = fastest / best["bandwidth_efficiency"]
        best["host"] = Host.strongest([kind.host for kind in kinds])
        flops = {dtype: peak / best["efficiency"] for dtype, peak in peaks.items()}
        return cls(" | ".join(kind.name for kind in kinds), flops, **best)

    @property
    def usable_memory(self) -> float:
        """Return the bytes that a plan counts on."""
        return self.memory - self.reserve

    @property
    def throughput(self) -> float:
        """Return the bytes/s that large passes over memory reach."""
        return self.bandwidth * self.bandwidth_efficiency

    def peak(self, dtype: torch.dtype | str) -> float:
        """Return the FLOP/s that large work reaches; a dtype without an entry runs as f32."""
        name = dtype if isinstance(dtype, str) else DTYPE_NAMES.get(dtype, "f32")
        return self.flops.get(name, self.flops["f32"]) * self.efficiency

    def half(self, dtype: torch.dtype | str) -> float:
        """Return the FLOPs of a product that reaches half of `peak`."""
        return self.half_flops * self.peak(dtype) / (max(self.flops.values()) * self.efficiency)


def _extremes(
    cls: Any, instances: Sequence[Any], *, is_best: bool = False, besides: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the worst (or best) value of each field over several instances of `cls`."""
    other = {min: max, max: min}
    values = {}
    for part in fields(cls):
        if part.name not in besides:
            worst = part.metadata.get("worst", min)
            choose = other[worst] if is_best else worst
            values[part.name] = choose(getattr(kind, part.name) for kind in instances)
    return values


def _dtypes(kinds: Sequence[Device]) -> list[str]:
    """Return the dtypes that some of the devices have rates for."""
    return sorted(set().union(*(kind.flops for kind in kinds)))


@dataclass(frozen=True)
class Link:
    """The way between devices: `alpha` seconds a message, `bandwidth` bytes/s each direction.

    `measured` holds what single collectives reach: (kind, ranks) -> (alpha, bandwidth), by the
    formula of the kind. An all-reduce, reduce-scatter or all-gather that was not measured reaches
    what one of the other two does."""

    alpha: NotNegative
    bandwidth: Positive
    measured: Mapping[tuple[str, Count], tuple[NotNegative, Positive]] = field(
        default_factory=dict, hash=False
    )

    def of(self, kind: str, ranks: int) -> tuple[float, float]:
        """Return latency and bandwidth of a collective: the nearest that was measured."""
        near = sorted(
            (other != kind, abs(math.log(ranks / size)), other, size)
            for other, size in self.measured
            if other == kind or {other, kind} <= {*PASSES}
        )
        return self.measured[near[0][2:]] if near else (self.alpha, self.bandwidth)


@dataclass(frozen=True)
class Node:
    """One machine: `devices` equal devices, joined by `link`; `bandwidth` is of each device.

    The network is reached over `rails` equal links; a device sends over one of them.
    """

    device: Device
    devices: Count
    link: Link
    rails: Count = 1


@dataclass(frozen=True)
class HostLoad:
    """The bytes that the ranks of one node need on its host together, and those that it has."""

    ranks: int
    needed: float
    memory: float

    @property
    def room(self) -> float:
        """Return the bytes left for each rank; negative where so many are missing."""
        return (self.memory - self.needed) / self.ranks


@dataclass(frozen=True)
class Level:
    """Neighbouring nodes in groups, as in racks; `bandwidth` is of all links out of a group."""

    name: str
    nodes: Count  # in each group
    alpha: NotNegative
    bandwidth: Positive


@dataclass(frozen=True)
class AxisLink:
    """The link between the members of a group along an axis, all such groups busy at once."""

    axis: str
    size: int
    level: str  # "inside" a node, "between" nodes, or the name of the widest level that it crosses
    link: Link
    exchange_bandwidth: float  # what all-to-all gets, where more data leaves the node

    @property
    def alpha(self) -> float:
        return self.link.alpha

    @property
    def bandwidth(self) -> float:
        return self.link.bandwidth

    def of(self, kind: str) -> tuple[float, float]:
        """Return latency and bandwidth of one kind of collective over this axis."""
        alpha, bandwidth = self.link.of(kind, self.size)
        if kind == "all_to_all" and (kind, self.size) not in self.link.measured:
            bandwidth = min(bandwidth, self.exchange_bandwidth)
        return alpha, bandwidth
