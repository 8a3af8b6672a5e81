"""Product messages: what products move where their tensors are cut, known by sizes alone.

moved, of_experts = products(captured)    # pairs of bytes and how often they move
"""

from __future__ import annotations

from collections import defaultdict

from autopar.candidates.axis_roles import EXPERT_DIMS
from autopar.capture.captured import Captured
from autopar.capture.origins import is_of_parameters
from autopar.strategies.node_info import info
from autopar.strategies.registry import tensor_inputs

Messages = list[tuple[float, int]]  # bytes, and how often


def products(captured: Captured) -> tuple[Messages, Messages]:
    """Return the bytes that cut products move in a micro-batch of the whole batch, and how often:
    where tensors are cut, and where experts are.

    Of a pair of products the smaller activation is summed once forward and once backward: one sum
    for each product. Tokens go to their experts and back, forward and backward.
    """
    counts: dict[float, int] = defaultdict(int)
    of_experts: dict[float, int] = defaultdict(int)
    for node in captured.operators:
        rule = captured.rules[node.name]
        if rule is None or not rule.product or not info(node).learns:
            continue
        inputs = tensor_inputs(node)
        weights = [value for value in inputs if is_of_parameters(value, captured=captured)]
        if not weights:
            continue
        values = [value for value in inputs if value not in weights]
        tensors = [info(value).val for value in (*values, node)]
        size = min(float(t.numel() * t.itemsize) for t in tensors if hasattr(t, "numel"))
        counts[size] += info(node).count
        if any(info(value).val.ndim == EXPERT_DIMS for value in weights):
            of_experts[size] += info(node).count
    return list(counts.items()), list(of_experts.items())


def share_of_experts(captured: Captured) -> float:
    """Return the part of all parameters' elements that hold a matrix for each expert."""
    every = [
        n for n in captured.graph.find_nodes(op="placeholder") if n.name in captured.parameters
    ]
    sizes = [(info(node).val.numel() * info(node).count, info(node).val.ndim) for node in every]
    total = sum(size for size, _ in sizes) or 1
    return sum(size for size, dims in sizes if dims == EXPERT_DIMS) / total
