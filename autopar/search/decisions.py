"""Decisions: where every tensor of a captured graph lives, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.base.schema import Index
from autopar.capture.listing import operator_of
from autopar.layout import Layout, ParameterPlacement, Placement
from autopar.mesh import Mesh, NamesElsewhere
from autopar.recompute import Recompute
from autopar.strategies import Strategy
from autopar.strategies.node_info import info
from autopar.tensor_type import TensorType


@dataclass(frozen=True)
class Fallback:
    """An operator that runs replicated because no rule or no cut was possible."""

    node: str
    operator: str
    reason: str
    source: str | None

    @classmethod
    def of(cls, node: fx.Node) -> Fallback:
        """Describe an operator without a rule."""
        return cls(node.name, operator_of(node), "no rule", info(node).source)


@dataclass(frozen=True)
class Decisions:
    """Hold where every tensor of a captured graph lives, as the passes need it."""

    mesh: Mesh
    placeholders: Mapping[str, Layout]  # where each parameter, buffer, constant and input is read
    strategies: Mapping[str, Strategy]  # operators; one that is missing runs replicated
    fixed: Mapping[str, Layout] = field(default_factory=dict)  # markers -> layout
    fallbacks: tuple[Fallback, ...] = ()
    # (value, reader, which input) -> the placements that readers share on the way to what it wants
    ways: Mapping[tuple[str, str, int], tuple[Placement, ...]] = field(default_factory=dict)
    # Parameters that are stored, summed or optimized in other places than they are read.
    apart: Mapping[str, ParameterPlacement] = field(default_factory=dict)
    # Regions whose forward runs again in backward, by the names of capture/regions.py.
    recompute: Mapping[str, Recompute] = field(default_factory=dict)

    def renamed(self, names: Mapping[str, str]) -> Decisions:
        """Return the same decisions with other names of axes."""
        if all(axis == names.get(axis, axis) for axis in self.mesh):
            return self
        return self.on_mesh(self.mesh.renamed(names), {a: (name,) for a, name in names.items()})

    def on_mesh(self, mesh: Mesh, names: NamesElsewhere) -> Decisions:
        """Return the same decisions on a mesh whose axes have other names, or are split."""
        return replace(
            self,
            mesh=mesh,
            placeholders={key: layout.renamed(names) for key, layout in self.placeholders.items()},
            strategies={key: way.renamed(names) for key, way in self.strategies.items()},
            fixed={key: layout.renamed(names) for key, layout in self.fixed.items()},
            ways={key: tuple(at.renamed(names) for at in way) for key, way in self.ways.items()},
            apart={key: places.renamed(names) for key, places in self.apart.items()},
        )

    @property
    def keeps_on_host(self) -> bool:
        """Return whether some region offloads to the host what it keeps for backward."""
        return any(how.keep == "host" for how in self.recompute.values())

    def parameter(self, placeholder: str) -> ParameterPlacement:
        """Return the places of a parameter: where it is stored, read, summed and optimized."""
        working = self.placeholders[placeholder]
        return self.apart.get(placeholder) or ParameterPlacement.tied(working)


@dataclass(frozen=True)
class TypedDecisions:
    """Hold decisions as they stand in a file: with full types, so that a person can read them."""

    mesh: Mesh
    placeholders: Mapping[str, TensorType]
    strategies: Mapping[str, Strategy]
    fixed: Mapping[str, TensorType]
    fallbacks: tuple[Fallback, ...]
    ways: Mapping[tuple[str, str, Index], tuple[Placement, ...]]
    apart: Mapping[str, ParameterPlacement]
    recompute: Mapping[str, Recompute]

    @classmethod
    def of(cls, decisions: Decisions, types: Mapping[str, TensorType]) -> TypedDecisions:
        """Add types to decisions; `types` are those of the placeholders and markers."""
        laid = {**decisions.placeholders, **decisions.fixed}
        typed = {name: replace(types[name], layout=layout) for name, layout in laid.items()}
        return cls(
            decisions.mesh,
            {name: typed[name] for name in decisions.placeholders},
            decisions.strategies,
            {name: typed[name] for name in decisions.fixed},
            decisions.fallbacks,
            decisions.ways,
            decisions.apart,
            decisions.recompute,
        )

    @property
    def untyped(self) -> Decisions:
        """Return the decisions without the types."""
        return Decisions(
            self.mesh,
            {name: type_.layout for name, type_ in self.placeholders.items()},
            self.strategies,
            {name: type_.layout for name, type_ in self.fixed.items()},
            self.fallbacks,
            self.ways,
            self.apart,
            self.recompute,
        )
