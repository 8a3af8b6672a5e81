"""Routed experts (expert parallel): one axis cuts tokens and experts, and tokens travel.

Each rank sends a token once to every other rank that has some of its experts, with its choices and
their weights, and gets back the sum of their results: two exchanges of tokens forward, and two
backward, of as many rows as the routing needs. Their sizes are exchanged once, with the counts of
all experts, from which each rank knows all that it computes. No token is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.collectives.joint_kernels import (
    AllToAll,
    CommVolume,
    JointKernel,
    KernelGroup,
    Steps,
)
from autopar.layout import chunk
from autopar.strategies.kernels.experts.expert_kernels import ByExpert, Experts, as_rows, sum_dtype

DOWN = 3  # the number of the first tensor of the experts


class _Route(NamedTuple):
    """The local tokens that go to each member, and how many come from each."""

    rows: Tensor  # of the local tokens, by member
    goes: Sequence[int]  # rows to each member
    comes: Sequence[int]  # rows from each
    sizes: Sequence[int]  # choices of each local expert, of the rows that come

    def out(self, x: Tensor) -> AllToAll:
        """Return the exchange that sends rows to their experts."""
        shapes = [(count, *x.shape[1:]) for count in self.comes]
        return AllToAll(x[self.rows].split(self.goes), shapes, is_joined=True)

    def back(self, x: Tensor) -> AllToAll:
        """Return the exchange that sends rows back to their tokens."""
        shapes = [(count, *x.shape[1:]) for count in self.goes]
        return AllToAll(x.contiguous().split(self.comes), shapes, is_joined=True)

    def added(self, tokens: int, rows: Tensor) -> Tensor:
        """Return for each token the sum of its rows that came back."""
        total = rows.new_zeros(tokens, *rows.shape[1:])
        return total.index_add_(0, self.rows, rows)


class _Packed(NamedTuple):
    """The columns of tokens, weights and choices that travel together: all, if dtypes allow it."""

    dtype: torch.dtype  # of weights and choices
    is_one: bool  # tokens are of this dtype, too

    @classmethod
    def of(cls, x: Tensor, weights: Tensor) -> _Packed:
        dtype = sum_dtype(weights)  # it holds the numbers of experts exactly
        return cls(dtype, dtype == x.dtype)

    def join(self, x: Tensor, *others: Tensor) -> list[Tensor]:
        """Return the tensors that travel."""
        beside = [other.to(self.dtype) for other in others]
        if self.is_one:
            return [torch.cat([x, *beside], -1)]
        return [x, torch.cat(beside, -1)]

    def split(self, packed: Sequence[Tensor], *widths: int) -> list[Tensor]:
        """Return the columns of what has come."""
        if self.is_one:
            return list(packed[0].split(widths, -1))
        return [packed[0], *packed[1].split(widths[1:], -1)]


def routed_experts(
    group: KernelGroup, x: Tensor, chosen: Tensor, weights: Tensor, **arguments: Any
) -> Steps:
    """Run the operator on the local tokens, through the experts of all members."""
    pieces = group.input(DOWN).pieces
    arguments["start"] = pieces[group.index][0]
    layer, (rows, choices, factors) = Experts(**arguments), map(as_rows, (x, chosen, weights))
    route = yield from _route(group, choices, pieces)
    packing, k = _Packed.of(x, weights), choices.shape[-1]
    coming = []
    for value in packing.join(rows, factors, choices):
        coming.append((yield route.out(value)))
    arrived: list[Tensor] = []
    for handle in coming:
        arrived += yield handle
    x_here, weights_here, chosen_here = packing.split(arrived, rows.shape[-1], k, k)
    by_expert = layer.routes(chosen_here.to(chosen.dtype), route.sizes)
    y, before = layer.forward(x_here, weights_here, by_expert)
    (returned,) = yield (yield route.back(y.to(sum_dtype(y, weights))))
    total = route.added(len(rows), returned).to(x.dtype)
    saved = (*arrived, by_expert.order, *layer.learned, *before)
    return (
        (total.view(x.shape),),
        tuple(s for s in saved if s is not None),
        _Rest.of(layer, route, packing, x, weights),
    )


class _Rest(NamedTuple):
    route: _Route
    packing: _Packed
    options: tuple[Any, ...]  # the layer's arguments besides its tensors
    is_present: tuple[bool, ...]  # which of its tensors exist
    shapes: tuple[torch.Size, ...]  # of x and weights
    dtypes: tuple[torch.dtype, ...]  # of x and weights

    @classmethod
    def of(
        cls, layer: Experts, route: _Route, packing: _Packed, x: Tensor, weights: Tensor
    ) -> _Rest:
        is_present = tuple(tensor is not None for tensor in layer.learned)
        options = (layer.inner, layer.columns, layer.start)
        shapes, dtypes = (x.shape, weights.shape), (x.dtype, weights.dtype)
        return cls(route, packing, options, is_present, shapes, dtypes)


def routed_experts_backward(
    group: KernelGroup, saved: Sequence[Tensor], rest: _Rest, grad: Tensor
) -> Steps:
    """Return the gradients: those of outputs go to the experts, those of inputs come back."""
    route, packing, tensors = rest.route, rest.packing, iter(saved)
    (x_shape, weights_shape), tokens = rest.shapes, grad.numel() // max(grad.shape[-1], 1)
    width, k = x_shape[-1], weights_shape[-1]
    arrived = [next(tensors) for _ in range(1 if packing.is_one else 2)]
    order = next(tensors)
    learned = [next(tensors) if exists else None for exists in rest.is_present]
    layer = Experts(*learned, *rest.options)  # type: ignore[arg-type]
    x, weights, _ = packing.split(arrived, width, k, k)
    (slopes,) = yield (yield route.out(as_rows(grad)))
    by_expert = ByExpert(order, route.sizes, k)
    of_x, of_weights, *others = layer.backward(x, weights, by_expert, [*tensors], slopes)
    coming = []
    for value in packing.join(of_x, of_weights):
        coming.append((yield route.back(value.to(sum_dtype(value)))))
    returned: list[Tensor] = []
    for handle in coming:
        returned += [route.added(tokens, rows) for rows in (yield handle)]
    of_x, of_weights = (
        part.to(dtype) for part, dtype in zip(packing.split(returned, width, k), rest.dtypes)
    )
    of_learned = [slope for slope, exists in zip(others, rest.is_present) if exists]
    return of_x.reshape(x_shape), None, of_weights.reshape(weights_shape), *of_learned


def _route(group: KernelGroup, chosen: Tensor, pieces: Sequence[tuple[int, int]]) -> Steps:
    """Return the route of the local tokens, by their choices and the counts of all members.

    On meta tensors it is that of balanced routing. Each member sends each other the number of rows,
    and of the choices of each expert there.
    """
    members, k = group.count, chosen.shape[-1]
    experts, most = sum(length for _, length in pieces), max(length for _, length in pieces)
    _, local = pieces[group.index]
    if chosen.is_meta:
        copies = copies_of(k, experts, members)
        each = math.ceil(len(chosen) * copies / members)
        sizes = [chunk(each * members * k, local, at)[1] for at in range(local)]
        rows = chosen.new_empty(each * members)
        return _Route(rows, (each,) * members, (each,) * members, sizes)
    # Numbers count from the first expert here; others may have experts before, between and after.
    first, end = min(start for start, _ in pieces), max(start + length for start, length in pieces)
    owners, absent = [members] * (end - first + 1), end - first + 1
    for member, (start, length) in enumerate(pieces):
        owners[start - first : start - first + length] = [member] * length
    places = [
        [start - first + at if at < n else absent for at in range(most)] for start, n in pieces
    ]
    numbers = torch.where((chosen >= first) & (chosen < end), chosen - first, end - first)
    mask = torch.zeros(len(chosen), members + 1, dtype=torch.bool, device=chosen.device)
    owner_of = torch.tensor(owners, device=chosen.device)
    mask = mask.scatter_(1, owner_of[numbers], True)[:, :members]
    rows = mask.T.nonzero()[:, 1]
    by_expert = torch.bincount(numbers.reshape(-1), minlength=absent + 1)
    counts = by_expert[torch.tensor(places, device=chosen.device)]
    sent = torch.cat([mask.sum(0)[:, None], counts], 1)
    (received,) = yield (yield AllToAll(sent.split(1), [(1, most + 1)] * members, is_joined=True))
    lists = torch.cat([sent[:, :1], received], 1).tolist()  # the only wait for the device
    goes, comes = [row[0] for row in lists], [row[1] for row in lists]
    sizes = [sum(row[2 + at] for row in lists) for at in range(local)]
    return _Route(rows, goes, comes, sizes)


def _traffic(
    count: int,
    inputs: Sequence[float],
    outputs: Sequence[float],
    needs: Sequence[bool],
    *,
    k: int,
    e: int,
) -> CommVolume:
    """Return the traffic of balanced routing."""
    copies = copies_of(k, e, count)
    counts, tokens = ("all_to_all", 8.0 * (count + e)), ("all_to_all", copies * inputs[0])
    choices, weights = (("all_to_all", copies * size) for size in inputs[1:3])
    forward = counts, tokens, choices, weights, ("all_to_all", copies * outputs[0])
    return CommVolume(forward, (("all_to_all", copies * outputs[0]), tokens, weights))


def copies_of(choices: int, experts: int, ranks: int) -> float:
    """Return on how many ranks a token has experts, if all sets of choices are as likely."""
    choices = min(choices, experts)  # an expert may be chosen several times
    elsewhere = max(experts - experts // ranks, 0)
    return ranks * (1 - math.comb(elsewhere, choices) / math.comb(experts, choices))


ROUTED = JointKernel(
    routed_experts,
    routed_experts_backward,
    _traffic,
    assumes="of routing that is balanced",
    told=("k", "e"),
)
