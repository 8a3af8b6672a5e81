"""Questions about a step, and their answers: the planner is a loop over these.

    question = Question(program, (Mesh(dp=8),), stages=1, microbatches=4)
    match asker.ask(question, cutoff=1.5):
        case Found(candidate): ...       # it fits
        case TooLarge(least_bytes): ...  # some rank needs so many bytes at least
        case TooSlow(bound): ...         # no way to run it takes less than so many seconds
        case OutOfTime(): ...            # the time was over before it was answered
        case Refused(error): ...         # the program has no such stages or micro-batches
        case Unlike(): ...               # only the whole program can say it, not the short one

A question fixes all that is decided around the layouts. The layouts are its answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from autopar.candidates.candidate import Candidate
from autopar.capture.captured import Captured
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.pipeline.schedule import Option, Schedule
from autopar.pipeline.schedule_labels import schedule_words
from autopar.recompute import PLAIN, Recompute
from autopar.search.smallest_footprint import SmallestFootprint
from autopar.states import WHOLE, States
from autopar.text.units import bytes_text, counted, seconds_text

if TYPE_CHECKING:
    from autopar.candidates.staged import StagedWay

Mixed = Literal["mixed"]  # regions run again as memory asks for it, each in its own way
MIXED: Mixed = "mixed"


@dataclass(frozen=True)
class ScheduleName:
    """A schedule by its name and options; its actions are listed when it is asked about."""

    name: str
    options: tuple[tuple[str, Option], ...] = ()

    def __str__(self) -> str:
        return schedule_words(self.name, dict(self.options))


@dataclass(frozen=True)
class Question:
    """One way to run a step, but for its layouts."""

    program: Captured = field(repr=False)
    meshes: tuple[Mesh, ...]  # inside each stage; one of them is chosen
    stages: int = 1
    microbatches: int = 1
    states: States = WHOLE
    recompute: Recompute | Mixed = PLAIN
    schedule: Schedule | ScheduleName | None = None  # None: no pipeline
    memory: float = math.inf  # bytes of each device that the search for layouts keeps to
    # Layouts are searched for these states and this recomputation. Otherwise those of whole states
    # with nothing recomputed are taken, which other questions use, too.
    has_own_layouts: bool = False
    # `memory` holds for the bytes that the search adds up, whatever the finished program takes.
    is_as_added_up: bool = False

    @property
    def is_mixed(self) -> bool:
        """Return whether memory decides what runs again."""
        return self.recompute == MIXED

    @property
    def is_hosted(self) -> bool:
        """Return whether states, or what is kept for backward, are on the host."""
        kind = self.recompute
        return self.states.is_on_host or (isinstance(kind, Recompute) and kind.keep == "host")

    def __str__(self) -> str:
        pipeline = "no pipeline" if self.schedule is None else counted(self.stages, "stage")
        schedule = self.schedule
        if isinstance(schedule, Schedule):
            schedule = ScheduleName(schedule.name, schedule.options)
        again = "recomputed as memory asks" if self.is_mixed else f"recomputed ({self.recompute})"
        parts = [
            " or ".join(map(str, self.meshes)) if len(self.meshes) < 4 else "any mesh",
            pipeline,
            "" if schedule is None else str(schedule),
            counted(self.microbatches, "micro-batch"),
            "" if self.states == WHOLE else f"states {self.states}",
            "" if self.recompute == PLAIN else again,
            f"layouts in {bytes_text(self.memory)}" if self.memory < math.inf else "",
            "layouts of its own" if self.has_own_layouts and self.memory == math.inf else "",
        ]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Found:
    """The fastest way that was found to run what was asked about; it fits."""

    candidate: Candidate

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step."""
        return self.candidate.seconds

    def __str__(self) -> str:
        return f"{seconds_text(self.seconds)}, {bytes_text(self.candidate.memory.peak)}"


@dataclass(frozen=True)
class TooLarge:
    """The bytes that some device needs at least, which is more than it has."""

    least_bytes: float
    way: Candidate | StagedWay | None = None  # that needs so many
    smallest: SmallestFootprint | None = None  # of layouts, if no program was made of any

    def __str__(self) -> str:
        return f"needs {bytes_text(self.least_bytes)}"


@dataclass(frozen=True)
class TooSlow:
    """The seconds that every way takes at least."""

    bound: float

    def __str__(self) -> str:
        return f"takes at least {seconds_text(self.bound)}"


@dataclass(frozen=True)
class OutOfTime:
    """The question was left when the time was over."""

    def __str__(self) -> str:
        return "not answered in time"


@dataclass(frozen=True)
class Refused:
    """The reason why a program cannot be run so."""

    error: InvalidInput

    def __str__(self) -> str:
        return self.error.rule


@dataclass(frozen=True)
class Unlike:
    """A short program cannot say what the whole one takes: its blocks would not be equal."""

    def __str__(self) -> str:
        return "equal blocks would differ"


Answer = Found | TooLarge | TooSlow | OutOfTime | Refused | Unlike
