"""Stages: a rewritten program becomes one program for each stage of a pipeline.

    split_stages(StageCut.at(flow, ["add", "add_8", "add_16"], placement), mesh)    # three stages

`Plan.program` calls it after `rewrite`; it is not in `PASSES`. A stage receives the activations
that cross its start and returns those that cross its end: one that a later stage reads passes
through those between. What is made of inputs and constants alone (masks, positions), or of
parameters alone, is made again where it is read. A tied parameter so belongs to several stages, and
the runtime sums its gradient over them. Changes of buffers leave the stages: they are done once a
step, in the order of the micro-batches, from the statistics that a stage also returns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.capture.verifier import verify
from autopar.errors import InvalidInput
from autopar.layout import Placement
from autopar.mesh import Mesh
from autopar.passes.flow import Flow, ancestors, copy_subgraph
from autopar.passes.recompute_marks import stay_received
from autopar.strategies import traits_of
from autopar.strategies.node_info import ParameterReaders, info


@dataclass(frozen=True)
class StageCut:
    """Cut a program into stages at certain points."""

    flow: Flow
    points: tuple[int, ...]  # the starts of the stages, and the end
    placement: tuple[tuple[int, ...], ...]  # of each pipe, the places that hold its stages
    # The stages that hold each parameter and buffer, by its name in the model, if another program
    # has decided that.
    held: Mapping[str, tuple[int, ...]] | None = None
    # For how many blocks each repeated span of the flow stands, if not as its nodes say.
    counts: tuple[int, ...] = ()

    @classmethod
    def at(
        cls, flow: Flow, starts: Sequence[str], placement: tuple[tuple[int, ...], ...]
    ) -> StageCut:
        """Cut into stages that begin at these activations; the first at the first of all."""
        places = {node.name: place for node, place in flow.position.items()}
        points = 0, *(places[name] for name in starts[1:]), len(flow.activations)
        return cls(flow, points, placement)

    @property
    def count(self) -> int:
        """Return the number of stages."""
        return len(self.points) - 1

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the start and the end of a stage, as positions of activations."""
        return self.points[index], self.points[index + 1]

    def stage_at(self, position: int) -> int:
        """Return the stage that makes the activation at a position."""
        return bisect_right(self.points, position, hi=self.count) - 1

    @cached_property
    def stages(self) -> dict[fx.Node, tuple[int, ...]]:
        """Return the stages that read each parameter and buffer; unread ones lie with the first."""
        if self.held is not None:
            return {node: self.held[info(node).origin[1]] for node in self.flow.held_at}
        return {
            node: tuple(sorted({self.stage_at(place) for place in places}))
            for node, places in self.flow.held_at.items()
        }

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """Return the stage that gives each output: its operator's, or its parameters' first."""
        flow = self.flow
        return tuple(
            self.stage_at(flow.position[node]) if node in flow.position else self._first_with(node)
            for node in flow.outputs
        )

    def _first_with(self, node: fx.Node) -> int:
        """Return the first stage that holds all parameters and buffers that a value is made of."""
        holders = [self.stages[source] for source in ancestors([node]) if source in self.stages]
        common = set(range(self.count)).intersection(*holders)
        if not common:
            raise InvalidInput(
                "what an output is made of is held by one stage",
                got=f"{node.name}, made of parameters or buffers of several",
                remedy="give them one by one, or no pipeline",
                source=info(node).source,
            )
        return min(common)

    @cached_property
    def readers(self) -> dict[fx.Node, ParameterReaders]:
        """Return the stages that read each parameter, and the places that hold these."""
        return {
            node: ParameterReaders(self.stages[node], self._holders[self.stages[node]], *span)
            for node, span in self.flow.spans.items()
        }

    def shared(self, index: int) -> tuple[Hashable, ...]:
        """Return whether others hold the stage, too, and its parameters that others hold."""
        shared = ((name, readers) for name, readers in self._shared if index in readers.stages)
        return len(self._holders_of((index,))) > 1, *shared

    @cached_property
    def _shared(self) -> list[tuple[str, ParameterReaders]]:
        return [
            (node.name, readers) for node, readers in self.readers.items() if not readers.is_own
        ]

    @cached_property
    def _holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {stages: self._holders_of(stages) for stages in {*self.stages.values()}}

    def _holders_of(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({places[stage] for places in self.placement for stage in stages}))


@dataclass(frozen=True)
class Stage:
    """Hold one stage's program: its results are `sends`, some outputs, `statistics`."""

    index: int
    graph: fx.Graph
    receives: tuple[str, ...]  # placeholders, the activations of the stages before
    sends: tuple[str, ...]  # what the next stage receives
    outputs: tuple[int, ...]  # those of the program that it gives
    loss: int | None  # which of these is differentiated
    statistics: tuple[str, ...]  # what the update of its buffers reads
    update: fx.Graph | None  # from buffers and statistics to new buffers, by placeholder

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """Return the nodes of the program by name."""
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def learns_received(self) -> tuple[bool, ...]:
        """Return a flag for each received value: whether it takes a gradient."""
        return tuple(info(self.nodes[name]).differentiable for name in self.receives)

    @cached_property
    def learns_sent(self) -> tuple[bool, ...]:
        """Return a flag for each sent value: whether it takes a gradient."""
        return tuple(info(self.nodes[name]).differentiable for name in self.sends)

    def holds(self, kind: str) -> list[str]:
        """Return the names in the model of this stage's parameters or buffers, as `kind` says."""
        graphs = [self.graph, *([self.update] if self.update is not None else [])]
        nodes = [node for graph in graphs for node in graph.nodes if node.op == "placeholder"]
        return list(dict.fromkeys(info(n).origin[1] for n in nodes if info(n).origin[0] == kind))


