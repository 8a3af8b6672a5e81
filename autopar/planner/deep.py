"""Deep: the planner of programs of many equal blocks, which weighs ways to run a shorter one.

The way that it takes is made of the whole program, and must be there what it was said to be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from torch import nn

from autopar.candidates.alternative import Alternative
from autopar.candidates.candidate import Candidate
from autopar.capture.annotations import marked_regions, parameter_annotations, stage_pins
from autopar.capture.captured import Captured
from autopar.capture.shortened import LEAST_BESIDE, Shortened, shortened
from autopar.mesh import Mesh
from autopar.pipeline.stages.stretch import NotAlike
from autopar.planner.choose import Planner
from autopar.planner.fastest import Fastest
from autopar.planner.patience import Ended
from autopar.planner.request import Request
from autopar.planner.whole import Whole
from autopar.recompute import Recompute
from autopar.search.constraints import Constraints, require_used
from autopar.search.layout_search import nothing_found_yet
from autopar.text.progress import Report


class DeepPlanner:
    """Makes and prices the candidates of a request."""

    def __init__(
        self, model: nn.Module, captured: Captured, request: Request, report: Report
    ) -> None:
        self._model, self._captured, self._report = model, captured, report
        self.request = request
        require_used(model, captured, request.mode, request.stages)
        self._short = self._shortened()
        self._planner = self._of(self._short)

    def _of(self, short: Shortened | None) -> Planner:
        program = self._captured if short is None else short.captured
        brief = short and shortened(self._captured, LEAST_BESIDE)
        whole = Whole(short, brief, self.request) if short and brief else None
        return Planner(self._model, program, self.request, self._report, whole)

    def _shortened(self) -> Shortened | None:
        """The short program, if nothing is said of single parts of the whole."""
        model, asked = self._model, self.request
        is_annotated = any(parameter_annotations(model)) or any(stage_pins(model))
        if asked.mode != "auto" or is_annotated or any(marked_regions(model)):
            return None
        return None if asked.recompute.modules else shortened(self._captured)

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """All that was weighed, the best first."""
        return self._planner.ledger.alternatives

    @property
    def ended(self) -> Ended:
        """What ended it before all was weighed."""
        return self._planner.ended

    @property
    def left_out(self) -> Counter[str]:
        """What bounds ruled out."""
        return self._planner.ledger.left_out

    def constraints(
        self, program: Captured, decided: Mapping[str, Recompute], mesh: Mesh
    ) -> Constraints:
        """What annotations ask for, where these regions are recomputed."""
        return self._planner.constraints(program, decided, mesh)

    @property
    def kept(self) -> Fastest:
        """The fastest that fit."""
        return self._planner.ledger.kept

    def best(self) -> Candidate:
        """The fastest way to run a step, of those that are asked for and fit."""
        if self._short is not None:
            with suppress(NotAlike):
                return self._planner.best()
            if self._planner.ended == "Ctrl-C":
                raise nothing_found_yet()
            self._planner = self._of(None)
        return self._planner.best()
