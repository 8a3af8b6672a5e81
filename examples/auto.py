"""The automatic way: a model, a batch, and nothing else.

    python examples/auto.py

Alone, this process plays all ranks; under torchrun, each process is one.
"""

import torch
import torch.nn.functional as F
from torch import nn

import autopar as ap

model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64))
x = torch.randn(32, 64)

module = ap.parallelize(model, (x,), mode="auto")
print(module.plan)

optimizer = ap.optimizer(torch.optim.AdamW, module)
for step in range(3):
    loss = F.mse_loss(module(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
