"""Situation: machines and sizes of inputs, and what a step takes there; WhatIf: two beside each
other, or three."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from autopar.base.schema import write
from autopar.capture.sizes import Sizes
from autopar.planner.candidate import Alternative, Candidate
from autopar.report.weighed_plans import kinds_of, parts_of
from autopar.text.tables import table, wrapped
from autopar.text.units import bytes_text, change_text, scaled, seconds_text


@dataclass(frozen=True)
class Situation:
    """A way to run a step, and where."""

    nodes: int
    devices: int
    device: str
    bandwidth: float  # bytes/s of each node's way out; of links inside, where there is one node
    inside: float  # bytes/s of a link in a node
    limit: float  # bytes of the fullest device
    sizes: Sizes
    way: Alternative  # with its seconds and bytes, and their parts

    @classmethod
    def of(cls, candidate: Candidate, limit: float, sizes: Sizes) -> Situation:
        """Of a candidate on those nodes of its cluster that it uses."""
        cluster = candidate.cluster.in_use
        return cls(
            nodes=len(cluster.nodes),
            devices=candidate.whole_mesh.size,
            device=cluster.device.name,
            bandwidth=cluster.network.bandwidth,
            inside=min(node.link.bandwidth for node in cluster.nodes),
            limit=candidate.room(limit),
            sizes=sizes,
            way=candidate.alternative(limit),
        )

    @property
    def unit(self) -> str:
        """What a step goes through."""
        return "samples" if self.sizes.sequence is None else "tokens"

    @property
    def rate(self) -> float:
        """How many of these in a second."""
        count = (self.sizes.batch or 1) * (self.sizes.sequence or 1)
        return count / self.way.seconds if self.way.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        told = asdict(self) | {"way": write(self.way), "seconds": self.way.seconds}
        told |= {"parts": self.way.cost.parts, "memory": self.way.memory, "fits": self.way.fits}
        return told | {f"{self.unit}_per_second": self.rate}


@dataclass(frozen=True)
class WhatIf:
    """What a plan takes now, and what its decisions would take in another situation."""

    asked: str
    now: Situation
    then: Situation | None  # None: its decisions cannot be taken over
    refused: str = ""  # why not
    note: str = ""  # what follows the nodes
    searched: Situation | None = None  # decided anew, if that was asked for
    not_found: str = ""  # why nothing was

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        told = {name: getattr(self, name) for name in ("now", "then", "searched")}
        found = {name: None if one is None else one.to_json() for name, one in told.items()}
        words = {name: getattr(self, name) for name in ("asked", "note", "refused", "not_found")}
        return words | found

    def __str__(self) -> str:
        lines = [f"what if: {self.asked}"]
        if self.refused:
            lines.append(f"  the decisions of the plan cannot be taken over: {self.refused}")
        else:
            lines.append("  the same decisions, priced there; nothing was searched for them")
        if self.note:
            batch = (self.then or self.now).sizes.batch
            is_same = batch == self.now.sizes.batch
            stays = f"stays {batch}: batch= changes it" if is_same else f"becomes {batch}"
            lines.append(f"  {self.note}; the global batch {stays}")
        if self.searched is not None:
            lines.append("  searched: decided anew, with everything free")
        if self.not_found:
            lines.append(f"  searched: nothing was found: {self.not_found}")
        each = (one for line in lines for one in line.replace("\n", "\n    ").splitlines())
        told = [part for one in each for part in wrapped(one)]
        return "\n".join([*told, "", *self._table()])

    def _table(self) -> list[str]:
        named = {"now": self.now, "then": self.then, "searched": self.searched}
        shown = {name: one for name, one in named.items() if one is not None}
        return table([("", *shown), *self._rows(list(shown.values()))])

    def _rows(self, shown: list[Situation]) -> Iterator[tuple[str, ...]]:
        """What is told of each, and of what."""
        yield "devices", *(f"{one.devices} x {one.device}" for one in shown)
        yield "nodes", *(str(one.nodes) for one in shown)
        if max(one.nodes for one in shown) > 1:
            yield "between nodes", *(_rate(one.bandwidth) * (one.nodes > 1) or "-" for one in shown)
        yield "inside nodes", *(_rate(one.inside) for one in shown)
        yield "batch", *(str(one.sizes.batch or "-") for one in shown)
        if self.now.sizes.sequence is not None:
            yield "sequence", *(str(one.sizes.sequence) for one in shown)
        yield (
            "mesh",
            *(", ".join(f"{a}={n}" for a, n in one.way.mesh.sizes.items()) for one in shown),
        )
        yield "runs as", *(one.way.said("recompute", "states") for one in shown)
        if any(not one.way.states.is_whole for one in shown):
            yield "states", *(str(one.way.states) for one in shown)
        if any(one.way.recompute for one in shown):
            yield "recomputed", *(one.way.recompute or "-" for one in shown)
        yield "a step", *(seconds_text(one.way.seconds) + self._against(one) for one in shown)
        for part in parts_of(one.way for one in shown):
            yield f"  {part}", *(seconds_text(one.way.cost.parts[part]) for one in shown)
        yield f"{self.now.unit}/s", *(scaled(one.rate, "", 3) for one in shown)
        held = (f"{bytes_text(one.way.memory)} of {bytes_text(one.limit)}" for one in shown)
        yield "memory at the peak", *held
        for kind in kinds_of(one.way for one in shown):
            sizes = (bytes_text(one.way.held.kinds[kind]) for one in shown)
            yield f"  {kind.replace('_', ': ')}", *sizes
        yield "fits", *("yes" if one.way.fits else "no" for one in shown)

    def _against(self, one: Situation) -> str:
        """Its seconds beside those of now."""
        now = self.now.way.seconds
        if one is self.now or not now:
            return ""
        return f" ({change_text(now, one.way.seconds)})"


def _rate(bandwidth: float) -> str:
    return scaled(bandwidth, "B/s", 3)
