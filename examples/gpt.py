"""A GPT, annotated as Megatron cuts it, trained on four processes.

    torchrun --nproc-per-node 4 examples/gpt.py

The batch is cut over `dp`; the linear layers of each block over `tp`, first by columns, then by
rows. Nothing else is said, and nothing else in a training loop changes.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap

VOCABULARY, SEQUENCE, BATCH, HIDDEN, HEADS, LAYERS = 64, 32, 8, 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        for columns in (self.qkv, self.up):
            ap.shard(columns, params={"weight": ("tp", None), "bias": ("tp",)})
        for rows in (self.out, self.down):
            ap.shard(rows, params={"weight": (None, "tp")})

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (HEADS, 3, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(SEQUENCE, device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Counting from random starts; the same global batch on every rank."""
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    text = (start + torch.arange(SEQUENCE + 1)) % VOCABULARY
    return text[:, :-1], text[:, 1:]


def main() -> None:
    torch.manual_seed(0)
    model = ap.parallelize(GPT(), batch(0), mesh=ap.Mesh(dp=2, tp=2), mode="propagate")
    optimizer = ap.optimizer(torch.optim.AdamW, model, lr=3e-3)
    for step in range(30):
        loss = model.step(*batch(step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
