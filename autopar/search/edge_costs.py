"""Edge costs: the seconds to bring a value from some layouts to others, and the bytes to keep it.

Equal tables are one object, so that the cost graph recognises them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.capture.origins import Shares, state_bytes
from autopar.cluster import Cluster
from autopar.collectives.redistribution import FREE, possible_movements
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.footprint import parameter_bytes
from autopar.cost.state_price import NodeCost, OverlappedWork, ParameterFacts, StatePrice
from autopar.layout import ALL_PLACES, Layout, ParameterPlacement, Parts, Placement, axes_of
from autopar.mesh import Mesh
from autopar.search.candidates import Candidates
from autopar.search.reshard_table import Placements, ReshardTable, ReshardTerms, reshard_table
from autopar.states import WHOLE, States
from autopar.strategies.node_info import info

Array = NDArray[np.float64]


@dataclass(frozen=True)
class DeferredReduction:
    """Sum the gradient of a value when backward has gone past it.

    `shares`: the parameters that the value is made of, with the part of each sum that is made
    here; their states say how. None of them: the sum is made elsewhere."""

    shares: Shares = ()


@dataclass(frozen=True)
class EdgeQuery:
    """Ask for the costs of bringing a value from each `first` state to each `second` state."""

    value: fx.Node
    first: Placements
    second: Placements
    deferred: DeferredReduction | None  # of the gradient
    kept: str  # for backward: "always", only if "moved", or "" for never
    overlapped: (
        OverlappedWork  # the readers' work meanwhile, in each `second` state; whether they learn
    )
    is_remade: bool  # the value is moved forward in backward, too


@dataclass(eq=False)
class EdgeCosts:
    """Price the edges on one mesh; a step runs the program once for each of its `microbatches`."""

    mesh: Mesh
    cluster: Cluster
    price: ClusterPrice
    microbatches: int
    states: States
    parts: Mapping[str, Parts] = field(default_factory=dict)  # of values whose layout is fixed

    def __post_init__(self) -> None:
        self.share = 1 / self.microbatches  # of what is done once a step
        self.state_price = StatePrice(self.price, self.cluster.device.overlap)
        self._arrays: dict[tuple, Array] = {}
        self._tables: dict[tuple, tuple[Array, Array | None]] = {}
        self._places: dict[tuple, tuple[ParameterPlacement, float]] = {}
        self._types: dict[fx.Node, tuple] = {}

    def table(self, query: EdgeQuery) -> tuple[Array, Array | None]:
        """Return the seconds and the bytes from each state to each state; computed once."""
        value, deferred, work = query.value, query.deferred, query.overlapped
        key = (
            self._type(value),
            query.first,
            query.second,
            deferred and self._deferred_key(deferred),
            query.kept,
            id(work.forward),
            id(work.backward),
            work.learns,
            query.is_remade,
        )
        if key not in self._tables:
            self._tables[key] = self._table(query)
        return self._tables[key]

    def _table(self, query: EdgeQuery) -> tuple[Array, Array | None]:
        value, first, second = query.value, query.first, query.second
        deferred, work = query.deferred, query.overlapped
        table, seconds = self.seconds(value, learns=work.learns)
        rows, columns = table.rows(first), table.rows(second)
        cost = seconds[np.ix_(rows, columns)]
        # From a pending copy nothing but that copy can be had.
        stuck = table.pending[rows][:, None] & (rows[:, None] != columns[None, :])
        if deferred and np.any(stuck):
            joins, stuck = _summed_together(first, second)
            unsummed = [
                table.rows(Placement(s.layout) for s in states) for states in (first, second)
            ]
            cost = np.where(joins, seconds[np.ix_(*unsummed)], cost)
        same = table.data[rows][:, None] == table.data[columns][None, :]
        learns = work.learns and info(value).learns
        if deferred and learns:
            cost = self._summed_late(query, deferred, cost)
        elif learns and np.any(work.backward):
            cost = cost - self._hidden(query, cost)
        if query.is_remade:
            cost = cost + self.seconds(value, learns=False)[1][np.ix_(rows, columns)]
        size = np.broadcast_to(self.bytes(value, second), cost.shape)
        memory = np.where(same & (query.kept != "always"), 0.0, size) if query.kept else None
        for parameter, share in deferred.shares if deferred and not self.states.is_whole else ():
            more = self._states(query, parameter)
            memory = share * more[1] + (0.0 if memory is None else memory)
            cost = cost + share * more[0]
        return np.where(stuck, np.inf, cost), memory

    def places(
        self, value: fx.Node, layout: Layout, pending: Iterable[str] | None = None
    ) -> ParameterPlacement:
        """Return the places of a parameter that is read at `layout`.
        Its gradient is summed over `pending`; `None` for all axes on which it is a replica."""
        known, shape = info(value), tuple(info(value).val.shape)
        is_known = pending is not None and known.differentiable
        summed = tuple(pending or ()) if is_known else self.mesh.names
        axes = [axis for axis in self.mesh if axis in summed and axis not in layout.axes]
        states = self.states if value.users else WHOLE  # as `candidates/state_places.py` has it
        return states.places(
            layout, shape, axes, self.mesh, learns=known.learns, runs_on_host=known.on_host
        )

    def _deferred_key(self, deferred: DeferredReduction) -> tuple:
        return tuple(
            (self._type(parameter), state_bytes(parameter), info(parameter).on_host, share)
            for parameter, share in deferred.shares
        )

    def _states(self, query: EdgeQuery, parameter: fx.Node) -> tuple[Array, Array]:
        """Return the seconds that cutting a parameter's states adds to summing its gradient.
        Return also the bytes above those of states that are cut over all replicas."""
        value, first, second = query.value, query.first, query.second
        val, on_host = info(parameter).val, info(parameter).on_host
        learns = info(parameter).learns
        facts = ParameterFacts(tuple(val.shape), state_bytes(parameter), learns)
        cost, memory = (np.zeros((len(first), len(second))) for _ in range(2))
        for i, state in enumerate(first):
            if (layout := _made_of(parameter, value, state)) is None:
                continue
            least = sum(parameter_bytes(parameter, self.places(parameter, layout), self.mesh))
            by_pending: dict[tuple[str, ...], tuple[Array, float]] = {}
            for j, end in enumerate(second):
                if (pending := end.pending) not in by_pending:
                    summed = [axis for axis in pending if axis not in layout.axes]
                    key = (*self._type(parameter), facts.element, layout, pending, on_host)
                    if key not in self._places:
                        places = self.places(parameter, layout, summed)
                        held = sum(parameter_bytes(parameter, places, self.mesh))
                        self._places[key] = places, float(held - least)
                    places, held_more = self._places[key]
                    tied = ParameterPlacement.tied(layout, ALL_PLACES * on_host)
                    more, less = (
                        self._seconds(self.state_price.whole(at, facts, summed, query.overlapped))
                        for at in (places, tied)
                    )
                    extra = np.broadcast_to(more - less, (len(second),))
                    by_pending[pending] = extra, held_more
                cost[i, j], memory[i, j] = by_pending[pending][0][j], by_pending[pending][1]
        return cost, memory

    def _seconds(self, cost: NodeCost) -> Any:
        """Return the seconds of one micro-batch that nothing hides."""
        moved = cost.summed + cost.gathered - cost.covered
        updated = cost.updated - cost.behind
        return cost.forward + cost.backward + (moved + updated) * self.share

    def _hidden(self, query: EdgeQuery, cost: Array) -> Array:
        """Return the seconds of reductions of a value's gradient that gradients of weights hide.
        Only single movements between two states count: longer ways are not analysed."""
        value, first, second = query.value, query.first, query.second
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
                size = float(max(before[i], after[j]))
                back = self.price.seconds(movement.backward, movement.axes, size)
                is_free = movement.kind in FREE
                forth = 0.0 if is_free else self.price.seconds(movement.kind, movement.axes, size)
                if np.isclose(forth + back, cost[i, j], rtol=1e-6, atol=1e-12):
                    reduced[i, j] = back
        return self.state_price.hidden(reduced, query.overlapped.backward)

    def _summed_late(self, query: EdgeQuery, deferred: DeferredReduction, cost: Array) -> Array:
        """Return the costs if gradients are summed when backward has gone past a parameter.
        That goes for sums over the axes on which it is stored whole."""
        value, first, second = query.value, query.first, query.second
        table = self._all(value)
        size = self.bytes(value, first)
        if value.op != "placeholder" and len(value.users) == 1:
            # The gradient of the parameter itself is summed instead, in pieces.
            size = size / [self.mesh.degree(state.partial) for state in first]
        if deferred.shares:
            summed_bytes = sum(
                share * info(parameter).val.numel() * state_bytes(parameter).gradient
                for parameter, share in deferred.shares
            )
            # An empty slice of a parameter may be all that is read.
            size = size * (summed_bytes / max(info(value).val.nbytes, 1))
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
                # The cheapest way is kept as it is if it goes over these axes.
                avoids_axes = moved <= self.seconds(value)[1][where] * (1 + 1e-9)
                once = self.price.bucketed(summed, size[members])[:, None]
                once = once - self.state_price.hidden(once, query.overlapped.backward[None, js])
                after = once * self.share + moved
                entries = np.ix_(np.array(members), np.array(js))
                cost[entries] = np.where(avoids_axes, after, cost[entries])
        return cost

    def bytes(self, value: fx.Node, states: Placements) -> Array:
        """Return the bytes that one rank holds of a value in each state."""
        key = ("bytes", states, self._type(value))
        if key not in self._arrays:
            table = self._all(value)
            elements = table.elements(tuple(info(value).val.shape))[table.rows(states)]
            self._arrays[key] = elements * info(value).val.dtype.itemsize
        return self._arrays[key]

    def from_whole(self, candidates: Candidates, position: int, value: fx.Node) -> Array:
        """Return the seconds to read an input of the model, which is whole on every rank."""
        key = ("whole", candidates.inputs[position], self._type(value))
        if key not in self._arrays:
            table, seconds = self.seconds(value)
            start = table.index[Placement.whole(table.ndim)]
            self._arrays[key] = seconds[start, table.rows(candidates.inputs[position])]
        return self._arrays[key]

    def seconds(
        self, value: fx.Node, *, learns: bool = True, frozen: tuple[str, ...] = ()
    ) -> tuple[ReshardTable, Array]:
        """Return all layouts of a value and the seconds between them, to readers that `learn`.
        Nothing moves over `frozen` axes."""
        val, known, table = info(value).val, info(value), self._all(value)
        terms = ReshardTerms(
            val.itemsize, self.price, known.differentiable, learns and known.learns, frozen
        )
        return table, table.seconds(tuple(val.shape), terms)

    def _all(self, value: fx.Node) -> ReshardTable:
        return reshard_table(self.mesh, info(value).val.ndim, self._parts(value))

    def _parts(self, value: fx.Node) -> Parts:
        """Return the parts in which dims of a value are cut, or may be."""
        return tuple(sorted({*info(value).parts, *self.parts.get(value.name, ())}))

    def _type(self, value: fx.Node) -> tuple:
        if value not in self._types:
            val = info(value).val
            back = info(value).differentiable, info(value).learns
            self._types[value] = tuple(val.shape), val.dtype, *back, self._parts(value)
        return self._types[value]

    def zeros(self, count: int) -> Array:
        """Return zeros for `count` strategies, as one object."""
        return self._arrays.setdefault(("zeros", count), np.zeros(count))

    def same(self, array: Array, kind: str) -> Array:
        """Return one object for equal arrays, which the cost graph recognises at once."""
        return self._arrays.setdefault((kind, array.shape, array.tobytes()), array)


def _summed_together(first: Placements, second: Placements) -> tuple[NDArray, NDArray]:
    """Return where a reader's gradient joins the sum for all readers, and where it cannot be had.
    A gradient that is whole joins as one rank's term. A sum that all can ask for is not asked for
    by one."""
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
    """Return the layout of a parameter from which a value comes at `state`; `None` if unknown."""
    if value is parameter:
        return state.layout
    if state.partial:
        return None
    read, shape = info(value).val.shape, info(parameter).val.shape
    if not state.layout.axes:
        return Layout.replicated(len(shape))
    cut = [size for size, dim in zip(read, state.layout.dims) if dim]
    is_like = len(read) == len(shape) and cut == [s for s, d in zip(shape, state.layout.dims) if d]
    return state.layout if is_like else None
