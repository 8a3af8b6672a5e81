"""Convolution, pooling and resizing: batch and channels can be cut, space stays whole.

The channels of a grouped convolution are (g i) and (g o): groups can be cut evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from autopar.strategies.kernels.halo import POOLINGS, RESIZINGS
from autopar.strategies.node_info import info
from autopar.strategies.registry import OperatorCall, Traits, aten, register_rule
from autopar.strategies.rule import Dim, ExtraTensor, Rule, Saved, names
from autopar.strategies.strategy import InputWindow, JointCut

RESIZES = {
    1: "upsample_linear1d",
    2: "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    3: "upsample_trilinear3d",
}


def _convolution(call: OperatorCall) -> Rule | None:
    transposed = call.get("transposed", "output_padding" in call.arguments)
    weight = call.shapes[1]
    space = len(weight) - 2
    batched = len(call.shape) == space + 2
    groups = call["groups"]
    first, second = ("i", "o") if transposed else ("o", "i")  # the dims of the weight
    before, kernel, after = (names(space, kind) for kind in ("x", "w", "y"))
    # Where a point of the output reads the point of the input, they are cut together.
    after = [x if _is_pointwise(call, d) else y for d, (x, y) in enumerate(zip(before, after))]
    bound = [dim for x, y in zip(before, after) if x != y for dim in (x, y)]
    whole: list[Dim] = [("g",) if groups == 1 else ("i", "o"), *kernel, *bound]
    batch: list[Dim] = [("n",)] if batched else []
    inputs: list[list[Dim]] = [
        [*batch, ("g", "i"), *before],
        [("g", first), (second,), *kernel],
    ]
    passes: list[tuple[int, ...]] = [(0,), (1,)]
    sizes, saved = {"g": groups}, Saved((0, 1))
    if more := _padded_sizes(call, space):
        # torch pads one side before, and keeps what that makes.
        padded = names(space, "p")
        sizes |= {name: size for (name,), size in zip(padded, more)}
        saved = Saved((1,), extra=(ExtraTensor((*batch, ("g", "i"), *padded)),))
    if call["bias"] is not None:
        inputs.append([("g", "o")])
        passes = []
    return call.rule(
        inputs,
        [*batch, ("g", "o"), *after],
        sizes,
        whole=whole,
        even=frozenset(("g", "i", "o")),
        passes=passes,
        flops=2.0 * math.prod(call.shapes[0] if transposed else call.shape) * math.prod(weight[1:]),
        product=True,
        saved=saved,
        joints=(joints := _halos(call, space, transposed=transposed)),
        saved_by_joint=dict.fromkeys(joints, Saved((*range(len(inputs)),))),
    )


def _padded_sizes(call: OperatorCall, space: int) -> list[int] | None:
    """Return the sizes of an input that is padded on one side more; None if on none."""
    if call["padding"] != "same":
        return None
    kernel, before = call.shapes[1][2:], call.shapes[0][-space:]
    dilation = [call["dilation"][d % len(call["dilation"])] for d in range(space)]
    odd = [far * (size - 1) % 2 for size, far in zip(kernel, dilation)]
    return [size + more for size, more in zip(before, odd)] if any(odd) else None


class _Reach(NamedTuple):
    """The rows that a kernel reaches along a dim, its stride, and the padding before it."""

    rows: int
    stride: int
    padding: int


def _reach(call: OperatorCall, dim: int) -> _Reach | None:
    """Return the reach of a kernel along a dim; None if its padding has no number."""
    if not isinstance(call["padding"], list | tuple):
        return None
    stride, padding, dilation = (
        (call[name][dim] if len(call[name]) > 1 else call[name][0])
        for name in ("stride", "padding", "dilation")
    )
    return _Reach(dilation * (call.shapes[1][dim + 2] - 1) + 1, stride, padding)


def _is_pointwise(call: OperatorCall, dim: int) -> bool:
    """Return whether each point of a dim of the output reads the same point of the input."""
    at = dim - len(call.shapes[1]) + 2
    return _reach(call, dim) == (1, 1, 0) and call.shapes[0][at] == call.shape[at]


def _halos(call: OperatorCall, space: int, *, transposed: bool) -> dict[str, JointCut]:
    """Return the joints that cut dims of space; each rank gets the rows beside its own.

    Complex numbers have none: torch's kernels know no complex convolution.
    """
    if info(call.inputs[0]).val.is_complex():
        return {}
    kernel = "cut_transposed_convolution" if transposed else "cut_convolution"
    weights = len(call.inputs) - 1
    return {
        f"space{d}": _joint(kernel, d, _input_window(reach, transposed=transposed), weights)
        for d in range(space)
        if not _is_pointwise(call, d) and (reach := _reach(call, d)) is not None
    }


def _input_window(reach: _Reach, *, transposed: bool = False) -> InputWindow:
    """Return the rows of the input that are in the window of a row of the output."""
    rows, stride, padding = reach
    if transposed:
        return InputWindow(1, stride, padding - rows + stride, padding)
    return InputWindow(stride, 1, -padding, rows - 1 - padding)


def _joint(kernel: str, dim: int, window: InputWindow, weights: int = 0) -> JointCut:
    """Return the joint that cuts input and output along a dim of space."""
    return JointCut(kernel, (f"x{dim}", *(None,) * weights), (f"y{dim}",), travelling_rows=window)


def _groups_of_piece(call: OperatorCall, shape: Sequence[int]) -> int:
    channels = len(shape) - len(call.shapes[1]) + 1
    groups: int = call["groups"]
    return groups if groups == 1 else shape[channels] * groups // call.shape[channels]


def _pooling(
    call: OperatorCall, space: int, *, linear: bool, saved: tuple[int, ...] = (0,)
) -> Rule:
    shape, out_shape = call.shapes[0], call.shape
    leading, before, after = names(len(shape) - space, "n"), names(space, "x"), names(space, "y")
    window = call.get("kernel_size") or [1]
    window = window * space if len(window) == 1 else window
    maxima = (ExtraTensor((*leading, *after), torch.int64),)  # their indices
    # Numbers between 0 and 1 set the fractional windows of each sample and channel.
    drawn: list[list[Dim]] = [
        [*[()] * (len(other) - 1 - len(leading)), *leading, ("r",)] for other in call.shapes[1:]
    ]
    return call.rule(
        [[*leading, *before], *drawn],
        [*leading, *after],
        whole=[*before, *after, "r"],
        even=frozenset(leading[-1]),  # torch pools no piece without channels
        passes=[(0,)] if linear else (),
        flops=float(math.prod(out_shape) * math.prod(window)),
        saved=Saved(saved, extra=() if linear else maxima),
        joints=(joints := _windows(call, space)),
        saved_by_joint=dict.fromkeys(joints, Saved(saved)),  # the maxima are found again
    )


def _unpooling(call: OperatorCall) -> Rule:
    """Return the rule of max_unpool: maxima go back to their indices in each channel."""
    space = len(call["output_size"])
    leading = names(len(call.shape) - space, "n")
    before, after = names(space, "x"), names(space, "y")
    inputs = [[*leading, *before]] * 2
    even, saved = frozenset(leading[-1]), Saved((1,))
    return call.rule(
        inputs, [*leading, *after], whole=before + after, even=even, passes=[(0,)], saved=saved
    )


def _columns(call: OperatorCall) -> Rule:
    """Return the rule of im2col, or of col2im back: the channels of columns are (c k)."""
    batch = names(len(call.shape) - (2 if "output_size" not in call.arguments else 3), "n")
    image: list[Dim] = [*batch, ("c",), ("y",), ("x",)]
    columns: list[Dim] = [*batch, ("c", "k"), ("l",)]
    into, out = (columns, image) if "output_size" in call.arguments else (image, columns)
    sizes = {"k": math.prod(call["kernel_size"])}
    return call.rule([into], out, sizes, whole=["y", "x", "l"], passes=[(0,)])


def _grid(call: OperatorCall) -> Rule:
    """Return the rule of affine_grid_generator: each sample has a map of the grid."""
    _, *points = names(len(call.shape))
    into: list[Dim] = [("n",), ("i",), ("j",)]
    return call.rule([into], [("n",), *points], whole=["i", "j", *points])


def _rows_of_piece(call: OperatorCall, shape: Sequence[int]) -> list[int]:
    return [shape[0], *call["size"][1:]]


def _windows(call: OperatorCall, space: int) -> dict[str, JointCut]:
    """Return the joints of a pooling whose windows lie as those of a convolution."""
    if call.get("kernel_size") is None:
        return _enlarged(call, space)
    name, sizes = str(call.node.target).split(".")[1], call["kernel_size"]
    if f"cut_{name}" not in POOLINGS or call["ceil_mode"]:
        return {}
    if not call.get("count_include_pad", True) and any(call["padding"]):
        return {}
    geometry = (sizes, call["stride"] or sizes, call["padding"], call.get("dilation") or [1])
    windows = [[numbers[d % len(numbers)] for numbers in geometry] for d in range(space)]
    return {
        f"space{d}": _joint(
            f"cut_{name}", d, _input_window(_Reach(dilation * (size - 1) + 1, stride, padding))
        )
        for d, (size, stride, padding, dilation) in enumerate(windows)
    }


def _enlarged(call: OperatorCall, space: int) -> dict[str, JointCut]:
    """Return the joints of a resize by a whole number of times along a dim."""
    name = str(call.node.target).split(".")[1]
    reach = {known: rows for known, *_, rows in RESIZINGS}.get(name)
    if reach is None or call.get("align_corners") or "scale_factors" not in call.arguments:
        return {}
    factors = call["scale_factors"] or [None] * space
    joints = dict[str, JointCut]()
    for d, before, after, factor in zip(
        range(space), call.shapes[0][-space:], call.shape[-space:], factors
    ):
        times = after // max(before, 1)
        if after == times * before and factor in (None, times):
            window = InputWindow(1, max(times, 1), -reach * times, reach * times)
            joints[f"space{d}"] = _joint(f"cut_{name}", d, window)
    return joints


def _average_to_size(call: OperatorCall) -> Rule:
    """Return the rule of adaptive_avg_pool2d: to one point it is a mean, which keeps nothing."""
    return _pooling(call, 2, linear=True, saved=() if set(call["output_size"]) == {1} else (0,))


register_rule(
    aten("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d"),
    _convolution,
    traits=Traits(of_piece={"groups": _groups_of_piece}),
)
for _space in (1, 2, 3):
    _maximum = partial(_pooling, space=_space, linear=False)
    _average = partial(_pooling, space=_space, linear=True)
    _resize = partial(_pooling, space=_space, linear=True, saved=())
    register_rule(f"aten.max_pool{_space}d", _maximum)
    if _space > 1:
        _others = "max_pool{0}d_with_indices adaptive_max_pool{0}d fractional_max_pool{0}d"
        register_rule(aten(_others.format(_space)), _maximum)
        register_rule(f"aten.max_unpool{_space}d", _unpooling)
    register_rule(aten(f"avg_pool{_space}d adaptive_avg_pool{_space}d"), _average)
    register_rule(aten(f"upsample_nearest{_space}d _upsample_nearest_exact{_space}d"), _resize)
    register_rule(aten(RESIZES[_space]), _resize)
register_rule("aten.adaptive_avg_pool2d", _average_to_size)
register_rule(aten("im2col col2im"), _columns)
for _space, _before, _after in ((2, "h! w!", "y x"), (3, "d! h! w!", "z y x")):
    _line = f"n c {_before}, n {_after} place! -> n c {_after}"
    register_rule(f"aten.grid_sampler_{_space}d", _line, passes=[(0,)], cost=8, saved="0 1")
register_rule("aten.affine_grid_generator", _grid, traits=Traits(of_piece={"size": _rows_of_piece}))
