"""ap.nn.MoE on one device and in pieces; dense dispatch in plain PyTorch; experts in stages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar import Mesh
from autopar.strategies.kernels.experts.capacity import within_capacity
from autopar.strategies.kernels.experts.expert_kernels import products, products_of_rows
from tests.mixtures import Mixture, mixture, mixture_cut, tokens_of_experts
from tests.models import Case
from tests.parity import assert_parity

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limited, with all losses": {
        "capacity": 0.8,
        "shared": 6,
        "balance_loss": 0.1,
        "z_loss": 0.01,
    },
    "sigmoid, one choice": {
        "scores": "sigmoid",
        "choices": 1,
        "capacity": 0.7,
        "balance_loss": 0.1,
    },
    "over sequences": {"capacity": 0.8, "balance_loss": 0.1, "z_loss": 0.01, "over": "sequence"},
    "two layers": {"inner": "relu(gate)", "normalize": False},
}


@pytest.mark.parametrize("mesh", [Mesh(dp=2, ep=2), Mesh(ep=2, tp=2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_on_every_mesh_the_same(kind: str, mesh: Mesh) -> None:
    """The same tokens are dropped, and the losses are those of one device."""
    module = assert_parity(mixture_cut(mixture(**KINDS[kind]), mesh), mesh)
    assert "routed_experts(" in str(module.graph)


def test_jitter_is_the_same_on_every_mesh() -> None:
    case, mesh = mixture(jitter=0.1), Mesh(dp=2, ep=2)
    mixture_cut(case, mesh)
    report = ap.verify(case.model, case.args, case.kwargs, mesh=mesh, mode="propagate")
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", ["plain", "over sequences"])
def test_in_stages(kind: str) -> None:
    mesh = Mesh(pp=2, ep=2)
    module = assert_parity(
        mixture_cut(mixture(blocks=2, **KINDS[kind]), mesh), mesh, microbatches=2, schedule="1f1b"
    )
    assert all("routed_experts(" in str(graph) for graph in module.graphs)


@pytest.mark.parametrize("kind", ["limited, with all losses", "sigmoid, one choice"])
def test_a_whole_batch_is_not_looked_at_in_micro_batches(kind: str) -> None:
    case = mixture_cut(mixture(**KINDS[kind]), Mesh(ep=2))
    with pytest.raises(ap.InvalidInput, match='over="sequence"'):
        ap.parallelize(case.model, case.args, mesh=Mesh(ep=2), microbatches=2, mode="propagate")


def test_sequences_are_cut_and_their_losses_are_those_of_each() -> None:
    """By the definition, sequence by sequence, and where the ranks have parts of sequences."""
    case = mixture(**KINDS["over sequences"], choices=1)
    layer, x = case.model.blocks[0], torch.randn(3, 5, 8, dtype=torch.float64)
    whole, loss = layer(x)
    apart = [layer(one) for one in x]
    torch.testing.assert_close(whole, torch.stack([y for y, _ in apart]))
    torch.testing.assert_close(loss, torch.stack([own for _, own in apart]).mean())
    ap.shard(case.model.embedding, ((None, "sp"),))
    assert_parity(case, Mesh(sp=2))


def test_a_search_sends_tokens_rather_than_experts() -> None:
    with torch.device("meta"):
        model = Mixture(1, 1024, 4096, 8)
        ids = torch.empty(8, 1024, dtype=torch.long)
    cluster = ap.Cluster.preset("dgx-h100")
    plan = ap.plan(model, (ids, ids), mesh=Mesh(dp=8), cluster=cluster, pipeline=None)
    assert "routed_experts(" in str(plan.graph)
    assert "f32[8@dp, 4096, 1024]" in str(plan.graph)
    explained = plan.explain("blocks.0")
    assert "experts@dp" in str(explained)
    assert "of routing that is balanced" in str(explained)


@pytest.mark.parametrize("width", [6, 8])
def test_groups_of_rows_in_one_call_are_those_one_by_one(width: int) -> None:
    """float32 of whole 16 bytes goes through torch's grouped product, all else group by group."""
    sizes = [3, 0, 5, 1]
    rows, others, matrices = torch.randn(9, 4), torch.randn(9, width), torch.randn(4, 4, width)
    with torch.no_grad():
        together = products(rows, matrices, sizes), products_of_rows(rows, others, sizes)
        rows, others, matrices = rows.double(), others.double(), matrices.double()
        alone = products(rows, matrices, sizes), products_of_rows(rows, others, sizes)
    for value, expected in zip(together, alone):
        torch.testing.assert_close(value, expected.float())
    assert not together[1][1].any()


