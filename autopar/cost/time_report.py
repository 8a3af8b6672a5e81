"""Report: the predicted time of a finished program, part by part, from the program itself.

Every node of a rewritten program has one price, from what the node itself carries. The search adds
up tables. This module adds up the nodes that exist, as the stages of a pipeline do. Both agree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from torch import fx

from autopar.capture.origins import (
    copied_parameter,
    gathered_parameter,
    is_made_of_parameters,
    state_bytes,
)
from autopar.cluster import Cluster
from autopar.collectives import Movement, moved_bytes
from autopar.collectives.redistribution import FREE
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.collective import Collective, When
from autopar.cost.copy_groups import late_sum_axes
from autopar.cost.deferred_reductions import linears_after, weight_gradient_seconds
from autopar.cost.joint_kernels import ComputeSeconds, joint_collectives, joint_message_cost
from autopar.cost.operator_costs import ShardSizes, operator_seconds, operator_work
from autopar.cost.saved_tensors import piece_bytes
from autopar.cost.state_price import SUMS, NodeCost, OverlappedWork, ParameterFacts, StatePrice
from autopar.cost.value_storage import storage
from autopar.layout import ParameterPlacement
from autopar.mesh import Mesh
from autopar.program.equal_blocks import NO_EQUAL_BLOCKS, EqualBlocks
from autopar.recompute import Keep
from autopar.strategies import Strategy, tensor_inputs
from autopar.strategies.node_info import RecomputeRegion, info
from autopar.strategies.results import is_result, values_of
from autopar.strategies.rule import Facts
from autopar.tensor_type import TensorType

ROUNDED = 1e-12  # relative: what is left by rounding is nothing


@dataclass(frozen=True)
class RunCost:
    """Seconds of one run of a program, forward and backward."""

    worked: NodeCost  # of its operators
    moved: NodeCost  # of its movements, and of keeping parameters where they are
    # What nothing hides of what it moves: inside of nodes, between them, and with the host.
    shown: Mapping[str, float]
    reduced_between: float  # of what only a backward that is not split hides, the part between


@dataclass(frozen=True)
class Cost:
    """Predicted seconds of one step, forward and backward."""

    compute: float  # of the busiest rank
    communication: float  # of all movements, and of summing gradients
    exposed: float  # the part of communication that nothing hides
    forward: float  # compute alone
    backward: float
    gradient_sync: float  # the part of communication that sums gradients, once a step
    gathered: float = 0.0  # the part of communication that gathers parameters once a step
    # What shows of copies of states to and from the host, and by how much it updates these more
    # slowly than the device would.
    updated: float = 0.0
    hidden: float = 0.0  # the part of what is moved for each micro-batch that computing hides
    # How long the busiest rank of a pipeline waits for other ranks, and for their messages.
    bubble: float = 0.0
    again: float = 0.0  # the part of computing that is forward once more
    between: float = 0.0  # the part of `shown` that goes between nodes
    copied: float = 0.0  # the part of `shown` that is copied between device and host

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.updated + self.bubble

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds by what they are spent on."""
        return {
            "compute": self.compute - self.again,
            "recomputation": self.again,
            "inside nodes": self._real(self.shown - self.between - self.copied),
            "between nodes": self.between,
            "host": self.copied + self.updated,
            "gradient sums": self._real(self.exposed - self.shown),  # and gathers, once a step
            "bubble": self._real(self.bubble),
        }

    def _real(self, difference: float) -> float:
        """Return a difference, or 0 where it is only a rounding error."""
        return difference if difference > ROUNDED * (self.seconds + self.communication) else 0.0

    @property
    def shown(self) -> float:
        """Return the part of each micro-batch's communication that nothing hides."""
        return self.communication - self.hidden - self.gradient_sync - self.gathered

    @classmethod
    def of(cls, run: RunCost, microbatches: int = 1) -> Cost:
        """Return the cost of a step of `microbatches` runs: gradients are summed and parameters
        gathered once, partly hidden by computing."""
        worked, moved = run.worked, run.moved
        shown = (moved.forward + moved.backward) * microbatches
        once = moved.summed + moved.gathered
        return cls(
            compute=(worked.forward + worked.backward) * microbatches + worked.cast,
            communication=shown + moved.hidden * microbatches + once,
            exposed=shown + once - moved.covered,
            forward=worked.forward * microbatches + worked.cast,
            backward=worked.backward * microbatches,
            gradient_sync=moved.summed,
            gathered=moved.gathered,
            updated=moved.updated - moved.behind,
            hidden=moved.hidden * microbatches,
            again=worked.again * microbatches,
            between=run.shown["between"] * microbatches,
            copied=run.shown["host"] * microbatches,
        )

    def to_json(self) -> dict[str, float]:
        return {"seconds": self.seconds, **asdict(self)}


