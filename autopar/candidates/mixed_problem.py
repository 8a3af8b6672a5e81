"""The mixed problem: which regions run again in backward, so that a program fits and is fastest.

    members = members_of(captured, regions.free)
    problem = mixed_problem(graphs, members, prices)
    mix = problem.solve(memory, host)   # bytes of both; None: none fits
    mix.runs                        # (how many, in which way), in the order in which they run
    mix.own                         # by name of the regions of this program
    mix.of(names)                   # by name of the regions of the whole program

At the end of forward, and while the backward of any region runs, what is kept stays below the
limit. Of all ways to give each region a kind, the fastest is found exactly, by CP-SAT. Neighbours
that are alike are counted, not told apart: the problem does not grow with their number, be they
regions of the program or stand for regions that a shortened program leaves out.
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
from autopar.cost.repeats import NO_EQUAL_BLOCKS, EqualBlocks
from autopar.cost.saved_tensors import (
    Storage,
    offload_axes,
    peak_recomputed_bytes,
    piece_bytes,
    saved_on_device,
)
from autopar.cost.time_report import NodePrices
from autopar.mesh import Mesh
from autopar.recompute import Keep, Recompute
from autopar.solver.cp_sat import new_model, new_solver, outcome, weighted_sum
from autopar.strategies.node_info import info

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntVar

EQUAL = 1e-9  # relative: regions that differ by less are alike
_EFFORT = 1.0  # deterministic time, about seconds
_RANGE = 1 << 24  # of seconds in whole numbers


@dataclass(frozen=True)
class Offer:
    """One region, treated in one way."""

    seconds: float  # of what runs again
    kept: float  # bytes, of what nothing else in the program keeps
    remade: float  # bytes, while its backward runs
    on_host: float = 0.0  # bytes that are kept there

    def is_like(self, other: Offer) -> bool:
        own, others = asdict(self).values(), asdict(other).values()
        return all(math.isclose(a, b, rel_tol=EQUAL) for a, b in zip(own, others))


@dataclass(frozen=True)
class Group:
    """Neighbours that are alike."""

    count: int
    offers: Mapping[Recompute, Offer]
    # Bytes that are there whatever their kinds are, until the first has gone backward; until each
    # later one has, so many more.
    before: float
    step: float = 0.0

    @property
    def order(self) -> list[Recompute]:
        """The kinds in an order of members that is never worse than any other: what remakes most
        runs first, and goes backward when least is kept.

        Let a member stand right behind one that remakes less. What is kept up to both is the same
        sum if they change places, and all that either then needs is below what the one behind
        needed before: all that is kept up to there, and what the larger of both remakes.
        """
        return sorted(self.offers, key=lambda kind: -self.offers[kind].remade)


@dataclass(frozen=True)
class Mix:
    """A kind for every region of a program, or of the one that it stands for, in order."""

    members: Sequence[str]  # as `members_of` tells them
    kinds: Sequence[Recompute]
    seconds: float  # that a micro-batch takes more

    @property
    def runs(self) -> list[tuple[int, Recompute]]:
        """How many in which way, one after another."""
        return [(len(list(run)), kind) for kind, run in groupby(self.kinds)]

    @cached_property
    def own(self) -> dict[str, Recompute] | None:
        """What is decided of the regions of the program itself; None: it cannot say it, as one that
        stands for others stands for some that are not treated alike."""
        decided = dict(zip(self.members, self.kinds))
        is_said = all(decided[name] == kind for name, kind in zip(self.members, self.kinds))
        return _not_plain(decided) if is_said else None

    def of(self, names: Sequence[str]) -> dict[str, Recompute]:
        """What is decided of the regions of the whole program, which are all these in order."""
        return _not_plain(dict(zip(names, self.kinds, strict=True)))


def _not_plain(decided: Mapping[str, Recompute]) -> dict[str, Recompute]:
    return {name: kind for name, kind in decided.items() if not kind.is_plain}


@dataclass(frozen=True)
class MixedProblem:
    """The kinds of all regions of a program: `rest` bytes are there whatever they are."""

    members: Sequence[str]
    groups: Sequence[Group]
    rest: float

    def solve(self, memory: float, host: float) -> Mix | None:
        """The fastest that keeps within `memory`, and within what the `host` has for these; None:
        none does."""
        if host < 0:
            return None
        model = new_model()
        longest = sum(g.count * max(o.seconds for o in g.offers.values()) for g in self.groups)
        scale = _RANGE / (longest or 1.0)
        takes: list[IntVar] = []
        kept: list[int] = []
        costs, on_host = list[int](), list[int]()
        for number, group in enumerate(self.groups):
            offers = [group.offers[kind] for kind in group.order]
            own = [model.new_int_var(0, group.count, f"{number} {kind}") for kind in group.order]
            model.add(sum(own) == group.count)
            room, bytes_ = int(memory - group.before), [round(one.kept) for one in offers]
            if group.count == 1:
                bits, sizes = own, [round(one.kept) + round(one.remade) for one in offers]
                model.add(weighted_sum([*takes, *bits], [*kept, *sizes]) <= room)
            else:
                # The last of each kind is the one that needs most. If there is none, what is said
                # of it is said of the kind before it, which remakes no less.
                step = round(group.step)
                for at, offer in enumerate(offers, 1):
                    sizes = [size + step for size in bytes_[:at]]
                    is_any = model.new_bool_var(f"{number} {at}")  # of this kind or one before
                    model.add(sum(own[:at]) <= group.count * is_any)
                    bits, sizes = [*own[:at], is_any], [*sizes, round(offer.remade)]
                    model.add(weighted_sum([*takes, *bits], [*kept, *sizes]) <= room + step)
            takes += own
            kept += bytes_
            costs += [round(one.seconds * scale) for one in offers]
            on_host += [round(one.on_host) for one in offers]
        model.add(weighted_sum(takes, kept) <= int(memory - self.rest))
        if any(on_host):
            model.add(weighted_sum(takes, on_host) <= int(host))
        model.minimize(weighted_sum(takes, costs))
        solver = new_solver(_EFFORT)
        if outcome(solver, model) not in ("OPTIMAL", "FEASIBLE"):
            return None
        kinds = [kind for group in self.groups for kind in group.order]
        counts = [solver.value(count) for count in takes]
        offers = [group.offers[kind] for group in self.groups for kind in group.order]
        seconds = sum(count * offer.seconds for count, offer in zip(counts, offers))
        chosen = [kind for kind, count in zip(kinds, counts) for _ in range(count)]
        return Mix(self.members, chosen, seconds)


def grouped(offers: Sequence[Mapping[Recompute, Offer]], before: Sequence[float]) -> list[Group]:
    """Regions in order: neighbours that are alike together, as long as each has as many bytes more
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


