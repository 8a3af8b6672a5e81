"""Course: the bytes that one rank holds while a program runs, moment by moment.

    course = ProgramCourse(graph, mesh, [loss], Travel(buffer_bytes))
    course.forward, course.backward        # what is held as each call makes its results

The calls of a program are followed in their order, and those of its backward in the opposite one:
what a call gives is let go after its last reader, what it keeps after its own backward, and a
gradient once the calls that made the value have used it. Copies of parameters that live a use come
and go. Bytes that stay through a step are not counted. A gradient of a parameter stays.

The program may be a stage of a pipeline; activations and gradients that it receives do not count.
Where backward is split, `weights` computes the gradients of weights, `backward` the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from autopar.capture.origins import copied_parameter
from autopar.cost.bucket_prices import BucketConfig
from autopar.cost.deferred_reductions import mergeable_linears
from autopar.cost.saved_tensors import SavedBytes, SavedBytesCache, Storage, source, storage
from autopar.mesh import Mesh
from autopar.pipeline.memory import moments
from autopar.pipeline.memory.call_memory import HANDED_ON, CallMemories
from autopar.pipeline.memory.copy_lifetimes import Passing
from autopar.pipeline.memory.gradient_bytes import Sums
from autopar.pipeline.memory.memory_holders import Held
from autopar.pipeline.memory.moments import Arrival, Begin, Beside, Edge, Event, Moment
from autopar.pipeline.memory.value_uses import first_readers, made_of_parameters, until
from autopar.strategies.node_info import RecomputeRegion, info, times_of
from autopar.strategies.results import is_result, maker, tensor_arguments, values_of


class ProgramCourse:
    """Follows one run of a program forward and backward on the rank that holds most."""

    def __init__(
        self,
        graph: fx.Graph,
        mesh: Mesh,
        roots: Sequence[fx.Node],
        travel: BucketConfig,
        is_split: bool = False,
        times: int | None = None,
        known: SavedBytesCache | None = None,
    ) -> None:
        """`roots`: of the results, those whose gradients backward begins with. `times`: as many are
        the blocks that those calls stand for which stand for several, or as they say themselves.
        `known`: what calls of the graph keep."""
        self.graph, self.mesh = graph, mesh
        self._calls = CallMemories(mesh, travel.kernels)
        calls = [n for n in graph.nodes if n.op == "call_function" and not is_result(n)]
        # Linears whose backward is one, by the last of them.
        self._together = {} if is_split else {some[-1]: some for some in mergeable_linears(calls)}
        self._nodes = _in_order(calls, self._together.values())
        self._rows = _standing_for_others(self._nodes, times)
        self._values, self._flowing = Held(), Held()
        self._saved: dict[fx.Node, list[Hashable]] = {}
        self._gradient_of: dict[fx.Node, Hashable] = {}
        self._inside: dict[RecomputeRegion, list[fx.Node]] = {}
        for node in self._nodes:
            if (region := info(node).region) is not None:
                self._inside.setdefault(region, []).append(node)
        self.once = known or SavedBytesCache(mesh)
        self._whole: set[RecomputeRegion] = set()  # those that were made again in full
        self._again: set[Hashable] = set()  # what was made again
        # Of each region, what is read again, by the calls that make it.
        self._read: dict[RecomputeRegion, dict[fx.Node, dict[Storage, float]]] = {}
        self._times, self._sums = times, Sums(graph, mesh, travel, times)
        self.passing = Passing(graph, mesh, travel.buffer_bytes)
        self._is_late = False  # gradients are made that were put off
        self._count = 0
        self._ends: dict[fx.Node, list[fx.Node]] = {}
        last: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            for value in node.all_input_nodes:
                last[self._memory(value)] = node
        for value, reader in last.items():
            self._ends.setdefault(maker(reader), []).append(value)
        self._until = until(graph)
        # Of a parameter, the reader that its gradient comes from last.
        self._last_of = first_readers(graph, self._nodes)
        self._lapsing: dict[fx.Node, list[Hashable]] = {}  # what goes then
        # Of a split backward: values that are made of parameters alone, and what is put off.
        self._weights = made_of_parameters(graph) if is_split else frozenset[fx.Node]()
        self._is_split = is_split
        self._put_off: dict[fx.Node, Hashable] = {}  # with the gradient of its result
        sums = self._sums
        events, beside = moments.stretched(self._forward(), Beside())
        self.forward = tuple(moments.summed(events, sums))
        self._left = self._leave(graph.output_node())
        self.kept = self._values.bytes + beside.kept  # for backward
        events, beside = moments.stretched(self._backward(roots), beside)
        self.backward = tuple(moments.summed(events, sums))
        # What the gradients of weights are made of.
        flowing = self._flowing.bytes + sums.waiting + beside.flowing
        self.halves = self._values.bytes + beside.kept + flowing
        self.at_once = sums.at_once()  # parameters whose gradients are there by then
        events, _ = moments.stretched(self._later(), beside)
        self.weights = tuple(moments.summed(events, sums))
        self.gradients = sums.there  # bytes, after all
        # By placeholder, the bytes of its gradient; of one that stands for several, of all.
        self.learned: Mapping[str, float] = sums.learned

    def _memory(self, value: fx.Node) -> fx.Node:
        return maker(storage(value))

    def _size(self, node: fx.Node) -> float:
        """Bytes of a value on the device."""
        if info(node).on_host:
            return 0.0
        return float(sum(type_.local_bytes(self.mesh) for type_ in info(node).types))

    def _moment(self, node: fx.Node, is_backward: bool, more: float) -> Moment:
        """After the results of a call were made; `more` it takes besides while it makes them."""
        about = node.name, is_backward, self._values.bytes, self._flowing.bytes, 0.0, more
        if self._is_late:
            return Moment(*about)
        passing = self.passing.backward if is_backward else self.passing.forward
        return Moment(*about, copies=passing(node))

    def _each(
        self, nodes: Iterable[fx.Node], follow: Callable[[fx.Node], Iterator[Event]]
    ) -> Iterator[Event]:
        """What happens in all calls, those that stand for others between two edges."""
        for row, some in groupby(nodes, self._rows.get):
            if row is not None:
                yield Edge(self._values.bytes, self._flowing.bytes, row.more)
            for node in some:
                for event in follow(node):
                    # What a block that stands for others has is read in it alone.
                    is_alone = not isinstance(event, Arrival) or self._is_one(event.parameter)
                    assert row is not None or is_alone
                    yield event
            if row is not None:
                yield Edge(self._values.bytes, self._flowing.bytes)

    def _is_one(self, parameter: fx.Node) -> bool:
        return times_of(parameter, self._times) == 1

    def _forward(self) -> Iterator[Event]:
        return self._each(self._nodes, self._run)

    def _run(self, node: fx.Node) -> Iterator[Event]:
        more = 0
        if self._memory(node) is node:  # the copies of parameters are counted as such
            self._values.take(node, 0.0 if copied_parameter(node) else self._size(node))
        if info(node).movement is None and not info(node).on_host:
            more = self._calls(node).forward
        lapses = node in self._until and info(node).region is None
        kept = self.once.own(node) if lapses else self.once.through(node)
        held: list[Hashable] = [key if isinstance(key[1], str) else key[0] for key in kept]
        for key, size in zip(held, kept.values()):
            self._values.take(key, size)
        if lapses:
            self._lapsing.setdefault(self._until[node], []).extend(held)
        else:
            self._saved[node] = held
        yield self._moment(node, False, more)
        self._end(node)

    def _leave(self, output: fx.Node) -> dict[fx.Node, float]:
        """The bytes of what only those who read the results hold from now on."""
        held = {value: self._values.size(value) for value in self._ends.get(output, ())}
        self._end(output)
        return {value: size for value, size in held.items() if not self._values.size(value)}

    def left(self, results: Iterable[fx.Node]) -> float:
        """The bytes of some results that backward does not keep."""
        return sum(self._left.get(value, 0.0) for value in {self._memory(one) for one in results})

    def _end(self, reader: fx.Node) -> None:
        for value in self._ends.get(reader, ()):
            if value.op == "call_function":
                self._values.let_go(value)
        for key in self._lapsing.pop(reader, ()):
            self._values.let_go(key)

    def _backward(self, roots: Sequence[fx.Node]) -> Iterator[Event]:
        given: dict[Hashable, fx.Node] = {}
        for root in roots:
            self._gradient_of[root] = gradient = self._new(0.0)
            self._flowing.take(gradient)  # who handed it over holds it, too
            given[gradient] = root
        together = {one for some in self._together.values() for one in some}

        def back(node: fx.Node) -> Iterator[Event]:
            if node in self._weights:
                return
            have_come = False
            for event in self._back_together(node) if node in together else self._back(node):
                have_come |= isinstance(event, Arrival)
                yield event
            if have_come and not self._is_split:
                yield Begin(self._moment(node, True, 0.0))

        yield from self._each(reversed(self._nodes), back)
        for node in self.graph.find_nodes(op="placeholder"):
            if node in self._gradient_of:  # it is sent on, or its last reader gave none
                self._flowing.let_go(self._gradient_of.pop(node))
                if info(node).places is not None:
                    yield Arrival(node)
        if self._nodes and not self._is_split:
            yield Begin(self._moment(self._nodes[0], True, 0.0), all_=True)
        self._take_over(given)

    def _take_over(self, given: Mapping[Hashable, fx.Node]) -> None:
        """Of what was received, gradients among it, hold what the gradients of weights are made of:
        the others who held it let go."""
        for gradient, root in given.items():
            self._flowing.let_go(gradient, self._size(root))
        for node in self._put_off:
            read = tensor_arguments(node)
            for value in {storage(read[at]) for at in info(node).saved if at < len(read)}:
                if value.op == "placeholder" and info(value).origin[0] == "received":
                    self._values.take(value, self._size(value))
                    self._saved.setdefault(node, []).append(value)

    def _back(self, node: fx.Node) -> Iterator[Event]:
        """Backward through one call, and what it lets go of."""
        if not info(node).differentiable:
            self._let_go(node, ())
            return
        self._remake(node)
        given = [v for v in values_of(node) if v in self._gradient_of]
        arrived = [self._gradient_of.pop(value) for value in given]
        weights, parameter = self._weights_of(node), copied_parameter(node)
        if arrived and parameter is not None:  # as it arrives, it is summed
            self._flowing.let_go(arrived.pop())
            yield Arrival(parameter)
        if arrived:
            yield from self._through(node, arrived[0], weights)
        if arrived and weights and info(node).weight_inputs.product:  # type: ignore[union-attr]
            self._put_off[node] = arrived[0]
            return
        self._let_go(node, arrived)

    def _back_together(self, last: fx.Node) -> Iterator[Event]:
        """Backward through linears of one value: one sum of its gradients, which is on its way
        while those of the weights are made."""
        if last not in self._together:
            return  # it was gone through with the last
        linears = self._together[last]
        for node in linears:
            self._remake(node)
        arrived = {n: self._gradient_of.pop(n) for n in linears if n in self._gradient_of}
        made: list[tuple[fx.Node, Hashable]] = []
        (moved, *_), more = linears[0].all_input_nodes, 0.0
        if arrived and info(moved).differentiable:
            made.append((moved, self._new(self._size(moved))))
            movement = info(moved).movement
            if movement is not None and not movement.hands_back:
                more = self._size(moved.all_input_nodes[0])
        for node in arrived:
            call = self._calls(node)
            gradients = zip(call.inputs, call.gradients)
            made += [(v, self._new(size)) for v, size in gradients if size and v is not moved]
        if arrived:
            yield self._moment(last, True, more)
        yield from self._given(made, linears)
        for node in linears:
            self._let_go(node, [arrived[node]] if node in arrived else [])

    def _let_go(self, node: fx.Node, arrived: Iterable[Hashable]) -> None:
        for key in arrived:
            self._flowing.let_go(key)
        for key in self._saved.pop(node, ()):
            self._values.let_go(key)

    def _later(self) -> Iterator[Event]:
        """The gradients of weights that a split backward puts off."""
        self._is_late = self._is_split

        def weigh(node: fx.Node) -> Iterator[Event]:
            others = [v for v in node.all_input_nodes if v not in self._weights_of(node)]
            yield from self._through(node, self._put_off[node], others)
            self._let_go(node, [self._put_off[node]])

        yield from self._each(self._put_off, weigh)
        made_of_parameters = [node for node in reversed(self._nodes) if node in self._weights]
        yield from self._each(made_of_parameters, self._back)
        if self._nodes:
            yield Begin(self._moment(self._nodes[0], True, 0.0), all_=True)

    def _weights_of(self, node: fx.Node) -> list[fx.Node]:
        """The inputs of a call whose gradients come later."""
        weights = info(node).weight_inputs if self._is_split else None
        if weights is None:
            return []
        read = tensor_arguments(node)
        return [read[position] for position in weights.positions]

    def _remake(self, node: fx.Node) -> None:
        """Hold what the region of a call makes again for its backward: all of it, or what this call
        is the first to read, with what that is made of. Each reader lets go of its own."""
        region = info(node).region
        if region is None or region in self._whole:
            return
        inside = self._inside[region]
        wanted = self.once.remade(node)
        if region.is_full:
            self._whole.add(region)
            wanted = {k: v for one in inside for k, v in self.once.remade(one).items()}
        elif wanted:
            wanted = {**wanted, **self._on_the_way(region, [made for made, _ in wanted])}
        new = {key: size for key, size in wanted.items() if key not in self._again}
        self._again |= new.keys()
        for one in inside if new else ():
            for key in self.once.remade(one).keys() & new.keys():
                self._values.take(("again", key), new[key])
                self._saved.setdefault(one, []).append(("again", key))

    def _on_the_way(self, region: RecomputeRegion, made: Sequence[fx.Node]) -> SavedBytes:
        """What others of the region read of that from which values are made again."""
        if region not in self._read:
            read = self._read[region] = {}
            for one in self._inside[region]:
                for key, size in self.once.remade(one).items():
                    read.setdefault(key[0], {})[key] = size
        found, seen, waiting = dict[Storage, float](), set(made), list(made)
        while waiting:
            node = waiting.pop()
            for value in {source(value) for value in node.all_input_nodes} - seen:
                seen.add(value)
                if info(value).remade and info(value).region == region:
                    found |= self._read[region].get(value, {})
                    waiting.append(value)
        return found

    def _through(
        self, node: fx.Node, arrived: Hashable, without: Sequence[fx.Node] = ()
    ) -> Iterator[Event]:
        """One call backward, with the gradients that it makes: of all inputs but those `without`
        which a product leaves out."""
        movement, more = info(node).movement, 0
        if movement is not None:
            (value,) = inputs = node.all_input_nodes
            one = HANDED_ON if movement.hands_back else int(self._size(value))
            sizes: tuple[int | None, ...] = (one,)
        else:
            call = self._calls(node)
            inputs, sizes = list(call.inputs), call.gradients
            more = 0 if info(node).on_host else call.backward
        weights = info(node).weight_inputs
        left_out = without if weights is not None and weights.product else ()
        made: list[tuple[fx.Node, Hashable]] = []
        for value, size in zip(inputs, sizes):
            if value in left_out:
                continue
            if size == HANDED_ON:
                self._flowing.take(arrived)
                made.append((value, arrived))
            elif size is not None:
                made.append((value, self._new(0 if info(value).on_host else size)))
        yield self._moment(node, True, more)
        yield from self._given(made, [node])

    def _new(self, size: float) -> Hashable:
        self._count += 1
        self._flowing.take(self._count, size)
        return self._count

    def _arrive(self, value: fx.Node, gradient: Hashable) -> None:
        """A gradient of a value: the first one, or one more that is added to it."""
        before = self._gradient_of.get(value)
        if before is None:
            self._gradient_of[value] = gradient
        elif not self._flowing.is_shared(before):
            self._flowing.let_go(gradient)  # added in place
        else:
            self._gradient_of[value] = self._new(self._size(value))
            self._flowing.let_go(before)
            self._flowing.let_go(gradient)

    def _given(
        self, made: Sequence[tuple[fx.Node, Hashable]], readers: Sequence[fx.Node]
    ) -> Iterator[Event]:
        """Gradients come to those of whose values they are; of a parameter one stays: a copy, where
        others hold it too. It is under way till the last reader in this backward gives its own, and
        autograd makes a new one of two."""
        for value, gradient in made:
            is_parameter = value.op == "placeholder" and info(value).places is not None
            if is_parameter and self._is_late:  # weights come one by one
                self._flowing.let_go(gradient)
                yield Arrival(value)
            elif is_parameter and (before := self._gradient_of.get(value)) is not None:
                self._gradient_of[value] = self._new(self._flowing.size(gradient))
                yield self._moment(readers[0], True, 0.0)
                self._flowing.let_go(before)
                self._flowing.let_go(gradient)
            else:
                self._arrive(value, gradient)
        for value in dict.fromkeys(value for value, _ in made):
            if self._last_of.get(value) in readers and value in self._gradient_of:
                self._flowing.let_go(self._gradient_of.pop(value))
                yield Arrival(value)


def _in_order(calls: Sequence[fx.Node], together: Iterable[Sequence[fx.Node]]) -> list[fx.Node]:
    """Calls as they run: those that run `together` where all that they read is there."""
    moved = {one for some in together for one in some}
    after: dict[fx.Node, list[fx.Node]] = {}
    for some in together:
        read = {maker(value) for one in some for value in one.all_input_nodes}
        last = max(value for value in read if value.op == "call_function")
        after.setdefault(last, []).extend(some)
    found: list[fx.Node] = []
    for node in calls:
        found += [] if node in moved else [node]
        found += after.get(node, ())
    return found


@dataclass(frozen=True, eq=False)
class _Row:
    """Calls in a row that stand for so many others."""

    more: int


def _standing_for_others(calls: Sequence[fx.Node], times: int | None) -> dict[fx.Node, _Row]:
    """Of calls in order, the rows of as many as stand for several, each from the first that reads
    what is theirs: what gathers parameters of a block may stand before it, and that of the next
    one in it."""
    found = dict[fx.Node, _Row]()
    end = 0  # of the last row
    for is_marked, row in groupby(range(len(calls)), lambda at: info(calls[at]).times > 1):
        marked = [*row]
        if not is_marked:
            continue
        own = (at for at in range(end, marked[0]) if _reads_of_many(calls[at]))
        first, end = min([marked[0], *own]), marked[-1] + 1
        one = _Row(times_of(calls[marked[0]], times) - 1)
        found |= dict.fromkeys(calls[first : first + len(marked)], one)
    return found


def _reads_of_many(node: fx.Node) -> bool:
    read = node.all_input_nodes
    return any(value.op == "placeholder" and info(value).times > 1 for value in read)
