"""Bounds: how much less than with whole states a step may take with cut ones.

They may be faster: backward hides no more of an all-reduce than it computes, while of cut states
forward hides the gathers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

from autopar.capture.captured import Captured
from autopar.capture.origins import state_bytes
from autopar.cluster import Cluster
from autopar.cost.cluster_price import ClusterPrice
from autopar.errors import Interrupted
from autopar.mesh import Mesh
from autopar.planner.layouts import LayoutRequest, Layouts
from autopar.planner.request import Request
from autopar.search.layout_search import OutOfTime
from autopar.search.search_report import SearchReport
from autopar.states import States
from autopar.strategies.node_info import info

CHEAPEST = States.of("zero1")  # of states that are cut: the others move no less


def most_saved(captured: Captured, cluster: Cluster, meshes: Sequence[Mesh]) -> float:
    """The seconds of a step that cut states save at most, with any layouts on any of `meshes`.

    One all-reduce becomes two movements that together seldom take less, and forward hides some of
    the second. No parameter is larger than a whole one.
    """
    prices = {
        (price, axes)
        for mesh in meshes
        for price in [ClusterPrice(cluster, mesh, CHEAPEST.buffer_bytes)]
        for count in range(1, len(mesh.names) + 1)
        for axes in combinations(mesh.names, count)
    }

    def saved(size: float) -> float:
        def of(price: ClusterPrice, axes: tuple[str, ...]) -> float:
            kinds = ("all_reduce", "reduce_scatter", "all_gather")
            once, first, second = (float(price.bucketed(axes, size, kind)) for kind in kinds)
            return max(0.0, once - first - second) + cluster.device.overlap * second

        return max((of(*way) for way in prices), default=0.0)

    learned = [
        node
        for node in captured.graph.find_nodes(op="placeholder")
        if node.name in captured.parameters and info(node).learns
    ]
    sizes = Counter[int]()
    for node in learned:
        size = info(node).val.numel() * max(state_bytes(node).copy, state_bytes(node).gradient)
        sizes[size] += info(node).times
    return sum(saved(float(size)) * count for size, count in sizes.items())


def lowered(
    known: SearchReport,
    states: States,
    asked: LayoutRequest,
    layouts: Layouts,
    is_huge: bool,
    least: float,
) -> SearchReport:
    """What is known of a plan with these `states`, with a bound for all cut ones if it was chosen
    to have some.

    The layouts of the cheapest are looked for; where they are not, as of huge programs, or the
    search for them ends early, it is by what cut states save at most, and not below the `least`
    that operators take.
    """
    if layouts.request.states is not None or not states.is_cut:
        return known
    stages = 1 if asked.line is None else asked.line.stages
    asked = replace(asked, states=CHEAPEST)
    with suppress(KeyboardInterrupt, Interrupted, OutOfTime):
        search = None if is_huge else layouts.find(asked)[0].search
        if search is not None and not search.interrupted:
            return known.lowered(search.bound / stages)
    saved = saved_by_states(asked, layouts.request) / stages
    return known.lowered(max(known.bound - saved, least))


def saved_by_states(asked: LayoutRequest, request: Request) -> float:
    """The seconds that cut states save at most of what is known with whole ones; none, if it was
    asked for some."""
    if request.states is not None:
        return 0.0
    return most_saved(asked.captured, asked.machines(request.cluster), asked.offered)
