"""Decisions: where every tensor of a captured graph lives, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.layout import Layout, Placement
from autopar.mesh import Mesh
from autopar.strategies import Strategy


@dataclass(frozen=True)
class Fallback:
    """An operator that runs replicated because no rule or no cut was possible."""

    node: str
    operator: str
    reason: str
    source: str | None


@dataclass(frozen=True)
class Decisions:
    """What the passes need to know: where every tensor of a captured graph lives."""

    mesh: Mesh
    placeholders: Mapping[str, Layout]  # parameters, buffers, constants and inputs
    strategies: Mapping[str, Strategy]  # operators; one that is missing runs replicated
    fixed: Mapping[str, Layout] = field(default_factory=dict)  # markers -> layout
    fallbacks: tuple[Fallback, ...] = ()
    # (value, reader, which input) -> the placements that readers share on the way to what it wants
    ways: Mapping[tuple[str, str, int], tuple[Placement, ...]] = field(default_factory=dict)
