"""Axis roles: the axes of a chosen mesh are named by what they do.

    dp   cuts the batch            tp   cuts parameters
    sp   cuts another dim          ep   cuts the experts of a mixture

>>> axis_roles(candidate)
{'x': 'dp', 'y': 'tp'}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autopar.candidates.candidate import Candidate
from autopar.search.decisions import Decisions
from autopar.strategies.node_info import info

_EXPERTS = 3  # dims of a parameter that holds a matrix for each expert


def axis_roles(candidate: Candidate) -> dict[str, str]:
    """Return the name of each axis of the mesh inside a stage, by its name so far."""
    captured, layouts = candidate.captured, candidate.decisions.placeholders
    cut, of_experts = Counter[str](), Counter[str]()
    batch, others, inputs = Counter[str](), Counter[str](), 0
    for node in captured.graph.find_nodes(op="placeholder"):
        if (layout := layouts.get(node.name)) is None:
            continue
        size = int(info(node).val.numel()) * info(node).times
        first = layout.dims[0] if layout.ndim else ()
        if node.name in captured.parameters:
            for axis in layout.axes:
                cut[axis] += size
                of_experts[axis] += size * (layout.ndim == _EXPERTS and axis in first)
        elif node.name in captured.inputs:
            inputs += size
            for axis in layout.axes:
                (batch if axis in first else others)[axis] += size
    total = sum(cut.values()) or 1
    roles: dict[str, str] = {}
    for axis in candidate.mesh:
        if of_experts[axis] > cut[axis] / 2:
            role = "ep"
        elif batch[axis] >= inputs / 2:
            role = "dp"
        elif cut[axis] / total > _SOME or not others[axis]:
            role = "tp" if cut[axis] else "dp"
        else:
            role = "sp"
        taken = sum(name.rstrip("0123456789") == role for name in roles.values())
        roles[axis] = f"{role}{taken + 1}" if taken else role
    return roles


_SOME = 0.05  # of what parameters hold: below it an axis is not called by these


def renamed(decisions: Decisions, names: Mapping[str, str]) -> Decisions:
    """Return the same decisions with other names of axes."""
    if all(axis == names.get(axis, axis) for axis in decisions.mesh):
        return decisions
    return replace(
        decisions,
        mesh=decisions.mesh.renamed(names),
        placeholders={key: one.renamed(names) for key, one in decisions.placeholders.items()},
        strategies={key: one.renamed(names) for key, one in decisions.strategies.items()},
        fixed={key: one.renamed(names) for key, one in decisions.fixed.items()},
        ways={key: tuple(at.renamed(names) for at in way) for key, way in decisions.ways.items()},
        apart={key: one.renamed(names) for key, one in decisions.apart.items()},
    )


def with_names(candidate: Candidate, names: Mapping[str, str]) -> Candidate:
    """Return the same candidate with other names of axes."""
    decisions = renamed(candidate.decisions, names)
    if decisions is candidate.decisions:
        return candidate
    named, cut = candidate.with_program(decisions=decisions), candidate.pipelining
    if cut is not None:
        named = named.changed(named.search, replace(cut, mesh=cut.mesh.renamed(names)))
    return named
