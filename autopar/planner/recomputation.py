"""Recomputation: which regions run again in backward, as is asked for, or as memory asks for it.

Every region costs the seconds of its forward and spares what it does not keep. Of all ways to give
each region a kind, the fastest that fits is found exactly, by CP-SAT: at the end of forward, and
while the backward of any region runs, what is kept stays below the limit.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import add
from typing import Literal

from torch import fx

from autopar.capture.annotations import MarkedRegion
from autopar.capture.captured import Captured
from autopar.capture.regions import blocks, checkpoints, found
from autopar.cluster import Host
from autopar.cost.program import NodePrices
from autopar.cost.saved_tensors import (
    Storage,
    kept_away,
    kept_through,
    most_remade,
    piece_bytes,
)
from autopar.errors import InvalidInput
from autopar.recompute import Keep, Recompute
from autopar.solver.cp_sat import new_model, new_solver, outcome, weighted_sum
from autopar.strategies.node_info import info

PLAIN, SELECTIVE, FULL = Recompute(None), Recompute("selective"), Recompute("full")
KINDS = (PLAIN, SELECTIVE, FULL)
LEANER = (Recompute("full", "cut"), Recompute("full", "host"))  # where no others fit
_EFFORT = 1.0  # deterministic time, about seconds
_RANGE = 1 << 24  # of seconds in whole numbers


@dataclass(frozen=True)
class AskedRecomputation:
    """What is asked for of the program's own regions, and of modules by name or pattern."""

    blocks: Literal["auto"] | Recompute = "auto"
    modules: Mapping[str, Recompute] = field(default_factory=dict)


class Regions:
    """The regions of one program: what must be, and what is left to choose."""

    def __init__(
        self,
        captured: Captured,
        asked: AskedRecomputation,
        marked: Sequence[MarkedRegion] = (),
    ) -> None:
        """`marked`: what annotations ask for, of modules, with their lines."""
        self.fixed: dict[str, Recompute] = dict.fromkeys(checkpoints(captured), FULL)
        own = blocks(captured)
        paths = {info(node).module.partition("@")[0] for node in captured.operators}
        modules = {p for path in paths for p in _prefixes(path)}
        named: dict[str, Recompute] = {}
        for pattern, kind in asked.modules.items():
            matched = [name for name in (*sorted(modules), *own) if fnmatchcase(name, pattern)]
            if not matched:
                raise _unknown(pattern, [*own, *sorted(modules)])
            named |= {name: kind for name in matched if not _is_below(name, matched)}
        _require_agreement(marked, asked, named)
        _require_free_of_checkpoints(marked, captured)
        named |= {one.module: one.how for one in marked}
        for one in marked:
            if one.module not in modules:
                rule = "a module that is recomputed runs inside the model that is planned"
                remedy = "annotate modules inside it, or remove the annotation"
                raise InvalidInput(rule, got=one.name, remedy=remedy, source=one.source)
        outer = {name: kind for name, kind in named.items() if not _is_below(name, named)}
        covered = _covered(captured, self.fixed, outer)
        self.fixed |= {n: how for n, how in outer.items() if not how.is_plain and n not in covered}
        free = [n for n in own if n not in outer and not _is_below(n, outer)]
        if asked.blocks == "auto":  # what is said of a part is not chosen with the whole
            free = [n for n in free if not any(_is_below(part, [n]) for part in outer)]
        left = found(captured, (*self.fixed, *free)) if self.fixed else free
        self.free = tuple(name for name in free if name in left)
        self.kinds = KINDS if asked.blocks == "auto" and self.free else (self._plain(asked),)

    def leaner(self, host: Host) -> tuple[Recompute, ...]:
        """Further ways, which are weighed where none of `kinds` fits."""
        if len(self.kinds) == 1:
            return ()
        return tuple(how for how in LEANER if how.keep != "host" or not host.is_device)

    def _plain(self, asked: AskedRecomputation) -> Recompute:
        return PLAIN if asked.blocks == "auto" else asked.blocks

    def all(self, how: Recompute) -> dict[str, Recompute]:
        """The decisions that treat all alike that are left to choose."""
        return self.fixed | ({} if how.is_plain else dict.fromkeys(self.free, how))


