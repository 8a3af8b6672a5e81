"""Fused: a weight of several, as that of queries, keys and values, whose product is read in parts.

    y = linear(x, w); q = y[..., :d]; k = y[..., d : 2 * d]; v = y[..., 2 * d :]

What is read in equal parts, and what it is made of up to the parameters, says so (`info.parts`): a
cut of each part by itself leaves the parts where they are, and one of the whole would not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator

import torch
from torch import fx

from autopar.strategies import OperatorCall
from autopar.strategies.node_info import info
from autopar.strategies.registry import permutation
from autopar.strategies.rules.indexing import is_part

aten = torch.ops.aten
Dims = dict[fx.Node, int]  # of each value the dim that has the parts


def mark_parts(graph: fx.Graph, parameters: Container[str]) -> None:
    """Write it on values that are products, and on their weights and biases."""
    for value in graph.nodes:
        for dim, count in _read(value):
            found = _made_of(value, dim, parameters)
            marks = {node: dict(info(node).parts) for node in found or ()}
            if found and all(marks[node].get(at, count) == count for node, at in found.items()):
                for node, at in found.items():
                    info(node).parts = tuple(sorted({**marks[node], at: count}.items()))


def _read(value: fx.Node) -> Iterator[tuple[int, int]]:
    """In how many equal parts, along which dim, a value is read."""
    by_size = defaultdict[tuple[int, int], set[int]](set)
    for reader in value.users:
        if reader.target is aten.slice.Tensor:
            call = OperatorCall(reader)
            dim = call.dim(call["dim"])
            size = call.shape[dim]
            if size and call.shapes[0][dim] % size == 0:
                count = call.shapes[0][dim] // size
                if count > 1 and is_part(call, count):
                    by_size[dim, count].add(call["start"] or 0)
    for (dim, count), starts in by_size.items():
        if len(starts) > 1:
            yield dim, count


def _made_of(value: fx.Node, dim: int, parameters: Container[str]) -> Dims | None:
    """What has the parts of a value: itself, and what it is made of; None if no weights have."""
    if value.op == "placeholder":
        return {value: dim} if value.name in parameters else None
    last, size = info(value).val.ndim - 1, info(value).val.shape[dim]
    sources: list[tuple[fx.Node, int]] = []
    if value.target is aten.linear.default and dim == last:
        sources = [(source, 0) for source in OperatorCall(value).inputs[1:]]
    elif value.target is aten.matmul.default and dim == last:
        (weight,) = OperatorCall(value).inputs[1:]
        sources = [(weight, 1)] if info(weight).val.ndim == 2 else []
    elif value.target is aten.add.Tensor and dim == last:
        sources = [(source, info(source).val.ndim - 1) for source in OperatorCall(value).inputs]
    elif value.op == "call_function" and (order := permutation(value)) is not None:
        sources = [(OperatorCall(value).inputs[0], order[dim])]
    if not sources or any(at < 0 or info(v).val.shape[at] != size for v, at in sources):
        return None
    found: Dims = {value: dim}
    for source, at in sources:
        if (made := _made_of(source, at, parameters)) is None:
            return None
        if any(found.get(node, own) != own for node, own in made.items()):
            return None
        found |= made
    return found
