"""Mapped: what is written for one element, and runs over all (torch.vmap, FlexAttention).

Export keeps such functions as they are written, for one element, where it meets them: those that
torch maps itself, and those of users who have `vmap` by another name (`maps.py` has the others).
Here they become the operators that torch makes of them for all elements, in a graph of their own,
which the flat graph takes in.

FlexAttention is attention with a mask, where its functions say who sees whom, or add to scores
what depends on places alone; else products, softmax and what stands between. Places are numbers
of the whole, wherever a rank's piece begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autopar._torch.autograd import mapping_begins, mapping_ends
from autopar._torch.export_graph import export_verifier, flex_attention_parts
from autopar.capture.hooks import replaced
from autopar.strategies.node_info import info

aten = torch.ops.aten
FLAT_APPLY = torch.ops.higher_order.flat_apply
FLEX_ATTENTION = torch.ops.higher_order.flex_attention


@contextmanager
def trained_anywhere() -> Iterator[None]:
    """FlexAttention refuses what needs a gradient on a CPU, where its kernels have none; what it
    becomes here has one. Export refuses its own graph where its functions index without gradients:
    how they do has no value, which nothing here asks for."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None:
        yield
        return
    verifier = export_verifier()
    check = verifier._check_val

    def check_value(node: fx.Node) -> None:
        if node.op == "call_function" or "val" in node.meta:
            check(node)

    with (
        replaced(module, "_validate_device", lambda *tensors: None),
        replaced(verifier, "_check_val", check_value),
    ):
        yield


def is_higher(node: fx.Node) -> bool:
    """Whether an operator runs functions of its own."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def section(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The first calls, up to the one that ends what the first begins to map."""
    depth = 0
    for at, node in enumerate(nodes):
        depth += (node.target is mapping_begins) - (node.target is mapping_ends)
        if depth == 0:
            return [*nodes[: at + 1]]
    raise AssertionError("what is mapped has an end")


def calls_of(nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node], Any]:
    """What some calls read of others, what others read of them, and the calls as a function."""
    own = set(nodes)
    reads = [*dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own)]
    gives = [node for node in nodes if any(user not in own for user in node.users)]

    def run(given: Mapping[fx.Node, Any]) -> list[Any]:
        values = dict(given)
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return [values[node] for node in gives]

    return reads, gives, run


def _switched(enabled: bool, function: Callable[..., Any], *given: Any) -> Any:
    """A part of a function where gradients are on or off: nothing that is followed here has any,
    so that where they are off is to be seen in what is followed."""
    if enabled:
        return function(*given)
    held = {id(x): x.detach() for x in given if isinstance(x, Tensor)}
    found = function(*(held.get(id(x), x) for x in given))
    own = {id(held[id(x)]): x for x in given if id(x) in held}
    return pytree.tree_map(lambda x: own.get(id(x), x), found)  # what is itself has its gradient


def _with_switches(function: fx.GraphModule) -> fx.GraphModule:
    """One that export followed, to be followed over all."""
    for node in function.graph.nodes:
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            node.target = _switched
    function.recompile()
    return function


def over_all(
    function: Callable[..., Any], given: Sequence[Any], mode: FakeTensorMode, like: fx.Node
) -> fx.GraphModule:
    """The operators of a function that maps others, for these nodes, where `like` is."""

    def value(node: Any) -> Any:
        fake = info(node).val
        return fake.detach() if isinstance(fake, Tensor) else fake

    with mode, torch.no_grad():
        module = make_fx(function)(*map(value, given))
    for node in module.graph.nodes:
        if node.target is aten._to_copy.default and not isinstance(node.args[0], fx.Node):
            node.target = aten.scalar_tensor.default  # a number, which mapping makes a tensor
    return _from(like, module)


