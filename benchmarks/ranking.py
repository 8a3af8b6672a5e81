"""Is the cost model's ranking real? Predicted against measured steps of many plans.

    torchrun --nproc-per-node 2 -m benchmarks.ranking [--rounds 15]

Four models, each under several plans made by hand and under the automatic one, on this machine
with `Cluster.local`, best after `autopar calibrate --ranks 2`. What is timed: forward and backward
of one global batch, the slowest rank, every round running each plan of all models once in turning
order; medians. One line of JSON a plan, one a model (is the automatic plan the fastest, or how far
from it?), and one with the rank correlation of predicted and measured over all plans, and the
median relative error. `repeated` are the same two figures of what odd rounds and even ones
measured: where other work disturbs, no prediction comes nearer than the machine to itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar as ap
from autopar.runtime.observation.timing import step_seconds, time_in_rounds
from benchmarks.gpt import GPT, Sizes, batch, gpt

Annotate = Callable[[nn.Module], object]
Mode = Literal["auto", "propagate", "data"]


class Classifier(nn.Module):
    """A small body and a large last layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(torch.relu(self.body(x))), target)


class MLP(nn.Module):
    """Wide layers between narrow ends."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, hidden) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(hidden, width) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down):
            x = x + down(torch.relu(up(x)))
        return nn.functional.mse_loss(x, target)


def columns_and_rows(model: nn.Module) -> None:
    """Megatron's cut of every pair of layers."""
    for name, module in model.named_modules():
        last = name.split(".")[-1] if not name.split(".")[-1].isdigit() else name.split(".")[-2]
        if last in ("qkv", "up") and isinstance(module, nn.Linear):
            ap.shard(module, params={"weight": ("tp", None), "bias": ("tp",)})
        elif last in ("out", "down") and isinstance(module, nn.Linear):
            ap.shard(module, params={"weight": (None, "tp")})


def sequence(model: nn.Module) -> None:
    """Megatron's cut, with the sequence cut between."""
    columns_and_rows(model)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            ap.shard(module, ((None, "tp", None),))


def vocabulary(model: nn.Module) -> None:
    """Only the head cut, by classes; the rest replicated."""
    head = model.head
    assert isinstance(head, nn.Linear)
    ap.shard(head, params={"weight": ("tp", None)})


def columns_only(model: nn.Module) -> None:
    """Every linear layer cut by columns, its output gathered."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            ap.shard(module, params={"weight": ("tp", None)})
            ndim = 3 if isinstance(model, GPT) else 2
            ap.shard(module, out_strategy=((None,) * ndim,))


def stored(model: nn.Module) -> None:
    """The batch cut, weights stored cut and gathered at use."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            ap.shard(module, params={"weight": ("tp", None)})
    first = next(m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding))
    ndim = 2
    ap.shard(first, (("tp", *(None,) * (ndim - 1)),))


@dataclass(frozen=True)
class Subject:
    """A model, its batch, and the plans that are made of it by hand."""

    name: str
    make: Callable[[], nn.Module]
    args: tuple[Tensor, ...]
    plans: dict[str, tuple[Mode, Annotate | None]]  # name -> mode, annotations


