"""Routed experts (expert parallel): one axis cuts tokens and experts, and tokens travel.

Each rank sends a token once to every other rank that has some of its experts, with its choices and
their weights, and gets back the sum of their results: two exchanges of tokens forward, and two
backward, of as many rows as the routing needs. No token is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.collectives.joint_kernels import (
    AllGather,
    AllToAll,
    CommVolume,
    JointKernel,
    KernelGroup,
    Steps,
)
from autopar.strategies.kernels.experts.expert_kernels import Experts, as_rows, sum_dtype

DOWN = 3  # the number of the first tensor of the experts


class _Route(NamedTuple):
    """The local tokens that go to each member, and how many come from each."""

    rows: tuple[Tensor, ...]
    comes: tuple[int, ...]

    def out(self, x: Tensor) -> AllToAll:
        """Return the exchange that sends rows to their experts."""
        shapes = [(count, *x.shape[1:]) for count in self.comes]
        return AllToAll(tuple(x[rows] for rows in self.rows), shapes)

    def back(self, x: Tensor) -> AllToAll:
        """Return the exchange that sends rows back to their tokens."""
        shapes = [(len(rows), *x.shape[1:]) for rows in self.rows]
        return AllToAll(tuple(piece.contiguous() for piece in x.split(self.comes)), shapes)

    def added(self, tokens: int, pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return for each token the sum of its rows that came back."""
        like = pieces[0]
        total = torch.zeros(tokens, *like.shape[1:], dtype=dtype, device=like.device)
        for rows, piece in zip(self.rows, pieces):
            total.index_add_(0, rows, piece.to(dtype))
        return total


def routed_experts(
    group: KernelGroup, x: Tensor, chosen: Tensor, weights: Tensor, **arguments: Any
) -> Steps:
    """Run the operator on the local tokens, through the experts of all members."""
    pieces = group.input(DOWN).pieces
    arguments["start"] = pieces[group.index][0]
    layer, local = Experts(**arguments), [as_rows(x), as_rows(chosen), as_rows(weights)]
    route = yield from _route(group, local[1], pieces)
    coming = []
    for value in local:
        coming.append((yield route.out(value)))
    received = []
    for handle in coming:
        received.append(torch.cat((yield handle)))
    y, before = layer.forward(*received)
    returned = yield (yield route.back(y))
    total = route.added(len(local[0]), returned, sum_dtype(y, weights)).to(x.dtype)
    saved = (*received, *layer.learned, *before)
    return (
        (total.view(x.shape),),
        tuple(s for s in saved if s is not None),
        _Rest.of(layer, route, x, weights),
    )


class _Rest(NamedTuple):
    route: _Route
    options: tuple[Any, ...]  # the layer's arguments besides its tensors
    is_present: tuple[bool, ...]  # which of its tensors exist
    shapes: tuple[torch.Size, ...]  # of x and weights

    @classmethod
    def of(cls, layer: Experts, route: _Route, x: Tensor, weights: Tensor) -> _Rest:
        is_present = tuple(tensor is not None for tensor in layer.learned)
        options = (layer.inner, layer.columns, layer.start)
        return cls(route, options, is_present, (x.shape, weights.shape))


def routed_experts_backward(
    group: KernelGroup, saved: Sequence[Tensor], rest: _Rest, grad: Tensor
) -> Steps:
    """Return the gradients: those of outputs go to the experts, those of inputs come back."""
    route, tensors = rest.route, iter(saved)
    x, chosen, weights = (next(tensors) for _ in range(3))
    learned = [next(tensors) if exists else None for exists in rest.is_present]
    layer = Experts(*learned, *rest.options)  # type: ignore[arg-type]
    (x_shape, weights_shape), tokens = rest.shapes, grad.numel() // max(grad.shape[-1], 1)
    slopes = torch.cat((yield (yield route.out(as_rows(grad)))))
    of_x, of_weights, *others = layer.backward(x, chosen, weights, [*tensors], slopes)
    coming = yield route.back(of_x)
    also_coming = yield route.back(of_weights)
    of_x = route.added(tokens, (yield coming), sum_dtype(of_x)).to(of_x.dtype)
    of_weights = route.added(tokens, (yield also_coming), sum_dtype(of_weights)).to(
        of_weights.dtype
    )
    of_learned = [slope for slope, exists in zip(others, rest.is_present) if exists]
    return of_x.view(x_shape), None, of_weights.view(weights_shape), *of_learned


def _route(group: KernelGroup, chosen: Tensor, pieces: Sequence[tuple[int, int]]) -> Steps:
    """Return the route of the local tokens, by the choices and the counts of all members.

    On meta tensors it is that of balanced routing.
    """
    if chosen.is_meta:
        experts = sum(length for _, length in pieces)
        copies = copies_of(chosen.shape[-1], experts, group.count)
        each = math.ceil(len(chosen) * copies / group.count)
        return _Route((chosen.new_empty(each),) * group.count, (each,) * group.count)
    rows = tuple(
        ((chosen >= start) & (chosen < start + length)).any(-1).nonzero().squeeze(-1)
        for start, length in pieces
    )
    counts = torch.tensor([len(indices) for indices in rows], device=chosen.device)
    sent = yield (yield AllGather(counts))
    comes = torch.stack(sent)[:, group.index].tolist()
    return _Route(rows, tuple(comes))


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
    counts, tokens = ("all_gather", 8.0 * count * count), ("all_to_all", copies * inputs[0])
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
