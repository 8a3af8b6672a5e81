"""Split backward: a stage's program that also returns what its weight gradients are made of.

    y = linear(x, w)      ──▶      alone = read_alone(w);  y = linear(x, alone)

Schedules of the zero-bubble family take the gradients of a stage's inputs first (I) and those of
its weights later (W). I asks autograd for the gradient of the stage's inputs, and on the way of
every `y` that reads weights. W goes from each `y` to its `alone` and no further, as `alone` is a
leaf that nothing else leads to: no part of backward is done twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from autopar.strategies.results import values_of


@dataclass(frozen=True)
class WeightUse:
    """One operator that reads weights, by positions among the results of the new program."""

    gives: tuple[int, ...]
    alone: tuple[int, ...]
    weights: tuple[int, ...]


def read_alone(weight: Tensor) -> Tensor:
    """The same data as a leaf of its own."""
    return weight.detach().requires_grad_(weight.requires_grad)


def split_backward(graph: fx.Graph) -> tuple[fx.Graph, list[WeightUse]]:
    """A copy of `graph` with more results, and what they are."""
    split = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = split.node_copy(node, copies.__getitem__)
        copies[node].name, copies[node].meta = node.name, dict(node.meta)
    output = split.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    uses = []

    def returned(node: fx.Node) -> int:
        results.append(node)
        return len(results) - 1

    weights = _made_of_weights(split)
    for node in list(split.nodes):
        read = [value for value in node.all_input_nodes if value in weights]
        if not read or node.op == "output" or node in weights or not node.meta["differentiable"]:
            continue
        alone = []
        for weight in read:
            with split.inserting_before(node):
                leaf = split.call_function(read_alone, (weight,))
            leaf.meta = {**weight.meta, "wants": ((weight.meta["type"].layout, ()),)}
            leaf.meta.pop("movement", None)
            leaf.meta.pop("sync", None)
            node.replace_input_with(weight, leaf)
            alone.append(leaf)
        learned = [value for value in values_of(node) if value.meta["differentiable"]]
        uses.append(
            WeightUse(
                tuple(map(returned, learned)),
                tuple(map(returned, alone)),
                tuple(map(returned, read)),
            )
        )
    output.args = (tuple(results),)
    split.lint()
    return split, uses


def _made_of_weights(graph: fx.Graph) -> set[fx.Node]:
    """The values that take a gradient and are made of parameters without any activation."""
    found: set[fx.Node] = set()
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            kind = node.meta["origin"][0]
            if kind == "parameter" and node.meta["differentiable"]:
                found.add(node)
            elif kind not in ("input", "received"):
                constant.add(node)
        elif node.op == "call_function" and found.union(constant).issuperset(node.all_input_nodes):
            (found if node.meta["differentiable"] else constant).add(node)
    return found
