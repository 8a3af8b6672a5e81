"""A model that no process ever holds: built without values, which come piece by piece.

    torchrun --nproc-per-node 2 examples/deferred.py

On the meta device a model has shapes and no data. `parallelize` makes its values module by module,
as its modules' own `reset_parameters()` do, and each rank keeps its piece of them: under one seed
these are the values of the model that is built on one device. `Scale` has no such method: `init`
is called for it, as `model.apply(init)` calls it.

Values from a checkpoint are read in the same way, of each file only this rank's slices:
`parallelize(..., weights="folder/with/safetensors")`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar as ap

WIDTH, LAYERS, BATCH = 64, 4, 16


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.gain


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), Scale())]
        self.layers = nn.Sequential(*layers)
        for linear in layers[::2]:  # each rank keeps half of the rows, gathered where they are used
            ap.shard(linear, params={"weight": ("dp", None), "bias": ("dp",)})

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) - x).square().mean()


def init(module: nn.Module) -> None:
    """Fill a module's own tensors in place."""
    if isinstance(module, Scale):
        nn.init.ones_(module.gain)


def main() -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    one = Model().apply(init)  # on one device, to compare with
    x = torch.randn(BATCH, WIDTH)

    torch.manual_seed(0)
    with torch.device("meta"):
        model = Model()
    ap.shard(model, (("dp", None),))
    parallel = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), mode="propagate", init=init)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    first = parallel.step(x)
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"one device {one(x).item():.6f}  in pieces {first.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
