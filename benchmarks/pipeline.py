"""Pipelines on four real ranks: against the simulator, and against torch.distributed.pipelining.

    torchrun --nproc-per-node 4 -m benchmarks.pipeline [--rounds 5] [--only sleep|runs|sums|gpt]

sleep: every stage sleeps for a known time forward and backward, so that the number of cores does
not matter. Wall time of a step over the simulated makespan, and chimera's gain over 1f1b beside the
predicted one. The naps are operators of an ordinary model: capture, stage cut, autograd and the
executor are those of every program.

runs: steps of the same stages that follow one another without a drain. Time from loss to loss, once
the pipeline is full, over the work of a stage in a step: 1 is no bubble.

sums: chimera on the same sleeping stages, with each mode of `sync`, over a network on which the sum
of a stage's gradient takes a known time; every round runs all modes. Wall time of a step over the
simulated one, and whether the modes are in the simulated order.

gpt: one training step (forward and backward) of the same GPT, cut into the same stages, on the same
ranks and micro-batches; every round runs both, in turning order, and counts its slowest rank.

Each case prints one line of JSON; seconds are medians over the rounds, ratios medians of the ratios
within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import autopar as ap
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.simulation.synchronization import MODES
from autopar.runtime.parameters import gradient_buckets
from benchmarks.gpt import GPT, Sizes, batch, gpt

RANKS, MICROBATCHES = 4, 8
FORWARD, BACKWARD = 0.1, 0.2  # seconds of a rank for one micro-batch
SLEEPERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpipe", {}),
    ("1f1b", {}),
    ("interleaved", {"chunks": 2}),
    ("chimera", {"scale": "direct"}),
    ("chimera", {"scale": "doubling"}),
    ("chimera", {"scale": "halving"}),
    ("chimera", {"scale": "list"}),
    ("zb-v", {}),
)
SUM_SECONDS = 0.3  # of a stage's gradient over its ranks, one at a time
SIZES = (
    Sizes(hidden=128, heads=4, sequence=64, batch=16, layers=8),
    Sizes(hidden=256, heads=4, sequence=128, batch=16, layers=8),
)


@torch.library.custom_op("bench::nap", mutates_args=())
def nap(x: Tensor, forward: float, backward: float) -> Tensor:
    """x, after `forward` seconds; its gradient after `backward` seconds."""
    time.sleep(forward)
    return x.clone()


@nap.register_fake
def _(x: Tensor, forward: float, backward: float) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.backward = inputs[2]


def _wake(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    time.sleep(ctx.backward)
    return grad, None, None


nap.register_autograd(_wake, setup_context=_remember)
ap.register_rule(torch.ops.bench.nap.default, "... -> ...")


class Napping(nn.Module):
    """A layer that sleeps. Half of its backward is for the input, half for the weight."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.scale = nn.Parameter(torch.ones(4))  # so that the first input has a gradient too
        self.forward_time, self.backward_half = forward, backward / 2

    def forward(self, x: Tensor) -> Tensor:
        x = nap(x * self.scale, self.forward_time, self.backward_half)
        return F.linear(x, nap(self.weight, 0.0, self.backward_half))


