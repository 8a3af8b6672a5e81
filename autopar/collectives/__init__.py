"""Movements of data between ranks, each with a defined backward, and the cheapest way by them.

>>> from autopar.layout import Layout, Placement
>>> from autopar.mesh import Mesh
>>> mesh = Mesh(dp=2, tp=2)
>>> source, target = Layout(None, "tp"), Placement(Layout(None, None), pending="tp")
>>> path = redistribute(source, target, (8, 8), 4, mesh, LinkPrice.uniform(mesh))
>>> [(movement.kind, movement.axes, movement.backward) for movement in path]
[('all_gather', ('tp',), 'reduce_scatter')]

Read `movement` (the table), `redistribution` (the cheapest path), `torch_operators` (between
processes), `virtual_movements` (in one process), then `joint_kernels` (calls with messages inside)
and `joint_messages` (how a process carries these out).
"""

from autopar.collectives.movement import Movement
from autopar.collectives.redistribution import (
    LinkPrice,
    Price,
    apply_path,
    moved_bytes,
    movement_cost,
    redistribute,
    redistribution_cost,
    verify_path,
)
from autopar.collectives.torch_operators import operator_call
from autopar.collectives.virtual_movements import (
    from_ranks,
    move,
    require_single_gradient,
    to_ranks,
)

__all__ = [
    "LinkPrice",
    "Movement",
    "Price",
    "apply_path",
    "from_ranks",
    "move",
    "moved_bytes",
    "movement_cost",
    "operator_call",
    "redistribute",
    "redistribution_cost",
    "require_single_gradient",
    "to_ranks",
    "verify_path",
]
