"""A pipeline on the real mesh: this process is one rank of one or more stages.

It holds the parameters of the stages that the schedule's placement gives to its place on the
pipeline's axis, each once, as DTensors on the mesh inside the stage. With Chimera these are stages
of both directions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from autopar._torch import local_of, placed_like
from autopar.layout import Layout
from autopar.passes import localize
from autopar.passes.stages import Stage
from autopar.pipeline.executor import Key, RankRunner, Recorded
from autopar.pipeline.weight_halves import WeightHalf, WeightHalves
from autopar.pipeline.worker import Value, Worker
from autopar.plan.program import Program
from autopar.runtime.distributed import axes_used
from autopar.runtime.eager import compile_graph
from autopar.runtime.failures import local_checks, one_fails_all_stop
from autopar.runtime.groups import Groups
from autopar.runtime.leaves import Leaves
from autopar.runtime.messages import Messages, Shape
from autopar.runtime.norm import norm_over_world
from autopar.runtime.placing import Placing
from autopar.runtime.stage_sync import Learned, StageSync, holders_of, own_group
from autopar.runtime.step_loss import StepLoss
from autopar.runtime.world import world
from autopar.strategies.node_info import info

Batch = Mapping[str, Tensor]


class TorchPipeline:
    """Runs this rank's stages."""

    def __init__(self, program: Program, device: torch.device) -> None:
        assert program.pipelining is not None
        self.program, self.pipelining, self.mesh = program, program.pipelining, program.mesh
        self.schedule, mesh = program.pipelining.schedule, program.pipelining.mesh
        self.device = device
        self.world = world()
        self.rank = self.world.rank
        self.place = mesh.coordinate(self.rank)[self.pipelining.axis]
        inside = self.pipelining.ranks_at(self.place)
        self.inner_rank = inside.index(self.rank)
        self.device_mesh = self.world.mesh_of(mesh, device.type)[self.mesh.names]
        places = range(self.schedule.ranks)
        meshes = [self.pipelining.ranks_at(place) for place in places]
        groups = Groups(self.mesh, axes_used(program.graph), meshes)
        # The ranks that stand where this one stands, in every place of the pipeline.
        self.line = [ranks[self.inner_rank] for ranks in meshes]
        self._line_group = own_group(self.pipelining, places, purpose="line")
        self.held = self.schedule.held_by(self.place)
        split = {a.stage for order in self.schedule.orders for a in order if a.kind == "I"}
        self.stages = {
            stage: TorchStage(self, program.stages[stage], groups, stage in split)
            for stage in sorted({stage for _, stage in self.held})
        }
        self.workers = {
            (pipe, stage): Worker(self.stages[stage], self.pipelining.recompute)
            for pipe, stage in self.held
        }
        self.users: dict[str, list[int]] = {}  # parameter or buffer -> the stages that read it
        for stage in program.stages:
            for name in [*stage.holds("parameter"), *stage.holds("buffer")]:
                self.users.setdefault(name, []).append(stage.index)
        loss = program.stages[-1].graph.output_node().all_input_nodes[0]
        self._loss_type: torch.dtype = info(loss).val.dtype
        self._replicas = self._replica_groups()
        # Groups are made here: none in the middle of a step.
        self.leaves = Leaves()
        self._sync = StageSync(self.pipelining, self._learned(), self.leaves)
        self.post = Messages(self.schedule, list(zip(*meshes)), self._shapes, self.device)
        self.placing = Placing(self.mesh, self.inner_rank, self.device, self.device_mesh)
        self.recorded: dict[int, Recorded] = {}

    def graph(self, stage: int | None = None) -> fx.Graph:
        """The program of the first stage that this rank holds, or of any stage."""
        if stage is None:
            stage = min(self.stages)
        held = self.stages.get(stage)
        return held.graph if held is not None else self.program.stages[stage].graph

    def place_tensor(self, name: str, value: Tensor, layout: Layout) -> Tensor | None:
        """This rank's piece of a parameter or buffer, if a stage of it reads that."""
        placed = self.placing.place(value, layout)
        return placed if self._holds(name) else None

    def cut(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's piece of a tensor that all ranks have."""
        return self.placing.cut(whole, layout)

    def bind(self, kept: Mapping[str, Tensor]) -> None:
        """Let leaves follow what the module holds now."""
        self.leaves.bind(kept)

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """What a caller hands in: whole tensors."""
        return self.program.whole_shapes

    def local_checks(self) -> AbstractContextManager[None]:
        """Around what looks at a call on this rank alone, before it runs."""
        return local_checks(self.world)

    def guard(self, agreed: bool = False) -> AbstractContextManager[None]:
        """Around everything in which ranks wait for one another."""
        return one_fails_all_stop(self.world, agreed)

    def step(
        self, kept: Mapping[str, Tensor], batches: Sequence[Batch]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's actions: the loss of the batch, and the new values of its buffers."""
        sync = self._sync
        self._begin(kept, batches)
        sync.start()
        self.post.start()
        shares = torch.zeros(len(batches), dtype=self._loss_type, device=self.device)
        loss = StepLoss(shares, self.schedule.orders[self.place], self._line_group)

        def after(position: int) -> None:
            sync.after(position)
            loss.after(position, self.workers.values())

        runner = RankRunner(self.schedule, self.place, self.workers, self.post, after)
        while not runner.done:
            runner.advance()
        self.recorded = {self.place: runner.recorded}
        new_buffers = self._new_buffers()
        self._give(sync.finish())
        self.post.finish()
        self._begin({}, ())  # nothing of a step stays
        return loss.total(), new_buffers

    def _begin(self, kept: Mapping[str, Tensor], batches: Sequence[Batch]) -> None:
        for stage in self.stages.values():
            stage.begin(kept, batches)
        for worker in self.workers.values():
            worker.clear()

    def collect(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, from the ranks that hold them to all."""
        mine = [(name, tuple(value.shape), value.dtype) for name, value in values.items()]
        everyones: list[Any] = [mine] * len(self.line)
        if self._line_group is not None:
            dist.all_gather_object(everyones, mine, group=self._line_group)
        owners: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        for place, listed in enumerate(everyones):
            for name, shape, dtype in listed:
                owners.setdefault(name, (place, shape, dtype))
        found = {}
        for name, (place, shape, dtype) in owners.items():
            if place == self.place:
                value = values[name].detach()
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                whole = whole.clone(memory_format=torch.contiguous_format)
            else:
                whole = torch.empty(shape, dtype=dtype, device=self.device)
            if self._line_group is not None:
                dist.broadcast(whole, self.line[place], group=self._line_group)
            found[name] = whole
        return found

    def norm(self, gradients: Mapping[str, Tensor], norm_type: float) -> Tensor:
        """The norm of all stages' gradients; of those in several places the first one counts."""
        first = {name: holders_of(self.pipelining, users)[0] for name, users in self.users.items()}
        own = {name: value for name, value in gradients.items() if first[name] == self.place}
        here = self.mesh.coordinate(self.inner_rank)
        return norm_over_world(self.program, own, norm_type, here, self.device)

    def _holds(self, name: str) -> bool:
        return self.place in holders_of(self.pipelining, self.users.get(name, [0]))

    def _shapes(self, key: Key) -> list[Shape]:
        """What a message to one of this rank's stages holds."""
        stage = self.program.stages[key.stage]
        values = {node.name: node for node in stage.graph.nodes}
        names = stage.receives if key.forward else stage.sends
        nodes = [values[name] for name in names]
        return [
            (
                info(node).type.layout.local_shape(
                    info(node).type.shape, self.mesh, self.inner_rank
                ),
                info(node).type.dtype,
            )
            for node in nodes
            if key.forward or info(node).differentiable
        ]

    def _give(self, gradients: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            parameters = [self.leaves.parameters[name] for name in gradients]
            for parameter, gradient in zip(parameters, placed_like(parameters, gradients.values())):
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient

    def _learned(self) -> list[Learned]:
        placeholders = self.program.placeholders
        return [
            Learned(
                name,
                info(placeholders[placeholder]).val.dtype,
                tuple(self.users[name]),
                info(placeholders[placeholder]).sync,
            )
            for placeholder, name in self.program.captured.parameters.items()
            if name in self.users and info(placeholders[placeholder]).differentiable
        ]

    def _replica_groups(self) -> dict[int, dist.ProcessGroup]:
        """For stages with statistics and several pipes: the ranks like this one that hold them."""
        groups = {}
        for index, stage in enumerate(self.program.stages):
            if stage.statistics and self.schedule.pipes > 1:
                group = own_group(
                    self.pipelining, self.schedule.replicas_of(index), purpose="statistics"
                )
                if group is not None:
                    groups[index] = group
        return groups

    def _new_buffers(self) -> dict[str, Tensor]:
        new: dict[str, Tensor] = {}
        for index, stage in self.stages.items():
            statistics: dict[int, list[Value]] = {}
            for pipe in range(self.schedule.pipes):
                own = self.workers.get((pipe, index))
                statistics |= own.statistics if own is not None else {}
            if index in self._replicas:
                statistics = self._exchanged(stage.stage, statistics)
            new |= stage.new_buffers(statistics)
        return new

    def _exchanged(self, stage: Stage, own: dict[int, list[Value]]) -> dict[int, list[Value]]:
        """The statistics of all micro-batches, from the replicas that ran them."""
        values = {node.name: node for node in stage.graph.nodes}
        types = [info(values[name]).type for name in stage.statistics]
        found = {}
        for slice_, pipe in enumerate(self.schedule.pipe_of):
            source = self.schedule.rank_of(pipe, stage.index)
            found[slice_] = own.get(slice_) or [
                [
                    torch.empty(
                        type_.layout.local_shape(type_.shape, self.mesh, self.inner_rank),
                        dtype=type_.dtype,
                        device=self.device,
                    )
                ]
                for type_ in types
            ]
            for value in found[slice_]:
                value[0] = value[0].contiguous()
                group = self._replicas[stage.index]
                dist.broadcast(value[0], self.line[source], group=group)
        return found


class TorchStage:
    """One stage's program on this rank."""

    def __init__(self, pipeline: TorchPipeline, stage: Stage, groups: Groups, split: bool) -> None:
        self.pipeline, self.stage = pipeline, stage
        mesh, rank = pipeline.mesh, pipeline.inner_rank
        self._halves = WeightHalves() if split else None
        self.graph = localize(stage.graph, mesh, rank, pipeline.device, groups.name)
        self._run = compile_graph(self.graph, halves=self._halves)
        self._placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self._update: Any = None
        if stage.update is not None:
            update = localize(stage.update, mesh, rank, pipeline.device, groups.name)
            self._update = compile_graph(update)
            self._update_reads = [node for node in update.nodes if node.op == "placeholder"]
        values = {node.name: node for node in stage.graph.nodes}
        self.learns_received = [info(values[name]).differentiable for name in stage.receives]
        self.learns_sent = [info(values[name]).differentiable for name in stage.sends]
        self._constants: dict[str, Tensor] = {}
        self._kept: Mapping[str, Tensor] = {}
        self._batches: Sequence[Batch] = ()
        self._pieces: dict[tuple[str, int], Tensor] = {}

    def begin(self, kept: Mapping[str, Tensor], batches: Sequence[Batch]) -> None:
        """Take the buffers (by name) and the micro-batches of a step."""
        self._kept, self._batches = kept, batches
        self._pieces.clear()

    def __call__(self, slice_: int, received: Sequence[Value]) -> list[Value]:
        given = {name: value[0] for name, value in zip(self.stage.receives, received)}
        arguments = [self._argument(node, slice_, given) for node in self._placeholders]
        return [[result] for result in self._run(*arguments)]

    def weight_halves(self) -> list[WeightHalf]:
        return self._halves.take() if self._halves is not None else []

    def new_buffers(self, statistics: Mapping[int, list[Value]]) -> dict[str, Tensor]:
        """The buffers of this stage, changed by all micro-batches in their order."""
        if self._update is None:
            return {}
        assert self.stage.update is not None
        names, program = info(self.stage.update.output_node()).buffers, self.pipeline.program
        placeholders = program.captured.buffers
        every_turn = [name for name in names if placeholders[name] not in program.once]
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for slice_ in range(len(self._batches)):
                values = statistics.get(slice_, [])
                given = {name: value[0] for name, value in zip(self.stage.statistics, values)}
                given |= {name: found[name] for name in every_turn if name in found}
                arguments = [self._argument(n, slice_, given) for n in self._update_reads]
                found = dict(zip(names, self._update(*arguments)))
        return {placeholders[name]: value for name, value in found.items()}

    def _argument(self, node: fx.Node, slice_: int, given: Mapping[str, Tensor]) -> Tensor:
        kind, name = info(node).origin
        if node.name in given:
            return given[node.name]
        if kind == "parameter":
            return self.pipeline.leaves.by_name[name]
        if kind in ("buffer", "before"):
            return local_of(self._kept[name])
        placing, layout = self.pipeline.placing, info(node).type.layout
        if kind == "constant":
            if name not in self._constants:
                whole = self.pipeline.program.captured.constants[name]
                self._constants[name] = placing.piece(whole, layout)
            return self._constants[name]
        key = name, slice_
        if key not in self._pieces:
            whole = self._batches[slice_][name].to(self.pipeline.device)
            self._pieces[key] = placing.view(whole, layout)
        return self._pieces[key]
