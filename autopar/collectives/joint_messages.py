"""Joint messages: how a process carries out the requests of its member of a joint kernel.

A request starts messages to the other members of a process group; what comes is waited for when the
kernel wants it. gloo moves tensors between hosts, so that those of a GPU travel through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch.communication import PendingWork, moves_through_host, process_group, wait_for
from autopar.collectives.joint_kernels import (
    AllGather,
    AllReduce,
    AllToAll,
    Driver,
    InFlight,
    KernelGroup,
    Request,
    RingShift,
    Shape,
    Steps,
    Tensors,
    join_empty,
    run_member,
)
from autopar.collectives.point_to_point import send_and_receive, uses_messages
from autopar.collectives.torch_operators import movable


def drive_on_process(name: str, group: KernelGroup) -> Driver:
    """Return a driver of this process's member of the process group called `name`."""

    def drive(members: Sequence[Steps]) -> list[Any]:
        (steps,), among = members, process_group(name)
        return [run_member(steps, lambda asked: _send_request(asked, group, among))]

    return drive


def _send_request(request: Request, member: KernelGroup, group: dist.ProcessGroup) -> InFlight:
    count, index = member.count, member.index
    empty: Tensors = ()
    match request:
        case RingShift():
            sent: list[Tensors] = [empty] * count
            expected: list[Sequence[Shape]] = [()] * count
            target, source = (index + request.by) % count, (index - request.by) % count
            if target == index:
                copies = tuple(x.clone() for x in request.tensors)
                return InFlight(lambda: copies)
            sent[target], expected[source] = request.tensors, request.shapes
            travelling = _exchange_pieces(sent, expected, request.tensors, index, group)
            return InFlight(lambda: travelling()[source])
        case AllToAll(is_joined=True):
            like = request.tensors[0]
            joined, rows = join_empty(like, request.shapes, _carrier(like, group))
            sent = [(tensor,) for tensor in request.tensors]
            wait = _exchange_into([(row,) for row in rows], sent, index, group)

            def arrive_joined() -> Tensors:
                wait()
                return (joined.to(like.device),)

            return InFlight(arrive_joined)
        case AllToAll():
            sent = [(tensor,) for tensor in request.tensors]
            expected = [(shape,) for shape in request.shapes]
            travelling = _exchange_pieces(sent, expected, request.tensors[:1], index, group)
            return InFlight(lambda: tuple(piece for (piece,) in travelling()))
        case AllGather():
            x = request.tensor
            travelling = _exchange_pieces([(x,)] * count, [(x.shape,)] * count, (x,), index, group)
            return InFlight(lambda: tuple(piece for (piece,) in travelling()))
        case AllReduce():
            x = request.tensor
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
    """Send tensors to each member and receive those of `shapes`, in the dtypes of `like`."""
    device = _carrier(like[0], group)
    received = [
        tuple(torch.empty(tuple(s), dtype=x.dtype, device=device) for s, x in zip(shapes_, like))
        for shapes_ in shapes
    ]
    wait = _exchange_into(received, sent, index, group)

    def arrive() -> list[Tensors]:
        wait()
        return [tuple(x.to(like[0].device) for x in tensors) for tensors in received]

    return arrive


def _carrier(x: Tensor, group: dist.ProcessGroup) -> torch.device:
    """Return the device from which a group sends a tensor: gloo sends from the host."""
    return torch.device("cpu") if x.is_cuda and moves_through_host(group) else x.device


def _exchange_into(
    received: Sequence[Tensors], sent: Sequence[Tensors], index: int, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Send tensors to each member and receive theirs, from where and to where a group moves them;
    wait for all when the result is called."""
    on_host = any(x.is_cuda and moves_through_host(group) for tensors in sent for x in tensors)
    out = [[_contiguous_at(x, is_on_host=on_host) for x in tensors] for tensors in sent]
    device = next((x.device for tensors in received for x in tensors), torch.device("cpu"))
    for into, out_of in zip(received[index], out[index]):
        into.copy_(out_of)
    moved_out = [[movable(x) for x in tensors] for tensors in out]
    moved_in = [[movable(x) for x in tensors] for tensors in received]
    moved_out[index], moved_in[index] = [], []
    if uses_messages(device, group) or on_host:
        works: list[PendingWork] = send_and_receive(moved_out, moved_in, index, group)
    else:
        works = _send_batched(moved_out, moved_in, group)

    def arrive() -> None:
        for work in works:
            wait_for(work)
        assert moved_out is not None  # held as long as it is being sent

    return arrive


def _contiguous_at(x: Tensor, *, is_on_host: bool) -> Tensor:
    return (x.cpu() if is_on_host else x).contiguous()


def _send_batched(
    sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], group: dist.ProcessGroup
) -> list[PendingWork]:
    """Start all messages as one batch, as NCCL needs of messages that cross."""
    operations = [
        dist.P2POp(kind, x, group=group, group_peer=member)
        for kind, all_ in ((dist.isend, sent), (dist.irecv, received))
        for member, tensors in enumerate(all_)
        for x in tensors
        if x.numel()
    ]
    return [*dist.batch_isend_irecv(operations)] if operations else []
