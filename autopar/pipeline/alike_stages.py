"""Alike stages: those that take the same bytes, in one program or in several, are looked at once.

    memories = StageMemories(mesh, travel)
    memories(stage, is_split)           # what `StageMemory.of_stage` says of it

A model of repeated blocks has stages of as many blocks, and a planner weighs the same layouts with
many schedules and places of states: of all these stages few differ.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import ClassVar

from torch import fx

from autopar.cost.buckets import Travel
from autopar.cost.groups import numbered_modules
from autopar.mesh import Mesh
from autopar.passes.stages import Stage
from autopar.pipeline.step_memory import StageMemory
from autopar.strategies.node_info import Region, info
from autopar.strategies.results import tensors_of

MOST_KNOWN = 1 << 18  # calls of stages, before they are forgotten


class StageMemories:
    """What stages take on one mesh."""

    _forms: ClassVar[dict[Hashable, int]] = {}
    # With the placeholders that a stage had when it was looked at.
    _seen: ClassVar[dict[Hashable, tuple[StageMemory, list[str]]]] = {}
    _size: ClassVar[int] = 0  # of all keys

    def __init__(self, mesh: Mesh, travel: Travel) -> None:
        self.mesh, self.travel = mesh, travel

    def __call__(self, stage: Stage, is_split: bool) -> StageMemory:
        cls = type(self)
        if cls._size > MOST_KNOWN:
            cls._forms.clear()
            cls._seen.clear()
            cls._size = 0
        results = len(stage.sends), stage.has_loss, stage.learns_sent, len(stage.statistics)
        key = self.mesh, self.travel, is_split, results, self._described(stage.graph)
        names = [node.name for node in stage.graph.find_nodes(op="placeholder")]
        if key not in cls._seen:
            seen = StageMemory.of_stage(stage, self.mesh, is_split, self.travel)
            cls._seen[key] = seen, names
            cls._size += len(stage.graph.nodes)
        memory, before = cls._seen[key]
        return memory if before == names else _renamed(memory, dict(zip(before, names)))

    def _described(self, graph: fx.Graph) -> Hashable:
        """The calls of a stage one after another, whatever their names are."""
        places: dict[fx.Node, int] = {}
        regions: dict[Region, int] = {}
        modules: dict[str, int] = {}
        found: list[Hashable] = []

        def number(region: Region) -> int:
            return regions.setdefault(region, len(regions))

        for node in graph.nodes:
            places[node] = len(places)
            region = info(node).region
            away = tuple((number(one), axes) for one, axes in info(node).away.items())
            form = _form(node), away, region and region.how
            found.append(self._forms.setdefault(form, len(self._forms)))
            found.append(-1 if region is None else number(region))
            found += [places[value] for value in node.all_input_nodes]
            if info(node).places is not None:
                inside = numbered_modules(info(node).origin[1])
                found.append(tuple(modules.setdefault(one, len(modules)) for one in inside))
        return tuple(found)


def _form(node: fx.Node) -> Hashable:
    """All that the bytes of a call follow from, besides which calls it reads."""
    known, inputs = info(node), node.all_input_nodes
    names = {value: f"%{place}" for place, value in enumerate(inputs)}
    constants = repr(fx.map_arg((node.args, node.kwargs), names.__getitem__))
    target = node.target if node.op == "call_function" else node.op
    if node.op == "output":
        return target, constants
    values = tuple((tuple(value.shape), value.dtype, value.stride()) for value in tensors_of(node))
    start = known.start_of
    return (
        target,
        constants,
        values,
        (known.type, known.movement, known.strategy),
        start and start[1:],
        (known.saved, known.saves_output, known.differentiable, known.on_host),
        (known.remade, known.dropped, known.weight_inputs),
        (known.places, known.state_bytes, known.sync, known.pending),
        known.origin[0] if node.op == "placeholder" else "",
    )


def _renamed(memory: StageMemory, names: dict[str, str]) -> StageMemory:
    learned = {names[name]: size for name, size in memory.learned.items()}
    return replace(memory, learned=learned, at_once=frozenset(names[n] for n in memory.at_once))
