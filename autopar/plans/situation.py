"""The answer to `plan.what_if(...)`: a step on some machines, now and in another situation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from autopar.base.schema import write
from autopar.candidates.alternative import Alternative
from autopar.candidates.candidate import Candidate
from autopar.capture.sizes import Sizes
from autopar.report.weighed_plans import kinds_of, parts_of
from autopar.text.tables import table, wrap_line
from autopar.text.units import bytes_text, change_text, scaled, seconds_text


@dataclass(frozen=True)
class Situation:
    """A way to run a step, the machines that it runs on, and the sizes of its inputs."""

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
        """Return the situation of a candidate on those nodes of its cluster that it uses."""
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
        """The unit of a step's inputs: samples, or tokens if there is a sequence."""
        return "samples" if self.sizes.sequence is None else "tokens"

    @property
    def rate(self) -> float:
        """The units that are trained on in a second."""
        count = (self.sizes.batch or 1) * (self.sizes.sequence or 1)
        return count / self.way.seconds if self.way.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        data = asdict(self) | {"way": write(self.way), "seconds": self.way.seconds}
        data |= {"parts": self.way.cost.parts, "memory": self.way.memory, "fits": self.way.fits}
        return data | {f"{self.unit}_per_second": self.rate}


@dataclass(frozen=True)
class WhatIf:
    """The cost of a plan now, and that of its decisions in another situation."""

    asked: str
    now: Situation
    then: Situation | None  # None: its decisions cannot be taken over
    refused: str = ""  # why not
    note: str = ""  # what follows the nodes
    searched: Situation | None = None  # decided anew, if that was asked for
    not_found: str = ""  # why nothing was

    def to_json(self) -> dict[str, Any]:
        """Return all situations as plain data."""
        named = {name: getattr(self, name) for name in ("now", "then", "searched")}
        data = {name: None if case is None else case.to_json() for name, case in named.items()}
        words = {name: getattr(self, name) for name in ("asked", "note", "refused", "not_found")}
        return words | data

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
        single = (part for line in lines for part in line.replace("\n", "\n    ").splitlines())
        wrapped_lines = [part for line in single for part in wrap_line(line)]
        return "\n".join([*wrapped_lines, "", *self._table()])

    def _table(self) -> list[str]:
        named = {"now": self.now, "then": self.then, "searched": self.searched}
        shown = {name: case for name, case in named.items() if case is not None}
        return table([("", *shown), *self._rows(list(shown.values()))])

    def _rows(self, shown: list[Situation]) -> Iterator[tuple[str, ...]]:
        """Yield rows of a table: the name of a figure, then the figure of each situation."""
        yield "devices", *(f"{case.devices} x {case.device}" for case in shown)
        yield "nodes", *(str(case.nodes) for case in shown)
        if max(case.nodes for case in shown) > 1:
            yield (
                "between nodes",
                *(_rate(case.bandwidth) * (case.nodes > 1) or "-" for case in shown),
            )
        yield "inside nodes", *(_rate(case.inside) for case in shown)
        yield "batch", *(str(case.sizes.batch or "-") for case in shown)
        if self.now.sizes.sequence is not None:
            yield "sequence", *(str(case.sizes.sequence) for case in shown)
        yield (
            "mesh",
            *(", ".join(f"{a}={n}" for a, n in case.way.mesh.sizes.items()) for case in shown),
        )
        yield "runs as", *(case.way.description("recompute", "states") for case in shown)
        if any(not case.way.states.is_whole for case in shown):
            yield "states", *(str(case.way.states) for case in shown)
        if any(case.way.recompute for case in shown):
            yield "recomputed", *(case.way.recompute or "-" for case in shown)
        yield "a step", *(seconds_text(case.way.seconds) + self._against(case) for case in shown)
        for part in parts_of(case.way for case in shown):
            yield f"  {part}", *(seconds_text(case.way.cost.parts[part]) for case in shown)
        yield f"{self.now.unit}/s", *(scaled(case.rate, "", 3) for case in shown)
        held = (f"{bytes_text(case.way.memory)} of {bytes_text(case.limit)}" for case in shown)
        yield "memory at the peak", *held
        for kind in kinds_of(case.way for case in shown):
            sizes = (bytes_text(case.way.held.kinds[kind]) for case in shown)
            yield f"  {kind.replace('_', ': ')}", *sizes
        yield "fits", *("yes" if case.way.fits else "no" for case in shown)

    def _against(self, case: Situation) -> str:
        """Return in words how the seconds of a situation differ from those of now."""
        now = self.now.way.seconds
        if case is self.now or not now:
            return ""
        return f" ({change_text(now, case.way.seconds)})"


def _rate(bandwidth: float) -> str:
    return scaled(bandwidth, "B/s", 3)
