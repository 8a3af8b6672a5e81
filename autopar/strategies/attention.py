"""Scaled dot product attention: batch, heads and queries can be cut, keys stay whole.

Causal attention with cut queries needs to know where its queries stand: a kernel. With grouped
heads, the heads of the queries are (h g) for the h of keys and values, so that h can be cut.
"""

from __future__ import annotations

from autopar.strategies.registry import Call, register_rule
from autopar.strategies.rule import Dim, Rule, Saved


def _attention(call: Call) -> Rule:
    query, key, value = call.shapes[:3]
    leading: list[Dim] = [(f"b{index}",) for index in range(len(call.shape) - 2)]
    sizes = {dim[0]: size for dim, size in zip(leading, call.shape)}
    sizes |= {"q": query[-2], "k": key[-2], "d": query[-1], "e": value[-1]}
    heads: list[Dim] = list(leading)
    if call["enable_gqa"] and len(query) > 2 and key[-3] != query[-3]:
        name = leading[-1][0]
        sizes |= {name: key[-3], "g": query[-3] // key[-3]}
        heads[-1] = (name, "g")
    inputs: list[list[Dim]] = [
        [*_broadcast(heads, query), ("q",), ("d",)],
        [*_broadcast(leading, key), ("k",), ("d",)],
        [*_broadcast(leading, value), ("k",), ("e",)],
    ]
    if call["attn_mask"] is not None:
        mask = call.shapes[3]
        dims: list[Dim] = [*heads, ("q",), ("k",)]
        aligned = dims[len(dims) - len(mask) :]
        inputs.append([() if size == 1 else dim for dim, size in zip(aligned, mask)])
    points = call.outputs[0].numel() // max(value[-1], 1) * key[-2]
    return call.rule(
        inputs,
        [*heads, ("q",), ("e",)],
        sizes,
        whole=("k", "d", "e"),
        kernels={"q": "cut_causal_attention"} if call["is_causal"] else {},
        flops=2.0 * points * (query[-1] + value[-1]),
        product=True,
        saved=Saved((*range(len(inputs)),), output=True, extra=((*heads, ("q",)),)),
        random=call["dropout_p"] > 0,
    )


def _broadcast(leading: list[Dim], shape: tuple[int, ...]) -> list[Dim]:
    aligned = leading[len(leading) - len(shape) + 2 :]
    return [() if size == 1 else dim for dim, size in zip(aligned, shape)]


register_rule("aten.scaled_dot_product_attention", _attention)
