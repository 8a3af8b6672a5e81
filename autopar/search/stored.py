"""Stored: decisions as plain data for JSON, and back.

Tensors stand as their types, `f32[8@dp, 128]`, so that a person can read the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopar.layout import Layout, Placement, TensorType
from autopar.mesh import Mesh
from autopar.schema import Count, Index
from autopar.search.decisions import Decisions, Fallback
from autopar.strategies import Strategy

Axes = Mapping[str, Count]  # a mesh
Names = tuple[str, ...]


def decisions_to_json(decisions: Decisions, types: Mapping[str, TensorType]) -> dict[str, Any]:
    """Everything that was decided; `types` are those of the placeholders and markers."""
    return {
        "mesh": mesh_to_json(decisions.mesh),
        "placeholders": {name: str(types[name]) for name in decisions.placeholders},
        "strategies": {
            name: {"cuts": _lists(strategy.cuts), "passes": dict(strategy.passes)}
            for name, strategy in decisions.strategies.items()
        },
        "fixed": {
            name: str(TensorType(types[name].shape, types[name].dtype, layout))
            for name, layout in decisions.fixed.items()
        },
        "fallbacks": [asdict(fallback) for fallback in decisions.fallbacks],
        "ways": [[*key, [_plain(state) for state in way]] for key, way in decisions.ways.items()],
    }


@dataclass(frozen=True)
class StoredStrategy:
    cuts: Mapping[str, tuple[str, ...]]
    passes: Mapping[str, Index]

    def read(self) -> Strategy:
        return Strategy(tuple(self.cuts.items()), tuple(self.passes.items()))


@dataclass(frozen=True)
class StoredDecisions:
    """What `decisions_to_json` writes."""

    mesh: Axes
    placeholders: Mapping[str, TensorType]
    strategies: Mapping[str, StoredStrategy]
    fixed: Mapping[str, TensorType]
    fallbacks: tuple[Fallback, ...]
    ways: tuple[tuple[str, str, Index, tuple[tuple[tuple[Names, ...], Names, Names], ...]], ...]

    def read(self) -> Decisions:
        return Decisions(
            mesh=Mesh(**self.mesh),
            placeholders={name: type_.layout for name, type_ in self.placeholders.items()},
            strategies={name: entry.read() for name, entry in self.strategies.items()},
            fixed={name: type_.layout for name, type_ in self.fixed.items()},
            fallbacks=self.fallbacks,
            ways={
                (value, reader, at): tuple(
                    Placement(Layout(*dims, partial=partial), pending)
                    for dims, partial, pending in way
                )
                for value, reader, at, way in self.ways
            },
        )


def mesh_to_json(mesh: Mesh) -> dict[str, int]:
    """The axes in their order."""
    return dict(zip(mesh.names, mesh.shape))


def _lists(cuts: tuple[tuple[str, tuple[str, ...]], ...]) -> dict[str, list[str]]:
    return {factor: list(axes) for factor, axes in cuts}


def _plain(at: Placement) -> list[Any]:
    return [[list(axes) for axes in at.dims], list(at.partial), list(at.pending)]
