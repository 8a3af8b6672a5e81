"""Draws: what draws random numbers does so by the place of an element, with the key of a step.

Operators are numbered in the order of the model, as it is run, before anything else is changed; a
number stays with whatever stands for its call. What no function of `strategies/kernels/draws.py`
stands for keeps to torch's own generator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, shape_of
from autopar.capture.randomness import is_random, operator, takes_no_number
from autopar.strategies import Call
from autopar.strategies.kernels import draws, dropped_attention
from autopar.strategies.kernels.draws import Place
from autopar.strategies.node_info import info

aten = torch.ops.aten
KEY = "random_key"

# A function, the values that it reads, and what it takes besides the key and the place.
Drawn = tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]


def number_draws(builder: GraphBuilder) -> None:
    """Tell the calls apart that draw random numbers."""
    number = 0
    for node in builder.calls():
        if is_random(node) and not takes_no_number(node):
            info(node).draw = number
            number += 1


def draws_follow_places(builder: GraphBuilder) -> None:
    """Let them draw by the places of elements; values and gradients flow as before."""
    key: fx.Node | None = None
    for node in builder.calls():
        if by_place(node) is not None:
            key = key or _key(builder, node)
            node.target, node.args = placed(node, key, partial(_of_shape, builder, node))
            node.kwargs = {}


def by_place(node: fx.Node) -> Drawn | None:
    """What draws the same by the places of elements, if there is something."""
    made, call = _MADE.get(operator(node)), Call(node)
    if made is None or call.get("generator") is not None or not is_random(node):
        return None
    return made(call)


def placed(
    node: fx.Node, key: fx.Node, like: Callable[[], fx.Node]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call by which it does so; `like` gives a value of its shape, where it reads none."""
    found = by_place(node)
    assert found is not None
    function, values, settings = found
    values = values or (like(),)
    place = Place(info(node).draw or 0, _shape(function, values, node))
    if function is dropped_attention.attention:
        return function, (*values, *settings[:2], key, place, *settings[2:])
    return function, (*values, key, place, *settings)


def _key(builder: GraphBuilder, node: fx.Node) -> fx.Node:
    first = next(other for other in builder.graph.nodes if other.op != "placeholder")
    with builder.graph.inserting_before(first), builder.mode:
        value = torch.empty(2, dtype=torch.int64, device=info(node).val.device)
        key = builder.placeholder(KEY, value)
    info(key).differentiable = False
    builder.key = key.name
    return key


def _of_shape(builder: GraphBuilder, node: fx.Node) -> fx.Node:
    """For what reads no value."""
    value = info(node).val
    kind = {"dtype": value.dtype, "device": value.device}
    with builder.graph.inserting_before(node):
        made = builder.call(node, aten.zeros.default, list(value.shape), **kind)
    info(made).differentiable = False
    return made


def _shape(function: Callable[..., Any], values: tuple[Any, ...], node: fx.Node) -> tuple[int, ...]:
    """Of all that is drawn."""
    if (
        function is dropped_attention.attention
    ):  # values, which may have more heads, are not dropped
        query, key, _, mask = values
        queries, grouped = shape_of(query)[:-2], Call(node)["enable_gqa"]
        keys = queries if grouped else shape_of(key)[:-2]
        masks = shape_of(mask)[:-2] if isinstance(mask, fx.Node) else ()
        heads = torch.broadcast_shapes(queries, keys, masks)
        ones = (1,) * (len(info(node).val.shape) - 2 - len(heads))
        return (*ones, *heads, shape_of(query)[-2], shape_of(key)[-2])
    shape = shape_of(values[0])
    if function in (draws.feature_dropout, draws.feature_alpha_dropout):
        return (*shape[:2], *[1] * (len(shape) - 2))
    return shape


def _dropped(function: Callable[..., Any]) -> Callable[[Call], Drawn | None]:
    return lambda call: (function, (call["input"],), (call["p"],))


def _between(call: Call) -> Drawn | None:
    """rand, rand_like, uniform."""
    ends = call.get("from", 0.0), call.get("to", 1.0)
    return draws.uniform_like, _read(call), (*ends, call.outputs[0].dtype)


def _around(call: Call) -> Drawn | None:
    """randn, randn_like, normal of numbers."""
    mean, deviation = call.get("mean", 0.0), call.get("std", 1.0)
    if any(isinstance(value, fx.Node) for value in (mean, deviation)):
        return None
    return draws.normal_like, _read(call), (mean, deviation, call.outputs[0].dtype)


def _whole(call: Call) -> Drawn | None:
    """randint, randint_like, random."""
    low, high = call.get("low", call.get("from", 0)), call.get("high", call.get("to"))
    if not isinstance(low, int) or not isinstance(high, int):
        return None
    return draws.whole_like, _read(call), (low, high, call.outputs[0].dtype)


def _permutation(call: Call) -> Drawn | None:
    return draws.permutation, (), ()


def _of_probabilities(call: Call) -> Drawn | None:
    given = call.get("p")
    if isinstance(given, float):
        return draws.chosen, _read(call), (given, call.outputs[0].dtype)
    if given is not None and shape_of(given) != call.shape:
        return None
    return draws.bernoulli, (call["self"] if given is None else given,), (call.outputs[0].dtype,)


def _picked(call: Call) -> Drawn | None:
    return draws.multinomial, (call["self"],), (call["num_samples"], call["replacement"])


def _sloped(call: Call) -> Drawn | None:
    return draws.rrelu, (call["self"],), (call["lower"], call["upper"])


def _attention(call: Call) -> Drawn | None:
    query, key, value, mask, p, is_causal, scale, grouped = call.arguments.values()
    values = (query, key, value, mask)
    return dropped_attention.attention, values, (p, is_causal, scale, grouped)


def _read(call: Call) -> tuple[Any, ...]:
    return (call["self"],) if isinstance(call.get("self"), fx.Node) else ()


_MADE: dict[str, Callable[[Call], Drawn | None]] = {
    "dropout": _dropped(draws.dropout),
    "alpha_dropout": _dropped(draws.alpha_dropout),
    "feature_dropout": _dropped(draws.feature_dropout),
    "feature_alpha_dropout": _dropped(draws.feature_alpha_dropout),
    "rrelu": _sloped,
    "rrelu_with_noise": _sloped,
    "bernoulli": _of_probabilities,
    "rand": _between,
    "rand_like": _between,
    "uniform": _between,
    "randn": _around,
    "randn_like": _around,
    "normal": _around,
    "normal_functional": _around,
    "randint": _whole,
    "randint_like": _whole,
    "random": _whole,
    "randperm": _permutation,
    "multinomial": _picked,
    "scaled_dot_product_attention": _attention,
}
