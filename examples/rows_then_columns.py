"""A batch norm cut by rows, then a matrix product cut by columns: one all-gather between them.

    python examples/rows_then_columns.py

The annotations are numbers of slices for each dim, as MindSpore writes them. All four ranks run in
this process.
"""

import torch
from torch import nn

import autopar as ap


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = ap.shard(nn.BatchNorm1d(32), ((4, 1),))
        self.weight = nn.Parameter(torch.randn(32, 64) / 32**0.5)
        self.matmul = ap.shard(torch.matmul, ((1, 1), (1, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul(self.norm(x), self.weight)


torch.manual_seed(0)
model = Net().double()
x = torch.randn(16, 32, dtype=torch.float64)
parallel = ap.parallelize(model, (x,), mesh=ap.Mesh(d=4), mode="propagate", backend="virtual")

print(parallel.graph)
for movement in parallel.plan.movements():
    print(f"{movement.forward} of {movement.tensor}, backward {movement.backward}")
difference = (parallel(x) - model(x)).abs().max().item()
print(f"largest difference to one device: {difference:.1e}")
assert difference < 1e-12
