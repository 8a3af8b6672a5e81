"""Request: everything that is asked of a plan; what is given by hand is a choice of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.candidates.patience import FOREVER, Patience
from autopar.candidates.recomputation import AskedRecomputation
from autopar.cluster import Cluster
from autopar.cluster.cluster_part import PipelineLine
from autopar.defaults import Mode
from autopar.mesh import Mesh, meshes
from autopar.pipeline.schedule import Schedule
from autopar.states import HOSTED, NAMED, WHOLE, States

AXIS = "pp"  # of a pipeline, if nobody calls it otherwise
MOST_AXES = 3  # of a mesh without a pipeline
MOST_INNER_AXES = 2  # of a mesh inside each stage
MOST_STAGES = 64  # that are tried unasked


@dataclass(frozen=True)
class Request:
    """A request for a plan: how a step is to run. None: it is to be chosen."""

    cluster: Cluster
    mode: Mode
    limit: float  # bytes of each device
    is_limited: bool  # a plan that takes more is none
    axis: str | None = None  # of the pipeline; without an axis there is no pipeline
    mesh: Mesh | None = None  # of all ranks
    stages: int | None = None  # ranks along the axis
    microbatches: int | None = None
    schedule: Schedule | None = None
    asynchronous: bool = False  # gradients may be older than the weights that they change
    recompute: AskedRecomputation = field(default_factory=AskedRecomputation)
    states: States | None = None
    patience: Patience = FOREVER

    @property
    def is_sliced(self) -> bool:
        """Return whether the schedule that is named cuts sequences into slices of tokens."""
        return self.schedule is not None and len(self.schedule.slices) > 0

    @property
    def memory(self) -> float:
        """Return the bytes of each device that a plan keeps to."""
        return self.limit if self.is_limited else math.inf

    @property
    def given_options(self) -> list[str]:
        """Return which of the options about stages and micro-batches the user has given."""
        options = {
            "mesh": self.mesh is not None,
            "pipeline": self.mesh is None and self.stages is not None,
            "schedule": self.schedule is not None,
            "microbatches": self.microbatches is not None,
        }
        return [name for name, is_given in options.items() if is_given]

    @cached_property
    def roomiest(self) -> float:
        """Return the bytes that a plan keeps to on the device that has most."""
        most = self.cluster.strongest(range(self.cluster.devices)).usable_memory
        is_own = self.memory == self.cluster.device.usable_memory
        return most if is_own else self.memory

    @property
    def stage_counts(self) -> Sequence[int]:
        """Return the numbers of stages to try."""
        devices = self.cluster.devices
        if self.stages:
            return [self.stages]
        return [n for n in range(1, min(devices, MOST_STAGES) + 1) if devices % n == 0]

    def meshes(self, stages: int, microbatches: int = 1) -> Sequence[Mesh]:
        """Return the meshes to try inside each of so many stages."""
        if self.mesh is not None:
            return [self.mesh if self.axis is None else self.mesh.without(self.axis)]
        most = MOST_AXES if (stages, microbatches) == (1, 1) else MOST_INNER_AXES
        return meshes(self.cluster.devices // stages, most, self.cluster.devices_per_node)

    def inner(self, stages: int) -> int:
        """Return the number of ranks inside each of so many stages."""
        return self.meshes(stages)[0].size

    def line(self, stages: int) -> PipelineLine | None:
        """Return the places of a pipeline of so many stages. None: there is no pipeline."""
        if self.axis is None:
            return None
        if self.mesh is not None:
            return PipelineLine.of(self.mesh, self.axis)
        return PipelineLine(self.axis, stages, self.cluster.devices // stages)

    def room(self, stages: int) -> float:
        """Return the bytes that a plan keeps to on one device of each stage, together."""
        line, memory = self.line(stages), self.memory
        spare = [] if line is None else self.cluster.spare(memory, line.ranks)
        return memory * stages + sum(spare)

    def settings(self, stages: int) -> Sequence[States]:
        """Return the settings of states to try, the fastest first. One rank has nothing to cut."""
        if self.states is not None:
            return [self.states]
        return [WHOLE] if self.inner(stages) == 1 else list(NAMED.values())

    @property
    def hosted(self) -> Sequence[States]:
        """Return the settings to try where a device has no memory for whole states."""
        return HOSTED if self.states is None else ()

    def whole_mesh(self, inner: Mesh, stages: int) -> Mesh:
        """Return the mesh of all ranks, where that inside each of so many stages is `inner`."""
        if self.mesh is None:
            return Mesh(**{str(self.axis): stages, **inner.sizes})
        parts = [part for axis in self.mesh for part in inner.split_axes(axis) or (axis,)]
        return Mesh(**{part: (inner if part in inner else self.mesh)[part] for part in parts})
