"""StageCost: predicted seconds and bytes of one stage, and the columns of tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.footprint import HELD_KINDS, HeldBytes
from autopar.cost.state_price import NodeCost

WORK = ("forward", "backward")
_ONCE = ("summed", "gathering", "updated", "cast")  # seconds, once a step
SECONDS = (*WORK, "again", "reduced", *_ONCE)
BYTES = ("sums", *HELD_KINDS)
ONCE = slice(SECONDS.index(_ONCE[0]), len(SECONDS))
COLUMNS = (*SECONDS, *BYTES)


@dataclass(frozen=True)
class StageCost:
    """Hold the predicted cost of a stage for one micro-batch, or for one part of it."""

    starts: str  # the first operator
    module: str  # its path in the model
    forward: float  # seconds
    backward: float
    again: float  # seconds of backward that are recomputation
    reduced: float  # seconds that a split backward takes longer
    summed: float  # seconds once a step, of summing its gradients over the mesh
    gathering: float  # seconds once a step, of gathering its parameters
    updated: float  # seconds once a step, for optimizer states on the host
    cast: float  # seconds once a step, of casting its parameters
    sums: int  # bytes of its gradients' sums over the mesh
    parameters: int  # bytes
    gradients: int  # bytes, of parameters that learn
    optimizer: int  # bytes of optimizer states
    buffers: int  # bytes
    gathered: int  # bytes of copies of parameters that live a step
    activations: int  # bytes kept from forward to backward, received values aside
    receives: int  # bytes from the stage before
    weight_halves: int  # bytes kept from I to W
    remade: int  # bytes that the backward of one micro-batch recomputes and keeps

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def synced(self) -> float:
        """Return the seconds of communication once a step.

        Sums follow the last backward; gathers precede the first forward, where ranks idle as long.
        """
        return self.summed + self.gathering

    @property
    def after(self) -> float:
        """Return the seconds of work once a step, after all gradient sums."""
        return self.updated + self.cast


@dataclass(frozen=True)
class SharedSum:
    """Hold the gradient bytes of parameters that several stages read, summed over all of these."""

    stages: tuple[int, ...]
    bytes: int  # of the sums over the mesh inside a stage


def imbalance(stages: Sequence[StageCost]) -> float:
    """Return by which fraction the slowest stage exceeds the mean: 0 for equal stages."""
    seconds = [stage.seconds for stage in stages]
    mean = sum(seconds) / len(seconds)
    return max(seconds) / mean - 1 if mean else 0.0


def cost_columns(price: NodeCost, sums: int, held: HeldBytes) -> list[float]:
    """Return the columns of one node: its seconds, the bytes of its sums, and its held bytes."""
    seconds = price._asdict() | {"gathering": price.gathered}
    return [*(seconds[name] for name in SECONDS), sums, *held]
