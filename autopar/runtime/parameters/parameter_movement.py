"""Routes: from where a parameter is kept to what readers start from, and its gradient's way back.

    optimizer ──once a step──▶ storage ──for each use──▶ leaf        groups of copies
    optimizer ◀──at the end── gradient ◀──each backward── leaf       buckets of gradients

Which copies are made, and which of them come together, is decided in `cost/copy_groups.py`, which
plans read as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.cost.copy_groups import CopiedParameter, copied_parameters
from autopar.errors import InvalidInput
from autopar.plan.runtime_program import Program
from autopar.strategies.node_info import info


@dataclass(frozen=True)
class ParameterMovement(CopiedParameter):
    """Of one parameter."""

    placeholder: str
    reduce: torch.dtype  # in which gradients add up


def parameter_movements(program: Program) -> dict[str, ParameterMovement]:
    """Of all parameters of a program, by name."""
    learned = frozenset().union(*program.learned)
    precision = program.captured.example.precision
    readers = {
        program.placeholders[node.name]: known
        for stage in program.stages
        for node in stage.nodes.values()
        if (known := info(node).readers) is not None
    }
    copied = copied_parameters(program.placeholders.values(), program.mesh, readers)
    found = {}
    for placeholder, name in program.captured.parameters.items():
        own = copied[program.placeholders[placeholder]]
        is_reduced = precision is not None and own.dtype.is_floating_point
        reduce = precision.reduce if precision is not None and is_reduced else own.dtype
        found[name] = ParameterMovement(**vars(own), placeholder=placeholder, reduce=reduce)
        if name in learned:
            _require_reduced(found[name])
    return found


def _require_reduced(route: ParameterMovement) -> None:
    cut = set(route.places.optimizer.axes) - set(route.leaf.axes)
    if not cut <= set(route.pending):
        raise InvalidInput(
            "the states of a parameter are cut over axes over which its gradient is summed",
            got=f"{route.name}: {route.places.optimizer} for gradients over "
            f"{', '.join(route.pending) or 'no axis'}",
            remedy="plan again",
        )
