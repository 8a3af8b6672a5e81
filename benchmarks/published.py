"""Published training runs, planned as their papers ran them: predicted beside published.

    python -m benchmarks.published [--rows 1.7B 175B ...] [--paper megatron ...]
                                   [--larger | --choose]

One JSON line a row, then one of all rows together: the step, its parts, and the bytes on the
fullest device by kind. Mesh, micro-batches, schedule, states and recomputation are those of the
papers; constants are those of the presets, the same for all rows. Nothing is allocated.

What papers say not to fit is among the rows: nothing recomputed, states that are not cut. Of no
micro-batch they say that it does not; with --larger, a row also says whether twice its would.

With --choose, the planner is given the model and the cluster alone: what it chooses, beside what
the paper chose, by the same prediction, and in words why. It does not know the paper's way; the
faster of the two that fit is what is best, so that this is never slower than the paper's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

import autopar as ap
from autopar.candidates.alternative import Alternative
from autopar.cost.copy_groups import copy_groups_of_nodes, live_copy_bytes
from autopar.plans.step_reasons import VALUE_OF, explain_way
from autopar.text.units import seconds_text
from benchmarks.published_models import Decoder, Sizes, annotate

Given = dict[str, Any]  # fields of a run


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row of a paper's table."""

    paper: str
    name: str
    sizes: Sizes
    cluster: str = "dgx-a100"
    tp: int = 1
    pp: int = 1
    gpus: int
    batch: int
    microbatch: int  # of each replica
    chunks: int = 1
    recompute: str = "full"  # "full", "attention" (the core of each block), "none"
    sequence_parallel: bool = False
    states: str = "whole"
    reduce: torch.dtype = torch.float32  # in which gradients are summed
    seconds: float | None = None  # published
    gigabytes: float | None = None  # of states, published
    fits: bool = True  # into the memory of its devices, published

    @property
    def dp(self) -> int:
        return self.gpus // self.tp // self.pp

    @property
    def microbatches(self) -> int:
        return self.batch // self.dp // self.microbatch

    def plan(self) -> ap.Plan:
        """The plan of this run, all of it given by hand."""
        model, inputs = model_of(self.sizes, self.batch)
        annotate(model, self.sequence_parallel)
        is_piped = self.pp > 1
        mesh = ap.Mesh(**({"pp": self.pp} if is_piped else {}), dp=self.dp, tp=self.tp)
        # What is gathered along the sequence is kept as pieces, and gathered again.
        pieces = ap.Recompute(None, keep="cut")
        gathered = {"blocks.*.qkv": pieces, "blocks.*.up": pieces} if self.sequence_parallel else {}
        core = {"blocks.*.core": "full"}
        how: dict[str, Any] = {"full": "full", "attention": core | gathered, "none": gathered}
        name, options = "1f1b", {}
        if self.chunks > 1:
            name, options = "interleaved", {"chunks": self.chunks}
        return ap.plan(
            model,
            inputs,
            cluster=self.machines,
            mesh=mesh,
            mode="propagate",
            pipeline="pp" if is_piped else None,
            schedule=name if is_piped else "auto",
            schedule_options=options if is_piped and options else None,
            microbatches=self.microbatches,
            recompute=how[self.recompute],
            states=self.states,  # type: ignore[arg-type]
            precision=ap.Precision(reduce=self.reduce),
        )

    @property
    def machines(self) -> ap.Cluster:
        """So many devices, in whole nodes."""
        return machines_of(self.cluster, self.gpus)

    @property
    def larger(self) -> Run:
        """With twice the micro-batch, and as many of them."""
        return replace(self, batch=2 * self.batch, microbatch=2 * self.microbatch)


def model_of(sizes: Sizes, batch: int) -> tuple[Decoder, tuple[torch.Tensor, torch.Tensor]]:
    """The model, and a step's batch for it."""
    with torch.device("meta"):
        ids = torch.zeros(batch, sizes.sequence, dtype=torch.long)
        return Decoder(sizes), (ids, ids)


def machines_of(cluster: str, gpus: int) -> ap.Cluster:
    return ap.Cluster.preset(cluster, nodes=-(-gpus // 8))


@cache
def choice(
    sizes: Sizes, batch: int, cluster: str, gpus: int, reduce: torch.dtype
) -> tuple[ap.Plan, float]:
    """What the planner makes of the model and the machines, and the CPU seconds that it takes."""
    clock = time.process_time()
    model, inputs = model_of(sizes, batch)
    precision = ap.Precision(reduce=reduce)
    plan = ap.plan(model, inputs, cluster=machines_of(cluster, gpus), precision=precision)
    return plan, time.process_time() - clock


def megatron() -> Iterator[Run]:
    """Narayanan et al., SC'21, table 1: activations recomputed in full, attention not fused."""
    table = [
        # name, heads, hidden, layers, tp, pp, gpus, batch, micro-batch, chunks, seconds
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 3.53),
        ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 16, 1, 3.70),
        ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 16, 1, 3.70),
        ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 9.40),
        ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 14.45),
        ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 16.06),
        ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 24.82),
        ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 37.61),
        ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 54.08),
        ("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 102.63),
    ]
    for name, heads, hidden, layers, tp, pp, gpus, batch, micro, chunks, seconds in table:
        sizes = Sizes(hidden=hidden, heads=heads, layers=layers)
        cut: Given = {"tp": tp, "pp": pp, "gpus": gpus, "chunks": chunks}
        steps: Given = {"batch": batch, "microbatch": micro, "seconds": seconds}
        yield Run(paper="megatron", name=name, sizes=sizes, **cut, **steps)


