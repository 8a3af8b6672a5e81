"""Diff: two plans side by side.

    print(plan.diff(other))

Layouts are compared by the names of parameters and nodes. Times, bytes and movements are compared
where both plans have their models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopar.plan.grouping import grouped
from autopar.plan.saved import SavedValue
from autopar.plan.value import PlanValue
from autopar.units import bytes_text, listed, seconds_text

Pair = tuple[Any, Any]
_LISTED = 40


@dataclass(frozen=True)
class PlanDiff:
    """What differs; every pair is (the first plan's, the second plan's)."""

    settings: Mapping[str, Pair]  # mesh, cluster, mode, micro-batches, where they differ
    regions: Mapping[str, tuple[str | None, str | None]]  # name -> what is recomputed
    parameters: Mapping[str, tuple[str | None, str | None]]  # name -> types
    values: Mapping[str, tuple[str | None, str | None]]  # node -> types
    cost: Mapping[str, tuple[float, float]]  # all parts, seconds
    memory: Mapping[str, tuple[float, float]]  # all parts, bytes
    movements: Mapping[str, tuple[int, int]]  # kind and axis -> how many
    without_model: bool  # cost, memory and movements were not to be had

    @property
    def is_empty(self) -> bool:
        """Whether the two plans decide the same."""
        return not (self.settings or self.regions or self.parameters or self.values)

    def to_json(self) -> dict[str, Any]:
        parts = {name: pairs for name, pairs in asdict(self).items() if name != "without_model"}
        return {"equal": self.is_empty, **parts}

    def __str__(self) -> str:
        lines = ["the plans decide the same" if self.is_empty else "the plans differ"]
        lines += [f"  {name}: {one} | {other}" for name, (one, other) in self.settings.items()]
        if self.without_model:
            lines.append("  time, memory and movements: attach both plans to the model to compare")
        for what, parts, text in (
            ("time", self.cost, seconds_text),
            ("memory", self.memory, bytes_text),
        ):
            if parts:
                lines += [what, *_columns(parts, text)]
        if self.movements:
            lines.append("movements")
            lines += [f"  {kind}: {one} | {two}" for kind, (one, two) in self.movements.items()]
        named = {
            "recomputed in backward": self.regions,
            "parameters": self.parameters,
            "values": self.values,
        }
        for what, types in named.items():
            rows = grouped(types.items())
            lines += [f"{what} ({len(types)})"] if rows else []
            shown = [f"  {name}: {one or '-'} | {two or '-'}" for name, (one, two), _ in rows]
            lines += listed(shown, _LISTED, " lines; to_json() has all")
        return "\n".join(lines)


def compare(first: PlanValue | SavedValue, second: PlanValue | SavedValue) -> PlanDiff:
    """What differs between two plans."""
    plans = first, second
    kept = {n for p in plans for n in (*p.fingerprint.parameters, *p.fingerprint.buffers)}
    decided = {n for p in plans for n in (*p.decisions.strategies, *p.decisions.fixed)}
    texts = ({name: str(type_) for name, type_ in plan.types.items()} for plan in plans)
    types = _different(_pairs(*texts))
    recomputed = [plan.decisions.recompute for plan in plans]
    cost, memory, moved = {}, {}, {}
    attached = [plan for plan in plans if isinstance(plan, PlanValue)]
    if len(attached) == 2:
        cost = _pairs(*(plan.cost.to_json() for plan in attached))
        memory = _pairs(*(plan.memory.to_json() for plan in attached))
        one, two = (Counter(f"{r.forward} over {r.axis}" for r in p.movements()) for p in attached)
        moved = {kind: (one[kind], two[kind]) for kind in sorted({**one, **two})}
    return PlanDiff(
        _different(_pairs(_settings(first), _settings(second))),
        _different(_pairs(*({n: how.words for n, how in r.items()} for r in recomputed))),
        {name: pair for name, pair in types.items() if name in kept},
        {name: pair for name, pair in types.items() if name in decided - kept},
        cost,
        memory,
        moved,
        without_model=len(attached) < 2,
    )


def _settings(plan: PlanValue | SavedValue) -> dict[str, Any]:
    made = plan.pipelining
    return {
        "mesh": plan.whole_mesh.sizes,
        "cluster": plan.cluster.name,
        "devices": plan.cluster.devices,
        "mode": plan.mode,
        "microbatches": plan.microbatches,
        "states": str(plan.states),
        "dynamic shapes": str(plan.dynamic or "none"),
        "pipeline": f"{made.schedule.name} of {len(made.stages)} stages" if made else "none",
    }


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Pair]:
    """What both say, by name; None where one says nothing."""
    return {name: (first.get(name), second.get(name)) for name in {**first, **second}}


def _different(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    return {name: (one, two) for name, (one, two) in pairs.items() if one != two}


def _columns(parts: Mapping[str, tuple[float, float]], text: Any) -> list[str]:
    rows = []
    for name, (one, two) in parts.items():
        if not (one or two):
            continue
        change = f"{(two - one) / one:+.1%}" if one else ""
        rows.append(f"  {name:<18}{text(one):>10} | {text(two):<10} {change}".rstrip())
    return rows
