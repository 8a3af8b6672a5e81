"""Again: ways to run one program that fit, most of them since some regions run again in backward.

Of layouts that are found for the states that a step has, or for whole ones: these may be cut more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.candidates.candidate import Candidate
from autopar.capture.captured import Captured
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.planner.bounds import CHEAPEST
from autopar.planner.layouts import LayoutRequest, Layouts
from autopar.planner.ledger import Ledger
from autopar.planner.mixed import mixed
from autopar.planner.recomputation import PLAIN, Regions
from autopar.planner.whole import Whole
from autopar.recompute import Recompute
from autopar.search.decisions import Decisions
from autopar.search.layout_search import NothingFaster, is_large
from autopar.search.smallest_footprint import NothingFits
from autopar.solver.cp_sat_residual import relative_gap
from autopar.states import WHOLE, States

NEARLY = 0.01  # relative: where memory is short, layouts that are so much slower may win
WORTH = 0.01  # relative: cut states that save less are taken only where memory needs them
MOST_NEAR = 2  # meshes of such layouts
CLOSE = 0.01  # relative, to the bound: on many meshes nothing better is looked for
SOMEWHAT = 0.05  # relative: meshes that are so much slower without a limit may win under it


class Again:
    """Finds ways to run the programs of one request that fit."""

    def __init__(
        self,
        layouts: Layouts,
        regions: Regions,
        every: Regions,
        whole: Whole | None,
        memory: float,
        ledger: Ledger,
        is_many: bool,
    ) -> None:
        """`every`: the regions if nothing was said of them: layouts are found for these too.
        `is_many`: not only the best layouts are looked at."""
        self._layouts, self._regions, self._every, self._whole = layouts, regions, every, whole
        self._tried: list[tuple[Captured, Decisions]] = []  # that were mixed
        self._memory, self._ledger, self._is_many = memory, ledger, is_many

    def regions_of(self, laid: Candidate) -> Regions:
        """Those of the program that it is of."""
        if self._whole is None or laid.captured.times > 1:
            return self._regions
        return self._whole.regions

    def mixed(self, laid: Candidate) -> Candidate | None:
        """The same layouts, where those regions run again that have to; None: it cannot fit, or
        is not faster than what does."""
        ledger, regions = self._ledger, self.regions_of(laid)
        if len(regions.kinds) > 1:
            about = regions, self._memory, ledger.dropped, self._whole, ledger.fastest
            return mixed(laid, *about, ledger.go_on)
        way = laid.recomputed(regions.all(regions.kinds[0]))
        if way.fits(self._memory):
            return way if way.seconds < ledger.fastest else None
        ledger.dropped.append(way)
        return None

    def ways(
        self, free: Candidate, asked: LayoutRequest, settings: Sequence[States]
    ) -> Iterator[Candidate]:
        """Ways in which some regions are recomputed, so that they fit: with the layouts that are
        best without a limit or, where none of these fits, if all regions are recomputed."""
        self._layouts.report("memory", "recomputing regions")
        every = [free, *(free.placed(states) for states in settings[1:])]
        if self._is_many:
            every += [other.placed(settings[-1]) for other in self._nearly_as_fast(free, asked)]
            every += self._placed_of(WHOLE, asked, settings) if WHOLE not in settings else []
        before, tried = len(self._ledger.dropped), len(self._tried)
        yield from self._mixed_of(every, free)
        tried = len(self._tried) - tried
        if tried and len(self._ledger.dropped) == before + tried and free.search is not None:
            asked = replace(asked, states=settings[-1])
            lean = self._under(self._every.kinds[-1], asked, asked.offered)
            yield from self._fitting(lean, free)

    def further(
        self,
        free: Candidate,
        asked: LayoutRequest,
        settings: Sequence[States],
        hosted: Sequence[States],
    ) -> Iterator[Candidate]:
        """Ways with the layouts that are best for each of the settings, or for whole states, on a
        few meshes, and with those that are best of what fits if all regions are alike, in each
        kind: whatever is asked for by name, it is looked for among the same ways. `hosted`:
        settings on the host; none, if these cannot be faster. There is nothing to look for if what
        fits is `CLOSE` to the bound; on one mesh, if it is at the bound."""
        self._layouts.report("memory", "further layouts")
        asked = replace(asked, recompute=self._every.all(PLAIN))
        whole = self._layouts.find(replace(asked, states=WHOLE))[0].search
        bound, close = (
            0.0 if whole is None else whole.bound,
            CLOSE if len(asked.offered) > 1 else 0.0,
        )
        if relative_gap(self._ledger.fastest, bound) <= close:
            return
        sources = self._sources(asked, [*settings, *hosted])
        yield from self._mixed_of(sorted(sources, key=lambda one: one.seconds), free)
        near: dict[States, list[Mesh]] = {}
        for kind in self._every.kinds:
            few = settings if kind.is_plain else dict.fromkeys((settings[0], settings[-1]))
            for states in (*few, *hosted):
                one = replace(asked, states=states)
                if near.get(states) != []:
                    near[states] = self._near(one)
                if near[states]:
                    yield from self._fitting(self._under(kind, one, near[states]), free)

    def _near(self, asked: LayoutRequest) -> list[Mesh]:
        """The meshes that are about as fast as the best without a limit; none, if that is not
        faster than what fits."""
        fastest = self._ledger.fastest
        try:
            best, _ = self._layouts.find(replace(asked, cutoff=fastest))
        except NothingFaster:
            return []
        near = [best.mesh, *_as_fast(best, SOMEWHAT, fastest)]
        return [mesh for mesh in asked.offered if mesh in near]

    def _under(
        self, kind: Recompute, asked: LayoutRequest, meshes: Sequence[Mesh]
    ) -> LayoutRequest:
        """What asks for layouts that fit if all regions are of a `kind`."""
        decided = self._every.all(kind)
        # Of what runs again, less may have to.
        cutoff = self._ledger.fastest if kind.is_plain else math.inf
        asked = replace(asked, offered=meshes, recompute=decided)
        return replace(asked, memory=self._memory, cutoff=cutoff)

    def _mixed_of(self, every: Sequence[Candidate], free: Candidate) -> Iterator[Candidate]:
        for source in every:
            self._ledger.go_on()
            key = source.captured, source.decisions
            # What runs again makes it slower yet.
            if source.seconds < self._ledger.fastest and key not in self._tried:
                self._tried.append(key)
                if (way := self.mixed(source)) is not None:
                    yield _accounted(way, free)

    def _fitting(self, asked: LayoutRequest, free: Candidate) -> Iterator[Candidate]:
        """With layouts that fit if regions run again as is asked; or less of them, if they may."""
        self._ledger.go_on()
        try:
            source, _ = self._layouts.find(asked)
        except NothingFits as error:
            self._ledger.refuse([error.smallest], 1)
            return
        except NothingFaster:
            return
        may_choose = len(self._regions.kinds) > 1
        is_least = may_choose and asked.recompute == self._every.all(PLAIN)
        found = None if is_least else self.mixed(source)
        if found is None and may_choose and source.seconds < self._ledger.fastest:
            found = source  # it fits as it is
        if found is not None:
            yield _accounted(found, free)

    def last(
        self, best: Candidate, asked: LayoutRequest, short: Sequence[object]
    ) -> Iterator[Candidate]:
        """What is left to look for beside the best way, if that has no stages. `short`: the sizes
        of which memory kept something faster."""
        if short:
            yield from self._as_named(best, asked)
        elif self._layouts.request.states is None:
            yield from self._with_cut_states(best, asked)

    def _as_named(self, best: Candidate, asked: LayoutRequest) -> Iterator[Candidate]:
        """The layouts that are found for the states and the regions of the best way, if they are
        better: what is asked for by these names takes no less."""
        is_further = best.states.is_cut or best.decisions.recompute
        if is_further and self._whole is None:
            decided = best.decisions.recompute
            asked = replace(asked, offered=[best.mesh], states=best.states, recompute=decided)
            for memory in (math.inf, self._memory):
                with suppress(NothingFaster, InvalidInput):
                    found, _ = self._layouts.find(replace(asked, memory=memory))
                    if found.fits(self._memory):
                        if found.seconds < best.seconds:
                            yield _accounted(found, best)
                        return

    def _with_cut_states(self, best: Candidate, asked: LayoutRequest) -> Iterator[Candidate]:
        """Layouts for cut states on about as fast meshes, if they are faster than the best way with
        whole ones: of a sum that backward does not hide forward may hide the half that gathers."""
        if best.states.is_whole and self._whole is None and not is_large(best.captured):
            near = [best.mesh, *_as_fast(best, NEARLY)]
            meshes = [mesh for mesh in asked.offered if mesh in near]
            asked = replace(asked, offered=meshes, recompute=best.decisions.recompute)
            with suppress(NothingFaster, InvalidInput):
                enough = best.seconds * (1 - WORTH)
                found, _ = self._layouts.find(replace(asked, states=CHEAPEST, cutoff=enough))
                if found.fits(self._memory) and found.seconds < enough:
                    yield _accounted(found, best)

    def _sources(self, asked: LayoutRequest, settings: Sequence[States]) -> Iterator[Candidate]:
        """Layouts without a limit, with each of some settings of states: those that are the fastest
        with these, and those that are with whole ones, on a few meshes."""
        for base in dict.fromkeys((WHOLE, *settings)):
            yield from self._placed_of(base, asked, settings, is_many=True)

    def _placed_of(
        self, base: States, asked: LayoutRequest, settings: Sequence[States], is_many: bool = False
    ) -> Iterator[Candidate]:
        """The layouts that are the fastest with states of a `base`; `is_many`: and on other meshes.
        Those of whole states with each of the settings."""
        try:
            best, _ = self._layouts.find(replace(asked, states=base))
        except NothingFaster:
            return
        for laid in (best, *(self._nearly_as_fast(best, asked) if is_many else ())):
            for states in settings:
                if states == base:
                    yield laid
                elif base.is_whole and states.keeps_mesh:
                    placed = laid.placed(states)
                    if placed.decisions.apart:
                        yield placed

    def _nearly_as_fast(self, best: Candidate, asked: LayoutRequest) -> Iterator[Candidate]:
        """The layouts of a few other meshes, of which states may be cut over more ranks."""
        asked = replace(asked, states=best.states)
        for mesh in _as_fast(best, NEARLY)[:MOST_NEAR]:
            with suppress(NothingFaster):
                yield self._layouts.find(replace(asked, offered=[mesh]))[0]


def _as_fast(best: Candidate, more: float, fastest: float = math.inf) -> list[Mesh]:
    """The other meshes on which a step takes at most so much `more` than `best`, and less than
    `fastest`."""
    others = () if best.search is None else best.search.considered
    most = best.seconds * (1 + more)
    taken = [(one.mesh, one.seconds) for one in others if one.seconds is not None]
    found = [mesh for mesh, seconds in taken if seconds <= most and seconds < fastest]
    return [mesh for mesh in found if mesh != best.mesh]


def _accounted(way: Candidate, free: Candidate) -> Candidate:
    """With the same states, none that fits is faster than the best without a limit."""
    if (account := way.search) is not None and free.search is not None:
        account = account.made(way.seconds, free.search.bound)
    return way.changed(account)
