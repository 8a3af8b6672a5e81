"""Draws: what draws random numbers does so by the place of an element, with the key of a step.

Operators are numbered in the order in which the model runs them, before anything else is changed; a
number stays with whatever stands for its call. An operator that has no function in
`strategies/kernels/keyed_draws.py` keeps torch's own generator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, shape_of
from autopar.capture.randomness import is_random, operator, takes_no_number
from autopar.errors import InvalidInput
from autopar.strategies import OperatorCall
from autopar.strategies.kernels import keyed_draws
from autopar.strategies.kernels.attention import dropped_attention
from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.strategies.node_info import info

aten = torch.ops.aten
KEY = "random_key"

# A function, what it reads before the key and the place (None: any value of the shape of what is
# drawn), and what it takes behind these.
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
    made, call = _MADE.get(operator(node)), OperatorCall(node)
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
    values = (like() if values[0] is None else values[0], *values[1:])
    place = DrawPlace(info(node).draw or 0, _shape(function, values, node))
    return function, (*values, key, place, *settings)


def _key(builder: GraphBuilder, node: fx.Node) -> fx.Node:
    first = next(other for other in builder.graph.nodes if other.op != "placeholder")
    with builder.graph.inserting_before(first), builder.mode:
        value = torch.empty(2, dtype=torch.int64, device=info(node).values[0].device)
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
        queries, grouped = shape_of(query)[:-2], OperatorCall(node)["enable_gqa"]
        keys = queries if grouped else shape_of(key)[:-2]
        masks = shape_of(mask)[:-2] if isinstance(mask, fx.Node) else ()
        heads = torch.broadcast_shapes(queries, keys, masks)
        ones = (1,) * (len(info(node).val.shape) - 2 - len(heads))
        return (*ones, *heads, shape_of(query)[-2], shape_of(key)[-2])
    if function in (keyed_draws.feature_dropout, keyed_draws.feature_alpha_dropout):
        shape = shape_of(values[0])
        return (*shape[:2], *[1] * (len(shape) - 2))
    if function is keyed_draws.multinomial:  # a number for each that may be picked
        return shape_of(values[0])
    return tuple(info(node).values[0].shape)


def _dropped(function: Callable[..., Any]) -> Callable[[OperatorCall], Drawn | None]:
    return lambda call: (function, call.inputs, (call["p"],))


def _between(call: OperatorCall) -> Drawn | None:
    """rand, rand_like, uniform."""
    low, high = call.get("from", 0.0), call.get("to", 1.0)
    _require(low <= high, "an interval begins before it ends", f"from {low} to {high}", call)
    return keyed_draws.uniform_like, _read(call), (low, high, call.outputs[0].dtype)


def _around(call: OperatorCall) -> Drawn | None:
    """randn, randn_like, normal."""
    mean, deviation = call.get("mean", 0.0), call.get("std", 1.0)
    dtype = call.outputs[0].dtype
    if any(isinstance(value, fx.Node) for value in (mean, deviation)):
        return keyed_draws.normal_around, (mean, deviation), (dtype,)
    return keyed_draws.normal_like, _read(call), (mean, deviation, dtype)


def _by_numbers(
    function: Callable[..., Any], *names: str
) -> Callable[[OperatorCall], Drawn | None]:
    """What is drawn for every element by numbers that all have in common."""

    def made(call: OperatorCall) -> Drawn:
        return function, _read(call), (*(call[name] for name in names), call.outputs[0].dtype)

    return made


def _whole(call: OperatorCall) -> Drawn | None:
    """randint, randint_like, random."""
    low, high = call.get("low", call.get("from", 0)), call.get("high", call.get("to"))
    dtype = call.outputs[0].dtype
    high = _end(dtype) if high is None else high
    return keyed_draws.whole_like, (*_read(call), high), (low, dtype)


def _end(dtype: torch.dtype) -> int:
    """Up to where, and not there, a dtype holds all whole numbers."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1


