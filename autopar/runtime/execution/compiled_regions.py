"""Compiled: regions of a rank's program are made by `torch.compile`, equal ones once.

A region is some neighbouring blocks of the model (`block_groups.py`), or what stands between two of
these groups. It is a function of what it reads, so groups that do the same to tensors of the same
types are one function, and what compiling takes does not grow with depth. Movements are operators
in it, forward and backward.

Some calls stay outside, and end a region: those that wait for work under way, or leave a sum to the
caller; weights whose gradients a split backward puts off; dropped attention, which works on some
rows at a time; experts, which look at how many rows each has; what ranks carry out together. Copies
of parameters come before the region that reads them, and go after it; in backward they are wanted
when that of the region begins. Gradients of parameters are summed outside, as they become complete:
when the backward of their region has ended.

A compiler may bring calls into another order, on each rank another, so the movements of a region
hang on one another: one that does not begins a new region.

The backward of a region is one function, which takes zeros for what no gradient comes to, and gives
one to all that the region reads. So all that a region reads reaches every result of the program
that the region does: who asks for one of them asks for these gradients. A call by which that would
not hold begins a new region.
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
_NEVER_COMPILED = (start_sum, finish_sum, defer_sum, attention, EXPERTS, CHOSEN_PRODUCTS)
_LEAST_CALLS = 2  # calls: fewer are not worth it


@dataclass(frozen=True)
class RegionCompiler:
    """Compiles what a rank runs, with options of `torch.compile`."""

    options: Mapping[str, Any]
    device: torch.device
    blocks: Sequence[str]  # of the model, that repeat
    together: Together
    made: dict[Hashable, Function] = field(default_factory=dict)  # by what a region does

    def __call__(self, graph: fx.Graph, outside: Collection[fx.Node]) -> None:
        """Let a program of one rank call its regions as functions, in place."""
        _place_results_behind_calls(graph)
        places = self.together.places(graph, self.blocks)
        for nodes in list(_cut_regions(graph, places, outside)):
            if len(nodes) >= _LEAST_CALLS:
                self._call(graph, nodes)

    def _call(self, graph: fx.Graph, nodes: list[fx.Node]) -> None:
        region = _CompiledRegion(nodes)
        body, key, numbers = region.body()
        if key not in self.made:
            function = fx.GraphModule({}, body).forward
            found = torch.compile(function, **{"dynamic": False, **self.options})
            self.made[key] = _QuietFirstCall(found)
        made = self.made[key]
        drawn = [torch.tensor(number, device=self.device) for number in numbers]

        def compiled(*inputs: Tensor) -> Any:  # a function: fx wants its name
            return made(*inputs, *drawn)

        with graph.inserting_after(nodes[-1]):
            call = graph.call_function(compiled, tuple(region.inputs))
        given = [call]
        if len(region.outputs) > 1:
            with graph.inserting_after(call):
                given = [
                    graph.call_function(operator.getitem, (call, index))
                    for index in reversed(range(len(region.outputs)))
                ][::-1]
        for node, new in zip(region.outputs, given):
            new.meta = dict(node.meta)
            info(new).update(rule=None, movement=None, remade=False, copies=())
            info(new).region = info(nodes[0]).region
        info(call).update(
            region=info(nodes[0]).region,
            copies=tuple(sorted({group for node in nodes for group in info(node).copies})),
        )
        _move_copy_marks(graph, nodes, call, given)
        for node, new in zip(region.outputs, given):
            node.replace_all_uses_with(new)
        for node in reversed(nodes):
            graph.erase_node(node)


class _QuietFirstCall:
    """A compiled function. Where it is compiled, torch asks values for a gradient that they do not
    have, and lets itself be warned."""

    def __init__(self, function: Function) -> None:
        self._function, self._is_made = function, False

    def __call__(self, *inputs: Tensor) -> Any:
        if self._is_made:
            return self._function(*inputs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            result = self._function(*inputs)
        self._is_made = True
        return result


@dataclass(frozen=True)
class _CompiledRegion:
    """Calls that follow one another."""

    nodes: Sequence[fx.Node]

    @property
    def inputs(self) -> list[fx.Node]:
        return find_inputs(self.nodes)

    @property
    def outputs(self) -> list[fx.Node]:
        own = set(self.nodes)

        def is_read(node: fx.Node) -> bool:
            return any(user not in own and user.target not in MARKS for user in node.users)

        return [node for node in self.nodes if is_read(node)]

    def body(self) -> tuple[fx.Graph, Hashable, list[int]]:
        """The region as a graph, what is equal of equal regions, and the numbers of what it draws,
        which are its last inputs: they differ from region to region."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        said: list[Hashable] = []
        for value in self.inputs:
            copies[value] = graph.placeholder(f"x{len(copies)}")
            said.append(_input_signature(value))
        count = len(copies)
        places = _draw_numbers(self.nodes)
        drawn = {place: graph.placeholder(f"drawn{at}") for at, place in enumerate(places)}

        def lifted(argument: Any) -> Any:
            if isinstance(argument, DrawPlace):
                return argument._replace(number=drawn[argument.number])  # type: ignore
            return copies[argument] if isinstance(argument, fx.Node) else argument

        for node in self.nodes:
            args, kwargs = _map_leaves(node.args, lifted), _map_leaves(node.kwargs, lifted)
            target: Any = node.target
            copies[node] = graph.create_node(node.op, target, args, kwargs, f"x{len(copies)}")
            said.append(
                (target, _structure_key(args), _structure_key(kwargs), info(node).differentiable)
            )
        results = [copies[node] for node in self.outputs]
        graph.output(tuple(results) if len(results) != 1 else results[0])
        return graph, (count, *said, tuple(result.name for result in results)), places


