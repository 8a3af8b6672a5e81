"""Chosen products: each row is multiplied by the matrix that it chooses.

    y[r] = weight[chosen[r]] x[r]        x [r i], weight [e o i], chosen [r], y [r o]

Rows are sorted by their choices, and each matrix multiplies its rows: none is padded. A rank has
the matrices from `start` on. Rows that choose another one are zero, so that a piece of the matrices
gives a term of the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.strategies.kernels.experts.expert_kernels import HALVES, products, products_of_rows


def _sorted(chosen: Tensor, count: int, start: int) -> tuple[Tensor, list[int]]:
    """Return the rows that choose one of `count` matrices, by matrix, and how many each has."""
    local = chosen - start
    local = torch.where((local >= 0) & (local < count), local, count)
    sizes = torch.bincount(local, minlength=count + 1).tolist()[:-1]
    return local.argsort(stable=True)[: sum(sizes)], sizes


def _run(x: Tensor, weight: Tensor, chosen: Tensor, start: int = 0) -> Tensor:
    out = _fake(x, weight, chosen)
    if x.is_meta:
        return out
    order, sizes = _sorted(chosen, len(weight), start)
    out.zero_()[order] = products(x[order], weight.mT, sizes)
    return out


def _fake(x: Tensor, weight: Tensor, chosen: Tensor, start: int = 0) -> Tensor:
    if x.dtype != weight.dtype:
        raise RuntimeError(f"rows and matrices are of one dtype, not {x.dtype} and {weight.dtype}")
    return x.new_empty(len(x), weight.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, chosen, ctx.start = inputs
    of_x, of_weight, *_ = ctx.needs_input_grad
    ctx.count = len(weight)
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None, chosen)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, chosen = ctx.saved_tensors
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = CHOSEN_PRODUCTS(grad, weight.mT, chosen, ctx.start)
    if ctx.needs_input_grad[1]:
        of_weight = _CHOSEN_SUMS(grad, x, chosen, ctx.count, ctx.start)
    return of_x, of_weight, None, None


# Sums over the rows that choose a matrix, of left times right rows: [e o i] of [r o] and [r i].


def _run_sums(left: Tensor, right: Tensor, chosen: Tensor, count: int, start: int) -> Tensor:
    if left.is_meta:
        return _fake_sums(left, right, chosen, count, start)
    order, sizes = _sorted(chosen, count, start)
    return products_of_rows(left[order], right[order], sizes)


def _fake_sums(left: Tensor, right: Tensor, chosen: Tensor, count: int, start: int) -> Tensor:
    return left.new_empty(count, left.shape[1], right.shape[1])


def _keep_sums(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    left, right, chosen, _, ctx.start = inputs
    ctx.save_for_backward(left, right, chosen)


def _gradients_of_sums(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    left, right, chosen = ctx.saved_tensors
    of_left = CHOSEN_PRODUCTS(right, grad, chosen, ctx.start)
    return of_left, CHOSEN_PRODUCTS(left, grad.mT, chosen, ctx.start), None, None, None


def _in_few_digits(x: Tensor, weight: Tensor, chosen: Tensor, start: int = 0) -> Tensor:
    """Run under autocast, whose dtype products take."""
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight = (y.to(dtype) if y.dtype in (*HALVES, torch.float32) else y for y in (x, weight))
    with torch.autocast(x.device.type, enabled=False):
        return CHOSEN_PRODUCTS(x, weight, chosen, start)


_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("chosen_products(Tensor x, Tensor weight, Tensor chosen, int start=0) -> Tensor")
_library.define(
    "chosen_sums(Tensor left, Tensor right, Tensor chosen, int count, int start) -> Tensor"
)
for _name, _function, _without, _backward, _setup in (
    ("chosen_products", _run, _fake, _gradients, _keep),
    ("chosen_sums", _run_sums, _fake_sums, _gradients_of_sums, _keep_sums),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{_name}", _without, lib=_library)
    torch.library.register_autograd(
        f"autopar::{_name}", _backward, setup_context=_setup, lib=_library
    )
for _kind in ("AutocastCPU", "AutocastCUDA"):
    _library.impl("chosen_products", _in_few_digits, _kind)
CHOSEN_PRODUCTS = torch.ops.autopar.chosen_products.default
_CHOSEN_SUMS = torch.ops.autopar.chosen_sums.default
