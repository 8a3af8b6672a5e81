"""Backend: the common part of the virtual mesh and torch.distributed, on which programs run.

    backend.step(tensors, batches)    one training step by the program's schedule: loss and outputs
    backend.call(tensors, inputs)     one forward pass: outputs

    step - RankRunner.advance (one action) - Worker.forward/backward (one micro-batch)
         - StageRun (one stage) - VirtualGraph or TorchGraph, from prepare_graph

`tensors` are the parameters and buffers of the module by name; the buffers change in place. A
program without a pipeline runs as a schedule with one stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, fx

from autopar.layout import Layout
from autopar.passes.stages import Stage
from autopar.pipeline.running.executor import RankRecord, RankRunner, Transport
from autopar.pipeline.running.weight_halves import WeightHalves
from autopar.pipeline.running.worker import Value, Worker
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.stage_runs import (
    Batch,
    GraphRun,
    SlicedRun,
    StageRun,
    UnstagedRun,
    write_buffers,
)
from autopar.runtime.execution.compiled_regions import RegionCompiler
from autopar.runtime.parameters.placing import ReadPart
from autopar.runtime.parameters.stale_weights import StaleWeights
from autopar.strategies.node_info import info
from autopar.tensor_type import TensorType


class Backend(ABC):
    """Runs a program, in the stages of a pipeline if it has them."""

    local_inputs = False  # whether each rank receives its slice of the inputs

    def __init__(
        self,
        program: RuntimeProgram,
        device: torch.device,
        places: Sequence[int],
        compiler: RegionCompiler | None = None,
    ) -> None:
        """`places`: the pipeline places whose ranks run in this process; one without a pipeline."""
        self.program, self.mesh, self.device = program, program.mesh, device
        self.schedule, self.places, self.compiler = program.schedule, places, compiler
        # The ranks inside a stage that run in this process.
        self.stage_ranks: Sequence[int] = range(self.mesh.size)
        self.workers: dict[tuple[int, int], Worker] = {}
        self.stages: dict[int, StageRun] = {}
        self.runners: list[RankRunner] = []
        self.stale_weights = StaleWeights(_delays(program))
        self.resized: dict[str, TensorType] = {}  # values that have another size now, by node

    def type_of(self, node: fx.Node) -> TensorType:
        """Return the type of a value in the size that this backend runs now."""
        return self.resized.get(node.name) or info(node).type

    def _prepare(self, transport: Transport, on_action_done: Callable[[int], None]) -> None:
        """Build the stages of this process and the runner of each of its pipeline places."""
        local = {place: self.schedule.local_stages(place) for place in self.places}
        pipelining = self.program.pipelining
        for index in sorted({stage for pairs in local.values() for _, stage in pairs}):
            is_split = index in self.schedule.split_stages
            if pipelining is None:
                self.stages[index] = UnstagedRun(self)
            elif self.program.slices:
                self.stages[index] = SlicedRun(self, [each[index] for each in self.program.slices])
            else:
                stage = self.program.stages[index]
                self.stages[index] = StageRun(self, stage, is_split=is_split)
        for place, pairs in local.items():
            workers = {pair: Worker(self.stages[pair[1]]) for pair in pairs}
            self.workers |= workers
            runner = RankRunner(self.schedule, place, workers, transport, on_action_done)
            self.runners.append(runner)

    @property
    def unstaged(self) -> UnstagedRun:
        """Return the run of a program that has no pipeline."""
        stage = self.stages[0]
        assert isinstance(stage, UnstagedRun)
        return stage

    @property
    def recorded(self) -> dict[int, RankRecord]:
        """Return the records of the last step, by the pipeline places of this process."""
        return {runner.rank: runner.recorded for runner in self.runners}

    @abstractmethod
    def place_tensor(self, name: str, value: Tensor, type_: TensorType) -> Tensor | None:
        """Return this process's part of a tensor of rank 0's model, in the dtype of `type_`."""

    @abstractmethod
    def place_part(
        self, name: str, like: Tensor, type_: TensorType, read: ReadPart
    ) -> Tensor | None:
        """Like `place_tensor`, for a tensor shaped like `like` whose parts `read` allocates."""

    @abstractmethod
    def cut(self, name: str, whole: Tensor, layout: Layout) -> Tensor:
        """Return this process's part of a tensor that all ranks have in full."""

    @abstractmethod
    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Prepare the parameters that later calls and steps read and differentiate."""

    @abstractmethod
    def collect(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return full copies of tensors of which each process holds a part."""

    @abstractmethod
    def norm(self, gradients: Mapping[str, Tensor], norm_type: float) -> Tensor:
        """Return the norm of the gradients of all parameters of the model."""

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs that a caller passes, by name."""
        return self.program.whole_shapes

    def split(self, inputs: Batch) -> list[dict[str, Tensor]]:
        """Return the inputs of every micro-batch of a step, in order."""
        return self.program.split(inputs)

    @property
    def slice_count(self) -> int:
        """Return the number of equal parts of the batch from which micro-batches are cut."""
        return 1

    def require_callable(self) -> None:  # noqa: B027
        """Refuse a call during a backward of this program, unless all ranks are in this process."""

    def local_checks(self) -> AbstractContextManager[None]:
        """Return the context of checks that this process makes alone before a call."""
        return nullcontext()

    def guard(self, *, agreed: bool = False) -> AbstractContextManager[None]:
        """Return the context of code in which ranks wait for one another; `agreed`: they all
        raise the same errors in it."""
        return nullcontext()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context of backward passes whose gradients are summed over ranks later."""
        return nullcontext()

    def sum_waiting(self) -> None:  # noqa: B027
        """Sum the gradients whose sum over ranks was put off."""

    def close(self) -> None:
        """Drop the stages and the tensors that they read, which form reference cycles with this
        backend."""
        self.stale_weights = StaleWeights({})
        self.workers.clear()
        self.stages.clear()
        self.runners.clear()

    @abstractmethod
    def with_same_copies(self, program: RuntimeProgram) -> Backend:
        """Return a backend of another program with the same parameters and gathered copies."""

    @abstractmethod
    def with_new_copies(self, program: RuntimeProgram, *, is_plain: bool = False) -> Backend:
        """Return a backend of another program with the same parameters and new gathered copies;
        `is_plain`: it does not compile, and returns full outputs."""

    def exchange_call(self, message: str, text: str) -> list[str]:
        """Return every rank's message about its next call, once all have sent theirs; `text`
        describes the call in errors."""
        return [message]

    @abstractmethod
    def call(self, tensors: Mapping[str, Tensor], inputs: Batch) -> list[Tensor]:
        """Run one forward pass and return the user's outputs; of a pipeline, without history."""

    @abstractmethod
    def graph(self, stage: int | None = None) -> fx.Graph:
        """Return the graph of a stage; None: of the first stage that this process holds."""

    @abstractmethod
    def prepare_graph(
        self, graph: fx.Graph, halves: WeightHalves | None = None, *, is_whole: bool = False
    ) -> GraphRun:
        """Return a graph as a function. With `halves`, which record the deferred weight gradients,
        backward is split. `is_whole`: the graph is the program, not a stage of it."""

    def zeros(self, type_: TensorType) -> Value:
        """Return zeros as this process's pieces of a value inside a stage."""
        shapes = (
            type_.layout.local_shape(type_.shape, self.mesh, rank) for rank in self.stage_ranks
        )
        return [torch.zeros(s, dtype=type_.dtype, device=self.device) for s in shapes]

    @abstractmethod
    def stored_form(self, values: Sequence[Value], types: Sequence[TensorType]) -> list[Tensor]:
        """Return results in the form in which parameters and buffers are stored."""

    def _statistics(self, stage: Stage, local: dict[int, list[Value]]) -> dict[int, list[Value]]:
        """Return a stage's statistics of all micro-batches, given those of this process."""
        return local

    def draw(self, program: RuntimeProgram) -> dict[str, Tensor]:
        """Return the random seeds of a step or call of a program, by placeholder."""
        return program.captured.draw()

    def step(
        self,
        tensors: Mapping[str, Tensor],
        batches: Sequence[Batch],
        *,
        with_outputs: bool = False,
        loss_gradient: float = 1.0,
        is_first: bool = True,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all micro-batches forward and backward; return the loss of the batch, and all
        outputs or only those that forward keeps, in full and without history. `is_first`: no summed
        gradients exist yet."""
        try:
            wanted = range(len(self.program.outputs)) if with_outputs else self.program.side_outputs
            self._begin(tensors, dict(enumerate(batches)), wanted, loss_gradient)
            loss = self._run(is_first=is_first)
            outputs = self._outputs(wanted)
            for runner in self.runners:
                runner.finish()
            return loss, outputs
        finally:
            self._begin({}, {})  # frees the tensors of the step

    def _forward_stages(self, tensors: Mapping[str, Tensor], inputs: Batch) -> list[Tensor]:
        """Run a pipeline forward; return all outputs in full and without history."""
        try:
            wanted = range(len(self.program.outputs))
            self._begin(tensors, dict(enumerate(self.split(inputs))), wanted)
            self._carry_out()
            self._update_buffers()
            return self._outputs(wanted)
        finally:
            self._begin({}, {})

    @abstractmethod
    def _run(self, *, is_first: bool) -> Tensor:
        """Run a step, update gradients and buffers, and return the loss."""

    @abstractmethod
    def do_step(self, *, is_first: bool) -> None:
        """Run the actions of a step, and update gradients and buffers."""

    def begin_run(self, tensors: Mapping[str, Tensor], batches: Mapping[int, Batch]) -> None:
        """Begin steps that follow one another; without tensors, end them."""
        self._begin(tensors, batches)

    def action_done(self, position: int) -> None:  # noqa: B027
        """Note that the action at this position of a step is done."""

    def forget_copies(self) -> None:  # noqa: B027
        """Drop what was made of parameters whose values have changed."""

    def gather_copies(self) -> None:  # noqa: B027
        """Make the copies of parameters that backward expects to be there."""

    @abstractmethod
    def _carry_out(self) -> None:
        """Run the actions of the schedule."""

    def _begin(
        self,
        tensors: Mapping[str, Tensor],
        batches: Mapping[int, Batch],
        wanted: range = range(0),
        loss_gradient: float = 1.0,
    ) -> None:
        for stage in self.stages.values():
            stage.tensors, stage.batches = tensors, batches
            stage.wanted, stage.loss_gradient = wanted, loss_gradient
            stage.sequences.clear()
        for worker in self.workers.values():
            worker.clear()

    def losses(self) -> dict[int, Tensor]:
        """Return the shares of the loss that this process computed, by micro-batch."""
        loss = self.program.captured.loss_index
        computed = [pair for worker in self.workers.values() for pair in worker.outputs.items()]
        return {number: outputs[loss][0] for number, outputs in computed if loss in outputs}

    def _outputs(self, wanted: range) -> list[Tensor]:
        """Return some outputs of the batch, joined from those of its micro-batches."""
        local: dict[tuple[int, int], Tensor] = {}
        types = [*map(self.type_of, self.program.outputs)]
        for (_, number), worker in self.workers.items():
            for microbatch, outputs in worker.outputs.items():
                for output in outputs.keys() & {*wanted}:
                    value = self.stages[number].stored_output(outputs[output], types[output])
                    local[microbatch, output] = value
        batches = self.program.batches
        full = self._full_outputs(local, wanted, 1 if batches is None else batches.count)
        return full[0] if batches is None else batches.join(full, wanted, self.slice_count)

    def _full_outputs(
        self, local: Mapping[tuple[int, int], Tensor], wanted: range, count: int
    ) -> list[list[Tensor]]:
        """Return the full outputs of `count` micro-batches, given those of this process."""
        return [[local[microbatch, output] for output in wanted] for microbatch in range(count)]

    def _update_buffers(self) -> None:
        """Write the buffer updates that stages put off to the end of a step."""
        updates: list[tuple[Tensor, Tensor]] = []
        for index, stage in self.stages.items():
            if stage.stage.update is not None:
                statistics: dict[int, list[Value]] = {}
                for (_, number), worker in self.workers.items():
                    statistics |= worker.statistics if number == index else {}
                updates += stage.new_buffers(self._statistics(stage.stage, statistics))
        if updates:
            write_buffers(updates)


def _delays(program: RuntimeProgram) -> dict[str, int]:
    """Return by parameter how many updates old its gradients are; nothing if none is stale."""
    delays = program.schedule.delays
    return {
        name: delay
        for stage, delay in zip(program.stages, delays)
        for name in stage.holds("parameter")
    }