def _input_signature(value: fx.Node) -> Hashable:
    """What a region is told of an input."""
    layout = info(value).type.layout if "type" in value.meta else None
    val = info(value).val
    return val.dtype, tuple(val.shape), str(layout), info(value).differentiable


def _draw_numbers(nodes: Sequence[fx.Node]) -> list[int]:
    """The numbers of those among some calls that draw."""
    arguments = (a for node in nodes for a in (*node.args, *node.kwargs.values()))
    numbers = (a.number for a in arguments if isinstance(a, DrawPlace))
    return list(dict.fromkeys(number for number in numbers if isinstance(number, int)))


def _map_leaves(argument: Any, function: Callable[[Any], Any]) -> Any:
    """An argument with its leaves changed."""
    if isinstance(argument, DrawPlace | fx.Node):
        return function(argument)
    if isinstance(argument, list | tuple):
        items = [_map_leaves(one, function) for one in argument]
        is_named = hasattr(argument, "_fields")
        return type(argument)(*items) if is_named else type(argument)(items)
    if isinstance(argument, Mapping):
        return {name: _map_leaves(one, function) for name, one in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_map_leaves(one, function) for one in _ends(argument)))
    return function(argument)


def _ends(given: slice) -> tuple[Any, Any, Any]:
    return given.start, given.stop, given.step


def _structure_key(argument: Any) -> Hashable:
    """What is equal for equal arguments alone."""
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, list | tuple):
        return (type(argument), *map(_structure_key, argument))
    if isinstance(argument, Mapping):
        return tuple((name, _structure_key(one)) for name, one in argument.items())
    if isinstance(argument, slice):
        return slice, *map(_structure_key, _ends(argument))
    return type(argument), repr(argument)


def _cut_regions(
    graph: fx.Graph, places: Mapping[fx.Node, Hashable], outside: Collection[fx.Node]
) -> Iterator[list[fx.Node]]:
    """The runs of calls that become one each, none of two places."""
    reached = _reached_results(graph)
    open_: list[fx.Node] = []
    order, asked = _MovementChain(), _GradientDemand(reached)
    where: Any = None
    for node in graph.nodes:
        if node.op == "placeholder" or node.target in MARKS:
            continue
        maker = _producer(node)
        place = places.get(maker), info(maker).region
        is_inside = _is_compilable(node, outside)
        holds = is_inside and place == where and order.holds(node) and asked.holds(node)
        if open_ and not holds:
            yield open_
            open_, order, asked = [], _MovementChain(), _GradientDemand(reached)
        if is_inside:
            order.add(node)
            asked.add(node)
            open_.append(node)
            where = place
    if open_:
        yield open_


