"""Restaging: another program on the same parameters, cut into the stages that hold these.

    cut = cut_like(flow, plan.cut(plan.pipelining))      # of another batch, mode or signature

Each stage begins as early as the flow and the places of parameters allow. A call that the other
program has, too, is not moved to an earlier stage than there.
"""

from __future__ import annotations

from autopar.errors import InvalidInput
from autopar.passes.flow import Flow
from autopar.passes.stages import StageCut
from autopar.strategies.node_info import info
from autopar.text.units import plural


def cut_like(flow: Flow, like: StageCut) -> StageCut:
    """Cut the program of `flow` into the stages of `like`, which hold the same parameters."""
    holders = {info(node).origin[1]: stages for node, stages in like.stages.items()}
    stage_of = {node.name: like.stage_at(place) for node, place in like.flow.position.items()}
    names_read: list[set[str]] = [set() for _ in flow.activations]
    for node, places in flow.read_at.items():
        if node.op == "placeholder" and info(node).origin[0] in ("parameter", "buffer"):
            for place in places if flow.activations else ():
                names_read[place].add(info(node).origin[1])
    # Calls of the same name may be others: what they ask for beyond their parameters is a wish.
    earliest = [stage_of.get(node.name, 0) for node in flow.activations]
    try:
        stages = _stages(flow, names_read, holders, earliest)
    except InvalidInput:
        stages = _stages(flow, names_read, holders, [0] * len(earliest))
    points = [sum(stage < index for stage in stages) for index in range(like.count)]
    return StageCut(flow, (*points, len(stages)), like.placement, holders)


def _stages(
    flow: Flow, names_read: list[set[str]], held: dict[str, tuple[int, ...]], earliest: list[int]
) -> list[int]:
    """Return the stage of each activation: none before those that come before it."""
    stages: list[int] = []
    current = 0
    for node, names, wanted in zip(flow.activations, names_read, earliest):
        current = max(current, wanted)
        holding = set.intersection(*(set(held[name]) for name in names)) if names else {current}
        later = [stage for stage in holding if stage >= current]
        if not later:
            where = "; ".join(f"{name} is held by {_listed(held[name])}" for name in sorted(names))
            raise InvalidInput(
                "a program goes through the stages of a pipeline once, in their order",
                got=f"{node.name} in {info(node).module or 'the model'} comes in stage {current} "
                f"or later, but {where}",
                remedy="plan for this call, or pipeline=None",
                source=info(node).source,
            )
        current = min(later)
        stages.append(current)
    return stages


def _listed(stages: tuple[int, ...]) -> str:
    return f"{plural('stage', len(stages))} {', '.join(map(str, stages))}"
