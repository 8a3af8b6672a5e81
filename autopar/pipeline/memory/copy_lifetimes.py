"""Passing: the copies of parameters that are here while a call runs, of those that live a use.

Two groups are alive at a time: the one that is read and the next one, as the runtime gathers them
(`runtime/parameters/gathered_copies.py`). In backward, calls that read the elements again or run
again need a copy.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.origins import taken_copies
from autopar.cost.copy_groups import copied_parameters, copy_groups
from autopar.cost.gather_groups import LIVE_GROUPS
from autopar.cost.saved_tensors import recomputed_for
from autopar.mesh import Mesh
from autopar.passes.gathers import is_read_again, readers_of
from autopar.strategies.node_info import RecomputeRegion, info

Groups = frozenset[int]
NONE: Groups = frozenset()


@dataclass(frozen=True)
class Ask:
    """What backward asks for, and what is here then."""

    groups: Groups
    here: Groups


class Passing:
    """Of one program."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, buffer_bytes: int) -> None:
        self.asks: list[Ask] = []
        copied = copied_parameters(graph.nodes, mesh)
        groups = copy_groups(copied.values(), mesh, buffer_bytes)
        self.groups = [group for group in groups if not group.kind.lasts]
        self._sizes = [float(group.bytes(mesh)) for group in self.groups]
        self._place: dict[fx.Node, int] = {}
        if not self._sizes:
            return
        self._place = {node: at for at, node in enumerate(graph.nodes)}
        number = {name: at for at, group in enumerate(self.groups) for name in group.names}
        spans = [(len(self._place), -1)] * len(self.groups)
        reads, again = dict[fx.Node, Groups](), dict[fx.Node, Groups]()  # by reader
        for node, one in copied.items():
            if (group := number.get(one.name)) is None:
                continue
            end = [node, *taken_copies(node)][-1]
            for reader, value in readers_of(end):
                at, (first, last) = self._place[reader], spans[group]
                spans[group] = min(first, at), max(last, at)
                reads[reader] = reads.get(reader, NONE) | {group}
                if info(reader).learns and is_read_again(reader, value):
                    again[reader] = again.get(reader, NONE) | {group}
        self._order = sorted(range(len(self.groups)), key=lambda group: spans[group][0])
        self._spans = spans
        self._firsts = [spans[group][0] for group in self._order]
        # Those that are still read when the next one has come, by place in that order.
        nexts = zip(range(len(self._order)), self._order, self._firsts[1:])
        self._long = [(at, group) for at, group, first in nexts if spans[group][1] >= first]
        self.after_forward = tuple(self._order[-2:])
        self._asked: list[int] = []  # the places where backward asks, and what is here from there
        self._here: list[float] = []
        self._follow(_Backward(graph, mesh, reads, again))

    # The groups that are left here, at most two, the one that was read last at the end.
    after_forward: tuple[int, ...] = ()
    after_backward: tuple[int, ...] = ()

    def forward(self, node: fx.Node) -> float | None:
        """Bytes while a call runs; None before the first of them have come."""
        if not self._sizes:
            return None
        place, order = self._place[node], self._order
        at = bisect_right(self._firsts, place) - 1
        if at < 0:
            return None
        near = order[at : at + 2] if at + 1 < len(order) else order[-2:]
        before = (one for number, one in self._long if number < at)
        return self._bytes({*near, *(one for one in before if self._spans[one][1] >= place)})

    def backward(self, node: fx.Node) -> float | None:
        """Bytes while its backward runs."""
        if not self._sizes:
            return None
        at = bisect_left(self._asked, self._place[node])
        return self._here[at] if at < len(self._asked) else None

    def _follow(self, calls: _Backward) -> None:
        """What is here as backward goes from call to call."""
        window = _Window(self._sizes, self.asks)
        for node, groups, following, remade in calls:
            if groups:
                window.ask(groups, following)
            if remade:
                window.again(remade)
            self._asked.append(self._place[node])
            self._here.append(self._bytes(window.here))
        self._asked.reverse()
        self._here.reverse()
        if self._here:
            others = [group for group in window.here if group not in window.wanted]
            self.after_backward = (*others, *sorted(window.wanted))[-2:]

    def size(self, group: int) -> float:
        """Bytes of a group."""
        return self._sizes[group]

    def _bytes(self, groups: Iterable[int]) -> float:
        return sum(self._sizes[group] for group in groups)


