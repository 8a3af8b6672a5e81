"""The command `autopar calibrate`: measure this machine, and how far predictions of plans are off.

It measures operators, collectives by size and both at once. Then ten plans of two small models run,
and two factors, of computing and of communication, are fitted to their steps. `Cluster.local` uses
the result; a file hands it to `--cluster`. Ranks of torchrun measure GPUs, one for each.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import parallelize
from autopar.cluster import Cluster
from autopar.cluster.calibration import local_node
from autopar.cluster.pace import MeasuredStep, Pace, cache_pace, fit_pace
from autopar.commands.arguments import check_out
from autopar.commands.printing import show, show_json, show_table
from autopar.commands.streams import to_results
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.runtime.launching.launch import Say, launch
from autopar.runtime.observation.timing import step_seconds, time_in_rounds
from autopar.text.progress import Report, reporter
from autopar.text.units import counted, seconds_text

ROUNDS, WARM = 7, 2
WIDTH, HIDDEN, HEADS, LAYERS, SEQUENCE, VOCABULARY = 192, 768, 6, 2, 64, 4096
BATCH = 8  # for each rank


class Attention(nn.Module):
    """Causal attention with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (HEADS, 3, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Wide(nn.Module):
    """Two linear layers with a residual."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """A small GPT, with many operators and a large head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        blocks = (nn.Sequential(Attention(), Wide(norm=True)) for _ in range(LAYERS))
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.tokens(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LayerStack(nn.Module):
    """A stack of wide layers: few operators, much work in each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Wide(norm=False) for _ in range(2 * LAYERS)))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), target)


def language(ranks: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    ids = torch.randint(0, VOCABULARY, (BATCH * ranks, SEQUENCE))
    return LanguageModel(), (ids, ids)


def layers(ranks: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    x = torch.randn(BATCH * SEQUENCE * ranks, WIDTH)
    return LayerStack(), (x, torch.zeros_like(x))


MODELS: Mapping[str, Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "language": language,
    "layers": layers,
}


def ways(ranks: int) -> dict[str, dict[str, Any]]:
    """Return five ways to run a step, which weigh computing and communication differently."""
    whole = {"pipeline": None, "states": "whole", "recompute": None}
    return {
        "data": {**whole, "mesh": Mesh(dp=ranks), "mode": "data"},
        "zero3": {**whole, "mesh": Mesh(dp=ranks), "mode": "data", "states": "zero3"},
        "searched": {**whole, "mesh": Mesh(x=ranks)},
        "accumulated": {**whole, "mesh": Mesh(dp=ranks), "mode": "data", "microbatches": 4},
        "stages": {"mesh": Mesh(pp=ranks), "schedule": "1f1b", "microbatches": 2 * ranks},
    }


@dataclass(frozen=True)
class TimedPlan:
    """The measured step of a named plan."""

    name: str
    step: MeasuredStep


def run(arguments: argparse.Namespace) -> int:
    """Measure this machine, fit the factors, keep and print them."""
    check_out(arguments)
    in_world = "WORLD_SIZE" in os.environ
    ranks = _ranks(arguments.ranks, in_world=in_world)
    speaks = int(os.environ.get("RANK", 0)) == 0
    quiet = arguments.json or not speaks
    with reporter(not quiet) as report:
        renew = speaks and not torch.cuda.is_available()
        cluster = _measured_cluster(ranks, report, renew=renew)
        if in_world:
            plans = measure(lambda value: report(*value), cluster)
        else:

            def heard(rank: int, value: tuple[str, str]) -> None:
                if rank == 0:
                    report(*value)

            plans = launch(measure, ranks, cluster, heard=heard)[0]
    if not speaks:
        return 0
    pace = fit_pace([plan.step for plan in plans])
    cache_pace(pace, cluster.device.name, ranks)
    calibrated = cluster.at(pace)
    if arguments.out is not None:
        calibrated.save(arguments.out)
    if arguments.json:
        show_json(_figures(plans, pace))
        return 0
    _show(plans, pace, calibrated)
    if arguments.out is not None:
        to_results(f"saved to {arguments.out}")
    return 0


def _ranks(option: int | None, *, in_world: bool) -> int:
    if in_world:
        ranks = int(os.environ["WORLD_SIZE"])
        wrong = option is not None and option != ranks and f"--ranks {option} in a world of {ranks}"
        remedy = "leave out --ranks under torchrun"
    else:
        ranks = 2 if option is None else option
        wrong = ranks < 2 and f"--ranks {ranks}"
        remedy = "--ranks 2"
        if torch.cuda.is_available() and not wrong:
            wrong, remedy = "a machine with GPUs", "torchrun --nproc-per-node 8 -m autopar.cli ..."
    if wrong:
        raise InvalidInput(
            "a machine is measured by at least two processes, one for each GPU if it has some",
            got=wrong,
            remedy=remedy,
        )
    return ranks


def _measured_cluster(ranks: int, report: Report, *, renew: bool) -> Cluster:
    """Return this machine as single operators and collectives show it; GPUs by their kind."""
    report("constants", f"operators and collectives of {counted(ranks, 'process')}")
    if renew:
        local_node(ranks, again=True)
    if torch.cuda.is_available():
        return Cluster.local(ranks, measure=False)
    node = local_node(ranks)
    return Cluster((node,), node.link, "local")


def measure(say: Say, cluster: Cluster) -> list[TimedPlan]:
    """Measure the steps of all plans on a rank, in turns; a step takes the slowest rank's time."""
    ranks, steps, plans = cluster.devices, [], []
    for model, make in MODELS.items():
        for way, options in ways(ranks).items():
            say(("plan", f"{model}, {way}"))
            torch.manual_seed(0)
            module, inputs = make(ranks)
            parallel = parallelize(module, inputs, cluster=cluster, progress=False, **options)
            steps.append((f"{model}, {way}", parallel, inputs))

    def begin(number: int) -> None:
        say(("measure", f"round {number + 1} of {WARM + ROUNDS}"))

    taking = [partial(step_seconds, parallel, inputs) for _, parallel, inputs in steps]
    for seconds, (name, parallel, _) in zip(time_in_rounds(taking, ROUNDS, WARM, begin), steps):
        cost = parallel.plan.cost
        waited = cost.compute + cost.bubble
        step = MeasuredStep(waited, cost.exposed, statistics.median(seconds))
        plans.append(TimedPlan(name, step))
    return plans


def _figures(plans: list[TimedPlan], pace: Pace) -> dict[str, Any]:
    errors = {when: _median_error(plans, at) for when, at in (("before", Pace()), ("after", pace))}
    figures = [{"plan": plan.name, **asdict(plan.step)} for plan in plans]
    return {"pace": asdict(pace), "off": errors, "plans": figures}


def _median_error(plans: list[TimedPlan], pace: Pace) -> float:
    """Return the median relative error of predictions."""
    return statistics.median(abs(p.step.predicted(pace) / p.step.measured - 1) for p in plans)


def _show(plans: list[TimedPlan], pace: Pace, cluster: Cluster) -> None:
    rows: list[tuple[str, ...]] = [("plan", "predicted", "measured", "calibrated", "off")]
    for plan in plans:
        step = plan.step
        times = step.predicted(Pace()), step.measured, step.predicted(pace)
        rows.append((plan.name, *map(seconds_text, times), f"{times[2] / times[1] - 1:+.0%}"))
    show(cluster)
    show_table(rows)
    show(
        f"computing takes {pace.compute:.2f} times as long as single operators say, communication "
        f"{pace.communication:.2f} times as long as single collectives"
    )
    before, after = _median_error(plans, Pace()), _median_error(plans, pace)
    show(f"predictions were off by {before:.0%} in the median, and are by {after:.0%}")
