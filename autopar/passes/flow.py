"""Flow: a rewritten program as one row of activations, and what crosses each point of it.

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
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.origins import taken_copies
from autopar.cost.repeats import EqualBlocks
from autopar.errors import InvalidInput
from autopar.strategies import traits_of
from autopar.strategies.node_info import WeightInputs, info
from autopar.strategies.results import is_result, tensor_arguments, values_of

Integers = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True)
class Flow:
    """The parts of one program whose results are outputs, the loss among them, then new buffers."""

    graph: fx.Graph
    mutations: tuple[str, ...]  # the buffers' placeholders, in the order of the results
    loss: int | None = 0  # which of the outputs; None: nothing is differentiated

    def moved_to(self, graph: fx.Graph) -> Flow:
        """The same of a copy of the graph: of the same calls, of which it may say other things."""
        to = {node.name: node for node in graph.nodes}

        def moved(rows: Mapping[fx.Node, T]) -> dict[fx.Node, T]:
            return {to[node.name]: row for node, row in rows.items()}

        made = Flow(graph, self.mutations, self.loss)
        vars(made).update(
            updates=frozenset(to[node.name] for node in self.updates),
            activations=tuple(to[node.name] for node in self.activations),
            position=moved(self.position),
            read_at=moved(self.read_at),
            held_at=moved(self.held_at),
            spans=moved(self.spans),
            sources=moved(self.sources),
            weight_inputs=moved(self.weight_inputs),
            crossings=self.crossings,
            _last_reader=moved(self._last_reader),
        )
        return made

    @cached_property
    def outputs(self) -> tuple[fx.Node, ...]:
        return self._results[: len(self._results) - len(self.mutations)]

    @cached_property
    def new_values(self) -> dict[str, fx.Node]:
        """The new value of each changed buffer, by its placeholder."""
        return dict(zip(self.mutations, self._results[len(self.outputs) :]))

    @cached_property
    def updates(self) -> frozenset[fx.Node]:
        """The operators that read what a step changes, as more than a shift, to change buffers.

        What is made of a buffer alone (a movement) may be the shift of an activation besides."""
        needed, made = ancestors(self.outputs, _evolving), ancestors(self.outputs)
        changing = set(self.mutations)
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            reads = [v for v in _evolving(node) if v in found or v.name in changing]
            if not reads:
                continue
            if node in needed or (node in made and "input" in self.sources[node]):
                raise InvalidInput(
                    "a buffer that a step changes is not read by the same step in a pipeline",
                    got=f"{reads[0].name} is read by {node.name}",
                    remedy="no pipeline, or change the buffer outside of forward",
                    source=info(node).source,
                )
            found.add(node)
        return frozenset(found)

    @cached_property
    def activations(self) -> tuple[fx.Node, ...]:
        """Operators, each with all the values that it gives."""
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

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        """Where the operator of each activation stands among them."""
        return {
            value: index
            for index, node in enumerate(self.activations)
            for value in dict.fromkeys([node, *values_of(node)])
        }

    @cached_property
    def statistics(self) -> tuple[fx.Node, ...]:
        """The activations that updates read."""
        last = set(self.new_values.values())
        return tuple(
            node for node in self.position if node in last or node.users.keys() & self.updates
        )

    @cached_property
    def read_at(self) -> dict[fx.Node, tuple[int, ...]]:
        """The positions at which each value is made that the results need.

        An activation is made at its own; what is made again where it is read, at those that read
        it; an update at the last of its statistics, without any at those of its readers. An output
        that is made again is read at none.
        """
        last = dict(self.position)
        for node in self.graph.nodes:
            made_of = [last[value] for value in node.all_input_nodes if value in last]
            if made_of and node in self.updates:
                last[node] = max(made_of)
        found: dict[fx.Node, set[int]] = {}
        changes = {*self.new_values.values()}
        for node in reversed(self.graph.nodes):
            if node in self.position:
                found[node] = {last[node]}
                continue
            readers = [
                user
                for user in node.users
                if user.op != "output" and (node not in last or user in self.position)
            ]
            places = [{last.get(node, 0)}] if node in last or node in changes else []
            if at := set().union(*places, *(found.get(user, ()) for user in readers)):
                found[node] = at
        return {node: tuple(sorted(places)) for node, places in found.items()}

    @cached_property
    def held_at(self) -> dict[fx.Node, tuple[int, ...]]:
        """The positions that need each parameter and buffer; what none needs lies at the first."""
        return {
            node: self.read_at.get(node, (0,))
            for node in self.graph.nodes
            if node.op == "placeholder" and info(node).origin[0] in ("parameter", "buffer")
        }

    @cached_property
    def spans(self) -> dict[fx.Node, tuple[int, int]]:
        """The places in the graph of the first and last reader of each parameter; -1: none."""
        place = {node: at for at, node in enumerate(self.graph.nodes)}
        found = {}
        for node in self.held_at:
            if info(node).places is not None:
                reading = [place[user] for user in [node, *taken_copies(node)][-1].users]
                found[node] = min(reading, default=-1), max(reading, default=-1)
        return found

    @cached_property
    def repeats(self) -> EqualBlocks:
        """The equal blocks of the program."""
        return EqualBlocks.of(self.graph)

    def read_by(self, new_value: fx.Node) -> set[fx.Node]:
        """The statistics that the new value of one buffer is made of."""

        def reads(node: fx.Node) -> list[fx.Node]:
            return node.all_input_nodes if node in self.updates else []

        return {node for node in ancestors([new_value], reads) if node in self.position}

    def made_in(self, start: int, end: int) -> list[fx.Node]:
        """What a stage between two cut points makes, or holds, in the order of the graph."""
        nodes, places, first, last = self._places
        near = np.flatnonzero((first < end) & (last >= start)).tolist()
        return [nodes[at] for at in near if any(start <= place < end for place in places[at])]

    @cached_property
    def _places(self) -> tuple[list[fx.Node], list[tuple[int, ...]], Integers, Integers]:
        """The nodes that have places, in the order of the graph; these, the first and the last."""
        nodes = [node for node in self.graph.nodes if node in self.read_at]
        places = [self.read_at[node] for node in nodes]
        first, last = (np.array([row[end] for row in places], np.int64) for end in (0, -1))
        return nodes, places, first, last

    def crossing(self, point: int) -> list[fx.Node]:
        """The activations before a cut point that are read after it, in their order."""
        nodes, at, last = self._reach
        return [nodes[index] for index in np.flatnonzero((at < point) & (last >= point)).tolist()]

    @cached_property
    def _reach(self) -> tuple[list[fx.Node], Integers, Integers]:
        """Of each activation its position and that of its last reader."""
        at = np.array(list(self.position.values()), np.int64)
        last = np.array([self._last_reader[node] for node in self.position], np.int64)
        return list(self.position), at, last

    @cached_property
    def crossings(self) -> list[int]:
        """How many values cross each cut point."""
        change = [0] * (len(self.activations) + 2)
        for node, last in self._last_reader.items():
            change[self.position[node] + 1] += 1
            change[last + 1] -= 1
        return list(itertools.accumulate(change[:-1]))

    @cached_property
    def _results(self) -> tuple[fx.Node, ...]:
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @cached_property
    def _last_reader(self) -> dict[fx.Node, int]:
        return {
            node: max((self.position.get(user, index) for user in node.users), default=index)
            for node, index in self.position.items()
        }

    @cached_property
    def sources(self) -> dict[fx.Node, frozenset[str]]:
        """Of what each value is made: "parameter", "input"."""
        found: dict[fx.Node, frozenset[str]] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                kind = info(node).origin[0]
                found[node] = frozenset({kind} & {"parameter", "input"})
            else:
                found[node] = frozenset().union(*(found[v] for v in node.all_input_nodes))
        return found

    def is_weight(self, node: fx.Node) -> bool:
        """Whether a value takes a gradient and is made of parameters alone."""
        return self.sources[node] == {"parameter"} and info(node).differentiable

    @cached_property
    def weight_inputs(self) -> dict[fx.Node, WeightInputs]:
        """What a split backward puts off.

        These are products. Of norms, biases and tables it is what is itself made of parameters.
        """
        found, products = {}, dict[tuple[int, ...], bool]()  # by calls, which others have too
        for node in self.activations:
            calls = info(node).calls
            key = tuple(map(id, calls))
            if key not in products:
                rules = [facts.rule for facts, _ in calls]
                products[key] = any(rule.flops > 0 and rule.is_contraction for rule in rules)
            product = products[key]
            positions = tuple(
                position
                for position, value in enumerate(tensor_arguments(node))
                if self.is_weight(value) and (product or value.op == "call_function")
            )
            if positions and info(node).differentiable and info(node).joint is None:
                found[node] = WeightInputs(positions, product)
        return found

    def weights_of(self, node: fx.Node) -> list[fx.Node]:
        """The inputs of an activation whose gradients a split backward takes later."""
        read = tensor_arguments(node)
        return [read[position] for position in self.weight_inputs[node].positions]

    def _is_activation(self, node: fx.Node) -> bool:
        sources = self.sources[node]
        return "input" in sources and ("parameter" in sources or info(node).differentiable)


def flow_of(captured: Captured, graph: fx.Graph, learns: bool = True) -> Flow:
    """The flow of the rewritten program of `captured`, which is differentiated if it `learns`."""
    placeholders = {name: placeholder for placeholder, name in captured.buffers.items()}
    mutations = tuple(placeholders[name] for name in captured.mutations)
    return Flow(graph, mutations, captured.differentiated[0] if learns else None)


def _evolving(node: fx.Node) -> list[fx.Node]:
    """The inputs of an operator without the one whose age does not matter."""
    shift = traits_of(node).shift
    values: list[fx.Node] = []
    args = [argument for index, argument in enumerate(node.args) if index != shift]
    fx.map_arg((args, node.kwargs), values.append)
    return values


def ancestors(
    nodes: Iterable[fx.Node],
    reads: Callable[[fx.Node], list[fx.Node]] = lambda node: node.all_input_nodes,
) -> set[fx.Node]:
    """The nodes and all that they are made of, as `reads` says of each."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(reads(node))
    return found


