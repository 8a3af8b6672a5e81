"""Together: what the ranks of a group compute with messages in between, written once for each rank.

A joint kernel is a generator. What it yields either sets out at once, and gives a handle, or is a
handle, and gives what has arrived; between the two it computes:

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

It returns its outputs, the tensors that its backward keeps, and anything else that this needs. The
backward is a generator, too: of the group, of these two, and of a gradient for each output; it
returns a gradient for each tensor among the arguments, or None. All members ask for the same in the
same order. On processes `drive_on_process` carries one member out, on the virtual mesh
`in_lock_step` all; `run_joint_kernel` makes either a differentiable function.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar._torch.communication import PendingWork, moves_through_host, process_group, wait_for
from autopar.collectives.point_to_point import send_and_receive, uses_messages
from autopar.collectives.single_backward import GradientEnds, forbid_double_grad, gradient_ends
from autopar.collectives.torch_operators import movable
from autopar.errors import ExecutionError

Tensors = tuple[Tensor, ...]
Shape = Sequence[int]
Piece = tuple[int, int]  # start and length


class ShardedDim(NamedTuple):
    """How the axes of a group cut a tensor."""

    dim: int
    pieces: tuple[Piece, ...]  # of each member

    @property
    def lengths(self) -> list[int]:
        return [length for _, length in self.pieces]

    @property
    def size(self) -> int:
        """Of all of them."""
        return sum(self.lengths)


@dataclass(frozen=True)
class KernelGroup:
    """The ranks that carry a kernel out, as one of them sees it."""

    count: int
    index: int
    inputs: tuple[
        ShardedDim | None, ...
    ] = ()  # of each tensor among the arguments; None: it is whole
    outputs: tuple[ShardedDim | None, ...] = ()
    needs: tuple[bool, ...] = ()  # in backward: which tensor arguments take a gradient

    def input(self, number: int) -> ShardedDim:
        """Of one that is cut."""
        return _require_sharded(self.inputs[number])

    def output(self, number: int = 0) -> ShardedDim:
        """Of one that is cut."""
        return _require_sharded(self.outputs[number])


@dataclass(frozen=True)
class RingShift:
    """Tensors to the member `by` places on, and as many from the one `by` places back."""

    tensors: Tensors
    by: int
    shapes: Sequence[Shape]  # of what comes


@dataclass(frozen=True)
class AllToAll:
    """A tensor to each member, and one from each."""

    tensors: Tensors
    shapes: Sequence[Shape]  # of what comes


@dataclass(frozen=True)
class AllGather:
    """The tensors of all members, of one shape."""

    tensor: Tensor


@dataclass(frozen=True)
class AllReduce:
    """The sum of the tensors of all members."""

    tensor: Tensor


Request = RingShift | AllToAll | AllGather | AllReduce
Steps = Generator[Any, Any, Any]


@dataclass(frozen=True)
class InFlight:
    """What has set out, until it is waited for."""

    arrive: Callable[[], Tensors]


class ExtraPiece(NamedTuple):
    """Bytes that each piece of a product but the first reads and writes, beside its part of what is
    read and written once."""

    read: float
    written: float = 0.0


@dataclass(frozen=True)
class CommVolume:
    """What one member moves in a call: collectives by kind, each of so many bytes; how many more
    times it starts to compute, forward and backward, than a call on its pieces does; and of a call
    with a piece for each member, what the further ones move in memory."""

    forward: tuple[tuple[str, Any], ...] = ()
    backward: tuple[tuple[str, Any], ...] = ()
    starts: tuple[int, int] = (0, 0)
    further: tuple[ExtraPiece, ExtraPiece] | None = None


@dataclass(frozen=True)
class JointKernel:
    """A function that the ranks of a group carry out together.

    `forward` takes the group, and the operator's own arguments by name; `backward` the group, what
    was kept, the rest, and a gradient for each output. `traffic` is a function of the number of
    members, of the bytes of each input's and each output's largest piece, and of which inputs take
    a gradient; by name it is told the sizes of some factors, or the `itemsize` of its elements.
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
    """The outputs of members that are carried out here, differentiable: each has its group, and the
    arguments of its call."""
    leaves, forms = zip(*(pytree.tree_flatten(dict(call)) for call in calls))
    tensors = [[leaf for leaf in own if isinstance(leaf, Tensor)] for own in leaves]
    read = [tensor for own in tensors for tensor in own]
    flat = _JointFunction.apply(
        _JointCall(kernel, groups, drive, leaves, forms, gradient_ends(*read)), *read
    )
    count = len(flat) // len(groups)
    return [tuple(flat[at * count : (at + 1) * count]) for at in range(len(groups))]


