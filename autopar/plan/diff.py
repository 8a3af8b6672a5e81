"""Diff: two plans side by side.

    print(plan.diff(other))

Layouts are compared by the names of parameters and nodes. Times, bytes and movements are compared
where both plans have their models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.plan.grouping import grouped
from autopar.plan.saved import SavedValue
from autopar.plan.units import bytes_text, seconds_text
from autopar.plan.value import PlanValue

Pair = tuple[Any, Any]
_LISTED = 40


@dataclass(frozen=True)
class PlanDiff:
    """What differs; every pair is (the first plan's, the second plan's)."""

    settings: Mapping[str, Pair]  # mesh, cluster, mode, micro-batches, where they differ
    parameters: Mapping[str, tuple[str | None, str | None]]  # name -> types
    values: Mapping[str, tuple[str | None, str | None]]  # node -> types
    cost: Mapping[str, tuple[float, float]]  # all parts, seconds
    memory: Mapping[str, tuple[float, float]]  # all parts, bytes
    movements: Mapping[str, tuple[int, int]]  # kind and axis -> how many
    without_model: bool  # cost, memory and movements were not to be had

    @property
    def is_empty(self) -> bool:
        """Whether the two plans decide the same."""
        return not (self.settings or self.parameters or self.values)

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.is_empty,
            "settings": _lists(self.settings),
            "parameters": _lists(self.parameters),
            "values": _lists(self.values),
            "cost": _lists(self.cost),
            "memory": _lists(self.memory),
            "movements": _lists(self.movements),
        }

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
        for what, types in (("parameters", self.parameters), ("values", self.values)):
            rows = grouped((name, pair) for name, pair in types.items())
            lines += [f"{what} ({len(types)})"] if rows else []
            lines += [f"  {name}: {one or '-'} | {two or '-'}" for name, (one, two), _ in rows][
                :_LISTED
            ]
            if len(rows) > _LISTED:
                lines.append(f"  and {len(rows) - _LISTED} more lines; to_json() has all")
        return "\n".join(lines)


def compare(first: PlanValue | SavedValue, second: PlanValue | SavedValue) -> PlanDiff:
    """What differs between two plans."""
    settings = {
        what: (one, other)
        for what, one, other in (
            ("mesh", first.whole_mesh.sizes, second.whole_mesh.sizes),
            ("cluster", first.cluster.name, second.cluster.name),
            ("devices", first.cluster.devices, second.cluster.devices),
            ("mode", first.mode, second.mode),
            ("microbatches", first.microbatches, second.microbatches),
            ("pipeline", _pipeline(first), _pipeline(second)),
        )
        if one != other
    }
    kept = {n for p in (first, second) for n in (*p.fingerprint.parameters, *p.fingerprint.buffers)}
    decided = {n for p in (first, second) for n in (*p.decisions.strategies, *p.decisions.fixed)}
    types = [{name: str(type_) for name, type_ in plan.types.items()} for plan in (first, second)]
    parameters, values = {}, {}
    for name in dict.fromkeys([*types[0], *types[1]]):
        pair = types[0].get(name), types[1].get(name)
        if pair[0] != pair[1] and name in kept:
            parameters[name] = pair
        elif pair[0] != pair[1] and name in decided:
            values[name] = pair
    cost, memory, moved = {}, {}, {}
    if attached := isinstance(first, PlanValue) and isinstance(second, PlanValue):
        costs = first.cost.to_json(), second.cost.to_json()
        memories = first.memory.to_json(), second.memory.to_json()
        cost = {part: (costs[0][part], costs[1][part]) for part in costs[0]}
        memory = {part: (memories[0][part], memories[1][part]) for part in memories[0]}
        counts = [
            Counter(f"{r.forward} over {r.axis}" for r in plan.movements())
            for plan in (first, second)
        ]
        moved = {
            kind: (counts[0][kind], counts[1][kind])
            for kind in sorted(counts[0].keys() | counts[1].keys())
        }
    return PlanDiff(settings, parameters, values, cost, memory, moved, not attached)


def _pipeline(plan: PlanValue | SavedValue) -> str:
    pipelining = plan.pipelining
    if pipelining is None:
        return "none"
    return f"{pipelining.schedule.name} of {len(pipelining.stages)} stages"


def _columns(parts: Mapping[str, tuple[float, float]], text: Any) -> list[str]:
    rows = []
    for name, (one, two) in parts.items():
        change = f"{(two - one) / one:+.1%}" if one else ""
        rows.append(f"  {name:<14}{text(one):>10} | {text(two):<10} {change}".rstrip())
    return rows


def _lists(pairs: Mapping[str, Pair]) -> dict[str, list[Any]]:
    return {name: list(pair) for name, pair in pairs.items()}
