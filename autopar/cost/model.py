"""What operators and collectives take in seconds, and model states in bytes.

>>> round(COLLECTIVES["all_reduce"](p=8, V=1e9, B=100e9, a=0), 6)
0.0175
>>> from autopar.cluster import Cluster
>>> device = Cluster.preset("dgx-h100").device
>>> seconds = operator_seconds(device, "bf16", flops=2 * 4096**3, moved=3 * 2 * 4096**2)
>>> round(seconds * 1e6)
218

V is the larger of what one rank holds before and after the collective: of an all-gather the
gathered tensor, of a reduce-scatter the tensor that is scattered, of an all-to-all the piece.
"""

from __future__ import annotations

from typing import Any

from sympy import Max, Min, Symbol, log

from autopar.cluster import AxisLink, Device, Link
from autopar.collectives.redistribution import FREE
from autopar.cost.formula import Formula

p, V, B, a = (Symbol(name) for name in ("p", "V", "B", "a"))
F, F_half, P = (Symbol(name) for name in ("F", "F_half", "P"))
M, M_half, W, t0 = (Symbol(name) for name in ("M", "M_half", "W", "t0"))

# a: latency, B: bytes/s, p: ranks. Ring algorithms; all-reduce halves and doubles (Rabenseifner):
# the volume of a ring with the latency of a tree.
COLLECTIVES = {
    "all_reduce": Formula("all_reduce", 2 * (p - 1) / p * V / B + 2 * log(p, 2) * a),
    "all_gather": Formula("all_gather", (p - 1) / p * V / B + (p - 1) * a),
    "reduce_scatter": Formula("reduce_scatter", (p - 1) / p * V / B + (p - 1) * a),
    "all_to_all": Formula("all_to_all", (p - 1) / p * V / B + (p - 1) * a),
    "broadcast": Formula("broadcast", log(p, 2) * (V / B + a)),
    "send": Formula("send", V / B + a),
}
RING_ALL_REDUCE = Formula("all_reduce", 2 * (p - 1) / p * V / B + 2 * (p - 1) * a)

# Roofline: limited by arithmetic or by memory, whichever takes longer. P and W are rates, F and M
# the work; work of size F_half (M_half) runs at half of the rate. t0: time to start an operator.
ROOFLINE = Formula("operator", Max((F + F_half) / P, (M + M_half) / W) + t0)
MEMORY_BOUND = Formula("operator", (M + M_half) / W + t0)

# What computing hides of a collective that takes C by itself: beside it computing goes at `o` of
# its speed, and there is K to compute that does not wait for it.
C, o, K = (Symbol(name) for name in ("C", "o", "K"))
HIDDEN = Formula("hidden", Min(o * C, K))

# Bytes of model states: N parameters of w bytes, gradients of g, optimizer states of s, each cut
# over its own number of ranks.
N, w, g, s = (Symbol(name) for name in ("N", "w", "g", "s"))
c_w, c_g, c_s = (Symbol(name) for name in ("c_w", "c_g", "c_s"))
STATES = Formula("states", N * (w / c_w + g / c_g + s / c_s))


def collective_values(kind: str, link: AxisLink, size: Any) -> dict[str, Any]:
    """The values of the symbols in the formula of `kind`, for `size` bytes over `link`."""
    alpha, bandwidth = link.of(kind)
    return {"p": link.size, "V": size, "B": bandwidth, "a": alpha}


def collective_seconds(kind: str, link: AxisLink, size: Any) -> Any:
    """Seconds of one collective; moving over one rank, or within it, takes none."""
    if link.size == 1 or kind in FREE:
        return 0.0 * size
    return COLLECTIVES[kind](**collective_values(kind, link, size))


def send_seconds(link: Link, size: Any) -> Any:
    """Seconds of a message between two devices."""
    return COLLECTIVES["send"](V=size, B=link.bandwidth, a=link.alpha)


def operator_formula(flops: Any) -> Formula:
    """The roofline; an operator without FLOPs that count knows only memory."""
    return ROOFLINE if _any(flops) else MEMORY_BOUND


def operator_values(device: Device, dtype: Any, flops: Any, moved: Any) -> dict[str, Any]:
    """The values of the symbols in the formula of an operator."""
    return {
        "F": flops,
        "F_half": device.half(dtype),
        "P": device.peak(dtype),
        "M": moved,
        "M_half": device.half_bytes,
        "W": device.bandwidth,
        "t0": device.overhead,
    }


def operator_seconds(device: Device, dtype: Any, *, flops: Any, moved: Any) -> Any:
    """Seconds of one operator with `flops` that moves `moved` bytes; arrays give arrays."""
    return operator_formula(flops)(**operator_values(device, dtype, flops, moved))


def _any(flops: Any) -> bool:
    return bool(flops.any() if hasattr(flops, "any") else flops)
