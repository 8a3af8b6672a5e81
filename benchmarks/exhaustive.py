"""The automatic choice beside every way by name: a JSON line per case, for small models.

python -m benchmarks.exhaustive [gpt mlp mixture bert] [--machines 8 16 mixed-8 mixed-16]
    [--memory 1 0.6] [--saves]

A line tells the plan, the fastest way that the choice found, the fastest that was asked for by name
(`tests/enumerated.py`), how many there were and how many fit. `ratio` is the seconds of the fastest
that was found over those of the fastest by name: at most 1. `plan_ratio` is that of the plan, which
is the simplest of what is within 1% of the fastest, and keeps nothing on a host for less than 10%.
`--memory`: parts of what the plan takes that has all memory; 1 is all of it. States are whole and
nothing runs again where that fits; with `--saves` ways that save memory unasked are among the
others, and may be faster: cut states hide some of what they move.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import autopar as ap
from tests.captures import shared_captures
from tests.enumerated import every_way, shared_searches
from tests.mixtures import mixture
from tests.models import Case, bert, gpt, mlp
from tests.test_mixed_machines import FAST, SLOW, cluster
from tests.toy import EVEN, machines

MODELS: dict[str, Callable[[], Case]] = {
    "mlp": lambda: mlp(layers=4, batch=16),
    "gpt": lambda: gpt(layers=2, batch=16),
    "mixture": lambda: mixture(blocks=2, batch=16),
    "bert": lambda: bert(batch=16),
}
MACHINES = {
    "8": machines(8, *EVEN),
    "16": cluster((FAST, 8), (FAST, 8)),
    "mixed-8": cluster((FAST, 4), (SLOW, 4)),
    "mixed-16": cluster((FAST, 8), (SLOW, 8)),
}


def measure(model: str, machine: str, part: float, saves: bool) -> dict[str, Any]:
    """Choose, and ask for everything by name."""
    case, given = MODELS[model](), MACHINES[machine]
    with shared_captures():
        chosen, memory = plan(case, given, None), None
        if part < 1:
            memory = part * chosen.memory.peak
            chosen = plan(case, given, memory)
        started = time.process_time()
        with shared_searches():
            every = list(every_way(case, given, memory, saves=saves))
    best = min((way for way in every if way), key=lambda way: way.seconds)
    fastest = chosen.alternatives[0]
    return {
        "case": model,
        "machines": machine,
        "memory": memory,
        "fastest": fastest.how,
        "fastest_seconds": fastest.seconds,
        "plan": f"{chosen.cluster.used_of_nodes}: {chosen.alternative(memory or math.inf).how}",
        "plan_seconds": chosen.cost.seconds,
        "by_name": str(best),
        "by_name_seconds": best.seconds,
        "ratio": fastest.seconds / best.seconds,
        "plan_ratio": chosen.cost.seconds / best.seconds,
        "ways": len(every),
        "fit": sum(way is not None for way in every),
        "enumeration_seconds": round(time.process_time() - started, 1),
    }


def plan(case: Case, given: ap.Cluster, memory: float | None) -> ap.Plan:
    return ap.plan(case.model, case.args, case.kwargs, cluster=given, memory=memory, seconds=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", help="all if none is given")
    parser.add_argument("--machines", nargs="+", default=list(MACHINES), choices=MACHINES)
    parser.add_argument("--memory", nargs="+", type=float, default=[1.0, 0.6])
    parser.add_argument("--saves", action="store_true", help="also ways that save memory unasked")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    for model in asked.models or MODELS:
        for machine in asked.machines:
            for part in asked.memory:
                print(json.dumps(measure(model, machine, part, asked.saves)), flush=True)


if __name__ == "__main__":
    main()
