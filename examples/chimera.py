"""A GPT trained by a pipeline on four ranks; the argument is the schedule.

torchrun --nproc-per-node 4 examples/chimera.py
torchrun --nproc-per-node 4 examples/chimera.py 1f1b
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, self.heads, 3, hidden // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied: the first and the last stage share it

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def main() -> None:
    schedule = sys.argv[1] if len(sys.argv) > 1 else "chimera"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = GPT(vocabulary=64, hidden=32, heads=4, layers=8)
    tokens = torch.randint(0, 64, (16, 17))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    module = ap.parallelize(
        model, (ids, labels), mesh=ap.Mesh(pp=4), schedule=schedule, microbatches=8
    )
    if dist.get_rank() == 0:
        pipelining = module.plan.pipelining
        assert pipelining is not None
        print(pipelining)
        print(ap.pipeline.simulate(pipelining.schedule))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(10):
        loss = module.step(ids, labels)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {float(loss):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
