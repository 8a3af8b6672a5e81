"""Groups of blocks: which neighbouring blocks of a rank's program are compiled as one function.

Each call of a compiled function has its price, forward and backward, and nothing is fused across
it. So where nothing has to happen between blocks several are one, and a shallow program is one
altogether. A group repeats as blocks do, so what compiling takes stays flat in depth.

What is compiled as one gives its gradients together, when its backward has ended, and reads all its
parameters when it begins. So a group has no more bytes of these than travel together.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.origins import is_made_of_parameters
from autopar.capture.regions import runs
from autopar.collectives.redistribution import local_elements
from autopar.mesh import Mesh
from autopar.passes.gathers import have_copies, leave_copies, watch_readers
from autopar.strategies.node_info import info
from autopar.tensor_type import TensorType

MARKS = (have_copies, leave_copies, watch_readers)
MOST = 8  # blocks in one group
WHOLE = "all of it"


@dataclass(frozen=True)
class Together:
    """What bounds a group: the bytes that travel together, of gradients and of parameters that come
    from other ranks of a mesh."""

    mesh: Mesh
    bytes: int

    def places(self, graph: fx.Graph, blocks: Sequence[str]) -> Mapping[fx.Node, Hashable]:
        """Of each call the group that it belongs to; what stands between two groups has none."""

        def is_anywhere(node: fx.Node) -> bool:
            return node.target in MARKS or is_made_of_parameters(node)

        labels = {node: name for name, run in runs(graph, blocks, is_anywhere) for node in run}
        if not labels or _come_and_go(graph):
            return labels
        at_once = self._at_once(graph, labels)
        names = list(dict.fromkeys(labels.values()))
        if len(names) <= MOST and sum(at_once.values()) <= self.bytes:
            return dict.fromkeys(graph.nodes, WHOLE)
        groups = dict[str, str]()
        for _, family in itertools.groupby(names, lambda name: name.rpartition(".")[0]):
            for group in self._groups([*family], at_once):
                groups |= dict.fromkeys(group, group[0])
        return _with_between(graph, {node: groups[name] for node, name in labels.items()})

    def _groups(
        self, family: Sequence[str], at_once: Mapping[str | None, int]
    ) -> Iterator[Sequence[str]]:
        """Neighbours, in groups of one size if that can be."""
        largest = max(at_once.get(name, 0) for name in family)
        most = min(MOST, self.bytes // largest if largest else MOST, len(family))
        sizes = [size for size in range(1, most + 1) if not len(family) % size]
        size = sizes[-1] if sizes and 2 * sizes[-1] > most else max(1, most)
        for start in range(0, len(family), size):
            yield family[start : start + size]

    def _at_once(self, graph: fx.Graph, labels: Mapping[fx.Node, str]) -> dict[str | None, int]:
        """By block, and outside of them, bytes of parameters that travel, or have gradients, which
        a group gives altogether: beside those that they may add up to."""
        found = dict[str | None, int]()
        for node in graph.find_nodes(op="placeholder"):
            places = info(node).places
            moves = places is not None and places.optimizer != places.working
            if node.users and (moves or info(node).differentiable):
                name = labels.get(next(iter(node.users)))
                found[name] = found.get(name, 0) + self._bytes(info(node).type)
        return found

    def _bytes(self, type_: TensorType) -> int:
        elements = local_elements(type_.layout.dims, type_.shape, self.mesh)
        return int(elements * type_.dtype.itemsize)


def _come_and_go(graph: fx.Graph) -> bool:
    """Whether copies of parameters do between blocks, or gradients are cut there."""
    if graph.find_nodes(op="call_function", target=leave_copies):
        return True
    places = [info(node).places for node in graph.find_nodes(op="placeholder")]
    return any(at is not None and at.gradient != at.working for at in places)


def _with_between(graph: fx.Graph, groups: Mapping[fx.Node, str]) -> Mapping[fx.Node, Hashable]:
    """With what stands between two calls of one group."""
    found = dict[fx.Node, Hashable](groups)
    last, waiting = None, list[fx.Node]()
    for node in graph.nodes:
        if node not in groups:
            waiting.append(node)
            continue
        if groups[node] == last:
            found |= dict.fromkeys(waiting, last)
        last, waiting = groups[node], []
    return found
