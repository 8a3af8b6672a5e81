"""Alike stages: those that take the same bytes, in one program or in several, are looked at once.

    memories = StageMemories(mesh, travel)
    memories(cut, index, is_split)    # what `StageMemory.of_stage` says of that stage

A model of repeated blocks has stages of as many blocks, and a planner weighs the same layouts with
many schedules and places of states: of all these stages few differ, and the others are not cut out
of the program.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import count
from typing import ClassVar

from torch import fx

from autopar.cost.bucket_prices import BucketConfig
from autopar.cost.gather_groups import numbered_modules
from autopar.mesh import Mesh
from autopar.passes.flow import Flow
from autopar.passes.stages import StageCut, cut_stage
from autopar.pipeline.memory.step_memory import StageMemory
from autopar.program.equality import constants_of
from autopar.strategies.node_info import RecomputeRegion, info
from autopar.strategies.results import tensors_of

MOST_KNOWN = 1 << 18  # calls of stages, before they are forgotten


class StageMemories:
    """Computes the memory of stages on one mesh, once for stages that are alike."""

    _forms: ClassVar[dict[Hashable, int]] = {}
    _numbers: ClassVar[Iterator[int]] = count()
    # With the parameters that a stage had when it was looked at.
    _seen: ClassVar[dict[Hashable, tuple[StageMemory, list[str]]]] = {}
    _size: ClassVar[int] = 0  # of all keys

    def __init__(
        self, mesh: Mesh, travel: BucketConfig, known: dict[str, int] | None = None
    ) -> None:
        """`known`: the forms of calls by name, as far as programs with these calls were looked at;
        what is found is added."""
        self.mesh, self.travel = mesh, travel
        self._known = {} if known is None else known

    def __call__(self, cut: StageCut, index: int, is_split: bool) -> StageMemory:
        cls = type(self)
        if cls._size > MOST_KNOWN:
            cls._forms.clear()
            cls._seen.clear()
            cls._size = 0
        described, names = self._described(cut, index)
        key = self.mesh, self.travel, is_split, cut.counts, described
        if key not in cls._seen:
            stage = cut_stage(cut, index)
            seen = StageMemory.of_stage(stage, self.mesh, self.travel, is_split=is_split)
            cls._seen[key] = seen, names
            cls._size += len(stage.graph.nodes)
        memory, before = cls._seen[key]
        return memory if before == names else _renamed(memory, dict(zip(before, names)))

    def _described(self, cut: StageCut, index: int) -> tuple[Hashable, list[str]]:
        """Return a key of a stage without names (inputs, calls, results), and the names of its
        parameters."""
        flow, (start, end) = cut.flow, cut.bounds(index)
        received, names = flow.crossing(start), list[str]()
        places = {node: place for place, node in enumerate(received)}
        regions: dict[RecomputeRegion, int] = {}
        modules: dict[str, int] = {}
        found: list[Hashable] = [self._form_of(node, flow) for node in received]
        own = flow.made_in(start, end)
        for node in own:
            places[node] = len(places)
            known = info(node)
            found.append(4 * self._form_of(node, flow) + 2 * known.remade + known.dropped)
            for region in (known.region, *known.away):
                if region is not None and region not in regions:
                    regions[region] = len(regions)
                    found.append(region.how)
            found.append(-1 if known.region is None else regions[known.region])
            if known.away:
                found.append(tuple((regions[one], axes) for one, axes in known.away.items()))
            # A change of a buffer, which is done apart, may read what other stages make.
            found += [places.get(value, -1) for value in node.all_input_nodes]
            if known.places is not None:
                names.append(node.name)
                readers = cut.readers[node]
                found.append(len(readers.holders) > 1 if readers.is_own else readers)
                inside = numbered_modules(known.origin[1])
                found.append(tuple(modules.setdefault(one, len(modules)) for one in inside))
        sent = [places[node] for node in flow.crossing(end)]
        statistics = [places[node] for node in own if node in flow.statistics]
        ends = (
            len(received),
            tuple(sent),
            flow.loss is not None and cut.outputs[flow.loss] == index,
            tuple(statistics),
        )
        return (ends, *found), names

    def _form_of(self, node: fx.Node, flow: Flow) -> int:
        """Return a number for all that the bytes of a call follow from, besides which calls it
        reads and what of it runs again."""
        if node.name not in self._known or info(node).places is not None:
            form = _form(node), flow.weight_inputs.get(node)
            cls = type(self)
            if form not in cls._forms:
                cls._forms[form] = next(cls._numbers)
            self._known[node.name] = cls._forms[form]
        return self._known[node.name]


def _form(node: fx.Node) -> Hashable:
    """Return all that the bytes of a call follow from, besides which calls it reads."""
    known = info(node)
    constants = constants_of(node)
    target = node.target if node.op == "call_function" else node.op
    if node.op == "output":
        return target, constants
    values = tuple((tuple(value.shape), value.dtype, value.stride()) for value in tensors_of(node))
    kernels = known.start_of, known.joint
    return (
        target,
        constants,
        values,
        (known.type, known.movement, known.strategy),
        tuple(kernel and (kernel.strategy, kernel.name) for kernel in kernels),
        (known.saved, known.saves_output, known.differentiable, known.on_host),
        (known.places, known.learns, known.state_bytes, known.sync, known.pending),
        known.origin[0] if node.op == "placeholder" else "",
        known.parts,
    )


def _renamed(memory: StageMemory, names: dict[str, str]) -> StageMemory:
    learned = {names[name]: size for name, size in memory.learned.items()}
    return replace(memory, learned=learned, at_once=frozenset(names[n] for n in memory.at_once))
