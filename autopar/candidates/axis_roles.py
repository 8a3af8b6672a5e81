"""Axis roles: the axes of a chosen mesh are named by what they do.

    dp   cuts the batch            tp   cuts most of the parameters
    sp   cuts another dim          ep   cuts the experts of a mixture

>>> axis_roles(candidate)
{'x': 'dp', 'y': 'tp'}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autopar.candidates.candidate import Candidate
from autopar.candidates.training_step import TrainingStep
from autopar.strategies.node_info import info

EXPERT_DIMS = 3  # dims of a parameter that holds a matrix for each expert


def axis_roles(candidate: Candidate) -> dict[str, str]:
    """Return the name of each axis of the mesh inside a stage, by its name so far."""
    captured, layouts = candidate.captured, candidate.decisions.placeholders
    cut, of_experts, elements = Counter[str](), Counter[str](), 0
    batch, others = Counter[str](), Counter[str]()
    for node in captured.graph.find_nodes(op="placeholder"):
        if node.name not in captured.parameters:
            continue
        size, layout = int(info(node).val.numel()) * info(node).count, layouts[node.name]
        elements += size
        cut.update(dict.fromkeys(layout.axes, size))
        if layout.ndim == EXPERT_DIMS:
            of_experts.update(dict.fromkeys(layout.dims[0], size))
    for name in captured.inputs:
        if name is not None and name in layouts:
            for axis in layouts[name].axes:
                (batch if axis in layouts[name].dims[0] else others)[axis] += 1
    roles: dict[str, str] = {}
    for axis in candidate.mesh:
        whole, _, number = axis.partition(".")
        if number and number != "0":  # the parts of an axis do the same
            roles[axis] = f"{roles[f'{whole}.0'].removesuffix('.0')}.{number}"
            continue
        if of_experts[axis] > cut[axis] / 2:
            role = "ep"
        elif cut[axis] > elements / 2:
            role = "tp"
        else:
            role = "sp" if others[axis] > batch[axis] else "dp"
        taken = len({name.partition(".")[0] for name in roles.values() if name.startswith(role)})
        roles[axis] = (f"{role}{taken + 1}" if taken else role) + (".0" if number else "")
    return roles


def with_names(candidate: Candidate, names: Mapping[str, str]) -> Candidate:
    """Return the same candidate with other names of axes."""
    decisions = candidate.decisions.renamed(names)
    if decisions is candidate.decisions:
        return candidate
    named, cut = candidate.with_program(decisions=decisions), candidate.pipelining
    step = TrainingStep(
        named.step.program,
        candidate.step.batches,
        cut and replace(cut, mesh=cut.mesh.renamed(names)),
        candidate.timeline,
        renamed=candidate.step,
    )
    return replace(candidate, step=step)
