"""MemoryTimeline: the bytes that one rank holds while a program runs, call by call.

    timeline = MemoryTimeline(graph, mesh, [loss], BucketConfig(buffer_bytes))
    timeline.forward, timeline.backward    # samples of the bytes as each call allocates its results

The calls are followed in their order, their backward in reverse. A result lives until its last
reader, a saved tensor until its backward, a gradient until the backward of the value's maker; a
gradient of a parameter stays. Bytes that live for the whole step are not counted, nor, in a stage
of a pipeline, received activations and gradients. Where backward is split, `weights` computes the
gradients of weights, `backward` the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from torch import fx

from autopar.capture.origins import copied_parameter
from autopar.cost.bucket_prices import BucketConfig
from autopar.cost.deferred_reductions import mergeable_linears
from autopar.cost.saved_tensors import SavedBytes, SavedBytesCache, Storage
from autopar.cost.value_storage import source, storage
from autopar.mesh import Mesh
from autopar.pipeline.memory import moments
from autopar.pipeline.memory.call_memory import HANDED_ON, CallMemories
from autopar.pipeline.memory.copy_lifetimes import CopyLifetimes
from autopar.pipeline.memory.gradient_bytes import GradientBytes
from autopar.pipeline.memory.memory_holders import LiveBytes
from autopar.pipeline.memory.moments import (
    Event,
    GradientReady,
    MemoryOffset,
    MemorySample,
    ReduceStart,
    RepeatBoundary,
)
from autopar.pipeline.memory.value_uses import first_readers, last_needed_by, made_of_parameters
from autopar.strategies.node_info import RecomputeRegion, info
from autopar.strategies.results import is_result, maker, tensor_arguments, values_of


class MemoryTimeline:
    """Follow one run of a program forward and backward on the rank that holds most."""

    def __init__(
        self,
        graph: fx.Graph,
        mesh: Mesh,
        roots: Sequence[fx.Node],
        travel: BucketConfig,
        *,
        is_split: bool = False,
        known: SavedBytesCache | None = None,
    ) -> None:
        """`roots`: the results with whose gradients backward begins. `known`: saved tensors."""
        self.graph, self.mesh = graph, mesh
        self._calls = CallMemories(mesh, travel.kernels)
        calls = [n for n in graph.nodes if n.op == "call_function" and not is_result(n)]
        # Linears with a joint backward, by the last of them.
        self._joint = {} if is_split else {group[-1]: group for group in mergeable_linears(calls)}
        self._nodes = _in_order(calls, self._joint.values())
        self._values, self._flowing = LiveBytes(), LiveBytes()
        self._saved: dict[fx.Node, list[Hashable]] = {}
        self._gradient_of: dict[fx.Node, Hashable] = {}
        self._inside: dict[RecomputeRegion, list[fx.Node]] = {}
        for node in self._nodes:
            if (region := info(node).region) is not None:
                self._inside.setdefault(region, []).append(node)
        self.once = known or SavedBytesCache(mesh)
        self._whole: set[RecomputeRegion] = set()  # regions that were recomputed in full
        self._again: set[Hashable] = set()  # tensors that were recomputed
        # For each region, the recomputed tensors that are read, by the calls that compute them.
        self._read: dict[RecomputeRegion, dict[fx.Node, dict[Storage, float]]] = {}
        self._sums = GradientBytes(graph, mesh, travel)
        self.copies = CopyLifetimes(graph, mesh, travel.buffer_bytes)
        self._is_late = False  # deferred gradients are being computed
        self._count = 0
        self._ends: dict[fx.Node, list[fx.Node]] = {}
        last: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            for value in node.all_input_nodes:
                last[self._memory(value)] = node
        for value, reader in last.items():
            self._ends.setdefault(maker(reader), []).append(value)
        self._until = last_needed_by(graph)
        # For each parameter, the reader whose gradient comes last.
        self._last_of = first_readers(graph, self._nodes)
        self._lapsing: dict[fx.Node, list[Hashable]] = {}  # tensors freed then
        # In a split backward: values computed from parameters alone, and deferred calls.
        self._weights = made_of_parameters(graph) if is_split else frozenset[fx.Node]()
        self._is_split = is_split
        self._deferred: dict[fx.Node, Hashable] = {}  # with the gradient of the result
        sums = self._sums
        events, offset = moments.stretched(self._each(self._nodes, self._run), MemoryOffset())
        self.forward = tuple(moments.summed(events, sums))
        self._left = self._leave(graph.output_node())
        self.kept = self._values.bytes + offset.kept  # for backward
        events, offset = moments.stretched(self._backward(roots), offset)
        self.backward = tuple(moments.summed(events, sums))
        # The tensors from which the gradients of weights are computed.
        flowing = self._flowing.bytes + sums.waiting + offset.flowing
        self.halves = self._values.bytes + offset.kept + flowing
        self.at_once = sums.at_once()  # parameters with gradients by then
        events, _ = moments.stretched(self._later(), offset)
        self.weights = tuple(moments.summed(events, sums))
        self.gradients = sums.there  # bytes at the end
        # Bytes of gradients by placeholder, of all parameters for which it stands.
        self.learned: Mapping[str, float] = sums.learned

    def _memory(self, value: fx.Node) -> fx.Node:
        return maker(storage(value))

    def _size(self, node: fx.Node) -> float:
        """Return the bytes of a value on the device."""
        if info(node).on_host:
            return 0.0
        return float(sum(type_.local_bytes(self.mesh) for type_ in info(node).types))

    def _sample(
        self, node: fx.Node, more: float = 0.0, *, is_backward: bool = True
    ) -> MemorySample:
        """Return a sample after a call has allocated its results; `more`: its temporaries."""
        live = self.copies.backward if is_backward else self.copies.forward
        copies = None if self._is_late else live(node)
        values, gradients = self._values.bytes, self._flowing.bytes
        return MemorySample(node.name, is_backward, values, gradients, 0.0, more, copies=copies)

    def _each(
        self, nodes: Iterable[fx.Node], follow: Callable[[fx.Node], Iterator[Event]]
    ) -> Iterator[Event]:
        """Yield the events of all calls, those of repeated calls between two boundaries."""
        for block, row in groupby(nodes, lambda node: info(node).repeated_block):
            calls = [*row]
            if block is not None:
                more = info(calls[0]).count - 1
                yield RepeatBoundary(self._values.bytes, self._flowing.bytes, more)
            for node in calls:
                for event in follow(node):
                    # Parameters of a repeated block are read in it alone.
                    is_alone = not isinstance(event, GradientReady) or self._is_one(event.parameter)
                    assert block is not None or is_alone
                    yield event
            if block is not None:
                yield RepeatBoundary(self._values.bytes, self._flowing.bytes)

    def _is_one(self, parameter: fx.Node) -> bool:
        return info(parameter).count == 1

    def _run(self, node: fx.Node) -> Iterator[Event]:
        more = 0
        if self._memory(node) is node:  # copies of parameters are counted apart
            self._values.take(node, 0.0 if copied_parameter(node) else self._size(node))
        if info(node).movement is None and not info(node).on_host:
            more = self._calls(node).forward
        lapses = node in self._until and info(node).region is None
        saved = self.once.own(node) if lapses else self.once.through(node)
        held: list[Hashable] = [key if isinstance(key[1], str) else key[0] for key in saved]
        for key, size in zip(held, saved.values()):
            self._values.take(key, size)
        if lapses:
            self._lapsing.setdefault(self._until[node], []).extend(held)
        else:
            self._saved[node] = held
        yield self._sample(node, more, is_backward=False)
        self._end(node)

    def _leave(self, output: fx.Node) -> dict[fx.Node, float]:
        """Return the bytes of values that from now on only readers of the results hold."""
        held = {value: self._values.size(value) for value in self._ends.get(output, ())}
        self._end(output)
        return {value: size for value, size in held.items() if not self._values.size(value)}

    def left(self, results: Iterable[fx.Node]) -> float:
        """Return the bytes of some results that backward does not keep."""
        return sum(self._left.get(value, 0.0) for value in {*map(self._memory, results)})

    def _end(self, reader: fx.Node) -> None:
        for value in self._ends.get(reader, ()):
            if value.op == "call_function":
                self._values.let_go(value)
        for key in self._lapsing.pop(reader, ()):
            self._values.let_go(key)

    def _backward(self, roots: Sequence[fx.Node]) -> Iterator[Event]:
        received: dict[Hashable, fx.Node] = {}
        for root in roots:
            self._gradient_of[root] = gradient = self._new(0.0)
            self._flowing.take(gradient)  # its sender holds it, too
            received[gradient] = root
        joint = {node for group in self._joint.values() for node in group}

        def back(node: fx.Node) -> Iterator[Event]:
            if node in self._weights:
                return
            is_any_ready = False
            for event in self._back_jointly(node) if node in joint else self._back(node):
                is_any_ready |= isinstance(event, GradientReady)
                yield event
            if is_any_ready and not self._is_split:
                yield ReduceStart(self._sample(node))

        yield from self._each(reversed(self._nodes), back)
        for node in self.graph.find_nodes(op="placeholder"):
            if node in self._gradient_of:  # it is sent, or its last reader gave none
                self._flowing.let_go(self._gradient_of.pop(node))
                if info(node).places is not None:
                    yield GradientReady(node)
        if self._nodes and not self._is_split:
            yield ReduceStart(self._sample(self._nodes[0]), is_end=True)
        self._take_over(received)

    def _take_over(self, received: Mapping[Hashable, fx.Node]) -> None:
        """Hold the received values and gradients from which deferred weight gradients follow."""
        for gradient, root in received.items():
            self._flowing.let_go(gradient, self._size(root))
        for node in self._deferred:
            read = tensor_arguments(node)
            for value in {storage(read[at]) for at in info(node).saved if at < len(read)}:
                if value.op == "placeholder" and info(value).origin[0] == "received":
                    self._values.take(value, self._size(value))
                    self._saved.setdefault(node, []).append(value)

    def _back(self, node: fx.Node) -> Iterator[Event]:
        """Yield the events of one call's backward, and free its saved tensors."""
        if not info(node).differentiable:
            self._let_go(node, ())
            return
        self._remake(node)
        values = [v for v in values_of(node) if v in self._gradient_of]
        arrived = [self._gradient_of.pop(value) for value in values]
        weights, parameter = self._weights_of(node), copied_parameter(node)
        if arrived and parameter is not None:  # a gradient of a gathered copy is summed at once
            self._flowing.let_go(arrived.pop())
            yield GradientReady(parameter)
        if arrived:
            yield from self._through(node, arrived[0], weights)
        if arrived and weights and info(node).weight_inputs.product:  # type: ignore[union-attr]
            self._deferred[node] = arrived[0]
            return
        self._let_go(node, arrived)

    def _back_jointly(self, last: fx.Node) -> Iterator[Event]:
        """Yield the events of the joint backward of linears of one value, whose gradients are
        summed while those of the weights are computed."""
        if last not in self._joint:
            return  # the last one of its group stands for it
        linears = self._joint[last]
        for node in linears:
            self._remake(node)
        arrived = {n: self._gradient_of.pop(n) for n in linears if n in self._gradient_of}
        gradients: list[tuple[fx.Node, Hashable]] = []
        (moved, *_), more = linears[0].all_input_nodes, 0.0
        if arrived and info(moved).differentiable:
            gradients.append((moved, self._new(self._size(moved))))
            movement = info(moved).movement
            if movement is not None and not movement.hands_back:
                more = self._size(moved.all_input_nodes[0])
        for node in arrived:
            call = self._calls(node)
            sizes = zip(call.inputs, call.gradients)
            gradients += [(v, self._new(size)) for v, size in sizes if size and v is not moved]
        if arrived:
            yield self._sample(last, more)
        yield from self._distribute(gradients, linears)
        for node in linears:
            self._let_go(node, [arrived[node]] if node in arrived else [])

    def _let_go(self, node: fx.Node, arrived: Iterable[Hashable]) -> None:
        for key in arrived:
            self._flowing.let_go(key)
        for key in self._saved.pop(node, ()):
            self._values.let_go(key)

    def _later(self) -> Iterator[Event]:
        """Yield the events of the weight gradients that a split backward defers."""
        self._is_late = self._is_split

        def weigh(node: fx.Node) -> Iterator[Event]:
            others = [v for v in node.all_input_nodes if v not in self._weights_of(node)]
            yield from self._through(node, self._deferred[node], others)
            self._let_go(node, [self._deferred[node]])

        yield from self._each(self._deferred, weigh)
        made_of_parameters = [node for node in reversed(self._nodes) if node in self._weights]
        yield from self._each(made_of_parameters, self._back)
        if self._nodes:
            yield ReduceStart(self._sample(self._nodes[0]), is_end=True)

    def _weights_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs of a call whose gradients are deferred."""
        weights = info(node).weight_inputs if self._is_split else None
        if weights is None:
            return []
        read = tensor_arguments(node)
        return [read[position] for position in weights.positions]

    def _remake(self, node: fx.Node) -> None:
        """Hold the tensors that a call's region recomputes: all, or those that this call is the
        first to read and those they are computed from. Each call frees its own."""
        region = info(node).region
        if region is None or region in self._whole:
            return
        inside = self._inside[region]
        wanted = self.once.remade(node)
        if region.is_full:
            self._whole.add(region)
            wanted = {k: v for call in inside for k, v in self.once.remade(call).items()}
        elif wanted:
            wanted = {**wanted, **self._on_the_way(region, [maker for maker, _ in wanted])}
        new = {key: size for key, size in wanted.items() if key not in self._again}
        self._again |= new.keys()
        for call in inside if new else ():
            for key in self.once.remade(call).keys() & new.keys():
                self._values.take(("again", key), new[key])
                self._saved.setdefault(call, []).append(("again", key))

    def _on_the_way(self, region: RecomputeRegion, values: Sequence[fx.Node]) -> SavedBytes:
        """Return the tensors on the way to recomputed `values` that others of the region read."""
        if region not in self._read:
            read = self._read[region] = {}
            for call in self._inside[region]:
                for key, size in self.once.remade(call).items():
                    read.setdefault(key[0], {})[key] = size
        tensors, seen, waiting = dict[Storage, float](), set(values), list(values)
        while waiting:
            node = waiting.pop()
            for value in {source(value) for value in node.all_input_nodes} - seen:
                seen.add(value)
                if info(value).remade and info(value).region == region:
                    tensors |= self._read[region].get(value, {})
                    waiting.append(value)
        return tensors

    def _through(
        self, node: fx.Node, arrived: Hashable, without: Sequence[fx.Node] = ()
    ) -> Iterator[Event]:
        """Yield the events of one call's backward, with gradients of its inputs; a product leaves
        out those `without`."""
        movement, more = info(node).movement, 0
        if movement is not None:
            (value,) = inputs = node.all_input_nodes
            size = HANDED_ON if movement.hands_back else int(self._size(value))
            sizes: tuple[int | None, ...] = (size,)
        else:
            call = self._calls(node)
            inputs, sizes = list(call.inputs), call.gradients
            more = 0 if info(node).on_host else call.backward
        weights = info(node).weight_inputs
        left_out = without if weights is not None and weights.product else ()
        gradients: list[tuple[fx.Node, Hashable]] = []
        for value, input_size in zip(inputs, sizes):
            if value in left_out:
                continue
            if input_size == HANDED_ON:
                self._flowing.take(arrived)
                gradients.append((value, arrived))
            elif input_size is not None:
                gradients.append((value, self._new(0 if info(value).on_host else input_size)))
        yield self._sample(node, more)
        yield from self._distribute(gradients, [node])

    def _new(self, size: float) -> Hashable:
        self._count += 1
        self._flowing.take(self._count, size)
        return self._count

    def _arrive(self, value: fx.Node, gradient: Hashable) -> None:
        """Store the first gradient of a value, or add a further one to it."""
        before = self._gradient_of.get(value)
        if before is None:
            self._gradient_of[value] = gradient
        elif not self._flowing.is_shared(before):
            self._flowing.let_go(gradient)  # added in place
        else:
            self._gradient_of[value] = self._new(self._size(value))
            self._flowing.let_go(before)
            self._flowing.let_go(gradient)

    def _distribute(
        self, gradients: Sequence[tuple[fx.Node, Hashable]], readers: Sequence[fx.Node]
    ) -> Iterator[Event]:
        """Yield the events of gradients that arrive at their values. A parameter's is ready after
        its last reader in this backward; autograd allocates the sum of two anew."""
        for value, gradient in gradients:
            is_parameter = value.op == "placeholder" and info(value).places is not None
            if is_parameter and self._is_late:  # weight gradients come one by one
                self._flowing.let_go(gradient)
                yield GradientReady(value)
            elif is_parameter and (before := self._gradient_of.get(value)) is not None:
                self._gradient_of[value] = self._new(self._flowing.size(gradient))
                yield self._sample(readers[0])
                self._flowing.let_go(before)
                self._flowing.let_go(gradient)
            else:
                self._arrive(value, gradient)
        for value in dict.fromkeys(value for value, _ in gradients):
            if self._last_of.get(value) in readers and value in self._gradient_of:
                self._flowing.let_go(self._gradient_of.pop(value))
                yield GradientReady(value)


def _in_order(calls: Sequence[fx.Node], joint: Iterable[Sequence[fx.Node]]) -> list[fx.Node]:
    """Return calls in their running order: each `joint` group behind the last value it reads."""
    moved = {node for group in joint for node in group}
    after: dict[fx.Node, list[fx.Node]] = {}
    for group in joint:
        read = {maker(value) for node in group for value in node.all_input_nodes}
        last = max(value for value in read if value.op == "call_function")
        after.setdefault(last, []).extend(group)
    order: list[fx.Node] = []
    for node in calls:
        order += [] if node in moved else [node]
        order += after.get(node, ())
    return order
