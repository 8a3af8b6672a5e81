"""The answer to `plan.explain(name)` as a value that prints and that becomes JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopar.cost.rooflines import SYMBOLS
from autopar.plans.formulas import PricedChange
from autopar.text.tables import table, wrap_line
from autopar.text.units import counted, seconds_text

_IN_DETAIL = 3  # candidates whose formulas a text shows
_LISTED = 24  # candidates that a text lists


@dataclass(frozen=True)
class PricedCandidate:
    """One way in which an operator could run, or a parameter could be kept, and what it takes."""

    strategy: str
    output: str  # its type
    memory: float  # bytes that it keeps (a parameter: with gradient and optimizer states)
    edges: tuple[PricedChange, ...]  # to the neighbours as they were decided
    step: float | None  # seconds of the best step with this one forced
    chosen: bool
    inputs: tuple[str, ...] = ()  # the types of its inputs
    forward: float = 0.0  # seconds of the operator itself
    backward: float = 0.0
    inside: float = 0.0  # of movements that its kernel brings along
    excluded: str = ""  # why it was not offered; "" if it was
    formulas: tuple[str, ...] = ()  # of forward and backward

    @property
    def all_formulas(self) -> tuple[str, ...]:
        """The formulas of the operator and of its movements."""
        of_edges = (formula for edge in self.edges for formula in edge.formulas)
        return (*self.formulas, *of_edges)

    @property
    def own(self) -> float:
        return self.forward + self.backward + self.inside

    @property
    def moved(self) -> float:
        return math.fsum(edge.seconds for edge in self.edges)

    @property
    def total(self) -> float:
        """The seconds of the operator, and of the movements to its neighbours."""
        return self.own + self.moved


@dataclass(frozen=True)
class OperatorGroup:
    """An operator of a module, in all of the equal blocks that have it."""

    module: str  # "layers.{0..11}.up"
    operator: str
    strategy: str
    count: int


@dataclass(frozen=True)
class Explanation:
    """All candidates of one decision, the chosen one among them."""

    name: str
    what: str  # the operator, or "parameter"
    source: str
    mesh: str
    bound: tuple[str, ...]  # what annotations say
    candidates: tuple[PricedCandidate, ...]
    others: tuple[str, ...]  # other operators of the module; the readers of a parameter
    step_is_lower_bound: bool  # under a memory limit: `step` is what no plan that fits can beat
    module: str = ""
    rule: str = ""
    region: str = ""  # that runs again in backward, or keeps elsewhere, and it stands in
    blocks: tuple[OperatorGroup, ...] = ()  # of a module: all its operators, equal blocks together
    namesake: str = ""  # what the decision about the whole step is called, of the same name
    times: float = 1.0  # how often a step has what a candidate takes: its micro-batches, by stages

    @property
    def chosen(self) -> PricedCandidate:
        return next(candidate for candidate in self.candidates if candidate.chosen)

    @property
    def ranked(self) -> list[PricedCandidate]:
        """The chosen candidate, then the others, the cheapest first."""

        def key(candidate: PricedCandidate) -> tuple[float, ...]:
            step = candidate.total if candidate.step is None else candidate.step
            return (not candidate.chosen, bool(candidate.excluded), step, candidate.total)

        return sorted(self.candidates, key=key)

    def penalty(self, candidate: PricedCandidate) -> float | None:
        """Return by how many seconds a step is longer with `candidate` forced."""
        if candidate.step is None or self.chosen.step is None:
            return None
        return candidate.step - self.chosen.step

    def rest(self, candidate: PricedCandidate) -> float | None:
        """Return the part of a penalty that is neither the candidate's own nor of its movements.

        All else, chosen anew, is longer by these seconds, or shorter. None without a penalty.
        """
        penalty = self.penalty(candidate)
        if penalty is None or candidate.chosen or not math.isfinite(penalty + candidate.total):
            return None
        left = penalty - self.times * (candidate.total - self.chosen.total)
        return left if abs(left) > 1e-9 * (self.chosen.step or 0.0) else 0.0

    @property
    def symbols(self) -> Mapping[str, str]:
        """The meanings of the symbols in the formulas of all candidates."""
        return _symbols(self.candidates)

    @property
    def why(self) -> str:
        """The reason in a sentence that the chosen candidate wins."""
        others = [c for c in self.ranked[1:] if not c.excluded]
        if self.bound:
            reason = "an annotation binds it"
            if not others:
                return reason
        elif not others:
            reasons = dict.fromkeys(candidate.excluded for candidate in self.ranked[1:])
            return "; ".join(reasons) or "there is no other candidate"
        if self.chosen.step is None:
            return "spread from the annotations, without a search: times are not compared"
        second = others[0]
        penalty = self.penalty(second) or 0.0
        if penalty == math.inf:
            return "no other candidate fits its neighbours"
        least = "at least " if self.step_is_lower_bound else ""
        if penalty <= 1e-12 * (self.chosen.step or 1.0):
            return f"it is as good as the next, {second.strategy}"
        changes = {
            "itself": self.times * (second.own - self.chosen.own),
            "its movements": self.times * (second.moved - self.chosen.moved),
            "all else, chosen anew,": self.rest(second) or 0.0,
        }
        parts = ", ".join(f"{what} {_change(seconds)}" for what, seconds in changes.items())
        return f"the next, {second.strategy}, costs {least}{seconds_text(penalty)} more ({parts})"

    def to_json(self) -> dict[str, Any]:
        ranked = [
            {**asdict(c), "own": c.own, "moved": c.moved, "total": c.total}
            | {"penalty": self.penalty(c), "rest": self.rest(c)}
            for c in self.ranked
        ]
        answers = {"why": self.why, "candidates": ranked, "symbols": self.symbols}
        return _finite(asdict(self) | answers)

    def __str__(self) -> str:
        at = f" in {self.module}" if self.module else ""
        lines = [*wrap_line(f"{self.name}: {self.what}{at} on {self.mesh}")]
        if self.others and self.what != "parameter":
            lines.append(f"  the costliest of {counted(len(self.others) + 1, 'operator')} there")
        facts = {"": self.source, "rule: ": self.rule, "region: ": self.region}
        texts = [f"{name}{text}" for name, text in facts.items() if text]
        texts += [f"bound: {text}" for text in self.bound]
        texts.append(f"chosen: {self.chosen.strategy}; {self.why}")
        lines += [line for text in texts for line in wrap_line(f"  {text}")]
        lines += ["", *self._table()]
        for candidate in self.ranked[:_IN_DETAIL]:
            lines += ["", *_details(candidate)]
        if symbols := _symbols(self.ranked[:_IN_DETAIL]):
            words = "; ".join(f"{symbol} = {words}" for symbol, words in symbols.items())
            lines += ["", *wrap_line(f"  where {words}", 4)]
        if len(self.candidates) > _IN_DETAIL:
            lines += ["", "  to_json() has the formulas of all candidates"]
        if self.namesake:
            words = f"  {self.namesake} is the name of that decision about the whole step"
            lines += ["", *wrap_line(words)]
        if self.others and self.blocks:
            rows = [
                (
                    group.module,
                    group.operator,
                    group.strategy,
                    f"x {group.count}" * (group.count > 1),
                )
                for group in self.blocks
            ]
            lines += ["", "  all of them:", *table(rows, _LISTED)]
        elif self.others:
            place = f"also in {self.module or 'the model'}"
            kind = "read by" if self.what == "parameter" else place
            more = f", and {len(self.others) - 12} more" if len(self.others) > 12 else ""
            lines += ["", *wrap_line(f"  {kind}: {', '.join(self.others[:12])}{more}")]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        is_operator = self.what != "parameter"  # whose output is not what it is kept as
        output = ["output"] * is_operator
        rows = [("candidate", *output, "itself", "moves", "all else", "step if forced")]
        for candidate in self.ranked:
            penalty = self.penalty(candidate)
            if candidate.excluded:
                forced = candidate.excluded
            elif penalty is None:
                forced = ""
            else:
                forced = "chosen" if candidate.chosen else f"+{seconds_text(penalty)}"
                forced = "not possible" if math.isinf(penalty) else forced
            rows.append(
                (
                    ("* " if candidate.chosen else "  ") + candidate.strategy,
                    *[candidate.output] * is_operator,
                    seconds_text(candidate.own),
                    seconds_text(candidate.moved) if math.isfinite(candidate.moved) else "-",
                    "" if (rest := self.rest(candidate)) is None else _change(rest),
                    forced,
                )
            )
        lines = table(rows, _LISTED)
        if any(self.rest(candidate) is not None for candidate in self.candidates):
            often = "" if self.times == 1 else f", {self.times:g} times in a step"
            lines += wrap_line(
                f"  step if forced: the extra time of a step with this candidate{often}. It is the "
                "difference in itself and moves to the chosen candidate, plus the change in all "
                "else, which is chosen again"
            )
        return lines


def _details(candidate: PricedCandidate) -> list[str]:
    """Return the formulas of one candidate as lines, with its inputs and movements."""
    lines = [*wrap_line(f"  {candidate.strategy}, {seconds_text(candidate.total)}:")]
    if candidate.inputs:
        lines += wrap_line(f"    ({', '.join(candidate.inputs)}) -> {candidate.output}")
    lines += [line for formula in candidate.formulas for line in wrap_line(f"    {formula}")]
    for edge in candidate.edges:
        if edge.seconds:
            to = "" if edge.tensor == edge.neighbour else f" to {edge.neighbour}"
            where = f"{'output' if to else 'input'} {edge.tensor}{to}"
            lines += wrap_line(
                f"    {where}: {edge.before} -> {edge.after}, {seconds_text(edge.seconds)}"
            )
            lines += [line for formula in edge.formulas for line in wrap_line(f"      {formula}")]
    return lines


def _symbols(candidates: Iterable[PricedCandidate]) -> dict[str, str]:
    """Return the meanings of the symbols in the formulas of candidates."""
    lines = [line for candidate in candidates for line in candidate.all_formulas]
    used = {word for line in lines for word in re.findall(r"\w+", line.partition(" = ")[2])}
    return {symbol: words for symbol, words in SYMBOLS.items() if symbol in used}


def _change(seconds: float) -> str:
    return f"{'' if seconds < 0 else '+'}{seconds_text(seconds)}"


def _finite(data: Any) -> Any:
    """Replace infinities, which JSON has not, by None."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
