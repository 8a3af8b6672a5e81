"""Long sequences: cut between layers (Megatron), by heads in attention (Ulysses), or as a ring."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import autopar as ap
from autopar import Mesh
from autopar.collectives import joint_kernels
from autopar.cost.joint_kernels import price_joint_call
from autopar.strategies.node_info import info
from autopar.tensor_type import TensorType
from tests import models
from tests.annotations import attention, megatron, sequence
from tests.held import kept_for_backward
from tests.large_models import long_llama
from tests.models import Case
from tests.parity import assert_equal, assert_parity, parallel_outcome

SP2, TP2_SP2 = Mesh(sp=2), Mesh(tp=2, sp=2)
Pair = tuple[str, str]


def moves(module: ap.ParallelModule) -> Counter[Pair]:
    """The movements of values of three dims and more, forward and back."""
    every = [r for r in module.plan.movements() if len(TensorType.parse(r.tensor).shape) > 2]
    return Counter((r.forward, r.backward) for r in every)


def how(plan: ap.Plan) -> str:
    """The strategy of attention."""
    return str(plan.decisions.strategies["scaled_dot_product_attention"])


@pytest.mark.parametrize(
    ("mesh", "length"), [(SP2, 8), (Mesh(sp=3), 7), (Mesh(sp=4), 5)], ids=["2", "3", "4"]
)
def test_a_ring(mesh: Mesh, length: int) -> None:
    """No keys are gathered; pieces may be uneven, or empty."""
    case = attention(models.gpt(sequence=length, layers=1), rows="sp")
    module = assert_parity(sequence(case, "sp"), mesh)
    assert how(module.plan) == "ring@sp"
    assert moves(module) == {("causal_ring_attention", "ring_attention_backward"): 1}


def test_a_ring_of_queries_that_another_axis_cuts_moves_all_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the plan says is what the member moves whose keys all others see."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keys = (None, None, "b", None)
            attend: Any = ap.shard(
                F.scaled_dot_product_attention, ((None, None, ("a", "b"), None), keys, keys)
            )
            y = x * self.scale
            return attend(y, y, x, is_causal=True).square().sum()

    x, moved, deliver = torch.randn(2, 2, 16, 4, dtype=torch.float64), [0], joint_kernels._deliver
    model, mesh = Attention(), Mesh(a=2, b=4)
    module = ap.parallelize(model, (x,), mesh=mesh, mode="propagate", backend="virtual")
    assert how(module.plan) == "q@a ring@b"

    def count(asked: list[joint_kernels.RingShift]) -> list[tuple[torch.Tensor, ...]]:
        moved[0] += sum(one.nbytes for one in asked[0].tensors)
        return deliver(asked)

    monkeypatch.setattr(joint_kernels, "_deliver", count)
    torch.testing.assert_close(module(x), model(x))
    (node,) = (node for node in module.plan.rewritten.nodes if info(node).joint is not None)
    assert moved[0] == 2 * info(node).bytes  # of the first of each of two groups


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", [2, 4])
def test_a_ring_moves_what_is_predicted(
    count: int, is_causal: bool, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each step of a ring, what the member sends that sends most."""

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cut = (None, None, "cp", None)
            attend: Any = ap.shard(F.scaled_dot_product_attention, (cut, cut, cut))
            y = attend(q, k, v, is_causal=is_causal, enable_gqa=heads > 2)
            return y.square().sum()

    shapes = (2, heads, 24, 4), (2, 2, 24, 4), (2, 2, 24, 6)
    inputs = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]
    moved, deliver = list[int](), joint_kernels._deliver
    mesh, options = Mesh(cp=count), {"mode": "propagate", "backend": "virtual"}
    module = ap.parallelize(Attention(), tuple(inputs), mesh=mesh, **options)
    (node,) = (node for node in module.plan.rewritten.nodes if info(node).joint is not None)
    (inside,) = filter(None, (price_joint_call(*call, mesh) for call in info(node).calls))

    def count_most(asked: list[joint_kernels.RingShift]) -> list[tuple[torch.Tensor, ...]]:
        moved.append(max(sum(one.nbytes for one in each.tensors) for each in asked))
        return deliver(asked)

    monkeypatch.setattr(joint_kernels, "_deliver", count_most)
    loss = module(*inputs)
    torch.testing.assert_close(loss, Attention()(*inputs))
    assert sum(moved) == info(node).bytes == sum(size for _, size in inside.traffic.forward)
    moved.clear()
    loss.backward()
    assert sum(moved) == sum(size for _, size in inside.traffic.backward)


def test_ulysses() -> None:
    case = attention(models.gpt(layers=1), heads="sp")
    module = assert_parity(sequence(case, "sp"), SP2)
    # Queries, keys and values; the output is summed over heads into rows.
    wanted = {("all_to_all", "all_to_all"): 3, ("reduce_scatter", "all_gather"): 1}
    assert moves(module) == wanted


def test_megatrons_sequence_cut() -> None:
    module = assert_parity(sequence(megatron(models.gpt(layers=1))), Mesh(tp=2))
    found = moves(module)
    assert found["all_gather", "reduce_scatter"] == found["reduce_scatter", "all_gather"] == 2


