"""Operators that have no rule are priced and counted by what torch does of them, and never less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import autopar as ap
from tests.held import kept_for_backward
from tests.models import Case
from tests.toy import EVEN, machines

pytestmark = pytest.mark.filterwarnings("ignore:.*has no rule")


class Calls(nn.Module):
    """A function of an input and of parameters."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.scale = nn.Parameter(torch.ones(64))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale, *self.weights).square().mean()


class Recurrent(nn.Module):
    """A recurrent layer on sequences."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(16, 16, batch_first=True)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x * self.scale).view(-1, 4, 16))[0].square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "cdist": lambda: Calls(torch.cdist, (40, 64)),
    "matrix_power": lambda: Calls(lambda x, w: x @ torch.matrix_power(w, 4), (64, 64)),
    "inverse": lambda: Calls(lambda x, w: x @ torch.linalg.inv(w), (64, 64)),
    "solve": lambda: Calls(lambda x, w: torch.linalg.solve(w, x.mT), (64, 64)),
    "prelu": lambda: Calls(torch.prelu, (64,)),
    "cosine": lambda: Calls(torch.cosine_similarity, (48, 64)),
    "tensordot": lambda: Calls(lambda x, w: torch.tensordot(x, w, 1), (64, 16)),
    "multi_dot": lambda: Calls(
        lambda x, v, w: torch.linalg.multi_dot([x, v, w]), (64, 16), (16, 80)
    ),
    "addbmm": lambda: Calls(
        lambda x, b, w: torch.addbmm(b, x.view(4, 12, 64), w), (12, 8), (4, 64, 8)
    ),
    "einsum of three": lambda: Calls(
        lambda x, v, w: torch.einsum("bi,io,ok->bk", x, v, w), (64, 16), (16, 80)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_predicted_faster_than_its_flops_or_smaller_than_what_is_kept(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(48, 64)
    with FlopCounterMode(display=False) as counted:
        model.to("meta")(x.to("meta")).backward()
    model = MODELS[name]()
    for mesh, mode in ((ap.Mesh(a=1), "propagate"), (ap.Mesh(a=2), "auto")):
        plan = ap.plan(
            model, (x,), mesh=mesh, mode=mode, cluster=machines(2, *EVEN), progress=False
        )
        assert plan.cost.seconds >= counted.get_total_flops() / (1e9 * mesh.size) * (1 - 1e-9)
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(a=1), mode="propagate", backend="virtual")
    held = kept_for_backward(module, Case(name, model, (x,)))
    memory = module.plan.memory
    assert held + x.nbytes <= memory.activations + memory.inputs  # constants are inputs
