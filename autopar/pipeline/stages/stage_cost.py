"""StageCost: what one stage of a pipeline takes, and the columns of which it is made."""

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
    """What one stage takes for one micro-batch (or a part, where they are cut), predicted."""

    starts: str  # the first operator
    module: str  # where in the model that is
    forward: float  # seconds
    backward: float
    again: float  # seconds of backward that are forward once more
    reduced: float  # seconds that backward takes besides where it is split
    summed: float  # seconds once a step, of summing its gradients over the mesh
    gathering: float  # seconds once a step, of gathering its parameters
    updated: float  # seconds once a step, for the sake of states on the host
    cast: float  # seconds once a step, of casting its parameters
    sums: int  # bytes of its gradients, of their sums over the mesh
    parameters: int  # bytes
    gradients: int  # bytes of those of parameters that learn
    optimizer: int  # bytes that an optimizer keeps of these
    buffers: int  # bytes
    gathered: int  # bytes of copies of parameters that live a step
    activations: int  # bytes kept from forward to backward, besides what comes from before
    receives: int  # bytes that come from the stage before
    weight_halves: int  # bytes kept from the gradients of inputs to those of weights
    remade: int  # bytes by which the backward of one micro-batch keeps more, of what it makes again

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def synced(self) -> float:
        """Seconds once a step of what it moves: sums behind its last backward; gathers, which go
        before its first forward, where ranks idle as long."""
        return self.summed + self.gathering

    @property
    def after(self) -> float:
        """Seconds once a step, when all that it reads is summed."""
        return self.updated + self.cast


@dataclass(frozen=True)
class SharedSum:
    """Of the gradients of parameters that several stages read, which are summed over all these."""

    stages: tuple[int, ...]
    bytes: int  # of their sums over the mesh inside of a stage


def imbalance(stages: Sequence[StageCost]) -> float:
    """By how much the slowest stage exceeds the mean: 0 for equal stages."""
    seconds = [stage.seconds for stage in stages]
    mean = sum(seconds) / len(seconds)
    return max(seconds) / mean - 1 if mean else 0.0


def columns_of(price: NodeCost, sums: int, held: HeldBytes) -> list[float]:
    own = price._asdict() | {"gathering": price.gathered}
    return [*(own[name] for name in SECONDS), sums, *held]
