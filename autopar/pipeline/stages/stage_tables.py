"""StageCosts: predicted cost of a stage, wherever it is cut out of a program, and the cut points.

Sums over the activations of a program make the cost of a stage a difference of two rows. Stages may
be uneven, as an embedding and a head are. `shard(module, stage=k)` fixes the start of a stage.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost.footprint import HELD_KINDS, held_bytes, parameter_bytes, summed_gradient_bytes
from autopar.cost.saved_tensors import SavedBytesCache
from autopar.cost.state_price import NodeCost
from autopar.errors import InvalidInput
from autopar.layout import ParameterPlacement
from autopar.mesh import Mesh
from autopar.passes.flow import Flow, ancestors
from autopar.pipeline.stages.kept_activations import (
    RecomputedBytes,
    WeightHalfBytes,
    kept_by_stages,
)
from autopar.pipeline.stages.stage_cost import (
    BYTES,
    COLUMNS,
    ONCE,
    SECONDS,
    WORK,
    SharedSum,
    StageCost,
    cost_columns,
)
from autopar.pipeline.stages.stage_hardware import ANYWHERE, StageHardware
from autopar.pipeline.stages.table import StageTable
from autopar.strategies.node_info import BlockPlace, info
from autopar.text.units import counted

Array = NDArray[np.float64]
PriceOf = Callable[[fx.Node], NodeCost]  # of any node of a rewritten program
ColumnRows = list[list[float]]  # the columns, for each kind of machines
RecomputeMark = tuple[
    bool, bool
]  # whether a node runs again, and whether its value is kept elsewhere
StagePiece = tuple["StageCosts", int, int]  # costs between two cut points
NOTABLE_WAIT = 0.02  # of a stage's work: shorter messages change no cut
_NUMBERED = re.compile(r"(.*\.)?\d+(?=\.|$)")


def price_stages(
    costs: StageCosts, starts: Sequence[str], hardware: Sequence[StageHardware] = ()
) -> list[StageCost]:
    """Return the costs of stages that begin at the operators `starts` of an earlier cut."""
    points = costs.places
    missing = [name for name in starts if name not in points]
    if missing:
        raise InvalidInput(
            "a stage starts at an operator of the program",
            got=", ".join(missing),
            remedy="plan again for this model",
        )
    return costs.stages([points[name] for name in starts], hardware)


class StageCosts:
    """Sum the costs of a program's activations, so that a stage's cost is a difference.

    Cut point i lies before activation i. Other values, such as parameters, cost their part in every
    stage that reads them.
    """

    def __init__(
        self,
        flow: Flow,
        mesh: Mesh,
        costs: Sequence[PriceOf],
        *,
        same_program: StageCosts | None = None,
        same_layouts: StageCosts | None = None,
    ) -> None:
        """`costs`: prices on each kind of machines.

        `same_program`: costs of this program with other places of its parameters, to be reused.
        `same_layouts`: costs with the same layouts, though other regions may be recomputed.
        """
        if not flow.activations:
            raise InvalidInput(
                "a pipeline has stages of what forward computes from its inputs",
                got="a model whose outputs follow from parameters and buffers alone",
                remedy="no pipeline axis, or outputs that depend on the inputs",
            )
        self.flow, self.mesh = flow, mesh
        known = same_program or same_layouts
        if same_program is None:
            once = SavedBytesCache(mesh, flow.equal_blocks)
            halves = WeightHalfBytes(flow, once)
            both = kept_by_stages(flow, once, halves)
            self.kept, self.weight_halves = (spans.repeated(flow.place_map) for spans in both)
            self._remade_in = RecomputedBytes(flow, once, halves)
        else:
            self.kept, self.weight_halves = same_program.kept, same_program.weight_halves
            self._remade_in = same_program._remade_in
        self.count = flow.place_map.count  # of activations
        self.crossings = flow.place_map.repeat_values(flow.crossings)
        if known is None:
            parameters = [_parameters(flow, node) for node in flow.activations]
            named = [{node.name for node in row} for row in parameters]
            self._parameters = flow.place_map.repeat_values(named)
            self._crossing: dict[int, int] = {}
        else:
            self._parameters, self._crossing = known._parameters, known._crossing
        self._holding = [0, *itertools.accumulate(map(bool, self._parameters))]
        self._held_by = flow.equal_blocks.along(lambda node: held_bytes(node, mesh))
        self._tables: dict[tuple[int, ...], StageTable] = {}  # by cut points
        self._times: dict[tuple[tuple[int, ...], StageHardware], Array] = {}
        self._clean: dict[float, tuple[list[int], int]] = {}  # cut points and layers, by reach
        self._rows: dict[str, tuple[RecomputeMark, ColumnRows]] = {}  # of nodes by name
        self._alone, self._shared = self._add_up(costs, {} if known is None else known._rows)

    @cached_property
    def total(self) -> float:
        """Return the seconds of all activations, forward and backward."""
        return self._at(self.count)

    @cached_property
    def places(self) -> dict[str, int]:
        """Return the cut point before each activation, by name."""
        return {self._name(index): index for index in range(self.count)}

    def node(self, place: int) -> fx.Node:
        """Return the activation at a place, or the one that stands for it."""
        return self.flow.activations[self.flow.place_map.shown[place]]

    def _name(self, place: int) -> str:
        """Return the name of the activation at a place."""
        node, block = self.node(place), self._block(place)
        return node.name if block is None else block.node_name

    def _block(self, place: int) -> BlockPlace | None:
        """Return where the activation at a place stands among equal blocks."""
        block = info(self.node(place)).block
        is_many = block is not None and block.count > 1
        return block.later(int(self.flow.place_map.later[place])) if block and is_many else block

    def shared_sums(self, stages: Sequence[StageCost]) -> tuple[SharedSum, ...]:
        """Return the gradient sums that stages with these starts share with one another."""
        starts = [self.places[stage.starts] for stage in stages]
        sizes: dict[tuple[int, ...], float] = {}
        for readers, rows in self._shared:
            at = np.searchsorted(starts, readers, side="right") - 1
            sharing = tuple(dict.fromkeys(at.tolist()))
            if len(sharing) > 1:
                sizes[sharing] = sizes.get(sharing, 0.0) + float(rows[0, COLUMNS.index("sums")])
        return tuple(SharedSum(group, round(size)) for group, size in sizes.items() if round(size))

    def _add_up(
        self, costs: Sequence[PriceOf], known: Mapping[str, tuple[RecomputeMark, ColumnRows]]
    ) -> tuple[Array, list[tuple[Array, Array]]]:
        """Return sums over nodes that one activation reads, and those of several with readers."""
        alone = np.zeros((len(self.flow.activations) + 1, len(costs), len(COLUMNS)))
        shared: dict[tuple[int, ...], Array] = {}
        places, every = list[int](), list[ColumnRows]()
        for node, readers in (self.flow.read_at | self.flow.held_at).items():
            mark = info(node).remade, bool(info(node).away)
            # The price of a value of parameters alone depends on their places.
            may_be = self.flow.sources[node] != {"parameter"} and not info(node).away
            old = known.get(node.name) if may_be else None
            rows = self._rows_of(node, costs) if old is None or old[0] != mark else old[1]
            if may_be or node.op == "placeholder":
                self._rows[node.name] = mark, rows
            if len(readers) == 1:
                places.append(readers[0] + 1)
                every.append(rows)
            elif any(map(any, rows)):
                shared[readers] = shared.get(readers, 0.0) + np.array(rows)
        np.add.at(alone, np.array(places, int), np.array(every).reshape(-1, *alone.shape[1:]))
        return self._sum(alone), [
            (np.array(readers), rows)
            for short, rows in shared.items()
            for readers in self.flow.place_map.readers(short)
        ]

    def _sum(self, alone: Array) -> Array:
        """Return the sum before each cut point of rows for the activations that are shown."""
        return np.concatenate([alone[:1], alone[1:][self.flow.place_map.shown[:-1]]]).cumsum(axis=0)

    def _rows_of(self, node: fx.Node, costs: Sequence[PriceOf]) -> ColumnRows:
        """Return the columns of one node, for each kind of machines."""
        held, sums = self._held_by(node), summed_gradient_bytes(node, info(node).places, self.mesh)
        return [cost_columns(cost(node), sums, held) for cost in costs]

    def restated(
        self,
        places: Mapping[str, ParameterPlacement],
        costs: Sequence[Callable[[fx.Node, ParameterPlacement], NodeCost]],
    ) -> StageCosts:
        """Return costs with other `places` of some parameters, by name.

        Before, each parameter has one place; in neither case are copies gathered.
        """
        costs_there = copy(self)
        costs_there._tables, costs_there._times = {}, {}
        costs_there._clean, costs_there._rows = {}, dict(self._rows)
        for cached in ("_seconds", "total", "are_tied"):
            vars(costs_there).pop(cached, None)
        count = len(self.flow.activations) + 1
        change, shared = np.zeros((count, *self._alone.shape[1:])), list(self._shared)
        for node, readers in self.flow.held_at.items():
            if node.name not in places:
                continue
            at = places[node.name]
            mark, before = self._rows[node.name]
            held = parameter_bytes(node, at, self.mesh)
            sums = summed_gradient_bytes(node, at, self.mesh)
            rows = [cost_columns(cost(node, at), sums, held) for cost in costs]
            costs_there._rows[node.name] = mark, rows
            more = np.array(rows) - np.array(before)
            if len(readers) == 1:
                change[readers[0] + 1] += more
            elif more.any():
                shared += [(np.array(at), more) for at in self.flow.place_map.readers(readers)]
        costs_there._alone, costs_there._shared = self._alone + self._sum(change), shared
        costs_there.are_tied = self.are_tied and not places
        return costs_there

    def of(self, flow: Flow) -> StageCosts:
        """Return the costs with the calls of another graph and its places of parameters."""
        if flow is self.flow:
            return self
        of_flow = copy(self)
        of_flow.flow = flow
        of_flow._held_by = flow.equal_blocks.along(lambda node: held_bytes(node, self.mesh))
        return of_flow

    @cached_property
    def are_tied(self) -> bool:
        """Return whether each parameter has one place."""
        places = [info(node).places for node in self.flow.held_at]
        return all(at is None or at.is_tied for at in places)

    def held(self, bounds: Sequence[tuple[int, int]], *, gradients: bool = True) -> float:
        """Return the bytes of states that the stages between these cut points hold together."""
        kinds = [name in HELD_KINDS and (gradients or name != "gradients") for name in COLUMNS]
        size = sum(self._alone[end, 0] - self._alone[start, 0] for start, end in bounds)
        for readers, rows in self._shared:
            if any(((readers >= start) & (readers < end)).any() for start, end in bounds):
                size = size + rows[0]
        return float(np.sum(np.asarray(size)[kinds]))

    def remade(self, start: int, end: int, *, is_split: bool) -> float:
        """Return the least bytes that one micro-batch's backward recomputes beyond those kept."""
        return self._remade_in.bytes(start, end, is_split=is_split)

    def sums(self, bounds: Sequence[int], kind: int = 0, of: Sequence[str] = COLUMNS) -> Array:
        """Return the columns `of` each stage by start and end in `bounds`, each node once.

        `kind`: the kind of machines.
        """
        which = [COLUMNS.index(name) for name in of]
        at = self._alone[list(bounds), kind][:, which]
        table = at[None, :] - at[:, None]
        for readers, rows in self._shared:
            first = np.append(readers, self.count)[np.searchsorted(readers, bounds)]
            table += (first[:, None] < np.array(bounds)[None, :])[..., None] * rows[kind, which]
        return table

    def received(self, point: int) -> int:
        """Return the bytes that cross a cut point."""
        point = int(self.flow.place_map.shown[point])
        if point not in self._crossing:
            crossing = self.flow.crossing(point) if point else []
            self._crossing[point] = sum(_bytes(node, self.mesh) for node in crossing)
        return self._crossing[point]

    def table(self, points: tuple[int, ...]) -> StageTable:
        """Return the table of all stages between two of these cut points or the end."""
        if points not in self._tables:
            self._tables[points] = self._table([*points, self.count])
        return self._tables[points]

    def waits(self, hardware: Sequence[StageHardware]) -> bool:
        """Return whether stages on this hardware wait long for messages, compared to their work."""
        slowest = min(at.bandwidth for at in hardware)
        received = self.table(tuple(self.cut_points(len(hardware), {}))).received.max()
        return bool(2 * received / slowest > NOTABLE_WAIT * self.total / len(hardware))

    def times(self, points: tuple[int, ...], at: StageHardware) -> Array:
        """Return a table of a stage's seconds on hardware `at`, waits for messages included."""
        key = points, at
        if key not in self._times:
            table, bounds = self.table(points), [*points, self.count]
            kinds = [self.sums(bounds, kind, WORK) for kind in at.kinds if kind]
            every = [columns[..., 0] + columns[..., 1] for columns in kinds]
            every += [table.seconds] * (0 in at.kinds)
            waiting = 2 * table.received[:, None] / at.bandwidth
            self._times[key] = np.maximum.reduce(every) + waiting
        return self._times[key]

    def _table(self, bounds: Sequence[int]) -> StageTable:
        forward, backward, *held = np.moveaxis(self.sums(bounds, of=(*WORK, *HELD_KINDS)), -1, 0)
        received = np.array([*map(self.received, bounds[:-1]), 0])
        holding = np.array(self._holding)[list(bounds)]
        return StageTable(
            forward + backward,
            holding[None, :] == holding[:, None],
            received,
            np.rint(sum(held)).astype(np.int64),
            self.kept.table(bounds),
            self.weight_halves.table(bounds),
            self._remade(bounds),
        )

    def _remade(self, bounds: Sequence[int]) -> NDArray[np.int64]:
        """Return the bytes that the largest region of a stage recomputes, by start and end."""
        at, table = np.array(bounds), np.zeros((len(bounds), len(bounds)), np.int64)
        for first, last, size in self._remade_in.regions:
            where = np.ix_(at <= last, at > first)
            table[where] = np.maximum(table[where], round(size))
        return table

    def stages(
        self, starts: Sequence[int], hardware: Sequence[StageHardware] = ()
    ) -> list[StageCost]:
        """Return the costs of the stages that start at these cut points, on their hardware."""
        bounds = itertools.pairwise([*starts, self.count])
        hardware = hardware or [ANYWHERE] * len(starts)
        return [self.stage(start, end, at) for (start, end), at in zip(bounds, hardware)]

    def stage(
        self,
        start: int,
        end: int,
        at: StageHardware = ANYWHERE,
        others: Sequence[StagePiece] = (),
    ) -> StageCost:
        """Return the cost of the stage between two cut points, on hardware `at`.

        `others`: pieces of it with other costs, as where regions are recomputed in another way.
        """
        first = min(start, self.count - 1)
        node, block = self.node(first), self._block(first)
        # Copies of a stage wait for the slowest of them.
        by_kind = np.array([self.sums([start, end], kind)[0, 1] for kind in at.kinds])
        kept, halves = self.kept.bytes(start, end), self.weight_halves.bytes(start, end)
        for other, *ends in others:
            for costs, sign in ((other, 1), (self, -1)):
                by_kind += [sign * costs.sums(ends, kind)[0, 1] for kind in at.kinds]
                kept += sign * costs.kept.bytes(*ends)
                halves += sign * costs.weight_halves.bytes(*ends)
        every = np.maximum(by_kind, 0.0)  # differences of rounded sums
        most = every.max(axis=0)
        most[ONCE] = every[every[:, ONCE].sum(axis=1).argmax(), ONCE]
        return StageCost(
            starts=self._name(first),
            module=info(node).module if block is None else block.path_of(node),
            **dict(zip(SECONDS, most.tolist())),
            **dict(zip(BYTES, map(round, most[len(SECONDS) :].tolist()))),
            activations=kept,
            receives=self.received(start),
            weight_halves=halves,
            remade=round(self._remade_in.bytes(start, end)),
        )

    def is_clean(self, point: int, reach: float) -> bool:
        """Return whether a cut point is outside of residuals: on one side at least, no point within
        `reach` seconds is crossed by fewer values."""
        fewer = [row.get(point) for row in self._fewer]
        return any(at is None or abs(self._at(at) - self._at(point)) > reach for at in fewer)

    @cached_property
    def _fewer(self) -> list[dict[int, int]]:
        """Return for cut points the nearest before, and after, that fewer values cross."""
        points = range(1, self.count)
        return [_nearest_below(self.crossings, row) for row in (points, points[::-1])]

    @cached_property
    def _borders(self) -> list[int]:
        """Return the cut points between layers."""
        line = self.flow.place_map
        layers = line.repeat_values([_layer(info(n).module) for n in self.flow.activations])
        at = list(zip(layers, line.later.tolist()))
        return [place for place in range(1, self.count) if at[place] != at[place - 1]]

    def cut_points(self, count: int, fixed: Mapping[int, int]) -> list[int]:
        """Return the cut points at which a stage may start: between layers, 0 among them."""
        reach = self.total / max(count, 1)
        if reach not in self._clean:
            clean = [point for point in self._borders if self.is_clean(point, reach)]
            self._clean[reach] = clean, self._layers(clean)
        clean, layers = self._clean[reach]
        if count > max(layers, 1):
            raise InvalidInput(
                "a pipeline has at most as many stages as the model has layers",
                got=f"{counted(count, 'stage')} for {counted(layers, 'layer')}",
                remedy="fewer stages (a smaller pipeline axis, fewer chunks), or more layers",
            )
        return sorted({0, *clean, *fixed.values()})

    def _layers(self, clean: Sequence[int]) -> int:
        """Return the number of layers between these cut points."""
        blocks = holding = 0
        for start, end in itertools.pairwise([0, *clean, self.count]):
            held = set().union(*self._parameters[start:end])
            holding += bool(held)
            blocks += len(held) > 2 and _NUMBERED.match(info(self.node(start)).module) is not None
        return blocks if blocks > 1 else holding

    def _at(self, point: int) -> float:
        return self._seconds[point]

    @cached_property
    def _seconds(self) -> list[float]:
        """Return the seconds of all activations before each cut point, forward and backward."""
        return self._alone[:, 0, :2].sum(axis=1).tolist()


def _nearest_below(values: Sequence[int], row: Iterable[int]) -> dict[int, int]:
    """Return for each place in `row` the last one before it with a smaller value, if any."""
    nearest, below = dict[int, int](), list[int]()  # `below`: values ascend
    for place in row:
        while below and values[below[-1]] >= values[place]:
            below.pop()
        if below:
            nearest[place] = below[-1]
        below.append(place)
    return nearest


def _parameters(flow: Flow, node: fx.Node) -> set[fx.Node]:
    """Return the parameters from which an activation is computed, other activations aside."""
    weights = [v for v in node.all_input_nodes if flow.sources[v] == {"parameter"}]
    return {n for n in ancestors(weights) if info(n).places is not None}


def _layer(module: str) -> str:
    """Return the innermost numbered module on a path, or the whole path."""
    numbered = _NUMBERED.match(module)
    return numbered.group() if numbered else module


def _bytes(node: fx.Node, mesh: Mesh) -> int:
    return sum(type_.local_bytes(mesh) for type_ in info(node).types)
