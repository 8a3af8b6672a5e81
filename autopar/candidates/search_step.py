"""Search step: one question that the planner asked, with its answer, as a plan tells it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchStep:
    """A question about how to run a step, with its answer."""

    question: str  # "Mesh(dp=8), no pipeline, 4 micro-batches"
    answer: str  # "1.7 s, 62 GB", or why there is no such plan
    rule: str  # by which it was asked, as "template"
    reason: str  # of the rule

    def __str__(self) -> str:
        return f"{self.question}: {self.answer} ({self.rule})"
