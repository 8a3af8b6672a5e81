"""Rank graph: the program of this rank, or of one of its stages, as a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from autopar._torch.tensors import local_of
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes import localize
from autopar.pipeline.running.worker import Value
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.backend import Batch, GraphRun
from autopar.runtime.backends.process_groups import Groups
from autopar.runtime.backends.stage_ranks import StageRanks
from autopar.runtime.batches.batch_slices import BatchSlices
from autopar.runtime.execution.activation_offload import ActivationOffload, local_mover
from autopar.runtime.execution.call_numbers import NumberForms, SetSize
from autopar.runtime.execution.compiled_regions import RegionCompiler
from autopar.runtime.execution.eager_program import EagerProgram, compile_graph
from autopar.runtime.parameters.local_parameters import LocalParameters
from autopar.runtime.parameters.placing import TensorPlacer
from autopar.strategies.node_info import info


class RankBackend(Protocol):
    """Holds what the graph of a rank reads of its backend."""

    program: RuntimeProgram
    mesh: Mesh
    device: torch.device
    compiler: RegionCompiler | None
    ranks: StageRanks
    slices: BatchSlices | None
    groups: Groups
    placing: TensorPlacer
    leaves: LocalParameters
    constants: dict[str, Tensor]

    def enter(self, value: Tensor, layout: Layout) -> Tensor:
        """Return this rank's piece of an input."""


class TorchGraph(GraphRun):
    """This rank's program as a function."""

    def __init__(self, backend: RankBackend, graph: fx.Graph, **options: Any) -> None:
        """`options`: those of `compile_graph`."""
        self._backend = backend
        mesh, rank, device = backend.mesh, backend.ranks.rank_in_stage, backend.device
        self.graph = localize(graph, mesh, rank, device, backend.groups.name)
        if backend.slices is not None:
            backend.slices.place_draws(self.graph)
        self._offload = ActivationOffload(local_mover(mesh, rank, backend.groups.name))
        options |= {"offload": self._offload, "compile_regions": backend.compiler}
        self.function: EagerProgram = compile_graph(self.graph, **options)
        self._run: Callable[..., Any] = self.function
        self._numbers: tuple[int, ...] = ()  # that follow the size of this call
        nodes = [node for node in self.graph.nodes if node.op == "placeholder"]
        self._reads = [(node.name, *info(node).origin) for node in nodes]
        self._buffers = [name for _, kind, name in self._reads if kind in ("buffer", "before")]
        layouts = {node.name: info(node).type.layout for node in nodes}
        self._inputs = {name: layouts[key] for key, kind, name in self._reads if kind == "input"}
        self._constants = {
            name: layouts[key] for key, kind, name in self._reads if kind == "constant"
        }
        for name in self._constants.keys() - backend.constants.keys():
            self.set_constant(name, backend.program.captured.constants[name])

    def __call__(
        self, tensors: Mapping[str, Tensor], inputs: Batch, received: Mapping[str, Value]
    ) -> list[Value]:
        backend = self._backend
        self._offload.begin()
        buffers = {name: local_of(tensors[name]) for name in self._buffers}
        pieces = {name: backend.enter(inputs[name], at) for name, at in self._inputs.items()}
        sources: dict[str, Mapping[str, Tensor]] = {
            "parameter": backend.leaves.by_name,
            "buffer": buffers,
            "before": buffers,
            "constant": backend.constants,
            "input": pieces,
        }
        arguments = [
            received[key][0] if key in received else sources[kind][name]
            for key, kind, name in self._reads
        ]
        wholes = [inputs[name].to(backend.device) for name in self.function.whole_inputs]
        return [[result] for result in self._run(*arguments, *wholes, *self._numbers)]

    def resizable(self, others: Sequence[GraphRun], forms: NumberForms) -> SetSize:
        programs = [run.function for run in others if isinstance(run, TorchGraph)]
        run, numbers = self.function.resizable(programs, forms)
        self._run, self._numbers = run, tuple(form(forms.sizes[-1]) for form in numbers)

        def set_size(size: int) -> None:
            self._numbers = tuple(form(size) for form in numbers)

        return set_size

    def set_constant(self, name: str, value: Tensor) -> None:
        if (layout := self._constants.get(name)) is not None:
            backend = self._backend
            backend.constants[name] = backend.placing.copy_piece(value, layout)
