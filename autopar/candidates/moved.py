"""Moved: a step as it was decided, on other machines or for inputs of other sizes.

    axis, _ = data_axis(candidate, sequence)                      # that grows with the machines
    moved(candidate, cluster, {axis: 16}, candidate.original)     # the same decisions there, priced

Nothing is searched: each operator keeps its strategy, parameters their states, stages where they
start, regions what they do again. What cannot be kept is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from autopar.candidates.beside import constraints_beside
from autopar.candidates.candidate import Candidate
from autopar.candidates.carried import carried, counterparts
from autopar.candidates.laid_out_program import LaidOutProgram
from autopar.candidates.training_step import TrainingStep
from autopar.capture.captured import Captured
from autopar.capture.listing import operator_name
from autopar.cluster import Cluster
from autopar.cluster.cluster_part import PipelineLine
from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes.microbatches import batch_size, cut_batch
from autopar.search.decisions import Decisions
from autopar.states import WHOLE
from autopar.strategies import Strategy, rule_of
from autopar.strategies.node_info import info

_LISTED = 3


def data_axis(source: Candidate, sequence: int | None) -> tuple[str, str] | None:
    """Return the axis that cuts the batch of most values, the outermost of several, or else their
    `sequence`; and which of these. None: no axis does."""
    wanted = {"batch": batch_size(source.captured), "sequence": sequence}
    for dim, (what, size) in enumerate(wanted.items()):
        weights = Counter[str]()
        for node in source.captured.operators:
            shape = tuple(getattr(info(node).val, "shape", ()))
            if shape[dim : dim + 1] == (size,) and node.name in source.decisions.strategies:
                for axis in _output_layout(source.decisions, node).dims[dim]:
                    weights[axis] += info(node).val.numel()
        cutting = [axis for axis in source.mesh if source.mesh[axis] > 1 and weights[axis]]
        if cutting:
            return max(cutting, key=weights.__getitem__), what
    return None


def idle_axes(source: Candidate) -> list[str]:
    """Return the axes along which all ranks do the same: they cut nothing."""
    layouts = {t.layout for n in source.rewritten.nodes if "type" in n.meta for t in info(n).types}
    layouts |= {at.optimizer for at in source.decisions.apart.values()}
    cut = {axis for layout in layouts for axis in (*layout.axes, *layout.partial)}
    return [axis for axis in source.mesh if axis not in cut and source.mesh[axis] > 1]


def _output_layout(decisions: Decisions, node: fx.Node) -> Layout:
    rule, strategy = rule_of(node), decisions.strategies[node.name]
    assert rule is not None
    return decisions.fixed.get(node.name) or rule.signature(strategy).outputs[0]


def moved(
    source: Candidate, cluster: Cluster, ranks: Mapping[str, int], whole: Captured
) -> Candidate:
    """Return a candidate with the decisions of `source` on another cluster. `ranks`: other sizes of
    some axes; `whole`: the program of a whole batch."""
    mesh, planned, batches = _resized(source.mesh, ranks), source.captured, source.batches
    if whole is not (planned if batches is None else batches.whole):
        batches = None if batches is None else cut_batch(whole, batches.count)
        captured = whole if batches is None else batches.captured
    else:
        captured = planned
    decisions = _decisions_on(source.decisions, mesh)
    fixed = decisions.fixed
    if captured is not planned:
        on_cluster = source.with_program(cluster=cluster, decisions=decisions, line=None)
        fixed = constraints_beside(on_cluster, captured).fixed
    names = counterparts(planned, captured)
    decisions_here = carried(decisions, planned, captured, {}, fixed)
    if losses := list(_losses(decisions, planned, decisions_here, captured, names)):
        more = f"\nand {len(losses) - _LISTED} more" if len(losses) > _LISTED else ""
        raise InvalidInput(
            "decisions are taken over where every dim that they cut has as many elements as pieces",
            got="\n".join(losses[:_LISTED]) + more,
            remedy="search=True, which decides anew, or another batch=, as batch='2x'",
        )
    pipelining, line = source.pipelining, None
    if pipelining is not None:
        pipelining = replace(pipelining, mesh=_resized(pipelining.mesh, ranks))
        line = PipelineLine.of(pipelining.mesh, pipelining.axis)
    whole_states = replace(WHOLE, buffer_bytes=source.states.buffer_bytes)
    program = LaidOutProgram.of(captured, cluster, decisions_here, states=whole_states, line=line)
    candidate = Candidate(TrainingStep(program, batches))
    placed = candidate.placed(source.states)
    if placed.decisions.apart:  # or else there are no replicas left that they are cut over
        candidate = placed
    if pipelining is None:
        return candidate
    new_names = {old: new for new, old in names.items()}
    stages = [
        replace(stage, starts=new_names.get(stage.starts, stage.starts))
        for stage in pipelining.stages
    ]
    return candidate.cut_as(replace(pipelining, stages=tuple(stages)))


def _resized(mesh: Mesh, ranks: Mapping[str, int]) -> Mesh:
    return Mesh(**{axis: ranks.get(axis, size) for axis, size in mesh.sizes.items()})


def _decisions_on(decisions: Decisions, mesh: Mesh) -> Decisions:
    """Return the decisions on `mesh`, without the axes that are left with one rank."""
    remaining = [axis for axis in mesh if mesh[axis] > 1 or decisions.mesh[axis] == 1]
    if len(remaining) == len(mesh.names):
        return replace(decisions, mesh=mesh)

    def only(strategy: Strategy) -> Strategy:
        cuts = {factor: tuple(a for a in axes if a in remaining) for factor, axes in strategy.cuts}
        return Strategy.of({axis: at for axis, at in strategy.passes if axis in remaining}, **cuts)

    return replace(
        decisions,
        mesh=mesh,
        placeholders={
            name: layout.over_axes(remaining) for name, layout in decisions.placeholders.items()
        },
        strategies={name: only(strategy) for name, strategy in decisions.strategies.items()},
        fixed={name: layout.over_axes(remaining) for name, layout in decisions.fixed.items()},
        ways={
            key: way
            for key, way in decisions.ways.items()
            if all({*at.layout.axes, *at.pending} <= {*remaining} for at in way)
        },
    )


def _losses(
    old_decisions: Decisions,
    planned: Captured,
    new_decisions: Decisions,
    captured: Captured,
    names: Mapping[str, str],
) -> Iterator[str]:
    """Yield in words what cannot be kept: each operator has to read and make what it did before."""
    nodes = {node.name: node for node in captured.graph.nodes}
    for name, layout in new_decisions.placeholders.items():
        before = old_decisions.placeholders.get(name, layout)
        if before.dims != layout.dims:
            yield f"{name}, which is cut as {before}, has shape {_shape(nodes[name])}"
    for name, old_name in names.items():
        old_strategy = old_decisions.strategies.get(old_name)
        new_strategy = new_decisions.strategies.get(name)
        old_rule, new_rule = planned.rules[old_name], captured.rules[name]
        if old_strategy is None or new_strategy is None or old_rule is None or new_rule is None:
            continue
        if old_rule.signature(old_strategy) != new_rule.signature(new_strategy):
            where = info(nodes[name]).module or "the model"
            what = operator_name(nodes[name].target)
            yield f"{what} in {where}, which runs as {old_strategy}, makes {_shape(nodes[name])}"


def _shape(node: fx.Node) -> list[int]:
    return [*info(node).val.shape]
