"""The movements as operators of torch: `torch.ops.autopar.all_gather` and its kin.

Each acts on this rank's tensor over one process group, given by name. Each has a fake, a forward
and a backward, so it shows by name in a graph, traces and compiles.

>>> from torch.fx import symbolic_trace
>>> def program(x):
...     return torch.ops.autopar.all_gather(x, 0, 8, "tp", 4, 1, False)
>>> print(symbolic_trace(program).code.strip().splitlines()[1].strip())
all_gather = torch.ops.autopar.all_gather(x, 0, 8, 'tp', 4, 1, False);  x = None
>>> program(torch.empty(2, 3, device="meta")).shape
torch.Size([8, 3])

The arguments after the tensor: `dim`; `size`, that dim's size once gathered; the `group`'s name,
how many `parts` it has and this rank's `index` in it; `pending`, whether the gradient arrives as a
partial sum. A dim is cut by the rule of `autopar.layout.chunk`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch.communication import (
    PendingWork,
    all_gather_single,
    moves_through_host,
    process_group,
    reduce_scatter_single,
    wait_for,
)
from autopar._torch.operators import active_modes, below_autograd
from autopar.collectives.movement import Movement, join_parts, split_parts
from autopar.collectives.point_to_point import ScatteredSum, exchange_pieces, uses_messages
from autopar.errors import VerifierError
from autopar.layout import Layout, Parts, chunk
from autopar.mesh import Mesh

_ops = torch.ops.autopar


def move_in_parts(x: Tensor, parts: Parts, operator: Any, *arguments: Any) -> Tensor:
    """Move dims that are cut in `parts`: `operator` moves a dim of each part."""
    return join_parts(operator(split_parts(x, parts), *arguments), parts)


def operator_call(
    movement: Movement, layout: Layout, shape: Sequence[int], mesh: Mesh, rank: int, group: str
) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """Return the operator that is `movement` on `rank`, and its arguments after the tensor.

    `layout` is the value's before the movement, `shape` the whole tensor's; `group` names the
    process group of `rank` over `movement.axes`, whose members torch keeps in order of rank.
    """
    if movement.parts:
        before, sizes = layout.with_part_dims(shape, movement.parts)
        operator, arguments = operator_call(movement.seen, before, sizes, mesh, rank, group)
        return move_in_parts, (movement.parts, operator, *arguments)
    if movement.dim is not None and list(movement.axes) != [
        axis for axis in mesh.names if axis in movement.axes
    ]:
        raise VerifierError(
            "the axes of a movement that cuts or joins stand in the order of the mesh",
            got=f"{movement} on {mesh}",
            remedy="move over one axis at a time",
        )
    place = (group, mesh.degree(movement.axes), mesh.position(rank, movement.axes))
    match movement.kind:
        case "identity":
            if movement.pending:
                return _ops.identity.default, (group,)
            return _ops.whole_gradient.default, (place[2],)
        case "all_reduce":
            return _ops.all_reduce.default, (group, movement.pending)
        case "reduce_scatter":
            return _ops.reduce_scatter.default, (movement.dim, *place)
        case "slice":
            return _ops.slice.default, (movement.dim, *place)
    assert movement.dim is not None
    size = movement.apply(layout).local_shape(shape, mesh, rank)[movement.dim]
    if movement.kind == "all_gather":
        return _ops.all_gather.default, (movement.dim, size, *place, movement.pending)
    return _ops.all_to_all.default, (movement.dim, size, movement.to_dim, *place)


# What eager code may call instead of an operator: the same, without the dispatcher.
EAGER: dict[torch._ops.OpOverload, Callable[..., Tensor]] = {}


# Forward: what one rank does.


def _identity(x: Tensor, group: str) -> Tensor:
    # A copy, because a compiler may reuse the memory of x afterwards; while eager autograd
    # records, an alias serves (see _differentiable).
    return x.clone()


def _all_reduce(x: Tensor, group: str, pending: bool) -> Tensor:
    total = _summable(x).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=process_group(group))
    return total if total.dtype == x.dtype else total.to(x.dtype)


def _all_gather(
    x: Tensor, dim: int, size: int, group: str, parts: int, index: int, pending: bool
) -> Tensor:
    full = -(-size // parts)
    members = process_group(group)
    piece = _on_movable_device(_padded(x, dim, full), members)
    gathered = piece.new_empty((parts * piece.shape[0], *piece.shape[1:]))
    if uses_messages(piece.device, members):
        exchange_pieces(
            [piece] * parts, gathered.view(parts, *piece.shape).unbind(), index, members
        )
    else:
        all_gather_single(movable(gathered), movable(piece), group=members)
    gathered = gathered.to(x.device)
    if _leads(piece.shape, dim):
        joined = gathered if dim == 0 else gathered.view(_resized(x, dim, parts * full))
        return joined if size == parts * full else joined.narrow(dim, 0, size)
    pieces = gathered.view(parts, *piece.shape).unbind()
    if size != parts * full:
        pieces = tuple(p.narrow(dim, 0, chunk(size, parts, at)[1]) for at, p in enumerate(pieces))
    return torch.cat(pieces, dim)


def start_reduce_scatter(
    x: Tensor, dim: int, group: str, parts: int, index: int, later: bool = True
) -> Callable[[], Tensor]:
    """Start a reduce-scatter, and return a function that waits for its result. Without `later` it
    is done when this returns."""
    size = x.shape[dim]
    full = -(-size // parts)
    members = process_group(group)
    stacked = _on_movable_device(
        _stacked(_padded(_summable(x), dim, parts * full), dim, parts), members
    )
    piece = stacked.new_empty(_resized(x, dim, full))
    work: PendingWork | None
    if uses_messages(stacked.device, members):
        terms = [[term] for term in stacked.view(parts, -1).unbind()]
        work = ScatteredSum(terms, piece, index, members)
    else:
        work = reduce_scatter_single(piece, stacked, group=members, async_op=later)
    del stacked

    def finish() -> Tensor:
        if work is not None:
            wait_for(work)
        result = piece.to(x.device)
        if size != parts * full:
            result = result.narrow(dim, 0, chunk(size, parts, index)[1]).contiguous()
        return result if result.dtype == x.dtype else result.to(x.dtype)

    return finish


def _reduce_scatter(x: Tensor, dim: int, group: str, parts: int, index: int) -> Tensor:
    return start_reduce_scatter(x, dim, group, parts, index, later=False)()


def _slice(x: Tensor, dim: int, group: str, parts: int, index: int) -> Tensor:
    # A copy: a view would keep the whole tensor alive.
    start, length = chunk(x.shape[dim], parts, index)
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _all_to_all(
    x: Tensor, dim: int, size: int, to_dim: int, group: str, parts: int, index: int
) -> Tensor:
    cut = x.shape[to_dim]
    full, to_full = -(-size // parts), -(-cut // parts)
    members = process_group(group)
    sent = _stacked(_padded(_padded(x, dim, full), to_dim, parts * to_full), to_dim, parts)
    sent = _on_movable_device(sent, members)
    received = torch.empty_like(sent)
    if uses_messages(sent.device, members):
        exchange_pieces(sent.chunk(parts), received.chunk(parts), index, members)
    else:
        dist.all_to_all_single(movable(received), movable(sent), group=members)
    del sent
    received = received.to(x.device)
    piece = _resized(x, to_dim, to_full)
    piece[dim] = full
    if _leads(piece, dim):
        piece[dim] = parts * full
        joined = received.view(piece)
    else:
        joined = torch.cat(received.view(parts, *piece).unbind(), dim)
    if size == parts * full and cut == parts * to_full:
        return joined
    length = chunk(cut, parts, index)[1]
    return joined.narrow(dim, 0, size).narrow(to_dim, 0, length).contiguous()


def _stacked(x: Tensor, dim: int, parts: int) -> Tensor:
    """Return the equal pieces of `dim`, one after the other along the first dim, contiguous."""
    if dim == 0:
        return x.contiguous()
    shape = _resized(x, dim, x.shape[dim] // parts)
    if not _leads(shape, dim):
        x = x.unflatten(dim, (parts, shape[dim])).movedim(dim, 0)
    return x.contiguous().view(parts * shape[0], *shape[1:])


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Return `x` with zeros after the end of `dim` up to `size`, contiguous."""
    if x.shape[dim] == size:
        return x.contiguous()
    padded = x.new_zeros(_resized(x, dim, size))
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _leads(shape: Sequence[int], dim: int) -> bool:
    """Return whether pieces of `dim` that follow one another in memory are joined as they are."""
    return dim == 0 or math.prod(shape[:dim]) == 1


