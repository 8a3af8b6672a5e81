"""Order: numbers that a program gives in the order in which it runs, to draws and checkpoints."""

from __future__ import annotations

from torch import fx

from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.strategies.node_info import info


def draw_number(node: fx.Node) -> int | None:
    """Return the number of a random call among those of a program."""
    places = (argument for argument in node.args if isinstance(argument, DrawPlace))
    return next((place.number for place in places if isinstance(place.number, int)), None)


def checkpoint_number(node: fx.Node) -> int | None:
    """Return the number of the user's checkpoint that a call stands in."""
    return info(node).checkpoint


def move(node: fx.Node, draws: int, checkpoints: int) -> None:
    """Let a call come later by so many draws and checkpoints."""
    if draws:
        node.args = tuple(
            place._replace(number=place.number + draws) if isinstance(place, DrawPlace) else place
            for place in node.args
        )
    if checkpoints and (number := info(node).checkpoint) is not None:
        info(node).checkpoint = number + checkpoints
