"""The virtual mesh: every rank of a program in this process, in lock step.

Each value is a list with one tensor for each rank. The operators are those that a real rank runs;
the movements and their backwards work on the lists. Parameters are kept whole, and each rank reads
its piece of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.collectives import Movement, from_ranks, move, to_ranks
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes.kernels import local_call
from autopar.pipeline.weight_halves import WeightHalves
from autopar.plan.program import Program
from autopar.runtime.replicas import ReplicaCheck
from autopar.strategies.node_info import info

Environment = dict[fx.Node, list[Tensor]]
Watch = Callable[[fx.Node, list[Tensor]], None]


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
    ) -> None:
        """`watch` is shown every value on every run, as it is made.

        Given `halves`, backward is split, and they record what is put off.
        """
        self.mesh, self.device, self._watch, self._halves = mesh, device, watch, halves
        self._constants = {
            node.name: to_ranks(constants[node.name].to(device), info(node).type.layout, mesh)
            for node in graph.nodes
            if node.op == "placeholder" and node.name in constants
        }
        self._steps = [(node, self._compile(node)) for node in graph.nodes]
        self._results = graph.output_node().args[0]
        last_reader = {value: node for node in graph.nodes for value in node.all_input_nodes}
        self._finished: dict[fx.Node, list[fx.Node]] = {}
        for value, reader in last_reader.items():
            self._finished.setdefault(reader, []).append(value)

    def __call__(
        self, whole: Mapping[str, Tensor], pieces: Mapping[str, list[Tensor]] | None = None
    ) -> list[list[Tensor]]:
        """The results, from placeholders that are `whole` tensors or already in `pieces`."""
        pieces = self._constants | dict(pieces or {})
        values: Environment = {}
        for node, call in self._steps:
            if node.op == "placeholder":
                values[node] = pieces.get(node.name) or self._enter(node, whole[node.name])
            elif call is not None:
                values[node] = call(values)
            if self._watch is not None and node in values:
                self._watch(node, values[node])
            for finished in self._finished.get(node, ()) if node.op != "output" else ():
                del values[finished]
        return [values[node] for node in self._results]  # type: ignore[union-attr,index]

    def _enter(self, node: fx.Node, whole: Tensor) -> list[Tensor]:
        pieces = to_ranks(whole, info(node).type.layout, self.mesh)
        if info(node).sync:
            pieces = move(Movement("identity", info(node).sync, pending=True), pieces, self.mesh)
        return pieces

    def _compile(self, node: fx.Node) -> Callable[[Environment], list[Tensor]] | None:
        if node.op != "call_function":
            return None
        if (movement := info(node).movement) is not None:
            (value,) = node.all_input_nodes
            return lambda values: move(movement, values[value], self.mesh)
        calls, weights = [], info(node).weight_inputs
        for rank in range(self.mesh.size):
            function, args, kwargs = local_call(node, self.mesh, rank, self.device)
            if self._halves is not None and weights is not None:
                function = self._halves.apart(function, weights)
            calls.append(_Call(function, args, kwargs))
        return lambda values: [call(values, rank) for rank, call in enumerate(calls)]


class VirtualBackend:
    """Runs a program on lists of tensors. One of the two places where a program runs."""

    def __init__(self, program: Program, device: torch.device, check: bool = False) -> None:
        """`check`: see on every run that replicas are equal (replicas.py)."""
        self.program, self.mesh, self.device, self.check = program, program.mesh, device, check
        self._run = VirtualGraph(
            program.graph,
            self.mesh,
            device,
            program.captured.constants,
            ReplicaCheck(program.graph, self.mesh) if check else None,
        )

    def graph(self, stage: int | None = None) -> fx.Graph:
        """The program of every rank."""
        return self.program.graph

    def place_tensor(self, name: str, value: Tensor, layout: Layout) -> Tensor:
        """The whole value: each rank reads its piece of it."""
        return value.detach().clone()

    def cut(self, whole: Tensor, layout: Layout) -> Tensor:
        """The same: nothing is cut here before it is read."""
        return whole

    def bind(self, kept: Mapping[str, Tensor]) -> None:
        """Nothing to do: every run is handed what it reads."""

    def collect(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors: they are."""
        return {name: value.detach().clone() for name, value in values.items()}

    def norm(self, gradients: Mapping[str, Tensor], norm_type: float) -> Tensor:
        """The norm of whole gradients."""
        return nn.utils.get_total_norm(gradients.values(), norm_type)

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """What a caller hands in: whole tensors."""
        return self.program.whole_shapes

    def local_checks(self) -> AbstractContextManager[None]:
        """Around what looks at a call before it runs."""
        return nullcontext()

    def guard(self, agreed: bool = False) -> AbstractContextManager[None]:
        """Nobody waits for anybody in one process."""
        return nullcontext()

    def of(self, program: Program) -> VirtualBackend:
        """Where another program runs on the same parameters."""
        return VirtualBackend(program, self.device, self.check)

    def begin(self, first: bool, last: bool) -> None:
        """Every micro-batch is the same here."""

    def run(
        self, kept: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """One pass forward: the user's outputs, whole, and the new values of buffers."""
        captured = self.program.captured
        given: dict[str, Tensor] = dict(inputs)
        names = captured.parameters | captured.buffers
        given |= {placeholder: kept[name] for placeholder, name in names.items()}
        results = [
            from_ranks(values, info(node).type.layout, self.mesh, info(node).type.shape)
            for values, node in zip(self._run(given), self.program.results)
        ]
        outputs = results[: len(self.program.outputs)]
        mutated = dict(zip(captured.mutations, results[len(outputs) :]))
        return outputs, {name: value.detach() for name, value in mutated.items()}


class _Call:
    """One operator on one rank: its constant arguments, and where the tensors go."""

    def __init__(self, function: Any, args: tuple, kwargs: dict) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.flat = not any(isinstance(a, list | tuple) and _has_node(a) for a in args)
        self.flat = self.flat and not any(map(_has_node, kwargs.values()))
        self.tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, fx.Node)]

    def __call__(self, values: Environment, rank: int) -> Tensor:
        if self.flat:
            args = list(self.args)
            for index, node in self.tensors:
                args[index] = values[node][rank]
            return self.function(*args, **self.kwargs)

        def read(node: fx.Node) -> Any:
            return values[node][rank]

        return self.function(*fx.map_arg(self.args, read), **fx.map_arg(self.kwargs, read))


def _has_node(argument: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(argument, lambda node: found.append(node))
    return bool(found)