class _ParameterUse(NamedTuple):
    places: ParameterPlacement
    facts: ParameterFacts
    summed: tuple[str, ...]  # axes over which readers leave the gradient a partial sum


class NodePrices:
    """The one price of every node of a rewritten program, from what the node itself carries."""

    def __init__(self, cluster: Cluster, mesh: Mesh, buffer_bytes: int) -> None:
        self.mesh, self.device = mesh, cluster.device
        self.price = ClusterPrice(cluster, mesh, buffer_bytes)
        self.states = StatePrice(self.price, self.device.overlap)
        self._known: dict[tuple[Facts, Strategy], NodeCost] = {}
        self._states: dict[Hashable, NodeCost] = {}
        # By identity, with what it is of: copies of a program share what is known of calls.
        self._calls: dict[int, tuple[Sequence[tuple[Facts, Strategy]], NodeCost]] = {}

    def __call__(self, node: fx.Node) -> NodeCost:
        return sum(self.elsewhere(node).values(), self.own(node))

    def along(self, blocks: EqualBlocks) -> Callable[[fx.Node], NodeCost]:
        """Return the price function of a program, evaluated once for equal blocks."""
        return blocks.along(self)

    def own(self, node: fx.Node) -> NodeCost:
        """Return the cost of the node itself, twice if it runs again."""
        return self.computed(node) + self.inside(node)

    def computed(self, node: fx.Node) -> NodeCost:
        """Return the cost of a node without the messages inside a joint kernel."""
        price = self._once(node)
        return price.remade() if info(node).remade else price

    def inside(self, node: fx.Node) -> NodeCost:
        """Return the cost of the messages inside a joint kernel; zero for any other node."""
        if info(node).joint is None:
            return NodeCost()
        price = sum((self._inside(*call) for call in info(node).calls), NodeCost())
        return price.remade() if info(node).remade else price

    def elsewhere(self, node: fx.Node) -> dict[RecomputeRegion, NodeCost]:
        """Return the cost of offloading a node's value until backward, by region."""
        if not info(node).away or storage(node) is not node:
            return {}
        size, away = float(info(node).type.local_bytes(self.mesh)), info(node).away
        costs = {r: self.away(r.how.keep, axes, size) for r, axes in away.items()}
        if not _is_read_by_all(node):
            return costs
        return {region: cost.repeated(region.count) for region, cost in costs.items()}

    def away(self, keep: Keep, axes: tuple[str, ...], size: float) -> NodeCost:
        """Return the cost of keeping `size` bytes sharded over `axes`, or on the host."""
        gathered = float(self.price.seconds("all_gather", axes, size)) if axes else 0.0
        if keep != "host":
            return NodeCost(backward=gathered)
        copied = self.device.host.copied(piece_bytes(size, axes, self.mesh))
        shown, hidden = 1 - self.device.overlap, 2 * copied * self.device.overlap
        return NodeCost(copied * shown, gathered + copied * shown, hidden)

    def level(self, axes: tuple[str, ...]) -> str:
        """Return "inside" or "between" nodes for a movement; "host" for one over no axes."""
        if not axes:
            return "host"
        return "inside" if self.price.link(axes).level == "inside" else "between"

    def _once(self, node: fx.Node) -> NodeCost:
        if (movement := info(node).movement) is not None:
            return self._movement(node, movement)
        if (places := info(node).places) is not None:
            return self.stored(node, places)
        calls = info(node).calls
        if id(calls) not in self._calls:
            self._calls[id(calls)] = calls, sum((self._call(*call) for call in calls), NodeCost())
        price = self._calls[id(calls)][1]
        if copied_parameter(node) is None:
            return price
        # A cast that the runtime makes once a step, for all micro-batches and both ways.
        return price._replace(forward=0.0, cast=price.forward)

    def stored(self, node: fx.Node, places: ParameterPlacement) -> NodeCost:
        """Return the cost of a parameter in these places."""
        facts, sync, overlapped = _parameter_facts(node), late_sum_axes(node), self._beside(node)
        key = places, facts, sync, overlapped
        if key not in self._states:
            self._states[key] = self._kept(places, facts, sync, overlapped)
        return self._states[key]

    def _kept(
        self,
        places: ParameterPlacement,
        about: ParameterFacts,
        sync: tuple[str, ...],
        beside: OverlappedWork,
    ) -> NodeCost:
        """Return the cost of a parameter, computed anew."""
        cost = self.states.kept(places, about, sync, beside)
        if places.storage == places.working:  # no movement of the program stands for the copy
            cost += self.states.used(places, about, (), beside)
        return cost

    def _call(self, facts: Facts, strategy: Strategy) -> NodeCost:
        key = facts, strategy
        if key not in self._known:
            done = operator_work(facts, ShardSizes(facts.rule, [strategy], self.mesh))
            forward, backward = operator_seconds(facts, done, self.device)
            self._known[key] = NodeCost(float(forward[0]), float(backward[0]))
        return self._known[key]

    def _inside(self, facts: Facts, strategy: Strategy) -> NodeCost:
        computed = self._call(facts, strategy)
        seconds = ComputeSeconds(computed.forward, computed.backward)
        return joint_message_cost(facts, strategy, self.price, self.device.overlap, seconds)

    def _movement(self, node: fx.Node, movement: Movement) -> NodeCost:
        parameter = gathered_parameter(node)
        if parameter is not None and parameter not in node.all_input_nodes:
            return NodeCost()  # the first stands for all gathers of it
        if parameter is not None:
            return self.states.used(*self._use(parameter, movement), self._beside(parameter))
        ways = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        for collective in self._moved(node, movement):
            if collective.when == "step":
                seconds = self.price.bucketed(collective.axes, collective.bytes, collective.kind)
            else:
                seconds = self.price.seconds(collective.kind, collective.axes, collective.bytes)
            ways[collective.when] += float(seconds)
        forward, backward, once = ways.values()
        covered = self.states.hidden(once, self._beside(node).backward) if once else 0.0
        hidden = self.states.hidden(backward, self._weights(node)) if backward else 0.0
        further = {"summed": once, "covered": covered, "reduced": hidden}
        return NodeCost(forward, backward - hidden, hidden, **further)

    def collectives(self, node: fx.Node) -> list[Collective]:
        """Return the collectives of a node, by which it is priced."""
        node_info, collectives = info(node), list[Collective]()
        if node_info.movement is not None:
            collectives += self._moved(node, node_info.movement)
        elif (places := node_info.places) is not None:
            collectives += self.states.moved_once(
                places, _parameter_facts(node), late_sum_axes(node)
            )
            if places.storage == places.working:
                again = self._beside(node).learns
                collectives += self.states.moved_for_use(
                    places, _parameter_facts(node), (), is_read_again=again
                )
        elif node_info.joint is not None:
            for call in node_info.calls:
                collectives += joint_collectives(*call, self.mesh)
        if node_info.remade:
            collectives += [
                collective._replace(when="backward")
                for collective in collectives
                if collective.when == "forward"
            ]
        if storage(node) is node:
            size = float(node_info.type.local_bytes(self.mesh)) if node_info.away else 0.0
            gathers = (axes for axes in node_info.away.values() if axes)
            collectives += [Collective("all_gather", axes, size, "backward") for axes in gathers]
        return collectives

    def _moved(self, node: fx.Node, movement: Movement) -> list[Collective]:
        """Return the collectives of a movement of the program."""
        (value,) = node.all_input_nodes
        before: TensorType = info(value).type
        axes, learns = movement.axes, info(node).learns
        if (parameter := gathered_parameter(node)) is not None:
            if value is not parameter:
                return []
            again = self._beside(parameter).learns
            places, facts, summed = self._use(parameter, movement)
            return self.states.moved_for_use(places, facts, summed, is_read_again=again)
        if movement.is_sum_back and is_made_of_parameters(value) and learns:
            size = float(before.local_bytes(self.mesh))
            return [Collective("all_reduce", axes, size, "step", SUMS)]
        ways: list[tuple[str, When]] = [(movement.kind, "forward")]
        ways += [(movement.backward, "backward")] if learns else []
        itemsize = before.dtype.itemsize
        size = moved_bytes(movement, before.layout, before.shape, itemsize, self.mesh)
        return [Collective(kind, axes, size, when) for kind, when in ways if kind not in FREE]

    def _use(self, parameter: fx.Node, movement: Movement) -> _ParameterUse:
        """Return for a parameter that a movement gathers: its places, its facts, and the axes over
        which its readers leave its gradient a partial sum."""
        places = info(parameter).places
        assert places is not None
        summed = places.storage.axes if movement.pending else ()
        return _ParameterUse(places, _parameter_facts(parameter), summed)

    def _weights(self, movement: fx.Node) -> float:
        """Return the seconds of the weight gradients that are made beside a movement's backward."""
        if not info(movement).alone:
            return 0.0  # the search knows of longer ways what they take together
        calls = [info(reader).calls[0] for reader in linears_after(movement)]
        return sum(
            weight_gradient_seconds(facts, self._call(facts, way).backward) for facts, way in calls
        )

    def _beside(self, value: fx.Node) -> OverlappedWork:
        """Return the work of a parameter's readers, as an estimate of what neighbours compute."""
        readers = list(dict.fromkeys(_readers_of(value)))
        costs = [self._call(*call) for reader, read in readers for call in _call_of(reader, read)]
        learns = any(info(reader).learns for reader, _ in readers)
        forward, backward = (sum(getattr(c, way) for c in costs) for way in ("forward", "backward"))
        return OverlappedWork(forward, backward, learns)


