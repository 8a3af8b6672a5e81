"""Run a program on the real mesh: this process is one rank under torch.distributed.

Parameters are DTensors under their original names. Autograd works on their local tensors, and at
the end of backward the parameters get the summed gradients as DTensors. In a pipeline this process
runs the stages at its place on the pipeline's axis, and holds their parameters, each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar._torch.communication import wait_for
from autopar.collectives.eager_movements import DeferredSum
from autopar.cost.copy_groups import copy_groups
from autopar.layout import Layout
from autopar.passes.localize import axes_used
from autopar.passes.stages import Stage
from autopar.pipeline.running.executor import MessageKey
from autopar.pipeline.running.movement_spans import listening
from autopar.pipeline.running.weight_halves import WeightHalves
from autopar.pipeline.running.worker import Value
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.backend import Backend, Batch
from autopar.runtime.backends.loss_shares import LossShares
from autopar.runtime.backends.piece_collection import collect
from autopar.runtime.backends.process_groups import Groups
from autopar.runtime.backends.rank_graph import TorchGraph
from autopar.runtime.backends.stage_messages import Messages, Shape
from autopar.runtime.backends.stage_ranks import (
    StageRanks,
    TensorReaders,
    bucket_entry,
    gradient_sums,
)
from autopar.runtime.backends.world import world
from autopar.runtime.batches.batch_slices import BatchSlices
from autopar.runtime.execution.compiled_regions import RegionCompiler
from autopar.runtime.launching.failures import exchange_call, local_checks, stop_all_on_failure
from autopar.runtime.module.call_outputs import CallOutputs, OutputsLike
from autopar.runtime.module.direct_calls import DirectCalls
from autopar.runtime.module.gradient_accumulation import GradientAccumulation
from autopar.runtime.module.torch_contexts import nested_call_refusal
from autopar.runtime.parameters.gradient_buckets import GradientSync
from autopar.runtime.parameters.gradient_norm import norm_over_world
from autopar.runtime.parameters.local_parameters import LocalParameters
from autopar.runtime.parameters.parameter_movement import parameter_movements
from autopar.runtime.parameters.parameter_storage import ParameterStorage
from autopar.runtime.parameters.placing import ReadPart, TensorPlacer
from autopar.strategies.node_info import info
from autopar.tensor_type import TensorType


class TorchBackend(Backend):
    """Runs this rank's part of a program; the other backend is `VirtualBackend`."""

    def __init__(
        self,
        program: RuntimeProgram,
        device: torch.device,
        *,
        local_inputs: bool = False,
        outputs: OutputsLike = "whole",
        compiler: RegionCompiler | None = None,
        leaves: LocalParameters | None = None,
    ) -> None:
        """`leaves`: the local parameters that another program made; None: new ones."""
        self.world, self.local_inputs = world(), local_inputs
        self.ranks = ranks = StageRanks(program, self.world.rank)
        super().__init__(program, device, [ranks.place], compiler)
        self.stage_ranks = [ranks.rank_in_stage]
        whole_mesh = self.world.mesh_of(program.whole_mesh, device.type)
        self.device_mesh = whole_mesh[self.mesh.names] if program.pipelining else whole_mesh
        layouts = [program.kept_layout(n) for n in program.placeholders]
        layouts += [info(n).type.layout for n in program.outputs]
        single_axes = {(axis,) for layout in layouts for axis in layout.axes}  # pieces are joined
        used = single_axes.union(*map(axes_used, program.graphs))
        self.groups = Groups(self.mesh, used, ranks.meshes)
        is_sliced, rank = local_inputs and program.batches is not None, ranks.rank_in_stage
        self.slices = BatchSlices(program, self.groups, rank) if is_sliced else None
        self._call_outputs = CallOutputs(outputs, self.device_mesh, self.groups, rank)
        self.placing = TensorPlacer(self.mesh, rank, device, self.device_mesh)
        self._storage = ParameterStorage(program, device)
        self.constants: dict[str, Tensor] = {}  # this rank's pieces of constants that graphs read
        self._late: list[DeferredSum] = []
        self._works: list[dist.Work] = []
        # All groups are made here, none during a step.
        self._line = ranks.group(range(self.schedule.ranks), purpose="line")
        self._statistics_groups = self._replica_groups()
        self._readers = TensorReaders(program)
        self.parameter_movements = movements = parameter_movements(program)
        self.leaves = leaves or self._make_leaves()
        groups, link = self.groups, self.leaves.link
        self._sums = gradient_sums(
            program, self._readers, ranks, movements=movements, groups=groups, link=link
        )
        self.loss_shares = LossShares(self._line, program.loss_dtype, device)
        self._syncs: dict[frozenset[str], GradientSync] = {}  # by the names of parameters
        self._sync: GradientSync | None = None  # of the step that runs
        self._version = 0  # the version of the leaves in `_syncs`
        self.accumulation = GradientAccumulation(self.leaves, movements, self.device_mesh)
        self._calls = DirectCalls(program, self.leaves, self.world, self.accumulation)
        self.messages = Messages(ranks, self.message_shapes, device)
        self._prepare(self.messages, self.action_done)

    def _make_leaves(self) -> LocalParameters:
        plans = copy_groups(self.parameter_movements.values(), self.mesh, self.program.buffer_bytes)
        wanted = {plan.kind.axes for plan in plans if plan.kind.axes}
        gathering = Groups(self.mesh, wanted, self.ranks.meshes, "gathers")
        rank = self.ranks.rank_in_stage
        return LocalParameters(plans, gathering.__getitem__, self.mesh, rank, self.device)

    def graph(self, stage: int | None = None) -> fx.Graph:
        local = self.stages.get(min(self.stages) if stage is None else stage)
        if local is not None and isinstance(local.graph_run, TorchGraph):
            return local.graph_run.graph
        return self.program.stages[stage or 0].graph

    def prepare_graph(
        self, graph: fx.Graph, halves: WeightHalves | None = None, *, is_whole: bool = False
    ) -> TorchGraph:
        copies = self.leaves.copies(self.parameter_movements)
        options = {"copies": copies, "window": self.leaves.window}
        if not is_whole:
            return TorchGraph(self, graph, halves=halves, **options)
        options |= {"whole": None if self.local_inputs else graph, "mesh": self.mesh}
        options |= {"late": self._late, "outputs": len(self.program.outputs)}
        return TorchGraph(self, graph, **options)

    def place_tensor(self, name: str, value: Tensor, type_: TensorType) -> Tensor | None:
        """Return this rank's piece; None if no stage of this rank reads the tensor."""
        places = self.ranks.places_of(self._readers.stages(name))
        meshes = [self.ranks.meshes[place] for place in places]
        piece = self.placing.place_from_rank0(value, type_, meshes)
        return piece if piece is None else self._storage(name, piece)

    def place_part(
        self, name: str, like: Tensor, type_: TensorType, read: ReadPart
    ) -> Tensor | None:
        is_here = self.ranks.place in self.ranks.places_of(self._readers.stages(name))
        return self._storage(name, self.placing.place_part(like, type_, read)) if is_here else None

    def cut(self, name: str, whole: Tensor, layout: Layout) -> Tensor:
        return self._storage(name, self.placing.place_tensor(whole, layout))

    def stored_form(self, values: Sequence[Value], types: Sequence[TensorType]) -> list[Tensor]:
        return [value[0] for value in values]

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        self.leaves.bind(tensors)

    def collect(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return collect(values, self.ranks, self._line, self.groups, self.device)

    def norm(self, gradients: Mapping[str, Tensor], norm_type: float) -> Tensor:
        """Return the norm of all gradients; of one in several places the first place counts."""
        counted = {
            name: value
            for name, value in gradients.items()
            if self.ranks.places_of(self._readers.stages(name))[0] == self.ranks.place
        }
        coordinate = self.mesh.coordinate(self.ranks.rank_in_stage)
        return norm_over_world(self.program, counted, norm_type, coordinate, self.device)

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of full tensors, or with local inputs of this rank's pieces."""
        if not self.local_inputs:
            return super().input_shapes()
        mesh, rank, type_of = self.mesh, self.ranks.rank_in_stage, self.program.type_of
        shapes = self.program.whole_shapes.items()
        return {n: type_of(n).layout.local_shape(shape, mesh, rank) for n, shape in shapes}

    def split(self, inputs: Batch) -> list[dict[str, Tensor]]:
        return super().split(inputs) if self.slices is None else self.slices.split(inputs)

    @property
    def slice_count(self) -> int:
        return 1 if self.slices is None else self.slices.parts

    def require_callable(self) -> None:
        if self.leaves.is_in_backward:
            raise nested_call_refusal()

    def local_checks(self) -> AbstractContextManager[None]:
        return local_checks(self.world)

    def guard(self, *, agreed: bool = False) -> AbstractContextManager[None]:
        return stop_all_on_failure(self.world, agreed=agreed)

    def draw(self, program: RuntimeProgram) -> dict[str, Tensor]:
        return self.world.broadcast(super().draw(program))

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self.program.pipelining else self.accumulation.no_sync()

    def sum_waiting(self) -> None:
        with self.guard():
            self.accumulation.sum_waiting(self._sync_of)

    def close(self) -> None:
        super().close()
        self.leaves.close()
        self.constants.clear()
        self._calls.close()
        self._syncs.clear()
        self._sync = None

    def with_same_copies(self, program: RuntimeProgram) -> TorchBackend:
        options = self._options(is_plain=False)
        return TorchBackend(program, self.device, leaves=self.leaves, **options)

    def with_new_copies(self, program: RuntimeProgram, *, is_plain: bool = False) -> TorchBackend:
        backend = TorchBackend(program, self.device, **self._options(is_plain=is_plain))
        backend.bind(self.leaves.parameters)
        return backend

    def _options(self, *, is_plain: bool) -> dict[str, Any]:
        form = {"outputs": self._call_outputs.form, "compiler": self.compiler}
        return {"local_inputs": self.local_inputs} | ({} if is_plain else form)

    def exchange_call(self, message: str, text: str) -> list[str]:
        return exchange_call(self.world, message, text)

    def enter(self, value: Tensor, layout: Layout) -> Tensor:
        """Return this rank's piece of an input."""
        if not (self.local_inputs or value.requires_grad):
            return self.placing.view_piece(value, layout).to(self.device)  # and not the others'
        value = value.to(self.device)
        if self.local_inputs:
            return value
        for dim, axes in enumerate(layout.dims):
            for axis in axes:
                group, size = self.groups.name((axis,)), self.mesh[axis]
                index = self.mesh.coordinate(self.ranks.rank_in_stage)[axis]
                value = torch.ops.autopar.slice(value, dim, group, size, index)
        return value

    def _run(self, *, is_first: bool) -> Tensor:
        self.do_step(is_first=is_first)
        self.messages.finish()
        return self.loss_shares.total(self.losses())

    def do_step(self, *, is_first: bool) -> None:
        reached = self.program.parameters_by_output[self.program.captured.loss_index]
        sync = self._sync = self._sync_of(reached | self.accumulation.waiting)
        self._late.clear()  # left by a step that raised
        self.leaves.window.reset()
        self.accumulation.start(sync, reached, is_first=is_first)
        with listening(self.runners[0].begin_movement, sync, self.leaves.window):
            sync.action_done(-1)  # -1: before the first action
            self._carry_out()
            self._update_buffers()
            self.leaves.window.reset()
            with torch.no_grad():
                self._wait_for_sums()
                self.accumulation.finish(sync, reached)

    def _carry_out(self) -> None:
        (runner,) = self.runners
        runner.start()
        while not runner.done:
            runner.advance()

    def action_done(self, position: int) -> None:
        """Start the sums that the action at `position` of a step completes."""
        sync = self._sync
        if sync is None:  # a call has no gradients
            return
        sync.action_done(position)
        is_last = position == self.ranks.loss_position
        for late in self._late:
            if not (is_last and sync.adds_rider(late)):
                self._works.append(late.start())
        self._late.clear()
        if is_last:
            self.loss_shares.begin(self.losses(), self.schedule.all_parts)

    def forget_copies(self) -> None:
        self.leaves.window.reset()

    def gather_copies(self) -> None:
        self.leaves.window.gather_step_long()

    def _full_outputs(
        self, local: Mapping[tuple[int, int], Tensor], wanted: range, count: int
    ) -> list[list[Tensor]]:
        """Return full outputs; the stage that computes one sends its pieces along its lines."""
        types, batches = [*map(self.type_of, self.program.outputs)], list[list[Tensor]]()
        stage_of = {output: s.index for s in self.program.stages for output in s.outputs}
        for number in range(count):
            pieces = {output: local.get((number, output)) for output in wanted}
            for output, piece in pieces.items() if self._line is not None else ():
                place = self.schedule.rank_of(self.schedule.pipe_of[number], stage_of[output])
                pieces[output] = self._broadcast_piece(piece, types[output], place)
            join = self._call_outputs.whole
            batches.append([join(p, types[at]) for at, p in pieces.items() if p is not None])
        return batches

    def _broadcast_piece(self, piece: Tensor | None, type_: TensorType, place: int) -> Tensor:
        """Return the piece that the rank at `place` of this rank's line holds."""
        if piece is None or place != self.ranks.place:
            shape = type_.layout.local_shape(type_.shape, self.mesh, self.ranks.rank_in_stage)
            piece = torch.empty(shape, dtype=type_.dtype, device=self.world.carrier)
        piece = piece.contiguous().to(self.world.carrier)
        if piece.numel():
            dist.broadcast(piece, self.ranks.line[place], group=self._line)
        return piece.to(self.device)

    def _wait_for_sums(self) -> None:
        for work in self._works:
            wait_for(work)
        self._works.clear()

    def _sync_of(self, names: frozenset[str]) -> GradientSync:
        """Return the gradient sums of those parameters in `names` that are trainable now."""
        for sync in self._syncs.values():
            sync.clear()
        if self._version != self.leaves.version:
            for sync in self._syncs.values():
                sync.close()
            self._syncs.clear()
            self._version = self.leaves.version
        if names not in self._syncs:
            leaves, rank = self.leaves, self.ranks.rank_in_stage
            movements = [m for m in self.parameter_movements.values() if m.name in names]
            trainable = [m for m in movements if leaves.is_trainable(m.name)]
            keys = [(movement, self._readers.sum_key(movement)) for movement in trainable]
            entries = [(bucket_entry(m, key, leaves, self.mesh, rank), key) for m, key in keys]
            cut = {k: self.leaves.cut_bytes(k.stages) for k, s in self._sums.items() if s.is_cut}
            self._syncs[names] = GradientSync(entries, self._sums, cut, self.program.buffer_bytes)
        return self._syncs[names]

    def message_shapes(self, key: MessageKey) -> list[Shape]:
        """Return the shapes and dtypes of the values in a message to a stage of this rank."""
        stage = self.program.stage_of(key.stage, key.microbatch)
        names = stage.receives if key.forward else stage.sends
        nodes = [stage.nodes[name] for name in names]
        return [
            (self._local_shape(node), info(node).type.dtype)
            for node in nodes
            if key.forward or info(node).differentiable
        ]

    def _local_shape(self, node: fx.Node) -> tuple[int, ...]:
        at = self.type_of(node)
        return at.layout.local_shape(at.shape, self.mesh, self.ranks.rank_in_stage)

    def _replica_groups(self) -> dict[int, dist.ProcessGroup]:
        """Return for each stage with statistics the group of its replicas in several pipes."""
        groups = {}
        for stage in self.program.stages:
            if stage.statistics and self.schedule.pipes > 1:
                places = self.schedule.replicas_of(stage.index)
                group = self.ranks.group(places, purpose="statistics")
                if group is not None:
                    groups[stage.index] = group
        return groups

    def _statistics(self, stage: Stage, local: dict[int, list[Value]]) -> dict[int, list[Value]]:
        """Return the statistics of all micro-batches, from the replicas that ran them."""
        group = self._statistics_groups.get(stage.index)
        if group is None:
            return local
        nodes, statistics = [stage.nodes[name] for name in stage.statistics], {}
        for microbatch, pipe in enumerate(self.schedule.pipe_of):
            source = self.ranks.line[self.schedule.rank_of(pipe, stage.index)]
            statistics[microbatch] = local.get(microbatch) or [
                [torch.empty(self._local_shape(n), dtype=info(n).type.dtype, device=self.device)]
                for n in nodes
            ]
            for value in statistics[microbatch]:
                value[0] = value[0].contiguous()
                dist.broadcast(value[0], source, group=group)
        return statistics

    def call(self, tensors: Mapping[str, Tensor], inputs: Batch) -> list[Tensor]:
        """Return the outputs in the form that the option `outputs` names."""
        window = self.leaves.window
        window.reset()
        if self.program.stages:
            outputs = self._forward_stages(tensors, inputs)
            self.messages.finish()
            window.reset()
            return outputs
        outputs = self.unstaged.forward(tensors, inputs)
        if torch.is_grad_enabled() and any(output.requires_grad for output in outputs):
            sync = self._sync_of(frozenset().union(*self.program.parameters_by_output))
            outputs = self._calls.watch(outputs, sync, self.ranks.loss_position)
        else:
            window.reset()
        self._works += [late.start() for late in self._late]
        self._late.clear()
        self._wait_for_sums()
        pairs = zip(outputs, self.program.outputs)
        return [self._call_outputs(value, self.type_of(node)) for value, node in pairs]


def is_among_others(backend: Backend) -> TypeGuard[TorchBackend]:
    """Return whether a backend is one of several ranks."""
    return isinstance(backend, TorchBackend) and backend.world.size > 1
