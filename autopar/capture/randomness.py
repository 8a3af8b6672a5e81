"""Randomness: which calls of a graph draw random numbers."""

from __future__ import annotations

import torch
from torch import fx

from autopar.strategies import OperatorCall

# Made of others, or changing what they are given: torch does not say it of these.
_COMPOSED = (
    *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
    *("rrelu", "random", "scaled_dot_product_attention"),
)


def may_be_random(node: fx.Node) -> bool:
    """Whether two equal calls may give different values."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or operator(node) in _COMPOSED


def operator(node: fx.Node) -> str:
    """The name of an operator of torch, whether it changes what it is given or not."""
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else packet.__name__.rstrip("_")


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers: not with a probability of 0, nor out of training."""
    if not may_be_random(node):
        return False
    call = OperatorCall(node)
    # Layers after one another have dropout between them alone.
    is_off = any(call.get(name) is False for name in ("train", "training"))
    is_off = is_off or call.get("num_layers") == 1
    return not is_off and all(call.get(name) != 0 for name in ("p", "dropout", "dropout_p"))


def takes_no_number(node: fx.Node) -> bool:
    """Whether a call takes no number of torch's generator: all is dropped, or nothing is there."""
    call, name = OperatorCall(node), operator(node)
    drops = name.endswith("dropout") and name != "native_dropout"
    drops = drops or name == "scaled_dot_product_attention"
    probability = call.get("p", call.get("dropout_p"))
    return drops and (probability == 1 or not call.outputs[0].numel())
