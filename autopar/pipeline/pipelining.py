"""Pipelining: the decisions about a pipeline, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from autopar.mesh import Mesh
from autopar.pipeline.notation import from_text
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedule_labels import schedule_words
from autopar.pipeline.stages.stage_cost import SharedSum, StageCost, imbalance
from autopar.text.tables import table, wrapped
from autopar.text.units import bytes_text, counted, seconds_text


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
        title = (
            f"pipeline over {self.axis}: {how}, {counted(count, 'stage')}, "
            f"{counted(made.microbatches, 'micro-batch')}, imbalance {imbalance(self.stages):.0%}"
        )
        rows = [("stage", f"on {self.axis}", "from", "", "forward", "backward", "parameters")]
        for index, stage in enumerate(self.stages):
            rows.append(
                (
                    str(index),
                    ", ".join(map(str, made.replicas_of(index))),
                    stage.starts,
                    stage.module or "the model",
                    seconds_text(stage.forward),
                    seconds_text(stage.backward),
                    bytes_text(stage.parameters),
                )
            )
        return "\n".join([*wrapped(title), *table(rows)])