def _are_alike(one: Mapping[Recompute, Offer], other: Mapping[Recompute, Offer]) -> bool:
    return one is other or all(offer.is_like(other[kind]) for kind, offer in one.items())


def members_of(captured: Captured, names: Sequence[str]) -> tuple[str, ...] | None:
    """Of every region of the program that this one stands for, in order, the one of `names` that
    stands for it. None: one of them is in part in the block that stands for others."""
    if captured.times == 1:
        return tuple(names)
    times: dict[str, set[int]] = {name: set() for name in names}
    for name, nodes in runs(captured.graph, names, lambda node: False):
        times[name] |= {info(node).times for node in nodes}
    if any(len(found) != 1 for found in times.values()):
        return None
    members: list[str] = []
    for (count,), row in groupby(names, key=lambda name: tuple(times[name])):
        members += [*row] * count
    return tuple(members)


def mixed_problem(
    graphs: Mapping[Recompute, fx.Graph],
    members: Sequence[str],
    prices: NodePrices,
    repeats: EqualBlocks = NO_EQUAL_BLOCKS,
) -> MixedProblem:
    """That of a program, given with all regions treated in each way; bytes of what is kept alone,
    so that the states come on top. What each keeps may be cut, or on the host if that is apart from
    the device. `members` as `members_of` tells them; `repeats`: of the plain graph."""
    mesh, host, names = prices.mesh, prices.device.host, list(dict.fromkeys(members))
    inside: dict[str, list[fx.Node]] = {name: [] for name in names}
    plain = {node.name: node for node in graphs[PLAIN].nodes if node.op == "call_function"}
    for node in graphs[FULL].nodes:
        region = info(node).region if node.op == "call_function" else None
        if region is not None and region.name in inside:
            inside[region.name].append(plain[node.name])
    course = _Course(list(plain.values()))
    base = _kept_outside(course, {node for row in inside.values() for node in row}, mesh)
    before = _before(course, [inside[name] for name in members], base)
    nodes = {kind: {node.name: node for node in graph.nodes} for kind, graph in graphs.items()}
    keys = {_named(key) for key in base}
    known: dict[tuple[tuple[fx.Node, int], ...], dict[Recompute, Offer]] = {}
    offers: dict[str, dict[Recompute, Offer]] = {}
    for name, row in inside.items():
        alike = tuple(
            (repeats.twin(node), course.place[node] - course.place[row[0]]) for node in row
        )
        if alike not in known:
            known[alike] = {}
            for kind, found in nodes.items():
                own = [found[node.name] for node in row]
                for keep in ("device", "cut", *(() if host.is_device else ("host",))):
                    known[alike][Recompute(kind.kind, keep)] = _offer(own, keys, keep, prices)
        offers[name] = known[alike]
    some = next(iter(known.values()), {})
    for how in [how for how in some if how.keep != "device"]:
        if all(offer[how] == offer[Recompute(how.kind)] for offer in known.values()):
            for offer in known.values():
                del offer[how]
    rest = sum(size * len(course.copies(key[0])) for key, (_, size) in base.items())
    groups = grouped([offers[name] for name in members], before)
    return MixedProblem(members, groups, rest)


