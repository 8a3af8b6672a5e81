"""StageCosts: what a stage takes, predicted, wherever it is cut out of a program; the cut points.

Stages may be uneven: an embedding and a head weigh what they weigh. `shard(module, stage=k)` fixes
where a stage starts by hand.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.capture.annotations import Pin
from autopar.cost.footprint import HELD, Held, held_bytes, parameter_bytes, summed_bytes
from autopar.cost.saved_tensors import KeptOnce
from autopar.cost.state_price import NodeCost
from autopar.errors import InvalidInput
from autopar.layout import ParameterPlacement
from autopar.mesh import Mesh
from autopar.passes.flow import Flow, ancestors
from autopar.pipeline.stages.kept import Halves, Remade, kept_by_stages
from autopar.pipeline.stages.standing import ANYWHERE, Standing
from autopar.pipeline.stages.table import StageTable
from autopar.strategies.node_info import info

Array = NDArray[np.float64]
PriceOf = Callable[[fx.Node], NodeCost]  # of any node of a rewritten program
Rows = list[list[float]]  # of each kind of machines, the columns
Mark = tuple[bool, bool]  # whether a node runs again, and whether its value is kept elsewhere
# Seconds, then bytes.
COLUMNS = ("forward", "backward", "again", "reduced", "summed", "sums", *HELD)
_NUMBERED = re.compile(r"(.*\.)?\d+(?=\.|$)")


@dataclass(frozen=True)
class StageCost:
    """What one stage takes for one micro-batch (or a part, where they are cut), predicted."""

    starts: str  # the first operator
    module: str  # where in the model that is
    forward: float  # seconds
    backward: float
    again: float  # seconds of backward that are forward once more
    reduced: float  # seconds that backward takes besides where it is split
    # Seconds once a step: of summing its gradients over the mesh, and gathering its parameters.
    summed: float
    sums: int  # bytes of its gradients, of their sums over the mesh
    parameters: int  # bytes
    gradients: int  # bytes of those of parameters that learn
    optimizer: int  # bytes that an optimizer keeps of these
    buffers: int  # bytes
    gathered: int  # bytes of copies of parameters that live a step
    activations: int  # bytes kept from forward to backward, besides what comes from before
    receives: int  # bytes that come from the stage before
    weight_halves: int  # bytes kept from the gradients of inputs to those of weights
    remade: int  # bytes by which the backward of one micro-batch keeps more, of what it makes again

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class SharedSum:
    """Of the gradients of parameters that several stages read, which are summed over all these."""

    stages: tuple[int, ...]
    bytes: int  # of their sums over the mesh inside of a stage


def price_stages(
    costs: StageCosts, starts: Sequence[str], standing: Sequence[Standing] = ()
) -> list[StageCost]:
    """What stages take that begin at the operators `starts`, for cuts that were made before."""
    points = costs.places
    missing = [name for name in starts if name not in points]
    if missing:
        raise InvalidInput(
            "a stage starts at an operator of the program",
            got=", ".join(missing),
            remedy="plan again for this model",
        )
    return costs.stages([points[name] for name in starts], standing)


def imbalance(stages: Sequence[StageCost]) -> float:
    """By how much the slowest stage exceeds the mean: 0 for equal stages."""
    seconds = [stage.seconds for stage in stages]
    mean = sum(seconds) / len(seconds)
    return max(seconds) / mean - 1 if mean else 0.0


class StageCosts:
    """Sums of the costs of a program's activations, so that a stage's cost is a difference.

    Cut point i lies before activation i. What is no activation costs its part in every stage that
    makes it, as a parameter is held by every stage that reads it.
    """

    def __init__(
        self,
        flow: Flow,
        mesh: Mesh,
        costs: Sequence[PriceOf],
        like: StageCosts | None = None,
        beside: StageCosts | None = None,
    ) -> None:
        """`costs`: on each kind of machines. `like`: that of the same program with other places of
        its parameters; `beside`: of the same layouts, though other regions may be recomputed."""
        self.flow, self.mesh = flow, mesh
        if like is None:
            once = KeptOnce(mesh, flow.repeats)
            halves = Halves(flow, once)
            self.kept, self.weight_halves = kept_by_stages(flow, once, halves)
            self._remade_in = Remade(flow, once, halves)
        else:
            self.kept, self.weight_halves = like.kept, like.weight_halves
            self._remade_in = like._remade_in
        if (known := like or beside) is None:
            parameters = [_parameters(flow, node) for node in flow.activations]
            self._parameters = [{held.name for held in row} for row in parameters]
            self._crossing: dict[int, int] = {}
        else:
            self._parameters, self._crossing = known._parameters, known._crossing
        self._holding = [0, *itertools.accumulate(bool(held) for held in self._parameters)]
        self._held_by = flow.repeats.along(lambda node: held_bytes(node, mesh))
        self._tables: dict[tuple[int, ...], StageTable] = {}  # by cut points
        self._times: dict[tuple[tuple[int, ...], Standing], Array] = {}
        self._clean: dict[float, list[int]] = {}  # by reach
        self._rows: dict[str, tuple[Mark, Rows]] = {}  # of nodes by name
        self._alone, self._shared = self._add_up(costs, {} if known is None else known._rows)

    @cached_property
    def total(self) -> float:
        """Seconds of all activations, forward and backward."""
        return self._at(len(self.flow.activations))

    @cached_property
    def places(self) -> dict[str, int]:
        """Of activations by name, the cut point before each."""
        return {node.name: index for index, node in enumerate(self.flow.activations)}

    def shared_sums(self, stages: Sequence[StageCost]) -> tuple[SharedSum, ...]:
        """What stages that begin as these do sum of gradients with one another."""
        starts = [self.places[stage.starts] for stage in stages]
        found: dict[tuple[int, ...], float] = {}
        for readers, rows in self._shared:
            at = np.searchsorted(starts, readers, side="right") - 1
            own = tuple(dict.fromkeys(at.tolist()))
            if len(own) > 1:
                found[own] = found.get(own, 0.0) + float(rows[0, COLUMNS.index("sums")])
        return tuple(SharedSum(own, round(size)) for own, size in found.items() if round(size))

    def _add_up(
        self, costs: Sequence[PriceOf], known: Mapping[str, tuple[Mark, Rows]]
    ) -> tuple[Array, list[tuple[Array, Array]]]:
        """Sums of all that one activation reads; by which, and the sum, of what several read."""
        alone = np.zeros((len(self.flow.activations) + 1, len(costs), len(COLUMNS)))
        shared: dict[tuple[int, ...], Array] = {}
        places, every = list[int](), list[Rows]()
        for node, readers in (self.flow.read_at | self.flow.held_at).items():
            mark = info(node).remade, bool(info(node).away)
            # What is made of parameters alone depends on their places.
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
        return alone.cumsum(axis=0), [(np.array(readers), rows) for readers, rows in shared.items()]

    def _rows_of(self, node: fx.Node, costs: Sequence[PriceOf]) -> Rows:
        """The columns of one node, for each kind of machines."""
        held, sums = self._held_by(node), summed_bytes(node, info(node).places, self.mesh)
        return [_columns(cost(node), sums, held) for cost in costs]

    def restated(
        self,
        places: Mapping[str, ParameterPlacement],
        costs: Sequence[Callable[[fx.Node, ParameterPlacement], NodeCost]],
    ) -> StageCosts:
        """Of a program whose parameters have one place: the same where some have others, by name,
        and no copies of them are gathered."""
        made = copy(self)
        made._tables, made._times = {}, {}
        made._clean, made._rows = {}, dict(self._rows)
        for known in ("_seconds", "total", "are_tied"):
            vars(made).pop(known, None)
        change, shared = np.zeros_like(self._alone), list(self._shared)
        for node, readers in self.flow.held_at.items():
            if node.name not in places:
                continue
            at = places[node.name]
            mark, before = self._rows[node.name]
            held = parameter_bytes(node, at, self.mesh)
            sums = summed_bytes(node, at, self.mesh)
            rows = [_columns(cost(node, at), sums, held) for cost in costs]
            made._rows[node.name] = mark, rows
            more = np.array(rows) - np.array(before)
            if len(readers) == 1:
                change[readers[0] + 1] += more
            elif more.any():
                shared.append((np.array(readers), more))
        made._alone, made._shared = self._alone + change.cumsum(axis=0), shared
        made.are_tied = self.are_tied and not places
        return made

    @cached_property
    def are_tied(self) -> bool:
        """Whether each parameter has one place."""
        places = [info(node).places for node in self.flow.held_at]
        return all(at is None or at.is_tied for at in places)

    def held(self, bounds: Sequence[tuple[int, int]], gradients: bool = True) -> float:
        """The bytes of states that stages with these first and last points hold together."""
        kinds = [name in HELD and (gradients or name != "gradients") for name in COLUMNS]
        size = sum(self._alone[end, 0] - self._alone[start, 0] for start, end in bounds)
        for readers, rows in self._shared:
            if any(((readers >= start) & (readers < end)).any() for start, end in bounds):
                size = size + rows[0]
        return float(np.sum(np.asarray(size)[kinds]))

    def remade(self, start: int, end: int, is_split: bool) -> float:
        """The bytes by which the backward of one micro-batch keeps more than forward has kept, by
        what it makes again; at least."""
        return self._remade_in.bytes(start, end, is_split)

    def sums(self, bounds: Sequence[int], kind: int = 0) -> Array:
        """By start, end and column: what is made between two of `bounds`, each thing once, on one
        kind of machines."""
        at = self._alone[list(bounds), kind]
        found = at[None, :] - at[:, None]
        for readers, rows in self._shared:
            first = np.append(readers, len(self.flow.activations))[np.searchsorted(readers, bounds)]
            found += (first[:, None] < np.array(bounds)[None, :])[..., None] * rows[kind]
        return found

    def received(self, point: int) -> int:
        """The bytes that cross a cut point."""
        if point not in self._crossing:
            crossing = self.flow.crossing(point) if point else []
            self._crossing[point] = sum(_bytes(node, self.mesh) for node in crossing)
        return self._crossing[point]

    def table(self, points: tuple[int, ...]) -> StageTable:
        """All that could be a stage between two of these cut points or the end."""
        if points not in self._tables:
            self._tables[points] = self._table([*points, len(self.flow.activations)])
        return self._tables[points]

    def times(self, points: tuple[int, ...], at: Standing) -> Array:
        """Of the table, the seconds of a stage that stands there, which also waits for what it
        receives."""
        key = points, at
        if key not in self._times:
            table, bounds = self.table(points), [*points, len(self.flow.activations)]
            kinds = [self.sums(bounds, kind) for kind in at.kinds if kind]
            every = [found[..., 0] + found[..., 1] for found in kinds]
            every += [table.seconds] * (0 in at.kinds)
            waiting = 2 * table.received[:, None] / at.bandwidth
            self._times[key] = np.maximum.reduce(every) + waiting
        return self._times[key]

    def _table(self, bounds: Sequence[int]) -> StageTable:
        forward, backward, _, _, _, _, *held = np.moveaxis(self.sums(bounds), -1, 0)
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
        """The bytes that the largest region of a stage makes again, by start and end."""
        at, found = np.array(bounds), np.zeros((len(bounds), len(bounds)), np.int64)
        for first, last, size in self._remade_in.regions:
            where = np.ix_(at <= last, at > first)
            found[where] = np.maximum(found[where], round(size))
        return found

    def stages(self, starts: Sequence[int], standing: Sequence[Standing] = ()) -> list[StageCost]:
        """The stages that start at these cut points, and where they stand."""
        bounds = itertools.pairwise([*starts, len(self.flow.activations)])
        where = standing or [ANYWHERE] * len(starts)
        return [self.stage(start, end, at) for (start, end), at in zip(bounds, where)]

    def stage(self, start: int, end: int, at: Standing = ANYWHERE) -> StageCost:
        first = self.flow.activations[min(start, len(self.flow.activations) - 1)]
        # Copies of a stage wait for the slowest of them.
        every = [self.sums([start, end], kind)[0, 1] for kind in at.kinds]
        forward, backward, again, reduced, summed, sums, *held = np.maximum.reduce(every).tolist()
        return StageCost(
            starts=first.name,
            module=info(first).module,
            forward=forward,
            backward=backward,
            again=again,
            reduced=reduced,
            summed=summed,
            sums=round(sums),
            **dict(zip(HELD, map(round, held))),
            activations=self.kept.bytes(start, end),
            receives=self.received(start),
            weight_halves=self.weight_halves.bytes(start, end),
            remade=round(self._remade_in.bytes(start, end)),
        )

    def is_clean(self, point: int, reach: float) -> bool:
        """Not inside a residual: not more crosses here than on both sides within `reach`."""
        count = self.flow.crossings[point]
        at = self._at(point)

        def fewer(points: range) -> bool:
            for other in points:
                if abs(self._at(other) - at) > reach:
                    return False
                if self.flow.crossings[other] < count:
                    return True
            return False

        before, after = range(point - 1, 0, -1), range(point + 1, len(self.flow.activations))
        return not (fewer(before) and fewer(after))

    def cut_points(self, count: int, fixed: Mapping[int, int]) -> list[int]:
        """Where a stage may start: between layers, 0 among them."""
        nodes = self.flow.activations
        reach = self.total / max(count, 1)
        if reach not in self._clean:
            layers = [_layer(info(node).module) for node in nodes]
            changes = [i for i in range(1, len(nodes)) if layers[i] != layers[i - 1]]
            self._clean[reach] = [point for point in changes if self.is_clean(point, reach)]
        clean = self._clean[reach]
        blocks = holding = 0
        for start, end in itertools.pairwise([0, *clean, len(nodes)]):
            held = set().union(*self._parameters[start:end])
            holding += bool(held)
            blocks += len(held) > 2 and _NUMBERED.match(info(nodes[start]).module) is not None
        known = blocks if blocks > 1 else holding
        if count > max(known, 1):
            raise InvalidInput(
                "a pipeline has at most as many stages as the model has layers",
                got=f"{count} stages for {known} layers",
                remedy="fewer stages (a smaller pipeline axis, fewer chunks), or more layers",
            )
        return sorted({0, *clean, *fixed.values()})

    def pinned(self, pins: Sequence[Pin], count: int) -> dict[int, int]:
        """The cut point where each pinned stage starts."""
        fixed: dict[int, int] = {}
        by_stage: dict[int, Pin] = {}
        for pin in sorted(pins, key=lambda pin: pin.stage):
            point = self._start_of(pin)
            if not 0 <= pin.stage < count:
                _refuse(pin, f"stage {pin.stage} of {count}", f"a stage from 1 to {count - 1}")
            if pin.stage == 0 and point > 0:
                _refuse(pin, "stage 0 begins with the model", "leave it out")
            other = by_stage.setdefault(pin.stage, pin)
            if fixed.setdefault(pin.stage, point) != point:
                _refuse(pin, f"stage {pin.stage} starts at {other.module} too", "keep one of them")
        for (early, first), (late, second) in itertools.pairwise(fixed.items()):
            if second - first < late - early:
                _refuse(
                    by_stage[late],
                    f"{by_stage[late].module} for stage {late} does not come after "
                    f"{by_stage[early].module} for stage {early}",
                    "number the stages in the order in which the model runs",
                )
        return fixed

    def _start_of(self, pin: Pin) -> int:
        inside = pin.module + "."
        paths = [info(node).module for node in self.flow.activations]
        found = [i for i, path in enumerate(paths) if path == pin.module or path.startswith(inside)]
        if not found:
            _refuse(pin, f"{pin.module} does nothing on the way to the loss", "pin another module")
        point = found[0]
        if point and not self.is_clean(point, self.total):
            values = ", ".join(node.name for node in self.flow.crossing(point))
            _refuse(
                pin,
                f"{pin.module} lies inside a residual or a branch: {values} would be sent together",
                "pin the module that contains the whole of it",
            )
        return point

    def _at(self, point: int) -> float:
        return self._seconds[point]

    @cached_property
    def _seconds(self) -> list[float]:
        """Of all activations before each cut point, forward and backward."""
        return self._alone[:, 0, :2].sum(axis=1).tolist()


def _columns(price: NodeCost, sums: int, held: Held) -> list[float]:
    once = price.summed + price.gathered + price.updated
    return [price.forward, price.backward, price.again, price.reduced, once, sums, *held]


def _parameters(flow: Flow, node: fx.Node) -> set[fx.Node]:
    """The parameters that an activation is made of, other activations aside."""
    weights = [v for v in node.all_input_nodes if flow.sources[v] == {"parameter"}]
    return {n for n in ancestors(weights) if info(n).places is not None}


def _layer(module: str) -> str:
    """The innermost numbered module that a path goes through, or the whole path."""
    numbered = _NUMBERED.match(module)
    return numbered.group() if numbered else module


def _bytes(node: fx.Node, mesh: Mesh) -> int:
    return sum(type_.local_bytes(mesh) for type_ in info(node).types)


def _refuse(pin: Pin, reason: str, remedy: str) -> None:
    raise InvalidInput(
        "a pinned module starts a stage, between two layers and in their order",
        got=reason,
        remedy=remedy,
        source=pin.source,
    )
