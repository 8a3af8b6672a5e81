"""Groups: which parameters are gathered together.

Neighbours travel in one group: those of a block, and small ones with those beside them, as far as
a buffer holds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol, TypeVar

from torch import fx

from autopar.capture.origins import state_bytes
from autopar.collectives.redistribution import local_elements
from autopar.mesh import Mesh
from autopar.states import BUFFER_BYTES
from autopar.strategies.node_info import info

SMALL = 8  # a group of less than this share of the largest block joins its neighbour
LIVE_GROUPS = 2  # of copies that live a use: the one in use, and the next
_NUMBERED = re.compile(r"(?<![^.])\d+(?=\.)")  # a module with a number for its name


class Gathered(Protocol):
    """A parameter of which copies are made."""

    @property
    def name(self) -> str: ...

    @property
    def first(self) -> int:
        """The place of its first reader in the program."""
        ...

    @property
    def last(self) -> int: ...


Read = TypeVar("Read", bound=Gathered)


@dataclass
class _Run:
    """Neighbours."""

    block: str | None
    members: list[Any]
    size: Callable[[Any], float]
    is_apart: bool = False  # read far from its neighbours

    @property
    def bytes(self) -> float:
        return sum(map(self.size, self.members))


def groups_of(
    routes: Sequence[Read], size: Callable[[Read], float], buffer_bytes: int = BUFFER_BYTES
) -> list[list[Read]]:
    """Neighbouring parameters in groups, in the order of their first use.

    No group is much larger than the largest block, and none takes more than `buffer_bytes` that
    has several parameters; one that is read in several blocks is in a group by itself.
    """
    ordered, block_of = sorted(routes, key=lambda route: route.first), _blocks(routes)
    starts = [next(run).first for _, run in groupby(ordered, key=block_of)]
    far = {r.name for r in ordered if sum(r.first < start < r.last for start in starts) > 1}
    runs: list[_Run] = []
    for (block, is_apart), neighbours in groupby(ordered, lambda r: (block_of(r), r.name in far)):
        runs.append(_Run(block, list(neighbours), size, is_apart))
    blocks = [run.bytes for run in runs if run.block is not None]
    most = min(buffer_bytes, max(blocks)) if len(blocks) > 1 else buffer_bytes
    runs = [part for run in runs for part in _split(run, buffer_bytes)]
    return [run.members for run in _joined(runs, most, buffer_bytes)]


def _split(run: _Run, buffer_bytes: int) -> list[_Run]:
    """As few runs as hold no more than a buffer; what is larger is one by itself."""
    found: list[_Run] = []
    part = replace(run, members=[])
    for member in run.members:
        if run.size(member) > buffer_bytes:
            found.append(replace(run, members=[member]))
            continue
        if part.members and part.bytes + run.size(member) > buffer_bytes:
            part = replace(run, members=[])
        if not part.members:
            found.append(part)
        part.members.append(member)
    return found


def _joined(runs: Sequence[_Run], most: float, buffer_bytes: int) -> list[_Run]:
    """Neighbours join where that is no more than `most`, and small ones if a buffer holds them."""
    found: list[_Run] = []
    for run in runs:
        before = found[-1] if found else None
        if before is not None and not (before.is_apart or run.is_apart):
            both = before.bytes + run.bytes
            is_small = min(run.bytes, before.bytes) * SMALL <= most and both <= buffer_bytes
            is_block = run.block is not None and before.block is not None
            if both <= most or (is_small and not is_block):
                before.members += run.members
                continue
        found.append(run)
    return found


def numbered_modules(name: str) -> list[str]:
    """The numbered modules that a parameter belongs to, the outermost first: all that groups ask of
    its name."""
    return [name[: match.end()] for match in _NUMBERED.finditer(name)]


def _blocks(routes: Sequence[Gathered]) -> Callable[[Gathered], str | None]:
    """The numbered module that a parameter belongs to: the outermost of which there are several."""

    def at(depth: int) -> dict[str, str | None]:
        paths = {}
        for route in routes:
            found = numbered_modules(route.name)
            paths[route.name] = found[depth] if len(found) > depth else None
        return paths

    depth, paths = 0, at(0)
    while len(set(paths.values()) - {None}) == 1:
        depth += 1
        paths = at(depth)
    if not set(paths.values()) - {None}:
        paths = at(0)
    return lambda route: paths[route.name]


@dataclass(frozen=True)
class _Used:
    """A parameter whose copies live a use."""

    name: str
    first: int
    last: int
    bytes: float


def used_bytes(nodes: Iterable[fx.Node], mesh: Mesh, buffer_bytes: int = BUFFER_BYTES) -> float:
    """Of the copies of parameters that are gathered for each use: two groups live."""
    sizes = _sizes(nodes, mesh, buffer_bytes, for_use=True)
    return min(sum(sizes), LIVE_GROUPS * max(sizes, default=0.0))


def largest_group(nodes: Iterable[fx.Node], mesh: Mesh, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Bytes of the largest group of copies, that live a use or a step."""
    nodes = list(nodes)
    both = [_sizes(nodes, mesh, buffer_bytes, for_use) for for_use in (False, True)]
    return int(max((size for sizes in both for size in sizes), default=0))


def _sizes(nodes: Iterable[fx.Node], mesh: Mesh, buffer_bytes: int, for_use: bool) -> list[float]:
    """Bytes of the groups of copies that live a use, or a step."""
    apart = [node for node in nodes if _is_copied(node, for_use)]
    if not apart:
        return []
    place = {node: at for at, node in enumerate(apart[0].graph.nodes)}
    kinds: dict[Any, list[_Used]] = {}
    for node in apart:
        if not (readers := _readers(node)):
            continue
        places, at = info(node).places, [place[user] for user in readers]
        assert places is not None
        fine, coarse = places.optimizer, places.storage
        if for_use:
            fine, coarse = places.storage, places.working
        size = local_elements(coarse.dims, tuple(info(node).val.shape), mesh)
        name, bytes_ = info(node).origin[1], float(size * state_bytes(node).copy)
        one = _Used(name, min(at), max(at), bytes_)
        kinds.setdefault((fine.axes, info(node).val.dtype), []).append(one)
    return [
        sum(one.bytes for one in group)
        for those in kinds.values()
        for group in groups_of(those, lambda one: one.bytes, buffer_bytes)
    ]


def _is_copied(node: fx.Node, for_use: bool) -> bool:
    """Whether there is a copy of a parameter for each use, or once a step."""
    places = info(node).places
    if places is None or for_use:
        return places is not None and places.is_copied_for_use
    moves, kept = places.goes_up == ("optimizer", "storage"), state_bytes(node)
    return places.storage != places.optimizer or kept.copy != kept.master or moves


def _readers(node: fx.Node) -> list[fx.Node]:
    """Those of a parameter, behind its gathers."""
    users = list(node.users)
    while len(users) == 1 and info(users[0]).movement is not None:
        users = list(users[0].users)
    return users