@pytest.mark.parametrize("way", ["heads cut by another axis", "ring alone"])
def test_grouped_heads_with_rotary_positions(way: str) -> None:
    """Attention inside of a library is annotated by its function; it needs no mask here."""
    heads = "tp" if way != "ring alone" else None
    cut = ((None, heads, "sp", None),) * 3
    make = partial(models.llama, layers=1, sequence=7)
    mesh = TP2_SP2 if heads else SP2
    marked = ap.shard(F.scaled_dot_product_attention, cut)
    with patch.object(F, "scaled_dot_product_attention", marked):
        module = assert_parity(sequence(make(), "sp"), mesh)
    assert how(module.plan) == ("b1@tp ring@sp" if heads else "ring@sp")


def test_packed_documents_in_a_ring() -> None:
    """Who is in whose document follows from positions that begin again, of each batch anew."""
    made = models.llama(layers=1, sequence=8, batch=2)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])
    case = replace(made, kwargs={**made.kwargs, "position_ids": positions})
    marked = ap.shard(F.scaled_dot_product_attention, (*((None, None, "sp", None),) * 3, None))
    with patch.object(F, "scaled_dot_product_attention", marked):
        module = assert_parity(sequence(case, "sp"), SP2)
    assert how(module.plan) == "ring@sp"
    again = {**case.kwargs, "position_ids": positions.flip(0)}
    with torch.no_grad():
        found = (module(*case.args, **again), module.full_state_dict())
        case.model.load_state_dict(found[1])
        torch.testing.assert_close(found[0].loss, case.model(*case.args, **again).loss)


def test_weights_are_dropped_by_their_places() -> None:
    case = attention(models.gpt(layers=1, dropout=0.2), heads="tp", rows="sp")
    options: dict[str, Any] = {"mode": "propagate", "backend": "virtual"}
    found = []
    for mesh in (Mesh(tp=1, sp=1), TP2_SP2):
        module = ap.parallelize(case.model, case.args, mesh=mesh, **options)
        torch.manual_seed(4)
        found.append(parallel_outcome(module, case))
    assert_equal(found[1], found[0])


def test_what_links_say() -> None:
    """A sequence of 64k tokens on four nodes: heads change hands inside of nodes, and a ring joins
    the nodes; on one axis of all 32 devices, which are more than heads of keys, it is a ring."""
    case = long_llama(sequence=2**16, layers=1)
    cluster = ap.Cluster.preset("dgx-h100", nodes=4)
    for mesh, wanted in ((Mesh(sp=32), "ring@sp"), (Mesh(sp=4, tp=8), "b1@tp ring@sp")):
        plan = ap.plan(case.model, case.args, cluster=cluster, mesh=mesh)
        assert how(plan) == wanted


def test_the_rest_of_a_ring_is_asked_for() -> None:
    """Keys that are cut by an axis, where queries are not."""
    case = models.gpt(layers=1)
    cut: list[Any] = [None, (None, None, "sp", None), (None, None, "sp", None)]
    for module in case.model.modules():
        if isinstance(module, models.Attention):
            module.attend = ap.shard(F.scaled_dot_product_attention, tuple(cut))  # type: ignore[method-assign]
    with pytest.raises(ap.InvalidInput, match="'q' and 'k'"):
        ap.plan(case.model, case.args, mesh=SP2, mode="propagate")


def kept(case: Case, mesh: Mesh) -> int:
    return int(ap.plan(case.model, case.args, mesh=mesh, mode="propagate").memory.activations)


def test_what_a_rank_keeps_falls_with_the_axis() -> None:
    sizes = {"sequence": 32, "layers": 1, "batch": 2}
    whole = kept(models.gpt(**sizes), Mesh(sp=1))
    for ranks in (2, 4):
        case = attention(sequence(models.gpt(**sizes), "sp"), rows="sp")
        assert kept(case, Mesh(sp=ranks)) < whole / ranks * 1.1


class Masked(torch.nn.Module):
    """A ring whose weights are masked, or dropped."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = torch.nn.Parameter(torch.ones(8, dtype=torch.float64))
        cut = (*((None, None, "sp", None),) * 3, *((None,) if kind != "dropped" else ()))
        self.attend: Any = ap.shard(F.scaled_dot_product_attention, cut)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        mask = {"seen": seen, "learnt": seen * self.scale.sum(), "dropped": None}[self.kind]
        dropped = 0.2 if self.kind == "dropped" else 0.0
        return self.attend(y * 2, y * 3, y * 4, mask, dropped).square().mean()


@pytest.mark.parametrize("kind", ["seen", "learnt", "dropped"])
def test_what_a_ring_keeps_is_what_is_predicted(kind: str) -> None:
    """A mask as it is, no scores, and a number for each row."""
    inputs = torch.randn(2, 4, 16, 8, dtype=torch.float64), torch.rand(1, 1, 16, 16) > 0.3
    module = ap.parallelize(
        Masked(kind), inputs, mesh=Mesh(sp=4), mode="propagate", backend="virtual"
    )
    held = kept_for_backward(module, Case(kind, Masked(kind), inputs)) / 4
    assert module.plan.memory.activations == pytest.approx(held, rel=0.001)
