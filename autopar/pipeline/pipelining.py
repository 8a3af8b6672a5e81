"""Pipelining: the decisions about a pipeline as plain values, and how a user's words become them.

request = read_request(mesh, "auto", "chimera", {"pipes": 2}, microbatches=8)
request.inner                        # the mesh inside each stage
request.pipelining(stages)           # with the stages that the model was cut into
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from autopar.mesh import Mesh
from autopar.pipeline.notation import from_text
from autopar.pipeline.schedule import Schedule, to_text
from autopar.pipeline.stages.costs import StageCost, imbalance
from autopar.search.stored import Axes

AXIS = "pp"
DEFAULT = "1f1b"
ScheduleLike = str | Mapping[str, Any] | Schedule | None


@dataclass(frozen=True)
class Pipelining:
    """How a program runs as a pipeline."""

    axis: str
    mesh: Mesh  # of all ranks, the pipeline's axis among them
    schedule: Schedule
    stages: tuple[StageCost, ...]
    recompute: bool = False

    def data(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "axis": self.axis,
            "mesh": dict(zip(self.mesh.names, self.mesh.shape)),
            "schedule": to_text(self.schedule),
            "stages": [asdict(stage) for stage in self.stages],
            "recompute": self.recompute,
        }

    def ranks_at(self, coordinate: int) -> list[int]:
        """The ranks that stand at one place of the pipeline, in the order of the inner mesh."""
        return [
            rank
            for rank in range(self.mesh.size)
            if self.mesh.coordinate(rank)[self.axis] == coordinate
        ]

    def __str__(self) -> str:
        made = self.schedule
        options = "".join(f", {name}={value}" for name, value in made.options)
        lines = [
            f"pipeline over {self.axis}: {made.name}{options}, {len(self.stages)} stages, "
            f"{made.microbatches} micro-batches, imbalance {imbalance(self.stages):.0%}"
        ]
        for index, stage in enumerate(self.stages):
            ranks = ", ".join(map(str, made.replicas_of(index)))
            lines.append(
                f"  stage {index} on {ranks}: from {stage.starts} ({stage.module or 'the model'}), "
                f"forward {stage.forward:.3g} s, backward {stage.backward:.3g} s, "
                f"{stage.parameters} bytes of parameters"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class StoredPipelining:
    """What `Pipelining.data` gives."""

    axis: str
    mesh: Axes
    schedule: Annotated[Schedule, from_text]
    stages: tuple[StageCost, ...]
    recompute: bool

    def read(self) -> Pipelining:
        return Pipelining(self.axis, Mesh(**self.mesh), self.schedule, self.stages, self.recompute)
