"""What moves, exactly: the counts that plans are known for, and the listing that shows them."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar.collectives import joint_kernels
from autopar.plans.plan_value import MovementRecord
from autopar.strategies.node_info import info
from tests import models
from tests.annotations import megatron, sequence, stored, vocabulary
from tests.models import Case
from tests.parity import assert_equal, parallel_outcome, single_outcome

TP2 = ap.Mesh(tp=2)


class BatchNormAndMatmul(nn.Module):
    """MindSpore's example of operators whose layouts do not meet."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = ap.shard(nn.BatchNorm1d(8), ((4, 1),))
        self.matmul = ap.shard(torch.matmul, ((1, 1), (1, 4)))
        self.weight = nn.Parameter(torch.randn(8, 12, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(self.norm(x), self.weight)


def test_batch_norm_on_rows_and_matmul_on_columns() -> None:
    model = BatchNormAndMatmul().double()
    x = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(d=4), check=True, mode="propagate")
    statistics, between = (r for r in module.plan.movements() if r.forward != "identity")
    assert _kinds(between) == ("all_gather", "reduce_scatter")
    assert (between.axis, between.tensor) == ("d", "f64[16@d, 8]")
    assert between.bytes == 16 * 8 * 8
    assert statistics.forward == "all_reduce"
    assert "batch_sums" in _line(module, statistics)
    parallel, single = module(x), model(x)
    assert isinstance(parallel, Tensor)
    torch.testing.assert_close(parallel, single, rtol=1e-12, atol=1e-12)
    one, other = (torch.autograd.grad(y.square().sum(), x)[0] for y in (parallel, single))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_cut_layers_need_two_all_reduces_each_way_in_a_block() -> None:
    for layers in (1, 3):
        for fused in (False, True):
            kinds = _kinds_of(megatron(models.gpt(layers=layers, fused=fused)), TP2)
            assert kinds == {
                ("all_reduce", "identity"): 2 * layers,
                ("identity", "all_reduce"): 2 * layers,
            }


def test_a_cut_sequence_needs_gathers_and_scatters_instead() -> None:
    case = sequence(megatron(models.gpt(layers=2)))
    records = [r for r in _movements(case, TP2) if r.tensor.startswith("f64[8, 8")]
    assert Counter(map(_kinds, records)) == {
        ("all_gather", "reduce_scatter"): 4,
        ("reduce_scatter", "all_gather"): 4,
    }


def test_a_cut_batch_moves_only_the_loss() -> None:
    records = _movements(models.mlp(), ap.Mesh(dp=4))
    assert [(_kinds(r), r.tensor) for r in records] == [(("all_reduce", "identity"), "f64[]{+dp}")]


def test_stored_parameters_are_gathered_once_each() -> None:
    case = stored(models.mlp())
    count = len(list(case.model.parameters()))
    kinds = _kinds_of(case, ap.Mesh(dp=4))
    assert kinds[("all_gather", "reduce_scatter")] == count
    assert set(kinds) == {("all_gather", "reduce_scatter"), ("all_reduce", "identity")}


def test_a_cut_vocabulary_moves_no_logits() -> None:
    records = _movements(vocabulary(megatron(models.gpt(layers=1, vocabulary=50))), TP2)
    assert not [record for record in records if "50" in record.tensor]


class TwoReaders(nn.Module):
    """One value, cut, that is wanted whole twice: as a pending replica and as a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 8)
        ap.shard(self.first, params={"weight": (None, "tp")})
        ap.shard(self.second, params={"weight": ("tp", None)})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.first(x))
        return self.second(hidden).square().mean(), hidden


def test_readers_of_one_value_share_its_movement() -> None:
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    case = Case("two readers", TwoReaders().double(), (x,))
    module = ap.parallelize(case.model, case.args, mesh=TP2, check=True, mode="propagate")
    records = module.plan.movements()
    assert [record.forward for record in records].count("all_reduce") == 2  # hidden, and the loss
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))


LISTING = """\
p_layers_0_weight = placeholder : f64[8@tp, 4] # sum of gradients over dp layers.0
p_layers_0_bias = placeholder : f64[8@tp] # sum of gradients over dp layers.0
p_head_weight = placeholder : f64[2, 8@tp] # sum of gradients over dp head
p_head_bias = placeholder : f64[2] # sum of gradients over dp head
x = placeholder : f64[6@dp, 4]
target = placeholder : f64[6@dp, 2]
add = linear(x, p_layers_0_weight, p_layers_0_bias) : f64[6@dp, 8@tp] # layers.0
relu = relu(add) : f64[6@dp, 8@tp]
linear_1 = linear(relu, p_head_weight) : f64[6@dp, 2]{+tp} # head
all_reduce_for_add_1 = autopar.all_reduce(linear_1) : f64[6@dp, 2] \
# 48 bytes over tp, back: identity head
add_1 = add(all_reduce_for_add_1, p_head_bias) : f64[6@dp, 2] # head
mse_loss = mse_loss(add_1, target, 0) : f64[6@dp, 2]
sum_1 = sum(mse_loss) : f64[]{+dp}
div = div(sum_1, 12) : f64[]{+dp}
all_reduce_for_output = autopar.all_reduce(div) : f64[] # 8 bytes over dp, back: identity
return (all_reduce_for_output)"""


def test_the_listing_of_a_small_program() -> None:
    case = models.mlp(batch=6, inputs=4, hidden=8, outputs=2, layers=2)
    ap.shard(case.model.get_submodule("layers.0"), params={"weight": ("tp", None)})
    ap.shard(case.model.get_submodule("head"), params={"weight": (None, "tp")})
    module = ap.parallelize(case.model, case.args, mesh=ap.Mesh(dp=2, tp=2), mode="propagate")
    text = re.sub(r"tests/models.py:\d+", "", str(module.graph))
    lines = [" ".join(line.split()).removesuffix(" #") for line in text.splitlines()]
    assert "\n".join(lines) == LISTING


def _movements(case: Case, mesh: ap.Mesh) -> list[MovementRecord]:
    plan = ap.plan(case.model, case.args, case.kwargs, mesh=mesh, mode="propagate")
    return plan.movements()


def _kinds_of(case: Case, mesh: ap.Mesh) -> Counter[tuple[str, str | None]]:
    return Counter(map(_kinds, _movements(case, mesh)))


def _kinds(record: MovementRecord) -> tuple[str, str | None]:
    return record.forward, record.backward


def _line(module: ap.ParallelModule, record: MovementRecord) -> str:
    lines = str(module.graph).splitlines()
    return next(line for line in lines if line.startswith(f"{record.node} ="))


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_of_rows_in_pieces_a_number_of_each_travels(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long they are."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(9, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            cut = ap.shard(function, ((None, "tp"),))
            return cut(x * self.scale, -1).square().sum()

    moved, deliver = [0], joint_kernels._deliver

    def count(asked: Any) -> Any:
        times = len(asked) if isinstance(asked[0], joint_kernels.AllGather) else 1
        moved[0] += times * asked[0].tensor.nbytes
        return deliver(asked)

    monkeypatch.setattr(joint_kernels, "_deliver", count)
    x, model = torch.randn(4, 9, dtype=torch.float64), Rows()
    module = ap.parallelize(model, (x,), mesh=TP2, mode="propagate", backend="virtual")
    (node,) = (node for node in module.plan.rewritten.nodes if info(node).joint is not None)
    loss = module(x)
    assert moved[0] == info(node).bytes == (2 + 1) * 4 * 8
    loss.backward()
    assert moved[0] == (2 + 1 + 1) * 4 * 8
