"""The command `autopar demo`: train a small GPT on 4 local processes and compare with one.

The plan is automatic: a Chimera pipeline over `pp`, and inside its stages whatever the search finds
for `dp`. Exit code 1 if the losses of the parallel and the single program differ. A page with the
plan, the schedule and the program is written to look at.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import parallelize
from autopar.commands.arguments import at_least_one
from autopar.commands.printing import show_json, show_table
from autopar.commands.streams import results, to_results
from autopar.mesh import Mesh
from autopar.plans.plan import SavedPlan
from autopar.report.run_charts import TrainingRun
from autopar.report.trace import Event
from autopar.runtime.launching.launch import Say, launch
from autopar.runtime.observation.recording import Recording

MESH = Mesh(pp=2, dp=2)
SCHEDULE, MICROBATCHES = "chimera", 4
TOLERANCE = 1e-9  # on losses of float64
VOCABULARY, SEQUENCE, BATCH, HIDDEN, HEADS, LAYERS = 64, 32, 32, 64, 4, 4
PAGE = Path("out/demo.html")


class DemoBlock(nn.Module):
    """One layer of the GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (HEADS, 3, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class DemoGPT(nn.Module):
    """A GPT that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.Sequential(*(DemoBlock() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(SEQUENCE, device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt() -> DemoGPT:
    """Return the model, equal in every process, without a word about parallelism."""
    torch.manual_seed(0)
    return DemoGPT().double()


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches that count from random starts: ids and the ids that follow."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
        text = (start + torch.arange(SEQUENCE + 1)) % VOCABULARY
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


def train(
    parameters: Iterable[nn.Parameter],
    step: Callable[[Tensor, Tensor], Tensor],
    steps: int,
    say: Say = lambda value: None,
) -> list[float]:
    """Train some steps and return their losses; `say` receives the number and loss of each."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for ids, labels in batches(steps):
        loss = step(ids, labels)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        say((len(losses), losses[-1]))
    return losses


def train_alone(steps: int) -> list[float]:
    """Return the losses of the single program."""
    model = gpt()

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = model(ids, labels)
        loss.backward()
        return loss

    return train(model.parameters(), step, steps)


@dataclass(frozen=True)
class RankReport:
    """The report of a rank on its run, besides the losses."""

    seconds: list[float]  # of each step
    events: list[Event]  # of the last one, on all ranks
    plan: bytes


def train_in_parallel(say: Say, steps: int) -> tuple[list[float], RankReport]:
    """Return the losses of the parallel program on this rank, and its report."""
    batch = next(batches(1))
    model = parallelize(gpt(), batch, mesh=MESH, schedule=SCHEDULE, microbatches=MICROBATCHES)
    ends = [time.perf_counter()]
    recording: Recording | None = None

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        nonlocal recording
        if len(ends) == steps:
            recording = model.record()  # of the last step
        loss = model.step(ids, labels)
        ends.append(time.perf_counter())
        return loss

    losses = train(model.parameters(), step, steps, say)
    assert recording is not None
    seconds = [after - before for before, after in pairwise(ends)]
    return losses, RankReport(seconds, recording.events(), model.plan.file)


def run(arguments: argparse.Namespace) -> int:
    """Train alone and in parallel, print and compare both."""
    steps = at_least_one("--steps", arguments.steps)
    start = time.perf_counter()
    with _progress(steps, quiet=arguments.json) as advance:

        def heard(rank: int, value: tuple[int, float]) -> None:
            if rank == 0:
                advance(*value)

        results = launch(train_in_parallel, MESH.size, steps, heard=heard)
    single = train_alone(steps)
    parallel, measured = results[0]
    difference = max(abs(a - b) for losses, *_ in results for a, b in zip(losses, single))
    ok = difference <= TOLERANCE
    if arguments.json:
        figures = {"parallel": parallel, "single": single, "difference": difference, "ok": ok}
        show_json({"mesh": MESH.sizes, **figures})
    else:
        _print_table(parallel, single, difference)
        to_results(
            f"{SCHEDULE} on {MESH}, {MESH.size} processes, {time.perf_counter() - start:.0f} s: "
            + ("the parallel program is the single one." if ok else "THE PROGRAMS DIFFER.")
        )
        if ok:
            _write_page(parallel, single, measured)
            to_results(f"to look at: {PAGE}")
    return 0 if ok else 1


def _write_page(losses: list[float], single: list[float], measured: RankReport) -> None:
    plan = SavedPlan.from_json(json.loads(measured.plan)).attach(gpt(), next(batches(1)))
    training = TrainingRun(
        losses,
        measured.seconds,
        plan.cost.seconds,
        BATCH * SEQUENCE,
        measured.events,
        {"one process": single},
    )
    plan.report(PAGE, title="A GPT on four processes", run=training)


@contextmanager
def _progress(steps: int, *, quiet: bool) -> Iterator[Callable[[int, float], None]]:
    """Show a bar on a terminal, a line now and then elsewhere."""
    if quiet:
        yield lambda step, loss: None
    elif not results().isatty():
        to_results(f"starting {MESH.size} processes")
        each = max(steps // 5, 1)

        def print_some(step: int, loss: float) -> None:
            if step % each == 0 or step == 1:
                to_results(f"step {step}/{steps}  loss {loss:.4f}")

        yield print_some
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=Console(file=results()),
        ) as progress:
            task = progress.add_task(f"starting {MESH.size} processes", total=steps)
            yield lambda step, loss: progress.update(
                task, completed=step, description=f"training, loss {loss:.4f}"
            )


def _print_table(parallel: list[float], single: list[float], difference: float) -> None:
    to_results(f"loss of each step, largest difference {difference:.1e}")
    rows = [
        (str(step), f"{loss:.12f}", f"{other:.12f}", f"{abs(loss - other):.1e}")
        for step, (loss, other) in enumerate(zip(parallel, single), start=1)
    ]
    show_table([("step", "parallel", "single", "difference"), *rows])
