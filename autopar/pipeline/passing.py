"""Passing: the copies of parameters that are here while a call runs, of those that live a use.

Two groups at a time: the one that is read, and the one that comes next, as the runtime brings them
(`runtime/copies.py`). In backward those calls ask for them that read their elements again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable

from torch import fx

from autopar.capture.origins import taken_copies
from autopar.cost.ways import copied_in, copy_groups
from autopar.mesh import Mesh
from autopar.passes.gathers import is_read_again, readers_of
from autopar.strategies.node_info import info


class Passing:
    """Of one program."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, buffer_bytes: int) -> None:
        copied = copied_in(graph.nodes, mesh)
        groups = copy_groups(copied.values(), mesh, buffer_bytes)
        passing = [group for group in groups if not group.kind.lasts]
        self._sizes = [float(group.bytes(mesh)) for group in passing]
        self._place: dict[fx.Node, int] = {}
        if not self._sizes:
            return
        self._place = {node: at for at, node in enumerate(graph.nodes)}
        number = {name: at for at, group in enumerate(passing) for name in group.names}
        spans = [(len(self._place), -1)] * len(passing)
        again: dict[int, set[int]] = {}  # by the place of a reader, the groups
        for node, one in copied.items():
            if (group := number.get(one.name)) is None:
                continue
            end = [node, *taken_copies(node)][-1]
            for reader, value in readers_of(end):
                at, (first, last) = self._place[reader], spans[group]
                spans[group] = min(first, at), max(last, at)
                if info(reader).learns and is_read_again(reader, value):
                    again.setdefault(at, set()).add(group)
        self._order = sorted(range(len(passing)), key=lambda group: spans[group][0])
        self._spans, self._again = spans, again
        self._firsts = [spans[group][0] for group in self._order]
        self._asked = sorted(again)
        self.after_forward = tuple(self._sizes[group] for group in self._order[-2:])
        wanted = reversed(self._wanted(-1))
        self.after_backward = tuple(self._bytes(groups) for groups in wanted if groups)

    # Bytes of the groups that are left here, at most two, the one that was read last at the end.
    after_forward: tuple[float, ...] = ()
    after_backward: tuple[float, ...] = ()

    def forward(self, node: fx.Node) -> float | None:
        """Bytes while a call runs; None before the first of them have come."""
        if not self._sizes:
            return None
        place, order = self._place[node], self._order
        at = bisect_right(self._firsts, place) - 1
        if at < 0:
            return None
        near = order[at : at + 2] if at + 1 < len(order) else order[-2:]
        return self._bytes({*near, *(one for one in order[:at] if self._spans[one][1] >= place)})

    def backward(self, node: fx.Node) -> float | None:
        """Bytes while its backward runs."""
        wanted, following = self._wanted(self._place[node]) if self._sizes else ((), ())
        return self._bytes({*wanted, *following}) if wanted else None

    def _wanted(self, place: int) -> tuple[Collection[int], Collection[int]]:
        """The groups that are wanted where backward has come to a place, and the one beside them:
        none before the first are."""
        at = bisect_left(self._asked, place)
        if at == len(self._asked):
            return (), ()
        groups = self._again[self._asked[at]]
        before = reversed(self._asked[:at])
        others = (self._again[one] - groups for one in (*before, *self._asked[at + 1 :]))
        following = next((max(found) for found in others if found), None)
        return groups, () if following is None else (following,)

    def _bytes(self, groups: Iterable[int]) -> float:
        return sum(self._sizes[group] for group in groups)
