"""MachinePrices: the prices of a program's nodes on the machines that it runs on.

    prices = MachinePrices(cluster, mesh, states.buffer_bytes)
    prices.slowest.price(movement)           # on the machines that layouts are chosen for
    prices.all_kinds                         # on each kind of machines that a pipeline has

Programs on the same mesh share them, whatever their layouts are: each price is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster import Cluster
from autopar.cluster.cluster_part import ClusterPart, PipelineLine
from autopar.cost.time_report import NodePrices
from autopar.mesh import Mesh
from autopar.pipeline.simulation.message_costs import Placement, hardware_of_stages
from autopar.pipeline.stages.stage_hardware import StageHardware


@dataclass(frozen=True)
class MachinePrices:
    """Prices of nodes on the machines of a cluster, or at each place of a pipeline on it."""

    cluster: Cluster
    mesh: Mesh  # inside each stage, where there is a pipeline
    buffer_bytes: int  # of the buckets in which states travel
    line: PipelineLine | None = None  # the places of a pipeline, if there is to be one

    def with_buckets(self, size: int) -> MachinePrices:
        """Return the prices where states travel in buckets of `size` bytes."""
        return self if size == self.buffer_bytes else replace(self, buffer_bytes=size)

    @cached_property
    def machines(self) -> Cluster:
        """Return the machines that layouts are chosen for: no place of a pipeline is faster."""
        return self.cluster if self.line is None else ClusterPart.of(self.cluster, self.line)

    @cached_property
    def slowest(self) -> NodePrices:
        """Return the prices on the machines that layouts are chosen for."""
        return NodePrices(self.machines, self.mesh, self.buffer_bytes)

    @cached_property
    def all_kinds(self) -> list[NodePrices]:
        """Return the prices on each kind of machines."""
        parts = self._kinds[0]
        if len(parts) == 1:
            return [self.slowest]
        return [NodePrices(part, self.mesh, self.buffer_bytes) for part in parts]

    @cached_property
    def _kinds(self) -> tuple[list[Cluster], list[int]]:
        """Return the kinds of machines, and the kind of each place."""
        if not isinstance(self.machines, ClusterPart):
            return [self.machines], [0]
        parts, kinds = self.machines.kinds(self.mesh)
        return [*parts], kinds

    def stage_hardware(self, placement: Placement, limit: float) -> list[StageHardware]:
        """Return where each stage stands; `limit`: bytes of each device that a plan keeps to."""
        assert self.line is not None
        spare = self.spare(limit)
        return hardware_of_stages(placement, self.cluster, self.line, self._kinds[1], spare)

    def spare(self, limit: float) -> list[float]:
        """Return the bytes that the devices of each place have beyond the `limit` of all."""
        return [0.0] if self.line is None else self.cluster.spare(limit, self.line.ranks)
