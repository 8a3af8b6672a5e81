"""One training step of mixtures of experts on ranks, by autopar and by hand, paired in one run.

    torchrun --nproc-per-node 2 -m benchmarks.experts [--rounds 20] [--hidden 128]

What is timed: clearing the gradients, forward and backward of one global batch, on ranks that start
together. Tokens and experts are cut over one axis. By hand each choice of a token is a row: rows
are sorted by expert, the counts of all experts are exchanged, then the rows go to their experts by
one all-to-all and come back by another; gradients of the routers are averaged. Every round runs
each contestant once, in turn, and adds the CPU seconds of all ranks. A case prints one line of
JSON: medians, and the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import autopar as ap

EXPERTS, CHOICES, LAYERS, BATCH, SEQUENCE = 8, 2, 4, 4, 64


class Block(nn.Module):
    """A norm and a mixture of experts, whose result is added."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.moe = ap.nn.MoE(hidden, 2 * hidden, EXPERTS, CHOICES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))[0]


class Mixtures(nn.Module):
    """A few such blocks, and the mean of squares as the loss."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class ByHand(nn.Module):
    """The mixture of one rank, which has a share of the experts."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.ranks, rank = dist.get_world_size(), dist.get_rank()
        self.group: Any = dist.group.WORLD
        self.router = whole.router
        self.gate, self.up, self.down = (
            nn.Parameter(tensor.detach().chunk(self.ranks)[rank].clone())
            for tensor in (whole.gate, whole.up, whole.down)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOICES, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.reshape(-1).argsort(stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        of_all = torch.stack([counts, theirs]).view(2, self.ranks, -1)
        sent, received = of_all.sum(-1).tolist()
        rows = all_to_all_single_autograd(tokens[order // CHOICES], received, sent, self.group)
        local = torch.arange(len(self.gate)).repeat(self.ranks).repeat_interleave(theirs)
        by_expert = local.argsort(stable=True)
        ends = theirs.view(self.ranks, -1).sum(0).cumsum(0).int()
        rows = rows[by_expert]
        inner = F.silu(F.grouped_mm(rows, self.gate.mT, offs=ends))
        inner = inner * F.grouped_mm(rows, self.up.mT, offs=ends)
        out = F.grouped_mm(inner, self.down.mT, offs=ends)
        back = all_to_all_single_autograd(
            torch.empty_like(out).index_copy(0, by_expert, out), sent, received, self.group
        )
        back = back * weights.reshape(-1, 1)[order]
        return torch.zeros_like(tokens).index_add(0, order // CHOICES, back).view(x.shape), None


Step = Callable[[], Tensor]


def contestants(hidden: int) -> dict[str, Step]:
    """Return a step by autopar, and one by hand."""
    torch.manual_seed(0)
    model, x = Mixtures(hidden), torch.randn(BATCH, SEQUENCE, hidden)
    world, rank = dist.get_world_size(), dist.get_rank()
    own = Mixtures(hidden)
    own.load_state_dict(model.state_dict())
    for block in own.blocks:
        block.moe = ByHand(block.moe)
    shared = [p for name, p in own.named_parameters() if "router" in name or "norm" in name]
    for block in model.blocks:
        names = ("gate", "up", "down")
        ap.shard(block.moe, params=dict.fromkeys(names, ("ep", None, None)))
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(ep=world), mode="propagate")
    piece = x.chunk(world)[rank]

    def by_hand() -> Tensor:
        own.zero_grad()
        loss = own(piece) / world
        loss.backward()
        gradients = [p.grad.view(-1) for p in shared if p.grad is not None]
        flat = torch.cat([loss.detach().view(1), *gradients])
        dist.all_reduce(flat)
        total, *pieces = flat.split([1, *(p.numel() for p in shared)])
        for parameter, gradient in zip(shared, pieces):
            parameter.grad = gradient.view(parameter.shape)
        return total[0]

    def by_autopar() -> Tensor:
        module.zero_grad()
        return module.step(x)

    return {"autopar": by_autopar, "by_hand": by_hand}


def report(hidden: int, rounds: int) -> None:
    """Check that both compute the same loss, measure, and print the line of one case."""
    steps = contestants(hidden)
    losses = {name: float(step()) for name, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"the losses differ: {losses}")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name in sorted(steps, reverse=bool(number % 2)):
            dist.barrier()
            begun = time.process_time()
            steps[name]()
            spent = torch.tensor([time.process_time() - begun], dtype=torch.float64)
            dist.all_reduce(spent)
            if number >= 2:
                seconds[name].append(float(spent))
    ratios = [a / b for a, b in zip(seconds["autopar"], seconds["by_hand"])]
    line = {
        "case": f"hidden {hidden}, {BATCH} x {SEQUENCE} tokens, {EXPERTS} experts",
        "ranks": dist.get_world_size(),
        "cpu_milliseconds": {n: round(1e3 * statistics.median(s), 3) for n, s in seconds.items()},
        "autopar_over_by_hand": round(statistics.median(ratios), 3),
    }
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--hidden", type=int, help="only the case of this size")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for hidden in (128, 256):
        if arguments.hidden in (None, hidden):
            report(hidden, arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
