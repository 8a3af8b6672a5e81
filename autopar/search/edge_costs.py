"""Edges: what it takes to bring a value from some layouts to others, and to keep it there.

Tables that are equal are one object, so that the cost graph knows them again at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.capture.origins import state_bytes
from autopar.cluster import Cluster
from autopar.collectives.redistribution import FREE, possible_movements
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.footprint import parameter_bytes
from autopar.cost.state_price import NodeCost, OverlappedWork, StatePrice
from autopar.layout import ALL_PLACES, Layout, ParameterPlacement, Parts, Placement, axes_of
from autopar.mesh import Mesh
from autopar.search.candidates import Candidates
from autopar.search.reshard_table import Placements, ReshardTable, reshard_table
from autopar.states import WHOLE, States
from autopar.strategies.node_info import info

Array = NDArray[np.float64]


@dataclass(frozen=True)
class DeferredReduction:
    """The gradient of a value is summed when backward has gone past it: of the `parameter` that
    the value is, or that alone it is made of, as its states say."""

    parameter: fx.Node | None = None


class EdgeCosts:
    """The tables of one mesh; a step runs the program once for each of its `microbatches`."""

    def __init__(
        self,
        mesh: Mesh,
        cluster: Cluster,
        price: ClusterPrice,
        microbatches: int,
        states: States,
        parts: Mapping[str, Parts] = MappingProxyType({}),
    ) -> None:
        """`parts`: of values whose layout is given."""
        self.mesh, self.price, self.states, self.parts = mesh, price, states, parts
        self.share = 1 / microbatches  # of what is done once a step
        self.state_price = StatePrice(price, cluster.device.overlap)
        self._arrays: dict[tuple, Array] = {}
        self._tables: dict[tuple, tuple[Array, Array | None]] = {}
        self._places: dict[tuple, tuple[ParameterPlacement, float]] = {}
        self._types: dict[fx.Node, tuple] = {}

    def table(
        self,
        value: fx.Node,
        first: Placements,
        second: Placements,
        late: DeferredReduction | None,
        kept: str,
        beside: OverlappedWork,
        again: bool = False,
    ) -> tuple[Array, Array | None]:
        """Seconds and bytes from each of the `first` states to each of the `second`.

        `kept`: whether what arrives is kept for backward: "always", or only if it was "moved".
        `beside`: what is computed meanwhile, in each of the `second` states, by those who want
        them; and whether they learn. `again`: it is moved forward in backward too."""
        about = late and self._about(late)
        meanwhile = id(beside.forward), id(beside.backward)
        key = (self._type(value), first, second, about, kept, *meanwhile, beside.learns, again)
        if key not in self._tables:
            table, seconds = self.seconds(value, beside.learns)
            rows, columns = table.rows(first), table.rows(second)
            cost = seconds[np.ix_(rows, columns)]
            # From a pending copy nothing but that copy can be had.
            stuck = table.pending[rows][:, None] & (rows[:, None] != columns[None, :])
            if late and np.any(stuck):
                joins, stuck = _summed_together(first, second)
                whole = [table.rows(Placement(s.layout) for s in some) for some in (first, second)]
                cost = np.where(joins, seconds[np.ix_(*whole)], cost)
            same = table.data[rows][:, None] == table.data[columns][None, :]
            learns = beside.learns and info(value).learns
            if late and learns:
                cost = self._summed_late(value, first, second, cost, late, beside)
            elif learns and np.any(beside.backward):
                cost = cost - self._hidden(value, first, second, cost, beside)
            if again:
                cost = cost + self.seconds(value, learns=False)[1][np.ix_(rows, columns)]
            size = np.broadcast_to(self.bytes(value, second), cost.shape)
            memory = np.where(same & (kept != "always"), 0.0, size) if kept else None
            if late and late.parameter is not None and not self.states.is_whole:
                more = self._states(value, late.parameter, first, second, beside)
                cost, memory = cost + more[0], more[1] + (0.0 if memory is None else memory)
            self._tables[key] = np.where(stuck, np.inf, cost), memory
        return self._tables[key]

    def places(
        self, value: fx.Node, layout: Layout, pending: Iterable[str] | None = None
    ) -> ParameterPlacement:
        """Of a parameter that is read at `layout`, with a gradient to sum over `pending`; None:
        over all axes on which it is a replica."""
        known, shape = info(value), tuple(info(value).val.shape)
        is_told = pending is not None and known.differentiable
        asked = tuple(pending or ()) if is_told else self.mesh.names
        axes = [axis for axis in self.mesh if axis in asked and axis not in layout.axes]
        about = layout, shape, axes, self.mesh, known.learns
        states = self.states if value.users else WHOLE  # as `planner/state_places.py` has it
        return states.places(*about, is_there=known.on_host)

    def _about(self, late: DeferredReduction) -> tuple:
        if late.parameter is None:
            return (None,)
        known = info(late.parameter)
        return self._type(late.parameter), state_bytes(late.parameter), known.on_host

    def _states(
        self,
        value: fx.Node,
        parameter: fx.Node,
        first: Placements,
        second: Placements,
        beside: OverlappedWork,
    ) -> tuple[Array, Array]:
        """Seconds that cutting the states of the `parameter` that a value is, or is made of, adds
        to summing its gradient, and bytes that are more than those of states that are cut over all
        replicas."""
        val, is_there = info(parameter).val, info(parameter).on_host
        about = tuple(val.shape), state_bytes(parameter), info(parameter).learns
        cost, memory = (np.zeros((len(first), len(second))) for _ in range(2))
        for i, state in enumerate(first):
            if (layout := _made_of(parameter, value, state)) is None:
                continue
            least = sum(parameter_bytes(parameter, self.places(parameter, layout), self.mesh))
            found: dict[tuple[str, ...], tuple[Array, float]] = {}
            for j, end in enumerate(second):
                if (pending := end.pending) not in found:
                    summed = [axis for axis in pending if axis not in layout.axes]
                    key = (*self._type(parameter), about[1], layout, pending, is_there)
                    if key not in self._places:
                        places = self.places(parameter, layout, summed)
                        held = sum(parameter_bytes(parameter, places, self.mesh))
                        self._places[key] = places, float(held - least)
                    places, held_more = self._places[key]
                    tied = ParameterPlacement.tied(layout, ALL_PLACES * is_there)
                    more = self._seconds(self.state_price.whole(places, about, summed, beside))
                    less = self._seconds(self.state_price.whole(tied, about, summed, beside))
                    all_ = np.broadcast_to(more - less, (len(second),))
                    found[pending] = all_, held_more
                cost[i, j], memory[i, j] = found[pending][0][j], found[pending][1]
        return cost, memory

    def _seconds(self, cost: NodeCost) -> Any:
        """Of one micro-batch, what nothing hides."""
        once = cost.summed + cost.gathered - cost.covered
        there = cost.updated - cost.behind
        return cost.forward + cost.backward + (once + there) * self.share

    def _hidden(
        self,
        value: fx.Node,
        first: Placements,
        second: Placements,
        cost: Array,
        beside: OverlappedWork,
    ) -> Array:
        """What gradients of weights hide of the reduction that brings back the gradient of a value.

        Only where the way between two states is one movement: of longer ways nothing is told."""
        reduced = np.zeros(cost.shape)
        before, after = self.bytes(value, first), self.bytes(value, second)
        wanted = [(j, state) for j, state in enumerate(second) if state.pending]
        for i, start in enumerate(first):
            single = {
                end: movement
                for movement, end, _ in possible_movements(start, self.mesh, self._parts(value))
            }
            for j, state in wanted:
                if (movement := single.get(state)) is None or movement.backward in FREE:
                    continue
                about = movement.axes, float(max(before[i], after[j]))
                back = self.price.seconds(movement.backward, *about)
                is_free = movement.kind in FREE
                there = 0.0 if is_free else self.price.seconds(movement.kind, *about)
                if np.isclose(there + back, cost[i, j], rtol=1e-6, atol=1e-12):
                    reduced[i, j] = back
        return self.state_price.hidden(reduced, beside.backward)

    def _summed_late(
        self,
        value: fx.Node,
        first: Placements,
        second: Placements,
        cost: Array,
        late: DeferredReduction,
        beside: OverlappedWork,
    ) -> Array:
        """The same costs where gradients are summed over the axes on which a parameter is stored
        whole when backward has gone past it."""
        table = self._all(value)
        size = self.bytes(value, first)
        if value.op != "placeholder" and len(value.users) == 1:
            # The parameter's own gradient is summed instead: no sums of pieces, but pieces.
            size = size / [self.mesh.degree(state.partial) for state in first]
        if late.parameter is not None:
            size = size * (state_bytes(late.parameter).gradient / info(value).val.itemsize)
        rows = table.rows(first)
        cost = cost.copy()
        kinds: dict[tuple[str, ...], list[int]] = {}
        for j, state in enumerate(second):
            kinds.setdefault(state.pending, []).append(j)
        used: dict[frozenset[str], list[int]] = {}
        for i, state in enumerate(first):
            axes = frozenset(axis for dim in state.dims for axis in axes_of(dim))
            used.setdefault(axes | frozenset(state.pending), []).append(i)
        for pending, js in kinds.items():
            for axes, members in used.items():
                summed = tuple(axis for axis in pending if axis not in axes)
                if not summed:
                    continue
                rest = tuple(axis for axis in pending if axis in axes)
                columns = table.rows(Placement(second[j].layout, rest) for j in js)
                where = np.ix_(rows[members], columns)
                moved = self.seconds(value, frozen=summed)[1][where]
                # Where the cheapest way goes over these axes, it is taken as it is.
                apart = moved <= self.seconds(value)[1][where] * (1 + 1e-9)
                once = self.price.bucketed(summed, size[members])[:, None]
                once = once - self.state_price.hidden(once, beside.backward[None, js])
                after = once * self.share + moved
                here = np.ix_(np.array(members), np.array(js))
                cost[here] = np.where(apart, after, cost[here])
        return cost

    def bytes(self, value: fx.Node, states: Placements) -> Array:
        """What one rank holds of a value in each state."""
        key = ("bytes", states, self._type(value))
        if key not in self._arrays:
            table = self._all(value)
            elements = table.elements(tuple(info(value).val.shape))[table.rows(states)]
            self._arrays[key] = elements * info(value).val.dtype.itemsize
        return self._arrays[key]

    def from_whole(self, candidates: Candidates, position: int, value: fx.Node) -> Array:
        """What reading an input of the model takes: every rank has all of it."""
        key = ("whole", candidates.inputs[position], self._type(value))
        if key not in self._arrays:
            table, seconds = self.seconds(value)
            start = table.index[Placement.whole(table.ndim)]
            self._arrays[key] = seconds[start, table.rows(candidates.inputs[position])]
        return self._arrays[key]

    def seconds(
        self, value: fx.Node, learns: bool = True, frozen: tuple[str, ...] = ()
    ) -> tuple[ReshardTable, Array]:
        """All layouts of a value, and the seconds between them, on the way to who `learns` or
        not."""
        val, known = info(value).val, info(value)
        table = self._all(value)
        back = known.differentiable, learns and known.learns
        return table, table.seconds(tuple(val.shape), val.itemsize, self.price, *back, frozen)

    def _all(self, value: fx.Node) -> ReshardTable:
        return reshard_table(self.mesh, info(value).val.ndim, self._parts(value))

    def _parts(self, value: fx.Node) -> Parts:
        """How it may be cut, or is."""
        return tuple(sorted({*info(value).parts, *self.parts.get(value.name, ())}))

    def _type(self, value: fx.Node) -> tuple:
        if value not in self._types:
            val = info(value).val
            back = info(value).differentiable, info(value).learns
            self._types[value] = tuple(val.shape), val.dtype, *back, self._parts(value)
        return self._types[value]

    def zeros(self, count: int) -> Array:
        """Nothing, for each of `count` strategies."""
        return self._arrays.setdefault(("zeros", count), np.zeros(count))

    def same(self, array: Array, kind: str) -> Array:
        """One object for equal arrays, so that the cost graph knows them again at once."""
        return self._arrays.setdefault((kind, array.shape, array.tobytes()), array)


def _summed_together(first: Placements, second: Placements) -> tuple[NDArray, NDArray]:
    """From the states that readers of a parameter share to those of each: where its gradient joins
    the sum of all, if it is whole as one rank's term, and where it cannot be had.

    A sum that can be asked for together is not asked for apart."""
    states, shape = {*first}, (len(first), len(second))
    joins, stuck = np.zeros(shape, bool), np.zeros(shape, bool)
    for i, at in enumerate(first):
        for j, end in enumerate(second):
            summed = {*at.pending, *end.pending} - {*at.layout.axes}
            is_more = summed > {*at.pending}
            joins[i, j] = bool(at.pending) and not is_more
            stuck[i, j] = is_more and (bool(at.pending) or Placement(at.layout, summed) in states)
    return joins, stuck


def _made_of(parameter: fx.Node, value: fx.Node, state: Placement) -> Layout | None:
    """Where a parameter is read when what is made of it is at `state`; None: that is not told."""
    if value is parameter:
        return state.layout
    if state.partial:
        return None
    if info(value).val.shape == info(parameter).val.shape:
        return state.layout
    is_whole = not state.layout.axes
    return Layout.replicated(info(parameter).val.ndim) if is_whole else None
