"""plan(): the decisions about a model on some machines, without running anything."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.annotate import parameter_annotations, stage_pins
from autopar.capture import capture
from autopar.capture.captured import Captured
from autopar.collectives import LinkPrice, Price
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.passes import rewrite
from autopar.passes.microbatches import cut_batch
from autopar.pipeline.plan import ScheduleLike, read_request
from autopar.runtime.plan import Plan
from autopar.search.decisions import Decisions, Fallback
from autopar.search.propagate import propagate
from autopar.search.wishes import read_wishes
from autopar.strategies import rule_of

MODES = ("auto", "propagate", "data")


def plan(
    model: nn.Module,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | DeviceMesh,
    mode: str = "propagate",
    strict: bool = False,
    microbatches: int = 1,
    pipeline: str | int | None = "auto",
    schedule: ScheduleLike = None,
    schedule_options: Mapping[str, Any] | None = None,
    recompute: bool = False,
) -> Plan:
    """Decide where every tensor of `model`, called with `args` and `kwargs`, lives on `mesh`.

    `microbatches`: into how many equal parts a step cuts the batch, to run one after another.
    `pipeline`: the axis of a pipeline ("auto": `pp`, if the mesh has it), or a number of ranks;
    `schedule`: a name, a mapping with a name and options, or a schedule; `recompute`: run each
    stage's forward again before its backward.
    """
    if mode not in MODES:
        raise InvalidInput(
            "mode is one of " + ", ".join(map(repr, MODES)), got=repr(mode), remedy=repr(MODES[0])
        )
    if isinstance(mesh, DeviceMesh):
        mesh = Mesh.from_device_mesh(mesh)
    request = None
    if mesh is not None:
        request = read_request(mesh, pipeline, schedule, schedule_options, microbatches, recompute)
        mesh = request.inner if request else mesh
    captured = capture(model, args, dict(kwargs or {}))
    if strict:
        _require_rules(captured)
    slices = request.schedule.slices if request else microbatches
    batches = cut_batch(captured, slices) if request or slices != 1 else None
    captured = batches.captured if batches else captured
    if mode == "data":
        decisions = propagate(captured, mesh)
    else:
        wishes = read_wishes(captured, mesh, parameter_annotations(model))
        decisions = propagate(captured, mesh, wishes)
    _refuse_random(captured, decisions)
    _report_fallbacks(decisions.fallbacks)
    price = price_of(mesh)
    pipelining = None
    if request is not None:
        pipelining = request.cut(captured, rewrite(captured, decisions, price), stage_pins(model))
    return Plan(captured, decisions, price, batches, pipelining)


def price_of(mesh: Mesh) -> Price:
    """What movements cost on links of one kind."""
    return LinkPrice.uniform(mesh)


def _require_rules(captured: Captured) -> None:
    missing = [
        f"{node.target} at {node.meta['source']}"
        for node in captured.graph.nodes
        if node.op == "call_function" and rule_of(node) is None
    ]
    if missing:
        raise InvalidInput(
            "with strict=True every operator has a rule",
            got="\n".join(dict.fromkeys(missing)),
            remedy="register_rule(operator, '... -> ...') for each, or strict=False to run them "
            "replicated",
        )


def _refuse_random(captured: Captured, decisions: Decisions) -> None:
    for node in captured.graph.nodes:
        rule = rule_of(node)
        if rule is not None and rule.random and decisions.mesh.size > 1:
            raise InvalidInput(
                "a random operator runs on one rank only: its bits would depend on the layout",
                got=f"{node.target} in {node.meta['module'] or 'the model'} on {decisions.mesh}",
                remedy="set its probability to 0 (or call model.eval() for it)",
                source=node.meta["source"],
            )


def _report_fallbacks(fallbacks: tuple[Fallback, ...]) -> None:
    for operator, count in Counter(fallback.operator for fallback in fallbacks).items():
        first = next(fallback for fallback in fallbacks if fallback.operator == operator)
        warnings.warn(
            f"{operator} has no rule and runs replicated ({count} times, first at "
            f"{first.source}); register_rule() gives it one",
            stacklevel=3,
        )
