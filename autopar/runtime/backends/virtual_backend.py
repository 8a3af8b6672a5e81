"""The virtual mesh: every rank of a program in this process, in lock step.

Each value is a list with one tensor for each rank. The operators are those that a real rank runs;
the movements and their backwards work on the lists. Parameters are kept whole, and each rank reads
its piece of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from autopar._torch.leaf_gradients import keep_gradients_unshared
from autopar.capture.origins import gathered_parameter
from autopar.collectives import Movement, from_ranks, move, to_ranks
from autopar.collectives.joint_kernels import drive_groups, run_joint_kernel
from autopar.layout import Layout, TensorType
from autopar.mesh import Mesh
from autopar.passes import localize
from autopar.passes.kernels import arguments_of, local_call
from autopar.pipeline.running.executor import InProcessTransport, run_together
from autopar.pipeline.running.weight_halves import WeightHalves
from autopar.pipeline.running.worker import Value, sum_in_order
from autopar.plan.runtime_program import Program
from autopar.runtime.backends.backend import Backend, Batch, GraphRun
from autopar.runtime.backends.host_copies import HOST
from autopar.runtime.backends.replica_checks import ReplicaCheck
from autopar.runtime.execution.activation_offload import ActivationOffload
from autopar.runtime.execution.compiled_regions import RegionCompiler
from autopar.runtime.execution.eager_program import compile_graph
from autopar.runtime.execution.recomputed_regions import SelectiveRecompute
from autopar.runtime.execution.region_calls import GraphSection, split_sections
from autopar.runtime.parameters.placing import ReadPart
from autopar.strategies.node_info import info
from autopar.strategies.results import has_results

Environment = dict[fx.Node, Value]
Enter = Callable[[fx.Node], Value]  # of a placeholder
Watch = Callable[[fx.Node, Value], None]


class VirtualGraph:
    """A graph that runs on lists of tensors."""

    def __init__(
        self,
        graph: fx.Graph,
        mesh: Mesh,
        device: torch.device,
        constants: Mapping[str, Tensor],
        watch: Watch | None = None,
        halves: WeightHalves | None = None,
        sums: torch.dtype | None = None,
    ) -> None:
        """`watch` is shown every value on every run, as it is made.

        Given `halves`, backward is split, and they record what is put off. `sums`: the dtype in
        which gradients of parameters are summed, if not their own.
        """
        self.mesh, self.device, self._watch, self._halves = mesh, device, watch, halves
        self._sums = sums
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
        self._parts = [self._part(part) for part in split_sections(graph)]

    def __call__(
        self,
        kept: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        given: Mapping[str, Value] | None = None,
    ) -> list[Value]:
        """The results. Parameters and buffers (by name) and inputs are whole; what is `given` (by
        placeholder) is in pieces."""
        self._offload.begin()
        pieces = self._constants | dict(given or {})
        values: Environment = {}

        def enter(node: fx.Node) -> Value:
            return pieces.get(node.name) or self._enter(node, kept, inputs)

        for run in self._parts:
            run(values, enter)
        return [values[node] for node in self._results]  # type: ignore[union-attr,index]

    def _part(self, part: GraphSection) -> Callable[[Environment, Enter], None]:
        """What adds the values of some nodes to the others, and drops what nobody reads any more.

        A region works on a list of tensors, those of all ranks of one value after another.
        """
        if part.region is None:
            return self._steps(part, None)
        inputs, outputs = part.inputs, part.outputs
        ranks = range(self.mesh.size)

        def function(*tensors: Tensor) -> list[Tensor]:
            count = len(ranks)
            inside = {
                node: [tensors[at * count + rank] for rank in ranks]
                for at, node in enumerate(inputs)
            }
            steps(inside, None)
            return [tensor for node in outputs for tensor in inside[node]]

        beside = [self._halves.discarding] if self._halves is not None else []
        runner = part.runner(function, beside, self._offload)
        steps = self._steps(part, runner if isinstance(runner, SelectiveRecompute) else None)
        finished = {value for node in part.nodes for value in self._finished.get(node, ())}

        def run(values: Environment, enter: Enter) -> None:
            results = runner(*(tensor for node in inputs for tensor in values[node]))
            for at, node in enumerate(outputs):
                values[node] = [results[at * len(ranks) + rank] for rank in ranks]
            for value in finished:
                values.pop(value, None)

        return run

    def _steps(
        self, part: GraphSection, noting: SelectiveRecompute | None
    ) -> Callable[[Environment, Enter | None], None]:
        """Some nodes one after another, those that are made again noted in their region."""
        steps = [
            (node, self._compile(node, noting), info(node).away.get(part.region))  # type: ignore[arg-type]
            for node in part.nodes
        ]

        finished, watch = self._finished, self._watch

        def run(values: Environment, enter: Enter | None) -> None:
            for node, call, axes in steps:
                if node.op == "placeholder" and enter is not None:
                    values[node] = enter(node)
                elif call is not None:
                    values[node] = call(values)
                if axes is not None and noting is not None:
                    noting.put(values[node], axes)
                if watch is not None and node in values:
                    watch(node, values[node])
                for value in finished.get(node, ()) if node.op != "output" else ():
                    del values[value]

        return run

    def _enter(
        self, node: fx.Node, kept: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Value:
        kind, name = info(node).origin
        whole = kept[name] if kind in ("parameter", "buffer", "before") else inputs[name]
        device = HOST if info(node).on_host else self.device
        pieces = to_ranks(whole.to(device), info(node).type.layout, self.mesh)
        if info(node).sync:
            summed = Movement("identity", info(node).sync, pending=True)
            pieces = move(summed, pieces, self.mesh, sums=self._sums)
        return pieces

    def _compile(
        self, node: fx.Node, noting: SelectiveRecompute | None = None
    ) -> Callable[[Environment], Value] | None:
        if node.op != "call_function":
            return None
        if (movement := info(node).movement) is not None:
            (value,) = node.all_input_nodes
            sums = None if gathered_parameter(node) is None else self._sums
            mesh = self.mesh
            return lambda values: move(movement, values[value], mesh, sums=sums)
        if info(node).joint is not None:
            return self._together(node)
        calls, weights = [], info(node).weight_inputs
        for rank in range(self.mesh.size):
            function, args, kwargs = local_call(node, self.mesh, rank, self.device)
            plain = function
            if self._halves is not None and weights is not None:
                function = self._halves.deferring(function, weights)
            if noting is not None and info(node).remade:
                function = noting.recompute(function, plain)
            calls.append(_Call(function, args, kwargs))
        return lambda values: [call(values, rank) for rank, call in enumerate(calls)]

    def _together(self, node: fx.Node) -> Callable[[Environment], Value]:
        """A call that the ranks of a group carry out together."""
        call, ranks = info(node).joint, range(self.mesh.size)
        assert call is not None
        kernel, groups = call.joint, [call.group(self.mesh, rank) for rank in ranks]
        given = [arguments_of(node, self.mesh, rank) for rank in ranks]
        drive = drive_groups(self.mesh.groups(call.axes))
        is_one = not has_results(node)

        def run(values: Environment) -> Value:
            calls = [fx.map_arg(own, lambda v: values[v][rank]) for rank, own in enumerate(given)]  # noqa: B023
            found = run_joint_kernel(kernel, groups, drive, calls)
            return [outputs[0] if is_one else outputs for outputs in found]  # type: ignore[misc]

        return run


class OneRank:
    """The graph of a mesh of one rank, compiled."""

    def __init__(self, backend: VirtualBackend, graph: fx.Graph, compiler: RegionCompiler) -> None:
        self._device, self._offload = backend.device, ActivationOffload(_nowhere)
        local = localize(graph, backend.mesh, 0, backend.device, _nowhere)
        self._function = compile_graph(local, offload=self._offload, compile_regions=compiler)
        self._reads = [(n, *info(n).origin) for n in graph.nodes if n.op == "placeholder"]
        # What runs again is given plain tensors, for which it would be compiled once more.
        self._is_again = any(info(node).region is not None for node in graph.nodes)
        constants = backend.program.captured.constants
        self._constants = {
            name: constants[name].to(backend.device)
            for _, kind, name in self._reads
            if kind == "constant"
        }

    def __call__(
        self, kept: Mapping[str, Tensor], inputs: Batch, given: Mapping[str, Value]
    ) -> list[Value]:
        self._offload.begin()
        sources = {"input": inputs, "constant": self._constants}
        whole = [sources.get(kind, kept)[name] for _, kind, name in self._reads]
        placed = [
            value.to(HOST if info(node).on_host else self._device)
            for value, (node, _, _) in zip(whole, self._reads)
        ]
        if self._is_again:
            placed = [value.view_as(value) for value in placed]
        return [[result] for result in self._function(*placed)]


def _nowhere(*_: Any) -> Any:
    raise AssertionError("one rank moves nothing")


class VirtualBackend(Backend):
    """Runs a program on lists of tensors. One of the two places where a program runs.

    With a pipeline each rank does its list as soon as its inputs are there, and the ranks inside a
    stage go in lock step. Parameters are whole, one for all replicas of a stage.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        check: bool = False,
        compiler: RegionCompiler | None = None,
    ) -> None:
        """`check`: see on every run that replicas are equal (replicas.py). `compiler`: for the
        program of a mesh of one rank."""
        super().__init__(program, device, range(program.schedule.ranks), compiler)
        self.check = check
        self._rounding: list[RemovableHandle] = []
        self._prepare(InProcessTransport(), lambda position: None)

    def graph(self, stage: int | None = None) -> fx.Graph:
        return self.program.graph if stage is None else self.program.stages[stage].graph

    def prepare_graph(
        self, graph: fx.Graph, halves: WeightHalves | None = None, is_whole: bool = False
    ) -> GraphRun:
        if self.compiler is not None:
            return OneRank(self, graph, self.compiler)
        watch = ReplicaCheck(graph, self.mesh) if self.check else None
        constants = self.program.captured.constants
        return VirtualGraph(graph, self.mesh, self.device, constants, watch, halves, self._sums)

    @property
    def _sums(self) -> torch.dtype | None:
        precision = self.program.captured.example.precision
        return None if precision is None else precision.reduce

    def place_tensor(self, name: str, value: Tensor, type_: TensorType) -> Tensor:
        """The whole value: each rank reads its piece of it."""
        device = HOST if name in self.program.on_host else value.device
        return value.detach().to(device, type_.dtype, copy=True)

    def place_part(self, name: str, like: Tensor, type_: TensorType, read: ReadPart) -> Tensor:
        device = HOST if name in self.program.on_host else self.device
        return read(tuple((0, size) for size in like.shape)).to(device, type_.dtype)

    def cut(self, name: str, whole: Tensor, layout: Layout) -> Tensor:
        """The same: nothing is cut here before it is read."""
        return whole

    def bind(self, kept: Mapping[str, Tensor]) -> None:
        """Parameters are leaves themselves."""
        keep_gradients_unshared(kept.values())

    def joined(self, values: Sequence[Value], types: Sequence[TensorType]) -> list[Tensor]:
        """The whole."""
        pairs = zip(values, types)
        return [from_ranks(value, type_.layout, self.mesh, type_.shape) for value, type_ in pairs]

    def collect(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors: they are."""
        return {name: value.detach().clone() for name, value in values.items()}

    def norm(self, gradients: Mapping[str, Tensor], norm_type: float) -> Tensor:
        """The norm of whole gradients."""
        return nn.utils.get_total_norm(gradients.values(), norm_type)

    def of(self, program: Program) -> VirtualBackend:
        return VirtualBackend(program, self.device, self.check, self.compiler)

    def beside(self, program: Program, plainly: bool = False) -> VirtualBackend:
        return VirtualBackend(program, self.device, self.check, None if plainly else self.compiler)

    def call(self, kept: Mapping[str, Tensor], inputs: Batch) -> list[Tensor]:
        """Whole outputs."""
        if self.program.stages:
            return self._through(kept, inputs)
        return self.whole.forward(kept, inputs)

    def _begin(
        self,
        kept: Mapping[str, Tensor],
        batches: Sequence[Batch],
        wanted: range = range(0),
        seed: float = 1.0,
    ) -> None:
        """Gradients of micro-batches add up in the dtype that is asked for."""
        super()._begin(kept, batches, wanted, seed)
        for hook in self._rounding:
            hook.remove()
        self._rounding = [
            kept[name].register_post_accumulate_grad_hook(self._round)
            for name in self.program.captured.parameters.values()
            if self._sums is not None and name in kept and kept[name].requires_grad
        ]

    def _round(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(parameter.grad.to(self._sums))

    def _carry_out(self) -> None:
        run_together(self.runners)

    def _run(self, is_first: bool) -> Tensor:
        self._carry_out()
        self._update_buffers()
        return sum_in_order(self._losses())


class _Call:
    """One operator on one rank: its constant arguments, and where the tensors go."""

    def __init__(self, function: Any, args: tuple, kwargs: dict) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, fx.Node)]
        every: list[fx.Node] = []
        fx.map_arg((args, kwargs), every.append)
        self.flat = every == [node for _, node in self.tensors]

    def __call__(self, values: Environment, rank: int) -> Tensor:
        if self.flat:
            args = list(self.args)
            for index, node in self.tensors:
                args[index] = values[node][rank]
            return self.function(*args, **self.kwargs)

        def read(node: fx.Node) -> Any:
            return values[node][rank]

        return self.function(*fx.map_arg(self.args, read), **fx.map_arg(self.kwargs, read))
