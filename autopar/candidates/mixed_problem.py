"""The mixed problem: which regions run again in backward, so that a program fits and is fastest.

    members = members_of(captured, regions.free)
    problem = mixed_problem(graphs, members, prices)
    mix = problem.solve(memory, host)   # bytes of both; None: none fits
    mix.runs                        # (how many, in which way), in the order in which they run
    mix.for_short_program           # by name of the regions of this program
    mix.for_regions(names)          # by name of the regions of the whole program

At the end of forward, and while the backward of any region runs, what is kept stays below the
limit. Of all ways to give each region a kind, the fastest is found exactly, by CP-SAT. Neighbours
that are alike are counted, not told apart: the problem does not grow with their number, be they
regions of the program or stand for regions of the blocks that one stands for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from torch import fx

from autopar.candidates.recomputation import FULL, PLAIN
from autopar.capture.captured import Captured
from autopar.capture.regions import runs
from autopar.cost.saved_tensors import (
    Storage,
    offload_axes,
    peak_recomputed_bytes,
    piece_bytes,
    saved_on_device,
)
from autopar.cost.time_report import NodePrices
from autopar.mesh import Mesh
from autopar.program.equal_blocks import NO_EQUAL_BLOCKS, EqualBlocks
from autopar.program.place_map import PlaceMap
from autopar.recompute import Keep, Recompute
from autopar.solver.cp_sat import new_model, new_solver, outcome, weighted_sum
from autopar.strategies.node_info import info

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntVar

EQUAL = 1e-9  # relative: regions that differ by less are alike
_EFFORT = 1.0  # deterministic time, about seconds
_RANGE = 1 << 24  # of seconds in whole numbers


@dataclass(frozen=True)
class RecomputeOption:
    """One region, treated in one way."""

    seconds: float  # of what runs again
    kept: float  # bytes, of what nothing else in the program keeps
    remade: float  # bytes, while its backward runs
    on_host: float = 0.0  # bytes that are kept there

    def is_like(self, other: RecomputeOption) -> bool:
        figures, other_figures = asdict(self).values(), asdict(other).values()
        return all(math.isclose(a, b, rel_tol=EQUAL) for a, b in zip(figures, other_figures))


@dataclass(frozen=True)
class Group:
    """Neighbouring regions that are alike."""

    count: int
    offers: Mapping[Recompute, RecomputeOption]
    # Bytes that are there whatever their kinds are, until the first has gone backward; until each
    # later one has, so many more.
    before: float
    step: float = 0.0

    @property
    def order(self) -> list[Recompute]:
        """Return the kinds in an order of members that is never worse than any other: what remakes
        most runs first, and goes backward when least is kept.

        Let a member stand right behind one that remakes less. What is kept up to both is the same
        sum if they change places, and all that either then needs is below what the one behind
        needed before: all that is kept up to there, and what the larger of both remakes.
        """
        return sorted(self.offers, key=lambda kind: -self.offers[kind].remade)


@dataclass(frozen=True)
class RecomputeAssignment:
    """A kind for every region of a program, or of the one that it stands for, in order."""

    members: Sequence[str]  # from `members_of`
    kinds: Sequence[Recompute]
    seconds: float  # that a micro-batch takes more

    @property
    def runs(self) -> list[tuple[int, Recompute]]:
        """Return how many regions in a row are treated in which way, in order."""
        return [(len(list(run)), kind) for kind, run in groupby(self.kinds)]

    @cached_property
    def for_short_program(self) -> dict[str, Recompute] | None:
        """Return the decisions about regions of the program itself. None: one of them stands for
        several that are not treated alike."""
        decided = dict(zip(self.members, self.kinds))
        is_said = all(decided[name] == kind for name, kind in zip(self.members, self.kinds))
        return _not_plain(decided) if is_said else None

    def for_regions(self, names: Sequence[str]) -> dict[str, Recompute]:
        """Return the decisions about the regions of the whole program, all `names` in order."""
        return _not_plain(dict(zip(names, self.kinds, strict=True)))


def _not_plain(decided: Mapping[str, Recompute]) -> dict[str, Recompute]:
    return {name: kind for name, kind in decided.items() if not kind.is_plain}


@dataclass(frozen=True)
class MixedProblem:
    """The kinds of all regions of a program: `rest` bytes are there whatever they are."""

    members: Sequence[str]
    groups: Sequence[Group]
    rest: float

    def solve(self, memory: float, host: float) -> RecomputeAssignment | None:
        """Return the fastest mix that keeps within `memory`, and within what the `host` has for it.
        None: none does."""
        if host < 0:
            return None
        model = new_model()
        longest = sum(g.count * max(o.seconds for o in g.offers.values()) for g in self.groups)
        scale = _RANGE / (longest or 1.0)
        counts: list[IntVar] = []
        kept_bytes: list[int] = []
        scaled_seconds, host_bytes = list[int](), list[int]()
        for number, group in enumerate(self.groups):
            offers = [group.offers[kind] for kind in group.order]
            group_counts = [
                model.new_int_var(0, group.count, f"{number} {kind}") for kind in group.order
            ]
            model.add(sum(group_counts) == group.count)
            room, offer_bytes = int(memory - group.before), [round(offer.kept) for offer in offers]
            if group.count == 1:
                bits = group_counts
                sizes = [round(offer.kept) + round(offer.remade) for offer in offers]
                model.add(weighted_sum([*counts, *bits], [*kept_bytes, *sizes]) <= room)
            else:
                # The last of each kind is the one that needs most. If there is none, what is said
                # of it is said of the kind before it, which remakes no less.
                step = round(group.step)
                for at, offer in enumerate(offers, 1):
                    sizes = [size + step for size in offer_bytes[:at]]
                    is_any = model.new_bool_var(f"{number} {at}")  # of this kind or one before
                    model.add(sum(group_counts[:at]) <= group.count * is_any)
                    bits, sizes = [*group_counts[:at], is_any], [*sizes, round(offer.remade)]
                    model.add(weighted_sum([*counts, *bits], [*kept_bytes, *sizes]) <= room + step)
            counts += group_counts
            kept_bytes += offer_bytes
            scaled_seconds += [round(offer.seconds * scale) for offer in offers]
            host_bytes += [round(offer.on_host) for offer in offers]
        model.add(weighted_sum(counts, kept_bytes) <= int(memory - self.rest))
        if any(host_bytes):
            model.add(weighted_sum(counts, host_bytes) <= int(host))
        model.minimize(weighted_sum(counts, scaled_seconds))
        solver = new_solver(_EFFORT)
        if outcome(solver, model) not in ("OPTIMAL", "FEASIBLE"):
            return None
        kinds = [kind for group in self.groups for kind in group.order]
        solved = [solver.value(count) for count in counts]
        offers = [group.offers[kind] for group in self.groups for kind in group.order]
        seconds = sum(count * offer.seconds for count, offer in zip(solved, offers))
        chosen = [kind for kind, count in zip(kinds, solved) for _ in range(count)]
        return RecomputeAssignment(self.members, chosen, seconds)


def grouped(
    offers: Sequence[Mapping[Recompute, RecomputeOption]], before: Sequence[float]
) -> list[Group]:
    """Return groups of neighbours that are alike, in order, as long as each has as many bytes more
    before it as the one before, and none has fewer."""
    groups: list[Group] = []
    for offer, size in zip(offers, before):
        last = groups[-1] if groups else None
        step = 0.0 if last is None else size - last.before if last.count == 1 else last.step
        if last is not None and _are_alike(last.offers, offer) and step >= 0:
            expected = last.before + step * last.count
            if math.isclose(expected, size, rel_tol=EQUAL):
                groups[-1] = Group(last.count + 1, last.offers, last.before, step)
                continue
        groups.append(Group(1, offer, size))
    return groups


def _are_alike(
    first: Mapping[Recompute, RecomputeOption], second: Mapping[Recompute, RecomputeOption]
) -> bool:
    return first is second or all(offer.is_like(second[kind]) for kind, offer in first.items())


def members_of(captured: Captured, names: Sequence[str]) -> tuple[str, ...] | None:
    """Return for every region of the whole program, in order, the one of `names` that stands for
    it. None: one of them is in part in the block that stands for others."""
    if not captured.is_folded:
        return tuple(names)
    counts: dict[str, set[int]] = {name: set() for name in names}
    for name, nodes in runs(captured.graph, names, lambda node: False):
        counts[name] |= {info(node).count for node in nodes}
    if any(len(numbers) != 1 for numbers in counts.values()):
        return None
    members: list[str] = []
    for (count,), row in groupby(names, key=lambda name: tuple(counts[name])):
        members += [*row] * count
    return tuple(members)


def mixed_problem(
    graphs: Mapping[Recompute, fx.Graph],
    members: Sequence[str],
    prices: NodePrices,
    blocks: EqualBlocks = NO_EQUAL_BLOCKS,
) -> MixedProblem:
    """Return the problem of a program, given with all regions treated in each way. Its bytes are
    those of what is kept alone: states come on top. What each region keeps may be cut, or on the
    host if that has other memory. `members`: from `members_of`; `blocks`: of the plain graph."""
    mesh, host, names = prices.mesh, prices.device.host, list(dict.fromkeys(members))
    inside: dict[str, list[fx.Node]] = {name: [] for name in names}
    plain = {node.name: node for node in graphs[PLAIN].nodes if node.op == "call_function"}
    for node in graphs[FULL].nodes:
        region = info(node).region if node.op == "call_function" else None
        if region is not None and region.name in inside:
            inside[region.name].append(plain[node.name])
    calls = list(plain.values())
    place_map, place = PlaceMap.of(calls), {node: at for at, node in enumerate(calls)}
    base = _kept_outside(calls, {node for row in inside.values() for node in row}, mesh)
    additions = sorted(
        (kept_at, size)
        for (maker, _), (keeper, size) in base.items()
        for _, kept_at in place_map.spans(place[maker], keeper)
    )
    sizes = np.cumsum([0.0, *(size for _, size in additions)])
    ends = {name: iter(place_map.places(place[row[-1]])) for name, row in inside.items()}
    ended = [next(ends[name]) for name in members]  # the place where each goes backward first
    before = sizes[np.searchsorted([at for at, _ in additions], ended, side="right")]
    nodes = {kind: {node.name: node for node in graph.nodes} for kind, graph in graphs.items()}
    keys = {_name_and_index(key) for key in base}
    known: dict[tuple[tuple[fx.Node, int], ...], dict[Recompute, RecomputeOption]] = {}
    offers: dict[str, dict[Recompute, RecomputeOption]] = {}
    for name, row in inside.items():
        alike = tuple((blocks.twin(node), place[node] - place[row[0]]) for node in row)
        if alike not in known:
            known[alike] = {}
            for kind, by_name in nodes.items():
                calls = [by_name[node.name] for node in row]
                for keep in ("device", "cut", *(() if host.is_device else ("host",))):
                    known[alike][Recompute(kind.kind, keep)] = _offer(calls, keys, keep, prices)
        offers[name] = known[alike]
    first_offers = next(iter(known.values()), {})
    for how in [how for how in first_offers if how.keep != "device"]:
        if all(offer[how] == offer[Recompute(how.kind)] for offer in known.values()):
            for offer in known.values():
                del offer[how]
    rest = sum(size for _, size in additions)
    groups = grouped([offers[name] for name in members], before.tolist())
    return MixedProblem(members, groups, rest)


def _kept_outside(
    calls: Sequence[fx.Node], inside: set[fx.Node], mesh: Mesh
) -> dict[Storage, tuple[int, float]]:
    """Return the storages that no region keeps: the place of the first call that keeps each, and
    its bytes."""
    base: dict[Storage, tuple[int, float]] = {}
    for place, node in enumerate(calls):
        if node not in inside:
            for key, size in saved_on_device(node, mesh).items():
                base.setdefault(key, (place, size))
    return base


def _offer(
    region: Sequence[fx.Node], base: set[tuple[str, object]], keep: Keep, prices: NodePrices
) -> RecomputeOption:
    """Return the offer of a region, whose calls, as given, keep all of it on the device."""
    storages, mesh = dict[Storage, float](), prices.mesh
    for node in region:
        storages |= saved_on_device(node, mesh)
    seconds = sum(prices.own(node).again for node in region)
    held = on_host = 0.0
    returned = [0.0]  # bytes that are brought back
    for key, size in storages.items():
        axes = offload_axes(key, keep, mesh)
        if axes is None:
            held += 0.0 if _name_and_index(key) in base else size
            continue
        price, piece = prices.away(keep, axes, size), piece_bytes(size, axes, mesh)
        seconds += price.forward + price.backward
        held, on_host = (held, on_host + piece) if keep == "host" else (held + piece, on_host)
        returned.append(size)
    return RecomputeOption(
        seconds, held, peak_recomputed_bytes(region, mesh) + max(returned), on_host
    )


def _name_and_index(key: Storage) -> tuple[str, object]:
    return key[0].name, key[1]
