"""Value storage: in whose memory a value of a program lies, and who reads that memory."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autopar.strategies.node_info import info
from autopar.strategies.registry import is_view
from autopar.strategies.results import is_result, maker


def storage(node: fx.Node) -> fx.Node:
    """Return the value whose memory `node` looks at: itself, unless it is a view."""
    while node.op == "call_function" and (is_view(node) or is_identity(node)):
        node = node.all_input_nodes[0]
    return node


def source(value: fx.Node) -> fx.Node:
    """Return the operator in whose memory a value lies, or a placeholder."""
    return maker(storage(value))


def is_read_outside(node: fx.Node, members: Collection[fx.Node]) -> bool:
    """Return whether an operator's results, or views of them, are read outside of `members`."""
    return any(
        user not in members
        or (
            (is_result(user) or is_view(user) or is_identity(user))
            and is_read_outside(user, members)
        )
        for user in node.users
    )


def is_identity(node: fx.Node) -> bool:
    """Return whether a node is a movement that moves nothing forward."""
    movement = info(node).movement
    return movement is not None and movement.kind == "identity"
