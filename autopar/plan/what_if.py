"""What if: a plan on other machines, or with inputs of other sizes, priced at once.

    print(plan.what_if(nodes=4))         # or bandwidth="2x", sequence=32768, memory="40GB", ...
    print(plan.what_if(nodes=4, batch="2x", search=True))

The decisions of the plan are taken over as they are and priced there; with a search, what would be
decided there stands beside them.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from autopar.capture.again import captured_again
from autopar.capture.captured import Captured
from autopar.capture.sizes import Sizes, resized, sizes_of
from autopar.cluster import Cluster
from autopar.errors import InvalidInput, known_arguments
from autopar.layout import Layout, TensorType
from autopar.passes.microbatches import batch_statistics
from autopar.plan.plan_value import PlanValue
from autopar.plan.situation import Situation, WhatIf
from autopar.planner.candidate import Candidate
from autopar.planner.moved import data_axis, idle_axes, moved
from autopar.planner.offers import Choice, has_world
from autopar.planner.patience import SECONDS, Patience, require_seconds
from autopar.planner.request import AXIS, Request
from autopar.planner.verdict import refuse_random, require_rules
from autopar.search.smallest_footprint import NothingFits
from autopar.strategies.node_info import info
from autopar.text.progress import reporter
from autopar.text.units import LEAST_MEMORY, counted, read_bytes, read_rate, scaled

Change = float | str  # what something becomes, or how many times as much, as "2x"
_BYTES = {"bandwidth": "B/s", "inside": "B/s", "memory": "B"}  # what is said with a unit
_SEQUENCE = (
    "a sequence: the second dim of tokens that look up rows, or of (batch, sequence, features), "
    "where no weight is as long as it"
)
_TIMES = re.compile(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*x\s*", re.IGNORECASE)


@dataclass(frozen=True)
class _Changes:
    """What is asked, as it is given."""

    nodes: Change | None
    bandwidth: Change | None
    inside: Change | None
    batch: Change | None
    sequence: Change | None
    memory: Change | None

    def __str__(self) -> str:
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{n} {_said(n, v)}" for n, v in said.items() if v is not None)


CHANGES = tuple(field.name for field in fields(_Changes))


@known_arguments
def what_if(
    plan: PlanValue,
    *,
    nodes: Change | None = None,
    bandwidth: Change | None = None,
    inside: Change | None = None,
    batch: Change | None = None,
    sequence: Change | None = None,
    memory: Change | None = None,
    search: bool = False,
    seconds: float | None = SECONDS,
) -> WhatIf:
    """What a step of the same decisions would take with this many `nodes`, this `bandwidth` of each
    node's way out, and of links `inside` of nodes (bytes/s), with inputs of another `batch` or
    `sequence`, and whether they fit into this `memory` of each device. Each is a number, of bytes
    also as "100GB/s" and "40GB", or how many times as much: "2x".

    With the nodes grows the axis of the mesh that cuts the batch (or else the sequence), and the
    global batch stays, if not told otherwise. `search`: decide anew there, too, all free,
    within so many `seconds`, as `plan` does."""
    require_seconds("seconds", seconds)
    asked = _Changes(nodes, bandwidth, inside, batch, sequence, memory)
    if not str(asked):
        raise InvalidInput(
            "what_if() is told what is different",
            got="nothing of it",
            remedy='plan.what_if(nodes=4), or bandwidth="2x", sequence=32768',
        )
    cluster, limit = _cluster(plan.cluster, asked, search), _limit(plan)
    if asked.memory is not None:
        cluster = _with_memory(cluster, asked.memory, limit)
        limit = cluster.device.memory
    now, whole = sizes_of(plan.original), plan.original
    wanted = Sizes(
        _size("batch", batch, now.batch, "a batch, the first dim of some input", whole),
        _size("sequence", sequence, now.sequence, _SEQUENCE, whole),
    )
    whole = whole if wanted == now else _of_sizes(whole, now, wanted)
    found, why, note = _carried_over(plan, cluster, whole, search)
    searched, failed = None, ""
    if search:
        searched, failed, early = _searched(plan, cluster, limit, whole, seconds)
        note = "; ".join(filter(None, (note, "the search ended early" if early else "")))
    if searched is not None and found is not None and found.fits(limit):
        searched = min(found, searched, key=lambda one: one.seconds)
    return WhatIf(
        asked=str(asked),
        note=note,
        now=Situation.of(plan, _limit(plan), now),
        then=None if found is None else Situation.of(found, limit, wanted),
        refused=why,
        searched=None if searched is None else Situation.of(searched, limit, wanted),
        not_found=failed,
    )


def _carried_over(
    plan: PlanValue, cluster: Cluster, whole: Captured, search: bool
) -> tuple[Candidate | None, str, str]:
    """The plan there, or why it cannot be; and what is said of it. Refused without a search."""
    try:
        ranks, note = _grown(plan, cluster)
        return moved(plan, cluster, ranks, whole), "", note
    except InvalidInput as error:
        if not search:
            raise
        return None, f"{error.rule}: {error.got}", ""


def _grown(plan: PlanValue, cluster: Cluster) -> tuple[dict[str, int], str]:
    """The ranks of the axis that grows with the nodes, and what is said of it."""
    before, after = len(plan.cluster.nodes), len(cluster.nodes)
    if before == after:
        return {}, ""
    for axis in idle_axes(plan) if after < before else ():
        ranks, rest = divmod(plan.mesh[axis] * after, before)
        if ranks and not rest:
            words = f"goes from {plan.mesh[axis]} to {counted(ranks, 'rank')}"
            return {axis: ranks}, f"{axis}, along which all ranks do the same, {words}"
    found = data_axis(plan, sizes_of(plan.original).sequence)
    remedy = "search=True, which decides anew"
    if found is None:
        raise InvalidInput(
            "with the nodes grows the axis of the mesh that cuts the batch or the sequence",
            got=f"{plan.whole_mesh}, of which no axis does",
            remedy=remedy,
        )
    axis, what = found
    ranks, rest = divmod(plan.mesh[axis] * after, before)
    if rest or not ranks:
        raise InvalidInput(
            f"the axis of the mesh that cuts the {what} grows in proportion to the nodes",
            got=f"{axis}={plan.mesh[axis]} on {counted(before, 'node')}, for {after}",
            remedy=remedy,
        )
    words = (
        f"{axis}, which cuts the {what}, goes from {plan.mesh[axis]} to {counted(ranks, 'rank')}"
    )
    return {axis: ranks}, words


def _searched(
    plan: PlanValue, cluster: Cluster, limit: float, whole: Captured, seconds: float | None
) -> tuple[Candidate | None, str, bool]:
    """The best there is there, or why there is none; and whether the search ended early."""
    model, axis = whole.example.model, AXIS if plan.pipelining is None else plan.pipelining.axis
    parts = 1 if batch_statistics(whole) else None  # more would change the loss
    free = cluster if has_world() else replace(cluster, used=())
    patience = Patience.begun(seconds)
    request = Request(free, "auto", limit, True, axis=axis, microbatches=parts, patience=patience)
    try:
        if plan.strict:
            require_rules(whole)
        with reporter(plan.progress) as report:
            report("search", f"{counted(cluster.devices, 'device')}")
            choice = Choice(model, whole, request, report, has_world())
            best, _ = choice.best()
        refuse_random(whole, best.whole_mesh, best.microbatches)
    except (InvalidInput, NothingFits) as error:
        return None, f"{error.rule}: {error.got}", False
    return best, "", bool(choice.ended)


def _of_sizes(planned: Captured, now: Sizes, wanted: Sizes) -> Captured:
    """The program of the same model with other inputs."""
    example = planned.example
    args, kwargs = resized(example.args, example.kwargs, now, wanted)
    try:
        return captured_again(planned, args, kwargs, example.modes)
    except InvalidInput as error:
        raise InvalidInput(
            f"the model runs on a batch of {wanted.batch}"
            + f" and a sequence of {wanted.sequence}" * (wanted.sequence is not None),
            got=error.got,
            remedy="sizes that it takes, or plan(model, args) for a model that is built for these",
            source=error.source,
        ) from error


def _limit(plan: PlanValue) -> float:
    return plan.cluster.device.memory if plan.limit is None else plan.limit


def _cluster(now: Cluster, asked: _Changes, search: bool) -> Cluster:
    """The machines there, of which a search may use others than now."""
    count = len(now.nodes) if asked.nodes is None else _count("nodes", asked.nodes, len(now.nodes))
    if len({*now.nodes}) > 1 and count != len(now.nodes):
        raise InvalidInput(
            "nodes are added to, or taken from, a cluster of equal ones",
            got=f"{now.name}, of several kinds",
            remedy="plan again for the other cluster",
        )
    made = now if count == len(now.nodes) else replace(now, nodes=now.nodes[:1] * count, used=())
    if asked.bandwidth is not None:
        if len((made if search else made.in_use).nodes) == 1:
            raise InvalidInput(
                "bandwidth is that between nodes",
                got=f"{asked.bandwidth} on one node",
                remedy="inside= for links in a node, or nodes=2 beside it",
            )
        rate = _changed("bandwidth", asked.bandwidth, made.network.bandwidth)
        made = replace(made, network=replace(made.network, bandwidth=rate))
    if asked.inside is None:
        return made
    links = {node: _changed("inside", asked.inside, node.link.bandwidth) for node in {*made.nodes}}
    nodes = tuple(
        replace(node, link=replace(node.link, bandwidth=links[node])) for node in made.nodes
    )
    return replace(made, nodes=nodes)


def _with_memory(cluster: Cluster, memory: Change, limit: float) -> Cluster:
    """The same machines, each device with other memory; now it has all of its own, or as much as a
    plan was to keep to."""
    is_own = limit == cluster.device.memory
    nodes = tuple(
        replace(
            node,
            device=replace(
                node.device,
                memory=_changed("memory", memory, node.device.memory if is_own else limit),
            ),
        )
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def _size(
    name: str, given: Change | None, now: int | None, what: str, captured: Captured
) -> int | None:
    """Of the inputs; None where they have no such dim."""
    if given is None:
        return now
    if now is None:
        nodes = (node for node in captured.graph.nodes if node.name in captured.inputs)
        types = [info(node).val for node in nodes]
        inputs = ", ".join(str(TensorType.of(one, Layout.replicated(one.ndim))) for one in types)
        raise InvalidInput(
            f"{name} is for inputs with {what}",
            got=f"{name}={given!r} for {inputs or 'no tensor'}, which has none that can be told",
            remedy="plan(model, args) with inputs of the other size",
        )
    return _count(name, given, now)


def _count(name: str, given: Change, now: int) -> int:
    """A whole number."""
    value = _changed(name, given, now)
    if value != round(value):
        raise InvalidInput(
            f"{name} is a whole number", got=f"{value:g}", remedy=f"{name}={2 * now}"
        )
    return round(value)


def _changed(name: str, given: Any, now: float) -> float:
    """What is given, or so many times what is now."""
    value = _read(name, given, now)
    least = LEAST_MEMORY if name in _BYTES else 0  # who says less has meant another unit
    if not least < value < math.inf:
        other = f'"100G{_BYTES[name]}"' if name in _BYTES else f"{2 * now:g}"
        other += ' (or "400Gb/s", of bits)' if _BYTES.get(name) == "B/s" else ""
        raise InvalidInput(
            f"{name} is a number above {least}, or how many times as much as now",
            got=repr(given),
            remedy=f'{name}={other}, or {name}="2x"',
        )
    return value


def _read(name: str, given: Any, now: float) -> float:
    if not isinstance(given, str):
        return read_bytes(given)
    if match := _TIMES.fullmatch(given):
        return float(match[1]) * now
    if name in _BYTES:
        return read_rate(given) if _BYTES[name] == "B/s" else read_bytes(given)
    with suppress(ValueError):
        return float(given)
    return math.nan


def _said(name: str, given: Any) -> str:
    """What is given, as people write it."""
    if isinstance(given, str) or not math.isfinite(read_bytes(given)):
        return str(given)
    return scaled(given, _BYTES[name]) if name in _BYTES else f"{given:.15g}"
