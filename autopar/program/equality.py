"""Equality: when two calls, or two values that a program is given, are the same anywhere.

    number_calls(graph)       # calls that have the same strategies and costs on any mesh
    facts_of_call(node)       # all that is known of a call but its names and its place
    facts_of_input(node)      # the same of a parameter
    are_equal(one, other)     # whether it is the same of two of them

This is the one definition of what is equal: a fact that a later pass writes counts by itself, if it
is not said here that it is a name or a place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import fx

from autopar.strategies.kernel_calls import KernelCall
from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.strategies.node_info import RecomputeRegion, info
from autopar.strategies.results import is_result, tensors_of

# Facts that are names or places, or that are compared by what they say of other nodes.
_OF_A_PLACE = {"val", "module", "checkpoint", "block"}


def number_calls(graph: fx.Graph) -> dict[str, int]:
    """Return a number for each call of an operator by its name; calls with one number are alike.

    They have the same operator and constants, the same shapes and dtypes of tensors, and the
    same of their inputs are one tensor."""
    numbers: dict[Any, int] = {}
    return {
        node.name: numbers.setdefault(_described(node), len(numbers))
        for node in graph.nodes
        if node.op == "call_function" and not is_result(node)
    }


def _described(node: fx.Node) -> tuple[Any, ...]:
    inputs = node.all_input_nodes
    constants = constants_of(node)
    tensors = tuple((*_form(value), info(value).differentiable) for value in inputs)
    return node.target, constants, tensors, _form(node), info(node).on_host, info(node).learns


def constants_of(node: fx.Node) -> str:
    """Return what a call is given, with names for the tensors. Which of a program's draws it makes,
    and where a piece of it starts, is nothing by which calls differ: the shape of all of it is."""
    names = {value: _Slot(index) for index, value in enumerate(node.all_input_nodes)}
    args = [f"draw of {a.shape}" if isinstance(a, DrawPlace) else a for a in node.args]
    return repr(fx.map_arg((args, node.kwargs), names.__getitem__))  # type: ignore[arg-type]


def _form(value: fx.Node) -> tuple[Any, ...]:
    tensors = tensors_of(value)
    return (
        *((tuple(t.shape), t.dtype, t.is_contiguous()) for t in tensors),
        info(value).parts,
    )


class _Slot:
    """A tensor argument in the description of a call."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"


def facts_of_call(node: fx.Node) -> Hashable:
    """Return all that is known of a call, wherever it stands."""
    draws = tuple(place._replace(number=0) for place in node.args if isinstance(place, DrawPlace))
    is_inside = info(node).checkpoint is not None
    return _described(node), draws, is_inside, _hashed(_facts(node))


def facts_of_input(node: fx.Node) -> Hashable:
    """Return all that is known of a value that a program is given, but for its name."""
    return _form(node), _hashed(_facts(node))


def are_equal(one: fx.Node, other: fx.Node) -> bool:
    """Return whether the same is known of two nodes, wherever they stand."""
    is_call = one.op == "call_function"
    forms = map(_described if is_call else _form, (one, other))
    return one.op == other.op and len({*forms}) == 1 and _facts(one) == _facts(other)


def _facts(node: fx.Node) -> dict[str, Any]:
    known = {name: fact for name, fact in node.meta.items() if name not in _OF_A_PLACE}
    for name, without_names in _WITHOUT_NAMES.items():
        if name in known:
            known[name] = without_names(known[name])
    return known


def _of_region(region: RecomputeRegion | None) -> object:
    if region is None:
        return None
    return (region.how, region.is_random) if region.how.keep == "device" else object()


def _of_kernel(call: KernelCall | None) -> object:
    return call and (call.name, call.strategy)  # the rule is a fact of its own


# What is kept elsewhere has names: it equals nothing else.
_WITHOUT_NAMES: dict[str, Callable[[Any], object]] = {
    "origin": lambda origin: origin[0],
    "region": _of_region,
    "joint": _of_kernel,
    "start_of": _of_kernel,
    "away": lambda away: object() if away else None,
}


def _hashed(facts: Mapping[str, Any]) -> Hashable:
    return tuple(sorted((name, _hashable(fact)) for name, fact in facts.items()))


def _hashable(fact: Any) -> Hashable:
    try:
        hash(fact)
    except TypeError:
        return repr(fact)
    return fact
