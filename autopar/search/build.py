"""Build: the cost graph of a captured model on one mesh.

An operator is a node: its strategies, what each takes and keeps. A parameter is a node: the layouts
it may be stored in, and the bytes of its states. A value with several readers gets a node for the
layout in which they share it, and one more for readers that work on cut data and so ask for a
gradient that is summed: what they share is moved once. An edge costs the shortest redistribution.

What needs no gradient and follows from the model's inputs alone (positions, masks, shifted labels)
is computed whole on every rank, where that costs next to nothing: every piece of it is then at hand
everywhere. `Built.slack` says how much a plan without this restriction could save at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.marker import ANNOTATE
from autopar.cluster import Cluster
from autopar.collectives.redistribution import State
from autopar.cost.price import ClusterPrice
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.search.candidates import Candidates, Kinds, state_of_whole
from autopar.search.graph import CostGraph
from autopar.search.moves import Moves, moves, state_of
from autopar.search.wishes import Wishes

Array = NDArray[np.float64]

# What an optimizer keeps for each parameter besides it and its gradient: Adam's two moments.
OPTIMIZER_COPIES = 2
# The part of all computation that running the prologue whole on every rank may add.
MOST_SLACK = 2e-3


@dataclass(frozen=True)
class Reading:
    """One tensor input of one operator: the value, the operator, which of its inputs."""

    value: str
    reader: str
    position: int


@dataclass
class Variable:
    """What a node of the cost graph decides."""

    number: int
    kind: str  # "operator", "parameter", "value" (shared layout), "group" (shared by some readers)
    name: str  # of the operator, placeholder or value
    states: tuple[State, ...] = ()  # of all but operators
    candidates: Candidates | None = None  # of operators
    readings: tuple[Reading, ...] = ()  # of a group


@dataclass
class Built:
    """A cost graph and what its nodes mean."""

    graph: CostGraph
    variables: list[Variable] = field(default_factory=list)
    operators: dict[str, Variable] = field(default_factory=dict)
    parameters: dict[str, Variable] = field(default_factory=dict)
    values: dict[str, Variable] = field(default_factory=dict)
    groups: dict[str, list[Variable]] = field(default_factory=dict)
    slack: float = 0.0  # seconds that a plan with a cut prologue could be faster, at most


def build(captured: Captured, mesh: Mesh, cluster: Cluster, wishes: Wishes) -> Built:
    """The cost graph of `captured` on `mesh`, with `wishes` kept."""
    return _Builder(captured, mesh, cluster, wishes).run()


class _Builder:
    def __init__(
        self, captured: Captured, mesh: Mesh, cluster: Cluster, wishes: Wishes
    ) -> None:
        self.captured, self.mesh, self.cluster, self.wishes = captured, mesh, cluster, wishes
        self.price = ClusterPrice(cluster, mesh)
        self.kinds = Kinds(mesh, cluster.device, self.price)
        self.built = Built(CostGraph())
        self.nodes = {node.name: node for node in captured.graph.nodes}
        self.readings: dict[str, list[Reading]] = {}
        self._arrays: dict[tuple, Array] = {}
        self._stored: dict[tuple, tuple[tuple[State, ...], Array]] = {}
        self._alive: list[object] = []  # what `_arrays` knows by id
        self._offers: dict[str, tuple[Candidates, Array]] = {}
        self.inputs: dict[str, Variable] = {}
        self.prologue: set[str] = set()

    def run(self) -> Built:
        calls = [node for node in self.captured.graph.nodes if node.op == "call_function"]
        self._find_prologue(calls)
        for node in calls:
            self._look_at(node)
        # Nodes stand in the order of the program, so that repeated blocks can be found.
        for node in self.captured.graph.nodes:
            if node.op == "placeholder" and node.name in self.captured.parameters:
                self._add_parameter(node)
            elif node.op == "placeholder" and node.name in self.readings:
                self._add_input(node)
            elif node.op == "call_function":
                self._add_operator(node)
            if len(self.readings.get(node.name, ())) > 1:
                self._add_shares(node)
        for name, readings in self.readings.items():
            self._connect(self.nodes[name], readings)
        self._add_results()
        return self.built

    # Nodes

    def _add_parameter(self, node: fx.Node) -> None:
        name = self.captured.parameters[node.name]
        value = node.meta["val"]
        shape = tuple(value.shape)
        wish = self.wishes.parameters.get(name)
        key = (shape, value.dtype, node.meta["differentiable"], wish and wish.layout)
        if key not in self._stored:
            table = moves(self.mesh, len(shape))
            states = (
                (state_of(wish.layout),)
                if wish is not None
                else tuple(s for s in _storage(shape, self.mesh))
            )
            numbers = [table.index[state] for state in states]
            copies = 2 + OPTIMIZER_COPIES if node.meta["differentiable"] else 1
            memory = table.elements(shape)[numbers] * value.dtype.itemsize * copies
            self._stored[key] = states, memory
        states, memory = self._stored[key]
        number = self.built.graph.add_node(self._zeros(len(states)), memory, name=name)
        variable = Variable(number, "parameter", node.name, states)
        self._register(variable)
        self.built.parameters[node.name] = variable

    def _find_prologue(self, calls: Sequence[fx.Node]) -> None:
        """Operators that all ranks run whole."""
        offers = [self.kinds.candidates(node).cost for node in calls]
        budget = MOST_SLACK * sum(float(cost.min()) for cost in offers)
        for node, cost in zip(calls, offers):
            asked = node.name in self.wishes.values or node.name in self.wishes.bound
            if asked or node.meta["differentiable"]:
                continue
            if all(self._is_whole(value) for value in self.kinds.inputs(node)):
                more = float(cost[_uncut(self.kinds.candidates(node))] - cost.min())
                if self.built.slack + more <= budget:
                    self.built.slack += more
                    self.prologue.add(node.name)

    def _is_whole(self, value: fx.Node) -> bool:
        """Whether every rank has all of a value anyway."""
        if value.op == "placeholder":
            is_parameter = value.name in self.captured.parameters
            return not is_parameter and not value.meta["differentiable"]
        return value.name in self.prologue

    def _look_at(self, node: fx.Node) -> None:
        """Find the candidates of an operator, and who reads what."""
        candidates = self._allowed(node, self.kinds.candidates(node))
        if node.name in self.prologue:
            candidates = candidates.taken([_uncut(candidates)])
        cost = candidates.cost
        for position, value in enumerate(self.kinds.inputs(node)):
            if self._is_whole(value):
                cost = cost + self._from_whole(candidates, position, value)
            else:
                reading = Reading(value.name, node.name, position)
                self.readings.setdefault(value.name, []).append(reading)
        self._offers[node.name] = candidates, cost

    def _add_operator(self, node: fx.Node) -> None:
        candidates, cost = self._offers[node.name]
        number = self.built.graph.add_node(
            self._same(cost, "cost"), self._same(candidates.extra, "memory"), name=node.name
        )
        variable = Variable(number, "operator", node.name, candidates.outputs, candidates)
        self._register(variable)
        self.built.operators[node.name] = variable

    def _add_input(self, node: fx.Node) -> None:
        """An input of the model that wants a gradient: whole on every rank."""
        whole = (state_of_whole(node.meta["val"].ndim),)
        number = self.built.graph.add_node(self._zeros(1), name=node.name)
        self.inputs[node.name] = Variable(number, "input", node.name, whole)
        self._register(self.inputs[node.name])

    def _add_shares(self, value: fx.Node) -> None:
        """A node for the layout that the readers of a value share, and one for each group."""
        readings = self.readings[value.name]
        is_parameter = value.name in self.built.parameters
        groups: dict[bool, list[Reading]] = {}
        for reading in readings:
            groups.setdefault(is_parameter or self._sums(reading), []).append(reading)
        states = self._producer(value).states
        base = tuple(dict.fromkeys([*states, *self._wanted(readings, pending=False)]))
        self.built.values[value.name] = self._share(value, "value", base, ())
        for members in groups.values():
            if len(members) > 1:
                states = tuple(dict.fromkeys([*base, *self._wanted(members, pending=True)]))
                group = self._share(value, "group", states, tuple(members))
                self.built.groups.setdefault(value.name, []).append(group)

    def _producer(self, value: fx.Node) -> Variable:
        built = self.built
        for variables in (built.parameters, built.operators, self.inputs):
            if value.name in variables:
                return variables[value.name]
        raise KeyError(value.name)

    def _add_results(self) -> None:
        """What the output wants: no partial sums; new values of buffers whole."""
        output = self.captured.graph.output_node()
        results = output.args[0]
        first_mutation = len(results) - len(self.captured.mutations)  # type: ignore[arg-type]
        for index, value in enumerate(results):  # type: ignore[arg-type,union-attr]
            variable = self.built.operators.get(value.name)  # type: ignore[union-attr]
            if variable is None:
                continue
            table, seconds = self._seconds(self.nodes[variable.name])
            costs = np.zeros(len(variable.states))
            for number, state in enumerate(variable.states):
                target = (state[0], (), ())
                if index >= first_mutation:
                    target = state_of_whole(table.ndim)
                costs[number] = seconds[table.index[state], table.index[target]]
            if costs.any():
                sink = self.built.graph.add_node(self._zeros(1), name=f"{variable.name} out")
                self._register(Variable(sink, "result", variable.name, (state_of_whole(0),)))
                self.built.graph.add_edge(variable.number, sink, self._same(costs[:, None], "out"))

    def _register(self, variable: Variable) -> None:
        assert variable.number == len(self.built.variables)
        self.built.variables.append(variable)

    def _allowed(self, node: fx.Node, candidates: Candidates) -> Candidates:
        """The candidates that keep the annotations."""
        wish = self.wishes.values.get(node.name) if node.target is ANNOTATE else None
        bound = self.wishes.bound.get(node.name, {})
        if wish is None and not bound:
            return candidates
        for offered in (candidates, self.kinds.candidates(node, every=True)):
            kept = [
                index
                for index in range(len(offered.strategies))
                if (wish is None or offered.outputs[index] == state_of(wish.layout))
                and all(
                    offered.inputs[position][index][:2] == state_of(w.layout)[:2]
                    for position, w in bound.items()
                )
            ]
            if kept:
                return offered.taken(kept)
        asked = wish or next(iter(bound.values()))
        raise InvalidInput(
            "an annotation asks for what no strategy of the operator gives",
            got=f"{asked.layout} for {node.target} in {node.meta['module'] or 'the model'}",
            remedy="cut dims that the operator can cut, and shared dims the same way",
            source=asked.source,
        )

    # Edges

    def _connect(self, value: fx.Node, readings: Sequence[Reading]) -> None:
        """Edges from the producer of a value to its readers, by way of what they share."""
        is_parameter = value.name in self.built.parameters
        producer, shared = self._producer(value), self.built.values.get(value.name)
        if shared is None:
            self._join(value, producer, readings[0], is_parameter)
            return
        self._link(value, producer, shared, is_parameter, saved=False)
        grouped = set()
        for group in self.built.groups.get(value.name, ()):
            saved = self._is_saved(group.readings)
            self._link(value, shared, group, is_parameter, saved)
            for reading in group.readings:
                grouped.add(reading)
                self._join(value, group, reading, is_parameter)
        for reading in readings:
            if reading not in grouped:
                self._join(value, shared, reading, is_parameter)

    def _sums(self, reading: Reading) -> bool:
        """Whether a reader may ask for a summed gradient: it has factors that this input lacks."""
        facts = self._offers[reading.reader][0].facts
        if facts is None:
            return False
        own = {factor for dim in facts.rule.inputs[reading.position] for factor in dim}
        return not set(facts.rule.cuttable) <= own

    def _wanted(self, readings: Sequence[Reading], pending: bool) -> list[State]:
        found: dict[State, None] = {}
        for reading in readings:
            candidates, _ = self._offers[reading.reader]
            for state in candidates.inputs[reading.position]:
                found[state if pending else (state[0], state[1], ())] = None
        return list(found)

    def _share(
        self, value: fx.Node, kind: str, states: tuple[State, ...], readings: tuple[Reading, ...]
    ) -> Variable:
        number = self.built.graph.add_node(
            self._zeros(len(states)), name=f"{value.name} {kind}"
        )
        variable = Variable(number, kind, value.name, states, readings=readings)
        self._register(variable)
        return variable

    def _link(
        self, value: fx.Node, first: Variable, second: Variable, is_parameter: bool, saved: bool
    ) -> None:
        """An edge between two layouts of one value."""
        key = ("link", self._type(value), first.states, second.states, is_parameter, saved)
        cost, memory = self._edge(key, value, first.states, second.states, is_parameter, saved)
        self.built.graph.add_edge(first.number, second.number, cost, memory)

    def _join(
        self,
        value: fx.Node,
        first: Variable,
        reading: Reading,
        is_parameter: bool,
    ) -> None:
        """An edge from a layout of a value to a reader."""
        reader = self.built.operators[reading.reader]
        assert reader.candidates is not None
        wants = reader.candidates.inputs[reading.position]
        facts = reader.candidates.facts
        saved = facts is not None and reading.position in facts.rule.saved.inputs
        saved = saved and any(facts.differentiable) if facts is not None else False
        key = ("join", self._type(value), first.states, wants, is_parameter, saved)
        cost, memory = self._edge(key, value, first.states, wants, is_parameter, saved)
        self.built.graph.add_edge(first.number, reader.number, cost, memory)

    def _is_saved(self, readings: Sequence[Reading]) -> bool:
        for reading in readings:
            facts = self._offers[reading.reader][0].facts
            if facts is not None and reading.position in facts.rule.saved.inputs:
                return True
        return False

    def _edge(
        self,
        key: tuple,
        value: fx.Node,
        first: tuple[State, ...],
        second: tuple[State, ...],
        is_parameter: bool,
        saved: bool,
    ) -> tuple[Array, Array | None]:
        if (key, "cost") not in self._arrays:
            table, seconds = self._seconds(value)
            rows = np.array([table.index[state] for state in first])
            columns = np.array([table.index[state] for state in second])
            cost = seconds[np.ix_(rows, columns)]
            same = table.data[rows][:, None] == table.data[columns][None, :]
            if is_parameter:
                # Summing gradients goes on behind backward, as far as the device lets it.
                cost = np.where(same, cost * (1 - self.cluster.device.overlap), cost)
            # From a pending copy nothing but that copy can be had.
            stuck = table.pending[rows][:, None] & (rows[:, None] != columns[None, :])
            cost = np.where(stuck, np.inf, cost)
            self._arrays[key, "cost"] = cost
            memory = table.elements(tuple(value.meta["val"].shape))[columns]
            memory = memory * value.meta["val"].dtype.itemsize * saved
            self._arrays[key, "memory"] = np.where(same, 0.0, memory[None, :]) if saved else cost
        memory = self._arrays[key, "memory"]
        return self._arrays[key, "cost"], (memory if saved and memory.any() else None)

    # Shared arrays

    def _from_whole(self, candidates: Candidates, position: int, value: fx.Node) -> Array:
        """What reading an input of the model takes: every rank has all of it."""
        key = ("whole", id(candidates), position, self._type(value))
        if key not in self._arrays:
            self._alive.append(candidates)
            table, seconds = self._seconds(value)
            start = table.index[state_of_whole(table.ndim)]
            columns = [table.index[state] for state in candidates.inputs[position]]
            self._arrays[key] = seconds[start, columns]
        return self._arrays[key]

    def _seconds(self, value: fx.Node) -> tuple[Moves, Array]:
        val = value.meta["val"]
        table = moves(self.mesh, val.ndim)
        seconds = table.seconds(
            tuple(val.shape), val.dtype.itemsize, self.price, value.meta["differentiable"]
        )
        return table, seconds

    def _type(self, value: fx.Node) -> tuple:
        val = value.meta["val"]
        return tuple(val.shape), val.dtype, value.meta["differentiable"]

    def _zeros(self, count: int) -> Array:
        return self._arrays.setdefault(("zeros", count), np.zeros(count))

    def _same(self, array: Array, kind: str) -> Array:
        """One object for equal arrays, so that the cost graph knows them again at once."""
        return self._arrays.setdefault((kind, array.shape, array.tobytes()), array)


def _uncut(candidates: Candidates) -> int:
    """The strategy that runs an operator whole on every rank."""
    return next(i for i, strategy in enumerate(candidates.strategies) if not strategy.axes)


def _storage(shape: tuple[int, ...], mesh: Mesh) -> list[State]:
    """The layouts in which a parameter may be stored: each axis cuts one dim, or none."""
    states = []
    for choice in itertools.product([None, *range(len(shape))], repeat=len(mesh.names)):
        dims: list[tuple[str, ...]] = [() for _ in shape]
        for axis, where in zip(mesh.names, choice):
            if where is not None:
                dims[where] += (axis,)
        if all(mesh.degree(axes) <= size for axes, size in zip(dims, shape)):
            states.append((tuple(dims), (), ()))
    return states
