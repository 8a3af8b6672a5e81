"""Backend: where a program runs, and what the virtual mesh and torch.distributed have in common.

    backend.step(kept, batches)         a whole step, by the program's schedule: loss and outputs
    backend.call(kept, inputs)          one pass forward: outputs

`kept` are the parameters and buffers of the module by name; buffers are changed in it. A step
without a pipeline is a schedule of one stage, which is the program itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, fx

from autopar._torch.tensors import local_of
from autopar.layout import Layout, TensorType
from autopar.passes.stages import Stage
from autopar.pipeline.running.executor import RankRecord, RankRunner, Transport
from autopar.pipeline.running.weight_halves import WeightHalf, WeightHalves
from autopar.pipeline.running.worker import Value, Worker
from autopar.plan.runtime_program import Program
from autopar.runtime.execution.compiled_regions import RegionCompiler
from autopar.runtime.parameters.placing import ReadPart
from autopar.strategies.node_info import info

Batch = Mapping[str, Tensor]
# From parameters and buffers by name, inputs, and values that are given, by placeholder: results.
GraphRun = Callable[[Mapping[str, Tensor], Batch, Mapping[str, Value]], list[Value]]


class Backend(ABC):
    """Runs a program, whole or in the stages of a pipeline."""

    local_inputs = False  # whether a rank is handed its slice of the inputs

    def __init__(
        self,
        program: Program,
        device: torch.device,
        places: Sequence[int],
        compiler: RegionCompiler | None = None,
    ) -> None:
        """`places` of the pipeline whose ranks this process runs: the one, without a pipeline."""
        self.program, self.mesh, self.device = program, program.mesh, device
        self.schedule, self.places, self.compiler = program.schedule, places, compiler
        self.workers: dict[tuple[int, int], Worker] = {}
        self.stages: dict[int, StageRun] = {}
        self.runners: list[RankRunner] = []

    def _prepare(self, transport: Transport, after: Callable[[int], None]) -> None:
        """Make the stages of this process, and what runs them."""
        local = {place: self.schedule.local_stages(place) for place in self.places}
        pipelining = self.program.pipelining
        for index in sorted({stage for pairs in local.values() for _, stage in pairs}):
            self.stages[index] = (
                StageRun(self, self.program.stages[index], index in self.schedule.split_stages)
                if pipelining is not None
                else WholeRun(self)
            )
        for place, pairs in local.items():
            own = {pair: Worker(self.stages[pair[1]]) for pair in pairs}
            self.workers |= own
            self.runners.append(RankRunner(self.schedule, place, own, transport, after))

    @property
    def whole(self) -> WholeRun:
        """The program, if there is no pipeline."""
        only = self.stages[0]
        assert isinstance(only, WholeRun)
        return only

    @property
    def recorded(self) -> dict[int, RankRecord]:
        """What the ranks of the pipeline that run here did in their last step."""
        return {runner.rank: runner.recorded for runner in self.runners}

    @abstractmethod
    def place_tensor(self, name: str, value: Tensor, type_: TensorType) -> Tensor | None:
        """What is kept here of a parameter or buffer of rank 0's model, in the dtype of a type."""

    @abstractmethod
    def place_part(
        self, name: str, like: Tensor, type_: TensorType, read: ReadPart
    ) -> Tensor | None:
        """The same of a tensor like `like`, of which `read` gives a part in its own memory."""

    @abstractmethod
    def cut(self, name: str, whole: Tensor, layout: Layout) -> Tensor:
        """The same of a whole tensor that all ranks have."""

    def bind(self, kept: Mapping[str, Tensor]) -> None:
        """What runs from now on read, where they are not handed it."""
        return

    @abstractmethod
    def collect(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of what is kept, the caller's own."""

    @abstractmethod
    def norm(self, gradients: Mapping[str, Tensor], norm_type: float) -> Tensor:
        """The norm of the gradients of the whole model."""

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """What a caller hands in: whole tensors."""
        return self.program.whole_shapes

    def split(self, inputs: Batch) -> list[dict[str, Tensor]]:
        """The inputs of every micro-batch of a step, in order."""
        return self.program.split(inputs)

    @property
    def parts(self) -> int:
        """Of how many parts of the batch each micro-batch takes its share."""
        return 1

    def require_callable(self) -> None:  # noqa: B027
        """Refuse a call in the middle of a backward of this program. In one process it may come."""

    def local_checks(self) -> AbstractContextManager[None]:
        """Around what looks at a call in this process alone, before it runs."""
        return nullcontext()

    def guard(self, agreed: bool = False) -> AbstractContextManager[None]:
        """Around everything in which ranks wait for one another. In one process nobody does."""
        return nullcontext()

    def no_sync(self) -> AbstractContextManager[None]:
        """Around passes whose gradients are summed over ranks later. In one process they are all
        here."""
        return nullcontext()

    def sum_waiting(self) -> None:
        """Sum gradients that were not."""
        return

    def close(self) -> None:
        """Let go of what runs here, and of the tensors that it reads: they refer to this backend,
        so that only the garbage collector would find them."""
        self.workers.clear()
        self.stages.clear()
        self.runners.clear()

    @abstractmethod
    def of(self, program: Program) -> Backend:
        """Where another program runs on the same parameters, and on the same copies of them."""

    def beside(self, program: Program, plainly: bool = False) -> Backend:
        """Where another program runs on the same parameters, with copies of its own; `plainly`: not
        compiled, and what it gives is whole."""
        return self.of(program)

    def everyones(self, said: str, text: str) -> list[str]:
        """What each rank says of the call that comes, before it goes on: all have to be there.
        `text` is what a person reads of it."""
        return [said]

    @abstractmethod
    def call(self, kept: Mapping[str, Tensor], inputs: Batch) -> list[Tensor]:
        """One pass forward: the user's outputs; in a pipeline without history."""

    @abstractmethod
    def graph(self, stage: int | None = None) -> fx.Graph:
        """The program of a rank, or that of one stage."""

    @abstractmethod
    def prepare_graph(
        self, graph: fx.Graph, halves: WeightHalves | None = None, is_whole: bool = False
    ) -> GraphRun:
        """A program as a function. Given `halves`, backward is split, and they record the rest."""

    @abstractmethod
    def joined(self, values: Sequence[Value], types: Sequence[TensorType]) -> list[Tensor]:
        """Results in the form in which they are kept."""

    def _statistics(self, stage: Stage, own: dict[int, list[Value]]) -> dict[int, list[Value]]:
        """Those of all micro-batches of a step, given those of this process."""
        return own

    def draw(self, program: Program) -> dict[str, Tensor]:
        """What the random numbers of a step or call of a program follow from, by placeholder."""
        return program.captured.draw()

    def step(
        self,
        kept: Mapping[str, Tensor],
        batches: Sequence[Batch],
        tells: bool = False,
        seed: float = 1.0,
        is_first: bool = True,
    ) -> tuple[Tensor, list[Tensor]]:
        """All micro-batches forward and backward: the loss of the batch, and what forward keeps,
        whole and without history; if it `tells`, all outputs. `seed`: the gradient of the loss;
        `is_first`: gradients add to none that are summed already."""
        try:
            wanted = range(len(self.program.outputs)) if tells else self.program.kept
            self._begin(kept, batches, wanted, seed)
            loss = self._run(is_first)
            outputs = self._told(wanted)
            for runner in self.runners:
                runner.finish()
            return loss, outputs
        finally:
            self._begin({}, ())  # nothing of a step stays

    def _through(self, kept: Mapping[str, Tensor], inputs: Batch) -> list[Tensor]:
        """Forward through the stages of a pipeline: all outputs, whole and without history."""
        try:
            wanted = range(len(self.program.outputs))
            self._begin(kept, self.split(inputs), wanted)
            self._carry_out()
            self._update_buffers()
            return self._told(wanted)
        finally:
            self._begin({}, ())

    @abstractmethod
    def _run(self, is_first: bool) -> Tensor:
        """A step, the gradients and buffers after it, and its loss."""

    @abstractmethod
    def _carry_out(self) -> None:
        """The actions of the schedule."""

    def _begin(
        self,
        kept: Mapping[str, Tensor],
        batches: Sequence[Batch],
        wanted: range = range(0),
        seed: float = 1.0,
    ) -> None:
        for stage in self.stages.values():
            stage.kept, stage.batches, stage.wanted, stage.seed = kept, batches, wanted, seed
        for worker in self.workers.values():
            worker.clear()

    def _losses(self) -> dict[int, Tensor]:
        """The shares of the loss that were made here, by micro-batch."""
        loss = self.program.captured.loss_index
        made = [pair for worker in self.workers.values() for pair in worker.outputs.items()]
        return {number: outputs[loss][0] for number, outputs in made if loss in outputs}

    def _told(self, wanted: range) -> list[Tensor]:
        """Some outputs of the batch, from those of its micro-batches."""
        own: dict[tuple[int, int], Tensor] = {}
        types = [info(node).type for node in self.program.outputs]
        for (_, number), worker in self.workers.items():
            for microbatch, outputs in worker.outputs.items():
                for output in outputs.keys() & {*wanted}:
                    told = self.stages[number].told(outputs[output], types[output])
                    own[microbatch, output] = told
        joined = self.program.batches
        found = self._wholes(own, wanted, 1 if joined is None else joined.count)
        return found[0] if joined is None else joined.join(found, wanted, self.parts)

    def _wholes(
        self, own: Mapping[tuple[int, int], Tensor], wanted: range, count: int
    ) -> list[list[Tensor]]:
        """Whole outputs of each of `count` micro-batches, from those that were made here."""
        return [[own[microbatch, output] for output in wanted] for microbatch in range(count)]

    def _update_buffers(self) -> None:
        """The changes that stages leave to the end of a step."""
        found: list[tuple[Tensor, Tensor]] = []
        for index, stage in self.stages.items():
            if stage.stage.update is not None:
                statistics: dict[int, list[Value]] = {}
                for (_, number), worker in self.workers.items():
                    statistics |= worker.statistics if number == index else {}
                found += stage.new_buffers(self._statistics(stage.stage, statistics))
        if found:
            _write(found)


class StageRun:
    """The program of one stage, where it runs."""

    def __init__(
        self, backend: Backend, stage: Stage, is_split: bool = False, is_whole: bool = False
    ) -> None:
        self.backend, self.stage = backend, stage
        self._halves = WeightHalves() if is_split else None
        self.run = backend.prepare_graph(stage.graph, self._halves, is_whole)
        self._update = backend.prepare_graph(stage.update) if stage.update is not None else None
        self.kept: Mapping[str, Tensor] = {}  # of a step, and its micro-batches
        self.batches: Sequence[Batch] = ()
        self.wanted = range(0)  # the outputs that a step gives beside its loss
        self.seed = 1.0  # the gradient of a step's loss

    def __call__(self, microbatch: int, received: Sequence[Value]) -> list[Value]:
        return self.run(
            self.kept, self.batches[microbatch], dict(zip(self.stage.receives, received))
        )

    def told(self, value: Value, type_: TensorType) -> Tensor:
        """An output in the form in which it is kept."""
        return self.backend.joined([value], [type_])[0]

    def weight_halves(self) -> list[WeightHalf]:
        return self._halves.take() if self._halves is not None else []

    def new_buffers(self, statistics: Mapping[int, list[Value]]) -> list[tuple[Tensor, Tensor]]:
        """The buffers of this stage and their values after all micro-batches in their order."""
        assert self.stage.update is not None
        assert self._update is not None
        output, program = self.stage.update.output_node(), self.backend.program
        names, placeholders = info(output).buffers, program.captured.buffers
        every_turn = [name for name in names if placeholders[name] not in program.once]
        found: dict[str, Value] = {}
        with torch.no_grad():
            for number, batch in enumerate(self.batches):
                given = dict(zip(self.stage.statistics, statistics.get(number, [])))
                given |= {name: found[name] for name in every_turn if name in found}
                found = dict(zip(names, self._update(self.kept, batch, given)))
        types = [info(node).type for node in output.args[0]]  # type: ignore[union-attr,arg-type]
        buffers = [self.kept[placeholders[name]] for name in names]
        return list(zip(buffers, self.backend.joined(list(found.values()), types)))


class WholeRun(StageRun):
    """A program without a pipeline as the only stage: buffers change in every forward."""

    def __init__(self, backend: Backend) -> None:
        program = backend.program
        loss = program.captured.loss_index if program.has_loss else None
        outputs = tuple(range(len(program.outputs)))
        stage = Stage(0, program.graph, (), (), outputs, loss, (), None)
        super().__init__(backend, stage, is_whole=True)
        self._mutations, self._count = tuple(program.captured.mutations), len(program.outputs)
        self._types = [info(node).type for node in program.results]

    def __call__(self, microbatch: int, received: Sequence[Value]) -> list[Value]:
        is_last = microbatch == len(self.batches) - 1
        later = frozenset() if is_last else self.backend.program.once
        return [[output] for output in self.forward(self.kept, self.batches[microbatch], later)]

    def told(self, value: Value, type_: TensorType) -> Tensor:
        return value[0]

    def forward(
        self, kept: Mapping[str, Tensor], inputs: Batch, later: Set[str] = frozenset()
    ) -> list[Tensor]:
        """The outputs; buffers change, but for those in `later`."""
        # Backward may still read what a buffer was before its new value is written.
        before = {name: kept[name].clone() for name in self._mutations}
        values = self.backend.joined(self.run({**kept, **before}, inputs, {}), self._types)
        if self._mutations:
            changed = zip(self._mutations, values[self._count :])
            _write([(kept[name], value) for name, value in changed if name not in later])
        return values[: self._count]


def _write(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in values:
            local_of(buffer).copy_(value)
