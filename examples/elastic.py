"""A training that goes on when a process or a machine is lost, on those that are left.

    torchrun --nproc-per-node 2 examples/elastic.py run/elastic

On one or two machines, of which the first is called `first`, the same on both:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 10 --rdzv-backend c10d \\
        --rdzv-endpoint first:29400 examples/elastic.py /shared/run/elastic

When a rank is lost, torchrun ends the others and starts all again, as many as there are then. They
make a plan for themselves and take up the last whole checkpoint, which may be of another plan. The
variable is for gloo: a world that is started again needs a store of its own. The folder is on a
disk that all machines see.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar as ap

STEPS, EVERY, ROWS, WIDTH = 60, 5, 24, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) - x.sin()).square().mean()


def batch(step: int) -> Tensor:
    """By the number of its step: a run that is taken up goes on with the next."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def train(folder: str) -> Tensor | None:
    """The last loss, if there was anything left to do."""
    torch.manual_seed(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # that are here this time
    module = ap.parallelize(Model(), (batch(0),), mesh=ap.Mesh(dp=ranks), states="zero3")
    optimizer = ap.optimizer(torch.optim.AdamW, module, lr=1e-2)
    first = ap.load(folder, module, optimizer)["step"] if ap.is_saved(folder) else 0
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_first:
        print(f"{ranks} ranks from step {first}", flush=True)
    loss = None
    for step in range(first, STEPS):
        loss = module.step(batch(step))
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            ap.save(folder, module, optimizer, extra={"step": step + 1}, asynchronous=True)
            if is_first:
                print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="of the checkpoint")
    train(parser.parse_args().folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
