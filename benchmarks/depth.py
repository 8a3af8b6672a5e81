"""Depth: what planning takes for models of few and of many equal layers.

    python -m benchmarks.depth                  # five models of 12, 96 and 384 layers
    python -m benchmarks.depth --only gpt --layers 12 96

Prints a line of JSON for each model and number of layers: CPU seconds of capture, of the choice on
64 devices in four stages, and of writing out the program that runs; and their sum over that of the
fewest layers. Each plan has a process of its own, which has captured a small model before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import autopar as ap
from autopar import planning
from autopar.capture import capture
from benchmarks import choice_models
from benchmarks.whole_plans import warm_up
from tests import large_models
from tests.models import Case

MODELS: dict[str, Callable[..., Case]] = {
    "gpt": large_models.gpt2_xl,
    "llama": large_models.llama3,
    "mixtral": large_models.mixtral,
    "t5": choice_models.t5_11b,
    "vit": choice_models.vit_22b,
}
LAYERS = [12, 96, 384]
BATCH = 64
ROOMY = 1e15  # bytes of a device: what is planned does not depend on depth


def measure(name: str, layers: int) -> dict[str, Any]:
    """Return the CPU seconds of one plan."""
    warm_up()
    case, captured = MODELS[name](batch=BATCH, layers=layers), 0.0

    def timed_capture(*args: Any) -> Any:
        nonlocal captured
        program = capture(*args)
        captured = time.process_time()
        return program

    machines = roomy(ap.Cluster.preset("dgx-a100", nodes=8))
    started = time.process_time()
    with patch.object(planning, "capture", timed_capture):
        plan = ap.plan(
            case.model,
            case.args,
            case.kwargs,
            cluster=machines,
            mesh=ap.Mesh(pp=4, dp=4, tp=4),
            schedule="1f1b",
            microbatches=16,
            states="zero1",
            recompute=None,
            seconds=None,
        )
    chosen = time.process_time()
    assert plan.program.stages
    ended = time.process_time()
    return {
        "model": name,
        "layers": layers,
        "capture": round(captured - started, 2),
        "choice": round(chosen - captured, 2),
        "program": round(ended - chosen, 2),
        "total": round(ended - started, 2),
    }


def roomy(cluster: ap.Cluster) -> ap.Cluster:
    """Return machines whose devices have room for any number of layers."""
    nodes = (replace(node, device=replace(node.device, memory=ROOMY)) for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS, nargs="+", default=[*MODELS])
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "LAYERS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, layers = arguments.one
        print(json.dumps(measure(name, int(layers))))
        return
    for name in arguments.only:
        fewest = 0.0
        for layers in arguments.layers:
            command = [sys.executable, "-m", "benchmarks.depth", "--one", name, str(layers)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            line = json.loads(output.splitlines()[-1])
            fewest = fewest or line["total"]
            print(json.dumps(line | {"ratio": round(line["total"] / fewest, 2)}), flush=True)


if __name__ == "__main__":
    main()
