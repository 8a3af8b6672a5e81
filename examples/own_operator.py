"""An own operator with its rule: one line says how it may be cut.

    python examples/own_operator.py

`scaled_add` reads two tensors and a scale for each channel. The rule names what the dims share:
rows (`...`) and channels (`c`) can be cut anywhere, and autopar moves nothing between the ranks.
`with_power` has two results, and so its rule has two outputs: what lacks a factor that is cut is a
partial sum, so the second, which has no channels, asks for them whole (`!`).
"""

import torch
from torch import Tensor, nn

import autopar as ap


@torch.library.custom_op("example::scaled_add", mutates_args=())
def scaled_add(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return x + y * scale


@scaled_add.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def keep_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def gradients(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, scale = ctx.saved_tensors
    return grad.clone(), grad * scale, (grad * y).flatten(0, -2).sum(0)


scaled_add.register_autograd(gradients, setup_context=keep_inputs)
ap.register_rule("example::scaled_add", "... c, ... c, c -> ... c", saved="1 2")


@torch.library.custom_op("example::with_power", mutates_args=())
def with_power(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.square().sum(-1)


@with_power.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1])


def keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def gradient(ctx, double: Tensor, power: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return double * 2 + 2 * x * power[..., None]


with_power.register_autograd(gradient, setup_context=keep)
ap.register_rule("example::with_power", "... c! -> ... c!, ...", saved="0")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.ones(32))
        ap.shard(self.up, params={"weight": ("tp", None), "bias": ("tp",)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        double, power = with_power(self.down(scaled_add(hidden, hidden.relu(), self.scale)))
        return double.square().mean() + power.mean()


torch.manual_seed(0)
model = Net().double()
x = torch.randn(8, 16, dtype=torch.float64)
parallel = ap.parallelize(
    model, (x,), mesh=ap.Mesh(dp=2, tp=2), mode="propagate", strict=True, backend="virtual"
)
print(parallel.graph)

loss, expected = parallel.step(x), model(x)
expected.backward()
grads = parallel.full_grads()
differences = [abs(loss - expected).item()]
for name, parameter in model.named_parameters():
    assert parameter.grad is not None
    differences.append((grads[name] - parameter.grad).abs().max().item())
print(f"largest difference to one device, gradients included: {max(differences):.1e}")
assert max(differences) < 1e-9
