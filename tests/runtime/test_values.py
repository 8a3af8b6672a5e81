"""A model on the meta device gets the values of one built with values, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar import Mesh
from tests import models
from tests.parity import assert_equal, parallel_outcome, single_outcome

D2 = Mesh(d=2)


class Loss(nn.Module):
    """Any module, with a loss."""

    def __init__(self, make: Callable[[], nn.Module], copies: int = 1) -> None:
        super().__init__()
        self.inner, self.copies = make(), copies

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(*[x] * self.copies)
        return (y[0] if isinstance(y, tuple) else y).square().mean()


class Draws(nn.Module):
    """Resets of a module that reach below it; tied parameters; a second method; a clone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.third.weight = self.first.weight
        self.scale = nn.Parameter(torch.empty(8))
        self.norm = nn.BatchNorm1d(6)
        self.reset_parameters()
        self.apply(self._init_weights)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        with torch.no_grad():
            self.second.weight.mul_(0.5)
            nn.init.zeros_(self.second.bias)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.third(self.second(self.first(x))) * self.scale)


class Own(nn.Module):
    """A parameter and buffers that are made where the module is built."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))
        self.register_buffer("phase", torch.arange(8.0), persistent=False)
        self.register_buffer("slope", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x * self.phase) * self.gain + self.slope).square().mean()


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


MADE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Loss(lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))),
    "embedding": lambda: Loss(lambda: nn.Sequential(nn.Linear(8, 4), Summed())),
    "attention": lambda: Loss(lambda: nn.MultiheadAttention(8, 2, batch_first=True), 3),
    "clones": lambda: Loss(lambda: nn.TransformerEncoder(encoder_layer(), 2)),
    "transformer": lambda: Loss(
        lambda: nn.Transformer(8, 2, 1, 2, 16, dropout=0.0, batch_first=True), 2
    ),
    "draws": lambda: Loss(Draws),
}


class Summed(nn.Module):
    """An embedding of which one row stays zero, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.filter = nn.Embedding(5, 4, padding_idx=1), nn.Conv1d(6, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.filter(x).sum(1) @ self.table.weight.T[:2]


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def with_values(pm: ap.ParallelModule) -> dict[str, Tensor]:
    return pm.full_state_dict() | dict(pm.named_buffers())


def assert_made(make: Callable[[], nn.Module], call: tuple[Any, ...], **options: Any) -> None:
    """The values, and the random numbers that are drawn next, are those of one device."""
    torch.manual_seed(3)
    real = make()
    if "init" in options:
        real.apply(options["init"])
    expected, after = dict(real.state_dict()) | dict(real.named_buffers()), torch.rand(3)
    torch.manual_seed(3)
    meta = on_meta(make)
    module = ap.parallelize(meta, call, mesh=D2, mode="propagate", **options)
    found = with_values(module)
    assert list(module.full_state_dict()) == list(real.state_dict())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert torch.equal(torch.rand(3), after)
    assert all(value.is_meta for value in (*meta.parameters(), *meta.buffers()))


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_values_are_those_of_one_device(make: Callable[[], nn.Module]) -> None:
    assert_made(make, (torch.randn(4, 6, 8),))


def fill(module: nn.Module) -> None:
    """Own tensors of what has no method for that, and biases of what has."""
    if isinstance(module, Own):
        nn.init.ones_(module.gain)
        module.phase.copy_(torch.arange(8.0))  # type: ignore[operator,union-attr]
        module.slope.copy_(torch.linspace(0, 1, 8))  # type: ignore[operator,union-attr]
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.bias)


def test_init_does_what_apply_does() -> None:
    assert_made(Own, (torch.randn(4, 8),), init=fill)


def test_models_of_transformers() -> None:
    """Their construction, and `_init_weights` of all modules after it, rotary buffers too."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    ids = torch.zeros(4, 6, dtype=torch.long)
    assert_made(lambda: transformers.LlamaForCausalLM(config), (ids,))


def gpt() -> nn.Module:
    return models.GPT(61, 8, 32, 4, 1, True, False, 0.0)


def as_built(module: nn.Module) -> None:
    """What the constructor of that GPT does beside."""
    if isinstance(module, models.GPT):
        nn.init.normal_(module.tokens.weight, std=0.3)


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(pp=2, dp=1)], ids=str)
def test_trains_as_one_device_does(mesh: Mesh, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)
    args = models.gpt(layers=1).args
    torch.manual_seed(1)
    case = models.Case("made", gpt(), args)
    torch.manual_seed(1)
    options = {"init": as_built, "microbatches": 2, "mode": "propagate"}
    module = ap.parallelize(on_meta(gpt), args, mesh=mesh, **options)
    assert_equal(parallel_outcome(module, case), single_outcome(case))


def refused(model: nn.Module, **options: Any) -> str:
    with pytest.raises(ap.InvalidInput) as error:
        ap.parallelize(model, (torch.ones(4, 8),), mesh=D2, mode="propagate", **options)
    return str(error.value)


def test_what_nothing_makes_is_refused_by_name() -> None:
    said = refused(on_meta(Own))
    assert "on the meta device: gain, phase, slope\n" in said
    for remedy in ("init=fn", "reset_parameters()", "weights=", "device='cpu'"):
        assert remedy in said
    assert "check=True" in refused(on_meta(Own), check=True, init=fill)
    assert "model.apply(init)" in refused(Own(), init=fill)
    assert "init=3" in refused(on_meta(Own), init=3)

    def half(module: nn.Module) -> None:
        if isinstance(module, Own):
            module.gain[:4].fill_(1)
            module.phase.zero_()  # type: ignore[operator,union-attr]
            module.slope.copy_(module.phase)  # type: ignore[operator,union-attr,arg-type]

    assert "on the meta device: gain\n" in refused(on_meta(Own), init=half)

    def other(module: nn.Module) -> None:
        fill(module)
        if isinstance(module, Own):
            module.gain = nn.Parameter(torch.empty(8))

    assert "init() of the model, which puts another tensor" in refused(on_meta(Own), init=other)

    def untried(module: nn.Module) -> None:
        if isinstance(module, Own):
            fill(module)
            module.gain[:4].copy_(torch.from_numpy(module.phase.numpy()[:4]))  # type: ignore[operator,union-attr]
            module.gain[4:] = torch.nan

    assert "init() of the model, which does not fill" in refused(on_meta(Own), init=untried)


def test_an_initialiser_that_fails_is_named() -> None:
    def wrong(module: nn.Module) -> None:
        fill(module)
        if isinstance(module, nn.Linear):
            raise KeyError("std")

    assert "init() of linear, which fails with KeyError: 'std'" in refused(on_meta(Own), init=wrong)


def test_attributes_on_the_meta_device_are_refused() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.mask = nn.Linear(8, 8), torch.ones(8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.mask).mean()

    said = refused(on_meta(Masked))
    assert "plain attributes" in said
    assert "self.mask" in said


def test_what_has_values_keeps_them() -> None:
    """A model of which a part is on the meta device; and rows that only real values tell."""
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torch.manual_seed(3)
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))
    kept = copy.deepcopy(mixed[0].weight)
    model = Loss(lambda: mixed)
    module = ap.parallelize(model, (torch.ones(4, 8),), mesh=D2, mode="propagate")
    found = module.full_state_dict()
    assert torch.equal(found["inner.0.weight"], kept)
    assert torch.equal(found["inner.1.weight"], expected[1].weight)
