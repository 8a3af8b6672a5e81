"""Convolution, pooling and resizing: batch and channels can be cut, space stays whole.

The channels of a grouped convolution are (g i) and (g o): groups can be cut evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from autopar.strategies.registry import Call, Traits, aten, register_rule
from autopar.strategies.rule import Dim, Extra, Rule, Saved, names

RESIZES = {
    1: "upsample_linear1d",
    2: "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    3: "upsample_trilinear3d",
}


def _convolution(call: Call) -> Rule | None:
    transposed = call.get("transposed", "output_padding" in call.arguments)
    weight = call.shapes[1]
    space = len(weight) - 2
    batched = len(call.shape) == space + 2
    groups = call["groups"]
    first, second = ("i", "o") if transposed else ("o", "i")  # the dims of the weight
    before, kernel, after = (names(space, kind) for kind in ("x", "w", "y"))
    whole: list[Dim] = [("g",) if groups == 1 else ("i", "o"), *before, *kernel, *after]
    batch: list[Dim] = [("n",)] if batched else []
    inputs: list[list[Dim]] = [
        [*batch, ("g", "i"), *before],
        [("g", first), (second,), *kernel],
    ]
    passes: list[tuple[int, ...]] = [(0,), (1,)]
    if call["bias"] is not None:
        inputs.append([("g", "o")])
        passes = []
    return call.rule(
        inputs,
        [*batch, ("g", "o"), *after],
        {"g": groups},
        whole=whole,
        even=frozenset(("g", "i", "o")),
        passes=passes,
        flops=2.0 * math.prod(call.shapes[0] if transposed else call.shape) * math.prod(weight[1:]),
        product=True,
        saved=Saved((0, 1)),
    )


def _groups_of_piece(call: Call, shape: Sequence[int]) -> int:
    channels = len(shape) - len(call.shapes[1]) + 1
    groups: int = call["groups"]
    return groups if groups == 1 else shape[channels] * groups // call.shape[channels]


def _pooling(call: Call, space: int, linear: bool, saved: tuple[int, ...] = (0,)) -> Rule:
    shape, out_shape = call.shapes[0], call.shape
    leading, before, after = names(len(shape) - space, "n"), names(space, "x"), names(space, "y")
    window = call.get("kernel_size") or [1]
    window = window * space if len(window) == 1 else window
    places = (Extra((*leading, *after), torch.int64),)  # of the maxima
    return call.rule(
        [[*leading, *before]],
        [*leading, *after],
        whole=before + after,
        even=frozenset(leading[-1]),  # torch pools no piece without channels
        passes=[(0,)] if linear else (),
        flops=float(math.prod(out_shape) * math.prod(window)),
        saved=Saved(saved, extra=() if linear else places),
    )


def _average_to_size(call: Call) -> Rule:
    """To one point it is a mean, which keeps nothing."""
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
    register_rule(aten(f"avg_pool{_space}d adaptive_avg_pool{_space}d"), _average)
    register_rule(aten(f"upsample_nearest{_space}d _upsample_nearest_exact{_space}d"), _resize)
    register_rule(aten(RESIZES[_space]), _resize)
register_rule("aten.adaptive_avg_pool2d", _average_to_size)