def korthikanti() -> Iterator[Run]:
    """Korthikanti et al., 2022, table 5: all recomputed, or the core of attention alone; with
    nothing recomputed, and no sequence parallelism, it does not fit."""
    table = [
        # name, heads, hidden, layers, gpus, pp, batch, micro-batch, chunks, full, selective
        ("22B", 64, 6144, 48, 8, 1, 4, 4, 1, 1.42, 1.10),
        ("175B", 96, 12288, 96, 64, 8, 64, 1, 3, 18.13, 13.75),
        ("530B", 128, 20480, 105, 280, 35, 280, 1, 3, 49.05, 37.83),
        ("1T", 160, 25600, 128, 512, 64, 512, 1, 1, 94.42, 71.49),
    ]
    for name, heads, hidden, layers, gpus, pp, batch, micro, chunks, full, selective in table:
        sizes = Sizes(hidden=hidden, heads=heads, layers=layers)
        cut: Given = {"tp": 8, "pp": pp, "gpus": gpus, "chunks": chunks}
        steps: Given = {"batch": batch, "microbatch": micro}
        about: Given = {"paper": "korthikanti", "sizes": sizes, **cut, **steps}
        yield Run(name=f"{name} full", seconds=full, **about)
        how: Given = {"recompute": "attention", "sequence_parallel": True}
        yield Run(name=f"{name} selective", seconds=selective, **how, **about)
        yield Run(name=f"{name} none", recompute="none", fits=False, **about)  # figure 1


def llama() -> Iterator[Run]:
    """Llama 3 405B on 16,384 H100s: 41% of the peak; nothing recomputed, states cut over dp."""
    sizes = Sizes(
        hidden=16384,
        heads=128,
        layers=126,
        sequence=8192,
        vocabulary=128_256,
        groups=8,
        inner=53_248,
    )
    cut: Given = {"tp": 8, "pp": 16, "gpus": 16_384, "chunks": 7, "cluster": "dgx-h100"}
    steps: Given = {"batch": 2048, "microbatch": 1, "seconds": 6.5}
    how: Given = {"recompute": "none", "sequence_parallel": True, "states": "zero1"}
    yield Run(paper="llama3", name="405B", sizes=sizes, **cut, **steps, **how)


def zero() -> Iterator[Run]:
    """Rajbhandari et al., 2020, figure 1: the states of 7.5B parameters on 64 devices."""
    sizes = Sizes(hidden=4096, heads=32, layers=36)
    for states, gigabytes in (("whole", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.88)):
        steps: Given = {"gpus": 64, "batch": 64, "microbatch": 1, "reduce": torch.bfloat16}
        about: Given = {"states": states, "gigabytes": gigabytes, "fits": states != "whole"}
        yield Run(paper="zero", name=f"7.5B {states}", sizes=sizes, **steps, **about)


PAPERS = {"megatron": megatron, "korthikanti": korthikanti, "llama3": llama, "zero": zero}


def optimizer_seconds(plan: ap.Plan) -> float:
    """What follows a step: Adam reads gradients in the dtype of the masters, and reads and writes
    masters and moments; before it, gradients are read for their norm, and scaled by it. By how much
    longer hosts take for theirs is in the step."""
    memory = plan.memory
    masters = memory.parameters + memory.host_parameters
    moments = memory.optimizer + memory.host_optimizer
    return (masters + 2 * (masters + moments) + 3 * masters) / plan.cluster.device.throughput


def report(run: Run) -> dict[str, Any]:
    """What is predicted of one run, beside what is published."""
    clock = time.process_time()
    plan = run.plan()
    cost, memory = plan.cost, plan.memory
    kinds: dict[str, Any] = memory.to_json()
    states = sum(kinds[kind] for kind in ("parameters", "gradients", "optimizer", "gathered"))
    groups = copy_groups_of_nodes(plan.rewritten.nodes, plan.mesh, plan.states.buffer_bytes)
    states -= live_copy_bytes(groups, plan.mesh)  # copies come for a use, and are no states
    kinds |= kinds.pop("at_peak")
    seconds = plan.seconds + optimizer_seconds(plan)
    line: dict[str, Any] = {"paper": run.paper, "model": run.name}
    if run.seconds is not None:
        line |= {
            "seconds": round(seconds, 3),
            "published": run.seconds,
            "ratio": round(seconds / run.seconds, 3),
        }
    if run.gigabytes is not None:
        line |= {
            "states": round(states / 1e9, 2),
            "published": run.gigabytes,
            "ratio": round(states / 1e9 / run.gigabytes, 3),
        }
    parts = {part: getattr(cost, part) for part in ("compute", "exposed", "bubble")}
    parts["optimizer"] = seconds - plan.seconds
    return line | {
        "parts": {part: round(value, 3) for part, value in parts.items()},
        "gigabytes": {kind: round(size / 1e9, 2) for kind, size in kinds.items() if size},
        "fits": memory.peak <= plan.cluster.device.memory,
        "published_fits": run.fits,
        "cpu_seconds": round(time.process_time() - clock, 1),
    }


