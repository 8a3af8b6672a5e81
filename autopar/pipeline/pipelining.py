"""The decisions about a pipeline, as plain values that a plan's file keeps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.pipeline.notation import from_text
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.schedule_labels import schedule_words
from autopar.pipeline.stages.stage_cost import SharedSum, StageCost, imbalance
from autopar.text.tables import table, wrap_line
from autopar.text.units import bytes_text, counted, seconds_text


@dataclass(frozen=True)
class Pipelining:
    """Describe how a program runs as a pipeline: its axis, schedule and stages."""

    axis: str
    mesh: Mesh  # of all ranks, the pipeline's axis among them
    schedule: Annotated[Schedule, partial(from_text, of_call=True)]
    stages: tuple[StageCost, ...]
    shared: tuple[SharedSum, ...] = ()  # of parameters that several stages read
    # The time of each slice of tokens, as a part of a micro-batch's. None: as they are long.
    slice_times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        delays = self.schedule.delays
        for shared in self.shared if delays else ():
            if len({delays[stage] for stage in shared.stages}) > 1:
                raise InvalidInput(
                    "stages that share parameters read one version of them in a step",
                    got=f"schedule={self.schedule.name!r}, whose gradients are "
                    f"{' and '.join(str(delays[stage]) for stage in shared.stages)} updates old on "
                    f"stages {' and '.join(map(str, shared.stages))}, which share parameters",
                    remedy='schedule_options={"vertical_sync": True}, schedule="pipedream-2bw", '
                    "or parameters that are not tied over stages",
                )

    def __str__(self) -> str:
        schedule, uneven = self.schedule, imbalance(self.stages)
        name = schedule_words(schedule.name, dict(schedule.options))
        title = (
            f"pipeline over {self.axis}: {name}, {counted(len(self.stages), 'stage')}, "
            f"{counted(schedule.microbatches, 'micro-batch')}, imbalance {uneven:.0%}"
        )
        rows = [("stage", f"on {self.axis}", "from", "", "forward", "backward", "parameters")]
        for index, stage in enumerate(self.stages):
            rows.append(
                (
                    str(index),
                    ", ".join(map(str, schedule.replicas_of(index))),
                    stage.starts,
                    stage.module or "the model",
                    seconds_text(stage.forward),
                    seconds_text(stage.backward),
                    bytes_text(stage.parameters),
                )
            )
        lines = [*wrap_line(title), *table(rows)]
        if any(schedule.delays):
            ages = ", ".join(map(str, dict.fromkeys(schedule.delays)))
            lines += wrap_line(
                f"asynchronous: gradients are {ages} updates older than the weights that they "
                "change, so another optimizer trajectory follows"
            )
        return "\n".join(lines)
