"""CopyLifetimes: the gathered copies that exist while a call runs, of those that live a use.

Two groups of copies are alive at a time: the one that is read and the next one, as the runtime
gathers them (`runtime/parameters/gathered_copies.py`). In backward, calls that read the elements
again or are recomputed need a copy.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autopar.capture.origins import taken_copies
from autopar.cost.copy_groups import copied_parameters, copy_groups
from autopar.cost.gather_groups import LIVE_GROUPS
from autopar.cost.saved_tensors import recomputed_for
from autopar.mesh import Mesh
from autopar.passes.gathers import is_read_again, readers_of
from autopar.strategies.node_info import RecomputeRegion, info

Groups = frozenset[int]
NO_COPIES: Groups = frozenset()


@dataclass(frozen=True)
class CopyRequest:
    """Record the groups that backward requests at a call, and those that are alive then."""

    groups: Groups
    alive: Groups


class CopyLifetimes:
    """Follow the gathered copies of one program through forward and backward."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, buffer_bytes: int) -> None:
        self.requests: list[CopyRequest] = []
        copied = copied_parameters(graph.nodes, mesh)
        groups = copy_groups(copied.values(), mesh, buffer_bytes)
        self.groups = [group for group in groups if not group.kind.is_step_long]
        self._sizes = [float(group.bytes(mesh)) for group in self.groups]
        self._place: dict[fx.Node, int] = {}
        if not self._sizes:
            return
        self._place = {node: at for at, node in enumerate(graph.nodes)}
        number = {name: at for at, group in enumerate(self.groups) for name in group.names}
        spans = [(len(self._place), -1)] * len(self.groups)
        reads, again = dict[fx.Node, Groups](), dict[fx.Node, Groups]()  # by reader
        for node, copied_value in copied.items():
            if (group := number.get(copied_value.name)) is None:
                continue
            end = [node, *taken_copies(node)][-1]
            for reader, value in readers_of(end):
                at, (first, last) = self._place[reader], spans[group]
                spans[group] = min(first, at), max(last, at)
                reads[reader] = reads.get(reader, NO_COPIES) | {group}
                if info(reader).learns and is_read_again(reader, value):
                    again[reader] = again.get(reader, NO_COPIES) | {group}
        self._order = sorted(range(len(self.groups)), key=lambda group: spans[group][0])
        self._spans = spans
        self._firsts = [spans[group][0] for group in self._order]
        # Groups still read when the next one has been gathered, by place in that order.
        nexts = zip(range(len(self._order)), self._order, self._firsts[1:])
        self._overlapping = [(at, group) for at, group, first in nexts if spans[group][1] >= first]
        self.after_forward = tuple(self._order[-2:])
        # Places at which backward requests groups, and the bytes of copies alive from there on.
        self._request_places: list[int] = []
        self._alive_bytes: list[float] = []
        self._follow(_BackwardRequests(graph, mesh, reads, again))

    # The groups that stay alive, at most two, the one that was read last at the end.
    after_forward: tuple[int, ...] = ()
    after_backward: tuple[int, ...] = ()

    def forward(self, node: fx.Node) -> float | None:
        """Return the bytes of copies while a call runs; None before the first are gathered."""
        if not self._sizes:
            return None
        place, order = self._place[node], self._order
        at = bisect_right(self._firsts, place) - 1
        if at < 0:
            return None
        near = order[at : at + 2] if at + 1 < len(order) else order[-2:]
        before = (group for number, group in self._overlapping if number < at)
        return self._bytes({*near, *(group for group in before if self._spans[group][1] >= place)})

    def backward(self, node: fx.Node) -> float | None:
        """Return the bytes of copies while a call's backward runs; None after the last request."""
        if not self._sizes:
            return None
        at = bisect_left(self._request_places, self._place[node])
        return self._alive_bytes[at] if at < len(self._request_places) else None

    def _follow(self, calls: _BackwardRequests) -> None:
        """Record the copies that are alive as backward goes from call to call."""
        live = _LiveGroups(self._sizes, self.requests)
        for read in calls:
            if read.groups:
                live.request(read.groups, read.following)
            if read.recomputed:
                live.recompute(read.recomputed)
            self._request_places.append(self._place[read.node])
            self._alive_bytes.append(self._bytes(live.groups))
        self._request_places.reverse()
        self._alive_bytes.reverse()
        if self._alive_bytes:
            others = [group for group in live.groups if group not in live.wanted]
            self.after_backward = (*others, *sorted(live.wanted))[-2:]

    def size(self, group: int) -> float:
        """Return the bytes of a group."""
        return self._sizes[group]

    def _bytes(self, groups: Iterable[int]) -> float:
        return sum(self._sizes[group] for group in groups)


