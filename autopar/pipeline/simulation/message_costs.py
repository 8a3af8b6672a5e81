"""Messages: what goes from stage to stage, over the links between the places where they stand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from autopar.cluster import AxisLink, Cluster
from autopar.cluster.cluster_part import PipelineLine
from autopar.cluster.links import MessageLink
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.simulation.action_times import Passage, Passages
from autopar.pipeline.stages.stage_cost import StageCost
from autopar.pipeline.stages.stage_hardware import Standing

Placement = tuple[tuple[int, ...], ...]


def passages(
    made: Schedule, stages: Sequence[StageCost], cluster: Cluster, line: PipelineLine
) -> Passages:
    """What each message of a schedule takes, where `stages` receive what they do."""
    ways, found = ways_of(cluster, line, made.placement), {}
    for pipe, places in enumerate(made.placement):
        for stage, (here, there) in enumerate(pairwise(places)):
            size = stages[stage + 1].receives
            if here != there:
                found[pipe, stage, True] = _passage(ways[here, there], size)
                found[pipe, stage + 1, False] = _passage(ways[there, here], size)
    return found


def _passage(way: MessageLink, size: float) -> Passage:
    return Passage(size / way.bandwidth, way.alpha, way.is_inside)


def standings(
    placement: Placement,
    cluster: Cluster,
    line: PipelineLine,
    kinds: Sequence[int],
    spare: Sequence[float],
) -> list[Standing]:
    """Where the stages stand whose copies are at these places; of these `kinds` says of which kind
    of machines they are, `spare` how much more memory their devices have."""
    ways, found = ways_of(cluster, line, placement), []
    for stage, places in enumerate(zip(*placement)):
        before = [pipe[stage - 1] for pipe in placement] if stage else places
        links = [
            ways[pair].bandwidth
            for here, there in zip(before, places)
            for pair in ((here, there), (there, here))
            if here != there
        ]
        own = tuple(sorted({kinds[place] for place in places}))
        room = min(spare[place] for place in places)
        found.append(Standing(own, min(links, default=math.inf), room))
    return found


@lru_cache(maxsize=256)
def ways_of(
    cluster: Cluster, line: PipelineLine, placement: Placement
) -> Mapping[tuple[int, int], MessageLink]:
    """What messages take between the places of stages that follow one another, both ways."""
    return cluster.message_ways(line.ranks, _pairs(placement))


def _pairs(placement: Placement) -> Iterator[tuple[int, int]]:
    for places in placement:
        for here, there in pairwise(places):
            if here != there:
                yield from ((here, there), (there, here))


@lru_cache(maxsize=256)
def replica_links(cluster: Cluster, line: PipelineLine, groups: Placement) -> Sequence[AxisLink]:
    """What groups of as many places each have between them, all of them busy at once."""
    return cluster.replica_links(line.ranks, groups)