def _require_agreement(
    marked: Sequence[MarkedRegion], asked: AskedRecomputation, named: Mapping[str, Recompute]
) -> None:
    """Refuse annotations that contradict each other, or what is asked for by option."""
    rule = "what is recomputed of a module is said in one way"
    for one in marked:
        if isinstance(asked.blocks, Recompute) and not asked.modules and asked.blocks != one.how:
            raise _refused(rule, one, f"recompute={str(asked.blocks)!r} for the whole program")
        for name, how in named.items():
            if how != one.how and _are_nested(name, one.module):
                raise _refused(rule, one, f"recompute={{{name!r}: {str(how)!r}}}")
        for other in marked:
            if other.how != one.how and _are_nested(other.module, one.module):
                raise _refused(rule, one, f"{other.how} for {other.name} at {other.source}")


def _require_free_of_checkpoints(marked: Sequence[MarkedRegion], captured: Captured) -> None:
    for one in marked:
        for node in captured.operators if one.how != FULL else ():
            is_inside = f"{info(node).module}.".startswith(f"{one.module}.")
            if is_inside and info(node).checkpoint is not None:
                rule = "what the model wraps in torch.utils.checkpoint is recomputed in full"
                raise _refused(rule, one, f"a checkpoint at {info(node).source}")


def _covered(
    captured: Captured, wrapped: Mapping[str, Recompute], asked: Mapping[str, Recompute]
) -> list[str]:
    """The names that are asked for and have nothing outside what the user wrapped: that is
    recomputed in full, and they may ask for nothing else."""
    left = found(captured, (*wrapped, *asked)) if wrapped else asked
    covered = [name for name in asked if name not in left]
    for name in covered:
        if asked[name] != FULL:
            raise InvalidInput(
                "what the model wraps in torch.utils.checkpoint is recomputed in full",
                got=f"recompute={{{name!r}: {str(asked[name])!r}}}, all of it inside a checkpoint",
                remedy='"full" for it, or no checkpoint around it',
            )
    return covered


def _are_nested(one: str, other: str) -> bool:
    return one == other or _is_below(one, [other]) or _is_below(other, [one])


def _refused(rule: str, one: MarkedRegion, beside: str) -> InvalidInput:
    return InvalidInput(
        rule,
        got=f"{one.how} for {one.name}\nbeside {beside}",
        remedy="remove one of them",
        source=one.source,
    )


def summary(decided: Mapping[str, Recompute]) -> str:
    """How many regions run again, and how: "" if none does."""
    counts = Counter(decided.values())
    return ", ".join(f"{counts[how]} {how.words}" for how in sorted(counts, key=str))


@dataclass(frozen=True)
class _Offer:
    """One region, treated in one way."""

    seconds: float  # of what runs again
    kept: float  # bytes, of what nothing else in the program keeps
    remade: float  # bytes, while its backward runs
    on_host: float = 0.0  # bytes that are kept there


@dataclass(frozen=True)
class MixedProblem:
    """The kinds of all regions of a program: `rest` bytes are there whatever they are, of which
    `before[i]` until region i has gone backward."""

    names: Sequence[str]
    offers: Sequence[Mapping[Recompute, _Offer]]
    before: Sequence[float]
    rest: float
    host: float  # bytes that there are on the host

    def solve(self, memory: float) -> dict[str, Recompute] | None:
        """The fastest that keeps within `memory`; None: none does."""
        model = new_model()
        kinds = list(self.offers[0])
        takes = [[model.new_bool_var(f"{name} {k}") for k in kinds] for name in self.names]
        scale = _RANGE / (sum(max(o.seconds for o in row.values()) for row in self.offers) or 1.0)
        costs, kept, on_host = [], [], []
        bits = [bit for row in takes for bit in row]
        for number, (row, offer) in enumerate(zip(takes, self.offers)):
            model.add_exactly_one(row)
            costs += [round(offer[kind].seconds * scale) for kind in kinds]
            kept += [round(offer[kind].kept) for kind in kinds]
            on_host += [round(offer[kind].on_host) for kind in kinds]
            extra = [round(offer[kind].remade) for kind in kinds]
            until = len(kinds) * (number + 1)
            room, own = int(memory - self.before[number]), until - len(kinds)
            there = [*kept[:own], *map(add, kept[own:], extra)]
            model.add(weighted_sum(bits[:until], there) <= room)
        model.add(weighted_sum(bits, kept) <= int(memory - self.rest))
        if any(on_host):
            model.add(weighted_sum(bits, on_host) <= int(self.host))
        model.minimize(weighted_sum(bits, costs))
        solver = new_solver(_EFFORT)
        if outcome(solver, model) not in ("OPTIMAL", "FEASIBLE"):
            return None
        return {
            name: next(kind for kind, bit in zip(kinds, row) if solver.boolean_value(bit))
            for name, row in zip(self.names, takes)
        }


