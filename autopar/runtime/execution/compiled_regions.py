"""Compile regions of a rank's program by `torch.compile`, equal regions once.

A region is a group of blocks (`block_groups.py`), or the calls between two groups. It is a function
of its inputs, so equal groups are one function, and compile time does not grow with depth.

Movements are operators inside. Calls in `_NEVER_COMPILED`, split weight gradients and kernels that
ranks compute together stay outside, and end a region. Two rules also begin a new one. Compilers may
reorder calls, so each movement depends on the one before it (`_MovementChain`). The backward of a
region gives a gradient to all its inputs, so each result that the region reaches is reached by all
of them (`_GradientDemand`). Copies of parameters are gathered before their region, and gradients
are summed after its backward.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.collectives.eager_movements import defer_sum, finish_sum, start_sum
from autopar.passes.gathers import NO_GROUP, leave_copies, watch_readers
from autopar.runtime.execution.block_groups import MARKS, Together
from autopar.runtime.execution.region_calls import find_inputs
from autopar.strategies.kernels.attention.dropped_attention import attention
from autopar.strategies.kernels.experts.chosen_products import CHOSEN_PRODUCTS
from autopar.strategies.kernels.experts.expert_kernels import EXPERTS
from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.strategies.node_info import info

Function = Callable[..., Any]
# They wait for work, leave a sum to the caller, take some rows at a time, or look at counts.
_NEVER_COMPILED = (start_sum, finish_sum, defer_sum, attention, EXPERTS, CHOSEN_PRODUCTS)
_LEAST_CALLS = 2  # calls: fewer are not worth it


@dataclass(frozen=True)
class RegionCompiler:
    """Compiles the regions of a rank's programs, with options of `torch.compile`."""

    options: Mapping[str, Any]
    device: torch.device
    blocks: Sequence[str]  # of the model, that repeat
    together: Together
    functions: dict[Hashable, Function] = field(default_factory=dict)  # by the region's key

    def __call__(self, graph: fx.Graph, outside: Collection[fx.Node]) -> None:
        """Replace regions of a program by calls of compiled functions, without calls `outside`."""
        _place_results_behind_calls(graph)
        places = self.together.places(graph, self.blocks)
        for nodes in list(_cut_regions(graph, places, outside)):
            if len(nodes) >= _LEAST_CALLS:
                self._call(graph, nodes)

    def _call(self, graph: fx.Graph, nodes: list[fx.Node]) -> None:
        region = _CompilableRegion(nodes)
        body = region.make_body()
        if body.key not in self.functions:
            plain = fx.GraphModule({}, body.graph).forward
            compiled_plain = torch.compile(plain, **{"dynamic": False, **self.options})
            self.functions[body.key] = _QuietFirstCall(compiled_plain)
        function = self.functions[body.key]
        drawn = [torch.tensor(number, device=self.device) for number in body.draw_numbers]

        def compiled(*inputs: Tensor) -> Any:  # a function: fx wants its name
            return function(*inputs, *drawn)

        with graph.inserting_after(nodes[-1]):
            call = graph.call_function(compiled, tuple(region.inputs))
        outputs = [call]
        if len(region.outputs) > 1:
            with graph.inserting_after(call):
                outputs = [
                    graph.call_function(operator.getitem, (call, index))
                    for index in reversed(range(len(region.outputs)))
                ][::-1]
        for node, new in zip(region.outputs, outputs):
            new.meta = dict(node.meta)
            info(new).update(rule=None, movement=None, remade=False, copies=())
            info(new).region = info(nodes[0]).region
        info(call).update(
            region=info(nodes[0]).region,
            copies=tuple(sorted({group for node in nodes for group in info(node).copies})),
        )
        _move_copy_marks(graph, nodes, call, outputs)
        for node, new in zip(region.outputs, outputs):
            node.replace_all_uses_with(new)
        for node in reversed(nodes):
            graph.erase_node(node)


