"""Stages: where to cut a program into a pipeline, exactly, by predicted time and memory.

A dynamic programme over the places between layers finds the cut whose slowest stage is fastest;
of equal ones, the one that sends least. Stages may be uneven: an embedding and a head weigh what
they weigh. But each holds a parameter where that is possible, since torch's optimizers refuse a
rank that has none. Stages that share a rank and its memory are left to shared_memory.py.
`shard(module, stage=k)` fixes places by hand.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.cluster import Cluster, Device
from autopar.cost.model import operator_seconds
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.search.flow import Flow, ancestors
from autopar.search.pieces import Pieces
from autopar.search.shared_memory import cut_together
from autopar.strategies import rule_of

NodeCost = Callable[[fx.Node], tuple[float, float]]  # seconds forward, seconds backward
# Of how many slices of the batch a stage keeps all activations, and of how many what it received.
Keeps = tuple[int, int]
_STATES = 4  # a parameter, its gradient, and two states of the optimizer
_NUMBERED = re.compile(r"(.*\.)?\d+(?=\.|$)")


@dataclass(frozen=True)
class StageCost:
    """What one stage takes for one slice of the batch, predicted.

    That is a micro-batch, or a part of it where a schedule cuts micro-batches in parts.
    """

    starts: str  # the first operator
    module: str  # where in the model that is
    forward: float  # seconds
    backward: float
    parameters: int  # bytes
    activations: int  # bytes kept from forward to backward
    receives: int  # bytes that come from the stage before

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def bytes(self, whole: int, received: int) -> int:
        """With its states, all activations of some slices, and what it received of some."""
        kept = whole * self.activations + received * self.receives
        return _STATES * self.parameters + kept


@dataclass(frozen=True)
class Pin:
    """A module that the user made the start of a stage."""

    stage: int
    module: str
    source: str


def choose_stages(
    line: Line,
    count: int,
    *,
    pins: Sequence[Pin] = (),
    memory: float | None = None,
    moments: Sequence[Mapping[int, Keeps]] = (),
) -> list[StageCost]:
    """Cut a line of activations into `count` stages.

    `memory`: bytes that a rank may take. Each of `moments` says what a rank keeps at one time, for
    each of its stages.
    """
    fixed = line.pinned(pins, count)
    places = line.places(count, fixed)
    pieces = line.pieces(tuple(places))
    offered = pieces.offered(count, {s: places.index(place) for s, place in fixed.items()})
    if memory is not None and any(len(moment) > 1 for moment in moments):
        found = cut_together(pieces, offered, memory, moments)
    else:
        for moment in moments if memory is not None else ():
            for stage, keeps in moment.items():
                offered[stage] &= pieces.bytes(*keeps) <= memory
        found = pieces.fastest(offered)
    if found is None:
        raise _none_fits(count, memory)
    starts = [places[index] for index in found]
    ends = [*starts[1:], len(line.flow.activations)]
    return [line.stage(start, end) for start, end in zip(starts, ends)]


def price_stages(line: Line, starts: Sequence[str]) -> list[StageCost]:
    """What stages take that begin at the operators `starts`, for cuts that were made before."""
    places = {node.name: place for place, node in enumerate(line.flow.activations)}
    missing = [name for name in starts if name not in places]
    if missing:
        raise InvalidInput(
            "a stage starts at an operator of the program",
            got=", ".join(missing),
            remedy="plan again for this model",
        )
    begins = [places[name] for name in starts]
    ends = [*begins[1:], len(line.flow.activations)]
    return [line.stage(start, end) for start, end in zip(begins, ends)]


def roofline(mesh: Mesh, device: Device | None = None) -> NodeCost:
    """Seconds of an operator by its FLOPs and the bytes that it moves, on `device`."""
    device = device or Cluster.preset("dgx-h100").device

    def cost(node: fx.Node) -> tuple[float, float]:
        rule, tensors = rule_of(node), [node, *node.all_input_nodes]
        moved = sum(_bytes(value, mesh) for value in tensors)
        # A rank has the share of the work that it has of the tensor that is cut most.
        whole = [max(value.meta["val"].nbytes, 1) for value in tensors]
        share = min(_bytes(value, mesh) / of for value, of in zip(tensors, whole))
        flops = rule.flops * share if rule is not None else 0.0
        forward = operator_seconds(device, node.meta["val"].dtype, flops=flops, moved=moved)
        gradients = sum(value.meta["differentiable"] for value in node.all_input_nodes)
        return forward, forward * min(gradients, 2)

    return cost


def imbalance(stages: Sequence[StageCost]) -> float:
    """By how much the slowest stage exceeds the mean: 0 for equal stages."""
    seconds = [stage.seconds for stage in stages]
    mean = sum(seconds) / len(seconds)
    return max(seconds) / mean - 1 if mean else 0.0


class Line:
    """The line of activations with sums of its costs, so that a stage's cost is a difference."""

    def __init__(
        self,
        flow: Flow,
        mesh: Mesh,
        cost: NodeCost | None = None,
        link_bandwidth: float = 25e9,
    ) -> None:
        self.flow, self.mesh, self.bandwidth = flow, mesh, link_bandwidth
        cost = cost or roofline(mesh)
        costs = [cost(node) for node in flow.activations]
        self.forward = [0.0, *itertools.accumulate(forward for forward, _ in costs)]
        self.backward = [0.0, *itertools.accumulate(backward for _, backward in costs)]
        kept = (_bytes(n, mesh) * n.meta["differentiable"] for n in flow.activations)
        self.kept = [0, *itertools.accumulate(kept)]
        self.total = self.forward[-1] + self.backward[-1]
        self._parameters = [_parameters(flow, node) for node in flow.activations]
        self._holding = [0, *itertools.accumulate(bool(held) for held in self._parameters)]
        self._crossing: dict[int, int] = {}
        self._pieces: dict[tuple[int, ...], Pieces] = {}  # by places
        self._clean: dict[float, list[int]] = {}  # by reach
        self._alone, self._shared = self._parameter_bytes()

    def recomputed(self) -> Line:
        """The same line where every backward begins with the forward once more."""
        again = copy.copy(self)
        again.backward = [b + f for b, f in zip(self.backward, self.forward)]
        again.total = self.total + self.forward[-1]
        again._pieces, again._clean = {}, {}
        return again

    def seconds(self, start: int, end: int) -> float:
        """Forward and backward of the stage, with what it waits for when it receives."""
        work = self.forward[end] - self.forward[start] + self.backward[end] - self.backward[start]
        return work + 2 * self.received(start) / self.bandwidth

    def received(self, place: int) -> int:
        """The bytes that cross `place`."""
        if place not in self._crossing:
            crossing = self.flow.crossing(place) if place else []
            self._crossing[place] = sum(_bytes(node, self.mesh) for node in crossing)
        return self._crossing[place]

    def is_empty(self, start: int, end: int) -> bool:
        """Whether the stage would hold no parameter."""
        return self._holding[start] == self._holding[end]

    def parameters(self, start: int, end: int) -> int:
        """Bytes of the parameters of the stage; one that it uses several times counts once."""
        shared = sum(
            size for size, places in self._shared if any(start <= place < end for place in places)
        )
        return self._alone[end] - self._alone[start] + shared

    def _parameter_bytes(self) -> tuple[list[int], list[tuple[int, list[int]]]]:
        """Sums over parameters that are used at one place; bytes and places of the others."""
        places: dict[fx.Node, list[int]] = {}
        for place, held in enumerate(self._parameters):
            for node in held:
                places.setdefault(node, []).append(place)
        alone, shared = [0] * len(self._parameters), []
        for node, used in places.items():
            size = _bytes(node, self.mesh)
            if len(used) == 1:
                alone[used[0]] += size
            else:
                shared.append((size, used))
        return [0, *itertools.accumulate(alone)], shared

    def pieces(self, places: tuple[int, ...]) -> Pieces:
        """All that could be a stage between two of `places` or the end."""
        if places not in self._pieces:
            self._pieces[places] = self._tables([*places, len(self.flow.activations)])
        return self._pieces[places]

    def _tables(self, bounds: Sequence[int]) -> Pieces:
        pairs = list(itertools.combinations(range(len(bounds)), 2))
        upper = tuple(np.array(pairs).T)

        def table(values: Iterable[float], kind: type) -> NDArray:
            found: NDArray = np.zeros((len(bounds), len(bounds)), kind)
            found[upper] = list(values)
            return found

        spans = [(bounds[i], bounds[j]) for i, j in pairs]
        return Pieces(
            table((self.seconds(*span) for span in spans), np.float64),
            table((self.is_empty(*span) for span in spans), np.bool_),
            np.array([*map(self.received, bounds[:-1]), 0]),
            table((_STATES * self.parameters(*span) for span in spans), np.int64),
            table((self.kept[end] - self.kept[start] for start, end in spans), np.int64),
        )

    def stage(self, start: int, end: int) -> StageCost:
        first = self.flow.activations[start]
        return StageCost(
            starts=first.name,
            module=first.meta["module"],
            forward=self.forward[end] - self.forward[start],
            backward=self.backward[end] - self.backward[start],
            parameters=self.parameters(start, end),
            activations=self.kept[end] - self.kept[start],
            receives=self.received(start),
        )

    def is_clean(self, place: int, reach: float) -> bool:
        """Not inside a residual: not more crosses here than on both sides within `reach`."""
        count = self.flow.crossings[place]
        at = self._at(place)

        def fewer(places: range) -> bool:
            for other in places:
                if abs(self._at(other) - at) > reach:
                    return False
                if self.flow.crossings[other] < count:
                    return True
            return False

        before, after = range(place - 1, 0, -1), range(place + 1, len(self.flow.activations))
        return not (fewer(before) and fewer(after))

    def places(self, count: int, fixed: Mapping[int, int]) -> list[int]:
        """The places between layers where a stage may start, 0 among them."""
        nodes = self.flow.activations
        reach = self.total / max(count, 1)
        if reach not in self._clean:
            layers = [_layer(node.meta["module"]) for node in nodes]
            changes = [i for i in range(1, len(nodes)) if layers[i] != layers[i - 1]]
            self._clean[reach] = [place for place in changes if self.is_clean(place, reach)]
        clean = self._clean[reach]
        pieces = [0, *clean, len(nodes)]
        blocks = holding = 0
        for start, end in itertools.pairwise(pieces):
            held = set().union(*self._parameters[start:end])
            holding += bool(held)
            blocks += len(held) > 2 and _NUMBERED.match(nodes[start].meta["module"]) is not None
        known = blocks if blocks > 1 else holding
        if count > max(known, 1):
            raise InvalidInput(
                "a pipeline has at most as many stages as the model has layers",
                got=f"{count} stages for {known} layers",
                remedy="fewer stages (a smaller pipeline axis, fewer chunks), or more layers",
            )
        return sorted({0, *clean, *fixed.values()})

    def pinned(self, pins: Sequence[Pin], count: int) -> dict[int, int]:
        """The place where each pinned stage starts."""
        fixed: dict[int, int] = {}
        by_stage: dict[int, Pin] = {}
        for pin in sorted(pins, key=lambda pin: pin.stage):
            place = self._start_of(pin)
            if not 0 <= pin.stage < count:
                _refuse(pin, f"stage {pin.stage} of {count}", f"a stage from 1 to {count - 1}")
            if pin.stage == 0 and place > 0:
                _refuse(pin, "stage 0 begins with the model", "leave it out")
            other = by_stage.setdefault(pin.stage, pin)
            if fixed.setdefault(pin.stage, place) != place:
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
        paths = [node.meta["module"] for node in self.flow.activations]
        found = [i for i, path in enumerate(paths) if path == pin.module or path.startswith(inside)]
        if not found:
            _refuse(pin, f"{pin.module} does nothing on the way to the loss", "pin another module")
        place = found[0]
        if place and not self.is_clean(place, self.total):
            values = ", ".join(node.name for node in self.flow.crossing(place))
            _refuse(
                pin,
                f"{pin.module} lies inside a residual or a branch: {values} would be sent together",
                "pin the module that contains the whole of it",
            )
        return place

    def _at(self, place: int) -> float:
        return self.forward[place] + self.backward[place]


def _none_fits(count: int, memory: float | None) -> InvalidInput:
    return InvalidInput(
        "the model can be cut so that the stages fit",
        got=f"{count} stages" + (f" on ranks of at most {memory:.3g} bytes" if memory else ""),
        remedy="more memory, more stages, or other pinned modules",
    )


def _parameters(flow: Flow, node: fx.Node) -> set[fx.Node]:
    """The parameters that an activation is made of, other activations aside."""
    weights = [v for v in node.all_input_nodes if flow.sources[v] == {"parameter"}]
    return {
        n
        for n in ancestors(weights)
        if n.op == "placeholder" and n.meta["origin"][0] == "parameter"
    }


def _layer(module: str) -> str:
    """The innermost numbered module that a path goes through, or the whole path."""
    numbered = _NUMBERED.match(module)
    return numbered.group() if numbered else module


def _bytes(node: fx.Node, mesh: Mesh) -> int:
    return node.meta["type"].local_bytes(mesh) if isinstance(node.meta["val"], torch.Tensor) else 0


def _refuse(pin: Pin, reason: str, remedy: str) -> None:
    raise InvalidInput(
        "a pinned module starts a stage, between two layers and in their order",
        got=reason,
        remedy=remedy,
        source=pin.source,
    )
