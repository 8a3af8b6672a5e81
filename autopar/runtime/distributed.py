"""The real mesh: this process is one rank, under torch.distributed.

Parameters are DTensors under their original names. Autograd works on their local tensors: the
program reads those, and at the end of backward their gradients, summed over the axes that the plan
says, are given to the parameters as DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import call_after_backward, placed_like
from autopar.layout import Layout, TensorType
from autopar.mesh import Mesh
from autopar.passes import localize
from autopar.runtime.buckets import GradientSync, make_buckets
from autopar.runtime.eager import compile_graph
from autopar.runtime.failures import one_fails_all_stop
from autopar.runtime.groups import Axes, Groups, join_world
from autopar.runtime.program import Program


class TorchBackend:
    """Runs this rank's part of a program. One of the two places where a program runs."""

    def __init__(self, program: Program, local_inputs: bool) -> None:
        self.program, self.mesh, self.local_inputs = program, program.mesh, local_inputs
        self.device = join_world(self.mesh)
        self.rank = dist.get_rank()
        self.device_mesh = self.mesh.to_device_mesh(self.device.type)
        self.groups = Groups(self.mesh, axes_used(program.graph), range(self.mesh.size))
        self._graph = localize(program.graph, self.mesh, self.rank, self.device, self.groups.name)
        self._late: list[dist.Work] = []
        self._function = compile_graph(self._graph, self._late, len(program.outputs))
        self._constants = {
            name: self._piece(value.to(self.device), program.type_of(name).layout)
            for name, value in program.captured.constants.items()
        }
        self._parameters: dict[str, nn.Parameter] = {}
        self._leaves: dict[str, Tensor] = {}
        self._sync: GradientSync | None = None
        self._pending = False
        self._first = self._last = True
        self._wait_in_backward = False

    def graph(self, stage: int | None = None) -> fx.Graph:
        """This rank's own program."""
        return self._graph

    def place_parameter(
        self, name: str, value: Tensor, layout: Layout, learn: bool
    ) -> nn.Parameter:
        whole = self._from_first_rank(value)
        wrap = wrapper(layout, tuple(whole.shape), self.device_mesh)
        placed = wrap(self._piece(whole, layout).contiguous())
        self._parameters[name] = nn.Parameter(placed, requires_grad=learn)
        with torch.no_grad():
            self._leaves[name] = placed.to_local().detach().requires_grad_(learn)
        return self._parameters[name]

    def place_buffer(self, name: str, value: Tensor, layout: Layout) -> Tensor:
        return self._piece(self._from_first_rank(value), layout).contiguous()

    def collect(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of this rank's pieces."""
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            for name, value in values.items()
        }

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """What a caller hands in: whole tensors, or with local inputs this rank's pieces."""
        shapes = {}
        for name in self.program.captured.inputs:
            if name is not None:
                type_ = self.program.type_of(name)
                local = type_.layout.local_shape(type_.shape, self.mesh, self.rank)
                shapes[name] = local if self.local_inputs else type_.shape
        return shapes

    def guard(self) -> AbstractContextManager[None]:
        """Around everything in which ranks wait for one another."""
        return one_fails_all_stop(self.rank)

    def begin(self, first: bool, last: bool) -> None:
        """Gradients of several micro-batches gather in the leaves; the last one brings the sums."""
        self._first, self._last = first, last
        self._wait_in_backward = last

    def run(
        self, kept: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """One pass forward: this rank's outputs (a cut one as DTensor) and new buffers."""
        captured = self.program.captured
        results = self._function(
            *self._read,
            *(kept[name] for name in captured.buffers.values()),
            *self._constants.values(),
            *(self._enter(name, value) for name, value in inputs.items()),
        )
        if torch.is_grad_enabled():
            self._watch_backward(results)
        if not self._wait_in_backward:
            self._wait_for_sums()
        self._wait_in_backward = False
        count = len(self.program.outputs)
        outputs = [
            self._leave(value, node.meta["type"])
            for value, node in zip(results[:count], self.program.outputs)
        ]
        return outputs, dict(zip(captured.mutations, results[count:]))

    @cached_property
    def _read(self) -> list[Tensor]:
        """What the program reads for its parameters."""
        return [self._leaves[name] for name in self.program.captured.parameters.values()]

    def _wait_for_sums(self) -> None:
        for work in self._late:
            work.wait()
        self._late.clear()

    def _enter(self, name: str, value: Tensor) -> Tensor:
        value = value.to(self.device)
        if self.local_inputs:
            return value
        layout = self.program.type_of(name).layout
        if not value.requires_grad:
            return self._piece(value, layout)
        for dim, axes in enumerate(layout.dims):
            for axis in axes:
                place = (self.groups.name((axis,)), self.mesh[axis])
                index = self.mesh.coordinate(self.rank)[axis]
                value = torch.ops.autopar.slice(value, dim, *place, index)
        return value

    def _leave(self, value: Tensor, type_: TensorType) -> Tensor:
        if type_.layout.is_replicated:
            return value
        return wrapper(type_.layout, type_.shape, self.device_mesh)(value)

    def _piece(self, whole: Tensor, layout: Layout) -> Tensor:
        for dim, (start, length) in enumerate(
            layout.local_bounds(whole.shape, self.mesh, self.rank)
        ):
            if length != whole.shape[dim]:
                whole = whole.narrow(dim, start, length)
        return whole

    def _from_first_rank(self, value: Tensor) -> Tensor:
        whole = value.detach().to(self.device, copy=True).contiguous()
        dist.broadcast(whole, src=0)
        return whole

    def _watch_backward(self, results: tuple[Tensor, ...]) -> None:
        """Have `_finish` called at the end of any backward pass through this run."""
        if self._sync is None:
            self._sync = GradientSync(make_buckets(self._synchronised()), self.groups)
        for leaf in self._leaves.values() if self._first else ():
            leaf.grad = None
        self._pending = False
        if not self._last:
            return
        for result in results:
            if result.requires_grad:
                result.register_hook(self._backward_begins)

    def _backward_begins(self, grad: Tensor) -> None:
        if not self._pending:
            assert self._sync is not None
            self._pending = True
            self._sync.start(self._parameters)
            call_after_backward(self._finish)

    def _finish(self) -> None:
        """Give every parameter its gradient of this backward pass."""
        assert self._sync is not None
        self._pending = False
        with torch.no_grad(), one_fails_all_stop(self.rank):
            self._wait_for_sums()
            summed = self._sync.finish()
            for name, parameter in self._parameters.items():
                leaf = self._leaves[name]
                local, leaf.grad = summed.get(name, leaf.grad), None
                if local is None:
                    continue
                gradient = placed_like(parameter, local)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient

    def _synchronised(self) -> list[tuple[str, Tensor, Axes]]:
        captured = self.program.captured
        return [
            (name, self._leaves[name], sync)
            for placeholder, name in captured.parameters.items()
            if (sync := self.program.placeholders[placeholder].meta["sync"])
            and self._leaves[name].requires_grad
        ]


def axes_used(graph: fx.Graph) -> set[Axes]:
    used: set[Axes] = set()
    for node in graph.nodes:
        if "movement" in node.meta:
            used.add(node.meta["movement"].axes)
        if node.meta.get("sync"):
            used.add(node.meta["sync"])
        if node.op == "placeholder":
            used |= {(axis,) for axis in node.meta["type"].layout.axes}
    return used


@lru_cache(maxsize=4096)
def wrapper(
    layout: Layout, shape: tuple[int, ...], device_mesh: DeviceMesh
) -> Callable[[Tensor], DTensor]:
    """What makes a DTensor of a local tensor."""
    placements = layout.to_placements(Mesh.from_device_mesh(device_mesh))
    stride = torch.empty(shape, device="meta").stride()

    def wrap(local: Tensor) -> DTensor:
        return DTensor.from_local(
            local, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    return wrap
