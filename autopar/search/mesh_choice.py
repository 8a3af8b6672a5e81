"""Mesh choice: which of many meshes a search leaves out without pricing any operator on them.

All meshes with one number of axes are weighed while they are few. Otherwise only those are that
split an axis of one of the best with fewer axes. For large programs the best alone is split, and
no further if the last split gained nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.mesh import Mesh
from autopar.search.search_report import ConsideredMesh

MOST_OF_A_KIND = 8  # meshes with the same number of axes that are all weighed
MOST_SPLIT = 2  # meshes whose axes are split, if there are more; of a large program the best one
_GAIN = 1e-3  # relative: if one more axis saved less, the next one is expected to save nothing


def reason_to_skip(
    mesh: Mesh, meshes: Sequence[Mesh], considered: Sequence[ConsideredMesh], *, is_small: bool
) -> str:
    """Return the reason to leave out `mesh`, one of all `meshes`, after some; "" to weigh it."""
    axes = len(mesh.names)
    limit = MOST_OF_A_KIND if is_small or axes < 3 else MOST_SPLIT
    is_one_of_few = sum(len(other.names) == axes for other in meshes) <= limit
    coarser = [c for c in considered if len(c.mesh.names) == axes - 1]
    if is_one_of_few or not coarser:
        return ""
    # Meshes that do not fit come last, first those that nearly do.
    coarser.sort(key=lambda c: (c.seconds is None, c.seconds or c.memory or math.inf))
    is_by_time = not is_small and coarser[0].seconds is not None
    best = coarser[: 1 if is_by_time else MOST_SPLIT]
    split_meshes = [c for c in best if _split_at(mesh, c.mesh)]
    if not split_meshes:
        return "splits no axis of the best meshes with fewer axes"
    return _gains_nothing(mesh, split_meshes[0], considered) if is_by_time else ""


def _gains_nothing(mesh: Mesh, coarse: ConsideredMesh, considered: Sequence[ConsideredMesh]) -> str:
    """Return the reason why splitting an axis of `coarse`, the best, gains nothing; or "".
    The last axis gained nothing, another split of the same axis did not, or some split did."""
    seconds, remainder = coarse.seconds or 0.0, 1 - _GAIN
    if seconds > _fastest(considered, len(coarse.mesh.names) - 1) * remainder:
        return f"an axis less takes {_GAIN:.1%} more at most"
    axis = _split_at(mesh, coarse.mesh)
    for other in considered:
        if other.seconds is None or not (split := _split_at(other.mesh, coarse.mesh)):
            continue
        if other.seconds < seconds * remainder:
            return f"{other.mesh} is as good a split: it gains more than {_GAIN:.1%}"
        if split == axis:
            return f"{other.mesh}, which splits the same axis, gains less than {_GAIN:.1%}"
    return ""


def _fastest(considered: Sequence[ConsideredMesh], axes: int) -> float:
    """Return the seconds on the best mesh of `axes` axes."""
    seconds = (c.seconds for c in considered if len(c.mesh.names) == axes and c.seconds is not None)
    return min(seconds, default=math.inf)


def _split_at(mesh: Mesh, coarse: Mesh) -> int:
    """Return which axis of `coarse`, counted from 1, split in two gives `mesh`; 0 for none."""
    sizes = mesh.shape
    for at in range(len(sizes) - 1):
        if (*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :]) == coarse.shape:
            return at + 1
    return 0
