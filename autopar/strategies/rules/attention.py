"""Scaled dot product attention: batch, heads and queries can be cut, keys with the queries.

Causal attention with cut queries needs to know where its queries stand: a kernel. One axis that
cuts queries, and keys with their values, is a ring (`kernels/ring.py`). With grouped heads, the
heads of the queries are (h g) for the h of keys and values, so that h can be cut.
"""

from __future__ import annotations

import torch

from autopar.strategies.intermediate_work import IntermediateWork
from autopar.strategies.kernels.attention import dropped_attention
from autopar.strategies.kernels.attention.sliced import sliced_attention
from autopar.strategies.node_info import info
from autopar.strategies.registry import OperatorCall, register_rule
from autopar.strategies.rule import Dim, ExtraTensor, Rule, Saved, broadcast
from autopar.strategies.rules.random_draws import BITS
from autopar.strategies.strategy import JointCut

# Bytes that dropped attention moves for each weight, of 4 bytes: forward writes and reads a score,
# takes its softmax, draws, and drops; backward does so again, and drops and scales the score's
# gradient. The fused kernels move none. Those on a host are measured, in units of a copy.
DROPPED = IntermediateWork(16 + BITS + 3 + 20, 16 + BITS + 3 + 64, 150.0, 200.0)
BLOCK = 512  # keys that a fused kernel on a host's cores multiplies at once
EXPONENTIALS = 28.0, 70.0  # bytes that memory moves in the time of one, forward and backward


