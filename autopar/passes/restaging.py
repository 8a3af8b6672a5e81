"""Restaging: another program on the same parameters, cut into the stages that hold these.

    cut = cut_like(flow, plan.cut(plan.pipelining))      # of another batch, mode or signature

Each stage begins as early as the flow and the places of parameters allow, and not before what it
has in common with the program that it is cut like.
"""

from __future__ import annotations

from autopar.errors import InvalidInput
from autopar.passes.flow import Flow
from autopar.passes.stages import StageCut
from autopar.strategies.node_info import info
from autopar.text.units import plural


def cut_like(flow: Flow, like: StageCut) -> StageCut:
    """The program of `flow` in the stages of another, which hold what they hold there."""
    held = {info(node).origin[1]: stages for node, stages in like.stages.items()}
    known = {node.name: like.stage_at(place) for node, place in like.flow.position.items()}
    needs: list[set[str]] = [set() for _ in flow.activations]
    for node, places in flow.read_at.items():
        if node.op == "placeholder" and info(node).origin[0] in ("parameter", "buffer"):
            for place in places if flow.activations else ():
                needs[place].add(info(node).origin[1])
    # Calls of the same name may be others: what they ask for beyond their parameters is a wish.
    wished = [known.get(node.name, 0) for node in flow.activations]
    try:
        stages = _stages(flow, needs, held, wished)
    except InvalidInput:
        stages = _stages(flow, needs, held, [0] * len(wished))
    points = [sum(stage < index for stage in stages) for index in range(like.count)]
    return StageCut(flow, (*points, len(stages)), like.placement, held)


def _stages(
    flow: Flow, needs: list[set[str]], held: dict[str, tuple[int, ...]], wished: list[int]
) -> list[int]:
    """The stage of each activation: none before those that come before it."""
    found: list[int] = []
    now = 0
    for node, names, wish in zip(flow.activations, needs, wished):
        now = max(now, wish)
        offered = set.intersection(*(set(held[name]) for name in names)) if names else {now}
        later = [stage for stage in offered if stage >= now]
        if not later:
            where = "; ".join(f"{name} is held by {_listed(held[name])}" for name in sorted(names))
            raise InvalidInput(
                "a program goes through the stages of a pipeline once, in their order",
                got=f"{node.name} in {info(node).module or 'the model'} comes in stage {now} or "
                f"later, but {where}",
                remedy="plan for this call, or pipeline=None",
                source=info(node).source,
            )
        now = min(later)
        found.append(now)
    return found


def _listed(stages: tuple[int, ...]) -> str:
    return f"{plural('stage', len(stages))} {', '.join(map(str, stages))}"
