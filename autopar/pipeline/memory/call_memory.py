"""CallMemory: what one local call takes while it runs, forward and backward, seen on meta tensors.

What a call keeps is its rule's to say (`cost/saved_tensors.py`). What it takes besides while it
runs, and which of its gradients are new memory, autograd shows: a sum hands its gradient on as it
is, a product makes two, a loss over classes needs two more of them for a moment.
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

MOST_KNOWN = 4096  # calls, before they are forgotten
HANDED_ON = -1  # instead of bytes: the gradient of the output, which is no new memory


@dataclass(frozen=True)
class CallMemory:
    """Bytes of one call on one rank."""

    inputs: tuple[fx.Node, ...]  # its tensors, each once
    forward: int  # taken for a moment, besides what it gives and keeps
    backward: int
    # Of each input: the bytes of its gradient, HANDED_ON, or None where there is none.
    gradients: tuple[int | None, ...]


Seen = tuple[int, int, tuple[int | None, ...]]  # of a call, all but its inputs


class CallMemories:
    """Of all calls of a program; those that are alike, in any program, are looked at once."""

    _seen: ClassVar[dict[tuple[Any, ...], Seen]] = {}

    def __init__(self, mesh: Mesh, kernels: HostKernels | None = None) -> None:
        """`kernels`: of a host, on which they run."""
        self.mesh, self.kernels = mesh, kernels
        # Of this program, by what they are made of, which is its own: the places of their tensors
        # among all inputs, and what is known.
        self._own: dict[tuple[Any, ...], tuple[tuple[int, ...], Seen]] = {}
        if len(self._seen) > MOST_KNOWN:
            self._seen.clear()

    def __call__(self, node: fx.Node) -> CallMemory:
        known, given = info(node), node.all_input_nodes
        if not known.calls:
            return self._looked_at(node)
        key = (
            node.target,
            tuple(map(id, known.calls)),
            known.type,
            tuple((info(value).type, info(value).differentiable) for value in given),
        )
        if key not in self._own:
            found = self._looked_at(node)
            places = tuple(given.index(value) for value in found.inputs)
            self._own[key] = places, (found.forward, found.backward, found.gradients)
        places, seen = self._own[key]
        return CallMemory(tuple(given[place] for place in places), *seen)

    def _looked_at(self, node: fx.Node) -> CallMemory:
        function, args, kwargs = local_call(node, self.mesh, 0, torch.device("meta"))
        found: list[fx.Node] = []
        fx.map_arg((args, kwargs), found.append)
        inputs = tuple(dict.fromkeys(found))
        names = {value: f"%{number}" for number, value in enumerate(inputs)}
        joint = info(node).joint
        key = (
            self.kernels,
            # What ranks carry out together is another function each time that it is asked for.
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
            except _Unseen:
                sizes = (self._bytes(v) if info(v).differentiable else None for v in inputs)
                self._seen[key] = 0, 0, tuple(sizes)
        return CallMemory(inputs, *self._seen[key])

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        type_ = info(node).type
        return type_.layout.largest_shape(type_.shape, self.mesh)

    def _bytes(self, node: fx.Node) -> int:
        return info(node).type.local_bytes(self.mesh)

    def _leaf(self, node: fx.Node) -> Tensor:
        made = torch.empty(self._shape(node), dtype=info(node).type.dtype, device="meta")
        return made.requires_grad_(info(node).differentiable)


def _unnumbered(arguments: Any) -> Any:
    """Arguments without the number of a draw: whichever it is, it takes the same."""
    return pytree.tree_map(
        lambda x: tuple(x._replace(number=0)) if isinstance(x, DrawPlace) else x,
        arguments,
        is_leaf=lambda x: isinstance(x, DrawPlace),
    )


Made = TypeVar("Made")


class _Unseen(Exception):
    """Whatever torch, or an operator of the user, raises without values."""


class _Watch(TorchDispatchMode):
    """Counts the bytes that are made and not yet let go, inside."""

    def __init__(self, known: Iterable[Tensor], kernels: HostKernels | None) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._kernels = kernels
        self._failure: Exception | None = None  # of the count itself
        self.sizes = {memory_of(tensor): 0 for tensor in known}

    def see(self, run: Callable[[], Made]) -> Made:
        """What is made inside."""
        try:
            with self:
                return run()
        except Exception as error:
            if self._failure is not None:
                raise self._failure from None
            raise _Unseen from error

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = function(*args, **(kwargs or {}))
        try:
            self._count(given)
            more = self._kernels.workspace(function, args) if self._kernels is not None else 0
        except Exception as error:
            self._failure = error
            raise
        self.most = max(self.most, self.bytes + more)
        return given

    def _count(self, given: Any) -> None:
        for tensor in pytree.tree_leaves(given):
            if isinstance(tensor, Tensor) and memory_of(tensor) not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[memory_of(tensor)] = storage.nbytes()
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._let_go, memory_of(tensor))

    def _let_go(self, key: int) -> None:
        self.bytes -= self.sizes.pop(key, 0)


def _observe(
    call: Callable[[], Any], leaves: Sequence[Tensor], kernels: HostKernels | None
) -> tuple[int, int, tuple[int | None, ...]]:
    saved: list[Tensor] = []  # held to the end: what is kept is counted elsewhere

    def keep(value: Tensor) -> Tensor:
        saved.append(value)
        return value

    with torch.enable_grad():
        forward = _Watch(leaves, kernels)
        with saved_tensors_hooks(keep, lambda value: value), FusedAttention():
            results = forward.see(call)
        outputs = [value for value in flat_values(results) if isinstance(value, Tensor)]
        more = forward.most - forward.bytes
        given = [output for output in outputs if output.requires_grad]
        learning = [leaf for leaf in leaves if leaf.requires_grad]
        if not given or not learning:
            return more, 0, (None,) * len(leaves)
        seeds = [torch.empty_like(output) for output in given]
        backward = _Watch([*leaves, *outputs, *seeds, *saved], kernels)
        found = backward.see(lambda: torch.autograd.grad(given, learning, seeds, allow_unused=True))
    made = iter(found)
    gradients = [next(made) if leaf.requires_grad else None for leaf in leaves]
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
