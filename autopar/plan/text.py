"""Text: a plan on a page, equal blocks as one.

plan on Mesh(dp=2, tp=4), dgx-h100: 8 devices in 1 node, mode auto
  step       18.6 ms: compute 17.2 ms, communication 4.1 ms, 1.4 ms of it exposed
  memory     41.2 GB of 80 GB: activations 20.1 GB, optimizer 10.4 GB, ...
  search     0.8 s, gap 0% to the bound 18.6 ms; 4,210 strategies of 612 nodes
parameters
  layers.{0..47}.mlp.up.weight   bf16[6400@tp, 1600]   gradient summed over dp
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from autopar.cost.footprint import HOST
from autopar.layout import ParameterPlacement
from autopar.plan.grouping import grouped
from autopar.plan.saved import SavedValue
from autopar.plan.value import PlanValue
from autopar.planner.trial import rows_of_trials
from autopar.recompute import Recompute
from autopar.report.weighed import left_out_words, rows_of
from autopar.schema import write
from autopar.search.auto import Search
from autopar.strategies.node_info import info
from autopar.units import bytes_text, counted, listed, seconds_text, share_text, table

_LISTED = 8  # meshes, and ways to run a step


def plan_text(plan: PlanValue) -> str:
    """The whole page."""
    cost, memory, host = plan.cost, plan.memory, plan.cluster.device.host
    kinds = {kind: size for kind, size in asdict(memory).items() if size and kind != "peak"}
    sizes = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    parts = {kind: size for kind, size in sizes.items() if not kind.startswith(HOST)}
    there = {kind.removeprefix(HOST): size for kind, size in sizes.items() if kind not in parts}
    count = f", {counted(plan.microbatches, 'micro-batch')}" if plan.batches is not None else ""
    hidden = f", {seconds_text(cost.exposed)} of it exposed" if cost.communication else ""
    limit = plan.fullest.memory if plan.limit is None else min(plan.limit, plan.fullest.memory)
    cluster = plan.cluster.first(plan.whole_mesh.size)
    lines = [
        f"plan on {plan.whole_mesh}, {cluster.name}: {cluster.taken}, mode {plan.mode}",
        f"  step       {seconds_text(cost.seconds)}: compute {seconds_text(cost.compute)}, "
        f"communication {seconds_text(cost.communication)}{hidden}{count}",
        *_no_loss(plan),
        f"  memory     {_held(memory.peak, limit, parts)}",
        *([f"  host       {_held(memory.host, host.memory, there)}"] if there else []),
        f"  search     {_search(plan.search)}",
        *(f"  not used   {idle}" for idle in cluster.idle),
        *_states(plan),
    ]
    if plan.pipelining is not None:
        lines += str(plan.pipelining).splitlines()
    own = plan.program.placeholders.items()
    sync = {p: info(node).sync if info(node).learns else () for p, node in own}
    rows = [
        (
            name,
            (str(plan.types[name]), _kept(plan, placeholder, name), _summed(sync.get(placeholder))),
        )
        for placeholder, name in plan.captured.parameters.items()
    ]
    lines += [*_regions(plan.decisions.recompute, _uncut(plan)), "parameters", *_grouped(rows)]
    lines += [*_movements(plan), *_fallbacks(plan)]
    return "\n".join(lines + _weighed(plan))


def _no_loss(plan: PlanValue) -> list[str]:
    """What is priced of a model whose loss is outside of it."""
    if plan.loss is not None:
        return []
    cost = plan.cost
    back = f"; backward of all its outputs, {seconds_text(cost.backward)}" if cost.backward else ""
    return [
        f"  loss       none in the model: priced are forward, {seconds_text(cost.forward)}{back}; "
        "not a loss outside of it, nor in memory what backward makes on its way"
    ]


def _held(most: float, limit: float, parts: Mapping[str, float]) -> str:
    kinds = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    return f"{bytes_text(most)} of {bytes_text(limit)}: {kinds}"


def saved_text(saved: SavedValue) -> str:
    """What a plan on disk tells without its model."""
    rows = [(name, (str(saved.types[name]),)) for name in saved.fingerprint.parameters]
    cluster = saved.cluster.first(saved.whole_mesh.size)
    lines = [
        f"saved plan on {saved.whole_mesh}, {cluster.name}: {cluster.taken}, mode {saved.mode}, "
        f"made with torch {saved.fingerprint.torch}",
        f"  search     {_search(saved.search)}",
        *(f"  not used   {idle}" for idle in cluster.idle),
        f"  operators  {len(saved.fingerprint.operators)}; micro-batches {saved.microbatches}",
        *_states(saved),
        "  time and memory are computed once a model is attached: .attach(model, args, kwargs)",
        *_regions(saved.decisions.recompute),
        "parameters",
        *_grouped(rows),
    ]
    return "\n".join(lines + _weighed(saved))


def plan_data(plan: PlanValue) -> dict[str, Any]:
    """The same page as plain data."""
    return {
        "mesh": write(plan.whole_mesh),
        "cluster": plan.cluster.name,
        "devices": plan.cluster.devices,
        "not_used": plan.cluster.first(plan.whole_mesh.size).idle,
        "mode": plan.mode,
        "microbatches": plan.microbatches,
        "cost": plan.cost.to_json(),
        "memory": plan.memory.to_json(),
        "search": write(plan.search),
        "pipeline": write(plan.pipelining),
        "states": write(plan.states),
        "precision": write(plan.precision),
        "dynamic_shapes": write(plan.dynamic),
        "strict": plan.strict,
        "recompute": {name: str(how) for name, how in plan.decisions.recompute.items()},
        "parameters": {n: str(plan.types[n]) for n in plan.captured.parameters.values()},
        "movements": [asdict(record) for record in plan.movements()],
        "fallbacks": [{**asdict(f), "cost": f.cost} for f in plan.fallbacks],
        "alternatives": write(plan.alternatives),
        "left_out": dict(plan.left_out),
        "trials": write(plan.trials),
    }


def _search(search: Search | None) -> str:
    if search is None:
        return "none: layouts were spread from the annotations and the batch"
    sizes = search.sizes
    folded = max((count for count, _ in sizes.runs), default=0)
    blocks = f", {folded} equal blocks folded" if folded else ""
    cut = "; interrupted: what was not weighed may be better" if search.interrupted else ""
    proof = f"gap {share_text(search.gap)} to the bound {seconds_text(search.bound)}"
    if not search.bound:
        proof = "no bound"
    return (
        f"{seconds_text(search.seconds)}, {proof}; {sizes.strategies:,} strategies of "
        f"{sizes.nodes:,} nodes, {sizes.pruned_strategies:,} after pruning{blocks}{cut}"
    )


def _summed(axes: Sequence[str] | None) -> str:
    return f"gradient summed over {', '.join(axes)}" if axes else ""


def _states(plan: PlanValue | SavedValue) -> list[str]:
    """What of parameters is cut, in which dtypes, and which inputs vary, where that is not as it
    always is."""
    states = [] if plan.states.is_whole else [f"  states     {plan.states}"]
    states += [f"  precision  {plan.precision}"] if plan.precision else []
    return states + ([f"  inputs     any size: {plan.dynamic}"] if plan.dynamic else [])


def _regions(decided: Mapping[str, Recompute], uncut: Collection[str] = ()) -> list[str]:
    """What runs again in backward, and where regions keep what it reads."""
    rows = [
        (name, (how.words + ": no ranks keep it alike" * (name in uncut),))
        for name, how in decided.items()
    ]
    return ["recomputed in backward", *_grouped(rows)] if rows else []


def _uncut(plan: PlanValue) -> set[str]:
    """The regions that keep pieces where there is nothing to cut."""
    asked = {name for name, how in plan.decisions.recompute.items() if how.keep == "cut"}
    cut = {r.name.partition(" (")[0] for n in plan.rewritten.nodes for r in info(n).away}
    return asked - cut


def _kept(plan: PlanValue, placeholder: str, name: str) -> str:
    """Of a parameter that is elsewhere from step to step, or is read elsewhere."""
    places = plan.decisions.apart.get(placeholder)
    if places is None:
        return "on the host" * info(plan.program.placeholders[placeholder]).on_host
    kept, bytes_ = plan.types[name], info(plan.program.placeholders[placeholder]).state_bytes
    is_cast = plan.precision is not None and bytes_ is not None and bytes_.copy != bytes_.master
    read = replace(kept, dtype=plan.precision.compute) if is_cast and plan.precision else kept
    said = {
        "kept as": (kept, places.optimizer),
        "read as": (read, places.working),
        "gradient as": (kept, places.gradient),
    }
    found = [
        f"{how} {replace(type_, layout=layout)}"
        for how, (type_, layout) in said.items()
        if layout != places.storage
    ]
    return ", ".join(found + [_there(places)] * bool(places.on_host))


def _there(places: ParameterPlacement) -> str:
    """What of a parameter is on the host."""
    if places.goes_up is None:
        return "on the host"
    return "kept on the host" if places.goes_up[0] == "optimizer" else "stored on the host"


def _movements(plan: PlanValue) -> list[str]:
    records = plan.movements()
    if not records:
        return ["movements: none besides gradients"]
    rows = [
        (
            record.module or "the model",
            (
                f"{record.forward} over {record.axis}",
                record.tensor,
                f"back: {record.backward or 'nothing'}",
                bytes_text(record.bytes),
                seconds_text(record.seconds),
            ),
        )
        for record in records
    ]
    total = seconds_text(sum(record.seconds for record in records))
    where = "a micro-batch" if plan.batches else "a step"
    return [f"movements: {len(records)} in {where}, {total}", *_grouped(rows, counted=True)]


def _fallbacks(plan: PlanValue) -> list[str]:
    if not plan.fallbacks:
        return []
    rows = [
        (f.operator, (f.reason, f"costs {seconds_text(f.cost)}", f.source or ""))
        for f in plan.fallbacks
    ]
    total = sum(fallback.cost for fallback in plan.fallbacks)
    title = f"replicated for want of a rule: {len(rows)}, {seconds_text(total)} of a step"
    return [title, *_grouped(rows, counted=True)]


def _weighed(plan: PlanValue | SavedValue) -> list[str]:
    """The meshes and the ways to run a step that were weighed, where there are several."""
    meshes, search, alternatives = [], plan.search, plan.alternatives
    for entry in sorted(
        () if search is None else search.considered,
        key=lambda entry: (entry.seconds is None, entry.seconds or 0.0),
    ):
        memory = "" if entry.memory is None else f", {bytes_text(entry.memory)}"
        figures = entry.why if entry.seconds is None else seconds_text(entry.seconds) + memory
        meshes.append(f"  {entry.mesh}  {figures}")
    lines = ["meshes", *listed(meshes, _LISTED)] if len(meshes) > 1 else []
    if len(alternatives) > 1:
        lines += ["ways to run a step", *listed(table(rows_of(alternatives)), _LISTED + 1)]
    if plan.trials:
        lines += ["ways that were run", *table(rows_of_trials(plan.trials))]
    if plan.left_out:
        lines.append(f"ruled out by bounds, unbuilt: {left_out_words(plan.left_out)}")
    return lines


def _grouped(rows: Iterable[tuple[str, tuple[str, ...]]], counted: bool = False) -> list[str]:
    """Names and their cells, equal blocks as one row, at its end how often."""
    return table(
        [
            (name, *cells, *(["" if count == 1 else f"x {count}"] if counted else []))
            for name, cells, count in grouped(rows)
        ]
    )