def test_on_one_device() -> None:
    """Against the definition, token by token."""
    torch.manual_seed(0)
    layer = ap.nn.MoE(4, 6, 3, 2, shared=5).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    y, loss = layer(x)
    assert float(loss) == 0
    assert layer.up is not None
    for token, found in zip(x.view(-1, 4), y.view(-1, 4)):
        weights, chosen = layer.router(token).softmax(-1).topk(2)
        wanted = layer.shared(token)
        for weight, e in zip(weights / weights.sum(), chosen):
            inner = F.silu(layer.gate[e] @ token) * (layer.up[e] @ token)
            wanted = wanted + weight * (layer.down[e] @ inner)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_the_losses_of_a_router_that_prefers_nothing(over: str) -> None:
    """The balance loss is 1, however many experts there are, and the other one log² of these."""
    layer = ap.nn.MoE(4, 6, 3, 2, balance_loss=0.1, z_loss=0.01, over=over).double()
    nn.init.zeros_(layer.router.weight)
    _, loss = layer(torch.randn(2, 5, 4, dtype=torch.float64))
    assert loss.item() == pytest.approx(0.1 + 0.01 * math.log(3) ** 2)


def test_first_choices_and_earlier_tokens_come_first() -> None:
    chosen = torch.tensor([[0, 1], [0, 1], [1, 0], [0, 2]])
    taken = [[True, True], [True, False], [True, False], [False, True]]
    assert within_capacity(chosen, 3, 2).tolist() == taken


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh(dp=2, ep=2), {"states": "zero3"}),
        (Mesh(ep=2, tp=2), {"microbatches": 2}),
        (Mesh(pp=2, ep=2), {"microbatches": 2, "schedule": "1f1b"}),
    ],
    ids=str,
)
def test_how_evenly_a_batch_is_routed(mesh: Mesh, options: dict[str, Any]) -> None:
    """As one device counts it, before a step and after one; nothing is changed."""
    limited = {"capacity": 0.8, "over": "sequence"}
    case = mixture_cut(mixture(blocks=2, experts=5, **limited), mesh)
    expected = tokens_of_experts(case)
    about: Any = {"mesh": mesh, "mode": "propagate", "backend": "virtual", **options}
    module = ap.parallelize(case.model, case.args, **about)
    before = module.full_state_dict()
    for _ in range(2):
        balance = module.expert_balance(*case.args)
        assert [list(one.tokens) for one in balance] == expected
        module.step(*case.args)
    first = balance[0]
    (one, *_) = expected
    assert first.module == "blocks.0"
    assert first.dropped == 4 * 6 * 2 - sum(one) > 0
    assert first.ranks == (sum(one[:3]), sum(one[3:]))
    assert first.most == max(one) * 5 / sum(one)
    assert first.planned == 1.2
    assert "2 over ep" in str(balance)
    torch.testing.assert_close(module.full_state_dict(), before)


def test_a_model_without_experts_has_no_balance() -> None:
    module = ap.parallelize(
        nn.Linear(4, 4), (torch.randn(4, 4),), mesh=Mesh(dp=2), backend="virtual"
    )
    with pytest.raises(ap.InvalidInput, match="a model that has mixtures of experts"):
        module.expert_balance(torch.randn(4, 4))


def test_what_is_no_mixture_is_refused() -> None:
    with pytest.raises(ap.InvalidInput, match="3 choices among 2 experts"):
        ap.nn.MoE(4, 4, 2, 3)
    with pytest.raises(ap.InvalidInput, match="names operators of torch"):
        ap.nn.MoE(4, 4, 2, inner="silu(door)")
    with pytest.raises(ap.InvalidInput, match="the whole batch, or of each sequence"):
        ap.nn.MoE(4, 4, 2, over="tokens")
    with pytest.raises(ap.InvalidInput, match="softmax or a sigmoid"):
        ap.nn.MoE(4, 4, 2, scores="tanh")


class Dense(nn.Module):
    """Dispatch as products with a mask of groups of tokens, as of GShard."""

    def __init__(self, experts: int = 4, hidden: int = 16, inside: int = 128) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, inside) / 4)
        self.down = nn.Parameter(torch.randn(experts, inside, hidden) / 8)
        self.capacity = 3

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        experts = self.router.weight.shape[0]
        scores = self.router(x).softmax(-1)
        weight, chosen = scores.max(-1)
        mask = F.one_hot(chosen, experts)
        place = (mask.cumsum(1) * mask - 1).clamp(min=-1)
        slots = torch.arange(self.capacity, device=x.device)
        dispatch = (place.unsqueeze(-1) == slots).to(x.dtype)  # groups, tokens, experts, slots
        rows = torch.einsum("gsec,gsh->egch", dispatch, x)
        rows = ap.shard(rows, ("ep", None, None, None))
        rows = torch.einsum("egch,ehf->egcf", rows, self.up).relu()
        rows = torch.einsum("egcf,efh->egch", rows, self.down)
        rows = ap.shard(rows, (None, "ep", None, None))
        found = torch.einsum("gsec,egch->gsh", dispatch * weight[..., None, None], rows)
        return (found - y).square().mean()


def test_dense_dispatch_has_its_exchanges_from_layouts_alone() -> None:
    """Rows go from groups to experts, and back."""
    torch.manual_seed(0)
    x, y = (torch.randn(4, 6, 16, dtype=torch.float64) for _ in range(2))
    model = Dense().double()
    ap.shard(model.router, (("ep", None, None),))
    module = assert_parity(Case("dense", model, (x, y)), Mesh(ep=4))
    moved = [r.forward for r in module.plan.movements() if r.tensor.startswith("f64[4")]
    assert moved.count("all_to_all") == 2
    assert "f64[4@ep, 16, 128]" in str(module.graph)
