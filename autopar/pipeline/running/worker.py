"""Worker: one stage of one pipe on one rank, and what its micro-batches keep until their backward.

    F   sent = worker.forward(microbatch, received)              keeps the graph, if there is one
    B   gradients = worker.backward(microbatch, of_sent)         lets it go
    I   gradients = worker.backward_inputs(microbatch, of_sent)  keeps the weight halves alone
    W   worker.backward_weights(microbatch)                      lets them go

A value is a list with a tensor for each rank of the stage's mesh that this process runs: all of
them on the virtual mesh, one under torch.distributed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.passes.stages import Stage
from autopar.pipeline.running.weight_halves import WeightHalf, finish

Value = list[Tensor]


class StageFunction(Protocol):
    """A stage's program where it runs."""

    @property
    def stage(self) -> Stage: ...

    @property
    def seed(self) -> float:
        """The gradient of the loss."""
        ...

    @property
    def wanted(self) -> range:
        """The outputs that are kept, beside the loss."""
        ...

    def weight_halves(self) -> list[WeightHalf]:
        """What the last run has put off; empty if backward is not split."""

    def __call__(self, microbatch: int, received: Sequence[Value]) -> list[Value]:
        """All results of the program for one micro-batch."""


@dataclass
class Kept:
    """What one micro-batch keeps from its forward on."""

    received: list[Value]
    # Of sent values with gradient (not the values, which nobody reads here), then the loss.
    roots: list[list[GradientEdge | Tensor | None]] = field(default_factory=list)
    seed: Value | None = None  # the gradient of the loss
    halves: list[WeightHalf] = field(default_factory=list)


class Worker:
    """Runs the actions of one stage of one pipe."""

    def __init__(self, run: StageFunction) -> None:
        self.run = run
        self.kept: dict[int, Kept] = {}
        # By micro-batch, those of the program's outputs that are made here.
        self.outputs: dict[int, dict[int, Value]] = {}
        self.statistics: dict[int, list[Value]] = {}

    def clear(self) -> None:
        """Forget the results of the last step."""
        self.kept.clear()
        self.outputs.clear()
        self.statistics.clear()

    def forward(self, microbatch: int, received: Sequence[Value]) -> list[Value]:
        """Run one micro-batch; what the next stage receives."""
        stage = self.run.stage
        leaves = [
            [tensor.detach().requires_grad_(learns) for tensor in value]
            for value, learns in zip(received, self.run.stage.learns_received)
        ]
        kept = Kept(leaves)
        results = self._run(microbatch, kept)
        if torch.is_grad_enabled():
            self.kept[microbatch] = kept
        sent, first = len(stage.sends), len(stage.sends) + len(stage.outputs)
        self.outputs[microbatch] = {
            output: detached(value)
            for place, (output, value) in enumerate(zip(stage.outputs, results[sent:first]))
            if output in self.run.wanted or place == stage.loss
        }
        statistics = results[first : first + len(stage.statistics)]
        if statistics:
            self.statistics[microbatch] = [detached(value) for value in statistics]
        return [detached(value) for value in results[:sent]]

    def backward(self, microbatch: int, of_sent: Sequence[Value]) -> list[Value]:
        """The whole backward of one micro-batch; the gradients of what it received."""
        gradients = self.backward_inputs(microbatch, of_sent)
        self.backward_weights(microbatch)
        return gradients

    def backward_inputs(self, microbatch: int, of_sent: Sequence[Value]) -> list[Value]:
        """The gradients of what was received; those of weights that wait stay for later."""
        kept = self.kept[microbatch]
        given = [*of_sent, *([kept.seed] if kept.seed else [])]
        pairs = [
            (root, seed)
            for ends, seeds in zip(kept.roots, given)
            for root, seed in zip(ends, seeds)
            if root is not None
        ]
        if pairs:
            roots, gradients_of_roots = zip(*pairs)
            torch.autograd.backward(roots, gradients_of_roots)
        gradients = [
            [torch.zeros_like(x) if x.grad is None else x.grad for x in value]
            for value, learns in zip(kept.received, self.run.stage.learns_received)
            if learns
        ]
        self.kept[microbatch] = Kept([], halves=kept.halves)
        return gradients

    def backward_weights(self, microbatch: int) -> None:
        """The gradients of weights, after those of inputs."""
        finish(self.kept.pop(microbatch).halves)

    def _run(self, microbatch: int, kept: Kept) -> list[Value]:
        results = self.run(microbatch, kept.received)
        kept.halves = self.run.weight_halves()
        sent = len(self.run.stage.sends)
        values = zip(results[:sent], self.run.stage.learns_sent)
        kept.roots = [
            [get_gradient_edge(x) if x.requires_grad else None for x in value]
            for value, learns in values
            if learns
        ]
        if (place := self.run.stage.loss) is not None:
            losses = results[sent + place]
            kept.roots.append([loss if loss.requires_grad else None for loss in losses])
            kept.seed = [torch.full_like(loss, self.run.seed) for loss in losses]
        return results


def detached(value: Value) -> Value:
    """The same data without history."""
    return [tensor.detach() for tensor in value]


def sum_in_order(values: Mapping[int, Tensor]) -> Tensor:
    """The sum in the order of the micro-batches."""
    first, *others = [values[microbatch] for microbatch in sorted(values)]
    for other in others:
        first = first + other
    return first
