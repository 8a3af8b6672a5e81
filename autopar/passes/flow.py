"""Flow: a rewritten program as a row of activations, and the values that cross each point of it.

    inputs, constants ──▶ free        made again in each stage that reads them (masks, positions)
    parameters        ──▶ weights     made again in each stage that reads them (casts, gathers)
    both              ──▶ activations in one stage, sent on to the stages that read them
    changed buffers   ──▶ updates     done once a step, from the statistics of all micro-batches

A value that depends on inputs and on parameters is an activation. They stand in the order of the
graph. A cut point is a number i: between activation i - 1 and activation i.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.origins import taken_copies
from autopar.errors import InvalidInput
from autopar.program.equal_blocks import EqualBlocks
from autopar.program.place_map import PlaceMap
from autopar.strategies import traits_of
from autopar.strategies.node_info import WeightInputs, info
from autopar.strategies.results import is_result, tensor_arguments, values_of

Integers = NDArray[np.int64]
T = TypeVar("T")


class _ReadSpans(NamedTuple):
    """Hold values with the first and the last position at which each is made or read."""

    nodes: list[fx.Node]
    first: Integers
    last: Integers


def _fact(compute: Callable[[Flow], T]) -> cached_property[T]:
    """Cache a fact of a flow, which may be known from the flow that it is a copy of."""
    name = compute.__name__

    @wraps(compute)
    def get(flow: Flow) -> T:
        return flow.known[name] if name in flow.known else compute(flow)

    return cached_property(get)


@dataclass(frozen=True)
class Flow:
    """Describe a program whose results are outputs, the loss among them, then new buffers."""

    graph: fx.Graph
    mutations: tuple[str, ...]  # the buffers' placeholders, in the order of the results
    loss: int | None = 0  # which of the outputs; None: nothing is differentiated
    known: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # facts

    def moved_to(self, graph: fx.Graph) -> Flow:
        """Return the flow of a copy of the graph: the same calls, perhaps with other marks."""
        to = {node.name: node for node in graph.nodes}

        def moved(rows: Mapping[fx.Node, T]) -> dict[fx.Node, T]:
            return {to[node.name]: row for node, row in rows.items()}

        facts = {
            "updates": frozenset(to[node.name] for node in self.updates),
            "activations": tuple(to[node.name] for node in self.activations),
            "position": moved(self.position),
            "read_at": moved(self.read_at),
            "held_at": moved(self.held_at),
            "spans": moved(self.spans),
            "sources": moved(self.sources),
            "weight_inputs": moved(self.weight_inputs),
            "crossings": self.crossings,
            "place_map": self.place_map,
            "_last_reader": moved(self._last_reader),
        }
        return Flow(graph, self.mutations, self.loss, facts)

    @cached_property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Return the outputs of the program, without the new buffers."""
        return self._results[: len(self._results) - len(self.mutations)]

    @cached_property
    def new_values(self) -> dict[str, fx.Node]:
        """Return the new value of each changed buffer, by its placeholder."""
        return dict(zip(self.mutations, self._results[len(self.outputs) :]))

    @_fact
    def updates(self) -> frozenset[fx.Node]:
        """Return the operators that change buffers from other values that a step changes.
        Shifts do not count: a movement of a buffer may be the shift of an activation, too."""
        needed_now, behind_outputs = ancestors(self.outputs, _evolving), ancestors(self.outputs)
        changing = set(self.mutations)
        updates: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            reads = [v for v in _evolving(node) if v in updates or v.name in changing]
            if not reads:
                continue
            if node in needed_now or (node in behind_outputs and "input" in self.sources[node]):
                raise InvalidInput(
                    "a buffer that a step changes is not read by the same step in a pipeline",
                    got=f"{reads[0].name} is read by {node.name}",
                    remedy="no pipeline, or change the buffer outside of forward",
                    source=info(node).source,
                )
            updates.add(node)
        return frozenset(updates)

    @_fact
    def activations(self) -> tuple[fx.Node, ...]:
        """Return the operators whose results are activations, each standing for all its values."""
        wanted = [*self.outputs, *(v for node in self.updates for v in node.all_input_nodes)]
        live = ancestors([*wanted, *self.new_values.values()]) - self.updates
        return tuple(
            node
            for node in self.graph.nodes
            if node in live
            and node.op == "call_function"
            and not is_result(node)
            and self._is_activation(node)
        )

    @_fact
    def position(self) -> dict[fx.Node, int]:
        """Return the index of each activation's operator among the activations."""
        return {
            value: index
            for index, node in enumerate(self.activations)
            for value in dict.fromkeys([node, *values_of(node)])
        }

    @_fact
    def place_map(self) -> PlaceMap:
        """Return where the activations stand in the program that this one stands for."""
        return PlaceMap.of(self.activations)

    @cached_property
    def statistics(self) -> tuple[fx.Node, ...]:
        """Return the activations that updates read."""
        last = set(self.new_values.values())
        return tuple(
            node for node in self.position if node in last or node.users.keys() & self.updates
        )

    @_fact
    def read_at(self) -> dict[fx.Node, tuple[int, ...]]:
        """Return the places at which each value is made that the results need.

        An activation is made at its own position; what is made again where it is read, at those
        that read it; an update at the last of its statistics, or without any at those of its
        readers. An output that is made again is read at none."""
        last = dict(self.position)
        for node in self.graph.nodes:
            made_of = [last[value] for value in node.all_input_nodes if value in last]
            if made_of and node in self.updates:
                last[node] = max(made_of)
        read_at: dict[fx.Node, set[int]] = {}
        changes = {*self.new_values.values()}
        for node in reversed(self.graph.nodes):
            if node in self.position:
                read_at[node] = {last[node]}
                continue
            readers = [
                user
                for user in node.users
                if user.op != "output" and (node not in last or user in self.position)
            ]
            extra = [{last.get(node, 0)}] if node in last or node in changes else []
            if places := set().union(*extra, *(read_at.get(user, ()) for user in readers)):
                read_at[node] = places
        return {node: tuple(sorted(places)) for node, places in read_at.items()}

    @_fact
    def held_at(self) -> dict[fx.Node, tuple[int, ...]]:
        """Return the positions that need each parameter and buffer; the first if none does."""
        return {
            node: self.read_at.get(node, (0,))
            for node in self.graph.nodes
            if node.op == "placeholder" and info(node).origin[0] in ("parameter", "buffer")
        }

    @_fact
    def spans(self) -> dict[fx.Node, tuple[int, int]]:
        """Return where in the graph each parameter is first and last read; -1 if it is not."""
        index = {node: at for at, node in enumerate(self.graph.nodes)}
        spans = {}
        for node in self.held_at:
            if info(node).places is not None:
                reader_indices = [index[user] for user in [node, *taken_copies(node)][-1].users]
                spans[node] = min(reader_indices, default=-1), max(reader_indices, default=-1)
        return spans

    @_fact
    def equal_blocks(self) -> EqualBlocks:
        """Return the equal blocks of the program."""
        return EqualBlocks.of(self.graph)

    def read_by(self, new_value: fx.Node) -> set[fx.Node]:
        """Return the statistics that the new value of one buffer is made of."""

        def reads(node: fx.Node) -> list[fx.Node]:
            return node.all_input_nodes if node in self.updates else []

        return {node for node in ancestors([new_value], reads) if node in self.position}

    def made_in(self, start: int, end: int) -> list[fx.Node]:
        """Return what a stage between two cut points makes, or holds, in the order of the graph."""
        nodes, first, last = self._made_spans
        near = (nodes[at] for at in np.flatnonzero((first < end) & (last >= start)).tolist())
        return [node for node in near if any(start <= at < end for at in self.read_at[node])]

    @cached_property
    def _made_spans(self) -> _ReadSpans:
        """Return the nodes that are made, in the order of the graph."""
        nodes = [node for node in self.graph.nodes if node in self.read_at]
        places = [self.read_at[node] for node in nodes]
        first, last = (np.array([row[end] for row in places], np.int64) for end in (0, -1))
        return _ReadSpans(nodes, first, last)

    def crossing(self, point: int) -> list[fx.Node]:
        """Return the activations before a cut point that are read after it, in their order."""
        nodes, at, last = self._read_spans
        return [nodes[index] for index in np.flatnonzero((at < point) & (last >= point)).tolist()]

    @cached_property
    def _read_spans(self) -> _ReadSpans:
        """Return the activations, from where each is made to its last reader."""
        at = np.array(list(self.position.values()), np.int64)
        last = np.array([self._last_reader[node] for node in self.position], np.int64)
        return _ReadSpans(list(self.position), at, last)

    @_fact
    def crossings(self) -> list[int]:
        """Return the number of values that cross each cut point."""
        change = [0] * (len(self.activations) + 2)
        for node, last in self._last_reader.items():
            change[self.position[node] + 1] += 1
            change[last + 1] -= 1
        return list(itertools.accumulate(change[:-1]))

    @cached_property
    def _results(self) -> tuple[fx.Node, ...]:
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @_fact
    def _last_reader(self) -> dict[fx.Node, int]:
        return {
            node: max((self.position.get(user, index) for user in node.users), default=index)
            for node, index in self.position.items()
        }

    @_fact
    def sources(self) -> dict[fx.Node, frozenset[str]]:
        """Return what each value is made of: "parameter", "input", both or neither."""
        sources: dict[fx.Node, frozenset[str]] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                kind = info(node).origin[0]
                sources[node] = frozenset({kind} & {"parameter", "input"})
            else:
                sources[node] = frozenset().union(*(sources[v] for v in node.all_input_nodes))
        return sources

    def is_weight(self, node: fx.Node) -> bool:
        """Return whether a value takes a gradient and is made of parameters alone."""
        return self.sources[node] == {"parameter"} and info(node).differentiable

    @_fact
    def weight_inputs(self) -> dict[fx.Node, WeightInputs]:
        """Return the inputs of activations whose gradients a split backward puts off.
        These are weights of products, and computed weights of norms, biases and tables."""
        weight_inputs = {}
        known_products: dict[tuple[int, ...], bool] = {}  # by calls, which equal blocks share
        for node in self.activations:
            calls = info(node).calls
            key = tuple(map(id, calls))
            if key not in known_products:
                rules = [facts.rule for facts, _ in calls]
                known_products[key] = any(rule.flops > 0 and rule.is_contraction for rule in rules)
            is_product = known_products[key]
            positions = tuple(
                position
                for position, value in enumerate(tensor_arguments(node))
                if self.is_weight(value) and (is_product or value.op == "call_function")
            )
            if positions and info(node).differentiable and info(node).joint is None:
                weight_inputs[node] = WeightInputs(positions, is_product)
        return weight_inputs

    def weights_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs of an activation whose gradients a split backward takes later."""
        inputs = tensor_arguments(node)
        return [inputs[position] for position in self.weight_inputs[node].positions]

    def _is_activation(self, node: fx.Node) -> bool:
        sources = self.sources[node]
        return "input" in sources and ("parameter" in sources or info(node).differentiable)


def flow_of(captured: Captured, graph: fx.Graph, *, learns: bool = True) -> Flow:
    """Return the flow of a rewritten program, which is differentiated if it `learns`."""
    placeholders = {name: placeholder for placeholder, name in captured.buffers.items()}
    mutations = tuple(placeholders[name] for name in captured.mutations)
    return Flow(graph, mutations, captured.differentiated[0] if learns else None)


def _evolving(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of an operator without the one whose age does not matter."""
    shift = traits_of(node).shift
    values: list[fx.Node] = []
    args = [argument for index, argument in enumerate(node.args) if index != shift]
    fx.map_arg((args, node.kwargs), values.append)
    return values


def ancestors(
    nodes: Iterable[fx.Node],
    reads: Callable[[fx.Node], list[fx.Node]] = lambda node: node.all_input_nodes,
) -> set[fx.Node]:
    """Return the nodes and all that they are made of, as `reads` says of each."""
    visited: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            pending.extend(reads(node))
    return visited


def copy_subgraph(
    source: fx.Graph, wanted: Iterable[fx.Node], boundary: Iterable[fx.Node] = ()
) -> fx.Graph:
    """Copy the part of `source` that makes `wanted`, with `boundary` as placeholders."""
    boundary = dict.fromkeys(boundary)
    needed = ancestors(
        [*wanted, *boundary], lambda node: [] if node in boundary else node.all_input_nodes
    )
    remaining = [node for node in source.nodes if node in needed and node not in boundary]
    placeholders = [node for node in remaining if node.op == "placeholder"]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in [*placeholders, *boundary, *(n for n in remaining if n.op != "placeholder")]:
        copy = copies[node] = _copied(graph, node, copies, as_placeholder=node in boundary)
        if copy.op == "placeholder":
            for fact in ("movement", "region", "remade", "dropped"):  # a boundary value is whole
                copy.meta.pop(fact, None)
    return graph


def _copied(
    graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], *, as_placeholder: bool
) -> fx.Node:
    """Copy one node to the end of `graph`."""
    if as_placeholder and node.op != "placeholder":
        copy = graph.placeholder(node.name)
    else:
        # Arguments that are set later are not searched for symbols, which takes longest.
        copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        if node.args:
            copy.args = fx.map_arg(node.args, copies.__getitem__)
        if node.kwargs:
            copy.kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
    if copy.name != node.name:
        copy.name = node.name
    copy.meta.update(node.meta)
    return copy
