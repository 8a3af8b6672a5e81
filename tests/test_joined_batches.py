"""A batch joined of several is cut in parts: an encoder of it moves nothing, wherever it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar.tensor_type import TensorType
from tests.models import Case
from tests.parity import assert_parity

ROWS = 8
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Encoder(nn.Module):
    """Attention over a sequence, norms and a multilayer perceptron."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.read, self.norm = nn.Linear(4, 24), nn.LayerNorm(8)
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).mT for part in self.read(x).chunk(3, -1))
        y = self.norm(F.scaled_dot_product_attention(q, k, v).mT.flatten(-2)).mean(1)
        return self.down(self.drop(F.gelu(self.up(y))))


class Model(nn.Module):
    def __init__(self, loss: Loss, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder, self.loss = encoder or Encoder(), loss

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.loss(self.encoder, a, b)


def siamese(encoder: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    first, second = encoder(torch.cat([a, b])).chunk(2)
    return -F.cosine_similarity(first, second.detach()).mean()


def guided(encoder: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    free, led = encoder(torch.cat([a] * 2)).view(2, len(a), -1).unbind()
    return (free + 3 * (led - free) - b.mean((1, 2)).unsqueeze(1)).square().mean()


def repeated(encoder: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    return encoder(a.repeat(2, 1, 1) * torch.cat([a, b])).square().mean()


def stacked(encoder: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    first, second = encoder(torch.stack([a, b]).flatten(0, 1)).split(len(a))
    return (first - second).square().mean()


def written(encoder: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    rows = a.new_zeros(2 * len(a), *a.shape[1:])
    rows[: len(a)], rows[len(a) :] = a, b
    return encoder(rows).square().mean()


def told_apart(encoder: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """As an adversary does: constants for the rows of each part."""
    wanted = torch.cat([torch.ones(len(a)), torch.zeros(len(b))]).to(a)
    return F.binary_cross_entropy_with_logits(encoder(torch.cat([a, b])).sum(1), wanted)


def of_four(encoder: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """Parts of parts, of which some are read again."""
    halves = torch.cat([torch.cat([a, b]), torch.cat([b, a])])
    y = encoder(halves)
    return (y[len(a) : 3 * len(a)].square() * y[: 2 * len(a)]).mean() + y.mean()


def packed(encoder: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """As `einops.pack` and `unpack` do with one tensor."""
    return encoder(torch.cat([a.reshape(len(a), 3, 4)], dim=1)).square().mean()


def contrastive(encoder: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """InfoNCE over the whole batch, as SimCLR has it."""
    n, z = len(a), F.normalize(encoder(torch.cat([a, b])), dim=1)
    likeness = (z @ z.T).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(likeness, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def of_two_encoders(encoder: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """As CLIP has it, both ways."""
    first, second = encoder(torch.cat([a, b])).chunk(2)
    likeness, own = first @ second.T, torch.arange(len(a))
    return F.cross_entropy(likeness, own) + F.cross_entropy(likeness.T, own)


WAYS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": ap.Mesh(dp=4), "mode": "data"},
    "two axes": {"mesh": ap.Mesh(dp=2, tp=2), "mode": "data"},
    "micro-batches": {"mesh": ap.Mesh(dp=2), "mode": "data", "microbatches": 2},
    "pipeline": {"mesh": ap.Mesh(pp=2, dp=2), "mode": "data", "microbatches": 2},
}
OF_SAMPLES = [
    *((way, loss) for way in WAYS for loss in (siamese, guided)),
    *(("pipeline", loss) for loss in (repeated, stacked, written, told_apart, of_four, packed)),
    *(("two axes", loss) for loss in (written, of_four)),
]
OF_BATCHES = (contrastive, of_two_encoders)


def case(loss: Loss, encoder: nn.Module | None = None) -> Case:
    torch.manual_seed(0)
    inputs = tuple(torch.randn(ROWS, 3, 4, dtype=torch.float64) for _ in range(2))
    return Case(loss.__name__, Model(loss, encoder).double(), inputs)


def sent(plan: ap.Plan) -> list[tuple[int, ...]]:
    """The shapes of what ranks send inside the program, but for sums of single numbers."""
    shapes = [
        TensorType.parse(record.tensor).shape
        for record in plan.movements()
        if (record.forward, record.backward) != ("slice", None)
    ]
    return [shape for shape in shapes if shape]


@pytest.mark.parametrize(("way", "loss"), OF_SAMPLES, ids=lambda it: getattr(it, "__name__", it))
def test_nothing_moves_and_the_numbers_are_those_of_one_device(way: str, loss: Loss) -> None:
    module = assert_parity(case(loss), **WAYS[way])
    assert sent(module.plan) == []


@pytest.mark.parametrize("loss", [guided, contrastive, of_two_encoders])
@pytest.mark.parametrize("pp", [1, 2])
def test_an_encoder_that_is_cut_by_columns_and_rows_sums_its_results_alone(
    pp: int, loss: Loss
) -> None:
    given = case(loss)
    ap.shard(given.model.encoder.up, params={"weight": ("tp", None), "bias": ("tp",)})
    ap.shard(given.model.encoder.down, params={"weight": (None, "tp")})
    module = assert_parity(given, mesh=ap.Mesh(pp=pp, dp=2, tp=2), microbatches=1)
    assert {*sent(module.plan)} <= {(ROWS, 8), (2 * ROWS, 8)}


@pytest.mark.parametrize("loss", OF_BATCHES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("way", ["dp", "two axes"])
def test_losses_of_the_whole_batch_gather_what_the_encoder_gives(way: str, loss: Loss) -> None:
    module = assert_parity(case(loss), **WAYS[way])
    shapes = sent(module.plan)
    assert shapes
    assert {*shapes} <= {(ROWS, 8), (2 * ROWS, 8)}


def test_a_search_finds_it_too() -> None:
    wide = nn.Sequential(nn.Flatten(), nn.Linear(12, 4096), nn.GELU(), nn.Linear(4096, 8))
    model = Model(siamese, wide)
    inputs = tuple(torch.randn(4096, 3, 4, device="meta") for _ in range(2))
    cluster = ap.Cluster.preset("dgx-h100")
    plan = ap.plan(model.to("meta"), inputs, mesh=ap.Mesh(dp=8), cluster=cluster)
    assert "f32[8192@/2@dp, 4096]" in str(plan.graph)
    assert all(shape == (4096,) for shape in sent(plan)), "a number of each pair, at most"


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_dropped_follows_the_place_in_the_whole_batch(microbatches: int) -> None:
    given = case(siamese, Encoder(dropout=0.5))
    how: dict[str, Any] = {"mesh": ap.Mesh(dp=2), "mode": "data", "microbatches": microbatches}
    found = ap.verify(given.model, given.args, steps=1, **how)
    assert found.ok, str(found)


def test_parts_that_are_no_multiples_are_told_of_and_refused_in_micro_batches() -> None:
    model, (a, b) = case(repeated).model, case(repeated).args
    model.loss = lambda encoder, a, b: encoder(torch.cat([a, b])).square().mean()
    for rows in (3, 12):
        other = torch.randn(rows, 3, 4, dtype=torch.float64)
        with pytest.warns(UserWarning, match='mode="data" leaves .* uncut.*The first is cat'):
            module = ap.parallelize(model, (a, other), backend="virtual", **WAYS["dp"])
        torch.testing.assert_close(module.step(a, other), model(a, other).detach())
        with pytest.raises(ap.InvalidInput, match="needs all samples") as caught:
            ap.plan(model, (a, other), **WAYS["micro-batches"])
        assert "equal numbers of rows" in str(caught.value.remedy)
    with warnings.catch_warnings():  # three parts beside one
        warnings.simplefilter("error")
        plan = ap.plan(model, (a, torch.cat([b, b, b])), **WAYS["dp"])
    assert sent(plan) == []


def test_micro_batches_of_losses_of_the_whole_batch_name_a_remedy_that_works() -> None:
    """A table for each sample is not to blame where samples meet anyway."""
    given = case(contrastive)
    with pytest.raises(ap.InvalidInput, match="the sum of their shares") as caught:
        ap.plan(given.model, given.args, **WAYS["micro-batches"])
    assert "samples of different micro-batches meet" in str(caught.value.got)
    assert str(caught.value.remedy).startswith("microbatches=1, in a pipeline too")
    assert_parity(given, **{**WAYS["pipeline"], "microbatches": 1})


def test_parts_of_one_input_are_to_be_handed_over_apart() -> None:
    model = case(siamese).model
    model.loss = lambda encoder, a, b: (lambda x, y: (x - y).square().mean())(*encoder(a).chunk(2))
    with pytest.raises(ap.InvalidInput, match="the sum of their shares") as caught:
        ap.plan(model, case(siamese).args, **WAYS["micro-batches"])
    assert "joined in forward: torch.cat([a, b])" in str(caught.value.remedy)