def _of_probabilities(call: OperatorCall) -> Drawn | None:
    given, dtype = call.get("p"), call.outputs[0].dtype
    if isinstance(given, float):
        _require(0 <= given <= 1, "probabilities are from 0 to 1", f"{given} for bernoulli", call)
        return keyed_draws.chosen, _read(call), (given, dtype)
    return keyed_draws.bernoulli, (call["self"], given), (dtype,)


def _picked(call: OperatorCall) -> Drawn | None:
    return (
        keyed_draws.multinomial,
        (call["self"],),
        (call["num_samples"], call["replacement"]),
    )


def _sloped(call: OperatorCall) -> Drawn | None:
    return keyed_draws.rrelu, (call["self"],), (call["lower"], call["upper"])


def _attention(call: OperatorCall) -> Drawn | None:
    query, key, value, mask, p, is_causal, scale, grouped = call.arguments.values()
    values = (query, key, value, mask)
    return dropped_attention.attention, values, (p, is_causal, scale, grouped)


def _read(call: OperatorCall) -> tuple[Any, ...]:
    """A value of the shape of what is drawn."""
    return (call["self"] if isinstance(call.get("self"), fx.Node) else None,)


def _require(is_good: bool, rule: str, got: str, call: OperatorCall) -> None:
    """Refuse numbers that torch refuses when it draws."""
    if not is_good:
        remedy = "mend what it is drawn by"
        raise InvalidInput(rule, got=got, remedy=remedy, source=call.source)


_MADE: dict[str, Callable[[OperatorCall], Drawn | None]] = {
    "dropout": _dropped(keyed_draws.dropout),
    "alpha_dropout": _dropped(keyed_draws.alpha_dropout),
    "feature_dropout": _dropped(keyed_draws.feature_dropout),
    "feature_alpha_dropout": _dropped(keyed_draws.feature_alpha_dropout),
    "native_dropout": _dropped(keyed_draws.native_dropout),
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
    "log_normal": _by_numbers(keyed_draws.log_normal_like, "mean", "std"),
    "exponential": _by_numbers(keyed_draws.exponential_like, "lambd"),
    "cauchy": _by_numbers(keyed_draws.cauchy_like, "median", "sigma"),
    "geometric": _by_numbers(keyed_draws.geometric_like, "p"),
    "poisson": lambda call: (keyed_draws.poisson, (call["self"],), ()),
    "randint": _whole,
    "randint_like": _whole,
    "random": _whole,
    "randperm": lambda call: (keyed_draws.permutation, (None,), ()),
    "multinomial": _picked,
    "scaled_dot_product_attention": _attention,
}

# What is left to torch's generator: of one rank. What to do instead of each.
_BY_HAND = "draw outside of forward and hand the numbers over as an input"
_LAYERS = "a module for each layer, and nn.Dropout between them"
_DROPOUT = "call torch.nn.functional.dropout"
_ATTENTION = "call torch.nn.functional.scaled_dot_product_attention"
_INSTEAD = {
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _LAYERS),
    **dict.fromkeys(("_cudnn_rnn", "miopen_rnn", "_lstm_mps"), _LAYERS),
    "binomial": "sum torch.bernoulli over a dim of trials",
    **dict.fromkeys(("_standard_gamma", "_sample_dirichlet"), _BY_HAND),
    "rrelu_with_noise_functional": "call torch.nn.functional.rrelu",
    **dict.fromkeys(
        ("_fused_dropout", "_fill_mem_eff_dropout_mask", "_cudnn_init_dropout_state"), _DROPOUT
    ),
    "_nested_tensor_softmax_with_shape": "pad what is nested",
}


def instead(node: fx.Node) -> str:
    """What to do instead of a call that draws from torch's generator."""
    name = operator(node)
    if name in _MADE:
        return "leave out its generator: torch.manual_seed is what all numbers follow from"
    own = _ATTENTION if name.startswith("_") and ("attention" in name or "sdp" in name) else None
    return _INSTEAD.get(name) or own or f"draw by torch's own operators, or {_BY_HAND}"
