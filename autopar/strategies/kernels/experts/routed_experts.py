"""Experts whose tokens are cut by the axis that cuts them: tokens go where their experts are.

Each rank sends a token once to every other rank that has some of its experts, with its choices and
their weights, and gets back the sum of what these give: two exchanges of tokens forward, and two
backward, of as many rows as the routing makes. No token is dropped.
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

DOWN = 3  # which of its tensors are the experts


class _Route(NamedTuple):
    """Which of one's own tokens go to each member, and how many come from each."""

    rows: tuple[Tensor, ...]
    comes: tuple[int, ...]

    def out(self, x: Tensor) -> AllToAll:
        """To where their experts are."""
        shapes = [(count, *x.shape[1:]) for count in self.comes]
        return AllToAll(tuple(x[rows] for rows in self.rows), shapes)

    def back(self, x: Tensor) -> AllToAll:
        """To where they came from."""
        shapes = [(len(rows), *x.shape[1:]) for rows in self.rows]
        return AllToAll(tuple(piece.contiguous() for piece in x.split(self.comes)), shapes)

    def added(self, tokens: int, pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """For each token the sum of what has come back."""
        like = pieces[0]
        total = torch.zeros(tokens, *like.shape[1:], dtype=dtype, device=like.device)
        for rows, piece in zip(self.rows, pieces):
            total.index_add_(0, rows, piece.to(dtype))
        return total


def routed_experts(
    group: KernelGroup, x: Tensor, chosen: Tensor, weights: Tensor, **arguments: Any
) -> Steps:
    """The same arguments as the operator, of the tokens and the experts at hand."""
    pieces = group.input(DOWN).pieces
    arguments["start"] = pieces[group.index][0]
    layer, own = Experts(**arguments), (as_rows(x), as_rows(chosen), as_rows(weights))
    route = yield from _route(group, own[1], pieces)
    coming = []
    for value in own:
        coming.append((yield route.out(value)))
    received = []
    for handle in coming:
        received.append(torch.cat((yield handle)))
    y, before = layer.forward(*received)
    returned = yield (yield route.back(y))
    total = route.added(len(own[0]), returned, sum_dtype(y, weights)).to(x.dtype)
    saved = (*received, *layer.learned, *before)
    return (
        (total.view(x.shape),),
        tuple(s for s in saved if s is not None),
        _Rest.of(layer, route, x, weights),
    )


class _Rest(NamedTuple):
    route: _Route
    about: tuple[Any, ...]  # that the layer is made of, besides its tensors
    there: tuple[bool, ...]  # which of its tensors there are
    shapes: tuple[torch.Size, ...]  # of x and weights

    @classmethod
    def of(cls, layer: Experts, route: _Route, x: Tensor, weights: Tensor) -> _Rest:
        there = tuple(tensor is not None for tensor in layer.learned)
        about = layer.inner, layer.columns, layer.start
        return cls(route, about, there, (x.shape, weights.shape))


def routed_experts_backward(
    group: KernelGroup, saved: Sequence[Tensor], rest: _Rest, grad: Tensor
) -> Steps:
    """The gradients of tokens go to where their experts are, those of what these read come back."""
    route, kept = rest.route, iter(saved)
    x, chosen, weights = (next(kept) for _ in range(3))
    layer = Experts(*(next(kept) if there else None for there in rest.there), *rest.about)  # type: ignore[arg-type]
    (x_shape, weights_shape), tokens = rest.shapes, grad.numel() // max(grad.shape[-1], 1)
    slopes = torch.cat((yield (yield route.out(as_rows(grad)))))
    of_x, of_weights, *others = layer.backward(x, chosen, weights, [*kept], slopes)
    coming = yield route.back(of_x)
    also_coming = yield route.back(of_weights)
    of_x = route.added(tokens, (yield coming), sum_dtype(of_x)).to(of_x.dtype)
    of_weights = route.added(tokens, (yield also_coming), sum_dtype(of_weights)).to(
        of_weights.dtype
    )
    learned = [found for found, there in zip(others, rest.there) if there]
    return of_x.view(x_shape), None, of_weights.view(weights_shape), *learned


def _route(group: KernelGroup, chosen: Tensor, pieces: Sequence[tuple[int, int]]) -> Steps:
    """Found from the choices, and from how many tokens each member sends to each; where no values
    are known, of routing that is balanced."""
    if chosen.is_meta:
        experts = sum(length for _, length in pieces)
        copies = copies_of(chosen.shape[-1], experts, group.count)
        each = math.ceil(len(chosen) * copies / group.count)
        return _Route((chosen.new_empty(each),) * group.count, (each,) * group.count)
    rows = tuple(
        ((chosen >= start) & (chosen < start + length)).any(-1).nonzero().squeeze(-1)
        for start, length in pieces
    )
    counts = torch.tensor([len(one) for one in rows], device=chosen.device)
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
    """Of routing that is balanced."""
    copies = copies_of(k, e, count)
    counts, tokens = ("all_gather", 8.0 * count * count), ("all_to_all", copies * inputs[0])
    choices, weights = (("all_to_all", copies * size) for size in inputs[1:3])
    forward = counts, tokens, choices, weights, ("all_to_all", copies * outputs[0])
    return CommVolume(forward, (("all_to_all", copies * outputs[0]), tokens, weights))


def copies_of(choices: int, experts: int, ranks: int) -> float:
    """On how many of the ranks a token has experts, if all sets of choices are alike."""
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