def _attention(call: OperatorCall) -> Rule:
    query, key, value = call.shapes[:3]
    leading: list[Dim] = [(f"b{index}",) for index in range(len(call.shape) - 2)]
    # Heads count that an input has once for all.
    sizes = dict(zip([name for (name,) in leading], call.shape))
    heads: list[Dim] = list(leading)
    if call["enable_gqa"] and len(query) > 2 and key[-3] != query[-3]:
        name = leading[-1][0]
        sizes |= {name: key[-3], "g": query[-3] // key[-3]}
        heads[-1] = (name, "g")
    inputs: list[list[Dim]] = [
        [*broadcast(heads, query[:-2]), ("q",), ("d",)],
        [*broadcast(leading, key[:-2]), ("k",), ("d",)],
        [*broadcast(leading, value[:-2]), ("k",), ("e",)],
    ]
    if call["attn_mask"] is not None:
        inputs.append(broadcast([*heads, ("q",), ("k",)], call.shapes[3]))
    is_fused = "drawn" not in call.arguments
    if not is_fused:
        inputs.append([("key",)])
    rings = {}
    if not (is_fused and call["dropout_p"]):
        is_shared = call["is_causal"] and query[-2] == key[-2]
        cut = ["q", "k", "k", *("q" if ("q",) in dims else None for dims in inputs[3:])]
        rings["ring"] = JointCut(
            "causal_ring_attention" if is_shared else "ring_attention", tuple(cut), ("q",)
        )
    rows = call.outputs[0].numel() // max(value[-1] * query[-2], 1)  # of scores, for each query
    is_halved = is_fused and call["is_causal"]
    points = rows * (_causal(query[-2], key[-2]) if is_halved else query[-2] * key[-2])
    flops = 2.0 * points * (query[-1] + value[-1])
    saved = _saved(call, heads) if is_fused else Saved((*range(len(inputs)),), output=True)
    return call.rule(
        inputs,
        [*heads, ("q",), ("e",)],
        sizes,
        whole=("k", "d", "e", "key"),
        kernels={"q": "cut_causal_attention"} if is_fused and call["is_causal"] else {},
        joints=rings,
        saved_by_joint=dict.fromkeys(rings, _saved_by_ring(call, heads)),
        flops=flops,
        # A kernel that keeps no weights makes the scores once more, beside two products of each of
        # the two of forward.
        backward_flops=2.5 * flops if is_fused and saved.output else None,
        triangle="q" if is_halved and query[-2] > 1 else None,
        intermediate=_on_cores(call, rows, points) if is_fused else DROPPED.times(points),
        product=True,
        saved=saved,
    )


def _on_cores(call: OperatorCall, rows: int, points: int) -> IntermediateWork:
    """Return what a fused kernel computes besides products of scores on a host's cores.

    These are exponentials of scores, and scores that a causal mask hides inside of a block.
    """
    (*_, queries, width), (*_, keys, _), (*_, other) = call.shapes[:3]
    computed = min(rows * queries * keys, points + rows * queries * BLOCK // 2)
    masked = (computed - points) * 2.0 * (width + other)
    forward, backward = EXPONENTIALS
    return IntermediateWork(
        host_forward=forward * computed,
        host_backward=backward * computed,
        host_flops=masked,
        host_backward_flops=2.5 * masked,
    )


def _causal(queries: int, keys: int) -> int:
    """Return how many scores a causal mask leaves: query i sees the keys up to i."""
    short = min(queries, keys)
    return short * (short + 1) // 2 + (queries - short) * keys


def _saved_by_ring(call: OperatorCall, heads: list[Dim]) -> Saved:
    """Return what ring attention keeps: its inputs, its output, and a number for each row."""
    wide = torch.promote_types(call.outputs[0].dtype, torch.float32)
    sums = ExtraTensor((*heads, ("q",)), wide)
    return Saved((*range(len(call.inputs)),), output=True, extra=(sums,))


def _saved(call: OperatorCall, heads: list[Dim]) -> Saved:
    """Return what a fused kernel keeps; without one, what the products of attention keep."""
    query, key, value = call.shapes[:3]
    mask = call.inputs[3] if len(call.inputs) > 3 else None
    dtype = call.outputs[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    alike = query[:-2] == key[:-2] == value[:-2] or (
        call["enable_gqa"] and query[:-3] == key[:-3] == value[:-3]
    )
    learns = mask is not None and info(mask).differentiable
    if len(query) == 4 and alike and query[-1] == value[-1] and not learns:
        sums = ExtraTensor((*heads, ("q",)), wide)
        if mask is None or info(mask).val.dtype != torch.bool:
            return Saved((*range(len(call.inputs)),), output=True, extra=(sums,))
        dims: list[Dim] = [*heads, ("q",), ("k",)]  # of the mask as numbers
        added = broadcast(dims, call.shapes[3])
        return Saved((0, 1, 2), output=True, extra=(sums, ExtraTensor(tuple(added))))
    whole = value[:-2] == call.shape[:-2] and dtype == wide  # else torch makes a copy
    copies = [("q", "d"), ("k", "d"), ("q", "k"), *([] if whole else [("k", "e")])]
    extra = tuple(ExtraTensor((*heads, (rows,), (columns,)), wide) for rows, columns in copies)
    return Saved((2,) if whole else (), extra=extra)


def _sliced_attention(call: OperatorCall) -> Rule:
    """Return the rule of attention of a slice of tokens, whose queries and keys stay whole."""
    query, key, value = call.shapes[:3]
    heads: list[Dim] = [(f"b{index}",) for index in range(len(query) - 2)]
    sizes, leading = dict(zip([name for (name,) in heads], key)), list(heads)
    if call["enable_gqa"] and key[-3] != query[-3]:
        sizes["g"] = query[-3] // key[-3]
        heads[-1] = (*heads[-1], "g")
    own = [[*heads, ("q",), ("d",)], [*leading, ("q",), ("d",)], [*leading, ("q",), ("e",)]]
    of_sequence: list[list[Dim]] = [[*leading, ("k",), (width,)] for width in "dede"]
    drawn: list[list[Dim]] = [[("key",)]] if call["drawn"] is not None else []
    points = call.outputs[0].numel() // max(value[-1], 1) * (call["offset"] + query[-2])
    sums = ExtraTensor((*heads, ("q",)), torch.promote_types(call.outputs[0].dtype, torch.float32))
    return call.rule(
        [*own, *of_sequence, *drawn],
        [*heads, ("q",), ("e",)],
        sizes,
        whole=("q", "k", "d", "e", "key"),
        flops=2.0 * points * (query[-1] + value[-1]),
        backward_flops=5.0 * points * (query[-1] + value[-1]),
        product=True,
        saved=Saved((0, 3, 4), output=True, extra=(sums,)),
    )


register_rule(["aten.scaled_dot_product_attention", dropped_attention.attention], _attention)
register_rule(sliced_attention, _sliced_attention)
