"""A snapshot of many plans, to see that a change which should change no plan changes none.

    python -m benchmarks.plan_snapshot > before.jsonl
    python -m benchmarks.plan_snapshot --compare before.jsonl

One JSON line a plan: a digest of its file, one of its page of text, and its predicted seconds and
bytes. Compared with an earlier snapshot, it names the plans that differ, and fails if any does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autopar as ap
from tests import mixtures, models
from tests.annotations import megatron
from tests.models import Case

MODELS: dict[str, Callable[[], Case]] = {
    "mlp": models.mlp,
    "gpt": lambda: models.gpt(layers=4),
    "llama": lambda: models.llama(layers=4),
    "bert": models.bert,
    "t5": models.t5,
    "resnet": models.resnet,
    "vit": models.vit,
    "mixture": mixtures.mixture,
}
DP4, DP2_TP2, PP2_DP2 = ap.Mesh(dp=4), ap.Mesh(dp=2, tp=2), ap.Mesh(pp=2, dp=2)
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"mesh": DP4, "mode": "data"},
    "data, zero1": {"mesh": DP4, "mode": "data", "states": "zero1"},
    "data, zero3": {"mesh": DP4, "mode": "data", "states": "zero3"},
    "data, recomputed": {"mesh": DP4, "mode": "data", "recompute": "full"},
    "search": {"mesh": DP2_TP2},
    "search, zero2": {"mesh": DP2_TP2, "states": "zero2"},
    "search, micro-batches": {"mesh": DP2_TP2, "microbatches": 2},
    "search, bfloat16": {"mesh": DP2_TP2, "precision": ap.Precision(compute=torch.bfloat16)},
    "all is chosen": {"cluster": ap.Cluster.preset("dgx-a100"), "memory": "1GB"},
    "1f1b": {"mesh": PP2_DP2, "schedule": "1f1b", "microbatches": 4},
    "chimera": {"mesh": PP2_DP2, "schedule": "chimera", "microbatches": 4},
    "zb-v": {"mesh": ap.Mesh(pp=2), "schedule": "zb-v", "microbatches": 4},
}


def plans() -> Iterator[tuple[str, Callable[[], ap.Plan]]]:
    for name, make in MODELS.items():
        case = make()
        for setting, options in SETTINGS.items():
            yield f"{name}: {setting}", partial(plan_case, case, seconds=None, **options)
    annotated = partial(plan_case, megatron(models.gpt(), "tp"), mesh=DP2_TP2, mode="propagate")
    yield "gpt: annotated", annotated


def plan_case(case: Case, **options: Any) -> ap.Plan:
    return ap.plan(case.model, case.args, case.kwargs, **options)


def described(plan: ap.Plan) -> dict[str, Any]:
    file = plan.to_json()
    if file.get("search"):
        file["search"]["seconds"] = None  # how long the search took
    words = " ".join(str(plan).split())  # lines wrap elsewhere where the time is longer
    text = re.sub(r"(search )[\d.]+ \w+", r"\1", words)
    return {
        "file": _digest(json.dumps(file, sort_keys=True)),
        "text": _digest(text),
        "seconds": plan.cost.seconds,
        "bytes": plan.memory.peak,
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", type=Path, help="an earlier snapshot")
    path = parser.parse_args().compare
    rows = map(json.loads, path.read_text().splitlines()) if path else ()
    before = {row.pop("plan"): row for row in rows}
    is_equal = True
    for name, make in plans():
        try:
            row = described(make())
        except ap.InvalidInput as error:
            row = {"refused": _digest(str(error))}
        print(json.dumps({"plan": name, **row}), flush=True)
        if before and before.get(name) != row:
            print(f"{name} differs: before {before.get(name)}", file=sys.stderr)
            is_equal = False
    return not is_equal


if __name__ == "__main__":
    sys.exit(main())
