"""Describe how a parameter moves from storage to its readers, and its gradient back.

    optimizer ──once a step──▶ storage ──for each use──▶ leaf        groups of copies
    optimizer ◀──at the end── gradient ◀──each backward── leaf       buckets of gradients

Where storage is cut further than what an optimizer updates, its copy is a slice of that.

The copies and their groups are decided in `cost/copy_groups.py`, which plans read as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.cost.copy_groups import CopiedParameter, copied_parameters
from autopar.errors import InvalidInput
from autopar.plans.runtime_program import RuntimeProgram
from autopar.strategies.node_info import info


@dataclass(frozen=True)
class ParameterMovement(CopiedParameter):
    """The copies of one parameter in a program, and the dtype in which its gradients add up."""

    placeholder: str
    reduce: torch.dtype  # in which gradients add up


def parameter_movements(program: RuntimeProgram) -> dict[str, ParameterMovement]:
    """Return the movements of all parameters of a program by name."""
    learned = frozenset().union(*program.parameters_by_output)
    precision = program.captured.example.precision
    readers = {
        program.placeholders[node.name]: known
        for stage in program.stages
        for node in stage.nodes.values()
        if (known := info(node).readers) is not None
    }
    copied = copied_parameters(program.placeholders.values(), program.mesh, readers)
    movements = {}
    for placeholder, name in program.captured.parameters.items():
        copy = copied[program.placeholders[placeholder]]
        is_reduced = precision is not None and copy.dtype.is_floating_point
        reduce = precision.reduce if precision is not None and is_reduced else copy.dtype
        movements[name] = ParameterMovement(**vars(copy), placeholder=placeholder, reduce=reduce)
        if name in learned:
            _require_reduced(movements[name])
    return movements


def _require_reduced(movement: ParameterMovement) -> None:
    cut = set(movement.places.optimizer.axes) - set(movement.leaf.axes)
    is_read_whole = movement.leaf.cuts_into(movement.places.optimizer)
    if not (cut <= set(movement.pending) and is_read_whole):
        raise InvalidInput(
            "the states of a parameter are cut over axes over which its gradient is summed",
            got=f"{movement.name}: {movement.places.optimizer} for gradients over "
            f"{', '.join(movement.pending) or 'no axis'}",
            remedy="plan again",
        )
