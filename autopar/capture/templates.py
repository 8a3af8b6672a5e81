"""Templates: blocks of an exported graph that others are copies of.

    block_begins(0, "layers.0", ...)  the operators of layers.0  block_ends(0, ...)
    block_again(0, "layers.2", ...)

Which blocks become such calls is for `repeated.py` to say; `flatten.py` writes them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.hidden import Needed
from autopar.capture.source import of_stack


@torch.library.custom_op("autopar::block_begins", mutates_args=())
def block_begins(number: int, path: str, given: Sequence[Tensor]) -> None:
    """Where a block begins, and the tensors that it is given."""


@torch.library.custom_op("autopar::block_ends", mutates_args=())
def block_ends(number: int, made: Sequence[Tensor]) -> None:
    """Where it ends, and the tensors that it makes."""


@torch.library.custom_op("autopar::block_again", mutates_args=())
def block_again(number: int, path: str, forms: str, given: Sequence[Tensor]) -> list[Tensor]:
    """Another block that is equal to one, with the shape, strides and dtype of what it makes."""
    device, made = given[0].device, []
    for form in forms.split("|"):
        shape, stride, dtype = form.split(";")
        sizes = ([int(number) for number in text.split(",") if number] for text in (shape, stride))
        made.append(torch.empty_strided(*sizes, dtype=getattr(torch, dtype), device=device))
    return made


for _operator in (block_begins, block_ends, block_again):
    _operator.register_fake(_operator._init_fn)

BEGINS = torch.ops.autopar.block_begins.default
ENDS = torch.ops.autopar.block_ends.default
AGAIN = torch.ops.autopar.block_again.default
fx.node.has_side_effect(BEGINS)
fx.node.has_side_effect(ENDS)


@dataclass(eq=False)
class Template:
    """The nodes of a block in an exported graph, to be copied."""

    path: str
    source: str | None  # the line that calls it
    module: fx.GraphModule
    nodes: list[fx.Node]
    given: list[fx.Node]
    results: list[fx.Node]
    values: Mapping[fx.Node, Any]  # of the nodes around it

    def __post_init__(self) -> None:
        own = {*self.nodes, *self.given}
        reads = (one for node in self.nodes for one in node.all_input_nodes if one not in own)
        self.outside = [*dict.fromkeys(reads)]

    def inputs(
        self, path: str, given: Sequence[Any], held: Mapping[str, Any]
    ) -> dict[fx.Node, Any]:
        """What its nodes read as the block at `path`; `held`: parameters and buffers by name, but
        for those of blocks that another call has left out."""
        start = self.path + "."
        own = {id(value): name for name, value in held.items() if name.startswith(start)}
        inputs = dict(zip(self.given, given))
        for node in self.outside:
            value = self.values[node]
            if (name := own.get(id(value))) is not None:
                if (name := f"{path}.{name.removeprefix(start)}") not in held:
                    raise Needed(None)
                value = held[name]
            inputs[node] = value
        return inputs


def templates_of(
    nodes: Sequence[fx.Node], module: fx.GraphModule, values: Mapping[fx.Node, Any]
) -> dict[int, Template]:
    """The blocks that a graph has from beginning to end, by number."""
    found: dict[int, Template] = {}
    begun: dict[Any, int] = {}
    for at, node in enumerate(nodes):
        if node.target is BEGINS:
            begun[node.args[0]] = at
        elif node.target is ENDS:
            number, results = node.args
            start = nodes[begun[number]]
            inner, (_, path, given) = [*nodes[begun[number] + 1 : at]], start.args
            source = of_stack(start.meta.get("stack_trace"))
            found[number] = Template(path, source, module, inner, given, results, values)  # type: ignore
    return found