@dataclass(frozen=True)
class _JointCall:
    kernel: JointKernel
    groups: Sequence[KernelGroup]
    drive: Driver
    leaves: Sequence[list[Any]]
    forms: Sequence[Any]
    ends: GradientEnds

    def forward(self, tensors: Sequence[Tensor]) -> list[Any]:
        given = iter(tensors)
        steps = []
        for group, own, form in zip(self.groups, self.leaves, self.forms):
            found = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in own]
            steps.append(self.kernel.forward(group, **pytree.tree_unflatten(found, form)))
        return self.drive(steps)


class _JointFunction(torch.autograd.Function):
    """All members that are carried out here: on the virtual mesh all of them."""

    @staticmethod
    def forward(ctx: Any, call: _JointCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = call.forward(tensors)
        kept = [tuple(saved) for _, saved, _ in results]
        ctx.save_for_backward(*(tensor for saved in kept for tensor in saved))
        ctx.kernel, ctx.groups, ctx.drive = call.kernel, call.groups, call.drive
        ctx.ends = call.ends if any(kept) else ()  # else gradients depend on what comes alone
        ctx.counts = [len(saved) for saved in kept]
        ctx.rests = [rest for _, _, rest in results]
        outputs = tuple(output for outputs, _, _ in results for output in outputs)
        ctx.mark_non_differentiable(*(o for o in outputs if not _takes_gradient(o)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = _JointFunction._gradients(ctx, gradients)
        remedy = 'a plan without it, as mode="propagate" makes where no annotation asks for it'
        return None, *forbid_double_grad(
            found, ctx.ends, gradients, ctx.kernel.forward.__name__, remedy
        )

    @staticmethod
    def _gradients(ctx: Any, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        members = len(ctx.groups)
        needs = ctx.needs_input_grad[1:]
        inputs, outputs = len(needs) // members, len(gradients) // members
        steps = []
        for at, (first, end) in enumerate(pairwise((0, *accumulate(ctx.counts)))):
            group = replace(ctx.groups[at], needs=needs[at * inputs : (at + 1) * inputs])
            own = gradients[at * outputs : (at + 1) * outputs]
            saved = ctx.saved_tensors[first:end]
            steps.append(ctx.kernel.backward(group, saved, ctx.rests[at], *own))
        return [gradient for found in ctx.drive(steps) for gradient in found]


def _require_sharded(cut: ShardedDim | None) -> ShardedDim:
    assert cut is not None
    return cut


def _takes_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


# The virtual mesh: all members in one process.


def in_lock_step(members: Sequence[Steps]) -> list[Any]:
    """What each member of one group returns."""
    answers: list[Any] = [None] * len(members)
    while True:
        asked, ended = [], []
        for steps, answer in zip(members, answers):
            try:
                asked.append(steps.send(answer))
            except StopIteration as end:
                ended.append(end.value)
        if len(ended) == len(members):
            return ended
        if ended or len({type(request) for request in asked}) > 1:
            raise ExecutionError(
                "the members of a group ask for the same in the same order",
                got=f"{', '.join(type(one).__name__ for one in asked)}; {len(ended)} have ended",
                remedy="let what a member asks depend on the group alone, not on its numbers",
            )
        if isinstance(asked[0], InFlight):
            answers = [travelling.arrive() for travelling in asked]
        else:
            answers = [InFlight(partial(tuple, tensors)) for tensors in _deliver(asked)]


def drive_groups(groups: Sequence[Sequence[int]]) -> Driver:
    """All ranks of a mesh, by groups."""

    def drive(members: Sequence[Steps]) -> list[Any]:
        results: list[Any] = [None] * len(members)
        for group in groups:
            found = in_lock_step([members[rank] for rank in group])
            for rank, result in zip(group, found):
                results[rank] = result
        return results

    return drive


def _deliver(asked: Sequence[Any]) -> list[Tensors]:
    """What each member gets: its own memory, as of a message."""
    count = len(asked)
    match asked[0]:
        case RingShift():
            given = [asked[(at - one.by) % count].tensors for at, one in enumerate(asked)]
        case AllToAll():
            given = [tuple(other.tensors[at] for other in asked) for at in range(count)]
        case AllGather():
            return [tuple(other.tensor.clone() for other in asked) for _ in asked]
        case AllReduce():
            total = asked[0].tensor.clone()
            for other in asked[1:]:
                total += other.tensor
            return [(total.clone(),) for _ in asked]
    for at, (tensors, request) in enumerate(zip(given, asked)):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if shapes != [tuple(shape) for shape in request.shapes]:
            raise ExecutionError(
                "a member says beforehand which shapes it receives",
                got=f"member {at} of {count} says {request.shapes}, and {shapes} arrive",
                remedy="say the shapes of what the member before sends",
            )
    return [tuple(tensor.clone() for tensor in tensors) for tensors in given]


def drive_without_messages(members: Sequence[Steps]) -> list[Any]:
    """One member without the others, as to see which memory it takes: what arrives is empty."""
    return [_run_member(steps, _send_nothing) for steps in members]


def _run_member(steps: Steps, set_out: Callable[[Request], InFlight]) -> Any:
    """What one member returns, whose requests are set out so."""
    answer: Any = None
    try:
        while True:
            asked = steps.send(answer)
            answer = asked.arrive() if isinstance(asked, InFlight) else set_out(asked)
    except StopIteration as end:
        return end.value


def _send_nothing(asked: Request) -> InFlight:
    match asked:
        case RingShift() | AllToAll():
            like = asked.tensors
            found = tuple(x.new_empty(tuple(shape)) for x, shape in zip(like, asked.shapes))
        case _:
            found = (asked.tensor.clone(),)
    return InFlight(lambda: found)


# Processes.


def drive_on_process(name: str, group: KernelGroup) -> Driver:
    """This process's member of the group of that name."""

    def drive(members: Sequence[Steps]) -> list[Any]:
        (steps,), among = members, process_group(name)
        return [_run_member(steps, lambda asked: _send_request(asked, group, among))]

    return drive


def _send_request(asked: Request, own: KernelGroup, group: dist.ProcessGroup) -> InFlight:
    count, index = own.count, own.index
    empty: Tensors = ()
    match asked:
        case RingShift():
            sent: list[Tensors] = [empty] * count
            comes: list[Sequence[Shape]] = [()] * count
            target, source = (index + asked.by) % count, (index - asked.by) % count
            if target == index:
                kept = tuple(x.clone() for x in asked.tensors)
                return InFlight(lambda: kept)
            sent[target], comes[source] = asked.tensors, asked.shapes
            travelling = _exchange_pieces(sent, comes, asked.tensors, index, group)
            return InFlight(lambda: travelling()[source])
        case AllToAll():
            sent = [(tensor,) for tensor in asked.tensors]
            comes = [(shape,) for shape in asked.shapes]
            travelling = _exchange_pieces(sent, comes, asked.tensors[:1], index, group)
            return InFlight(lambda: tuple(one for (one,) in travelling()))
        case AllGather():
            x = asked.tensor
            travelling = _exchange_pieces([(x,)] * count, [(x.shape,)] * count, (x,), index, group)
            return InFlight(lambda: tuple(one for (one,) in travelling()))
        case AllReduce():
            x = asked.tensor
            total = x.cpu() if x.is_cuda and moves_through_host(group) else x.clone()
            work = dist.all_reduce(total, group=group, async_op=True)

            def arrive() -> Tensors:
                if work is not None:
                    wait_for(work)
                return (total.to(x.device),)

            return InFlight(arrive)


def _exchange_pieces(
    sent: Sequence[Tensors],
    shapes: Sequence[Sequence[Shape]],
    like: Tensors,
    index: int,
    group: dist.ProcessGroup,
) -> Callable[[], list[Tensors]]:
    """Tensors to each member, and those of the given shapes from each, otherwise `like` these."""
    is_on_host = like[0].is_cuda and moves_through_host(group)
    out = [[_contiguous_at(x, is_on_host) for x in tensors] for tensors in sent]
    device = torch.device("cpu") if is_on_host else like[0].device
    received = [
        [torch.empty(tuple(s), dtype=x.dtype, device=device) for s, x in zip(own, like)]
        for own in shapes
    ]
    for one, other in zip(received[index], out[index]):
        one.copy_(other)
    moved_out = [[movable(x) for x in tensors] for tensors in out]
    moved_in = [[movable(x) for x in tensors] for tensors in received]
    moved_out[index], moved_in[index] = [], []
    if uses_messages(device, group) or is_on_host:
        works: list[PendingWork] = send_and_receive(moved_out, moved_in, index, group)
    else:
        works = _send_batched(moved_out, moved_in, group)

    def arrive() -> list[Tensors]:
        for work in works:
            wait_for(work)
        assert moved_out is not None  # held as long as it is being sent
        return [tuple(x.to(like[0].device) for x in tensors) for tensors in received]

    return arrive


def _contiguous_at(x: Tensor, is_on_host: bool) -> Tensor:
    return (x.cpu() if is_on_host else x).contiguous()


def _send_batched(
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[Tensor]],
    group: dist.ProcessGroup,
) -> list[PendingWork]:
    """Messages that set out as one, as NCCL needs of those that cross."""
    operations = [
        dist.P2POp(kind, x, group=group, group_peer=member)
        for kind, all_ in ((dist.isend, sent), (dist.irecv, received))
        for member, tensors in enumerate(all_)
        for x in tensors
        if x.numel()
    ]
    return [*dist.batch_isend_irecv(operations)] if operations else []
