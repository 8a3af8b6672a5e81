"""Search account: what the planner asked, in order, with its answers and the rules that asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.base.schema import write
from autopar.candidates.search_step import SearchStep
from autopar.plans.plan_value import PlanValue
from autopar.report.weighed_plans import left_out_words
from autopar.text.tables import wrap_line


@dataclass(frozen=True)
class SearchAccount:
    """Every question of the search for a plan, with its answer."""

    steps: Sequence[SearchStep]
    left_out: Mapping[str, int]  # how many questions bounds ruled out, unasked
    is_cut_short: bool  # its time was over, or it was interrupted

    @property
    def reasons(self) -> dict[str, str]:
        """The reason of each rule that asked, in the order in which they first did."""
        return {step.rule: step.reason for step in self.steps}

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        steps = [write(step) for step in self.steps]
        return {
            "steps": steps,
            "rules": self.reasons,
            "left_out": dict(self.left_out),
            "ended_early": self.is_cut_short,
        }

    def __str__(self) -> str:
        lines = ["search: what was asked, in order"]
        for number, step in enumerate(self.steps, 1):
            lines += wrap_line(f"{number:4}. {step}")
        lines.append("rules that asked")
        for rule, reason in self.reasons.items():
            lines += wrap_line(f"  {rule}: {reason}")
        lines.append(f"ruled out by bounds, unasked: {left_out_words(self.left_out)}")
        if self.is_cut_short:
            lines.append("ended early: what was not asked may be better")
        return "\n".join(lines)


def search_account(plan: PlanValue) -> SearchAccount:
    """Return the account of the search for a plan."""
    is_cut_short = plan.search is not None and plan.search.interrupted
    return SearchAccount(plan.asked, plan.left_out, is_cut_short)