def subjects() -> list[Subject]:
    """Four models whose best plans differ."""
    long = Sizes(hidden=128, heads=4, sequence=512, batch=4)
    sizes = Sizes(hidden=256, heads=8, sequence=128, batch=8)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            torch.manual_seed(0)
            return make()

        return made

    targets = torch.randint(0, 20000, (64,), generator=generator)
    return [
        Subject(
            "gpt",
            lambda: gpt(sizes),
            batch(sizes),
            {
                "data": ("data", None),
                "megatron": ("propagate", columns_and_rows),
                "megatron, sequence": ("propagate", sequence),
                "columns gathered": ("propagate", columns_only),
                "stored cut": ("propagate", stored),
            },
        ),
        Subject(
            "long",
            lambda: gpt(long),
            batch(long),
            {
                "data": ("data", None),
                "megatron": ("propagate", columns_and_rows),
                "megatron, sequence": ("propagate", sequence),
                "columns gathered": ("propagate", columns_only),
            },
        ),
        Subject(
            "classifier",
            seeded(lambda: Classifier(256, 20000)),
            (random(64, 256), targets),
            {
                "data": ("data", None),
                "classes cut": ("propagate", vocabulary),
                "columns gathered": ("propagate", columns_only),
                "stored cut": ("propagate", stored),
            },
        ),
        Subject(
            "mlp",
            seeded(lambda: MLP(512, 2048, 3)),
            (random(256, 512), random(256, 512)),
            {
                "data": ("data", None),
                "megatron": ("propagate", columns_and_rows),
                "columns gathered": ("propagate", columns_only),
                "stored cut": ("propagate", stored),
            },
        ),
    ]


@dataclass(frozen=True)
class Planned:
    """A model under one plan."""

    subject: Subject
    name: str
    plan: ap.Plan
    module: ap.ParallelModule


def planned(subject: Subject, cluster: ap.Cluster, mesh: ap.Mesh) -> Iterator[Planned]:
    """A model under each of its plans, the automatic one last."""
    for name, (mode, annotate) in {**subject.plans, "automatic": ("auto", None)}.items():
        model = subject.make()
        if annotate is not None:
            annotate(model)
        plan = ap.plan(model, subject.args, cluster=cluster, mesh=mesh, mode=mode)
        module = ap.parallelize(model, subject.args, plan=plan, backend="torch")
        yield Planned(subject, name, plan, module)


@dataclass(frozen=True)
class Row:
    """What its steps took: the median of all rounds, of the odd and of the even ones."""

    case: Planned
    measured: float
    odd: float
    even: float


def figures(rows: Sequence[Row]) -> dict[str, object]:
    """How near predictions are to what was measured, and the machine is to itself."""
    predicted = [row.case.plan.cost.seconds for row in rows]
    measured, odd, even = ([getattr(row, n) for row in rows] for n in ("measured", "odd", "even"))
    pairs = {"predicted": (predicted, measured), "repeated": (odd, even)}
    return {
        name: {
            "rank_correlation": rank_correlation(*p),
            "median_relative_error": relative_error(*p),
        }
        for name, p in pairs.items()
    }


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's: the correlation of the places."""

    def places(values: list[float]) -> list[float]:
        order = sorted(values)  # equal values share the mean of their places
        return [order.index(value) + (order.count(value) - 1) / 2 for value in values]

    return statistics.correlation(places(first), places(second))


def relative_error(first: list[float], second: list[float]) -> float:
    """The median of how many times as long one takes as the other."""
    return math.exp(statistics.median(abs(math.log(p / m)) for p, m in zip(first, second))) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = ap.Cluster.local(dist.get_world_size())
    mesh = ap.Mesh(tp=dist.get_world_size())
    cases = [case for subject in subjects() for case in planned(subject, cluster, mesh)]
    taking = [partial(step_seconds, case.module, case.subject.args) for case in cases]
    series = time_in_rounds(taking, rounds)
    rows = [
        Row(case, *map(statistics.median, (t, t[1::2], t[::2]))) for case, t in zip(cases, series)
    ]
    for row in rows:
        cost = row.case.plan.cost
        parts = {"compute": cost.compute, "exposed": cost.exposed}
        name = f"{row.case.subject.name}: {row.case.name}"
        _say(plan=name, predicted=cost.seconds, measured=row.measured, **parts)
    for name in dict.fromkeys(case.subject.name for case in cases):
        own = [row for row in rows if row.case.subject.name == name]
        fastest = min(row.measured for row in own)
        _say(model=name, automatic_over_fastest=own[-1].measured / fastest, **figures(own))
    load = os.getloadavg()[0]
    _say(ranks=dist.get_world_size(), plans=len(rows), **figures(rows), load=load)
    dist.destroy_process_group()


def _say(**figures: object) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
