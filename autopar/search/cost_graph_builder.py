"""Cost graph builder: the cost graph of a captured model on one mesh.

An operator is a node: its strategies, their seconds and the bytes they keep. A parameter is a node:
the layouts it may be stored in, and the bytes of its states. A value with several readers gets a
node for the layout in which they share it, so that the movement there is paid once. Readers that
work on cut data ask for a gradient that is summed: they get a second node. An edge costs the
shortest redistribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.base.garbage_collection import deferred_collection
from autopar.capture.captured import Captured
from autopar.capture.listing import operator_of
from autopar.capture.marker import ANNOTATE
from autopar.capture.origins import (
    copied_parameter,
    is_of_parameters,
    made_without_inputs,
    summed_shares,
)
from autopar.capture.regions import runs
from autopar.cluster import Cluster
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.footprint import HELD_KINDS, parameter_bytes
from autopar.cost.saved_tensors import SavedTensors
from autopar.cost.state_price import OverlappedWork
from autopar.errors import InvalidInput
from autopar.layout import ParameterPlacement, Parts, Placement
from autopar.mesh import Mesh
from autopar.program.place_map import repeated_blocks
from autopar.search.candidates import Candidates, NodeClasses, storage_states, uncut
from autopar.search.constraints import Constraints
from autopar.search.counted_bytes import Use, bytes_of, count_moments, uses_of_input
from autopar.search.edge_costs import DeferredReduction, EdgeCosts, EdgeQuery
from autopar.search.overlapped_work import ReaderWork, overlapped_seconds
from autopar.search.prologue import find_prologue, is_whole
from autopar.search.reshard_table import Placements
from autopar.solver.cost_graph import CostGraph
from autopar.states import WHOLE, States
from autopar.strategies.node_info import RecomputeRegion, info
from autopar.strategies.results import maker, result_index, values_of

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Variable:
    """Describe a node of the cost graph: an operator, or a value that is stored or shared."""

    number: int
    states: Placements  # of an operator those of its first result
    candidates: Candidates | None = None  # of operators
    uses: tuple[Use, ...] = ()  # of a group of readers
    reader: str = ""  # of one reader, which is an operator

    def chosen(self, choice: Sequence[int]) -> Placement:
        """Return the placement that a choice of strategies gives it."""
        return self.states[choice[self.number]]


@dataclass
class MeshCostGraph:
    """Hold the cost graph on one mesh, with the meaning of its nodes."""

    captured: Captured
    mesh: Mesh
    constraints: Constraints
    graph: CostGraph = field(default_factory=CostGraph)
    operators: dict[str, Variable] = field(default_factory=dict)
    parameters: dict[str, Variable] = field(default_factory=dict)
    values: dict[str, Variable] = field(default_factory=dict)
    groups: dict[str, list[Variable]] = field(default_factory=dict)
    prologue: Collection[str] = ()  # operators that are whole on every rank, and no question
    slack: float = 0.0  # seconds that a plan could save with a prologue that is cut, at most
    alone: float = 0.0  # seconds that its operators take at least, if nothing moves
    fixed_bytes: float = 0.0  # of inputs and buffers


@dataclass
class CostGraphBuilder:
    """Build the cost graph of `captured` on `mesh`, with `constraints` kept and `states` cut.

    `captured` is the program of one of the step's `microbatches`; the costs are those of one.
    Operators are priced first: their seconds `alone` may be enough to rule the mesh out."""

    captured: Captured
    mesh: Mesh
    cluster: Cluster
    constraints: Constraints
    microbatches: int = 1
    states: States = WHOLE
    at_other_moment: bool = field(default=False, kw_only=True)  # than is counted first

    @deferred_collection()
    def __post_init__(self) -> None:
        price = ClusterPrice(self.cluster, self.mesh, self.states.buffer_bytes)
        device = self.cluster.device
        self.classes = NodeClasses(self.captured, self.mesh, device, price, self.microbatches)
        fixed, names = self.constraints.parameters, self.captured.parameters
        parts = {node: fixed[name].layout.parts for node, name in names.items() if name in fixed}
        self.edges = EdgeCosts(
            self.mesh, self.cluster, price, self.microbatches, self.states, parts
        )
        self.built = MeshCostGraph(self.captured, self.mesh, self.constraints)
        self.nodes = {node.name: node for node in self.captured.graph.nodes}
        self.uses: dict[str, list[Use]] = {}
        self._shared: dict[tuple, Placements] = {}
        self._stored: dict[tuple, tuple[Placements, Array]] = {}
        self._candidates: dict[str, tuple[Candidates, Array]] = {}
        self.producers: dict[str, Variable] = {}  # of values, by name
        self.single_reader_uses: dict[str, list[Use]] = {}  # of inputs, by their only readers
        self.of_weights = made_without_inputs(self.captured.graph, self.captured)
        self.shares = summed_shares(self.captured.graph, self.of_weights)
        of_parameters = partial(is_of_parameters, captured=self.captured)
        decided, self.regions = self.constraints.recompute, dict[str, RecomputeRegion]()
        self.runs = runs(self.captured.graph, decided, of_parameters) if decided else []
        for number, (name, nodes) in enumerate(self.runs):
            region = RecomputeRegion(name, decided[name], number)
            self.regions |= {node.name: region for node in nodes}
        calls = self.captured.operators
        annotated_values = {*self.constraints.values, *self.constraints.bound}
        self.prologue = find_prologue(self.captured, calls, self.classes, annotated_values)
        self.built.prologue, self.built.slack = self.prologue.names, self.prologue.slack
        for node in calls:
            self._find_candidates(node)
        facts = {name: candidates.facts for name, (candidates, _) in self._candidates.items()}
        regions = [nodes for _, nodes in self.runs]
        self.saved = SavedTensors(facts, self.uses, self.regions, regions)
        self.remade = set[str]().union(*map(self.saved.remade, regions))
        self.counts_activations, self.counts_gradients = count_moments(
            self.captured, self.uses, self.saved, self.microbatches, other=self.at_other_moment
        )
        for node in calls:
            cost = self._cost(node.name)
            self.built.alone += float(cost.min()) * info(node).count

    @deferred_collection()
    def run(self) -> MeshCostGraph:
        """Add all nodes and edges, and return the graph."""
        # Nodes stand in the order of the program, so that repeated blocks can be found.
        for node in self.captured.graph.nodes:
            if node.op == "placeholder" and node.name in self.captured.parameters:
                self._add_parameter(node)
            elif node.op == "placeholder":
                self._add_bytes(node)
                if node.name in self.uses:
                    self._add_input(node)
            elif node.name in self.captured.classes:
                self._add_operator(node)
            if len(self.uses.get(node.name, ())) > 1:
                self._add_shares(node)
        for block in repeated_blocks(self.nodes.values()):
            self.built.graph.repeat(self._numbers(block), info(block[0]).count)
        for name, uses in self.uses.items():
            self._connect(self.nodes[name], uses)
        self._add_results()
        return self.built

    def _numbers(self, block: Iterable[fx.Node]) -> list[int]:
        """Return the nodes of the cost graph that stand for those of a block."""
        graph, numbers = self.built, list[int]()
        for name in (node.name for node in block):
            for variables in (graph.operators, graph.parameters, graph.values):
                numbers += [variables[name].number] if name in variables else []
            numbers += [group.number for group in graph.groups.get(name, ())]
        return numbers

    # Nodes

    def _add_parameter(self, node: fx.Node) -> None:
        name, known = self.captured.parameters[node.name], info(node)
        constraint = self.constraints.parameters.get(name)
        shape = tuple(known.val.shape)
        gradient_flags = known.differentiable, known.learns
        key = shape, known.val.dtype, *gradient_flags, constraint and constraint.layout, known.parts
        if key not in self._stored:
            states = (
                Placements([Placement(constraint.layout)])
                if constraint is not None
                else self._stored_at(shape, known.parts)
            )
            places = [self.edges.places(node, state.layout) for state in states]
            held_bytes = [self._held(node, at) for at in places]
            self._stored[key] = states, np.array(held_bytes)
        states, memory = self._stored[key]
        number = self.built.graph.add_node(self.edges.zeros(len(states)), memory, name=name)
        self.producers[node.name] = self.built.parameters[node.name] = Variable(number, states)

    def _stored_at(self, shape: tuple[int, ...], parts: Parts) -> Placements:
        """Return the layouts of a parameter that no annotation fixes."""
        states = storage_states(shape, self.mesh, parts)
        batch_axis = self.constraints.batch_axis
        return Placements(state for state in states if batch_axis not in state.layout.axes)

    def _held(self, node: fx.Node, places: ParameterPlacement) -> float:
        """Return the bytes of a parameter at the moment that is counted."""
        by_kind = dict(zip(HELD_KINDS, parameter_bytes(node, places, self.mesh)))
        return float(sum(by_kind.values()) - (0 if self.counts_gradients else by_kind["gradients"]))

    def _find_candidates(self, node: fx.Node) -> None:
        """Find the candidates of an operator, and who reads what."""
        candidates = self._allowed(node, self.classes.candidates(node))
        if node.name in self.prologue.names:
            candidates = candidates.taken([uncut(candidates)])
        cost = candidates.cost
        for position, value in enumerate(self.classes.inputs(node)):
            is_free = value.name not in self.constraints.inputs
            if is_free and is_whole(value, self.captured, self.prologue):
                cost = cost + self.edges.from_whole(candidates, position, value)
            else:
                use = Use(value.name, node.name, position)
                self.uses.setdefault(value.name, []).append(use)
        self._candidates[node.name] = candidates, cost

    def _cost(self, name: str) -> Array:
        """Return the seconds of each candidate of an operator, recomputation included."""
        candidates, cost = self._candidates[name]
        recompute = candidates.forward + candidates.inside_forward
        return cost + recompute if name in self.remade else cost

    def _add_operator(self, node: fx.Node) -> None:
        candidates, cost = self._candidates[node.name][0], self._cost(node.name)
        region = self.regions.get(node.name)
        is_full = region is not None and region.is_full
        memory = candidates.extra * (self.counts_activations and not is_full)
        if self.counts_activations and self.saved.keeps_output(node.name):
            for value in values_of(node):
                states = candidates.results[result_index(value)]
                memory = memory + self.edges.bytes(value, states)
        for piece in self.single_reader_uses.get(node.name, ()):
            states = candidates.inputs[piece.position]
            memory = memory + self.edges.bytes(self.nodes[piece.value], states)
        number = self.built.graph.add_node(
            self.edges.same(cost, "cost"), self.edges.same(memory, "memory"), name=node.name
        )
        variable = Variable(number, candidates.outputs, candidates)
        self.built.operators[node.name] = variable
        for value in values_of(node):
            states = candidates.results[result_index(value)]
            self.producers[value.name] = replace(variable, states=states)

    def _add_bytes(self, node: fx.Node) -> None:
        """Count the bytes of an input or a buffer: a piece, if its only reader wants one.
        With several readers the smallest piece is a lower bound."""
        uses, size = uses_of_input(self.captured, node), bytes_of(node) * info(node).count
        if uses is not None and len(uses) == 1:
            (use,) = uses
            self.single_reader_uses.setdefault(use.reader, []).append(use)
        else:
            self.built.fixed_bytes += size / (self.mesh.size if uses else 1)

    def _add_input(self, node: fx.Node) -> None:
        """Add an input that is fixed, or wants a gradient: then it is whole on every rank."""
        fixed, ndim = self.constraints.inputs.get(node.name), info(node).val.ndim
        placement = Placement.whole(ndim) if fixed is None else Placement(fixed.layout)
        self.producers[node.name] = self._share(node.name, Placements([placement]))

    def _add_shares(self, value: fx.Node) -> None:
        """Add a node for the layout that the readers of a value share, and one for each group."""
        uses = self.uses[value.name]
        is_parameter = value.name in self.built.parameters
        groups: dict[bool, list[Use]] = {}
        for use in uses:
            groups.setdefault(is_parameter or self._sums(use), []).append(use)
        base = self._states(self.producers[value.name].states, uses, pending=False)
        self.built.values[value.name] = self._share(f"{value.name} value", base)
        for members in groups.values():
            if len(members) > 1:
                states = self._states(base, members, pending=True)
                group = self._share(f"{value.name} group", states, tuple(members))
                self.built.groups.setdefault(value.name, []).append(group)

    def _share(self, name: str, states: Placements, uses: tuple[Use, ...] = ()) -> Variable:
        """Add a node for a layout that costs nothing in itself."""
        number = self.built.graph.add_node(self.edges.zeros(len(states)), name=name)
        return Variable(number, states, uses=uses)

    def _states(self, base: Placements, uses: Sequence[Use], *, pending: bool) -> Placements:
        """Return the `base` states and those that readers want, once for all equal blocks."""
        wants = [self._candidates[r.reader][0].inputs[r.position] for r in uses]
        key = (base, *wants, pending)
        if key not in self._shared:
            states = dict.fromkeys(base)
            for state in itertools.chain(*wants):
                states[state if pending else Placement(state.layout)] = None
            self._shared[key] = Placements(states)
        return self._shared[key]

    def _add_results(self) -> None:
        """Add what the output wants: no partial sums; new values of buffers whole."""
        output = self.captured.graph.output_node()
        results = output.args[0]
        first_mutation = len(results) - len(self.captured.mutations)  # type: ignore[arg-type]
        for index, value in enumerate(results):  # type: ignore[arg-type]
            if value.op != "call_function":
                continue
            variable = self.producers[value.name]
            learns = index in self.captured.differentiated
            table, seconds = self.edges.seconds(value, learns=learns)
            costs = np.zeros(len(variable.states))
            for number, state in enumerate(variable.states):
                target = Placement(state.layout.with_partial(()))
                if index >= first_mutation:
                    target = Placement.whole(table.ndim)
                costs[number] = seconds[table.index[state], table.index[target]]
            if costs.any():
                sink = self.built.graph.add_node(self.edges.zeros(1), name=f"{value.name} out")
                costs = self.edges.same(costs[:, None], "out")
                self.built.graph.add_edge(variable.number, sink, costs)

    def _allowed(self, node: fx.Node, candidates: Candidates) -> Candidates:
        """Return the candidates that keep the annotations, and leave the batch its axis."""
        constraint = self.constraints.values.get(node.name) if node.target is ANNOTATE else None
        bound = self.constraints.bound.get(node.name, {})
        if constraint is None and not bound:
            if not self.constraints.batch_axis or node.name in self.prologue.names:
                return candidates
            agrees = partial(self.constraints.agrees, node.name)
            allowed = [i for i, strategy in enumerate(candidates.strategies) if agrees(strategy)]
            return candidates.taken(allowed) if allowed else candidates
        for offered in (candidates, self.classes.candidates(node, in_all_orders=True)):
            allowed = [
                index
                for index in range(len(offered.strategies))
                if (constraint is None or offered.outputs[index].layout == constraint.layout)
                and all(
                    offered.inputs[position][index].layout == w.layout
                    for position, w in bound.items()
                )
            ]
            if allowed:
                return offered.taken(allowed)
        request = constraint or next(iter(bound.values()))
        raise InvalidInput(
            "an annotation asks for what no strategy of the operator gives",
            got=f"{request.layout} for {operator_of(node)} in {info(node).module or 'the model'}",
            remedy="cut dims that the operator can cut, and shared dims the same way",
            source=request.source,
        )

    # Edges

    def _connect(self, value: fx.Node, uses: Sequence[Use]) -> None:
        """Add edges from the producer of a value to its readers, by way of what they share."""
        is_deferred = value in self.of_weights or is_of_parameters(value, self.captured)
        deferred = DeferredReduction() if is_deferred else None
        producer, shared = self.producers[value.name], self.built.values.get(value.name)
        groups = self.built.groups.get(value.name, [])
        grouped = {use for group in groups for use in group.uses}
        ungrouped = [use for use in uses if use not in grouped]
        # Readers that may ask for the sum of the gradient share an edge: its states count there.
        summed = deferred and DeferredReduction(self.shares.get(value, ()))
        asking = [use for use in uses if self._sums(use)] or uses
        if shared is None:
            self._join(value, producer, uses[0], summed, "always")
            return
        is_kept = self._keeps(uses)
        # A value that several readers keep is counted once: where their ways part.
        storing = [group for group in groups if self._keeps(group.uses)]
        at_producer = self._keeps(ungrouped) or len(storing) > 1 or not self._makes(value)
        self._link(value, producer, shared, deferred, "always" if at_producer and is_kept else "")
        for group in groups:
            kept_when = "" if group not in storing else "moved" if at_producer else "always"
            sums = summed if asking[0] in group.uses else deferred
            self._link(value, shared, group, sums, kept_when)
        for group in groups:
            for use in group.uses:
                self._join(value, group, use, deferred, "moved")
        for use in ungrouped:
            sums = summed if use in asking else deferred
            self._join(value, shared, use, sums, "moved")

    def _keeps(self, uses: Sequence[Use]) -> bool:
        """Return whether some reader keeps the value for backward."""
        return self.counts_activations and any(
            self.saved.keeps(r.value, r.reader, r.position)
            and copied_parameter(self.nodes[r.value]) is None
            for r in uses
        )

    def _sums(self, use: Use) -> bool:
        """Return whether a reader may ask for a summed gradient: it lacks some factor."""
        facts = self._candidates[use.reader][0].facts
        if facts is None:
            return False
        factors = {factor for dim in facts.rule.inputs[use.position] for factor in dim}
        return not set(facts.rule.cuttable) <= factors

    def _link(
        self,
        value: fx.Node,
        first: Variable,
        second: Variable,
        deferred: DeferredReduction | None,
        kept_when: str,
    ) -> None:
        """Add an edge between two layouts of one value, kept for backward as `EdgeQuery` has it.
        What the uses of the second compute overlaps with the gradient's way back."""
        kept_when = "moved" if kept_when and not self._makes(value) else kept_when
        readers = [
            ReaderWork(self.nodes[r.reader], self._candidates[r.reader][0], r.position)
            for r in second.uses
        ]
        parts = overlapped_seconds(value, readers, second.states, is_deferred=bool(deferred))
        forward, backward = (self.edges.same(part, "beside") for part in parts)
        uses = second.uses or self.uses[value.name]
        names = [second.reader] if second.reader else [use.reader for use in uses]
        overlapped = OverlappedWork(
            forward, backward, any(info(self.nodes[name]).learns for name in names)
        )
        regions = {self.regions[name].name if name in self.remade else None for name in names}
        again = deferred is None and len(regions) == 1 and None not in regions
        start, end = first.states, second.states
        query = EdgeQuery(value, start, end, deferred, kept_when, overlapped, again)
        cost, memory = self.edges.table(query)
        self.built.graph.add_edge(first.number, second.number, cost, memory)

    def _join(
        self,
        value: fx.Node,
        first: Variable,
        use: Use,
        deferred: DeferredReduction | None,
        kept_when: str,
    ) -> None:
        """Add an edge from a layout of a value to one reader."""
        wants = self._candidates[use.reader][0].inputs[use.position]
        # What several readers share is hidden on the way to all of them.
        overlapping = () if first.uses and not deferred else (use,)
        number = self.built.operators[use.reader].number
        reader = Variable(number, wants, uses=overlapping, reader=use.reader)
        kept_when = kept_when if self._keeps([use]) else ""
        self._link(value, first, reader, deferred, kept_when)

    def _makes(self, value: fx.Node) -> bool:
        """Return whether a value has memory that nothing else has counted yet."""
        if value.op == "placeholder" or self.saved.keeps_output(maker(value).name):
            return False
        facts = self._candidates[maker(value).name][0].facts
        return facts is None or not facts.is_view