def mixed_problem(
    graphs: Mapping[Recompute, fx.Graph], names: Sequence[str], prices: NodePrices
) -> MixedProblem:
    """That of a program, given with all regions `names` treated in each way; bytes of what is kept
    alone, so that the states come on top. What each keeps may be cut, or on the host if that is
    apart from the device."""
    mesh, host = prices.mesh, prices.device.host
    plain = list(graphs[PLAIN].nodes)
    inside = [[n.name for n in graphs[FULL].nodes if _is_named(n, name)] for name in names]
    own = {name for row in inside for name in row}
    rest: dict[Storage, float] = {}
    first: dict[tuple[str, object], int] = {}
    for index, node in enumerate(plain):
        if node.name not in own:
            for key, size in kept_through(node, mesh).items():
                rest.setdefault(key, size)
                first.setdefault(_named(key), index)
    base = {_named(key): size for key, size in rest.items()}
    place = {node.name: index for index, node in enumerate(plain)}
    before = []
    for row in inside:
        end = max(place[name] for name in row)
        before.append(sum(size for key, size in base.items() if first[key] <= end))
    offers: list[dict[Recompute, _Offer]] = [{} for _ in names]
    for kind, graph in graphs.items():
        nodes = {node.name: node for node in graph.nodes}
        for row, offer in zip(inside, offers):
            region = [nodes[name] for name in row]
            for keep in ("device", "cut", *(() if host.is_device else ("host",))):
                offer[Recompute(kind.kind, keep)] = _offer(region, base, keep, prices)
    for how in [how for how in offers[0] if how.keep != "device"] if offers else ():
        if all(offer[how] == offer[Recompute(how.kind)] for offer in offers):
            offers = [{k: one for k, one in offer.items() if k != how} for offer in offers]
    return MixedProblem(names, offers, before, sum(base.values()), host.memory)


def _offer(
    region: Sequence[fx.Node],
    base: Mapping[tuple[str, object], float],
    keep: Keep,
    prices: NodePrices,
) -> _Offer:
    """Of a region that is there with all it keeps on the device."""
    kept, mesh = dict[Storage, float](), prices.mesh
    for node in region:
        kept |= kept_through(node, mesh)
    seconds = sum(prices.own(node).again for node in region)
    held = on_host = 0.0
    back = [0.0]  # bytes that are brought back
    for key, size in kept.items():
        axes = kept_away(key, keep, mesh)
        if axes is None:
            held += 0.0 if _named(key) in base else size
            continue
        price, piece = prices.away(keep, axes, size), piece_bytes(size, axes, mesh)
        seconds += price.forward + price.backward
        held, on_host = (held, on_host + piece) if keep == "host" else (held + piece, on_host)
        back.append(size)
    return _Offer(seconds, held, most_remade(region, mesh) + max(back), on_host)


def _named(key: Storage) -> tuple[str, object]:
    return key[0].name, key[1]


def _is_named(node: fx.Node, name: str) -> bool:
    region = info(node).region
    return node.op == "call_function" and region is not None and region.name.split(" (")[0] == name


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))] if path else []


def _is_below(name: str, others: Sequence[str] | Mapping[str, Recompute]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _unknown(pattern: str, known: Sequence[str]) -> InvalidInput:
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(pattern, known, 4, 0.4) or known[:4]
    return InvalidInput(
        "recompute names modules of the model that run, or patterns of such names",
        got=repr(pattern),
        remedy=f"close to it: {', '.join(close)}" if close else "leave it out",
    )
