"""Costs of the messages between stages, over the links between the places that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from autopar.cluster import AxisLink, Cluster
from autopar.cluster.cluster_part import PipelineLine
from autopar.cluster.links import MessageLink
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.simulation.action_times import MessageCost, MessageCosts
from autopar.pipeline.stages.stage_cost import StageCost
from autopar.pipeline.stages.stage_hardware import StageHardware

Placement = tuple[tuple[int, ...], ...]


def message_costs(
    schedule: Schedule, stages: Sequence[StageCost], cluster: Cluster, line: PipelineLine
) -> MessageCosts:
    """Return the cost of each message, of as many bytes as the `stages` receive."""
    ways, costs = ways_between_stages(cluster, line, schedule.placement), {}
    for pipe, places in enumerate(schedule.placement):
        for stage, (place, after) in enumerate(pairwise(places)):
            size = stages[stage + 1].receives
            if place != after:
                costs[pipe, stage, True] = _message_cost(ways[place, after], size)
                costs[pipe, stage + 1, False] = _message_cost(ways[after, place], size)
    return costs


def _message_cost(way: MessageLink, size: float) -> MessageCost:
    return MessageCost(size / way.bandwidth, way.alpha, way.is_inside)


def hardware_of_stages(
    placement: Placement,
    cluster: Cluster,
    line: PipelineLine,
    kinds: Sequence[int],
    spare: Sequence[float],
) -> list[StageHardware]:
    """Return the hardware of each stage, whose copies `placement` puts on places.

    `kinds`: the kind of machines at each place. `spare`: the bytes that its devices have beyond
    those that every device has.
    """
    ways, hardware = ways_between_stages(cluster, line, placement), []
    for stage, places in enumerate(zip(*placement)):
        before = [pipe[stage - 1] for pipe in placement] if stage else places
        links = [
            ways[pair].bandwidth
            for sender, receiver in zip(before, places)
            for pair in ((sender, receiver), (receiver, sender))
            if sender != receiver
        ]
        stage_kinds = tuple(sorted({kinds[place] for place in places}))
        room = min(spare[place] for place in places)
        hardware.append(StageHardware(stage_kinds, min(links, default=math.inf), room))
    return hardware


@lru_cache(maxsize=256)
def ways_between_stages(
    cluster: Cluster, line: PipelineLine, placement: Placement
) -> Mapping[tuple[int, int], MessageLink]:
    """Return the way of messages between places of neighbouring stages, in both directions."""
    return cluster.message_ways(line.ranks, _pairs(placement))


def _pairs(placement: Placement) -> Iterator[tuple[int, int]]:
    for places in placement:
        for place, after in pairwise(places):
            if place != after:
                yield from ((place, after), (after, place))


@lru_cache(maxsize=256)
def replica_links(cluster: Cluster, line: PipelineLine, groups: Placement) -> Sequence[AxisLink]:
    """Return the link inside each of `groups` of equal size, all of which are busy at once."""
    return cluster.replica_links(line.ranks, groups)