def split_stages(cut: StageCut, mesh: Mesh) -> tuple[Stage, ...]:
    """Return the verified stages of a program."""
    flow, stages = cut.flow, []
    for index in range(cut.count):
        stage = cut_stage(cut, index)
        verify(stage.graph, "moved", mesh)
        stages.append(stage)
    _all_updated(flow, stages)
    return tuple(stages)


def cut_stage(cut: StageCut, index: int) -> Stage:
    """Return the stage with this index."""
    flow, (start, end) = cut.flow, cut.bounds(index)
    computed = [node for node, position in flow.position.items() if start <= position < end]
    received, sent = flow.crossing(start), flow.crossing(end)
    statistics = [node for node in computed if node in flow.statistics]
    outputs = tuple(number for number, stage in enumerate(cut.outputs) if stage == index)
    results = [*sent, *(flow.outputs[number] for number in outputs), *statistics]
    graph = copy_subgraph(flow.graph, [*results, *computed], received)
    copies = {node.name: node for node in graph.nodes}
    if cut.counts:
        flow.place_map.set_counts(graph.nodes, cut.counts)
    for node in received:
        info(copies[node.name]).origin = ("received", node.name)
    stay_received(graph)
    for node, readers in cut.readers.items():
        if index in readers.stages and node.name in copies:
            info(copies[node.name]).readers = readers
    for node in computed:
        if node in flow.weight_inputs:
            info(copies[node.name]).weight_inputs = flow.weight_inputs[node]
    _end(graph, [copies[node.name] for node in results])
    return Stage(
        index,
        graph,
        receives=tuple(node.name for node in received),
        sends=tuple(node.name for node in sent),
        outputs=outputs,
        loss=outputs.index(flow.loss) if flow.loss in outputs else None,
        statistics=tuple(node.name for node in statistics),
        update=_update(flow, set(statistics), is_first=index == 0),
    )


def _update(flow: Flow, statistics: set[fx.Node], *, is_first: bool) -> fx.Graph | None:
    """Return the changes of buffers from one stage's statistics; in the first also from none."""
    changed = {}
    for buffer, value in flow.new_values.items():
        statistics_read = flow.read_by(value)
        if statistics_read <= statistics and (statistics_read or is_first):
            changed[buffer] = value
    if not changed:
        return None
    graph = copy_subgraph(flow.graph, changed.values(), statistics)
    copies = {node.name: node for node in graph.nodes}
    for node in statistics:
        info(copies[node.name]).origin = ("received", node.name)
    _read_shifts_as_they_were(graph)
    _end(graph, [copies[node.name] for node in changed.values()])
    info(graph.output_node()).buffers = tuple(changed)
    return graph


def _read_shifts_as_they_were(graph: fx.Graph) -> None:
    """Let batch norms' sums go with the running mean that the step began with.
    What a shift is made of (a movement of the running mean) is made again from that."""
    nodes = list(graph.nodes)
    places = {node: place for node in nodes if (place := traits_of(node).shift) is not None}
    shifts = [node.args[place] for node, place in places.items()]
    shift_sources = ancestors([shift for shift in shifts if isinstance(shift, fx.Node)])
    first_call = next((node for node in nodes if node.op == "call_function"), None)
    originals: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in places:
            place = places[node]
            shift = fx.map_arg(node.args[place], originals.__getitem__)
            node.args = (*node.args[:place], shift, *node.args[place + 1 :])
        if node not in shift_sources:
            continue
        if node.op == "placeholder" and info(node).origin[0] == "buffer":
            assert first_call is not None
            with graph.inserting_before(first_call):
                originals[node] = graph.placeholder(f"{node.name}_before")
            originals[node].meta = {**node.meta, "origin": ("before", info(node).origin[1])}
        elif node.op == "placeholder":
            originals[node] = node
        else:
            with graph.inserting_after(node):
                originals[node] = graph.node_copy(node, originals.__getitem__)
            originals[node].meta = dict(node.meta)
    for node in reversed(nodes):
        if node in shift_sources and node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _all_updated(flow: Flow, stages: Iterable[Stage]) -> None:
    done = {
        buffer
        for stage in stages
        if stage.update is not None
        for buffer in info(stage.update.output_node()).buffers
    }
    for buffer in flow.mutations:
        if buffer not in done:
            raise InvalidInput(
                "a buffer is changed from the values of one stage",
                got=f"{buffer} is changed from several",
                remedy="other stages (shard(module, stage=...)), or no pipeline",
            )


def _end(graph: fx.Graph, results: list[fx.Node]) -> None:
    output = graph.output(tuple(results))
    info(output).end(results)
    info(output).wants = tuple(Placement(info(node).type.layout) for node in results)