def larger(run: Run) -> dict[str, Any]:
    """What is predicted of twice the micro-batch."""
    plan = run.larger.plan()
    peak, limit = plan.memory.peak, plan.cluster.device.memory
    size = run.larger.microbatch
    return {"microbatch": size, "gigabytes": round(peak / 1e9, 2), "fits": peak <= limit}


def comparison(run: Run) -> dict[str, Any]:
    """What the planner chooses, beside what the paper did by the same prediction."""
    plan, cpu_seconds = choice(run.sizes, run.batch, run.cluster, run.gpus, run.reduce)
    plans = {"planner": plan, "paper": run.plan()}
    limit = plan.cluster.device.memory
    ways = {name: one.alternative(limit) for name, one in plans.items()}
    seconds = {name: one.seconds + optimizer_seconds(one) for name, one in plans.items()}
    best = min((name for name in ways if ways[name].fits), key=lambda name: seconds[name])
    return {
        "paper": run.paper,
        "model": run.name,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "gigabytes": {name: round(one.memory / 1e9, 1) for name, one in ways.items()},
        "fits": {name: one.fits for name, one in ways.items()},
        "best": best,
        "ratio": round(seconds["planner"] / seconds["paper"], 3),
        "ways": {name: one.how for name, one in ways.items()},
        "why": reasons(plan, plans["paper"], ways),
        "cpu_seconds": round(cpu_seconds, 1),
    }


def reasons(plan: ap.Plan, given: ap.Plan, ways: dict[str, Alternative]) -> list[str]:
    """Where the paper's way loses, or wins, and what the planner says of each other decision."""
    against = explain_way(plan, "mesh").against(ways["paper"])
    words = [f"a step of the paper's way {against}"]
    updates = [optimizer_seconds(one) for one in (plan, given)]
    if abs(updates[1] - updates[0]) > 1e-3 * plan.seconds:
        own, other = map(seconds_text, updates)
        words.append(f"the optimizer behind it takes {other} there, {own} here")
    for name, decision in VALUE_OF.items():
        own, other = (decision(one) for one in ways.values())
        if name == "mesh" and _degrees(ways["planner"]) == _degrees(ways["paper"]):
            continue
        if own != other:
            words.append(f"{name}: {own}, not {other}: {explain_way(plan, name).why}")
    return words


def _degrees(way: Alternative) -> list[int]:
    """Of the axes inside a stage, whatever they are called."""
    return sorted(size for name, size in way.mesh.sizes.items() if size > 1 and name != way.axis)


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """How far off the predicted steps are, and of which runs it is wrong whether they fit."""
    errors = [abs(line["ratio"] - 1) for line in lines if "seconds" in line]
    found: dict[str, Any] = {"rows": len(lines)}
    if errors:
        found |= {
            "median_error": round(statistics.median(errors), 3),
            "largest_error": round(max(errors), 3),
        }
    fitting = [line["larger"]["fits"] for line in lines if "larger" in line]
    if fitting:
        found["larger_that_fit"] = sum(fitting)
    wrong = [line["model"] for line in lines if line["fits"] != line["published_fits"]]
    return found | {"wrong_about_memory": wrong}


def summary_of_choices(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of how many rows the planner's way is no slower, and of which it is not, or does not fit."""
    fair = [line for line in lines if line["fits"]["paper"]]
    found: dict[str, Any] = {"rows": len(lines)}
    if fair:
        found["median_ratio"] = round(statistics.median(line["ratio"] for line in fair), 3)
    slower = [line["model"] for line in fair if line["best"] == "paper"]
    too_large = [line["model"] for line in lines if not line["fits"]["planner"]]
    return found | {"slower_than_papers": slower, "too_large": too_large}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="*", help="only the rows whose names begin so")
    parser.add_argument("--paper", choices=PAPERS, nargs="*", default=list(PAPERS))
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--larger", action="store_true", help="weigh twice the micro-batch, too")
    asked.add_argument("--choose", action="store_true", help="let the planner choose")
    arguments = parser.parse_args()
    lines = []
    for paper in arguments.paper:
        for run in PAPERS[paper]():
            if arguments.rows and not run.name.startswith(tuple(arguments.rows)):
                continue
            lines.append(comparison(run) if arguments.choose else report(run))
            if arguments.larger:
                lines[-1]["larger"] = larger(run)
            print(json.dumps(lines[-1]), flush=True)
    print(json.dumps(summary_of_choices(lines) if arguments.choose else summary(lines)))


if __name__ == "__main__":
    main()