class Sleeper(nn.Module):
    """One layer a stage."""

    def __init__(self, layers: int, forward: float, backward: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Napping(forward, backward) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def sleeper(name: str, options: dict[str, Any]) -> tuple[Callable[[], None], float]:
    """A step of sleeping stages under a schedule, and its simulated makespan."""
    made = ap.pipeline.schedule(name, stages=RANKS, microbatches=MICROBATCHES, **options)
    timeline = ap.pipeline.simulate(made, forward=FORWARD, backward=BACKWARD)
    return sleeping_step(made), timeline.makespan


def sleeping_step(made: Schedule) -> Callable[[], None]:
    module, x = sleeping_module(made)
    return lambda: _discard(module.step(x))


def sleeping_module(made: Schedule, **options: Any) -> tuple[ap.ParallelModule, Tensor]:
    share = made.chunks * made.parts
    torch.manual_seed(0)
    model = Sleeper(made.stages, FORWARD / share, BACKWARD / share)
    x = torch.randn(made.all_parts, 4)
    for index, layer in enumerate(model.layers[1:], 1):
        ap.shard(layer, stage=index)
    options |= {"schedule": made, "microbatches": made.microbatches}
    return ap.parallelize(model, (x,), mesh=ap.Mesh(pp=RANKS), **options), x


def autopar_step(sizes: Sizes, name: str, options: dict[str, Any]) -> Callable[[], None]:
    model, (ids, labels) = gpt(sizes), batch(sizes)
    stages = RANKS * options.get("chunks", 1)
    for index in range(1, stages):
        ap.shard(model.blocks[index * sizes.layers // stages], stage=index)
    module = ap.parallelize(
        model,
        (ids, labels),
        mesh=ap.Mesh(pp=RANKS),
        schedule=name,
        schedule_options=options,
        microbatches=MICROBATCHES,
    )

    def step() -> None:
        module.zero_grad()
        module.step(ids, labels)

    return step


class Part(nn.Module):
    """One stage of the same GPT, for torch's pipelines."""

    def __init__(self, model: GPT, stage: int, stages: int) -> None:
        super().__init__()
        each = len(model.blocks) // stages
        self.tokens = model.tokens if stage == 0 else None
        self.positions = model.positions if stage == 0 else None
        self.blocks = model.blocks[stage * each : (stage + 1) * each]
        self.norm = model.norm if stage == stages - 1 else None
        self.head = model.head if stage == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def torch_step(sizes: Sizes, name: str, options: dict[str, Any]) -> Callable[[], None]:
    model, (ids, labels) = gpt(sizes), batch(sizes)
    rank, chunks = dist.get_rank(), options.get("chunks", 1)
    stages = RANKS * chunks
    parts = [Part(model, rank + RANKS * chunk, stages) for chunk in range(chunks)]
    held = [
        PipelineStage(part, rank + RANKS * chunk, stages, torch.device("cpu"))
        for chunk, part in enumerate(parts)
    ]

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.reshape(-1))

    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
    schedule = kind[name](held if chunks > 1 else held[0], MICROBATCHES, loss_fn=loss)
    last = any(stage.is_last for stage in held)
    first = any(stage.is_first for stage in held)

    def step() -> None:
        for part in parts:
            part.zero_grad()
        schedule.step(*((ids,) if first else ()), **({"target": labels} if last else {}))

    return step


def seconds(step: Callable[[], None]) -> float:
    """Of the slowest rank, from a common start."""
    dist.barrier()
    start = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def _discard(_: Tensor) -> None:
    return None


def run_sleepers(rounds: int) -> None:
    steps = {f"{name} {o.get('scale', '')}".strip(): sleeper(name, o) for name, o in SLEEPERS}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, (step, _) in steps.items():
            spent = seconds(step)
            if number:
                taken[name].append(spent)
    for name, (_, makespan) in steps.items():
        wall = statistics.median(taken[name])
        gains = [one / other for one, other in zip(taken["1f1b"], taken[name])]
        measured, predicted = statistics.median(gains), steps["1f1b"][1] / makespan
        say(
            case=f"sleep {name}",
            wall=wall,
            makespan=makespan,
            ratio=wall / makespan,
            gain_over_1f1b=measured,
            predicted_gain=predicted,
            gain_error=measured / predicted - 1,
        )


def run_runs(rounds: int) -> None:
    for name, count in (("pipedream-2bw", MICROBATCHES), ("pipedream", 1)):
        made = ap.pipeline.schedule(name, stages=RANKS, microbatches=count)
        module, x = sleeping_module(made, asynchronous=True)
        optimizer, steps = torch.optim.SGD(module.parameters(), lr=1e-3), rounds * MICROBATCHES
        warm, times = RANKS, list[float]()
        dist.barrier()
        for _ in module.run([x] * (warm + steps // count), optimizer):
            times.append(time.perf_counter())
        drained = RANKS if count == 1 else 1  # losses while the pipeline runs empty
        gaps = [end - begin for begin, end in zip(times[warm:], times[warm + 1 : -drained])]
        longest = torch.tensor(statistics.median(gaps))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        work = count * (FORWARD + BACKWARD)
        flushed = ap.pipeline.simulate(made, forward=FORWARD, backward=BACKWARD).makespan
        say(
            case=f"runs {name}",
            wall=float(longest),
            work=work,
            ratio=float(longest) / work,
            drained_step=flushed,
        )


class SlowNetwork:
    """Sums over gloo as `torch.distributed` does, and takes `SUM_SECONDS` for each."""

    def __init__(self) -> None:
        self._free = 0.0  # when the rank's link is free
        self._lock = threading.Lock()

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, *, async_op: bool) -> SlowSum:
        work = dist.all_reduce(tensor, group=group, async_op=async_op)
        return SlowSum(self, work)

    def occupy(self) -> float:
        """Return when a sum ends that is ready now."""
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + SUM_SECONDS
            return self._free


class SlowSum:
    """A sum under way: its ranks are ready when gloo has done it, then the network takes time."""

    def __init__(self, network: SlowNetwork, work: Any) -> None:
        def carry() -> None:
            work.wait()
            time.sleep(max(0.0, network.occupy() - time.perf_counter()))

        self._thread = threading.Thread(target=carry)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()


def run_sums(rounds: int) -> None:
    gradient_buckets.dist = SlowNetwork()  # type: ignore[assignment]
    steps, predicted = {}, {}
    for mode in MODES:
        made = ap.pipeline.schedule("chimera", stages=RANKS, microbatches=RANKS, sync=mode)
        steps[mode] = sleeping_step(made)
        timeline = ap.pipeline.simulate(made, FORWARD, BACKWARD, sync_cost=SUM_SECONDS)
        predicted[mode] = timeline.step_time
    taken: dict[str, list[float]] = {mode: [] for mode in steps}
    for number in range(rounds + 1):
        for mode, step in steps.items():
            spent = seconds(step)
            if number:
                taken[mode].append(spent)
    for mode in steps:
        wall = statistics.median(taken[mode])
        over = [one / other for one, other in zip(taken[mode], taken["eager"])]
        measured, told = statistics.median(over), predicted[mode] / predicted["eager"]
        say(
            case=f"sums {mode}",
            wall=wall,
            simulated=predicted[mode],
            ratio=wall / predicted[mode],
            over_eager=measured,
            predicted_over_eager=told,
            error=measured / told - 1,
        )
    walls = [statistics.median(taken[mode]) for mode in sorted(steps, key=predicted.__getitem__)]
    say(case="sums", in_simulated_order=walls == sorted(walls))


def run_gpt(rounds: int) -> None:
    for sizes in SIZES:
        for name, options in (("gpipe", {}), ("1f1b", {}), ("interleaved", {"chunks": 2})):
            contestants = {
                "autopar": autopar_step(sizes, name, options),
                "torch": torch_step(sizes, name, options),
            }
            taken: dict[str, list[float]] = {key: [] for key in contestants}
            for number in range(rounds + 2):
                for key in sorted(contestants, reverse=bool(number % 2)):
                    spent = seconds(contestants[key])
                    if number > 1:
                        taken[key].append(spent)
            ratios = [a / t for a, t in zip(taken["autopar"], taken["torch"])]
            say(
                case=f"gpt {name}, {sizes.name}",
                autopar=statistics.median(taken["autopar"]),
                torch=statistics.median(taken["torch"]),
                ratio=statistics.median(ratios),
            )


def say(**values: Any) -> None:
    if dist.get_rank() == 0:
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
        print(json.dumps(rounded), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("sleep", "runs", "sums", "gpt"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if arguments.only in (None, "sleep"):
        run_sleepers(arguments.rounds)
    if arguments.only in (None, "runs"):
        run_runs(arguments.rounds)
    if arguments.only in (None, "gpt"):
        run_gpt(4 * arguments.rounds)
    if arguments.only in (None, "sums"):
        run_sums(arguments.rounds)  # the last: it slows the network
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
