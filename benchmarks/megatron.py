"""Tensor parallelism written by hand, as in the Megatron paper: local layers, and f and g.

f stands before the columns: identity forward, all-reduce backward. g stands behind the rows:
all-reduce forward, identity backward. Both sum in place.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Enter(torch.autograd.Function):
    """f."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Columns(nn.Module):
    """This rank's columns of a linear layer."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(world, 0)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(world, 0)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Enter.apply(x), self.weight, self.bias)


class Rows(nn.Module):
    """This rank's rows of a linear layer, the bias added after the sum."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return Leave.apply(F.linear(x, self.weight)) + self.bias


def by_hand(model: nn.Module) -> nn.Module:
    """A copy of the GPT with the linear layers of its blocks cut."""
    model = copy.deepcopy(model)
    for block in model.blocks:  # type: ignore[union-attr]
        block.qkv, block.up = Columns(block.qkv), Columns(block.up)
        block.out, block.down = Rows(block.out), Rows(block.down)
    return model
