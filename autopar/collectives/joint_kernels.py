"""Joint kernels: calls that the ranks of a group compute together, with messages in between.

A joint kernel is a generator, written for one rank. It yields a request, which starts and gives a
handle, or a handle, which gives what has arrived; in between it computes:

>>> def total(group, x):
...     sum_ = x
...     for _ in range(group.count - 1):
...         coming = yield RingShift((x,), 1, (x.shape,))
...         (x,) = yield coming
...         sum_ = sum_ + x
...     return (sum_,), (), None
>>> members = [total(KernelGroup(3, index), torch.tensor(10.0**index)) for index in range(3)]
>>> [outputs for outputs, _, _ in in_lock_step(members)]
[(tensor(111.),), (tensor(111.),), (tensor(111.),)]

It returns its outputs, the tensors saved for backward, and anything else that backward needs. The
backward is a generator of the group, of these two, and of a gradient for each output. It returns a
gradient, or None, for each tensor argument. All members make the same requests in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.collectives.single_backward import GradientEnds, forbid_double_grad, gradient_ends
from autopar.errors import ExecutionError

Tensors = tuple[Tensor, ...]
Shape = Sequence[int]
Piece = tuple[int, int]  # start and length


class ShardedDim(NamedTuple):
    """The dim of a tensor that the axes of a group shard, and each member's piece."""

    dim: int
    pieces: tuple[Piece, ...]  # of each member

    @property
    def lengths(self) -> list[int]:
        return [length for _, length in self.pieces]

    @property
    def size(self) -> int:
        """Return the length of all pieces together."""
        return sum(self.lengths)


@dataclass(frozen=True)
class KernelGroup:
    """The ranks that carry out a kernel, as one of them sees it."""

    count: int
    index: int
    inputs: tuple[
        ShardedDim | None, ...
    ] = ()  # of each tensor among the arguments; None: it is whole
    outputs: tuple[ShardedDim | None, ...] = ()
    needs: tuple[bool, ...] = ()  # in backward: which tensor arguments take a gradient

    def input(self, number: int) -> ShardedDim:
        """Return the sharded dim of an input that is known to have one."""
        return _require_sharded(self.inputs[number])

    def output(self, number: int = 0) -> ShardedDim:
        """Return the sharded dim of an output that is known to have one."""
        return _require_sharded(self.outputs[number])


@dataclass(frozen=True)
class RingShift:
    """A request to send tensors `by` places on, and receive from `by` places back."""

    tensors: Tensors
    by: int
    shapes: Sequence[Shape]  # of what comes


@dataclass(frozen=True)
class AllToAll:
    """A request to send a tensor to each member, and to receive one from each."""

    tensors: Tensors
    shapes: Sequence[Shape]  # of what comes
    is_joined: bool = False  # what comes lies in one tensor, row after row, which alone arrives


@dataclass(frozen=True)
class AllGather:
    """A request for the tensors of all members, which have one shape."""

    tensor: Tensor


@dataclass(frozen=True)
class AllReduce:
    """A request for the sum of the tensors of all members."""

    tensor: Tensor


Request = RingShift | AllToAll | AllGather | AllReduce
Steps = Generator[Any, Any, Any]


@dataclass(frozen=True)
class InFlight:
    """Messages on their way, until `arrive` is called."""

    arrive: Callable[[], Tensors]


class ExtraPiece(NamedTuple):
    """Bytes that each further piece of a product reads and writes, beside its share."""

    read: float
    written: float = 0.0


@dataclass(frozen=True)
class CommVolume:
    """The communication of one member in a call: collectives by kind, each with its bytes.

    `starts`: how many more times it begins to compute, forward and backward. `further`: what
    further pieces move in memory, where each member's data is one piece.
    """

    forward: tuple[tuple[str, Any], ...] = ()
    backward: tuple[tuple[str, Any], ...] = ()
    starts: tuple[int, int] = (0, 0)
    further: tuple[ExtraPiece, ExtraPiece] | None = None


