"""Room checks: the refusal of plans that need more memory than a device or its host has."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.candidates.candidate import Candidate
from autopar.errors import InvalidInput
from autopar.text.units import bytes_text, counted


def no_room_on_host(tried: Sequence[Candidate]) -> InvalidInput:
    """Return the refusal of plans that keep more on the host of a node than it has."""
    least = max(tried, key=lambda candidate: candidate.fullest_host.room)
    load = least.fullest_host
    peaks = ", peaks of devices included, which are the same memory"
    return InvalidInput(
        "what the ranks of a node keep on its host fits into the memory that it has for them",
        got=f"{bytes_text(load.needed, 4)} of {counted(load.ranks, 'rank')}"
        f"{peaks if least.cluster.device.host.is_device else ''}, where it has "
        f"{bytes_text(load.memory, 4)}, with states {least.states} on {least.whole_mesh}",
        remedy="cut states into more parts, keep less on the host, or give a cluster with more",
    )


def require_room(candidate: Candidate, limit: float) -> None:
    """Refuse a plan that takes more than `limit` bytes of a device, or than its host has."""
    if candidate.needed(limit) > limit:
        raise InvalidInput(
            "a plan fits into the memory of every device",
            got=f"{bytes_text(candidate.memory.peak, 4)} on {candidate.whole_mesh}, where a plan "
            f"keeps to {bytes_text(limit, 4)}",
            remedy="make the plan again, for the memory that there is",
        )
    if candidate.fullest_host.room < 0:
        raise no_room_on_host([candidate])
