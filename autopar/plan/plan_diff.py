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

from autopar.plan.grouping import grouped
from autopar.plan.plan_value import PlanValue
from autopar.plan.saved_value import SavedValue, deciding, values_to_save
from autopar.search.decisions import Decisions
from autopar.strategies.node_info import info
from autopar.text.tables import listed
from autopar.text.units import bytes_text, seconds_text

Pair = tuple[Any, Any]
_LISTED = 40
_AS_LAYOUTS = ("typed", "others", "fingerprint")  # fields that are compared by names of tensors
_WORDS: Mapping[str, Callable[[Any], str]] = {"limit": bytes_text}
_NONE = {"microbatch_count": "1"}  # None in words


@dataclass(frozen=True)
class PlanDiff:
    """What differs; every pair is (the first plan's, the second plan's)."""

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
        """Whether the two plans decide the same."""
        return not (self.settings or self.regions or self.parameters or self.values)

    def to_json(self) -> dict[str, Any]:
        parts = asdict(self)
        del parts["without_model"], parts["places"]
        return {"equal": self.is_empty, **parts}

    def __str__(self) -> str:
        lines = ["the plans decide the same" if self.is_empty else "the plans differ"]
        lines += [f"  {name}: {one} | {other}" for name, (one, other) in self.settings.items()]
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
            lines += [f"  {kind}: {one} | {two}" for kind, (one, two) in self.movements.items()]
        named = {
            "recomputed in backward": self.regions,
            "parameters": self.parameters,
            "values": self.values,
        }
        for what, types in named.items():
            rows = grouped((self.places.get(name, name), pair) for name, pair in types.items())
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
    cost, memory, moved, places = {}, {}, {}, {}
    attached = [plan for plan in plans if isinstance(plan, PlanValue)]
    if len(attached) == 2:
        held = [plan.memory for plan in attached]
        cost = _pairs(*(plan.cost.to_json() for plan in attached))
        memory = _pairs(*({"peak": m.peak, **m.kinds, "host": m.host} for m in held))
        one, two = (Counter(f"{r.forward} over {r.axis}" for r in p.movements()) for p in attached)
        moved = {kind: (one[kind], two[kind]) for kind in sorted({**one, **two})}
        places = _places(attached[0])
    diff = PlanDiff(
        _settings(first, second),
        _different(_pairs(*({n: how.words for n, how in r.items()} for r in recomputed))),
        {name: pair for name, pair in types.items() if name in kept},
        {name: pair for name, pair in types.items() if name in decided - kept},
        cost,
        memory,
        moved,
        places,
        without_model=len(attached) < 2,
    )
    if diff.is_empty and first.decisions != second.decisions:  # as on the ways between layouts
        names = (one.name for one in fields(Decisions))
        apart = [n for n in names if getattr(first.decisions, n) != getattr(second.decisions, n)]
        return replace(diff, settings={"decisions": (f"these {', '.join(apart)}", "others")})
    return diff


def _settings(*plans: PlanValue | SavedValue) -> dict[str, Pair]:
    """All that is no layout, by the fields of a plan."""
    first, second = plans
    found = _different({"mesh": (first.whole_mesh.sizes, second.whole_mesh.sizes)})
    of_both = [vars(one) if isinstance(one, SavedValue) else values_to_save(one) for one in plans]
    for one in deciding():
        pair = tuple(value[one.name] for value in of_both)
        if one.name in _AS_LAYOUTS or pair[0] == pair[1]:
            continue
        words, none = _WORDS.get(one.name, str), _NONE.get(one.name, "none")
        texts = [none if value is None else words(value) for value in pair]
        found[said_as(one)] = _where_apart(*(texts if texts[0] != texts[1] else map(repr, pair)))
    models = first.fingerprint, second.fingerprint
    if other := models[0].differences(models[1]):
        found["model"] = other[0], models[1].differences(models[0])[0]
    return found


def _places(plan: PlanValue) -> dict[str, str]:
    """Node -> its module and which of its kind it is there, equal in equal blocks."""
    found, counted = {}, Counter[str]()
    for node in plan.captured.operators:
        place = ".".join(filter(None, (info(node).module, re.sub(r"_\d+$", "", node.name))))
        counted[place] += 1
        found[node.name] = place + (f" ({counted[place]})" if counted[place] > 1 else "")
    return found


def said_as(one: Field[Any]) -> str:
    """What a field of a plan is called among settings."""
    name: str = one.metadata.get("key", one.name)
    return name.replace("_", " ")


def _where_apart(first: str, second: str) -> Pair:
    """Two texts that differ, by the lines in which they do."""
    lines = itertools.zip_longest(first.splitlines(), second.splitlines(), fillvalue="")
    apart = zip(*(pair for pair in lines if pair[0] != pair[1]))
    one, two = ("; ".join(filter(None, map(str.strip, each))) for each in apart)
    return one, two


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