@dataclass(frozen=True)
class JointKernel:
    """A function that the ranks of a group carry out together.

    `forward` takes the group and the operator's arguments by name; `backward` the group, the saved
    tensors, the rest, and a gradient for each output. `traffic` takes the number of members, the
    bytes of each input's and output's largest piece, and which inputs take a gradient. By name it
    gets the sizes of factors, or the `itemsize`, that `told` lists.
    """

    forward: Callable[..., Steps]
    backward: Callable[..., Steps]
    traffic: Callable[..., CommVolume]
    is_hidden: bool = False  # its messages travel beside what it computes
    is_wide: bool = False  # what is moved has the dtype of the output, of 32 bits at least
    assumes: str = ""  # of what is moved
    told: tuple[str, ...] = ()  # the factors whose sizes `traffic` is told
    crossed: Callable[..., CommVolume] | None = (
        None  # where other axes cut a factor of its joint, too
    )


Driver = Callable[[Sequence[Steps]], list[Any]]


def run_joint_kernel(
    kernel: JointKernel,
    groups: Sequence[KernelGroup],
    drive: Driver,
    calls: Sequence[Mapping[str, Any]],
) -> list[Tensors]:
    """Return the differentiable outputs of each member; `calls`: arguments of each."""
    leaves, forms = zip(*(pytree.tree_flatten(dict(call)) for call in calls))
    tensors = [[leaf for leaf in call_leaves if isinstance(leaf, Tensor)] for call_leaves in leaves]
    flat_tensors = [tensor for call_leaves in tensors for tensor in call_leaves]
    outputs = _JointFunction.apply(
        _JointCall(kernel, groups, drive, leaves, forms, gradient_ends(*flat_tensors)),
        *flat_tensors,
    )
    count = len(outputs) // len(groups)
    return [tuple(outputs[at * count : (at + 1) * count]) for at in range(len(groups))]


@dataclass(frozen=True)
class _JointCall:
    kernel: JointKernel
    groups: Sequence[KernelGroup]
    drive: Driver
    leaves: Sequence[list[Any]]
    forms: Sequence[Any]
    ends: GradientEnds

    def forward(self, tensors: Sequence[Tensor]) -> list[Any]:
        remaining = iter(tensors)
        steps = []
        for group, call_leaves, form in zip(self.groups, self.leaves, self.forms):
            filled = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in call_leaves]
            steps.append(self.kernel.forward(group, **pytree.tree_unflatten(filled, form)))
        return self.drive(steps)


