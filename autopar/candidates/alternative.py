"""Alternative: one way to run a step that was weighed, with its predicted figures.

candidate.alternative(limit)             # its figures, where each device has `limit` bytes
plan.alternatives                        # those that a planner weighed
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.base.schema import Count
from autopar.cost.footprint import Memory
from autopar.cost.time_report import Cost
from autopar.mesh import Mesh
from autopar.pipeline.schedule import Option
from autopar.pipeline.schedule_labels import schedule_words
from autopar.states import WHOLE, States
from autopar.text.units import counted


@dataclass(frozen=True)
class Alternative:
    """One way to run a step that was weighed, with its predicted figures."""

    mesh: Mesh
    microbatches: Count
    schedule: str  # "" without a pipeline
    options: tuple[tuple[str, bool | Option], ...]
    seconds: float  # predicted for a step
    memory: float  # predicted bytes on the fullest device
    fits: bool
    # Where these seconds and bytes go: parts of `seconds`, kinds of `memory`.
    cost: Cost = field(compare=False)
    held: Memory = field(compare=False)
    recompute: str = ""  # how many regions run their forward again in backward, and how
    states: States = WHOLE
    axis: str = ""  # of the pipeline

    def description(self, *omitted: str) -> str:
        """Return in words how a step runs on the mesh, without the `omitted` fields."""
        schedule = schedule_words(self.schedule, dict(self.options)) if self.schedule else ""
        words = {
            "recompute": f"recomputed ({self.recompute})" if self.recompute else "",
            "states": "" if self.states == WHOLE else f"states {self.states}",
            "schedule": schedule,
            "microbatches": counted(self.microbatches, "micro-batch"),
        }
        return ", ".join(word for name, word in words.items() if word and name not in omitted)

    @property
    def how(self) -> str:
        """Return the mesh and the description, without figures."""
        return f"{self.mesh}: {self.description()}"

    def __str__(self) -> str:
        fits = "" if self.fits else ", does not fit"
        return f"{self.how}: {self.seconds:.4g} s, {self.memory / 1e9:.4g} GB{fits}"


def best_first(ways: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """Return ways that fit first; of those that take as long, the one that was weighed first."""
    return tuple(sorted(ways, key=lambda way: (not way.fits, float(f"{way.seconds:.9g}"))))
