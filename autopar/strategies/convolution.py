"""Convolution, pooling and resizing: batch and channels can be cut, space stays whole.

The channels of a grouped convolution are (g i) and (g o): groups can be cut evenly.
"""

from __future__ import annotations

import math
from functools import partial

from autopar.strategies.registry import Call, aten, register_rule
from autopar.strategies.rule import Dim, Rule, Saved


def _convolution(call: Call) -> Rule | None:
    if call.get("transposed"):
        return None
    weight = call.shapes[1]
    space = len(weight) - 2
    batched = len(call.shape) == space + 2
    groups = call["groups"]
    sizes = {"n": call.shape[0] if batched else 1, "g": groups}
    sizes |= {"o": weight[0] // groups, "i": weight[1]}
    whole = ["g"] if groups == 1 else ["i", "o"]
    before, kernel, after = ([(f"{kind}{i}",) for i in range(space)] for kind in ("x", "w", "y"))
    for dims, shape in ((before, call.shapes[0]), (kernel, weight), (after, call.shape)):
        sizes |= {dim[0]: size for dim, size in zip(dims, shape[len(shape) - space :])}
    whole += [dim[0] for dim in before + kernel + after]
    batch: list[Dim] = [("n",)] if batched else []
    inputs: list[list[Dim]] = [
        [*batch, ("g", "i"), *before],
        [("g", "o"), ("i",), *kernel],
    ]
    passes: list[tuple[int, ...]] = [(0,), (1,)]
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
        flops=2.0 * math.prod(call.shape) * math.prod(weight[1:]),
        saved=Saved((0, 1)),
    )


def _pooling(call: Call, space: int, linear: bool) -> Rule:
    shape, out_shape = call.shapes[0], call.shape
    leading: list[Dim] = [(f"n{i}",) for i in range(len(shape) - space)]
    before: list[Dim] = [(f"x{i}",) for i in range(space)]
    after: list[Dim] = [(f"y{i}",) for i in range(space)]
    sizes = {dim[0]: size for dim, size in zip(leading + before, shape)}
    sizes |= {dim[0]: size for dim, size in zip(after, out_shape[len(leading) :])}
    window = call.get("kernel_size") or [1]
    window = window * space if len(window) == 1 else window
    return call.rule(
        [[*leading, *before]],
        [*leading, *after],
        sizes,
        whole=[dim[0] for dim in before + after],
        passes=[(0,)] if linear else (),
        flops=float(math.prod(out_shape) * math.prod(window)),
        saved=Saved() if linear else Saved((0,), extra=((*leading, *after),)),
    )


register_rule(aten("conv1d conv2d conv3d convolution"), _convolution)
register_rule(aten("max_pool1d"), partial(_pooling, space=1, linear=False))
register_rule(aten("max_pool2d"), partial(_pooling, space=2, linear=False))
register_rule(aten("max_pool3d"), partial(_pooling, space=3, linear=False))
register_rule(
    aten("avg_pool1d adaptive_avg_pool1d upsample_nearest1d upsample_linear1d"),
    partial(_pooling, space=1, linear=True),
)
register_rule(
    aten(
        "avg_pool2d adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"
    ),
    partial(_pooling, space=2, linear=True),
)
register_rule(
    aten("avg_pool3d adaptive_avg_pool3d upsample_nearest3d upsample_trilinear3d"),
    partial(_pooling, space=3, linear=True),
)
