"""The price of a plan on other machines, or with inputs of other sizes.

    print(plan.what_if(nodes=4))         # or bandwidth="2x", sequence=32768, memory="40GB", ...
    print(plan.what_if(nodes=4, batch="2x", search=True))

The decisions of the plan are taken over as they are and priced there; with a search, what would be
decided there stands beside them.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from autopar.candidates.candidate import Candidate
from autopar.candidates.moved import data_axis, idle_axes, moved
from autopar.candidates.patience import SECONDS, Patience, require_seconds
from autopar.candidates.request import AXIS, Request
from autopar.capture.again import captured_again
from autopar.capture.captured import Captured
from autopar.capture.sizes import Sizes, resized, sizes_of
from autopar.cluster import Cluster
from autopar.errors import InvalidInput, known_arguments
from autopar.layout import Layout
from autopar.passes.microbatches import batch_statistics
from autopar.planner.offers import Choice, has_world
from autopar.plans.changes import UNITS, Change, Changes
from autopar.plans.plan_value import PlanValue
from autopar.plans.situation import Situation, WhatIf
from autopar.plans.verdict import refuse_random, require_rules
from autopar.search.smallest_footprint import NothingFits
from autopar.strategies.node_info import info
from autopar.tensor_type import TensorType
from autopar.text.progress import reporter
from autopar.text.units import LEAST_MEMORY, counted, read_bytes, read_rate

_SEQUENCE = (
    "a sequence: the second dim of tokens that look up rows, or of (batch, sequence, features), "
    "where no weight is as long as it"
)
_TIMES = re.compile(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*x\s*", re.IGNORECASE)


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
    """Return what a step of the same decisions would take on other machines or sizes.

    Each change is a number, for bytes also a text such as "40GB", or how many times as much: "2x".
    With the nodes grows the axis of the mesh that cuts the batch (or else the sequence); the global
    batch stays, unless `batch` changes it.

    Args:
        nodes: The number of nodes. None: as now, like all that follow.
        bandwidth: Bytes a second of each node's way out. Example: "100GB/s".
        inside: Bytes a second of links inside of nodes.
        batch: The size of the global batch.
        sequence: The length of sequences.
        memory: Bytes of each device. Example: "40GB".
        search: Decide anew in that situation, too, with everything free. Default: False.
        seconds: The CPU seconds that this search may take. None: no limit.
    """
    require_seconds("seconds", seconds)
    changes = Changes(nodes, bandwidth, inside, batch, sequence, memory)
    if not str(changes):
        raise InvalidInput(
            "what_if() is told what is different",
            got="nothing of it",
            remedy='plan.what_if(nodes=4), or bandwidth="2x", sequence=32768',
        )
    cluster, limit = _cluster(plan.cluster, changes, search=search), _limit(plan)
    if changes.memory is not None:
        cluster = _with_memory(cluster, changes.memory, limit)
        limit = cluster.device.usable_memory
    now, whole = sizes_of(plan.original), plan.original
    wanted = Sizes(
        _size("batch", batch, now.batch, "a batch, the first dim of some input", whole),
        _size("sequence", sequence, now.sequence, _SEQUENCE, whole),
    )
    whole = whole if wanted == now else _of_sizes(whole, now, wanted)
    then = _carried_over(plan, cluster, whole, search=search)
    searched = _searched(plan, cluster, limit, whole, seconds) if search else _Outcome()
    best = searched.candidate
    if best is not None and then.candidate is not None and then.candidate.fits(limit):
        best = min(then.candidate, best, key=lambda candidate: candidate.seconds)
    return WhatIf(
        asked=str(changes),
        note="; ".join(filter(None, (then.note, searched.note))),
        now=Situation.of(plan, _limit(plan), now),
        then=then.situation(limit, wanted),
        refused=then.refused,
        searched=replace(searched, candidate=best).situation(limit, wanted),
        not_found=searched.refused,
    )


@dataclass(frozen=True)
class _Outcome:
    """A candidate for the other situation, or why there is none, and a note for the user."""

    candidate: Candidate | None = None
    refused: str = ""
    note: str = ""

    def situation(self, limit: float, sizes: Sizes) -> Situation | None:
        return None if self.candidate is None else Situation.of(self.candidate, limit, sizes)


def _carried_over(plan: PlanValue, cluster: Cluster, whole: Captured, *, search: bool) -> _Outcome:
    """Take the decisions of a plan over; raise if they cannot be and nothing is searched."""
    try:
        ranks, note = _grown(plan, cluster)
        return _Outcome(moved(plan, cluster, ranks, whole), note=note)
    except InvalidInput as error:
        if not search:
            raise
        return _Outcome(refused=f"{error.rule}: {error.got}")


def _grown(plan: PlanValue, cluster: Cluster) -> tuple[dict[str, int], str]:
    """Return the ranks of the axis that grows with the nodes, and a note on it."""
    before, after = len(plan.cluster.nodes), len(cluster.nodes)
    if before == after:
        return {}, ""
    for axis in idle_axes(plan) if after < before else ():
        ranks, rest = divmod(plan.mesh[axis] * after, before)
        if ranks and not rest:
            words = f"goes from {plan.mesh[axis]} to {counted(ranks, 'rank')}"
            return {axis: ranks}, f"{axis}, along which all ranks do the same, {words}"
    growing = data_axis(plan, sizes_of(plan.original).sequence)
    remedy = "search=True, which decides anew"
    if growing is None:
        raise InvalidInput(
            "with the nodes grows the axis of the mesh that cuts the batch or the sequence",
            got=f"{plan.whole_mesh}, of which no axis does",
            remedy=remedy,
        )
    axis, what = growing
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
) -> _Outcome:
    """Search for the best candidate in the other situation."""
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
            choice = Choice(model, whole, request, report, uses_every_device=has_world())
            best, _ = choice.best()[0]
        refuse_random(whole, best.whole_mesh, best.microbatches)
    except (InvalidInput, NothingFits) as error:
        return _Outcome(refused=f"{error.rule}: {error.got}")
    return _Outcome(best, note="the search ended early" if choice.ended else "")


def _of_sizes(planned: Captured, now: Sizes, wanted: Sizes) -> Captured:
    """Return the program of a model, captured again with inputs of other sizes."""
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
    return plan.cluster.device.usable_memory if plan.limit is None else plan.limit


def _cluster(now: Cluster, changes: Changes, *, search: bool) -> Cluster:
    """Return the changed machines, of which a search may use others than now."""
    count = len(now.nodes)
    if changes.nodes is not None:
        count = _count("nodes", changes.nodes, count)
    if len({*now.nodes}) > 1 and count != len(now.nodes):
        raise InvalidInput(
            "nodes are added to, or taken from, a cluster of equal ones",
            got=f"{now.name}, of several kinds",
            remedy="plan again for the other cluster",
        )
    cluster = now
    if count != len(now.nodes):
        cluster = replace(now, nodes=now.nodes[:1] * count, used=())
    if changes.bandwidth is not None:
        if len((cluster if search else cluster.in_use).nodes) == 1:
            raise InvalidInput(
                "bandwidth is that between nodes",
                got=f"{changes.bandwidth} on one node",
                remedy="inside= for links in a node, or nodes=2 beside it",
            )
        rate = _changed("bandwidth", changes.bandwidth, cluster.network.bandwidth)
        cluster = replace(cluster, network=replace(cluster.network, bandwidth=rate))
    if changes.inside is None:
        return cluster
    rates = {
        node: _changed("inside", changes.inside, node.link.bandwidth) for node in {*cluster.nodes}
    }
    nodes = tuple(
        replace(node, link=replace(node.link, bandwidth=rates[node])) for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def _with_memory(cluster: Cluster, memory: Change, limit: float) -> Cluster:
    """Return a cluster whose devices have other memory.

    A factor multiplies what plans count on, or the `limit` that the plan was to keep to.
    """
    is_own = limit == cluster.device.usable_memory
    nodes = tuple(
        replace(
            node,
            device=replace(
                node.device,
                memory=_changed("memory", memory, node.device.usable_memory if is_own else limit),
                reserve=0.0,
            ),
        )
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def _size(
    name: str, change: Change | None, now: int | None, what: str, captured: Captured
) -> int | None:
    """Return a changed size of the inputs; None where they have no such dim."""
    if change is None:
        return now
    if now is None:
        nodes = (node for node in captured.graph.nodes if node.name in captured.inputs)
        types = [info(node).val for node in nodes]
        inputs = ", ".join(str(TensorType.of(val, Layout.replicated(val.ndim))) for val in types)
        raise InvalidInput(
            f"{name} is for inputs with {what}",
            got=f"{name}={change!r} for {inputs or 'no tensor'}, which has none that can be told",
            remedy="plan(model, args) with inputs of the other size",
        )
    return _count(name, change, now)


def _count(name: str, change: Change, now: int) -> int:
    """Return a changed whole number."""
    value = _changed(name, change, now)
    if value != round(value):
        raise InvalidInput(
            f"{name} is a whole number", got=f"{value:g}", remedy=f"{name}={2 * now}"
        )
    return round(value)


def _changed(name: str, change: Any, now: float) -> float:
    """Return the number that a change gives, or its factor times `now`."""
    value = _read(name, change, now)
    least = LEAST_MEMORY if name in UNITS else 0  # who says less has meant another unit
    if not least < value < math.inf:
        other = f'"100G{UNITS[name]}"' if name in UNITS else f"{2 * now:g}"
        other += ' (or "400Gb/s", of bits)' if UNITS.get(name) == "B/s" else ""
        raise InvalidInput(
            f"{name} is a number above {least}, or how many times as much as now",
            got=repr(change),
            remedy=f'{name}={other}, or {name}="2x"',
        )
    return value


def _read(name: str, change: Any, now: float) -> float:
    if not isinstance(change, str):
        return read_bytes(change)
    if match := _TIMES.fullmatch(change):
        return float(match[1]) * now
    if name in UNITS:
        return read_rate(change) if UNITS[name] == "B/s" else read_bytes(change)
    with suppress(ValueError):
        return float(change)
    return math.nan
