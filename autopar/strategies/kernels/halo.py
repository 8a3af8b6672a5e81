"""Halos: convolutions, poolings and resizes along a dim of space that is cut.

An output piece reads beyond the rank's rows of the input: each rank gets the rows that it lacks
from the ranks that have them (its halo), and their gradients go back.
Input and output may be cut unevenly, and a halo may be wider than a piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.collectives.joint_kernels import (
    AllToAll,
    CommVolume,
    JointKernel,
    KernelGroup,
    Piece,
    Steps,
)

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class WindowOperator:
    """An operator as a window along one dim of its space, counted from the last."""

    dim: int
    read: Callable[[Piece], Piece]  # of a piece of the output; may reach beyond the input
    run: Callable[[Tensor, Piece], Tensor]  # the rows that were read, and the piece that is wanted
    fill: float | None = 0.0  # the value beyond the input; None: windows end there
    # Rows, piece, gradient, and which inputs need one -> gradients of rows and weights; None: by
    # autograd of another `run`.
    back: Callable[[Tensor, Piece, Tensor, Sequence[bool]], Gradients] | None = None


@dataclass(frozen=True)
class _WindowCall:
    """A windowed call on one rank, which has pieces of its input and output."""

    group: KernelGroup
    window: WindowOperator

    @property
    def output_piece(self) -> Piece:
        """Return the rank's piece of the output."""
        return self.after[self.group.index]

    @property
    def before(self) -> Sequence[Piece]:
        return self.group.input(0).pieces

    @property
    def after(self) -> Sequence[Piece]:
        return self.group.output().pieces

    def reads(self, member: int) -> Piece:
        """Return the rows that a member reads, within the input."""
        size = sum(length for _, length in self.before)
        start, length = self.after[member]
        if not length or not size:
            return 0, 0
        first, count = self.window.read((start, length))
        low, high = min(max(first, 0), size), min(max(first + count, 0), size)
        return low, high - low

    def shared(self, owner: int, reader: int) -> Piece:
        """Return the rows of `owner` that `reader` reads, counted from the owner's first row."""
        (start, length), (first, count) = self.before[owner], self.reads(reader)
        low, high = max(start, first), min(start + length, first + count)
        return (low - start, high - low) if high > low else (0, 0)

    def rows(self, x: Tensor) -> Steps:
        """Return the rows that this rank reads, after an exchange."""
        members, index = range(self.group.count), self.group.index
        sent = tuple(x.narrow(self.window.dim, *self.shared(index, other)) for other in members)
        shapes = [self._sized(x, self.shared(other, index)[1]) for other in members]
        received = yield (yield AllToAll(sent, shapes))
        return self._padded(torch.cat(received, self.window.dim))

    def blank(self, x: Tensor) -> Tensor:
        """Return as many rows of zeros as this rank reads."""
        return self._padded(x.new_zeros(self._sized(x, self.reads(self.group.index)[1])))

    def run(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the rank's piece of the output, which may have no elements."""
        if self.output_piece[1]:
            return self.window.run(rows, self.output_piece)
        _, count = self.window.read((0, 1))
        blank = self.window.run(x.new_zeros(self._sized(x, count)), (0, 1))
        return blank.narrow(self.window.dim, 0, 0)

    def back(self, slope: Tensor, x: Tensor) -> Steps:
        """Return the gradient of this rank's rows; those of halos go to their owners."""
        members, index = range(self.group.count), self.group.index
        before, after = self._beyond()
        slope = slope.narrow(self.window.dim, before, slope.shape[self.window.dim] - before - after)
        lengths = [self.shared(other, index)[1] for other in members]
        sent = tuple(slope.split(lengths, self.window.dim))
        local = [self.shared(index, other) for other in members]
        received = yield (yield AllToAll(sent, [self._sized(x, length) for _, length in local]))
        total = torch.zeros_like(x)
        for (start, length), part in zip(local, received):
            total.narrow(self.window.dim, start, length).add_(part)
        return total

    def _beyond(self) -> Piece:
        """Return how many rows are read before and after the input."""
        if self.window.fill is None or not self.output_piece[1]:
            return 0, 0
        first, count = self.window.read(self.output_piece)
        low, length = self.reads(self.group.index)
        if not length:
            return count, 0
        return low - first, first + count - low - length

    def _padded(self, rows: Tensor) -> Tensor:
        before, after = self._beyond()
        if not before and not after:
            return rows
        around = [0, 0] * (-self.window.dim - 1) + [before, after]
        return F.pad(rows, around, value=self.window.fill)

    def _sized(self, x: Tensor, length: int) -> list[int]:
        shape = list(x.shape)
        shape[self.window.dim] = length
        return shape


Along = Callable[[int, Mapping[str, Any]], WindowOperator]


def _joint(name: str, along: Along, *, keeps: bool = True) -> JointKernel:
    """Return the kernel of an operator whose first argument is in pieces.

    `along` gives its window by a dim and its arguments. `keeps`: backward reads the input, too.
    """

    def call_of(group: KernelGroup, ndim: int, arguments: Mapping[str, Any]) -> _WindowCall:
        cut = group.input(0)
        times = group.output().size // cut.size
        return _WindowCall(group, along(cut.dim - ndim, {**arguments, "times": times}))

    def forward(group: KernelGroup, **arguments: Any) -> Steps:
        x = next(iter(arguments.values()))
        call = call_of(group, x.ndim, arguments)
        rows = yield from call.rows(x)
        out = call.run(x, rows)
        tensors = {k: v for k, v in arguments.items() if isinstance(v, Tensor)}
        rest = [*tensors], arguments | dict.fromkeys(tensors), x.shape
        return (out,), tuple(tensors.values()) if keeps else (), rest

    def backward(group: KernelGroup, saved: Sequence[Tensor], rest: Any, grad: Tensor) -> Steps:
        names, arguments, shape = rest
        call = call_of(group, len(shape), arguments | dict(zip(names, saved)))
        x = saved[0] if keeps else grad.new_zeros(()).expand(shape)
        rows = (yield from call.rows(x)) if keeps else call.blank(x)
        if call.output_piece[1]:
            back = call.window.back or partial(_run_again, call.window)
            of_rows, *others = back(rows, call.output_piece, grad, group.needs)
        else:
            of_rows, others = rows, [torch.zeros_like(weight) for weight in saved[1:]]
        of_x = None
        if group.needs[0]:
            assert of_rows is not None
            of_x = yield from call.back(of_rows, x)
        return of_x, *others

    forward.__name__, backward.__name__ = name, f"{name}_backward"
    return JointKernel(forward, backward, partial(_traffic, keeps=keeps))


def _run_again(
    window: WindowOperator, rows: Tensor, piece: Piece, grad: Tensor, needs: Sequence[bool]
) -> Gradients:
    with torch.enable_grad():
        leaf = rows.detach().requires_grad_()
        out = window.run(leaf, piece)
    return torch.autograd.grad(out, leaf, grad)


def _traffic(
    count: int,
    inputs: Sequence[float],
    outputs: Sequence[float],
    needs: Sequence[bool],
    *,
    keeps: bool,
) -> CommVolume:
    """Return the traffic of the halo alone; mostly to and from two neighbours."""
    halo = (("shift", inputs[0]),)
    return CommVolume(halo, halo * (keeps + needs[0]), (1, 2))


# The windows of operators along one dim.


def _convolution(dim: int, arguments: Mapping[str, Any]) -> WindowOperator:
    weight, bias = arguments["weight"], arguments["bias"]
    space = weight.ndim - 2
    at = dim + space
    stride, padding, dilation = _geometry(arguments, space)
    other_padding = _without(padding, at)

    def read(piece: Piece) -> Piece:
        reach = dilation[at] * (weight.shape[at + 2] - 1) + 1
        return piece[0] * stride[at] - padding[at], (piece[1] - 1) * stride[at] + reach

    settings = stride, other_padding, dilation, False, [0] * space, arguments["groups"]

    def run(rows: Tensor, piece: Piece) -> Tensor:
        return _convolved(rows, weight, bias, settings)

    def back(rows: Tensor, piece: Piece, grad: Tensor, needs: Sequence[bool]) -> Gradients:
        shape = None if bias is None else list(bias.shape)
        return _convolution_back(grad, rows, weight, shape, settings, needs)

    return WindowOperator(dim, read, run, back=back)


def _transposed(dim: int, arguments: Mapping[str, Any]) -> WindowOperator:
    """Return the window of a transposed convolution: an output row reads rows that reach it."""
    weight, bias = arguments["weight"], arguments["bias"]
    space = weight.ndim - 2
    at = dim + space
    stride, padding, dilation = _geometry(arguments, space)
    other_padding = _without(padding, at)
    more = _without(_per_dim(arguments["output_padding"], space, 0), at)
    reach = dilation[at] * (weight.shape[at + 2] - 1)
    settings = stride, other_padding, dilation, True, more, arguments["groups"]

    def read(piece: Piece) -> Piece:
        first = -((reach - piece[0] - padding[at]) // stride[at])
        last = (piece[0] + piece[1] - 1 + padding[at]) // stride[at]
        return first, max(last + 1 - first, 1)

    def around(rows: Tensor, piece: Piece) -> list[int]:
        """Return the padding that makes the rows' output the piece, as `F.pad` takes it."""
        start = min(read(piece)[0] * stride[at] - padding[at] - piece[0], piece[1])
        length = (rows.shape[dim] - 1) * stride[at] + reach + 1
        return [0, 0] * (-dim - 1) + [start, max(piece[1] - start - length, -length)]

    def run(rows: Tensor, piece: Piece) -> Tensor:
        out = _convolved(rows, weight, None, settings)
        out = F.pad(out, around(rows, piece))
        return out if bias is None else out + bias.view(-1, *(1,) * space)

    def back(rows: Tensor, piece: Piece, grad: Tensor, needs: Sequence[bool]) -> Gradients:
        inner = F.pad(grad, [-size for size in around(rows, piece)])
        gradients = _convolution_back(inner, rows, weight, None, settings, needs)
        if bias is None:
            return gradients
        dims = [d for d in range(grad.ndim) if d != grad.ndim - space - 1]
        return *gradients, grad.sum(dims) if needs[2] else None

    return WindowOperator(dim, read, run, back=back)


def _convolved(
    rows: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...]
) -> Tensor:
    convolution = torch.ops.aten.convolution.default
    if rows.ndim == weight.ndim:
        return convolution(rows, weight, bias, *settings)
    return convolution(rows.unsqueeze(0), weight, bias, *settings).squeeze(0)


def _convolution_back(
    grad: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: list[int] | None,
    settings: tuple[Any, ...],
    needs: Sequence[bool],
) -> Gradients:
    mask = [needs[0], needs[1], bias is not None and needs[2]]
    batched = rows if rows.ndim == weight.ndim else rows.unsqueeze(0)
    slope = grad if rows.ndim == weight.ndim else grad.unsqueeze(0)
    gradients = torch.ops.aten.convolution_backward.default(
        slope, batched, weight, bias, *settings, mask
    )
    of_rows = gradients[0] if gradients[0] is None else gradients[0].view(rows.shape)
    return of_rows, *gradients[1 : 2 if bias is None else 3]


def _pooling(name: str, space: int, fill: float) -> Along:
    def along(dim: int, arguments: Mapping[str, Any]) -> WindowOperator:
        at = dim + space
        size = _per_dim(arguments["kernel_size"], space, 1)
        stride = _per_dim(arguments["stride"] or size, space, 1)
        padding = _per_dim(arguments["padding"], space, 0)
        dilation = _per_dim(arguments.get("dilation"), space, 1)
        function = getattr(F, f"{name}{space}d")
        more = {
            word: arguments[word]
            for word in ("count_include_pad", "divisor_override")
            if word in arguments and (space > 1 or word != "divisor_override")
        }
        more |= {"dilation": dilation} if "dilation" in arguments else {}
        reach = dilation[at] * (size[at] - 1) + 1

        def read(piece: Piece) -> Piece:
            return piece[0] * stride[at] - padding[at], (piece[1] - 1) * stride[at] + reach

        def run(rows: Tensor, piece: Piece) -> Tensor:
            return function(rows, size, stride, _without(padding, at), **more)

        return WindowOperator(dim, read, run, fill)

    return along


def _resizing(mode: str, space: int, reach: int) -> Along:
    """Return the windows of a resize by a whole number; points read `reach` rows on each side."""

    def along(dim: int, arguments: Mapping[str, Any]) -> WindowOperator:
        times, factors = arguments["times"], arguments["scale_factors"]

        def first(piece: Piece) -> int:
            return max(piece[0] // times - reach, 0)

        def read(piece: Piece) -> Piece:
            start = first(piece)
            return start, (piece[0] + piece[1] - 1) // times + 1 + reach - start

        def run(rows: Tensor, piece: Piece) -> Tensor:
            smooth = {} if mode.startswith("nearest") else {"align_corners": False}
            sizes = None
            if not factors:  # else the places along other dims are by these, not by the sizes
                whole = arguments["output_size"]
                sizes = [*whole]
                sizes[dim] = rows.shape[dim] * times
            out = F.interpolate(rows, sizes, factors or None, mode, **smooth)
            return out.narrow(dim, piece[0] - first(piece) * times, piece[1]).contiguous()

        return WindowOperator(dim, read, run, fill=None)

    return along


class _Geometry(NamedTuple):
    stride: list[int]
    padding: list[int]
    dilation: list[int]


def _geometry(arguments: Mapping[str, Any], space: int) -> _Geometry:
    return _Geometry(
        _per_dim(arguments["stride"], space, 1),
        _per_dim(arguments["padding"], space, 0),
        _per_dim(arguments["dilation"], space, 1),
    )


def _per_dim(value: Any, space: int, default: int) -> list[int]:
    """Return an argument for each dim of space; a single number is for all of them."""
    numbers = [default] if value is None or value == [] else value
    numbers = [numbers] if isinstance(numbers, int) else list(numbers)
    return numbers * space if len(numbers) == 1 else numbers


def _without(padding: Sequence[int], at: int) -> list[int]:
    """Return the padding of other dims: along this one it is among the rows."""
    return [0 if dim == at else size for dim, size in enumerate(padding)]


# By kernel of a pooling: its name, the value beyond the input, and the dims of space.
POOLINGS = {
    f"cut_{name}{space}d": (name, fill, space)
    for name, fill in (("max_pool", -math.inf), ("avg_pool", 0.0))
    for space in (1, 2, 3)
}
# Resizes: the name, the mode, the dims of space, and the rows that a point reads on each side.
RESIZINGS = (
    *((f"upsample_nearest{space}d", "nearest", space, 0) for space in (1, 2, 3)),
    *((f"_upsample_nearest_exact{space}d", "nearest-exact", space, 0) for space in (1, 2, 3)),
    ("upsample_linear1d", "linear", 1, 1),
    ("upsample_bilinear2d", "bilinear", 2, 1),
    ("upsample_trilinear3d", "trilinear", 3, 1),
)
HALOS = (
    _joint("cut_convolution", _convolution),
    _joint("cut_transposed_convolution", _transposed),
    *(
        _joint(kernel, _pooling(name, space, fill))
        for kernel, (name, fill, space) in POOLINGS.items()
    ),
    *(
        _joint(f"cut_{name}", _resizing(mode, space, reach), keeps=False)
        for name, mode, space, reach in RESIZINGS
    ),
)
