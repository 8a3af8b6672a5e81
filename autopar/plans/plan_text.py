"""Text: a plan on a page, equal blocks as one.

plan on Mesh(dp=2, tp=4), dgx-h100: 8 devices in 1 node, mode auto
  step       18.6 ms: compute 17.2 ms, communication 4.1 ms, 1.4 ms of it exposed
  memory     41.2 GB of 80 GB at the peak: activations 20.1 GB, optimizer 10.4 GB, ...
  search     0.8 s, gap 0% to the bound 18.6 ms; 4,210 strategies of 612 nodes
parameters
  layers.{0..47}.mlp.up.weight   bf16[6400@tp, 1600]   gradient summed over dp
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from autopar.base.schema import write
from autopar.candidates.alternative import Alternative
from autopar.candidates.moved import idle_axes
from autopar.candidates.trial import rows_of_trials
from autopar.layout import ParameterPlacement
from autopar.plans.grouping import grouped
from autopar.plans.plan_value import PlanValue
from autopar.plans.saved_value import SavedValue
from autopar.recompute import Recompute, summary
from autopar.report.weighed_plans import left_out_words, rows_of, rows_of_meshes
from autopar.search.search_report import SearchReport
from autopar.states import WHOLE
from autopar.strategies.node_info import info
from autopar.text.tables import stacked_table, table, wrap_line
from autopar.text.units import bytes_text, counted, seconds_text, share_text

_LISTED = 8  # meshes, and ways to run a step
_INDENT = 13  # characters before the text of a fact


def plan_text(plan: PlanValue) -> str:
    """Return the page of a plan."""
    memory, host = plan.memory, plan.fullest_host
    node = f"a rank at most, {bytes_text(host.needed)} of {bytes_text(host.memory)} on a node"
    facts = [
        ("step", _step(plan)),
        *_no_loss(plan),
        (
            "memory",
            _held(memory.peak, memory.parts, f"of {bytes_text(plan.room(plan.limit))} at the peak"),
        ),
        *([("host", _held(memory.host, memory.on_host, node))] if memory.host else []),
        *_origin(plan),
        *_repeated(plan),
    ]
    lines = [*_title("plan", plan, f"mode {plan.mode}"), *_facts(facts)]
    if plan.pipelining is not None:
        lines += str(plan.pipelining).splitlines()
    inputs = plan.program.placeholders.items()
    sync = {p: info(node).sync if info(node).learns else () for p, node in inputs}
    rows = []
    for placeholder, name in plan.captured.parameters.items():
        facts_of = _places(plan, placeholder, name), _summed(sync.get(placeholder))
        rows.append((name, (str(plan.types[name]), ", ".join(filter(None, facts_of)))))
    lines += [*_regions(plan.decisions.recompute, _uncut(plan)), "parameters", *_grouped(rows)]
    lines += [*_movements(plan), *_fallbacks(plan)]
    return "\n".join(lines + _weighed(plan))


def _title(what: str, plan: PlanValue | SavedValue, how: str) -> list[str]:
    """Return the heading of a page: the mesh, and the machines that it is on."""
    mesh, cluster = plan.whole_mesh, plan.cluster.first(plan.whole_mesh.size)
    return wrap_line(f"{what} on {mesh}, {cluster.name}: {cluster.taken}, {how}", _INDENT)


def _facts(facts: Iterable[tuple[str, str]]) -> list[str]:
    """Return facts as lines, each text behind its name."""
    return [line for name, text in facts for line in wrap_line(f"  {name:<9}  {text}", _INDENT)]


def _origin(plan: PlanValue | SavedValue) -> list[tuple[str, str]]:
    """Return how a plan was found, and its settings that differ from the defaults."""
    facts = [("search", _search(plan.search, is_staged=plan.pipelining is not None))]
    facts += [("not used", idle) for idle in plan.cluster.first(plan.whole_mesh.size).idle]
    facts += [] if plan.states == WHOLE else [("states", str(plan.states))]
    facts += [("precision", str(plan.precision))] if plan.precision else []
    return facts + ([("inputs", f"any size: {plan.dynamic}")] if plan.dynamic else [])


def _step(plan: PlanValue) -> str:
    """Return the predicted seconds of a step and what they are spent on."""
    cost = plan.cost
    hidden = f", {seconds_text(cost.exposed)} of it exposed" if cost.communication else ""
    waits = f", bubble {seconds_text(cost.bubble)}" if cost.bubble else ""
    host = f", host {seconds_text(cost.updated)}" if cost.updated else ""
    count = f", {counted(plan.microbatches, 'micro-batch')}" if plan.batches is not None else ""
    return (
        f"{seconds_text(cost.seconds)}: compute {seconds_text(cost.compute)}, "
        f"communication {seconds_text(cost.communication)}{hidden}{waits}{host}{count}"
    )


def _no_loss(plan: PlanValue) -> list[tuple[str, str]]:
    """Return a note on what is priced of a model whose loss is outside of it, if it is."""
    if plan.loss is not None:
        return []
    cost = plan.cost
    back = f"; backward of all its outputs, {seconds_text(cost.backward)}" if cost.backward else ""
    words = (
        f"none in the model: priced are forward, {seconds_text(cost.forward)}{back}; not a loss "
        "outside of it, nor in memory what backward makes on its way; stages and micro-batches, "
        "which need it, are not weighed"
    )
    return [("loss", words)]


def _repeated(plan: PlanValue) -> list[tuple[str, str]]:
    """Return a note on the axes along which all ranks do the same, which nobody needs."""
    if not (axes := idle_axes(plan)):
        return []
    along, fewer = " and ".join(axes), plan.whole_mesh.size // plan.mesh.degree(axes)
    words = f"all ranks along {along} do the same: {counted(fewer, 'device')} would do as well"
    return [("repeated", words)]


def _held(most: float, parts: Mapping[str, float], of_what: str) -> str:
    """Return bytes as text, and what they are made of, the largest first."""
    largest = sorted(parts.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{name} {bytes_text(size)}" for name, size in largest if size)
    return f"{bytes_text(most)} {of_what}: {kinds}"


def saved_text(saved: SavedValue) -> str:
    """Return the page of a plan from a file, without its model."""
    rows = [(name, (str(saved.types[name]),)) for name in saved.fingerprint.parameters]
    count, batches = len(saved.fingerprint.operators), saved.microbatches
    how = f"mode {saved.mode}, made with torch {saved.fingerprint.torch}"
    facts = [("operators", f"{count:,}; {counted(batches, 'micro-batch')}"), *_origin(saved)]
    lines = [
        *_title("saved plan", saved, how),
        *_facts(facts),
        *wrap_line(
            "  time and memory are computed once a model is attached: .attach(model, args, kwargs)"
        ),
        *_regions(saved.decisions.recompute),
        "parameters",
        *_grouped(rows),
    ]
    return "\n".join(lines + _weighed(saved))


def plan_data(plan: PlanValue) -> dict[str, Any]:
    """Return the page of a plan as plain data."""
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


def _search(search: SearchReport | None, *, is_staged: bool) -> str:
    if search is None:
        return "none: layouts were spread from the annotations and the batch"
    sizes = search.sizes
    folded = max((count for count, _ in sizes.runs), default=0)
    blocks = f", {folded} equal blocks folded" if folded else ""
    cut = "; ended early: what was not weighed may be better" if search.interrupted else ""
    proof = f"layouts: gap {share_text(search.gap)} to their bound {seconds_text(search.bound)}"
    proof += " of a step in which no stage waits" * is_staged
    if not search.bound:
        proof = "layouts: no bound"
    return (
        f"{seconds_text(search.seconds)}, {proof}; {sizes.strategies:,} strategies of "
        f"{sizes.nodes:,} nodes, {sizes.pruned_strategies:,} after pruning{blocks}{cut}"
    )


def _summed(axes: Sequence[str] | None) -> str:
    return f"gradient summed over {', '.join(axes)}" if axes else ""


def _regions(decided: Mapping[str, Recompute], uncut: Collection[str] = ()) -> list[str]:
    """Return the regions that run again in backward, and where they keep what that reads."""
    rows = [
        (name, (how.words + ": no ranks keep it alike" * (name in uncut),))
        for name, how in decided.items()
    ]
    return ["recomputed in backward", *_grouped(rows)] if rows else []


def _uncut(plan: PlanValue) -> set[str]:
    """Return the regions that are to keep pieces, and have no ranks that hold the same."""
    to_cut = {name for name, how in plan.decisions.recompute.items() if how.keep == "cut"}
    cut = {region.name for node in plan.rewritten.nodes for region in info(node).away}
    return to_cut - cut


def _places(plan: PlanValue, placeholder: str, name: str) -> str:
    """Return where a parameter is kept, read and summed, if not all in one layout."""
    places = plan.decisions.apart.get(placeholder)
    if places is None:
        return "on the host" * info(plan.program.placeholders[placeholder]).on_host
    stored, bytes_ = plan.types[name], info(plan.program.placeholders[placeholder]).state_bytes
    is_cast = plan.precision is not None and bytes_ is not None and bytes_.copy != bytes_.master
    read = replace(stored, dtype=plan.precision.compute) if is_cast and plan.precision else stored
    uses = {
        "kept as": (stored, places.optimizer),
        "read as": (read, places.working),
        "gradient as": (stored, places.gradient),
    }
    texts = [
        f"{use} {replace(type_, layout=layout)}"
        for use, (type_, layout) in uses.items()
        if layout != places.storage
    ]
    return ", ".join(texts + [_on_host(places)] * bool(places.on_host))


def _on_host(places: ParameterPlacement) -> str:
    """Return in words which states of a parameter are on the host."""
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
                record.backward or "nothing",
                bytes_text(record.bytes),
                seconds_text(record.seconds),
            ),
        )
        for record in records
    ]
    total = seconds_text(sum(record.seconds for record in records))
    where = "a micro-batch" if plan.batches else "a step"
    heading = "", "movement", "of", "backward", "bytes", "time"
    return [f"movements: {len(records)} in {where}, {total}", *_grouped(rows, heading)]


def _fallbacks(plan: PlanValue) -> list[str]:
    if not plan.fallbacks:
        return []
    rows = [(f.operator, (f.reason, seconds_text(f.cost), f.source or "")) for f in plan.fallbacks]
    total = sum(fallback.cost for fallback in plan.fallbacks)
    title = f"replicated for want of a rule: {len(rows)}, {seconds_text(total)} of a step"
    return [title, *_grouped(rows, ("", "why", "costs", "at"))]


def _weighed(plan: PlanValue | SavedValue) -> list[str]:
    """Return the meshes and the ways to run a step that were weighed, where there are several."""
    considered, alternatives = plan.search.considered if plan.search else (), plan.alternatives
    lines = []
    if len(considered) > 1:
        stages = "" if plan.pipelining is None else " inside a stage, without bubbles"
        lines += [f"meshes{stages}, by the search for layouts (* taken)"]
        lines += table(rows_of_meshes(considered, plan.mesh), _LISTED)
    if len(alternatives) > 1:
        rows = rows_of(alternatives, [way.how for way in alternatives], taken(plan))
        lines += ["ways to run a step (* taken)", *stacked_table(rows, _LISTED)]
    if plan.trials:
        lines += ["ways that were run (* taken)", *stacked_table(rows_of_trials(plan.trials))]
    if plan.left_out:
        lines += wrap_line(f"ruled out by bounds, unasked: {left_out_words(plan.left_out)}")
    return lines


def taken(plan: PlanValue | SavedValue) -> Alternative | None:
    """Return the way that a plan took among those that were weighed; None if it is none."""
    schedule = None if plan.pipelining is None else plan.pipelining.schedule
    count = plan.microbatches if schedule is None else schedule.microbatches
    run = ("", ()) if schedule is None else (schedule.name, schedule.options)
    decided = plan.whole_mesh, plan.states, summary(plan.decisions.recompute), count, *run
    for way in plan.alternatives:
        if decided == (
            *(way.mesh, way.states, way.recompute),
            *(way.microbatches, way.schedule, way.options),
        ):
            return way
    return None


def _grouped(
    rows: Iterable[tuple[str, tuple[str, ...]]], heading: tuple[str, ...] = ()
) -> list[str]:
    """Return a table of names and cells, equal blocks as one row, counted under a heading."""
    groups = grouped(rows)
    if not heading:
        return table([(name, *cells) for name, cells, _ in groups])
    counts = ("" if count == 1 else f"x {count}" for *_, count in groups)
    body = ((name, *cells, often) for (name, cells, _), often in zip(groups, counts))
    return table([(*heading, ""), *body])
