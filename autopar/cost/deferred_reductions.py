"""Reductions of activation gradients that run beside the gradients of weights.

Where the backward of a movement is a reduction, and only linears read the movement's result, the
gradients of their weights do not wait for it. `passes/linear_reductions.py` computes them
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from autopar.cost.gather_groups import numbered_modules
from autopar.strategies.node_info import info
from autopar.strategies.rule import Facts

# Movements whose backward is started by itself (`collectives/deferred_linears.py`).
STARTED_KINDS = ("identity", "all_reduce", "all_gather")

LINEAR = ["input", "weight", "bias"]
aten = torch.ops.aten


def linears_after(movement: fx.Node) -> list[fx.Node]:
    """Return the linears whose weight gradients hide the backward of a movement; none where that is
    no reduction, or where others read its result."""
    moved, readers = info(movement).movement, list(movement.users)
    if moved is None or not moved.pending or not info(movement).differentiable:
        return []
    if not all(_is_linear_of(reader, movement) for reader in readers):
        return []
    learns = any(info(weight_of(reader)).differentiable for reader in readers)
    return readers if learns else []


def mergeable_linears(calls: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Return groups of linears, in order, that each become one call with the movement before them
    in an eager program. They are of one block, all their inputs exist before any output is read,
    and no rank exchanges messages in them."""
    groups = []
    for node in calls:
        movement = info(node).movement
        if (
            movement is None
            or movement.kind not in STARTED_KINDS
            or not (linears := linears_after(node))
        ):
            continue
        if any(info(linear).joint is not None for linear in linears):
            continue
        # Linears of all blocks would hold their gradients until backward reaches the first.
        if len({_block_of(linear) for linear in linears}) > 1:
            continue
        read = [value for linear in linears for value in linear.all_input_nodes]
        if max(read) < min(user for linear in linears for user in linear.users):
            groups.append(sorted(linears))
    return groups


def _block_of(node: fx.Node) -> str:
    """Return the outermost numbered module that a call is made in."""
    return next(iter(numbered_modules(f"{info(node).module}.")), "")


def weight_gradient_seconds(facts: Facts, backward: Any) -> Any:
    """Return the part of a linear's backward seconds that computes its weight's gradient."""
    of_input, of_weight, *_ = facts.differentiable
    return backward * (of_weight / (of_input + of_weight)) if of_weight else 0.0 * backward


def weight_of(linear: fx.Node) -> fx.Node:
    """Return the weight that a linear reads."""
    return (*linear.args, *linear.kwargs.values())[1]  # type: ignore[return-value]


def reads_as_linear(reader: fx.Node, value: fx.Node) -> bool:
    """Return whether a reader is a linear whose input, but not its weight, is `value`."""
    if info(reader).joint is None:
        arguments, is_linear = (
            reader.args,
            reader.target is aten.linear.default and not reader.kwargs,
        )
    else:  # its arguments have names
        arguments, is_linear = (*reader.kwargs.values(),), [*reader.kwargs] == LINEAR
    return is_linear and arguments[0] is value and value not in arguments[1:]


def _is_linear_of(reader: fx.Node, value: fx.Node) -> bool:
    region = info(value).region
    if region is not None and not region.is_full and (info(value).remade or info(reader).remade):
        return False
    return reads_as_linear(reader, value) and info(reader).region == region