class _Backward:
    """The calls at which backward asks for groups, from the last: those that it reads again, which
    come next, and in their order those that calls read which run again then."""

    def __init__(
        self,
        graph: fx.Graph,
        mesh: Mesh,
        reads: dict[fx.Node, Groups],
        again: dict[fx.Node, Groups],
    ) -> None:
        self._nodes, self._mesh = list(graph.nodes), mesh
        self._reads, self._again = reads, again
        self._inside: dict[RecomputeRegion, list[fx.Node]] = {}
        for node in self._nodes:
            if (region := info(node).region) is not None and node.op == "call_function":
                self._inside.setdefault(region, []).append(node)
        self._remade: set[RecomputeRegion | fx.Node] = set()  # what runs again has done so

    def __iter__(self) -> Iterator[tuple[fx.Node, Groups, int | None, list[Groups]]]:
        asking = [node for node in self._nodes if node in self._again]
        for node in reversed(self._nodes):
            groups = self._again.get(node, NONE)
            if groups:
                asking.pop()
            before = (sorted(self._again[one] - groups) for one in reversed(asking))
            remade = [self._reads[one] for one in self._run_again(node) if one in self._reads]
            if groups or remade:
                following = next((found[0] for found in before if found), None)
                yield node, groups, following, remade

    def _run_again(self, node: fx.Node) -> Iterator[fx.Node]:
        """The calls that run again when backward reads what a call has kept."""
        region = info(node).region
        if region is None or region in self._remade or not info(node).learns:
            return
        wanted = recomputed_for(node, self._mesh)
        if region.is_full and wanted:
            self._remade.add(region)
            inside = self._inside[region]
            yield from inside[: inside.index(node) + 1]
        elif not region.is_full:
            for value, _ in wanted:
                yield from self._made_again(value)

    def _made_again(self, node: fx.Node) -> Iterator[fx.Node]:
        """A call whose value is dropped, after those that it reads."""
        if node in self._remade or not info(node).remade:
            return
        self._remade.add(node)
        for value in node.all_input_nodes:
            yield from self._made_again(value)
        yield node


class _Window:
    """The groups that are here in backward, as the runtime lets them come and go."""

    def __init__(self, sizes: Sequence[float], asks: list[Ask]) -> None:
        """What is asked for comes to `asks`."""
        self._sizes, self._asks = sizes, asks
        self.here: dict[int, bool] = {}  # False: it is on its way
        self.wanted = self._held = NONE

    def ask(self, groups: Groups, following: int | None = None) -> None:
        """Have these, and send for the next one."""
        self.wanted = groups
        for group in sorted(groups):
            self._bring(group)
        if following is not None:
            self._start(following)
        self._asks.append(Ask(groups, frozenset(self.here)))

    def again(self, asked: Iterable[Groups]) -> None:
        """A forward runs again, which asks for these: what backward wants is there at its end."""
        before = self.wanted, self._held
        self._held |= self.wanted
        for groups in asked:
            self.ask(groups)
        self.wanted, self._held = before
        for group in sorted(self.wanted):
            self._bring(group)

    def _start(self, group: int) -> None:
        if group not in self.here:
            self._make_room(group, lambda: len(self.here) >= LIVE_GROUPS)
            self.here[group] = False

    def _bring(self, group: int) -> None:
        if not self.here.get(group):
            self._start(group)
            most = LIVE_GROUPS * max(self._sizes)
            self._make_room(group, lambda: sum(self._sizes[one] for one in self.here) > most)
        self.here.pop(group)
        self.here[group] = True

    def _make_room(self, wanted: int, is_full: Callable[[], bool]) -> None:
        others = [one for one in self.here if one not in {wanted, *self.wanted}]
        for group in sorted(others, key=lambda one: (one in self._held, not self.here[one])):
            if is_full():
                del self.here[group]