def _is_read_by_all(node: fx.Node) -> bool:
    """Return whether a value is outside of regions that stand for several, all of which read it;
    false for the output of a block, which only the next one reads."""
    region = info(node).region
    if region is None or info(node).count > 1:
        return region is None
    views, regions = [node], set[RecomputeRegion | None]()
    for value in views:
        views += [user for user in value.users if storage(user) is node]
        regions |= {info(user).region for user in value.users}
    return len(regions - {region, None}) > 1


def _readers_of(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the operators that read a value, moved or cast or as it is, each with what it reads."""
    for user in value.users:
        is_between = is_made_of_parameters(user) and not _leaves_a_sum(user, value)
        is_lifted = any(info(result).pending for result in values_of(user))
        if info(user).movement is not None or is_result(user) or is_lifted or is_between:
            yield from _readers_of(user)
        else:
            yield user, value


def _leaves_a_sum(reader: fx.Node, value: fx.Node) -> bool:
    """Return whether an operator on parameters leaves the gradient of one of them a partial sum."""
    rule, strategy = info(reader).rule, info(reader).strategy
    if copied_parameter(reader) is not None or rule is None or strategy is None:
        return False
    gradients = zip(tensor_inputs(reader), rule.signature(strategy).gradients)
    return any(gradient.partial for read, gradient in gradients if read is value)


def _call_of(reader: fx.Node, value: fx.Node) -> tuple[tuple[Facts, Strategy], ...]:
    """Return the call that reads `value`, of an operator that was made of several."""
    calls = info(reader).calls
    if len(calls) < 2:
        return calls
    first = len(calls[0][0].rule.inputs)
    return calls[:1] if value in tensor_inputs(reader)[:first] else calls[1:]


def _parameter_facts(parameter: fx.Node) -> ParameterFacts:
    """Return shape, bytes of an element, and whether a parameter learns."""
    value = info(parameter).val
    return ParameterFacts(tuple(value.shape), state_bytes(parameter), info(parameter).learns)


def program_run_cost(
    graph: fx.Graph, prices: NodePrices, blocks: EqualBlocks = NO_EQUAL_BLOCKS
) -> RunCost:
    """Return the cost of one run of the rewritten `graph`: the sums of its nodes' prices."""
    worked, moved = NodeCost(), NodeCost()
    shown, reduced = (dict.fromkeys(("inside", "between", "host"), 0.0) for _ in range(2))
    take = blocks.along(lambda node: _node_shares(node, prices))
    for node in graph.nodes:
        (work, moves, levels), times = take(node), info(node).count
        worked = worked if work is None else worked + work.repeated(times)
        moved = sum((move.repeated(times) for move in moves), moved)
        for level, seconds_, behind in levels:
            shown[level] += seconds_ * times
            reduced[level] += behind * times
    return RunCost(worked, moved, shown, reduced["between"] / (sum(reduced.values()) or 1.0))


NodeShares = tuple[NodeCost | None, list[NodeCost], list[tuple[str, float, float]]]


def _node_shares(node: fx.Node, prices: NodePrices) -> NodeShares:
    """Return the computing and the movements of a node, and by level the seconds that show and
    those that only an unsplit backward hides."""
    node_info, work, cost = info(node), None, NodeCost()
    if node_info.movement is not None or node_info.places is not None:
        cost = prices.own(node)
    else:
        work = prices.computed(node)
        if node_info.joint is not None:
            cost = prices.inside(node)
    shown = cost.forward + cost.backward
    moves, levels = [cost], [(prices.level(_moved_axes(node)), shown, cost.reduced)]
    for region, offload in prices.elsewhere(node).items():
        moves.append(offload)
        # What goes to the host comes back; what is gathered is so in backward alone.
        levels.append(("host", 2 * offload.forward, 0.0))
        gathered = offload.backward - offload.forward
        levels.append((prices.level(node_info.away[region]), gathered, 0.0))
    return work, moves, levels


def _moved_axes(node: fx.Node) -> tuple[str, ...]:
    """Return the axes over which a node moves data in each run."""
    node_info = info(node)
    if node_info.movement is not None:
        return node_info.movement.axes
    if node_info.joint is not None:
        return node_info.joint.axes
    if node_info.places is None:
        return ()
    stored = node_info.places.storage.axes
    return tuple(axis for axis in node_info.places.gradient.axes if axis not in stored)
