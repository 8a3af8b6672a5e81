"""Order: what a node is called and numbered by where its block stands in a program."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.strategies.node_info import BlockPlace, info


def draw_number(node: fx.Node) -> int | None:
    """Return the number of a random call among those of a program."""
    places = (argument for argument in node.args if isinstance(argument, DrawPlace))
    return next((place.number for place in places if isinstance(place.number, int)), None)


def checkpoint_number(node: fx.Node) -> int | None:
    """Return the number of the user's checkpoint that a call stands in."""
    return info(node).checkpoint


def put_in_block(node: fx.Node, place: BlockPlace, before: int = 0) -> None:
    """Let a copy of a node of the block `before` stand in another block: all names and numbers of
    it follow."""
    blocks, known = place.blocks, info(node)
    known.block = place
    known.module = blocks.moved(known.module, before, place.number)
    if "origin" in node.meta:
        kind, name = known.origin
        known.origin = kind, blocks.moved(name, before, place.number)
    later = place.number - before
    move(node, later * blocks.draws, later * blocks.checkpoints)


def copy_node(
    graph: fx.Graph, source: fx.Node, name: str, read: Callable[[fx.Node], fx.Node]
) -> fx.Node:
    """Add a node to the end of a graph that is called and does as a `source`, but reads what `read`
    gives for each value; refuse a name that another node has, as a block would be there twice."""
    target = name if source.op == "placeholder" else source.target
    copy = graph.create_node(source.op, target, name=name)
    if copy.name != name:
        raise ValueError(f"{name} is in the program already")
    # Arguments that are set later are not searched for symbols, which takes longest.
    if source.args:
        copy.args = fx.map_arg(source.args, read)
    if source.kwargs:
        copy.kwargs = fx.map_arg(source.kwargs, read)
    copy.meta = dict(source.meta)
    return copy


def move(node: fx.Node, draws: int, checkpoints: int) -> None:
    """Let a call come later by so many draws and checkpoints."""
    if draws:
        node.args = tuple(
            place._replace(number=place.number + draws) if isinstance(place, DrawPlace) else place
            for place in node.args
        )
    if checkpoints and (number := info(node).checkpoint) is not None:
        info(node).checkpoint = number + checkpoints