class _BackwardRead(NamedTuple):
    """The groups that backward requests at a call."""

    node: fx.Node
    groups: Groups  # those that it reads again
    following: int | None  # the next group to be read
    recomputed: list[Groups]  # those of recomputed calls, in their order


class _BackwardRequests:
    """Iterate over the calls at which backward requests groups, from the last."""

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
        self._remade: set[RecomputeRegion | fx.Node] = set()  # recomputed already

    def __iter__(self) -> Iterator[_BackwardRead]:
        asking = [node for node in self._nodes if node in self._again]
        for node in reversed(self._nodes):
            groups = self._again.get(node, NO_COPIES)
            if groups:
                asking.pop()
            before = (sorted(self._again[call] - groups) for call in reversed(asking))
            rerun = self._run_again(node)
            recomputed = [self._reads[call] for call in rerun if call in self._reads]
            if groups or recomputed:
                following = next((missing[0] for missing in before if missing), None)
                yield _BackwardRead(node, groups, following, recomputed)

    def _run_again(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the calls that are recomputed when backward reads a call's saved tensors."""
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
        """Yield a call whose value was dropped, after the dropped calls that it reads."""
        if node in self._remade or not info(node).remade:
            return
        self._remade.add(node)
        for value in node.all_input_nodes:
            yield from self._made_again(value)
        yield node


class _LiveGroups:
    """Gather and drop groups in backward as the runtime does."""

    def __init__(self, sizes: Sequence[float], requests: list[CopyRequest]) -> None:
        """`requests`: the list to which every request is added."""
        self._sizes, self._requests = sizes, requests
        self.groups: dict[int, bool] = {}  # False: its gather has only begun
        self.wanted = self._held = NO_COPIES

    def request(self, groups: Groups, following: int | None = None) -> None:
        """Gather these groups, and begin to gather the following one."""
        self.wanted = groups
        for group in sorted(groups):
            self._bring(group)
        if following is not None:
            self._start(following)
        self._requests.append(CopyRequest(groups, frozenset(self.groups)))

    def recompute(self, requests: Iterable[Groups]) -> None:
        """Request the groups of a recomputed forward, after which backward's are alive again."""
        before = self.wanted, self._held
        self._held |= self.wanted
        for groups in requests:
            self.request(groups)
        self.wanted, self._held = before
        for group in sorted(self.wanted):
            self._bring(group)

    def _start(self, group: int) -> None:
        if group not in self.groups:
            self._make_room(group, lambda: len(self.groups) >= LIVE_GROUPS)
            self.groups[group] = False

    def _bring(self, group: int) -> None:
        if not self.groups.get(group):
            self._start(group)
            most = LIVE_GROUPS * max(self._sizes)
            self._make_room(group, lambda: sum(map(self._sizes.__getitem__, self.groups)) > most)
        self.groups.pop(group)
        self.groups[group] = True

    def _make_room(self, wanted: int, is_full: Callable[[], bool]) -> None:
        others = [group for group in self.groups if group not in {wanted, *self.wanted}]
        for group in sorted(
            others, key=lambda other: (other in self._held, not self.groups[other])
        ):
            if is_full():
                del self.groups[group]
