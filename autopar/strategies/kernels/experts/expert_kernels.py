"""Experts: each token goes through those networks of two layers that a router chose for it.

    y[t] = sum over its choices c of  weights[t, c] * down[e] inner(gate[e] x[t], up[e] x[t])
    where  e = chosen[t, c]

    y = experts(x, chosen, weights, down, gate, up, gate_bias, up_bias, "mul(silu(gate), up)")

x is [... h]; chosen and weights [... k]; down [e h f], gate and up [e f h], biases [e f]; `inner`
is an expression of elements. Gate and up may be one, [e 2f h]: its `columns` are then "halves" or
"interleaved", else "apart". Tokens are sorted by expert: none is dropped or padded. A rank has the
experts from `start` on, whose results are a term of the sum. Backward keeps the rows before `inner`
alone: the gradient of a weight is the product of `inner` with its gradient, summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from autopar._torch.operators import below_autograd
from autopar.layout import chunk
from autopar.strategies.kernels.expressions import evaluate

GATED = "mul(silu(gate), up)"
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ByExpert:
    """The choices of some experts, sorted by expert. Choices are numbered over tokens and k."""

    order: Tensor
    sizes: Sequence[int]  # how many each expert has
    k: int

    @cached_property
    def tokens(self) -> Tensor:
        """Return the token of each choice."""
        return self.order // self.k


@dataclass(frozen=True)
class Experts:
    """The experts of one rank."""

    down: Tensor
    gate: Tensor
    up: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    inner: str
    columns: str = "apart"
    start: int = 0

    @property
    def count(self) -> int:
        return self.gate.shape[0]

    @property
    def layers(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the matrix and bias of each layer that reads the token: one, or two."""
        first = [(self.gate, self.gate_bias)]
        return first if self.up is None else [*first, (self.up, self.up_bias)]

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """Return the learned tensors in the order of the operator's arguments."""
        return self.down, self.gate, self.up, self.gate_bias, self.up_bias

    def routes(self, chosen: Tensor, sizes: Sequence[int] | None = None) -> ByExpert:
        """Return the choices of these experts, sorted by expert.

        `sizes`: how many each has; None: they are counted, or on meta tensors all have as many.
        """
        k = chosen.shape[-1]
        if chosen.is_meta:
            count = chosen.numel()
            sizes = sizes or [chunk(count, self.count, at)[1] for at in range(self.count)]
            return ByExpert(chosen.new_empty(sum(sizes), dtype=torch.long), sizes, k)
        local = chosen.reshape(-1) - self.start
        local = torch.where((local >= 0) & (local < self.count), local, self.count)
        if sizes is None:
            sizes = torch.bincount(local, minlength=self.count + 1).tolist()[:-1]
        return ByExpert(local.argsort(stable=True)[: sum(sizes)], sizes, k)

    def forward(
        self, x: Tensor, weights: Tensor, by_expert: ByExpert
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the share of these experts in y, and their rows before `inner`."""
        order, sizes, tokens = by_expert.order, by_expert.sizes, by_expert.tokens
        rows = x[tokens]
        before = [products(rows, matrices.mT, sizes, bias) for matrices, bias in self.layers]
        out = products(self.evaluated(before), self.down.mT, sizes)
        dtype = sum_dtype(out, weights)
        out = out.to(dtype) * weights.reshape(-1, 1)[order]
        y = out.new_zeros(len(x), out.shape[-1]).index_add(0, tokens, out)
        return y.to(x.dtype), before

    def evaluated(self, before: Sequence[Tensor]) -> Tensor:
        """Return the rows after `inner`."""
        parts = tuple(before)
        if self.columns == "halves":
            parts = before[0].chunk(2, -1)
        elif self.columns == "interleaved":
            parts = before[0][:, ::2], before[0][:, 1::2]
        return evaluate(self.inner, **dict(zip(("gate", "up"), parts)))

    def backward(
        self,
        x: Tensor,
        weights: Tensor,
        by_expert: ByExpert,
        before: Sequence[Tensor],
        grad: Tensor,
    ) -> tuple[Any, ...]:
        """Return the gradients of x, weights, and all learned tensors: None of absent ones."""
        order, sizes, tokens = by_expert.order, by_expert.sizes, by_expert.tokens
        rows, slopes = x[tokens], grad[tokens]
        dtype = sum_dtype(grad, weights)
        factors = weights.reshape(-1, 1)[order].to(dtype)
        inner_slopes = products(slopes, self.down, sizes)
        with torch.enable_grad():
            leaves = [b.detach().requires_grad_() for b in before]
            inner = self.evaluated(leaves)
        of_weights = (inner_slopes.to(dtype) * inner.detach()).sum(-1)
        of_inner = (inner_slopes * factors).to(inner.dtype)
        of_before = torch.autograd.grad(inner, leaves, of_inner, materialize_grads=True)
        of_down = products_of_rows((slopes * factors).to(x.dtype), inner.detach(), sizes)
        of_x = x.new_zeros(x.shape, dtype=sum_dtype(x))
        of_layers: list[tuple[Tensor, Tensor | None]] = []
        for slope, (matrices, bias) in zip(of_before, self.layers):
            of_x.index_add_(0, tokens, products(slope, matrices, sizes).to(of_x.dtype))
            of_bias = None if bias is None else _sums_of_rows(slope, sizes)
            of_layers.append((products_of_rows(slope, rows, sizes), of_bias))
        of_layers += [(None, None)] * (2 - len(of_layers))  # type: ignore[list-item]
        of_all_weights = weights.new_zeros(weights.numel(), dtype=dtype)
        of_all_weights[order] = of_weights
        (of_gate, of_gate_bias), (of_up, of_up_bias) = of_layers
        return (
            of_x.to(x.dtype),
            of_all_weights.view(weights.shape).to(weights.dtype),
            *(of_down, of_gate, of_up, of_gate_bias, of_up_bias),
        )


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    down: Tensor,
    gate: Tensor,
    up: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    inner: str = GATED,
    columns: str = "apart",
) -> Tensor:
    """Return each token passed through the experts that are chosen for it."""
    return EXPERTS(x, chosen, weights, down, gate, up, gate_bias, up_bias, inner, columns)


def as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def sum_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which terms of these tensors are added."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def products(
    rows: Tensor, matrices: Tensor, sizes: Sequence[int], bias: Tensor | None = None
) -> Tensor:
    """Return the rows of each expert times its matrix, [e, i, o]."""
    biases = [None] * len(sizes) if bias is None else bias.unbind()
    if bias is None and _has_grouped(rows, matrices):
        return grouped_mm(rows, matrices, offs=_ends(sizes))
    calls = [*zip(rows.split(sizes), matrices.unbind(), biases)] if sizes else []
    if not calls:
        return rows.new_zeros(0, matrices.shape[-1])
    if torch.is_grad_enabled():
        return torch.cat([_product(*call) for call in calls])
    out = rows.new_empty(len(rows), matrices.shape[-1])
    for call, into in zip(calls, out.split(sizes)):
        if len(into):
            _product(*call, out=into)
    return out


def _product(
    rows: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    if bias is None:
        return torch.mm(rows, matrix, out=out)
    return torch.addmm(bias, rows, matrix, out=out)


def products_of_rows(left: Tensor, right: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return for each expert its left rows, transposed, times its right rows, [e, o, i]."""
    if _has_grouped(left, right) and sizes:
        return grouped_mm(left.mT, right, offs=_ends(sizes))
    pairs = zip(left.split(sizes), right.split(sizes)) if sizes else ()
    terms = [rows.mT @ others for rows, others in pairs]
    return torch.stack(terms) if terms else left.new_zeros(0, left.shape[-1], right.shape[-1])


def _has_grouped(left: Tensor, right: Tensor) -> bool:
    """Return whether one call multiplies all groups: on CPUs, of rows of whole 16 bytes.

    Rows of other results would be kept with their padding.
    """
    are_cpu = left.is_cpu and right.is_cpu and len(right) > 0
    is_known = left.dtype == right.dtype and left.dtype in (*HALVES, torch.float32)
    if not are_cpu or not is_known or torch.is_grad_enabled():
        return False
    steps = [step for x in (left, right) for step in x.stride() if step != 1]
    steps.append(right.shape[-1])
    are_dense = 1 in left.stride()[-2:] and 1 in right.stride()[-2:]
    return are_dense and all(step and step * left.itemsize % 16 == 0 for step in steps)


def _ends(sizes: Sequence[int]) -> Tensor:
    """Return the number of the row at which each expert ends."""
    return torch.tensor([*accumulate(sizes)], dtype=torch.int32)


def _sums_of_rows(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return for each expert the sum of its rows."""
    sums = [piece.sum(0) for piece in rows.split(sizes)] if sizes else []
    return torch.stack(sums) if sums else rows.new_zeros(0, rows.shape[-1])


# The operator: one call in a captured graph, whose program cannot look at values.


def _run(x: Tensor, chosen: Tensor, weights: Tensor, *arguments: Any) -> Tensor:
    return _forward(Experts(*arguments), x, chosen, weights)[0]


def _forward(
    layer: Experts, x: Tensor, chosen: Tensor, weights: Tensor
) -> tuple[Tensor, list[Tensor]]:
    y, before = layer.forward(as_rows(x), as_rows(weights), layer.routes(as_rows(chosen)))
    return y.view(x.shape), before


def _fake(x: Tensor, chosen: Tensor, weights: Tensor, down: Tensor, *_: Any) -> Tensor:
    if x.dtype != down.dtype:
        raise RuntimeError(f"tokens and experts are of one dtype, not {x.dtype} and {down.dtype}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, weights: Tensor, *arguments: Any) -> Tensor:
        layer = Experts(*arguments)
        ctx.rest = layer.inner, layer.columns, layer.start
        if type(x) not in (Tensor, torch.nn.Parameter):  # nothing can be computed
            with below_autograd():
                return EXPERTS(x, chosen, weights, *arguments)
        y, before = _forward(layer, x, chosen, weights)
        ctx.save_for_backward(x, chosen, weights, *layer.learned, *before)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, chosen, weights, *learned = ctx.saved_tensors
        layer = Experts(*learned[:5], *ctx.rest)
        if torch.is_grad_enabled():  # gradients that have gradients of their own
            leaves = {0: x, 2: weights} | dict(enumerate(learned[:5], 3))
            leaves = {i: v for i, v in leaves.items() if v is not None and ctx.needs_input_grad[i]}
            y = _run(x, chosen, weights, *learned[:5], *ctx.rest)
            gradients = torch.autograd.grad(y, list(leaves.values()), grad, create_graph=True)
            by_index = dict(zip(leaves, gradients))
            return tuple(by_index.get(index) for index in range(11))
        of_x, of_weights, *others = layer.backward(
            as_rows(x),
            as_rows(weights),
            layer.routes(as_rows(chosen)),
            learned[5:],
            as_rows(grad),
        )
        return of_x.view(x.shape), None, of_weights.view(weights.shape), *others, None, None, None


def _differentiable(*arguments: Any) -> Tensor:
    if torch.is_grad_enabled() and any(
        value.requires_grad for value in arguments if isinstance(value, Tensor)
    ):
        return _Recorded.apply(*arguments)
    with below_autograd():
        return EXPERTS(*arguments)


def _in_few_digits(*arguments: Any) -> Tensor:
    """Run under autocast, whose dtype products and their inputs take."""
    kind = arguments[0].device.type
    dtype = torch.get_autocast_dtype(kind)

    def cast(value: Any) -> Any:
        is_cast = isinstance(value, Tensor) and value.dtype in (*HALVES, torch.float32)
        return value.to(dtype) if is_cast else value

    with torch.autocast(kind, enabled=False):
        return EXPERTS(*map(cast, arguments))


_library = torch.library.Library("autopar", "FRAGMENT")
_library.define(
    "experts(Tensor x, Tensor chosen, Tensor weights, Tensor down, Tensor gate, Tensor? up, "
    "Tensor? gate_bias, Tensor? up_bias, str inner, str columns='apart', int start=0) -> Tensor"
)
_library.impl("experts", _run, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::experts", _fake, lib=_library)
_library.impl("experts", _differentiable, "Autograd")
for _kind in ("AutocastCPU", "AutocastCUDA"):
    _library.impl("experts", _in_few_digits, _kind)
EXPERTS = torch.ops.autopar.experts.default
