"""Formulas for the seconds of operators and collectives.

>>> round(COLLECTIVES["all_reduce"](p=8, V=1e9, B=100e9, a=0), 6)
0.0175
>>> from autopar.cluster import Cluster
>>> device = Cluster.preset("dgx-h100").device
>>> values = operator_values(device, "bf16", flops=2 * 4096**3, read=2 * 2 * 4096**2)
>>> round(operator_formula(values["F"])(**values) * 1e6)
206

V is the larger of the bytes that one rank holds before and after the collective: of an all-gather
the gathered tensor, of a reduce-scatter the tensor that is scattered, of an all-to-all the piece.
"""

from __future__ import annotations

from typing import Any

from sympy import Max, Min, Symbol, log

from autopar.cluster import AxisLink, Device
from autopar.cluster.collective_counts import KINDS, latency_count, volume_count
from autopar.collectives.redistribution import FREE
from autopar.cost.formula import Formula

p, V, B, a = (Symbol(name) for name in ("p", "V", "B", "a"))
F, F_half, P = (Symbol(name) for name in ("F", "F_half", "P"))
M, M_half, N, W, t0 = (Symbol(name) for name in ("M", "M_half", "N", "W", "t0"))
Q, X = (Symbol(name) for name in ("Q", "X"))

# What the symbols of all formulas here are.
SYMBOLS = {
    "a": "latency of a link, s",
    "B": "bytes/s of a link",
    "p": "ranks",
    "V": "bytes, the larger of what a rank holds before and after",
    "F": "FLOPs",
    "P": "FLOP/s",
    "F_half": "FLOPs of work that runs at half of that rate",
    "M": "bytes that are read",
    "N": "bytes that are written",
    "S": "bytes of passes in between",
    "W": "bytes/s of memory",
    "M_half": "bytes of work that runs at half of that rate",
    "Q": "bytes that caches hold",
    "X": "seconds for each byte that they do not hold",
    "t0": "seconds to start",
    "C": "seconds of a collective by itself",
    "o": "part of its speed that computing has beside it",
    "K": "seconds of what is computed beside it",
}


def _log2(number: Any) -> Any:
    return log(number, 2)


COLLECTIVES = {
    kind: Formula(kind, volume_count(kind, p, _log2) * V / B + latency_count(kind, p, _log2) * a)
    for kind in KINDS
}

# Roofline: limited by arithmetic or by memory, whichever takes longer. What is read comes beside
# the arithmetic. What is written goes after it: a tile of a product is written when it has all its
# sums, and so a product of few sums for each result is a slow one.
ROOFLINE = Formula("operator", Max((F + F_half) / P, (M + M_half) / W) + N / W + t0)
S = Symbol("S")  # of intermediate results, which come one after another
PASSES = Formula("operator", Max((F + F_half) / P, (M + M_half) / W) + (N + S) / W + t0)
# Cores that take in their matrices before they multiply.
# At most twice as long as they multiply: of very few rows matrices are multiplied as they are read.
_FAR = Min(2 * F / P, Max(0, M + N - Q) * X)
FAR = Formula("operator", ROOFLINE.expression + _FAR)
FAR_PASSES = Formula("operator", PASSES.expression + _FAR)
MEMORY_BOUND = Formula("operator", (M + N + M_half) / W + t0)

# What computing hides of a collective, of what there is to compute that does not wait for it.
C, o, K = (Symbol(name) for name in ("C", "o", "K"))
HIDDEN = Formula("hidden", Min(o * C, K))


def collective_values(kind: str, link: AxisLink, size: Any) -> dict[str, Any]:
    """Return the values of the symbols in the formula of `kind`, for `size` bytes over `link`."""
    alpha, bandwidth = link.of(kind)
    return {"p": link.size, "V": size, "B": bandwidth, "a": alpha}


def collective_seconds(kind: str, link: AxisLink, size: Any) -> Any:
    """Return the seconds of one collective; 0 over a single rank."""
    if link.size == 1 or kind in FREE:
        return 0.0 * size
    return COLLECTIVES[kind](**collective_values(kind, link, size))


def operator_formula(flops: Any, between: Any = 0.0, *, has_far: bool = False) -> Formula:
    """Return the roofline formula; without FLOPs only memory counts. `between`: bytes of passes
    between reading and writing; `has_far`: matrices are taken in before they are multiplied."""
    if _is_nonzero(between):
        return FAR_PASSES if has_far else PASSES
    if has_far:
        return FAR
    return ROOFLINE if _is_nonzero(flops) else MEMORY_BOUND


def operator_values(
    device: Device,
    dtype: Any,
    flops: Any,
    read: Any,
    written: Any = 0.0,
    *,
    between: Any = 0.0,
    products: int = 1,
) -> dict[str, Any]:
    """Return the values of the symbols in the formula of an operator."""
    return {
        "F": flops,
        "F_half": device.half(dtype),
        "P": device.peak(dtype),
        "M": read,
        "N": written,
        "S": between,
        "M_half": device.half_bytes,
        "W": device.throughput,
        "Q": device.near_bytes * products,
        "X": device.far_seconds,
        "t0": device.overhead,
    }


def _is_nonzero(flops: Any) -> bool:
    return bool(flops.any() if hasattr(flops, "any") else flops)
