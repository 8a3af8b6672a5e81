"""Stage runs: the program of one stage, or of one without a pipeline, as its backend runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

import torch
from torch import Tensor, fx

from autopar._torch.tensors import local_of
from autopar.passes.stages import Stage
from autopar.pipeline.running.weight_halves import WeightHalf, WeightHalves
from autopar.pipeline.running.worker import Value
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.execution.call_numbers import NumberForms, SetSize, Unalike
from autopar.strategies.node_info import SEQUENCE, info
from autopar.tensor_type import TensorType

Batch = Mapping[str, Tensor]


class GraphRun(ABC):
    """A graph as a function."""

    @abstractmethod
    def __call__(
        self, tensors: Mapping[str, Tensor], inputs: Batch, received: Mapping[str, Value]
    ) -> list[Value]:
        """Return the results, given parameters and buffers by name, inputs, and received values by
        placeholder."""

    def resizable(self, others: Sequence[GraphRun], forms: NumberForms) -> SetSize:
        """Return how this run takes another size, once it is laid beside those of other sizes."""
        raise Unalike("a run of one size")

    def set_constant(self, name: str, value: Tensor) -> None:
        """Replace the value of a constant, whole, if the graph reads it."""
        raise NotImplementedError


class StageBackend(Protocol):
    """What a stage needs of the backend that runs it."""

    program: RuntimeProgram

    def type_of(self, node: fx.Node) -> TensorType:
        """Return the type of a value in the size that is run now."""

    def prepare_graph(
        self, graph: fx.Graph, halves: WeightHalves | None = None, *, is_whole: bool = False
    ) -> GraphRun:
        """Return a graph as a function."""

    def zeros(self, type_: TensorType) -> Value:
        """Return zeros as this process's pieces of a value inside a stage."""

    def stored_form(self, values: Sequence[Value], types: Sequence[TensorType]) -> list[Tensor]:
        """Return results in the form in which parameters and buffers are stored."""


class StageRun:
    """Runs the program of one stage on its backend."""

    def __init__(
        self, backend: StageBackend, stage: Stage, *, is_split: bool = False, is_whole: bool = False
    ) -> None:
        self.backend, self.stage = backend, stage
        self._halves = WeightHalves() if is_split else None
        self.graph_run = backend.prepare_graph(stage.graph, self._halves, is_whole=is_whole)
        self._update = backend.prepare_graph(stage.update) if stage.update is not None else None
        self.tensors: Mapping[str, Tensor] = {}  # parameters and buffers of the current step
        self.batches: Mapping[int, Batch] = {}  # the micro-batches of the step, by number
        self.wanted = range(0)  # the outputs that the step returns besides its loss
        self.loss_gradient = 1.0  # of a step's loss
        # By micro-batch, what slices of its tokens share, by placeholder.
        self.sequences: dict[int, dict[str, Value]] = {}

    def __call__(self, microbatch: int, received: Sequence[Value]) -> list[Value]:
        return self.graph_run(
            self.tensors, self.batches[microbatch], dict(zip(self.stage.receives, received))
        )

    def stored_output(self, value: Value, type_: TensorType) -> Tensor:
        """Return an output of this stage in the form of `stored_form`."""
        return self.backend.stored_form([value], [type_])[0]

    def weight_halves(self) -> list[WeightHalf]:
        return self._halves.take() if self._halves is not None else []

    def new_buffers(self, statistics: Mapping[int, list[Value]]) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a buffer and its value after all micro-batches, taken in order."""
        assert self.stage.update is not None
        assert self._update is not None
        output, program = self.stage.update.output_node(), self.backend.program
        names, placeholders = info(output).buffers, program.captured.buffers
        once = program.buffers_updated_once
        every_turn = [name for name in names if placeholders[name] not in once]
        new: dict[str, Value] = {}
        with torch.no_grad():
            for number, batch in self.batches.items():
                received = dict(zip(self.stage.statistics, statistics.get(number, [])))
                received |= {name: new[name] for name in every_turn if name in new}
                new = dict(zip(names, self._update(self.tensors, batch, received)))
        types = [*map(self.backend.type_of, output.args[0])]  # type: ignore[arg-type]
        buffers = [self.tensors[placeholders[name]] for name in names]
        return list(zip(buffers, self.backend.stored_form(list(new.values()), types)))


class SlicedRun(StageRun):
    """Runs one stage for slices of the tokens of micro-batches, each by its own program.

    The slices of a micro-batch share its keys and values, which are there until its last forward:
    what backward reads of them, autograd keeps.
    """

    def __init__(self, backend: StageBackend, slices: Sequence[Stage]) -> None:
        super().__init__(backend, slices[0])
        others = (backend.prepare_graph(stage.graph) for stage in slices[1:])
        self._slices = list(zip(slices, [self.graph_run, *others]))
        nodes = self.stage.graph.find_nodes(op="placeholder")
        shared = [node for node in nodes if info(node).origin[0] == SEQUENCE]
        self._types = {node.name: info(node).type for node in shared}

    def __call__(self, microbatch: int, received: Sequence[Value]) -> list[Value]:
        batch, at = divmod(microbatch, len(self._slices))
        stage, graph_run = self._slices[at]
        if not at:
            self.sequences[batch] = {
                name: self.backend.zeros(type_) for name, type_ in self._types.items()
            }
        sequence = self.sequences[batch]
        if at == len(self._slices) - 1:
            del self.sequences[batch]
        arguments = dict(zip(stage.receives, received)) | sequence
        return graph_run(self.tensors, self.batches[batch], arguments)


class UnstagedRun(StageRun):
    """Runs a program without a pipeline as a single stage; every forward updates its buffers."""

    def __init__(self, backend: StageBackend) -> None:
        program, graph = backend.program, backend.program.graph
        loss = program.captured.loss_index if program.has_loss else None
        outputs = tuple(range(len(program.outputs)))
        stage = Stage(
            0, graph, receives=(), sends=(), outputs=outputs, loss=loss, statistics=(), update=None
        )
        super().__init__(backend, stage, is_whole=True)
        self._mutations, self._count = tuple(program.captured.mutations), len(program.outputs)

    def __call__(self, microbatch: int, received: Sequence[Value]) -> list[Value]:
        is_last = microbatch == len(self.batches) - 1
        later = frozenset() if is_last else self.backend.program.buffers_updated_once
        return [[output] for output in self.forward(self.tensors, self.batches[microbatch], later)]

    def stored_output(self, value: Value, type_: TensorType) -> Tensor:
        return value[0]

    def forward(
        self, tensors: Mapping[str, Tensor], inputs: Batch, later: Set[str] = frozenset()
    ) -> list[Tensor]:
        """Return the outputs and update the buffers, except those named in `later`."""
        # Backward may still read what a buffer was before its new value is written.
        before = {name: tensors[name].clone() for name in self._mutations}
        results = self.graph_run({**tensors, **before}, inputs, {})
        types = [*map(self.backend.type_of, self.backend.program.results)]
        values = self.backend.stored_form(results, types)
        if self._mutations:
            changed = zip(self._mutations, values[self._count :])
            write_buffers([(tensors[name], value) for name, value in changed if name not in later])
        return values[: self._count]


def write_buffers(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give each buffer its new value."""
    with torch.no_grad():
        for buffer, value in values:
            local_of(buffer).copy_(value)
