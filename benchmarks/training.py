"""Training runs of a GPT and a ViT, by autopar and by torch, paired in one run.

    torchrun --nproc-per-node 2 -m benchmarks.training [--rounds 20] [--model gpt] [--kind zero3]
    torchrun --nproc-per-node 1 -m benchmarks.training

What is timed: clearing the gradients, forward and backward of one global batch, and a step of
AdamW, on ranks that start together. The ranks of each contestant begin with the same weights and
take the same batch, and their losses are compared first. Every round runs each contestant once, in
shuffled order, and counts its slowest rank. Each process computes with one thread. A case prints
one line of JSON: tokens (or images) a second at the median, medians of the ratios within a round,
and the same of the seconds that processors computed on all ranks, which tell more on a machine that
others use.

    whole         autopar (states="whole"), ddp
    zero3         autopar (states="zero3"), fsdp2 (fully_shard, block by block)
    one rank      autopar, the plain model; this alone runs on one rank
    program       a step of a batch that a second program was made for, and one by a module that was
                  planned for it; microseconds that it takes to find the program of a call
    dropout       autopar and ddp without and with dropout of what a block adds, and in attention
    optimizer     a step of the optimizer alone, whole and zero3: ap.optimizer, torch's class on the
                  module's DTensors, and on plain tensors like this rank's pieces; by default, and
                  fused; and the Python calls of each
    saving        autopar (states="zero3"): a step, and one that begins with an asynchronous save;
                  and so does fsdp2, by torch.distributed.checkpoint

The first three are run eager and compiled, which is a line of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import autopar as ap
from autopar._torch.tensors import local_of
from benchmarks.gpt import GPT, Sizes, batch
from benchmarks.states import ADAMW, ddp, fsdp2, steps
from benchmarks.tensor_parallel import Step, measure_both
from benchmarks.vit import ViT, images

Wrap = Callable[[Any], tuple[nn.Module, Any]]


@dataclass(frozen=True)
class Work:
    """A model and its global batch."""

    model: Callable[[Sizes], nn.Module]
    batch: Callable[[Sizes], tuple[Tensor, ...]]
    sizes: Sizes
    unit: str  # of what a batch has

    def made(self) -> nn.Module:
        """The same on every rank."""
        torch.manual_seed(0)
        return self.model(self.sizes)

    @property
    def units(self) -> int:
        return self.sizes.batch * (self.sizes.sequence if self.unit == "tokens" else 1)


WORKS = {
    "gpt": Work(GPT, batch, Sizes(hidden=256, heads=4, sequence=128, batch=8, layers=4), "tokens"),
    "vit": Work(
        ViT,
        images,
        Sizes(hidden=192, heads=3, sequence=64, batch=16, layers=4, causal=False),
        "images",
    ),
}


@dataclass
class Case:
    """Contestants, and the pairs of them whose ratios are told."""

    contestants: dict[str, Callable[[], Step]]
    pairs: list[tuple[str, str]]
    between: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None
    more: dict[str, Any] = field(default_factory=dict)  # what else is measured
    tolerance: float = 1e-3  # of losses


def made_by_autopar(work: Work, **options: Any) -> tuple[ap.ParallelModule, Any, Step]:
    """A module whose ranks cut the batch, its optimizer, and its step."""
    given, mesh = work.batch(work.sizes), ap.Mesh(dp=dist.get_world_size())
    module = ap.parallelize(work.made(), given, mesh=mesh, mode="data", **options)
    update = torch.optim.AdamW(module.parameters(), **ADAMW)
    return module, update, steps(module, update, lambda: module.step(*given))[0]


def autopar(work: Work, **options: Any) -> Step:
    return made_by_autopar(work, **options)[2]


def made_by_torch(work: Work, wrap: Wrap) -> tuple[nn.Module, Any, Step]:
    """The same by torch, on this rank's part of the batch; the loss is the mean of all ranks'."""
    world, rank = dist.get_world_size(), dist.get_rank()
    given = [piece.chunk(world)[rank] for piece in work.batch(work.sizes)]
    module, update = wrap(work.made())

    def forward_and_backward() -> Tensor:
        loss = module(*given)
        loss.backward()
        return loss.detach()

    return module, update, steps(module, update, forward_and_backward)[0]


def by_torch(work: Work, wrap: Wrap) -> Step:
    return made_by_torch(work, wrap)[2]


def plain(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def compiled(wrap: Wrap) -> Wrap:
    """The whole module, after it is wrapped."""

    def of(model: nn.Module) -> tuple[nn.Module, Any]:
        module, update = wrap(model)
        module.compile(dynamic=False)
        return module, update

    return of


def compiled_blocks(wrap: Wrap) -> Wrap:
    """Each block, before it is wrapped, as fully_shard wants it."""

    def of(model: Any) -> tuple[nn.Module, Any]:
        for block in model.blocks:
            block.compile(dynamic=False)
        return wrap(model)

    return of


def against(name: str, wrap: Wrap, in_compiler: Wrap, **options: Any) -> Callable[..., Case]:
    """autopar and another."""

    def case(work: Work, is_compiled: bool) -> Case:
        other = in_compiler if is_compiled else wrap
        contestants = {
            "autopar": lambda: autopar(work, compile=is_compiled, **options),
            name: lambda: by_torch(work, other),
        }
        return Case(contestants, [("autopar", name)])

    return case


def program(work: Work, _: bool) -> Case:
    """A second program: half of the batch."""
    half = replace(work, sizes=replace(work.sizes, batch=work.sizes.batch // 2))
    more: dict[str, Any] = {}

    def second() -> Step:
        module, update, _ = made_by_autopar(work, states="whole")
        whole, given = work.batch(work.sizes), half.batch(half.sizes)
        start = time.perf_counter()
        module.step(*given)
        more["seconds_of_first_step"] = round(time.perf_counter() - start, 2)

        def found(calls: int, *batches: tuple[Tensor, ...]) -> float:
            start = time.process_time()
            for number in range(calls):
                call = module.programs.accept(batches[number % len(batches)], {}, is_step=True)
                module.programs.exchange_numbers(call)
                module.programs.look_up(call)
            return round(1e6 * (time.process_time() - start) / calls, 1)

        more["microseconds_to_find"] = {
            "that of the last call": found(1000, given),
            "another": found(1000, given, whole),
        }
        return steps(module, update, lambda: module.step(*given))[0]

    contestants = {"second program": second, "planned for it": lambda: autopar(half)}
    return Case(contestants, [("second program", "planned for it")], more=more)


def dropout(work: Work, _: bool) -> Case:
    """Dropout 0 and 0.1. The numbers that are drawn differ, and so do losses."""
    kinds: dict[str, dict[str, Any]] = {
        "": {},
        " with dropout": {"dropout": 0.1},
        " in attention": {"attention_dropout": 0.1},
    }
    works = {k: replace(work, sizes=replace(work.sizes, **more)) for k, more in kinds.items()}
    contestants: dict[str, Callable[[], Step]] = {}
    for kind, one in works.items():
        contestants[f"autopar{kind}"] = partial(autopar, one, states="whole")
        contestants[f"ddp{kind}"] = partial(by_torch, one, ddp)
    pairs = [(f"autopar{kind}", f"ddp{kind}") for kind in kinds]
    pairs += [(f"{who}{kind}", who) for who in ("autopar", "ddp") for kind in [*kinds][1:]]
    return Case(contestants, pairs, tolerance=1.0)


def optimizer(work: Work, _: bool) -> Case:
    """A step of AdamW alone, on the gradients of one batch."""
    contestants: dict[str, Callable[[], Step]] = {}
    calls: dict[str, int] = {}

    @cache
    def trained(states: str) -> ap.ParallelModule:
        module, _, step = made_by_autopar(work, states=states)
        step()
        return module

    def make(states: str, kind: str, **options: Any) -> Step:
        module = trained(states)
        pieces = [local_of(parameter).detach().clone() for parameter in module.parameters()]
        for piece, parameter in zip(pieces, module.parameters()):
            assert parameter.grad is not None
            piece.grad = local_of(parameter.grad).clone()
        adamw = torch.optim.AdamW
        updates: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "autopar": partial(ap.optimizer, adamw, module),
            "dtensors": partial(adamw, module.parameters()),
            "plain": partial(adamw, pieces),
        }
        update = updates[kind](lr=1e-6, **options)
        update.step()
        calls[" ".join((kind, states, *options))] = calls_of(update.step)

        def alone() -> Tensor:
            update.step()
            return torch.zeros(())

        return alone

    pairs = []
    for states, fused in product(("whole", "zero3"), ({}, {"fused": True})):
        options: dict[str, Any] = dict(fused)
        for kind in ("autopar", "dtensors", "plain"):
            name = " ".join((kind, states, *options))
            contestants[name] = partial(make, states, kind, **options)
        first, *others = list(contestants)[-3:]
        pairs += [(first, other) for other in others]
    return Case(contestants, pairs, more={"python_calls": calls})


def calls_of(function: Callable[[], Any]) -> int:
    """Return how many functions a call of `function` calls, those of C among them."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def saving(work: Work, _: bool) -> Case:
    """A step alone, and one that begins with an asynchronous save, the last one being over."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    folder, under_way = Path(box[0]), list[Callable[[], Any]]()
    writers = dist.new_group(backend="gloo")
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")

    def own() -> Step:
        module, update, step = made_by_autopar(work, states="zero3")

        def both() -> Tensor:
            saved = ap.save(folder / "autopar", module, update, asynchronous=True)
            assert saved is not None
            under_way.append(saved.wait)
            return step()

        return both

    def theirs() -> Step:
        module, update, step = made_by_torch(work, fsdp2(True))

        def both() -> Tensor:
            parameters, states = get_state_dict(module, update)
            held = {"module": parameters, "optimizer": states}
            written = dcp.async_save(held, checkpoint_id=folder / "fsdp2", process_group=writers)
            assert isinstance(written, Future)
            under_way.append(written.result)
            return step()

        return both

    def wait() -> None:
        while under_way:
            under_way.pop()()

    def end() -> None:
        wait()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)

    contestants = {
        "autopar": lambda: autopar(work, states="zero3"),
        "autopar, saving": own,
        "fsdp2": lambda: by_torch(work, fsdp2(True)),
        "fsdp2, saving": theirs,
    }
    pairs = [("autopar", "fsdp2"), ("autopar, saving", "fsdp2, saving")]
    pairs += [("autopar, saving", "autopar"), ("fsdp2, saving", "fsdp2")]
    return Case(contestants, pairs, wait, end)


KINDS: Mapping[str, Callable[[Work, bool], Case]] = {
    "whole": against("ddp", ddp, compiled(ddp), states="whole"),
    "zero3": against("fsdp2", fsdp2(True), compiled_blocks(fsdp2(True)), states="zero3"),
    "one rank": against("torch", plain, compiled(plain)),
    "program": program,
    "dropout": dropout,
    "optimizer": optimizer,
    "saving": saving,
}
TWICE = ("whole", "zero3", "one rank")  # eager and compiled


def report(kind: str, name: str, work: Work, is_compiled: bool, rounds: int) -> None:
    """Check that all compute the same loss, measure, print the line of one case."""
    case = KINDS[kind](work, is_compiled)
    made, before, losses = {}, {}, {}
    for who, make in case.contestants.items():
        start = time.perf_counter()
        made[who] = make()
        case.between()
        loss = made[who]().clone()
        before[who] = round(time.perf_counter() - start, 1)
        if who.startswith(("ddp", "fsdp2")):  # that of a rank's own slice
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses[who] = float(loss)
    if max(losses.values()) - min(losses.values()) > case.tolerance:
        raise SystemExit(f"the losses differ: {losses}")
    passed, computed = measure_both(made, rounds, case.between)
    case.end()

    def over(seconds: Mapping[str, list[float]]) -> dict[str, float]:
        pairs = {(a, b): zip(seconds[a], seconds[b]) for a, b in case.pairs}
        return {
            f"{a} / {b}": round(statistics.median(x / y for x, y in one), 3)
            for (a, b), one in pairs.items()
        }

    line = {
        "kind": kind,
        "model": name,
        "compiled": is_compiled,
        "case": f"{work.sizes.name}, {work.sizes.layers} layers",
        "ranks": dist.get_world_size(),
        "rounds": rounds,
        "milliseconds": {w: round(1e3 * statistics.median(s), 2) for w, s in passed.items()},
        "over": over(passed),
        "over_computed": over(computed),
        "seconds_before": before,
        **case.more,
    }
    if kind in TWICE:
        speeds = {who: round(work.units / statistics.median(s)) for who, s in passed.items()}
        line[f"{work.unit}_a_second"] = speeds
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", choices=WORKS, help="only this model")
    parser.add_argument("--kind", choices=KINDS, help="only this comparison")
    parser.add_argument("--layers", type=int, help="another number of blocks")
    parser.add_argument("--hidden", type=int, help="another width")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_alone = dist.get_world_size() == 1
    kinds = [kind for kind in KINDS if (kind == "one rank") == is_alone]
    for name, work in WORKS.items():
        if arguments.model not in (None, name):
            continue
        layers = arguments.layers or work.sizes.layers
        hidden = arguments.hidden or work.sizes.hidden
        work = replace(work, sizes=replace(work.sizes, layers=layers, hidden=hidden))
        for kind in [arguments.kind] if arguments.kind else kinds:
            for is_compiled in (False, True) if kind in TWICE and not arguments.eager else (False,):
                report(kind, name, work, is_compiled, arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
