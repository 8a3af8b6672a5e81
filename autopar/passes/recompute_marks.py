"""Recomputation: which operators run again in backward, and which values are not kept till then.

Comes last of the passes on types. A region that is recomputed in full keeps what it reads: its
backward begins with its forward, up to the last operator that keeps something of it. One that is
recomputed selectively keeps all but those values that cheap operators make again from others that
are kept anyway; each is made again where backward first reads it. What a region keeps may be kept
elsewhere, in pieces or on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from autopar.capture.origins import gathered_parameter, is_made_of_parameters
from autopar.capture.randomness import is_random
from autopar.capture.regions import runs
from autopar.cost.repeats import NO_EQUAL_BLOCKS, EqualBlocks
from autopar.cost.saved_tensors import offload_axes, saved_by, saved_throughout, source, storage
from autopar.mesh import Mesh
from autopar.passes.pass_setting import Setting
from autopar.strategies.node_info import RecomputeRegion, info
from autopar.strategies.registry import is_view
from autopar.strategies.results import has_results, is_result, maker, result_index

SMALL = 1 / 16  # of the bytes of the largest value that is made again: less is kept


def mark_recomputed(
    graph: fx.Graph, setting: Setting, repeats: EqualBlocks = NO_EQUAL_BLOCKS
) -> fx.Graph:
    """Write on the nodes of every region what is done of them again, and on no others. `repeats`:
    the equal blocks of the program without its regions."""
    for node in graph.nodes:
        for fact in ("region", "remade", "dropped", "away"):
            node.meta.pop(fact, None)
    decided, seen = setting.decisions.recompute, dict[str, int]()
    if not decided:
        return graph
    sizes: dict[RecomputeRegion, int] = {}
    for name, nodes in runs(graph, decided, repeats.along(is_made_of_parameters)):
        number = seen[name] = seen.get(name, -1) + 1
        about = any(map(is_random, nodes)), info(nodes[-1]).times
        region = RecomputeRegion(name, decided[name], number, *about)
        for node in nodes:
            info(node).region = region
        sizes[region] = len(nodes)
        if region.how.kind is not None and not _follow(nodes, sizes, repeats):
            (_mark_full if region.is_full else _mark_selective)(nodes, setting.mesh)
        if region.how.keep != "device":
            _mark_away(nodes, region, setting.mesh)
    return graph


def _follow(
    nodes: Sequence[fx.Node], sizes: Mapping[RecomputeRegion, int], repeats: EqualBlocks
) -> bool:
    """Mark a region as that of the block before it, if it is the same one block later."""
    earlier = [one for node in nodes if (one := repeats.before(node)) is not None]
    own, regions = info(nodes[0]).region, {info(one).region for one in earlier}
    (other,) = regions if len(regions) == 1 else (None,)
    if own is None or other is None or other.how != own.how:
        return False
    if not len(earlier) == len(nodes) == sizes[other]:
        return False
    for node, one in zip(nodes, earlier):
        info(node).update(remade=info(one).remade, dropped=info(one).dropped)
    return True


def _mark_full(nodes: Sequence[fx.Node], mesh: Mesh) -> None:
    own, last = set(nodes), -1
    for index, node in enumerate(nodes):
        if any(key[0] in own for key in saved_by(node, mesh)):
            last = index
    for node in nodes[: last + 1]:
        # A parameter that is gathered is gathered for backward anyway.
        info(node).remade = gathered_parameter(node) is None


def _mark_selective(nodes: Sequence[fx.Node], mesh: Mesh) -> None:
    own = set(nodes)
    sizes: dict[fx.Node, float] = {}
    for node in nodes:
        for (value, place), size in saved_by(node, mesh).items():
            if isinstance(place, int):
                sizes[value] = max(size, sizes.get(value, 0.0))
    kept = sizes.keys()
    # Values that are there in backward, or can be made of such at little cost.
    again: dict[fx.Node, bool] = {}
    for node in nodes:
        if not is_result(node) and _is_cheap(node):
            again[node] = all(
                value.op == "placeholder" or value in kept or again.get(value, False)
                for value in map(source, node.all_input_nodes)
            )
    possible = [n for n in kept & own if again.get(n) and not _is_read_outside(n, own)]
    least = SMALL * max((sizes[node] for node in possible), default=0.0)
    dropped = {node for node in possible if sizes[node] >= least}
    waiting = list(dropped)
    for node in dropped:
        info(node).dropped = True
    while waiting:
        node = waiting.pop()
        if not info(node).remade:
            info(node).remade = True
            sources = map(source, node.all_input_nodes)
            waiting += [v for v in sources if v in own and (v not in kept or v in dropped)]


def _mark_away(nodes: Sequence[fx.Node], region: RecomputeRegion, mesh: Mesh) -> None:
    """Write on values, and on views of them that a region reads, that it keeps them elsewhere."""
    own = set(nodes)
    kept = {key for node in nodes for key in saved_throughout(node, region, mesh)}
    for value in dict.fromkeys(v for node in nodes for v in (*node.all_input_nodes, node)):
        at = storage(value)
        if (value in own and at is not value) or has_results(value):
            continue
        key = maker(at), result_index(at)
        axes = offload_axes(key, region.how.keep, mesh) if key in kept else None
        if axes is not None:
            for one in {value, at}:
                info(one).away = {**info(one).away, region: axes}


def stay_received(graph: fx.Graph) -> None:
    """Of a stage: what it received it holds anyway, and no region keeps it elsewhere."""
    for node in graph.nodes:
        if info(node).away and storage(node).op == "placeholder":
            info(node).away = {}


def _is_read_outside(node: fx.Node, own: set[fx.Node]) -> bool:
    """Whether an operator's results, or views of them, are read by others than `own`."""
    return any(
        user not in own
        or (
            (is_result(user) or is_view(user) or _is_identity(user)) and _is_read_outside(user, own)
        )
        for user in node.users
    )


def _is_identity(node: fx.Node) -> bool:
    movement = info(node).movement
    return movement is not None and movement.kind == "identity"


def _is_cheap(node: fx.Node) -> bool:
    """Whether an operator does little more than read its inputs."""
    calls: Any = info(node).calls
    if not calls or info(node).movement is not None or info(node).start_of is not None:
        return False
    if info(node).joint is not None:
        return False
    return not is_view(node) and all(facts.is_cheap for facts, _ in calls)
