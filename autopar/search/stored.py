"""Stored: decisions as plain data for JSON, and back.

Tensors stand as their types, `f32[8@dp, 128]`, so that a person can read the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autopar.collectives.redistribution import State
from autopar.layout import TensorType
from autopar.mesh import Mesh
from autopar.search.decisions import Decisions, Fallback
from autopar.strategies import Strategy


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


def decisions_from_json(data: Mapping[str, Any]) -> Decisions:
    """The inverse of `decisions_to_json`."""
    return Decisions(
        mesh=Mesh(**data["mesh"]),
        placeholders=_layouts(data["placeholders"]),
        strategies={name: _strategy(entry) for name, entry in data["strategies"].items()},
        fixed=_layouts(data["fixed"]),
        fallbacks=tuple(Fallback(**entry) for entry in data["fallbacks"]),
        ways={
            (value, reader, int(position)): tuple(_state(state) for state in way)
            for value, reader, position, way in data["ways"]
        },
    )


def mesh_to_json(mesh: Mesh) -> dict[str, int]:
    """The axes in their order."""
    return dict(zip(mesh.names, mesh.shape))


def _layouts(types: Mapping[str, str]) -> dict[str, Any]:
    return {name: TensorType.parse(text).layout for name, text in types.items()}


def _lists(cuts: tuple[tuple[str, tuple[str, ...]], ...]) -> dict[str, list[str]]:
    return {factor: list(axes) for factor, axes in cuts}


def _strategy(entry: Mapping[str, Any]) -> Strategy:
    return Strategy(
        tuple((factor, tuple(axes)) for factor, axes in entry["cuts"].items()),
        tuple((axis, int(index)) for axis, index in entry["passes"].items()),
    )


def _plain(state: State) -> list[Any]:
    dims, partial, pending = state
    return [[list(axes) for axes in dims], list(partial), list(pending)]


def _state(data: Any) -> State:
    dims, partial, pending = data
    return tuple(tuple(axes) for axes in dims), tuple(partial), tuple(pending)