def copy_subgraph(
    source: fx.Graph, wanted: Iterable[fx.Node], given: Iterable[fx.Node] = ()
) -> fx.Graph:
    """A copy of the part of `source` that makes `wanted`, with `given` as placeholders."""
    given = dict.fromkeys(given)
    needed = ancestors(
        [*wanted, *given], lambda node: [] if node in given else node.all_input_nodes
    )
    kept = [node for node in source.nodes if node in needed and node not in given]
    placeholders = [node for node in kept if node.op == "placeholder"]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in [*placeholders, *given, *(n for n in kept if n.op != "placeholder")]:
        copy = copies[node] = _copied(graph, node, copies, is_given=node in given)
        if copy.op == "placeholder":
            for fact in ("movement", "region", "remade", "dropped"):  # what is given is there
                copy.meta.pop(fact, None)
    return graph


def _copied(
    graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], is_given: bool
) -> fx.Node:
    """A copy of one node at the end of `graph`, a placeholder if it is given there."""
    if is_given and node.op != "placeholder":
        copy = graph.placeholder(node.name)
    else:
        # Arguments that are there later are not looked through for symbols, which takes longest.
        copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        if node.args:
            copy.args = fx.map_arg(node.args, copies.__getitem__)
        if node.kwargs:
            copy.kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
    if copy.name != node.name:
        copy.name = node.name
    copy.meta.update(node.meta)
    return copy
