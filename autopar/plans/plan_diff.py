"""Diff: two plans side by side.

    print(plan.diff(other))

Layouts are compared by the names of parameters and nodes. Times, bytes and movements are compared
where both plans have their models.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, dataclass, fields, replace
from typing import Any

from autopar.plans.grouping import grouped
from autopar.plans.plan_value import PlanValue
from autopar.plans.saved_value import SavedValue, deciding, values_to_save
from autopar.search.decisions import Decisions
from autopar.strategies.node_info import info
from autopar.text.tables import first_lines
from autopar.text.units import bytes_text, seconds_text

Pair = tuple[Any, Any]
_LISTED = 40
_AS_LAYOUTS = ("typed", "others", "fingerprint")  # fields that are compared by names of tensors
_WORDS: Mapping[str, Callable[[Any], str]] = {"limit": bytes_text}
_NONE = {"microbatch_count": "1"}  # None in words


@dataclass(frozen=True)
class PlanDiff:
    """The differences of two plans; every pair is (the first plan's, the second plan's)."""

    settings: Mapping[str, Pair]  # mesh, and what fields of a plan say that is no layout, in words
    regions: Mapping[str, tuple[str | None, str | None]]  # name -> what is recomputed
    parameters: Mapping[str, tuple[str | None, str | None]]  # name -> types
    values: Mapping[str, tuple[str | None, str | None]]  # node -> types
    cost: Mapping[str, tuple[float, float]]  # all parts, seconds
    memory: Mapping[str, tuple[float, float]]  # the peak and its parts, bytes
    movements: Mapping[str, tuple[int, int]]  # kind and axis -> how many
    places: Mapping[str, str]  # node -> its module and kind, of what stands in `values`
    without_model: bool  # cost, memory, movements and places were not to be had

    @property
    def is_empty(self) -> bool:
        """Return whether the two plans decide the same."""
        return not (self.settings or self.regions or self.parameters or self.values)

    def to_json(self) -> dict[str, Any]:
        parts = asdict(self)
        del parts["without_model"], parts["places"]
        return {"equal": self.is_empty, **parts}

    def __str__(self) -> str:
        lines = ["the plans decide the same" if self.is_empty else "the plans differ"]
        lines += [f"  {name}: {a} | {b}" for name, (a, b) in self.settings.items()]
        if self.without_model:
            lines.append(
                "  time, memory and movements are compared where both plans have their model"
            )
        for what, parts, text in (
            ("time", self.cost, seconds_text),
            ("memory at the peak", self.memory, bytes_text),
        ):
            if parts:
                lines += [what, *_columns(parts, text)]
        if self.movements:
            lines.append("movements")
            lines += [f"  {kind}: {a} | {b}" for kind, (a, b) in self.movements.items()]
        named = {
            "recomputed in backward": self.regions,
            "parameters": self.parameters,
            "values": self.values,
        }
        for what, types in named.items():
            rows = grouped((self.places.get(name, name), pair) for name, pair in types.items())
            lines += [f"{what} ({len(types)})"] if rows else []
            shown = [f"  {name}: {a or '-'} | {b or '-'}" for name, (a, b), _ in rows]
            lines += first_lines(shown, _LISTED, " lines; to_json() has all")
        return "\n".join(lines)


def compare(first: PlanValue | SavedValue, second: PlanValue | SavedValue) -> PlanDiff:
    """Return the differences between two plans.

    Args:
        second: The plan to compare with. Plans from files compare what they
            hold: layouts and settings, but no times, bytes or movements.
    """
    plans = first, second
    stored = {n for p in plans for n in (*p.fingerprint.parameters, *p.fingerprint.buffers)}
    decided = {n for p in plans for n in (*p.decisions.strategies, *p.decisions.fixed)}
    texts = ({name: str(type_) for name, type_ in plan.types.items()} for plan in plans)
    types = _different(_pairs(*texts))
    recomputed = [plan.decisions.recompute for plan in plans]
    cost, memory, moved, places = {}, {}, {}, {}
    attached = [plan for plan in plans if isinstance(plan, PlanValue)]
    if len(attached) == 2:
        held = [plan.memory for plan in attached]
        cost = _pairs(*(plan.cost.to_json() for plan in attached))
        memory = _pairs(*({"peak": m.peak, **m.kinds, "host": m.host} for m in held))
        a, b = (Counter(f"{r.forward} over {r.axis}" for r in p.movements()) for p in attached)
        moved = {kind: (a[kind], b[kind]) for kind in sorted({**a, **b})}
        places = _places(attached[0])
    diff = PlanDiff(
        _settings(first, second),
        _different(_pairs(*({n: how.words for n, how in r.items()} for r in recomputed))),
        {name: pair for name, pair in types.items() if name in stored},
        {name: pair for name, pair in types.items() if name in decided - stored},
        cost,
        memory,
        moved,
        places,
        without_model=len(attached) < 2,
    )
    if diff.is_empty and first.decisions != second.decisions:  # as on the ways between layouts
        names = (field.name for field in fields(Decisions))
        apart = [n for n in names if getattr(first.decisions, n) != getattr(second.decisions, n)]
        return replace(diff, settings={"decisions": (f"these {', '.join(apart)}", "others")})
    return diff


def _settings(*plans: PlanValue | SavedValue) -> dict[str, Pair]:
    """Return the settings in which plans differ: all that is no layout, by the fields of a plan."""
    first, second = plans
    settings = _different({"mesh": (first.whole_mesh.sizes, second.whole_mesh.sizes)})
    values = [vars(p) if isinstance(p, SavedValue) else values_to_save(p) for p in plans]
    for field in deciding():
        pair = tuple(of_plan[field.name] for of_plan in values)
        if field.name in _AS_LAYOUTS or pair[0] == pair[1]:
            continue
        words, none = _WORDS.get(field.name, str), _NONE.get(field.name, "none")
        texts = [none if value is None else words(value) for value in pair]
        lines = texts if texts[0] != texts[1] else map(repr, pair)
        settings[setting_name(field)] = _differing_lines(*lines)
    models = first.fingerprint, second.fingerprint
    if other := models[0].differences(models[1]):
        settings["model"] = other[0], models[1].differences(models[0])[0]
    return settings


def _places(plan: PlanValue) -> dict[str, str]:
    """Return each node's module, and its number among its kind there: equal in equal blocks."""
    places, counted = {}, Counter[str]()
    for node in plan.captured.operators:
        place = ".".join(filter(None, (info(node).module, re.sub(r"_\d+$", "", node.name))))
        counted[place] += 1
        places[node.name] = place + (f" ({counted[place]})" if counted[place] > 1 else "")
    return places


def setting_name(field: Field[Any]) -> str:
    """Return the name of a plan's field among settings."""
    name: str = field.metadata.get("key", field.name)
    return name.replace("_", " ")


def _differing_lines(first: str, second: str) -> Pair:
    """Return those lines of two texts that differ."""
    lines = itertools.zip_longest(first.splitlines(), second.splitlines(), fillvalue="")
    apart = zip(*(pair for pair in lines if pair[0] != pair[1]))
    left, right = ("; ".join(filter(None, map(str.strip, column))) for column in apart)
    return left, right


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the values of both mappings by name; None where a mapping lacks the name."""
    return {name: (first.get(name), second.get(name)) for name in {**first, **second}}


def _different(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _columns(parts: Mapping[str, tuple[float, float]], text: Any) -> list[str]:
    rows = []
    for name, (before, after) in parts.items():
        if not (before or after):
            continue
        change = f"{(after - before) / before:+.1%}" if before else ""
        rows.append(f"  {name:<18}{text(before):>10} | {text(after):<10} {change}".rstrip())
    return rows
