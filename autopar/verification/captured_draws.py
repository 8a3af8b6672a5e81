"""Drawing: a plain model, run so that its random numbers are those of the captured program.

Below autograd, the calls that draw come in the order in which capture numbers them. A checkpointed
call runs twice, both times from one state of torch's generator on its device. By this state it is
recognised and gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.captured import new_key
from autopar.capture.graph_builder import is_mutable
from autopar.capture.normalisations.draws import by_place, placed
from autopar.capture.randomness import is_random, operator
from autopar.strategies.node_info import info


class DrawsByPlace(TorchDispatchMode):
    """The mode in which one step of a plain model draws the numbers of its captured program."""

    def __init__(self) -> None:
        super().__init__()
        # By the state of the generator before, and how many have left that as it is.
        self._numbers: dict[tuple[bytes, int], int] = {}
        self._state, self._same = b"", 0
        with torch.random.fork_rng():
            self._key = new_key()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
            return function(*args, **kwargs)
        device = _device_of(args, kwargs)
        before = _generator_state(device)
        self._same = self._same + 1 if before == self._state else 0
        before_call = args[0].clone() if is_mutable(function) else None
        result = function(*args, **kwargs)
        # Another state than this stands before the next call, unless it is one that runs again.
        self._state = before if _generator_state(device) == before else b""
        with _call_as_node(function, args, kwargs, result) as (node, values):
            self._place(node, values, before_call, (before, self._same))
        return result

    def _place(
        self,
        node: fx.Node,
        values: dict[fx.Node, Any],
        before_call: Tensor | None,
        draw: tuple[bytes, int],
    ) -> None:
        """Put the numbers of the captured program into the result of a call that draws.

        `before_call`: a copy of its first argument, if that is changed in place; `draw` numbers it.
        """
        if not is_random(node):
            return
        info(node).draw = self._numbers.setdefault(draw, len(self._numbers))
        if by_place(node) is None:
            return
        result = info(node).val
        key, like = node.graph.placeholder("key"), node.graph.placeholder("like")
        info(like).val = result
        target, arguments = placed(node, key, lambda: like)
        device = pytree.tree_leaves(result)[0].device
        values |= {key: self._key.to(device), like: result}
        if before_call is not None:
            values[next(iter(values))] = before_call  # its first argument
        drawn = target(*fx.map_arg(arguments, values.__getitem__))
        if operator(node) == "rrelu_with_noise":  # whose backward reads the slopes
            read, slopes = (values[argument] for argument in node.args[:2])  # type: ignore[index]
            slopes.copy_(torch.where(read > 0, 1.0, drawn / read))
        pytree.tree_map_(lambda into, new: into.copy_(new), result, drawn)


def _device_of(args: Any, kwargs: Any) -> torch.device:
    """Return the device on which a call draws: its `device` argument, or that of its inputs."""
    device = kwargs.get("device")
    read = (v.device for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor))
    return torch.device(device) if device is not None else next(read, torch.get_default_device())


def _generator_state(device: torch.device) -> bytes:
    """Return the state of the generator of a device."""
    if device.type == "cpu":
        return torch.get_rng_state().numpy().tobytes()
    state = torch.get_device_module(device).get_rng_state(device)
    return str(device).encode() + state.numpy().tobytes()


@contextmanager
def _call_as_node(
    function: Callable[..., Any], args: Any, kwargs: Any, result: Any
) -> Iterator[tuple[fx.Node, dict[fx.Node, Any]]]:
    """Yield a call as a node of a graph, with the values of its tensors, and clear the graph's
    references afterwards: its nodes form cycles that only the garbage collector would free."""
    graph, values = fx.Graph(), dict[fx.Node, Any]()

    def enter(tensor: Tensor) -> fx.Node:
        node = graph.placeholder("given")
        info(node).val = values[node] = tensor
        return node

    args, kwargs = pytree.tree_map_only(Tensor, enter, (args, kwargs))
    node = graph.call_function(function, args, kwargs)
    info(node).val = result
    try:
        yield node, values
    finally:
        for each in graph.nodes:
            each.meta.clear()
