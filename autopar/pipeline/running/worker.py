"""Worker: runs one stage of one pipe on one rank, and holds its micro-batches until backward.

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
from autopar.pipeline.running.weight_halves import WeightHalf, add_weight_gradients

Value = list[Tensor]


class StageFunction(Protocol):
    """Runs a stage's program on the ranks of this process."""

    @property
    def stage(self) -> Stage: ...

    @property
    def loss_gradient(self) -> float:
        """Return the gradient of the loss."""
        ...

    @property
    def wanted(self) -> range:
        """Return the outputs that are kept besides the loss."""
        ...

    def weight_halves(self) -> list[WeightHalf]:
        """Return the weight halves that the last run deferred; empty if backward is not split."""

    def __call__(self, microbatch: int, received: Sequence[Value]) -> list[Value]:
        """Return all results of the program for one micro-batch."""


@dataclass
class MicrobatchState:
    """Hold the tensors that one micro-batch keeps from its forward on."""

    received: list[Value]
    # Gradient edges of sent values (nobody reads the values here), then the loss.
    roots: list[list[GradientEdge | Tensor | None]] = field(default_factory=list)
    loss_gradient: Value | None = None
    halves: list[WeightHalf] = field(default_factory=list)


class Worker:
    """Runs the actions of one stage of one pipe."""

    def __init__(self, stage_run: StageFunction) -> None:
        self.stage_run = stage_run
        self.kept: dict[int, MicrobatchState] = {}  # by micro-batch
        # By micro-batch, those of the program's outputs that this stage computes.
        self.outputs: dict[int, dict[int, Value]] = {}
        self.statistics: dict[int, list[Value]] = {}

    def clear(self) -> None:
        """Forget the results of the last step."""
        self.kept.clear()
        self.outputs.clear()
        self.statistics.clear()

    def forward(self, microbatch: int, received: Sequence[Value]) -> list[Value]:
        """Run one micro-batch and return the values that the next stage receives."""
        stage = self.stage_run.stage
        leaves = [
            [tensor.detach().requires_grad_(learns) for tensor in value]
            for value, learns in zip(received, self.stage_run.stage.learns_received)
        ]
        state = MicrobatchState(leaves)
        results = self._run(microbatch, state)
        if torch.is_grad_enabled():
            self.kept[microbatch] = state
        sent, first = len(stage.sends), len(stage.sends) + len(stage.outputs)
        self.outputs[microbatch] = {
            output: detached(value)
            for place, (output, value) in enumerate(zip(stage.outputs, results[sent:first]))
            if output in self.stage_run.wanted or place == stage.loss
        }
        statistics = results[first : first + len(stage.statistics)]
        if statistics:
            self.statistics[microbatch] = [detached(value) for value in statistics]
        return [detached(value) for value in results[:sent]]

    def backward(self, microbatch: int, of_sent: Sequence[Value]) -> list[Value]:
        """Run both halves of backward; return the gradients of what the micro-batch received."""
        gradients = self.backward_inputs(microbatch, of_sent)
        self.backward_weights(microbatch)
        return gradients

    def backward_inputs(self, microbatch: int, of_sent: Sequence[Value]) -> list[Value]:
        """Return the gradients of what was received; deferred weight halves stay for later."""
        state = self.kept[microbatch]
        root_gradients = [*of_sent, *([state.loss_gradient] if state.loss_gradient else [])]
        pairs = [
            (root, seed)
            for ends, seeds in zip(state.roots, root_gradients)
            for root, seed in zip(ends, seeds)
            if root is not None
        ]
        if pairs:
            roots, seeds = zip(*pairs)
            torch.autograd.backward(roots, seeds)
        gradients = [
            [torch.zeros_like(x) if x.grad is None else x.grad for x in value]
            for value, learns in zip(state.received, self.stage_run.stage.learns_received)
            if learns
        ]
        self.kept[microbatch] = MicrobatchState([], halves=state.halves)
        return gradients

    def backward_weights(self, microbatch: int) -> None:
        """Add the gradients of weights, after those of inputs."""
        add_weight_gradients(self.kept.pop(microbatch).halves)

    def _run(self, microbatch: int, state: MicrobatchState) -> list[Value]:
        results = self.stage_run(microbatch, state.received)
        state.halves = self.stage_run.weight_halves()
        sent = len(self.stage_run.stage.sends)
        values = zip(results[:sent], self.stage_run.stage.learns_sent)
        state.roots = [
            [get_gradient_edge(x) if x.requires_grad else None for x in value]
            for value, learns in values
            if learns
        ]
        if (place := self.stage_run.stage.loss) is not None:
            losses = results[sent + place]
            state.roots.append([loss if loss.requires_grad else None for loss in losses])
            gradient = self.stage_run.loss_gradient
            state.loss_gradient = [torch.full_like(loss, gradient) for loss in losses]
        return results


def detached(value: Value) -> Value:
    """Return the data of a value without its autograd history."""
    return [tensor.detach() for tensor in value]


def sum_in_order(values: Mapping[int, Tensor]) -> Tensor:
    """Return the sum of `values`, added in the order of the micro-batches."""
    first, *others = [values[microbatch] for microbatch in sorted(values)]
    for other in others:
        first = first + other
    return first