class _QuietFirstCall:
    """A compiled function without the warning of its first call.

    torch compiles it then, reads `.grad` of values that are no leaves, and warns of that."""

    def __init__(self, function: Function) -> None:
        self._function, self._is_compiled = function, False

    def __call__(self, *inputs: Tensor) -> Any:
        if self._is_compiled:
            return self._function(*inputs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            result = self._function(*inputs)
        self._is_compiled = True
        return result


@dataclass(frozen=True)
class _RegionBody:
    """The graph of a region, and what distinguishes it from other regions."""

    graph: fx.Graph
    key: Hashable  # equal for regions that compute the same
    draw_numbers: list[int]  # of its random draws, which are the last inputs of the graph


@dataclass(frozen=True)
class _CompilableRegion:
    """Neighbouring calls that become one function."""

    nodes: Sequence[fx.Node]

    @property
    def inputs(self) -> list[fx.Node]:
        return find_inputs(self.nodes)

    @property
    def outputs(self) -> list[fx.Node]:
        inside = set(self.nodes)

        def is_read(node: fx.Node) -> bool:
            return any(user not in inside and user.target not in MARKS for user in node.users)

        return [node for node in self.nodes if is_read(node)]

    def make_body(self) -> _RegionBody:
        """Return the region as a graph of its own, with its key and the numbers of its draws."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        key: list[Hashable] = []
        for value in self.inputs:
            copies[value] = graph.placeholder(f"x{len(copies)}")
            key.append(_input_signature(value))
        count = len(copies)
        numbers = _draw_numbers(self.nodes)
        drawn = {number: graph.placeholder(f"drawn{at}") for at, number in enumerate(numbers)}

        def lifted(argument: Any) -> Any:
            if isinstance(argument, DrawPlace):
                return argument._replace(number=drawn[argument.number])  # type: ignore
            return copies[argument] if isinstance(argument, fx.Node) else argument

        for node in self.nodes:
            args, kwargs = _map_leaves(node.args, lifted), _map_leaves(node.kwargs, lifted)
            target: Any = node.target
            copies[node] = graph.create_node(node.op, target, args, kwargs, f"x{len(copies)}")
            is_differentiable = info(node).differentiable
            key.append((target, _structure_key(args), _structure_key(kwargs), is_differentiable))
        results = [copies[node] for node in self.outputs]
        graph.output(tuple(results) if len(results) != 1 else results[0])
        names = tuple(result.name for result in results)
        return _RegionBody(graph, (count, *key, names), numbers)


def _input_signature(value: fx.Node) -> Hashable:
    """Return the type of an input, as far as compiled code depends on it."""
    layout = info(value).type.layout if "type" in value.meta else None
    val = info(value).val
    return val.dtype, tuple(val.shape), str(layout), info(value).differentiable


def _draw_numbers(nodes: Sequence[fx.Node]) -> list[int]:
    """Return the numbers of the random draws among some calls."""
    arguments = (a for node in nodes for a in (*node.args, *node.kwargs.values()))
    numbers = (a.number for a in arguments if isinstance(a, DrawPlace))
    return list(dict.fromkeys(number for number in numbers if isinstance(number, int)))


def _map_leaves(argument: Any, function: Callable[[Any], Any]) -> Any:
    """Return an argument with `function` applied to its leaves."""
    if isinstance(argument, DrawPlace | fx.Node):
        return function(argument)
    if isinstance(argument, list | tuple):
        items = [_map_leaves(item, function) for item in argument]
        is_named = hasattr(argument, "_fields")
        return type(argument)(*items) if is_named else type(argument)(items)
    if isinstance(argument, Mapping):
        return {name: _map_leaves(value, function) for name, value in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_map_leaves(end, function) for end in _slice_ends(argument)))
    return function(argument)


def _slice_ends(ends: slice) -> list[Any]:
    return [ends.start, ends.stop, ends.step]


def _structure_key(argument: Any) -> Hashable:
    """Return a key of an argument that is equal for equal arguments alone."""
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, list | tuple):
        return (type(argument), *map(_structure_key, argument))
    if isinstance(argument, Mapping):
        return tuple((name, _structure_key(value)) for name, value in argument.items())
    if isinstance(argument, slice):
        return slice, *map(_structure_key, _slice_ends(argument))
    return type(argument), repr(argument)


def _cut_regions(
    graph: fx.Graph, places: Mapping[fx.Node, Hashable], outside: Collection[fx.Node]
) -> Iterator[list[fx.Node]]:
    """Yield the runs of calls that become one function each, every one of a single place."""
    reached = _reached_results(graph)
    nodes: list[fx.Node] = []
    chain, demand = _MovementChain(), _GradientDemand(reached)
    current_place: Any = None
    for node in graph.nodes:
        if node.op == "placeholder" or node.target in MARKS:
            continue
        producer = _producer(node)
        place = places.get(producer), info(producer).region
        is_inside = _is_compilable(node, outside)
        is_same_place = is_inside and place == current_place
        if nodes and not (is_same_place and chain.accepts(node) and demand.accepts(node)):
            yield nodes
            nodes, chain, demand = [], _MovementChain(), _GradientDemand(reached)
        if is_inside:
            chain.add(node)
            demand.add(node)
            nodes.append(node)
            current_place = place
    if nodes:
        yield nodes


def _is_compilable(node: fx.Node, outside: Collection[fx.Node]) -> bool:
    if node.op != "call_function" or node in outside or node.target in _NEVER_COMPILED:
        return False
    if (producer := _producer(node)) is not node:
        return _is_compilable(producer, outside)
    if info(node).joint is not None:
        return False
    if info(node).on_host:
        return False
    region = info(node).region
    if region is None or region.is_full:
        return True
    return not region.is_by_policy and region.how.keep == "device"


def _producer(node: fx.Node) -> fx.Node:
    """Return the call of which a node is one result, or the node itself."""
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


class _MovementChain:
    """The movements of a region, each of which depends on the one before it, also in backward."""

    def __init__(self) -> None:
        self.last: fx.Node | None = None
        self.dependents: set[fx.Node] = set()  # nodes that depend on the last

    def accepts(self, node: fx.Node) -> bool:
        """Return whether the chain holds with one more call."""
        return info(node).movement is None or self.last is None or self._depends(node)

    def add(self, node: fx.Node) -> None:
        if info(node).movement is not None:
            self.last, self.dependents = node, {node}
        elif self._depends(node):
            self.dependents.add(node)

    def _depends(self, node: fx.Node) -> bool:
        has_backward = self.last is not None and info(self.last).differentiable
        return not self.dependents.isdisjoint(node.all_input_nodes) and (
            info(node).differentiable or not has_backward
        )


def _reached_results(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return for each value a bit set of the program's results whose backward reaches it."""
    reached = dict.fromkeys(graph.nodes, 0)
    results: Any = graph.output_node().args[0]
    for place, result in enumerate(results):
        reached[result] |= 1 << place
    for node in reversed(graph.nodes):
        if info(node).differentiable:
            for value in node.all_input_nodes:
                reached[value] |= reached[node]
    return reached


class _GradientDemand:
    """The results of the program that a region reaches, and those that all its inputs reach."""

    def __init__(self, reached: Mapping[fx.Node, int]) -> None:
        self._reached, self._nodes = reached, set[fx.Node]()
        self._by_any_node, self._by_all_inputs = 0, -1

    def accepts(self, node: fx.Node) -> bool:
        """Return whether backward needs all gradients of the region with one more call."""
        by_any_node, by_all_inputs = self._with(node)
        return not by_any_node & ~by_all_inputs

    def add(self, node: fx.Node) -> None:
        self._by_any_node, self._by_all_inputs = self._with(node)
        self._nodes.add(node)

    def _with(self, node: fx.Node) -> tuple[int, int]:
        by_any_node, by_all_inputs = self._by_any_node, self._by_all_inputs
        if info(node).differentiable:
            by_any_node |= self._reached[node]
            for value in node.all_input_nodes:
                if value not in self._nodes and info(value).differentiable:
                    by_all_inputs &= self._reached[value]
        return by_any_node, by_all_inputs


def _place_results_behind_calls(graph: fx.Graph) -> None:
    """Move the nodes that take one of several results right behind their call."""
    for node in list(graph.nodes):
        if node.target is operator.getitem:
            node.all_input_nodes[0].append(node)


def _move_copy_marks(
    graph: fx.Graph, nodes: Sequence[fx.Node], call: fx.Node, outputs: Sequence[fx.Node]
) -> None:
    """Move the marks that release and watch copies from the nodes of a region to its call."""
    inside, place = set(nodes), {node: at for at, node in enumerate(graph.nodes)}
    last = outputs[-1]
    for node in graph.find_nodes(op="call_function", target=leave_copies):
        if place[nodes[0]] < place[node] < place[call]:
            last.append(node)
    watched = [
        node
        for node in graph.find_nodes(op="call_function", target=watch_readers)
        if node.args[0] in inside
    ]
    if not watched:
        return
    groups = tuple(sorted({group for node in watched for group in node.args[1]}))
    following: Any = watched[0].args[2]
    following = NO_GROUP if following in groups else following
    for node in watched:
        graph.erase_node(node)
    with graph.inserting_after(last):
        graph.call_function(watch_readers, (tuple(outputs), groups, following))