class _Course:
    """The places of the calls of a program, and of those that it stands for."""

    def __init__(self, calls: Sequence[fx.Node]) -> None:
        self.calls, self.place = calls, {node: at for at, node in enumerate(calls)}
        marked = [at for at, node in enumerate(calls) if info(node).times > 1]
        self.start, self.end = (marked[0], marked[-1] + 1) if marked else (len(calls), len(calls))
        self.times = info(calls[marked[0]]).times if marked else 1

    def copies(self, node: fx.Node) -> range:
        """By how many calls later than here stand those that a call stands for: itself, if it is
        one."""
        at, period = self.place[node], self.end - self.start
        last = (self.times - 1) * period
        if at < self.start:
            return range(1)
        return range(0, last + 1, period) if at < self.end else range(last, last + 1)


def _kept_outside(
    course: _Course, own: set[fx.Node], mesh: Mesh
) -> dict[Storage, tuple[int, float]]:
    """What is kept by no region: the place of the first that keeps it, and bytes."""
    base: dict[Storage, tuple[int, float]] = {}
    for place, node in enumerate(course.calls):
        if node not in own:
            for key, size in saved_on_device(node, mesh).items():
                base.setdefault(key, (place, size))
    return base


def _before(
    course: _Course, rows: Sequence[Sequence[fx.Node]], base: Mapping[Storage, tuple[int, float]]
) -> list[float]:
    """The bytes of `base` until each of the regions in order has gone backward."""
    found = []
    for (maker, _), (place, size) in base.items():
        made = course.copies(maker)  # and who keeps one of several is as far behind each
        made = made if len(made) > 1 else course.copies(course.calls[place])[:1]
        found += [(place + later, size) for later in made]
    found.sort()
    sizes = np.cumsum([0.0, *(size for _, size in found)])
    seen: dict[fx.Node, int] = {}
    ends = []
    for row in rows:
        number = seen[row[-1]] = seen.get(row[-1], -1) + 1
        ends.append(course.place[row[-1]] + course.copies(row[-1])[number])
    at = np.searchsorted([place for place, _ in found], ends, side="right")
    return sizes[at].tolist()


def _offer(
    region: Sequence[fx.Node], base: set[tuple[str, object]], keep: Keep, prices: NodePrices
) -> Offer:
    """Of a region that is there with all it keeps on the device."""
    kept, mesh = dict[Storage, float](), prices.mesh
    for node in region:
        kept |= saved_on_device(node, mesh)
    seconds = sum(prices.own(node).again for node in region)
    held = on_host = 0.0
    back = [0.0]  # bytes that are brought back
    for key, size in kept.items():
        axes = offload_axes(key, keep, mesh)
        if axes is None:
            held += 0.0 if _named(key) in base else size
            continue
        price, piece = prices.away(keep, axes, size), piece_bytes(size, axes, mesh)
        seconds += price.forward + price.backward
        held, on_host = (held, on_host + piece) if keep == "host" else (held + piece, on_host)
        back.append(size)
    return Offer(seconds, held, peak_recomputed_bytes(region, mesh) + max(back), on_host)


def _named(key: Storage) -> tuple[str, object]:
    return key[0].name, key[1]
