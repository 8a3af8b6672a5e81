"""Placement of the stages of Chimera's 2k pipes, and the micro-batches that each pipe takes."""

from __future__ import annotations

from autopar.errors import InvalidInput
from autopar.pipeline.schedules.registry import even_stages, positive
from autopar.text.units import counted


def chimera_placement(name: str, stages: int, pipes: int) -> list[list[int]]:
    """Return pairs of pipes, shifted by p/k ranks each; the up pipe mirrors the down pipe."""
    even_stages(name, stages)
    positive(name, "pipes", pipes)
    pairs = pipes // 2
    if pipes % 2 or (stages // 2) % max(pairs, 1):
        half = stages // 2
        fitting = [str(2 * k) for k in range(1, half + 1) if half % k == 0]
        raise InvalidInput(
            f"{name} has 2k pipes, and k divides half the number of stages",
            got=f"pipes={pipes} with {counted(stages, 'stage')}",
            remedy=f"with {counted(stages, 'stage')} use pipes={' or '.join(fitting)}",
        )
    placement = []
    for pair in range(pairs):
        shift = pair * stages // pairs
        placement.append([(shift + stage) % stages for stage in range(stages)])
        placement.append([(shift + stages - 1 - stage) % stages for stage in range(stages)])
    return placement


def shares(first: int, count: int, pipes: int) -> list[range]:
    """Return a run of micro-batches for each pipe, from `first` on, the longer runs first."""
    runs = []
    for pipe in range(pipes):
        size = count // pipes + (pipe < count % pipes)
        runs.append(range(first, first + size))
        first += size
    return runs
