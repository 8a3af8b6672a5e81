"""A pipeline on the virtual mesh: all ranks of all stages in this process, in turns.

Each rank of the pipeline does its list as soon as its inputs are there; the ranks inside a stage
go in lock step. Parameters are whole, one for all replicas of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from autopar.collectives import from_ranks
from autopar.passes.stages import Stage
from autopar.pipeline.executor import InProcessTransport, RankRunner, Recorded, run_together
from autopar.pipeline.weight_halves import WeightHalf, WeightHalves
from autopar.pipeline.worker import Value, Worker, sum_by_slice
from autopar.plan.program import Program
from autopar.runtime.replicas import ReplicaCheck
from autopar.runtime.virtual import VirtualBackend, VirtualGraph
from autopar.strategies.node_info import info

Batch = Mapping[str, Tensor]


class VirtualPipeline(VirtualBackend):
    """Runs the stages of a program by its schedule."""

    def __init__(self, program: Program, device: torch.device, check: bool = False) -> None:
        assert program.pipelining is not None
        self.program, self.mesh, self.device = program, program.mesh, device
        self.schedule = program.pipelining.schedule
        split = {a.stage for order in self.schedule.orders for a in order if a.kind == "I"}
        self.stages = [
            VirtualStage(program, stage, device, stage.index in split, check)
            for stage in program.stages
        ]
        self.workers = {
            (pipe, stage): Worker(self.stages[stage], program.pipelining.recompute)
            for pipe in range(self.schedule.pipes)
            for stage in range(self.schedule.stages)
        }
        self.recorded: list[Recorded] = []

    def graph(self, stage: int | None = None) -> fx.Graph:
        """The program of every rank, or that of one stage."""
        return self.program.graph if stage is None else self.program.stages[stage].graph

    def step(
        self, kept: Mapping[str, Tensor], batches: Sequence[Batch]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All micro-batches forward and backward: the loss, and the new values of buffers."""
        for stage in self.stages:
            stage.begin(kept, batches)
        for worker in self.workers.values():
            worker.clear()
        post = InProcessTransport()
        runners = []
        for rank in range(self.schedule.ranks):
            held = {key: self.workers[key] for key in self.schedule.held_by(rank)}
            runners.append(RankRunner(self.schedule, rank, held, post))
        run_together(runners)
        self.recorded = [runner.recorded for runner in runners]
        losses = {
            slice_: value[0]
            for worker in self.workers.values()
            for slice_, value in worker.losses.items()
        }
        return sum_by_slice(losses), self._new_buffers()

    def _new_buffers(self) -> dict[str, Tensor]:
        new: dict[str, Tensor] = {}
        for stage in self.stages:
            gathered: dict[int, list[Value]] = {}
            for pipe in range(self.schedule.pipes):
                gathered |= self.workers[pipe, stage.stage.index].statistics
            new |= stage.new_buffers(gathered)
        return new


class VirtualStage:
    """One stage's program on lists of tensors."""

    def __init__(
        self, program: Program, stage: Stage, device: torch.device, split: bool, check: bool
    ) -> None:
        self.program, self.stage = program, stage
        constants = program.captured.constants
        self._halves = WeightHalves() if split else None
        watch = ReplicaCheck(stage.graph, program.mesh) if check else None
        self._run = VirtualGraph(stage.graph, program.mesh, device, constants, watch, self._halves)
        self._update = None
        if stage.update is not None:
            self._update = VirtualGraph(stage.update, program.mesh, device, constants)
        values = {node.name: node for node in stage.graph.nodes}
        self.learns_received = [info(values[name]).differentiable for name in stage.receives]
        self.learns_sent = [info(values[name]).differentiable for name in stage.sends]
        self._kept: dict[str, Tensor] = {}
        self._batches: Sequence[Batch] = ()

    def begin(self, kept: Mapping[str, Tensor], batches: Sequence[Batch]) -> None:
        """Take the parameters and buffers (by name) and the micro-batches of a step."""
        names = self.program.captured.parameters | self.program.captured.buffers
        self._kept = {placeholder: kept[name] for placeholder, name in names.items()}
        self._batches = batches

    def __call__(self, slice_: int, received: Sequence[Value]) -> list[Value]:
        pieces = dict(zip(self.stage.receives, received))
        return self._run({**self._kept, **self._batches[slice_]}, pieces)

    def weight_halves(self) -> list[WeightHalf]:
        return self._halves.take() if self._halves is not None else []

    def new_buffers(self, statistics: Mapping[int, list[Value]]) -> dict[str, Tensor]:
        """The buffers of this stage, changed by all micro-batches in their order."""
        if self._update is None:
            return {}
        assert self.stage.update is not None
        output = self.stage.update.output_node()
        names, results = info(output).buffers, output.args[0]
        assert isinstance(results, tuple)
        values = dict(self._kept)
        before = {f"{name}_before": self._kept[name] for name in names}
        buffers = self.program.captured.buffers
        last = len(self._batches) - 1
        with torch.no_grad():
            for slice_, batch in enumerate(self._batches):
                pieces = dict(zip(self.stage.statistics, statistics.get(slice_, [])))
                found = self._update({**values, **before, **batch}, pieces)
                for name, value, node in zip(names, found, results):
                    if slice_ != last and buffers[name] in self.program.once:
                        continue
                    type_ = info(node).type
                    values[name] = from_ranks(value, type_.layout, self.program.mesh, type_.shape)
        return {buffers[name]: values[name] for name in names}