def _is_compilable(node: fx.Node, outside: Collection[fx.Node]) -> bool:
    if node.op != "call_function" or node in outside or node.target in _NEVER_COMPILED:
        return False
    if (maker := _producer(node)) is not node:
        return _is_compilable(maker, outside)
    if info(node).joint is not None:
        return False
    region = info(node).region
    if region is not None and not region.is_full and region.how.keep != "device":
        return False
    return not info(node).on_host


def _producer(node: fx.Node) -> fx.Node:
    """The call of which a node is a result, or itself."""
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


class _MovementChain:
    """Of the movements of a region: each hangs on the one before it, in backward as in forward."""

    def __init__(self) -> None:
        self.last: fx.Node | None = None
        self.behind: set[fx.Node] = set()  # what hangs on the last

    def holds(self, node: fx.Node) -> bool:
        """With one more call."""
        return info(node).movement is None or self.last is None or self._hangs(node)

    def add(self, node: fx.Node) -> None:
        if info(node).movement is not None:
            self.last, self.behind = node, {node}
        elif self._hangs(node):
            self.behind.add(node)

    def _hangs(self, node: fx.Node) -> bool:
        is_back = self.last is not None and info(self.last).differentiable
        return not self.behind.isdisjoint(node.all_input_nodes) and (
            info(node).differentiable or not is_back
        )


def _reached_results(graph: fx.Graph) -> dict[fx.Node, int]:
    """Of which results of a program the backward reaches each value, a bit for each."""
    found = dict.fromkeys(graph.nodes, 0)
    results: Any = graph.output_node().args[0]
    for place, result in enumerate(results):
        found[result] |= 1 << place
    for node in reversed(graph.nodes):
        if info(node).differentiable:
            for value in node.all_input_nodes:
                found[value] |= found[node]
    return found


class _GradientDemand:
    """Of a region: the results that it reaches, and those that all that it reads reaches."""

    def __init__(self, reached: Mapping[fx.Node, int]) -> None:
        self._reached, self._own = reached, set[fx.Node]()
        self._some, self._every = 0, -1

    def holds(self, node: fx.Node) -> bool:
        """With one more call: that every gradient which it gives is asked for."""
        some, every = self._with(node)
        return not some & ~every

    def add(self, node: fx.Node) -> None:
        self._some, self._every = self._with(node)
        self._own.add(node)

    def _with(self, node: fx.Node) -> tuple[int, int]:
        some, every = self._some, self._every
        if info(node).differentiable:
            some |= self._reached[node]
            for value in node.all_input_nodes:
                if value not in self._own and info(value).differentiable:
                    every &= self._reached[value]
        return some, every


def _place_results_behind_calls(graph: fx.Graph) -> None:
    """What is taken from a call of several results is taken behind it."""
    for node in list(graph.nodes):
        if node.target is operator.getitem:
            node.all_input_nodes[0].append(node)


def _move_copy_marks(
    graph: fx.Graph, nodes: Sequence[fx.Node], call: fx.Node, given: Sequence[fx.Node]
) -> None:
    """Let marks of copies speak of a region in place of the readers in it."""
    own, place = set(nodes), {node: at for at, node in enumerate(graph.nodes)}
    last = given[-1]
    for node in graph.find_nodes(op="call_function", target=leave_copies):
        if place[nodes[0]] < place[node] < place[call]:
            last.append(node)
    watched = [
        node
        for node in graph.find_nodes(op="call_function", target=watch_readers)
        if node.args[0] in own
    ]
    if not watched:
        return
    groups = tuple(sorted({group for node in watched for group in node.args[1]}))
    following: Any = watched[0].args[2]
    following = NO_GROUP if following in groups else following
    for node in watched:
        graph.erase_node(node)
    with graph.inserting_after(last):
        graph.call_function(watch_readers, (tuple(given), groups, following))
