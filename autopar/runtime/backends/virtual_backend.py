"""Run a program on the virtual mesh: every rank in this process, in lock step.

Each value is a list with one tensor for each rank. A real rank runs the same operators; movements
and their backwards work on the lists. Parameters are stored in full: each rank reads its piece.
Autograd adds whole gradients to `parameter.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from autopar._torch.leaf_gradients import keep_gradients_unshared
from autopar.capture.origins import gathered_parameter
from autopar.collectives import Movement, from_ranks, move, to_ranks
from autopar.collectives.joint_kernels import drive_groups, run_joint_kernel
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes import localize
from autopar.passes.kernels import arguments_of, local_call
from autopar.pipeline.running.executor import InProcessTransport, run_together
from autopar.pipeline.running.weight_halves import WeightHalves
from autopar.pipeline.running.worker import Value, sum_in_order
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.backend import Backend, Batch, GraphRun
from autopar.runtime.backends.host_copies import HOST
from autopar.runtime.backends.replica_checks import ReplicaCheck
from autopar.runtime.execution.activation_offload import ActivationOffload
from autopar.runtime.execution.call_numbers import (
    NumberForms,
    SetSize,
    Unalike,
    filled,
    forms_in,
)
from autopar.runtime.execution.compiled_regions import RegionCompiler
from autopar.runtime.execution.eager_program import compile_graph
from autopar.runtime.execution.recomputed_regions import SelectiveRecompute
from autopar.runtime.execution.region_calls import GraphSection, split_sections
from autopar.runtime.parameters.placing import ReadPart
from autopar.strategies.node_info import info
from autopar.strategies.results import has_results
from autopar.tensor_type import TensorType

Environment = dict[fx.Node, Value]
ReadPlaceholder = Callable[[fx.Node], Value]
Watch = Callable[[fx.Node, Value], None]


class VirtualGraph(GraphRun):
    """Runs a graph on lists of tensors, one for each rank."""

    def __init__(
        self,
        graph: fx.Graph,
        mesh: Mesh,
        device: torch.device,
        constants: Mapping[str, Tensor],
        *,
        watch: Watch | None = None,
        halves: WeightHalves | None = None,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        """`watch` is called with every computed value. With `halves`, which record the deferred
        weight gradients, backward is split. `sum_dtype`: that of gradient sums; None: their own."""
        self.mesh, self.device, self._watch, self._halves = mesh, device, watch, halves
        self.graph, self.calls = graph, dict[fx.Node, list[RankCall]]()
        self._sum_dtype = sum_dtype
        self._offload = ActivationOffload(
            lambda movement, values, size: move(movement, values, mesh)
        )
        self._constants = {
            node.name: to_ranks(constants[node.name].to(device), info(node).type.layout, mesh)
            for node in graph.nodes
            if node.op == "placeholder" and node.name in constants
        }
        self._results = graph.output_node().args[0]
        last_reader = {value: node for node in graph.nodes for value in node.all_input_nodes}
        self._finished: dict[fx.Node, list[fx.Node]] = {}
        for value, reader in last_reader.items():
            self._finished.setdefault(reader, []).append(value)
        self._sections = [self._section_run(section) for section in split_sections(graph)]

    def __call__(
        self,
        tensors: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        received: Mapping[str, Value] | None = None,
    ) -> list[Value]:
        """Return the results, given full parameters, buffers and inputs by name, and received
        values in pieces by placeholder."""
        self._offload.begin()
        pieces = self._constants | dict(received or {})
        values: Environment = {}

        def read(node: fx.Node) -> Value:
            return pieces.get(node.name) or self._read(node, tensors, inputs)

        for run in self._sections:
            run(values, read)
        return [values[node] for node in self._results]  # type: ignore[union-attr,index]

    def resizable(self, others: Sequence[GraphRun], forms: NumberForms) -> SetSize:
        runs = [run for run in (*others, self) if isinstance(run, VirtualGraph)]
        if self._watch is not None or self._halves is not None:
            raise Unalike("a run that is watched, or split")
        varying: list[tuple[RankCall, Any]] = []
        for row in forms.pair([run.graph for run in runs]):
            if row[-1].op != "call_function":
                continue
            if any(info(node).joint is not None for node in row):
                raise Unalike(f"{row[-1].name}, which ranks compute together")
            forms.of([info(node).movement for node in row])
            for calls in zip(*(run.calls.get(node, []) for run, node in zip(runs, row))):
                template = forms.of([(call.function, call.args, call.kwargs) for call in calls])
                if any(forms_in(template)):
                    varying.append((calls[-1], template))

        def set_size(size: int) -> None:
            for call, template in varying:
                call.function, call.args, call.kwargs = filled(template, size)

        return set_size

    def set_constant(self, name: str, value: Tensor) -> None:
        for node in self.graph.find_nodes(op="placeholder"):
            if node.name == name:
                layout = info(node).type.layout
                self._constants[name] = to_ranks(value.to(self.device), layout, self.mesh)

    def _section_run(self, section: GraphSection) -> Callable[[Environment, ReadPlaceholder], None]:
        """Return a function that adds a section's values to an environment and drops unused ones.

        A region works on one list of tensors: of each value in turn, those of all ranks.
        """
        if section.region is None:
            return self._steps(section)
        inputs, outputs = section.inputs, section.outputs
        ranks = range(self.mesh.size)

        def function(*tensors: Tensor) -> list[Tensor]:
            count = len(ranks)
            inside = {
                node: [tensors[at * count + rank] for rank in ranks]
                for at, node in enumerate(inputs)
            }
            steps(inside, None)
            return [tensor for node in outputs for tensor in inside[node]]

        contexts = [self._halves.discarding] if self._halves is not None else []
        runner = section.runner(function, contexts, self._offload)
        steps = self._steps(section, runner if isinstance(runner, SelectiveRecompute) else None)
        finished = {value for node in section.nodes for value in self._finished.get(node, ())}

        def run(values: Environment, read: ReadPlaceholder) -> None:
            results = runner(*(tensor for node in inputs for tensor in values[node]))
            for at, node in enumerate(outputs):
                values[node] = [results[at * len(ranks) + rank] for rank in ranks]
            for value in finished:
                values.pop(value, None)

        return run

    def _steps(
        self, section: GraphSection, recompute: SelectiveRecompute | None = None
    ) -> Callable[[Environment, ReadPlaceholder | None], None]:
        """Return a function that runs a section's nodes; `recompute` gets the recomputed ones."""
        steps = [
            (node, self._compile(node, recompute), info(node).away.get(section.region))  # type: ignore[arg-type]
            for node in section.nodes
        ]

        finished, watch = self._finished, self._watch

        def run(values: Environment, read: ReadPlaceholder | None) -> None:
            for node, call, axes in steps:
                if node.op == "placeholder" and read is not None:
                    values[node] = read(node)
                elif call is not None:
                    values[node] = call(values)
                if axes is not None and recompute is not None:
                    recompute.put(values[node], axes)
                if watch is not None and node in values:
                    watch(node, values[node])
                for value in finished.get(node, ()) if node.op != "output" else ():
                    del values[value]

        return run

    def _read(
        self, node: fx.Node, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Value:
        kind, name = info(node).origin
        whole = tensors[name] if kind in ("parameter", "buffer", "before") else inputs[name]
        device = HOST if info(node).on_host else self.device
        pieces = to_ranks(whole.to(device), info(node).type.layout, self.mesh)
        if info(node).sync:
            summed = Movement("identity", info(node).sync, pending=True)
            pieces = move(summed, pieces, self.mesh, sums=self._sum_dtype)
        return pieces

    def _compile(
        self, node: fx.Node, recompute: SelectiveRecompute | None = None
    ) -> Callable[[Environment], Value] | None:
        if node.op != "call_function":
            return None
        if (movement := info(node).movement) is not None:
            (value,) = node.all_input_nodes
            sum_dtype = None if gathered_parameter(node) is None else self._sum_dtype
            moved: Callable[..., Value] = partial(move, movement, mesh=self.mesh, sums=sum_dtype)
            if recompute is not None and info(node).remade:
                moved = recompute.recompute(moved)
            return lambda values: moved(values[value])
        if info(node).joint is not None:
            return self._joint_call(node, recompute)
        calls, weights = [], info(node).weight_inputs
        for rank in range(self.mesh.size):
            function, args, kwargs = local_call(node, self.mesh, rank, self.device)
            plain = function
            if self._halves is not None and weights is not None:
                function = self._halves.deferring(function, weights)
            if recompute is not None and info(node).remade:
                function = recompute.recompute(function, plain)
            calls.append(RankCall(function, args, kwargs))
        self.calls[node] = calls
        return lambda values: [call(values, rank) for rank, call in enumerate(calls)]

    def _joint_call(
        self, node: fx.Node, recompute: SelectiveRecompute | None
    ) -> Callable[[Environment], Value]:
        """Return a call that the ranks of a group compute together."""
        call, ranks = info(node).joint, range(self.mesh.size)
        assert call is not None
        kernel, groups = call.joint, [call.group(self.mesh, rank) for rank in ranks]
        args = [arguments_of(node, self.mesh, rank) for rank in ranks]
        drive = drive_groups(self.mesh.groups(call.axes))
        is_one = not has_results(node)
        run_kernel: Callable[..., Any] = partial(run_joint_kernel, kernel, groups, drive)
        if recompute is not None and info(node).remade:
            run_kernel = recompute.recompute(run_kernel)

        def run(values: Environment) -> Value:
            calls = [fx.map_arg(a, lambda v: values[v][rank]) for rank, a in enumerate(args)]  # noqa: B023
            results = run_kernel(calls)
            return [outputs[0] if is_one else outputs for outputs in results]

        return run


class OneRankGraph(GraphRun):
    """Runs the graph of a mesh of one rank, compiled."""

    def __init__(self, backend: VirtualBackend, graph: fx.Graph, compiler: RegionCompiler) -> None:
        self._device, self._offload = backend.device, ActivationOffload(_nowhere)
        local = localize(graph, backend.mesh, 0, backend.device, _nowhere)
        self._function = compile_graph(local, offload=self._offload, compile_regions=compiler)
        self._reads = [(n, *info(n).origin) for n in graph.nodes if n.op == "placeholder"]
        # A recomputed region reads plain tensors: had it read parameters, it would compile twice.
        self._has_regions = any(info(node).region is not None for node in graph.nodes)
        constants = backend.program.captured.constants
        self._constants = {
            name: constants[name].to(backend.device)
            for _, kind, name in self._reads
            if kind == "constant"
        }

    def __call__(
        self, tensors: Mapping[str, Tensor], inputs: Batch, received: Mapping[str, Value]
    ) -> list[Value]:
        self._offload.begin()
        sources = {"input": inputs, "constant": self._constants}
        placed = [
            sources.get(kind, tensors)[name].to(HOST if info(node).on_host else self._device)
            for node, kind, name in self._reads
        ]
        if self._has_regions:
            placed = [value.view_as(value) for value in placed]
        return [[result] for result in self._function(*placed)]


def _nowhere(*_: Any) -> Any:
    raise AssertionError("one rank moves nothing")


class VirtualBackend(Backend):
    """Runs a program on lists of tensors; the other backend is `TorchBackend`.

    In a pipeline each rank runs an action as soon as its inputs exist, and the ranks inside a stage
    go in lock step. All replicas of a stage share one full copy of its parameters.
    """

    def __init__(
        self,
        program: RuntimeProgram,
        device: torch.device,
        *,
        check: bool = False,
        compiler: RegionCompiler | None = None,
    ) -> None:
        """`check`: every run compares replicas (replica_checks.py). `compiler`: compiles the
        program of a mesh of one rank."""
        super().__init__(program, device, range(program.schedule.ranks), compiler)
        self.check = check
        self._rounding: list[RemovableHandle] = []
        self._prepare(InProcessTransport(), lambda position: None)

    def graph(self, stage: int | None = None) -> fx.Graph:
        return self.program.graph if stage is None else self.program.stages[stage].graph

    def prepare_graph(
        self, graph: fx.Graph, halves: WeightHalves | None = None, *, is_whole: bool = False
    ) -> GraphRun:
        if self.compiler is not None:
            return OneRankGraph(self, graph, self.compiler)
        watch = ReplicaCheck(graph, self.mesh) if self.check else None
        constants, dtype = self.program.captured.constants, self._sum_dtype
        return VirtualGraph(
            graph, self.mesh, self.device, constants, watch=watch, halves=halves, sum_dtype=dtype
        )

    @property
    def _sum_dtype(self) -> torch.dtype | None:
        precision = self.program.captured.example.precision
        return None if precision is None else precision.reduce

    def place_tensor(self, name: str, value: Tensor, type_: TensorType) -> Tensor:
        device = HOST if name in self.program.on_host else value.device
        return value.detach().to(device, type_.dtype, copy=True)

    def place_part(self, name: str, like: Tensor, type_: TensorType, read: ReadPart) -> Tensor:
        device = HOST if name in self.program.on_host else self.device
        return read(tuple((0, size) for size in like.shape)).to(device, type_.dtype)

    def cut(self, name: str, whole: Tensor, layout: Layout) -> Tensor:
        return whole

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        keep_gradients_unshared(tensors.values())

    def stored_form(self, values: Sequence[Value], types: Sequence[TensorType]) -> list[Tensor]:
        pairs = zip(values, types)
        return [from_ranks(value, type_.layout, self.mesh, type_.shape) for value, type_ in pairs]

    def collect(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in values.items()}

    def norm(self, gradients: Mapping[str, Tensor], norm_type: float) -> Tensor:
        return nn.utils.get_total_norm(gradients.values(), norm_type)

    def with_same_copies(self, program: RuntimeProgram) -> VirtualBackend:
        return self.with_new_copies(program)

    def with_new_copies(self, program: RuntimeProgram, *, is_plain: bool = False) -> VirtualBackend:
        compiler = None if is_plain else self.compiler
        return VirtualBackend(program, self.device, check=self.check, compiler=compiler)

    def call(self, tensors: Mapping[str, Tensor], inputs: Batch) -> list[Tensor]:
        if self.program.stages:
            return self._forward_stages(tensors, inputs)
        return self.unstaged.forward(tensors, inputs)

    def _begin(
        self,
        tensors: Mapping[str, Tensor],
        batches: Mapping[int, Batch],
        wanted: range = range(0),
        loss_gradient: float = 1.0,
    ) -> None:
        """Begin a step, whose micro-batches' gradients add up in the dtype of sums."""
        super()._begin(tensors, batches, wanted, loss_gradient)
        for hook in self._rounding:
            hook.remove()
        self._rounding = [
            tensors[name].register_post_accumulate_grad_hook(self._round)
            for name in self.program.captured.parameters.values()
            if self._sum_dtype is not None and name in tensors and tensors[name].requires_grad
        ]

    def _round(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(parameter.grad.to(self._sum_dtype))

    def _carry_out(self) -> None:
        run_together(self.runners)

    def _run(self, *, is_first: bool) -> Tensor:
        self.do_step(is_first=is_first)
        return sum_in_order(self.losses())

    def do_step(self, *, is_first: bool) -> None:
        self._carry_out()
        self._update_buffers()


class RankCall:
    """Calls one operator on one rank, with its constant arguments and the rank's tensors."""

    def __init__(self, function: Any, args: tuple, kwargs: dict) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, fx.Node)]
        nodes: list[fx.Node] = []
        fx.map_arg((args, kwargs), nodes.append)
        self.is_flat = nodes == [node for _, node in self.tensors]

    def __call__(self, values: Environment, rank: int) -> Tensor:
        if self.is_flat:
            args = list(self.args)
            for index, node in self.tensors:
                args[index] = values[node][rank]
            return self.function(*args, **self.kwargs)

        def read(node: fx.Node) -> Any:
            return values[node][rank]

        return self.function(*fx.map_arg(self.args, read), **fx.map_arg(self.kwargs, read))
