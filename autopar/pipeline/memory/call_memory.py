"""CallMemory: bytes that one local call takes while it runs, observed on meta tensors.

The rule of an operator says which tensors it keeps (`cost/saved_tensors.py`). Its temporaries, and
which of its gradients are new memory, autograd shows: a sum hands its gradient on unchanged, a
product allocates two, a loss over classes needs two temporary ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._torch.tensors import memory_of
from autopar.cost.host_kernels import HostKernels
from autopar.mesh import Mesh
from autopar.passes.kernels import local_call
from autopar.pipeline.memory.fused_attention import FusedAttention
from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.strategies.node_info import flat_values, info

MOST_KNOWN = 4096  # calls in the cache before it is cleared
HANDED_ON = -1  # in place of bytes: the output's gradient is handed on, without new memory


@dataclass(frozen=True)
class CallMemory:
    """Hold the bytes of one call on one rank."""

    inputs: tuple[fx.Node, ...]  # tensors, each once
    forward: int  # temporaries, besides results and saved tensors
    backward: int
    # For each input: the bytes of its gradient, HANDED_ON, or None without a gradient.
    gradients: tuple[int | None, ...]


CallBytes = tuple[int, int, tuple[int | None, ...]]  # a `CallMemory` without its inputs


class CallMemories:
    """Observe the calls of a program; equal calls, of any program, are observed once."""

    _seen: ClassVar[dict[tuple[Any, ...], CallBytes]] = {}

    def __init__(self, mesh: Mesh, kernels: HostKernels | None = None) -> None:
        """`kernels`: those of the host on which the calls run, if they run on one."""
        self.mesh, self.kernels = mesh, kernels
        # Of calls of this program, by their identities: places of tensors among inputs, and bytes.
        self._by_calls: dict[tuple[Any, ...], tuple[tuple[int, ...], CallBytes]] = {}
        if len(self._seen) > MOST_KNOWN:
            self._seen.clear()

    def __call__(self, node: fx.Node) -> CallMemory:
        known, inputs = info(node), node.all_input_nodes
        if not known.calls:
            return self._observed(node)
        key = (
            node.target,
            tuple(map(id, known.calls)),
            known.type,
            tuple((info(value).type, info(value).differentiable) for value in inputs),
        )
        if key not in self._by_calls:
            memory = self._observed(node)
            places = tuple(inputs.index(value) for value in memory.inputs)
            self._by_calls[key] = places, (memory.forward, memory.backward, memory.gradients)
        places, sizes = self._by_calls[key]
        return CallMemory(tuple(inputs[place] for place in places), *sizes)

    def _observed(self, node: fx.Node) -> CallMemory:
        function, args, kwargs = local_call(node, self.mesh, 0, torch.device("meta"))
        nodes: list[fx.Node] = []
        fx.map_arg((args, kwargs), nodes.append)
        inputs = tuple(dict.fromkeys(nodes))
        names = {value: f"%{number}" for number, value in enumerate(inputs)}
        joint = info(node).joint
        key = (
            self.kernels,
            # A joint kernel is a new function each time that it is built.
            function if joint is None else (joint.joint, joint.group(self.mesh, 0)),
            str(_unnumbered(fx.map_arg((list(args), dict(kwargs)), names.__getitem__))),
            *((self._shape(v), info(v).type.dtype, info(v).differentiable) for v in inputs),
        )
        if key not in self._seen:
            leaves = {value: self._leaf(value) for value in inputs}
            args, kwargs = fx.map_arg((args, kwargs), leaves.__getitem__)
            # Through lists, since fx keeps its own immutable ones.
            args, kwargs = pytree.tree_map(lambda x: x, (list(args), dict(kwargs)))
            try:
                call = partial(function, *args, **kwargs)
                self._seen[key] = _observe(call, [*leaves.values()], self.kernels)
            except _NotObservable:
                sizes = (self._bytes(v) if info(v).differentiable else None for v in inputs)
                self._seen[key] = 0, 0, tuple(sizes)
        return CallMemory(inputs, *self._seen[key])

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        type_ = info(node).type
        return type_.layout.largest_shape(type_.shape, self.mesh)

    def _bytes(self, node: fx.Node) -> int:
        return info(node).type.local_bytes(self.mesh)

    def _leaf(self, node: fx.Node) -> Tensor:
        leaf = torch.empty(self._shape(node), dtype=info(node).type.dtype, device="meta")
        return leaf.requires_grad_(info(node).differentiable)


def _unnumbered(arguments: Any) -> Any:
    """Return arguments without the number of a random draw, which changes no bytes."""
    return pytree.tree_map(
        lambda x: tuple(x._replace(number=0)) if isinstance(x, DrawPlace) else x,
        arguments,
        is_leaf=lambda x: isinstance(x, DrawPlace),
    )


Result = TypeVar("Result")


class _NotObservable(Exception):
    """Stands for any error of torch, or of a user's operator, on tensors without values."""


class _AllocationCounter(TorchDispatchMode):
    """Count the bytes that are allocated inside and not yet freed."""

    def __init__(self, known: Iterable[Tensor], kernels: HostKernels | None) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._kernels = kernels
        self._failure: Exception | None = None  # of counting itself
        self.sizes = {memory_of(tensor): 0 for tensor in known}

    def observe(self, run: Callable[[], Result]) -> Result:
        """Return the result of `run`, whose allocations are counted."""
        try:
            with self:
                return run()
        except Exception as error:
            if self._failure is not None:
                raise self._failure from None
            raise _NotObservable from error

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        try:
            self._count(results)
            more = self._kernels.workspace(function, args) if self._kernels is not None else 0
        except Exception as error:
            self._failure = error
            raise
        self.most = max(self.most, self.bytes + more)
        return results

    def _count(self, results: Any) -> None:
        for tensor in pytree.tree_leaves(results):
            if isinstance(tensor, Tensor) and memory_of(tensor) not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[memory_of(tensor)] = storage.nbytes()
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._free, memory_of(tensor))

    def _free(self, key: int) -> None:
        self.bytes -= self.sizes.pop(key, 0)


def _observe(
    call: Callable[[], Any], leaves: Sequence[Tensor], kernels: HostKernels | None
) -> CallBytes:
    saved: list[Tensor] = []  # held to the end: saved tensors are counted elsewhere

    def keep(value: Tensor) -> Tensor:
        saved.append(value)
        return value

    with torch.enable_grad():
        forward = _AllocationCounter(leaves, kernels)
        with saved_tensors_hooks(keep, lambda value: value), FusedAttention():
            results = forward.observe(call)
        outputs = [value for value in flat_values(results) if isinstance(value, Tensor)]
        more = forward.most - forward.bytes
        ends = [output for output in outputs if output.requires_grad]
        learning = [leaf for leaf in leaves if leaf.requires_grad]
        if not ends or not learning:
            return more, 0, (None,) * len(leaves)
        seeds = [torch.empty_like(output) for output in ends]
        backward = _AllocationCounter([*leaves, *outputs, *seeds, *saved], kernels)
        computed = iter(
            backward.observe(lambda: torch.autograd.grad(ends, learning, seeds, allow_unused=True))
        )
    gradients = [next(computed) if leaf.requires_grad else None for leaf in leaves]
    sizes: list[int | None] = []
    counted = {memory_of(seed) for seed in seeds}
    for gradient in gradients:
        if gradient is None:
            sizes.append(None)
        elif memory_of(gradient) in counted:
            sizes.append(HANDED_ON)
        else:
            counted.add(memory_of(gradient))
            sizes.append(gradient.untyped_storage().nbytes())
    return more, backward.most - backward.bytes, tuple(sizes)