_WIDTHS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}
_MOVED_AS = {
    dtype: _WIDTHS[dtype.itemsize]
    for dtype in (
        *(torch.int16, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
_SUMMED_AS = {torch.bool: torch.int32, torch.int16: torch.int32}


def _on_movable_device(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` where the group can move it: gloo sums on a GPU, and moves little else."""
    return x.cpu() if x.is_cuda and moves_through_host(group) else x


def movable(x: Tensor) -> Tensor:
    """Return the bits of `x` in a dtype that every backend can move."""
    carrier = _MOVED_AS.get(x.dtype)
    return x if carrier is None else x.view(carrier)


def _summable(x: Tensor) -> Tensor:
    """Return the values of `x` in a dtype that every backend can sum."""
    wider = _SUMMED_AS.get(x.dtype)
    return x if wider is None else x.to(wider)


def _whole_gradient(x: Tensor, index: int) -> Tensor:
    return x.clone()  # as an identity does


# Fake: shapes only.


def _fake_same(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_all_gather(x: Tensor, dim: int, size: int, *_: Any) -> Tensor:
    return x.new_empty(_resized(x, dim, size))


def _fake_cut(x: Tensor, dim: int, group: str, parts: int, index: int) -> Tensor:
    return x.new_empty(_resized(x, dim, chunk(x.shape[dim], parts, index)[1]))


def _fake_all_to_all(
    x: Tensor, dim: int, size: int, to_dim: int, group: str, parts: int, index: int
) -> Tensor:
    cut = _fake_cut(x, to_dim, group, parts, index)
    return x.new_empty(_resized(cut, dim, size))


# Backward: the table of `movement`, each row (shape of the input, gradient, arguments) -> gradient.


def _identity_backward(shape: Sequence[int], grad: Tensor, group: str) -> Tensor:
    return EAGER[_ops.all_reduce.default](grad, group, False)


def _whole_gradient_backward(shape: Sequence[int], grad: Tensor, index: int) -> Tensor:
    return torch.zeros_like(grad) if index else grad


def _all_reduce_backward(shape: Sequence[int], grad: Tensor, group: str, pending: bool) -> Tensor:
    return EAGER[_ops.all_reduce.default](grad, group, False) if pending else grad


def _all_gather_backward(
    shape: Sequence[int], grad: Tensor, dim: int, size: int, group: str, parts: int, index: int,
    pending: bool,
) -> Tensor:  # fmt: skip
    back = _ops.reduce_scatter.default if pending else _ops.slice.default
    return EAGER[back](grad, dim, group, parts, index)


def _cut_backward(
    shape: Sequence[int], grad: Tensor, dim: int, group: str, parts: int, index: int
) -> Tensor:
    return EAGER[_ops.all_gather.default](grad, dim, shape[dim], group, parts, index, False)


def _all_to_all_backward(
    shape: Sequence[int], grad: Tensor, dim: int, size: int, to_dim: int, group: str, parts: int,
    index: int,
) -> Tensor:  # fmt: skip
    return EAGER[_ops.all_to_all.default](grad, to_dim, shape[to_dim], dim, group, parts, index)


def _differentiable(
    name: str, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return the Autograd-key kernel of operator `name`: record `backward`, then go on below."""
    operator = getattr(_ops, name).default

    def run(x: Tensor, *arguments: Any) -> Tensor:
        if _is_plain(x):
            return forward(x, *arguments)
        with below_autograd():
            return operator(x, *arguments)

    def run_and_record(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        ctx.shape, ctx.arguments = x.shape, arguments
        if name in ("identity", "whole_gradient") and _is_plain(x):
            return x.view_as(x)
        return run(x, *arguments)

    def run_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return backward(ctx.shape, grad, *ctx.arguments), *(None,) * len(ctx.arguments)

    title = "".join(word.capitalize() for word in name.split("_"))
    methods = {"forward": staticmethod(run_and_record), "backward": staticmethod(run_back)}
    function: Any = type(title, (torch.autograd.Function,), methods)

    def kernel(x: Tensor, *arguments: Any) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return function.apply(x, *arguments)
        return run(x, *arguments)

    return kernel


def _is_plain(x: Tensor) -> bool:
    """Return whether nothing watches: then the kernel is called without a second dispatch."""
    return type(x) in (Tensor, torch.nn.Parameter) and not active_modes() and not x.is_meta


# The registration. Kernels and backwards go on the dispatch keys directly: a call costs some 6 µs
# more than the same autograd.Function by hand, one through `torch.library.custom_op` 23 µs.

_library = torch.library.Library("autopar", "FRAGMENT")
for _name, _arguments, _forward, _fake, _backward in (
    ("identity", "str group", _identity, _fake_same, _identity_backward),
    ("whole_gradient", "int index", _whole_gradient, _fake_same, _whole_gradient_backward),
    ("all_reduce", "str group, bool pending", _all_reduce, _fake_same, _all_reduce_backward),
    (
        "all_gather",
        "int dim, SymInt size, str group, int parts, int index, bool pending",
        _all_gather,
        _fake_all_gather,
        _all_gather_backward,
    ),
    (
        "reduce_scatter",
        "int dim, str group, int parts, int index",
        _reduce_scatter,
        _fake_cut,
        _cut_backward,
    ),
    ("slice", "int dim, str group, int parts, int index", _slice, _fake_cut, _cut_backward),
    (
        "all_to_all",
        "int dim, SymInt size, int to_dim, str group, int parts, int index",
        _all_to_all,
        _fake_all_to_all,
        _all_to_all_backward,
    ),
):
    _library.define(f"{_name}(Tensor x, {_arguments}) -> Tensor")
    _library.impl(_name, _forward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{_name}", _fake, lib=_library)
    _kernel = _differentiable(_name, _forward, _backward)
    _library.impl(_name, _kernel, "Autograd")
    EAGER[getattr(_ops, _name).default] = _kernel