class _JointFunction(torch.autograd.Function):
    """The autograd function of all members that this process carries out."""

    @staticmethod
    def forward(ctx: Any, call: _JointCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = call.forward(tensors)
        saved_of_members = [tuple(saved) for _, saved, _ in results]
        ctx.save_for_backward(*(tensor for saved in saved_of_members for tensor in saved))
        ctx.kernel, ctx.groups, ctx.drive = call.kernel, call.groups, call.drive
        # With nothing saved, gradients depend on the output gradients alone.
        ctx.ends = call.ends if any(saved_of_members) else ()
        ctx.counts = [len(saved) for saved in saved_of_members]
        ctx.rests = [rest for _, _, rest in results]
        outputs = tuple(output for outputs, _, _ in results for output in outputs)
        ctx.mark_non_differentiable(*(o for o in outputs if not _takes_gradient(o)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            computed = _JointFunction._gradients(ctx, gradients)
        remedy = 'a plan without it, as mode="propagate" makes where no annotation asks for it'
        name = ctx.kernel.forward.__name__
        return None, *forbid_double_grad(computed, ctx.ends, gradients, name, remedy)

    @staticmethod
    def _gradients(ctx: Any, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        members = len(ctx.groups)
        needs = ctx.needs_input_grad[1:]
        inputs, outputs = len(needs) // members, len(gradients) // members
        steps = []
        for at, (first, end) in enumerate(pairwise((0, *accumulate(ctx.counts)))):
            group = replace(ctx.groups[at], needs=needs[at * inputs : (at + 1) * inputs])
            output_gradients = gradients[at * outputs : (at + 1) * outputs]
            saved = ctx.saved_tensors[first:end]
            steps.append(ctx.kernel.backward(group, saved, ctx.rests[at], *output_gradients))
        return [gradient for member_gradients in ctx.drive(steps) for gradient in member_gradients]


def _require_sharded(cut: ShardedDim | None) -> ShardedDim:
    assert cut is not None
    return cut


def _takes_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


# The virtual mesh: all members in one process.


def in_lock_step(members: Sequence[Steps]) -> list[Any]:
    """Run the members of one group in this process, and return each one's result."""
    answers: list[Any] = [None] * len(members)
    while True:
        requests, results = [], []
        for steps, answer in zip(members, answers):
            try:
                requests.append(steps.send(answer))
            except StopIteration as end:
                results.append(end.value)
        if len(results) == len(members):
            return results
        if results or len({type(request) for request in requests}) > 1:
            raise ExecutionError(
                "the members of a group ask for the same in the same order",
                got=f"{', '.join(type(r).__name__ for r in requests)}; {len(results)} have ended",
                remedy="let what a member asks depend on the group alone, not on its numbers",
            )
        if isinstance(requests[0], InFlight):
            answers = [travelling.arrive() for travelling in requests]
        else:
            answers = [InFlight(partial(tuple, tensors)) for tensors in _deliver(requests)]


def drive_groups(groups: Sequence[Sequence[int]]) -> Driver:
    """Return a driver of all ranks of a mesh, group by group."""

    def drive(members: Sequence[Steps]) -> list[Any]:
        results: list[Any] = [None] * len(members)
        for group in groups:
            group_results = in_lock_step([members[rank] for rank in group])
            for rank, result in zip(group, group_results):
                results[rank] = result
        return results

    return drive


def _deliver(requests: Sequence[Any]) -> list[Tensors]:
    """Return the tensors that each member receives, in memory of its own as from a message."""
    count = len(requests)
    match requests[0]:
        case RingShift():
            senders = [(at - shift.by) % count for at, shift in enumerate(requests)]
            delivered = [requests[sender].tensors for sender in senders]
        case AllToAll():
            delivered = [tuple(other.tensors[at] for other in requests) for at in range(count)]
        case AllGather():
            return [tuple(other.tensor.clone() for other in requests) for _ in requests]
        case AllReduce():
            total = requests[0].tensor.clone()
            for other in requests[1:]:
                total += other.tensor
            return [(total.clone(),) for _ in requests]
    for at, (tensors, request) in enumerate(zip(delivered, requests)):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if shapes != [tuple(shape) for shape in request.shapes]:
            raise ExecutionError(
                "a member says beforehand which shapes it receives",
                got=f"member {at} of {count} says {request.shapes}, and {shapes} arrive",
                remedy="say the shapes of what the member before sends",
            )
    return [
        (torch.cat(tensors),)
        if isinstance(request, AllToAll) and request.is_joined
        else tuple(tensor.clone() for tensor in tensors)
        for tensors, request in zip(delivered, requests)
    ]


def drive_without_messages(members: Sequence[Steps]) -> list[Any]:
    """Run members whose messages arrive empty, as to see which memory they take."""
    return [run_member(steps, _send_nothing) for steps in members]


def run_member(steps: Steps, set_out: Callable[[Request], InFlight]) -> Any:
    """Run one member, whose requests `set_out` starts, and return its result."""
    answer: Any = None
    try:
        while True:
            request = steps.send(answer)
            answer = request.arrive() if isinstance(request, InFlight) else set_out(request)
    except StopIteration as end:
        return end.value


def _send_nothing(request: Request) -> InFlight:
    match request:
        case AllToAll(is_joined=True):
            empty: Tensors = (join_empty(request.tensors[0], request.shapes)[0],)
        case RingShift() | AllToAll():
            like = request.tensors
            empty = tuple(x.new_empty(tuple(shape)) for x, shape in zip(like, request.shapes))
        case _:
            empty = (request.tensor.clone(),)
    return InFlight(lambda: empty)


def join_empty(
    like: Tensor, shapes: Sequence[Shape], device: torch.device | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return memory for tensors of some shapes, row after row in one, and its pieces."""
    lengths = [shape[0] for shape in shapes]
    joined = like.new_empty((sum(lengths), *like.shape[1:]), device=device or like.device)
    return joined, joined.split(lengths)
