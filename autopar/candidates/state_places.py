"""State places: over which axes the states of each parameter of a program are cut.

A parameter's data axes are those over which its gradient is summed last: it is a replica there.
They are read from the rewritten program, whatever decided its layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from torch import fx

from autopar.capture.gradients import reached
from autopar.errors import InvalidInput
from autopar.layout import ParameterPlacement
from autopar.mesh import Mesh
from autopar.search.constraints import LayoutConstraint
from autopar.states import States
from autopar.strategies.node_info import info

Axes = tuple[str, ...]


def state_places(graph: fx.Graph, states: States, mesh: Mesh) -> dict[str, ParameterPlacement]:
    """Return the places of parameters that have more than one. What nobody reads has one: another
    program on the same parameters may read it, without a copy in this one."""
    axes, main = data_axes(graph, mesh), main_axes(graph, mesh)
    places_by_name, known = {}, dict[Hashable, ParameterPlacement]()
    for node in graph.find_nodes(op="placeholder"):
        places = info(node).places
        if places is None or not node.users:
            continue
        shape, learns = tuple(info(node).val.shape), info(node).learns
        order = sorted(axes[node], key=main.__contains__)  # those of most parameters innermost
        already = mesh.degree(axis for axis in places.working.axes if axis in main)
        key = places.working, shape, tuple(order), learns, already, info(node).on_host
        if key not in known:
            known[key] = states.places(
                places.working,
                shape,
                order,
                mesh,
                learns=learns,
                already=already,
                runs_on_host=info(node).on_host,
            )
        places_by_name[node.name] = known[key]
    return {name: places for name, places in places_by_name.items() if not places.is_tied}


def data_axes(graph: fx.Graph, mesh: Mesh) -> dict[fx.Node, Axes]:
    """Return the data axes of each parameter. A parameter without a gradient is cut where others
    are, if it is a replica there."""
    nodes = [n for n in graph.find_nodes(op="placeholder") if info(n).places is not None]
    every = {axis for node in nodes for axis in info(node).sync}
    learned = reached(graph.output_node().args[0])  # type: ignore[arg-type]

    def of(node: fx.Node) -> Axes:
        used = info(node).type.layout.axes
        summed = info(node).sync if node in learned else every - set(used)
        return tuple(axis for axis in mesh if axis in summed and mesh[axis] > 1)

    return {node: of(node) for node in nodes}


def main_axes(graph: fx.Graph, mesh: Mesh) -> Axes:
    """Return the data axes of most elements of parameters."""
    count: Counter[Axes] = Counter()
    for node, axes in data_axes(graph, mesh).items():
        if info(node).learns:
            count[axes] += info(node).val.numel()
    return max(count, key=lambda axes: (bool(axes), count[axes]), default=())


def require_agreement(
    states: States, annotated: Mapping[str, LayoutConstraint], axes: Axes, mesh: Mesh
) -> None:
    """Refuse a number of parts that is not the one that an annotation cuts a parameter into."""
    number = states.parameters
    if number == "all" or number == 1 or states.lifetime == "step":
        return
    for name, constraint in annotated.items():
        cut = [axis for axis in constraint.layout.axes if axis in axes]
        if mesh.degree(cut) not in (1, number):
            raise InvalidInput(
                "parameters are cut into as many parts as annotations cut them into, over the axes "
                "that cut the batch",
                got=f"{states}, where {name} is {constraint.layout} on {mesh}",
                remedy=f"parameters={mesh.degree(cut)}, or no annotation of this parameter",
                source=constraint.source,
            )


def has_something_to_cut(graph: fx.Graph, states: States, mesh: Mesh) -> bool:
    """Return whether states can be cut at all, if they are to be and there are ranks. On the host
    they may be whole."""
    is_asked = states.is_cut and not states.is_on_host and mesh.size > 1
    return not is_asked or any(data_axes(graph, mesh).values())


def require_something_to_cut(graph: fx.Graph, states: States, mesh: Mesh) -> None:
    """Refuse states that are asked for and cannot be cut at all."""
    if has_something_to_cut(graph, states, mesh):
        return
    raise InvalidInput(
        "states are cut over ranks that hold replicas of parameters and sum their gradients",
        got=f"{states} on {mesh}, where no gradient is summed over ranks at the end of a step",
        remedy='states="whole", or a mesh with an axis that cuts the batch',
    )
