"""Gather groups: which parameters are gathered together.

Neighbours share a group: the parameters of a block, and small ones with the next, as far as a
buffer holds them. Each group is a message to each rank, so that many small ones cost more than
they hide.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol, TypeVar

SMALL_SHARE = 8  # a group of less than this share of the largest block joins its neighbour
LIVE_GROUPS = 2  # of copies that live a use: the one in use, and the next
_NUMBERED = re.compile(r"(?<![^.])\d+(?=\.)")  # a module with a number for its name


class GatheredParameter(Protocol):
    """A parameter of which copies are made."""

    @property
    def name(self) -> str: ...

    @property
    def first(self) -> int:
        """Return the place of its first reader in the program."""
        ...

    @property
    def last(self) -> int: ...


SomeGathered = TypeVar("SomeGathered", bound=GatheredParameter)


@dataclass
class _Neighbours:
    """Parameters that are read one after another."""

    block: str | None
    members: list[Any]
    size: Callable[[Any], float]
    is_apart: bool = False  # read far from its neighbours

    @property
    def bytes(self) -> float:
        return sum(map(self.size, self.members))


def gather_groups(
    routes: Sequence[SomeGathered],
    size: Callable[[SomeGathered], float],
    buffer_bytes: int,
    *,
    is_step_long: bool = False,
) -> list[list[SomeGathered]]:
    """Return neighbouring parameters in groups, in the order of their first use.

    No group is much larger than the largest block. None with several parameters takes more than
    `buffer_bytes`. A parameter that is read in several blocks has a group of its own.

    Copies that live to the end of a step (`is_step_long`) have memory together anyway. They come in
    as few groups as buffers hold.
    """
    ordered, block_of = sorted(routes, key=lambda route: route.first), _block_of_parameter(routes)
    if is_step_long:
        every = _Neighbours(None, ordered, size)
        return [part.members for part in _split_to_buffers(every, buffer_bytes)]
    starts = [next(run).first for _, run in groupby(ordered, key=block_of)]
    between = (bisect_left(starts, r.last) - bisect_right(starts, r.first) for r in ordered)
    far = {route.name for route, count in zip(ordered, between) if count > 1}
    runs: list[_Neighbours] = []
    for (block, is_apart), neighbours in groupby(ordered, lambda r: (block_of(r), r.name in far)):
        runs.append(_Neighbours(block, list(neighbours), size, is_apart))
    blocks = [run.bytes for run in runs if run.block is not None]
    most = min(buffer_bytes, max(blocks)) if len(blocks) > 1 else buffer_bytes
    runs = [part for run in runs for part in _split_to_buffers(run, buffer_bytes)]
    return [run.members for run in _join_neighbours(runs, most, buffer_bytes)]


def _split_to_buffers(run: _Neighbours, buffer_bytes: int) -> list[_Neighbours]:
    """Split into as few runs as fit into buffers; a larger parameter is a run by itself."""
    found: list[_Neighbours] = []
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


def _join_neighbours(
    runs: Sequence[_Neighbours], most: float, buffer_bytes: int
) -> list[_Neighbours]:
    """Join neighbours of at most `most` bytes, and small ones where a buffer holds them."""
    found: list[_Neighbours] = []
    for run in runs:
        before = found[-1] if found else None
        if before is not None and not (before.is_apart or run.is_apart):
            both = before.bytes + run.bytes
            is_small = min(run.bytes, before.bytes) * SMALL_SHARE <= most and both <= buffer_bytes
            is_block = run.block is not None and before.block is not None
            if both <= most or (is_small and not is_block):
                before.members += run.members
                continue
        found.append(run)
    return found


def numbered_modules(name: str) -> list[str]:
    """Return the numbered modules that a parameter belongs to, the outermost first."""
    return [name[: match.end()] for match in _NUMBERED.finditer(name)]


def _block_of_parameter(
    routes: Sequence[GatheredParameter],
) -> Callable[[GatheredParameter], str | None]:
    """Return a function from parameter to its block: the outermost list of several."""

    def at(depth: int) -> dict[str, str | None]:
        paths = {}
        for route in routes:
            modules = numbered_modules(route.name)
            paths[route.name] = modules[depth] if len(modules) > depth else None
        return paths

    depth, paths = 0, at(0)
    while len(set(paths.values()) - {None}) == 1:
        depth += 1
        paths = at(depth)
    if not set(paths.values()) - {None}:
        paths = at(0)
    return lambda route: paths[route.name]
