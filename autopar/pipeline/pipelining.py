"""Pipelining: the decisions about a pipeline, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from autopar.mesh import Mesh
from autopar.pipeline.notation import from_text
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.stages.costs import SharedSum, StageCost, imbalance
from autopar.pipeline.words import schedule_words
from autopar.units import counted


@dataclass(frozen=True)
class Pipelining:
    """How a program runs as a pipeline."""

    axis: str
    mesh: Mesh  # of all ranks, the pipeline's axis among them
    schedule: Annotated[Schedule, partial(from_text, of_call=True)]
    stages: tuple[StageCost, ...]
    shared: tuple[SharedSum, ...] = ()  # of what several of these read

    def __str__(self) -> str:
        made = self.schedule
        how, count = schedule_words(made.name, dict(made.options)), len(self.stages)
        lines = [
            f"pipeline over {self.axis}: {how}, {counted(count, 'stage')}, "
            f"{counted(made.microbatches, 'micro-batch')}, imbalance {imbalance(self.stages):.0%}"
        ]
        for index, stage in enumerate(self.stages):
            ranks = ", ".join(map(str, made.replicas_of(index)))
            lines.append(
                f"  stage {index} on {ranks}: from {stage.starts} ({stage.module or 'the model'}), "
                f"forward {stage.forward:.3g} s, backward {stage.backward:.3g} s, "
                f"{stage.parameters} bytes of parameters"
            )
        return "\n".join(lines)
