"""Whole plans of models of real sizes, for `benchmarks.search`: with nothing given, mesh, stages,
schedule, micro-batches, states and recomputation are all to be chosen.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from autopar import Cluster, Mesh, Precision, plan, planning
from autopar.capture import capture
from autopar.recompute import summary
from tests import large_models
from tests.models import Case


@dataclass(frozen=True)
class WholePlan:
    """A model on nodes of eight devices that are known by name, and what is given of its plan."""

    make: Callable[..., Case]
    layers: int
    machines: str
    nodes: int
    batch: int  # sequences
    given: Mapping[str, Any] = field(default_factory=dict)


_BY_HAND = {"mesh": Mesh(pp=8, dp=2, tp=8), "schedule": "1f1b"}
WHOLE_PLANS = {
    "plan-gpt2": WholePlan(large_models.gpt2_xl, 48, "dgx-h100", 1, 64),
    "plan-llama3-8b": WholePlan(large_models.llama3, 32, "dgx-h100", 8, 64),
    "plan-llama3-70b": WholePlan(large_models.llama3_70b, 80, "dgx-h100", 64, 64),
    "plan-mixtral": WholePlan(large_models.mixtral, 56, "dgx-h100", 32, 1024),
    "plan-gpt3-128": WholePlan(large_models.gpt3, 96, "dgx-a100", 16, 1536),
    "plan-gpt3-mesh": WholePlan(large_models.gpt3, 96, "dgx-a100", 16, 1536, _BY_HAND),
    "plan-gpt3-1024": WholePlan(large_models.gpt3, 96, "dgx-a100", 128, 1536),
    "plan-gpt-1t": WholePlan(large_models.gpt_1t, 128, "dgx-a100", 512, 3072),
}


def measure_plan(name: str, layers: int = 0) -> dict[str, Any]:
    """Make one plan; seconds of capture and of all that follows. Fewer layers have less memory."""
    asked = WHOLE_PLANS[name]
    layers = layers or asked.layers
    cluster = Cluster.preset(asked.machines, asked.nodes)
    started = time.process_time()
    warm_up()
    case, warm = asked.make(batch=asked.batch, layers=layers), time.process_time()
    captured = warm

    def timed_capture(*args: Any) -> Any:
        nonlocal captured
        found = capture(*args)
        captured = time.process_time()
        return found

    with patch.object(planning, "capture", timed_capture):
        made = plan(
            case.model,
            case.args,
            case.kwargs,
            cluster=cluster,
            memory=cluster.device.memory * layers / asked.layers,
            precision=Precision(compute=torch.bfloat16),
            **asked.given,
        )
    ended, best = time.process_time(), made.alternative(math.inf)
    return {
        "case": name,
        "devices": cluster.devices,
        "layers": layers,
        "warm_seconds": round(warm - started, 3),
        "capture_seconds": round(captured - warm, 3),
        "plan_seconds": round(ended - captured, 3),
        "step": made.cost.seconds,
        "gap": None if made.search is None else made.search.gap,
        "ended_early": made.search is not None and made.search.interrupted,
        "mesh": str(made.whole_mesh),
        "schedule": best.description("recompute", "states"),
        "states": str(made.states),
        "recompute": summary(made.decisions.recompute),
        "memory": made.memory.peak,
        "alternatives": len(made.alternatives),
        "left_out": dict(made.left_out),
        "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def warm_up() -> None:
    """Load what the first capture and the first plan of a process load."""
    case = large_models.gpt2_xl(batch=2, sequence=4, layers=1)
    plan(case.model, case.args, case.kwargs, cluster=Cluster.preset("dgx-h100"), mesh=Mesh(x=2))
