"""The real mesh: this process is one rank, under torch.distributed.

Parameters are DTensors under their original names. Autograd works on their local tensors: the
program reads those, and at the end of backward their gradients, summed over the axes that the plan
says, are given to the parameters as DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from autopar._torch import call_after_backward, local_of, wait_for, will_reach
from autopar.collectives.eager import LateSum
from autopar.errors import InvalidInput
from autopar.layout import Layout, TensorType
from autopar.passes import localize
from autopar.plan.program import Program
from autopar.runtime.buckets import GradientSync, Slot, make_buckets, placed, taken
from autopar.runtime.eager import compile_graph
from autopar.runtime.failures import local_checks, one_fails_all_stop
from autopar.runtime.groups import Axes, Groups
from autopar.runtime.leaves import Leaves
from autopar.runtime.norm import norm_over_world
from autopar.runtime.placing import Placing, in_own_memory, wrapper
from autopar.runtime.world import require_living, world
from autopar.strategies.node_info import info


class TorchBackend:
    """Runs this rank's part of a program. One of the two places where a program runs."""

    def __init__(self, program: Program, local_inputs: bool, device: torch.device) -> None:
        self.program, self.mesh, self.local_inputs = program, program.mesh, local_inputs
        self.device = device
        self.world = world()
        self.rank = self.world.rank
        self.device_mesh = self.world.mesh_of(self.mesh, device.type)
        self.groups = Groups(self.mesh, axes_used(program.graph), [range(self.mesh.size)])
        self._graph = localize(program.graph, self.mesh, self.rank, self.device, self.groups.name)
        self._late: list[LateSum] = []
        self._works: list[dist.Work] = []
        self._function = compile_graph(
            self._graph,
            self._late,
            len(program.outputs),
            whole=None if local_inputs else program.graph,
            mesh=self.mesh,
        )
        self.placing = Placing(self.mesh, self.rank, self.device, self.device_mesh)
        self._constants = {
            name: self.placing.piece(value, program.type_of(name).layout)
            for name, value in program.captured.constants.items()
        }
        self._leaves = Leaves()
        self._sync: GradientSync | None = None
        self._learned: list[Slot] = []
        self._version = 0  # of the leaves that these two are made for
        self._pending = self._touched = False  # backward is under way; leaves may have gradients
        self._reached: frozenset[str] = frozenset()  # parameters that this backward leads to
        self._first = self._last = True
        self._in_step = False
        # Of passes that are restricted to some inputs, none reaches it.
        self._anchor = torch.empty(0, requires_grad=True)

    def graph(self, stage: int | None = None) -> fx.Graph:
        """This rank's own program."""
        return self._graph

    def place_tensor(self, name: str, value: Tensor, layout: Layout) -> Tensor:
        """This rank's piece of a parameter or buffer of rank 0's model."""
        return self.placing.place(value, layout)

    def cut(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's piece of a tensor that all ranks have."""
        return self.placing.cut(whole, layout)

    def bind(self, kept: Mapping[str, Tensor]) -> None:
        """Let leaves follow what the module holds now."""
        self._leaves.bind(kept)

    def collect(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of this rank's pieces."""
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in values.items()
        }

    def norm(self, gradients: Mapping[str, Tensor], norm_type: float) -> Tensor:
        """The norm of gradients that all ranks hold pieces of."""
        here = self.mesh.coordinate(self.rank)
        return norm_over_world(self.program, gradients, norm_type, here, self.device)

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """What a caller hands in: whole tensors, or with local inputs this rank's pieces."""
        shapes = {}
        for name in self.program.captured.inputs:
            if name is not None:
                type_ = self.program.type_of(name)
                local = type_.layout.local_shape(type_.shape, self.mesh, self.rank)
                shapes[name] = local if self.local_inputs else type_.shape
        return shapes

    def local_checks(self) -> AbstractContextManager[None]:
        """Around what looks at a call on this rank alone, before it runs."""
        return local_checks(self.world)

    def guard(self, agreed: bool = False) -> AbstractContextManager[None]:
        """Around everything in which ranks wait for one another."""
        return one_fails_all_stop(self.world, agreed)

    def of(self, program: Program) -> TorchBackend:
        """Where another program runs on the same parameters."""
        other = TorchBackend(program, self.local_inputs, self.device)
        other._leaves = self._leaves
        return other

    def begin(self, first: bool, last: bool) -> None:
        """Gradients of several micro-batches gather in the leaves; the last one brings the sums."""
        self._first, self._last, self._in_step = first, last, True

    def run(
        self, kept: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """One pass forward: this rank's outputs (a cut one as DTensor) and new buffers."""
        captured = self.program.captured
        results = self._function(
            *map(self._leaves.by_name.__getitem__, captured.parameters.values()),
            *(local_of(kept[name]) for name in captured.buffers.values()),
            *self._constants.values(),
            *(self._enter(name, value) for name, value in inputs.items()),
            *(inputs[name].to(self.device) for name in self._function.whole_inputs),
        )
        if torch.is_grad_enabled():
            results = self._watch_backward(results)
        self._start_sums(wait=not (self._in_step and self._last))
        self._first, self._last, self._in_step = True, True, False
        count = len(self.program.outputs)
        outputs = [
            self._leave(value, info(node).type)
            for value, node in zip(results[:count], self.program.outputs)
        ]
        return outputs, dict(zip(captured.mutations, results[count:]))

    def _start_sums(self, wait: bool) -> None:
        """Sum what the program has left to the caller: now, or in the coming backward pass."""
        for late in self._late:
            if wait or self._sync is None or not self._sync.takes_along(late):
                self._works.append(late.start())
        self._late.clear()
        if wait:
            self._wait_for_sums()

    def _wait_for_sums(self) -> None:
        for work in self._works:
            wait_for(work)
        self._works.clear()

    def _enter(self, name: str, value: Tensor) -> Tensor:
        value = value.to(self.device)
        if self.local_inputs:
            return value
        layout = self.program.type_of(name).layout
        if not value.requires_grad:
            return self.placing.view(value, layout)
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

    def _watch_backward(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Have `_finish` called at the end of any backward pass through this run."""
        self._follow_leaves()
        for slot in self._learned if self._first and self._touched else ():
            slot.leaf.grad = None
        self._touched, self._pending = True, False
        if not self._last:
            return results
        watched = list(results)
        parameters = () if self._in_step else [slot.parameter for slot in self._learned]
        for place, (result, names) in enumerate(zip(results, self.program.learned)):
            if not result.requires_grad:
                continue
            come = partial(self._backward_comes, names)
            if self._in_step:
                result.register_hook(come)
            else:
                come_to = partial(self._direct_comes, come)
                watched[place] = _Watched.apply(come_to, result, self._anchor, *parameters)
        return tuple(watched)

    def _direct_comes(self, come: Callable[[Tensor], None], grad: Tensor) -> None:
        """A backward pass goes through an output: to all parameters, or to inputs alone.

        That is the same on all ranks, whatever each of them finds there.
        """
        if torch.is_grad_enabled():
            raise InvalidInput(
                "on processes a call has gradients, and these have none of their own",
                got="a backward pass with create_graph=True",
                remedy='backend="virtual", or a penalty that is part of forward',
            )
        if will_reach(self._anchor):
            come(grad)
            return
        asked = [slot.name for slot in self._learned if will_reach(slot.parameter)]
        if asked:
            raise InvalidInput(
                "on processes a backward pass goes to all parameters, or to inputs alone",
                got=f"a pass to {', '.join(asked)} alone",
                remedy="backward() without inputs=, and drop the gradients that are not wanted",
            )

    def _backward_comes(self, names: frozenset[str], grad: Tensor) -> None:
        """A backward pass goes through an output, and so to the parameters `names`."""
        self._reached |= names
        if not self._pending:
            require_living(self.world)
            assert self._sync is not None
            self._pending = True
            self._sync.start()
            call_after_backward(self._finish)

    def _finish(self) -> None:
        """Give every parameter its gradient of this backward pass."""
        assert self._sync is not None
        self._pending = False
        with torch.no_grad(), self.guard():
            self._wait_for_sums()
            given = self._sync.finish(self._reached)
            alone = [s for s in self._learned if s.name in self._reached and s.name not in given]
            given |= placed(alone, in_own_memory(taken([slot.leaf for slot in alone])))
            for slot in self._learned:
                gradient = given.get(slot.name)
                if gradient is None:
                    slot.leaf.grad = None
                elif slot.parameter.grad is None:
                    slot.parameter.grad = gradient
                else:
                    slot.parameter.grad += gradient
        self._touched, self._reached = False, frozenset()

    def _follow_leaves(self) -> None:
        """Sum the gradients of those parameters that learn now, in the order of the program."""
        if self._version == self._leaves.version:
            return
        learned = frozenset().union(*self.program.learned)
        self._learned = [
            Slot(
                name,
                self._leaves.by_name[name],
                self._leaves.parameters[name],
                self.program.type_of(placeholder).local_bytes(self.mesh),
            )
            for placeholder, name in self.program.captured.parameters.items()
            if name in learned and self._leaves.by_name[name].requires_grad
        ]
        if self._sync is not None:
            self._sync.close()
        self._sync = GradientSync(make_buckets(self._synchronised()), self.groups)
        self._version = self._leaves.version

    def _synchronised(self) -> list[tuple[Slot, Axes]]:
        placeholders = {name: key for key, name in self.program.captured.parameters.items()}
        return [
            (slot, axes)
            for slot in self._learned
            if (axes := info(self.program.placeholders[placeholders[slot.name]]).sync)
        ]


class _Watched(torch.autograd.Function):
    """The same value, of which a backward pass is told; it leads to `others` too."""

    @staticmethod
    def forward(ctx: Any, come: Callable[[Tensor], None], value: Tensor, *others: Tensor) -> Tensor:
        ctx.come, ctx.count = come, len(others)
        return value.detach()  # no view: the caller may change what he gets in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.come(grad)
        return None, grad, *[None] * ctx.count


def axes_used(graph: fx.Graph) -> set[Axes]:
    used: set[Axes] = set()
    for node in graph.nodes:
        if (movement := info(node).movement) is not None:
            used.add(movement.axes)
        if info(node).sync:
            used.add(info(node).sync)
        if node.op == "placeholder":
            used |= {(axis,) for axis in info(node).type.layout.axes}
    return used
