"""Convolution and pooling: batch and channels can be cut, space stays whole.

The channels of a grouped convolution are (g i) and (g o): groups can be cut evenly.
"""

from __future__ import annotations

import math

from autopar.strategies.registry import Call, register_rule
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


register_rule(["aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution"], _convolution)
for _space in (1, 2, 3):
    register_rule(
        f"aten.max_pool{_space}d", lambda call, space=_space: _pooling(call, space, False)
    )
    register_rule(
        [f"aten.avg_pool{_space}d", f"aten.adaptive_avg_pool{_space}d"],
        lambda call, space=_space: _pooling(call, space, True),
    )
for _space in (1, 2, 3):
    for _name in ("nearest", "linear", "bilinear", "bicubic", "trilinear"):
        _operator = f"aten.upsample_{_name}{_space}d"
        if hasattr(__import__("torch").ops.aten, _operator.removeprefix("aten.")):
            register_rule(_operator, lambda call, space=_space: _pooling(call, space, True))
