"""Worker: one stage of one pipe on one rank, and what its micro-batches keep until their backward.

    F   sent = worker.forward(slice, received)             keeps the graph of autograd
    B   gradients = worker.backward(slice, of_sent)        lets it go
    I   gradients = worker.backward_inputs(slice, of_sent)
    W   worker.backward_weights(slice)                     lets it go

A value is a list with a tensor for each rank of the stage's mesh that this process runs: all of
them on the virtual mesh, one under torch.distributed. With recomputation, forward keeps only what
it received, and backward runs it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from autopar.passes.split_backward import WeightUse
from autopar.passes.stages import Stage

Value = list[Tensor]


class StageFunction(Protocol):
    """A stage's program where it runs."""

    @property
    def stage(self) -> Stage: ...

    @property
    def learns_received(self) -> Sequence[bool]:
        """Which of the received values take a gradient."""

    @property
    def learns_sent(self) -> Sequence[bool]:
        """Which of the sent values take a gradient."""

    @property
    def uses(self) -> Sequence[WeightUse]:
        """The operators that read weights; empty if backward is not split."""

    def __call__(self, slice_: int, received: Sequence[Value]) -> list[Value]:
        """All results of the program for one micro-batch."""


@dataclass
class Kept:
    """What one micro-batch keeps from its forward on."""

    received: list[Value]
    roots: list[Value] = field(default_factory=list)  # sent values with gradient, then the loss
    uses: list[tuple[list[Value], list[Value], list[Value]]] = field(default_factory=list)
    gradients: list[Value] = field(default_factory=list)  # of the results of `uses`


class Worker:
    """Runs the actions of one stage of one pipe."""

    def __init__(self, run: StageFunction, recompute: bool = False) -> None:
        self.run, self.recompute = run, recompute
        self.kept: dict[int, Kept] = {}
        self.losses: dict[int, Value] = {}
        self.statistics: dict[int, list[Value]] = {}

    def clear(self) -> None:
        """Forget the results of the last step."""
        self.kept.clear()
        self.losses.clear()
        self.statistics.clear()

    def forward(self, slice_: int, received: Sequence[Value]) -> list[Value]:
        """Run one micro-batch; what the next stage receives."""
        stage = self.run.stage
        leaves = [
            [tensor.detach().requires_grad_(learns) for tensor in value]
            for value, learns in zip(received, self.run.learns_received)
        ]
        kept = self.kept[slice_] = Kept(leaves)
        if self.recompute:
            with torch.no_grad():
                results = self.run(slice_, leaves)
        else:
            results = self._run(slice_, kept)
        sent = len(stage.sends)
        if stage.has_loss:
            self.losses[slice_] = detached(results[sent])
        first = sent + stage.has_loss
        statistics = results[first : first + len(stage.statistics)]
        if statistics:
            self.statistics[slice_] = [detached(value) for value in statistics]
        return [detached(value) for value in results[:sent]]

    def backward(self, slice_: int, of_sent: Sequence[Value]) -> list[Value]:
        """The whole backward of one micro-batch; the gradients of what it received."""
        if self.run.uses:
            gradients = self.backward_inputs(slice_, of_sent)
            self.backward_weights(slice_)
            return gradients
        kept = self._ready(slice_)
        roots, seeds = _paired(kept.roots, self._seeds(kept, of_sent))
        if roots:
            torch.autograd.backward(roots, seeds)
        del self.kept[slice_]
        return [
            [_or_zeros(tensor.grad, tensor) for tensor in value]
            for value, learns in zip(kept.received, self.run.learns_received)
            if learns
        ]

    def backward_inputs(self, slice_: int, of_sent: Sequence[Value]) -> list[Value]:
        """The gradients of what was received; those of weights are left for later."""
        kept = self._ready(slice_)
        roots, seeds = _paired(kept.roots, self._seeds(kept, of_sent))
        learning = [v for v, learns in zip(kept.received, self.run.learns_received) if learns]
        targets = [*learning, *(value for given, _, _ in kept.uses for value in given)]
        flat = [tensor for value in targets for tensor in value]
        if not flat:  # neither this stage nor one before it learns
            kept.roots = []
            return []
        found = iter(torch.autograd.grad(roots, flat, seeds, retain_graph=True, allow_unused=True))
        gradients = [[_or_zeros(next(found), tensor) for tensor in v] for v in targets]
        kept.gradients = gradients[len(learning) :]
        kept.roots = []
        return gradients[: len(learning)]

    def backward_weights(self, slice_: int) -> None:
        """The gradients of weights, after those of inputs."""
        kept = self.kept.pop(slice_)
        weights: list[Tensor] = []
        gradients: list[Tensor] = []
        arrived = iter(kept.gradients)
        for given, alone, read in kept.uses:
            seeds = [next(arrived) for _ in given]
            for rank, (y, seed) in enumerate(zip(zip(*given), zip(*seeds))):
                learning = [i for i, value in enumerate(alone) if value[rank].requires_grad]
                weights += [read[i][rank] for i in learning]
                gradients += torch.autograd.grad(y, [alone[i][rank] for i in learning], seed)
        if weights:
            torch.autograd.backward(weights, gradients)

    def _ready(self, slice_: int) -> Kept:
        """What a micro-batch kept, with its graph: made now under recomputation."""
        kept = self.kept[slice_]
        if self.recompute:
            self._run(slice_, kept)
        return kept

    def _run(self, slice_: int, kept: Kept) -> list[Value]:
        with torch.enable_grad():
            results = self.run(slice_, kept.received)
        sent = len(self.run.stage.sends)
        kept.roots = [v for v, learns in zip(results[:sent], self.run.learns_sent) if learns]
        if self.run.stage.has_loss:
            kept.roots.append(results[sent])
        uses = []
        for use in self.run.uses:
            places = (use.gives, use.alone, use.weights)
            given, alone, read = ([results[i] for i in found] for found in places)
            uses.append((given, alone, read))
        kept.uses = [use for use in uses if any(leaf.requires_grad for v in use[1] for leaf in v)]
        return results

    def _seeds(self, kept: Kept, of_sent: Sequence[Value]) -> list[Value]:
        seeds = list(of_sent)
        if self.run.stage.has_loss:
            seeds.append([torch.ones_like(tensor) for tensor in kept.roots[-1]])
        return seeds


def detached(value: Value) -> Value:
    """The same data without history."""
    return [tensor.detach() for tensor in value]


def sum_by_slice(values: Mapping[int, Tensor]) -> Tensor:
    """The sum in the order of the micro-batches."""
    first, *others = (values[slice_] for slice_ in sorted(values))
    for other in others:
        first = first + other
    return first


def _paired(roots: list[Value], seeds: list[Value]) -> tuple[list[Tensor], list[Tensor]]:
    pairs: Iterator[tuple[Tensor, Tensor]] = (
        (root, seed)
        for value, gradient in zip(roots, seeds)
        for root, seed in zip(value, gradient)
        if root.requires_grad
    )
    flat = list(pairs)
    return [root for root, _ in flat], [seed for _, seed in flat]


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient
