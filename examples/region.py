"""An eager region: one function runs as a parallel graph, the code around it stays as it is.

    torchrun --nproc-per-node 4 examples/region.py

A function wrapped by `shard` and called on DTensors is captured once, cut as its annotations say,
and gives DTensors. Autograd goes through it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import autopar as ap


def feed_forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up) @ down


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    x, up, down = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((8, 16), (16, 64), (64, 16))
    )
    cut = ap.shard(feed_forward, (("dp", None), (None, "tp"), ("tp", None)))

    placed = [
        distribute_tensor(x, mesh, [Shard(0), Replicate()]),
        distribute_tensor(up, mesh, [Replicate(), Shard(1)]),
        distribute_tensor(down, mesh, [Replicate(), Shard(0)]),
    ]
    inputs = [tensor.requires_grad_() for tensor in placed]
    y = cut(*inputs)
    assert isinstance(y, DTensor)
    y.full_tensor().square().sum().backward()

    whole = [tensor.requires_grad_() for tensor in (x, up, down)]
    expected = feed_forward(*whole)
    expected.square().sum().backward()
    differences = [(y.full_tensor() - expected).abs().max()]
    for mine, other in zip(inputs, whole):
        assert isinstance(mine.grad, DTensor)
        assert other.grad is not None
        differences.append((mine.grad.full_tensor() - other.grad).abs().max())
    if dist.get_rank() == 0:
        print(f"y is placed {y.placements} on {mesh}")
        print(f"largest difference to one device: {max(differences).item():.1e}")
    assert max(differences) < 1e-9
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