@dataclass(frozen=True)
class FlexAttention:
    """A call of it, of nodes."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    score: fx.GraphModule
    blocks: tuple[Any, ...]  # the function that says who sees whom is the last
    scale: float
    options: dict[str, Any]
    score_others: tuple[Any, ...] = ()
    mask_others: tuple[Any, ...] = ()

    @property
    def others(self) -> list[Any]:
        return [*self.score_others, *self.mask_others]

    @cached_property
    def bias(self) -> fx.GraphModule | None:
        """What is added to scores, of places alone; None where more is done to them, or asked, or
        where scores have more digits than queries."""
        wants_more = self.options.get("OUTPUT_LOGSUMEXP") or self.options.get("OUTPUT_MAX")
        is_half = info(self.query).val.dtype in (torch.float16, torch.bfloat16)
        found = None if wants_more else _bias(self.score)
        return None if found is not None and is_half and not _is_nothing(found) else found

    def whole(self, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Any:
        """All that it gives."""
        of_score, of_mask = self._apart(others)
        mods = _with_switches(self.score), (self.blocks[-1],), self.scale, self.options
        math_attention, _, _ = flex_attention_parts()
        return math_attention(query, key, value, *mods, of_score, of_mask)

    def mask(self, query: Tensor, key: Tensor, *others: Any) -> tuple[Tensor]:
        """Who sees whom, or what is added to scores; once for all samples, or heads, that no
        function asks for."""
        of_score, of_mask = self._apart(others)
        assert self.bias is not None
        asked = [_asked(function)[:2] for function in (self.blocks[-1], self.bias)]
        counts = [size if any(one) else 1 for size, one in zip(query.shape, zip(*asked))]
        sizes = *counts, query.shape[2], key.shape[2]
        places = [torch.arange(size, device=query.device) for size in sizes]
        _, indexing, mapped = flex_attention_parts()
        with indexing():
            sees = mapped(self.blocks[-1], (), (None,) * len(of_mask))(*places, *of_mask)
            if _is_nothing(self.bias):
                return (sees,)
            bias = mapped(_with_switches(self.bias), (), (None,) * len(of_score))
            added = bias(*places, *of_score)
            return (torch.where(sees, added.to(query.dtype), -torch.inf),)

    def product(self, mask: fx.Node, like: fx.Node) -> fx.GraphModule:
        """Attention with that mask."""
        graph, given = fx.Graph(), (self.query, self.key, self.value, mask)
        query, key, value, seen = (graph.placeholder(name) for name in ("q", "k", "v", "mask"))
        shapes = [info(node).val.shape for node in given]
        if shapes[0][0] != shapes[1][0]:
            sizes = [[shapes[0][0], *shape[1:]] for shape in shapes[1:3]]
            key, value = (
                graph.call_function(aten.expand.default, (x, size))
                for x, size in zip((key, value), sizes)
            )
        more: dict[str, Any] = {"scale": self.scale, "enable_gqa": shapes[0][1] != shapes[1][1]}
        out = graph.call_function(
            aten.scaled_dot_product_attention.default, (query, key, value, seen), more
        )
        graph.output((out, None, None))
        return _from(like, fx.GraphModule({}, graph))

    def _apart(self, others: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        count = len(self.score_others)
        return tuple(others[:count]), tuple(others[count:])


def _asked(function: fx.GraphModule) -> list[bool]:
    """Which of its arguments a function reads."""
    return [bool(node.users) for node in function.graph.find_nodes(op="placeholder")]


def _is_nothing(bias: fx.GraphModule) -> bool:
    """Whether there is none."""
    return bias.graph.output_node().args == (None,)


def _bias(score: fx.GraphModule) -> fx.GraphModule | None:
    """What a function adds to a score, as a function of places; None if it does more."""
    (result,) = pytree.tree_leaves(score.graph.output_node().args)
    given, *_ = score.graph.find_nodes(op="placeholder")
    if result is not given:
        is_sum = result.target is aten.add.Tensor and not result.kwargs
        if not is_sum or len(given.users) != 1 or [*result.args].count(given) != 1:
            return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in score.graph.nodes:
        if node not in (given, result) and node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    added = next((arg for arg in result.args if arg is not given), None)
    graph.output(fx.map_arg(added, copies.__getitem__))
    graph.eliminate_dead_code()
    return fx.GraphModule(score, graph)


def _from(like: fx.Node, module: fx.GraphModule) -> fx.GraphModule:
    """With the origin of a node."""
    for node in module.graph.nodes:
        for key in ("stack_trace", "nn_module_stack"):
            node.meta[key] = like.meta.get(key)
    return module
