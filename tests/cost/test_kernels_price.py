"""Prices of kernels: causal attention skips masked blocks, parameters are cast once a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar as ap
from autopar.cluster import Cluster
from autopar.cluster.machines import Link, Node
from autopar.collectives.joint_kernels import KernelGroup, ShardedDim, drive_without_messages
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.joint_kernels import ComputeSeconds, joint_message_cost, price_joint_call
from autopar.cost.operator_costs import ShardSizes, facts_of, operator_work
from autopar.strategies import Strategy
from autopar.strategies.node_info import info
from autopar.strategies.rule import Facts
from tests.models import ZOO

aten = torch.ops.aten


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def flops(causal: bool, strategy: Strategy, queries: int = 8, keys: int = 8) -> tuple[float, float]:
    """Return the FLOPs of attention on the busiest of four ranks, forward and backward."""
    q = torch.empty(4, 4, queries, 16, device="meta", requires_grad=True)
    k, v = (torch.empty(4, 4, keys, 16, device="meta", requires_grad=True) for _ in range(2))
    mesh = ap.Mesh(x=4)
    options = {"cluster": Cluster.preset("dgx-h100"), "mesh": mesh, "mode": "propagate"}
    captured = ap.plan(Attention(causal), (q, k, v), **options).captured
    (node,) = [node for node in captured.operators if "attention" in str(node.target)]
    rule = captured.priced[node.name]
    assert rule is not None
    facts = facts_of(node, rule, node.all_input_nodes)
    done = operator_work(facts, ShardSizes(rule, [strategy], mesh))
    assert info(node).learns
    return float(done.flops[0]), float(done.backward_flops[0])


def test_a_causal_mask_leaves_half_of_the_scores_and_the_diagonal() -> None:
    whole, _ = flops(False, Strategy())
    assert whole == 2 * 4 * 4 * 8 * 8 * (16 + 16)
    assert flops(True, Strategy())[0] == pytest.approx(whole * 36 / 64)
    wide, _ = flops(False, Strategy(), keys=16)
    assert flops(True, Strategy(), keys=16)[0] == pytest.approx(wide * 36 / 128)
    tall, _ = flops(False, Strategy(), queries=16)
    assert flops(True, Strategy(), queries=16)[0] == pytest.approx(tall * (36 + 64) / 128)


def test_the_last_queries_have_nothing_to_skip() -> None:
    uncut, _ = flops(True, Strategy())
    assert flops(True, Strategy.of(b1="x"))[0] == pytest.approx(uncut / 4)
    for way in ("q", "ring"):
        assert flops(True, Strategy.of(**{way: "x"}))[0] == pytest.approx(uncut / 2)


def test_a_fused_backward_is_five_products_to_two_of_forward() -> None:
    forward, backward = flops(True, Strategy())
    assert backward == pytest.approx(2.5 * forward)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("states", ["whole", "zero1"])
def test_the_search_adds_up_to_the_price_with_cast_parameters(
    states: str, microbatches: int
) -> None:
    case = ZOO["gpt"]()
    options = {"cluster": Cluster.preset("dgx-h100"), "mesh": ap.Mesh(x=2), "pipeline": None}
    asked = {"states": states, "microbatches": microbatches, "recompute": None}
    plan = ap.plan(case.model, case.args, case.kwargs, precision=ap.Precision(), **options, **asked)
    assert plan.search is not None
    assert plan.search.added_up == pytest.approx(plan.cost.seconds, rel=1e-6)


def test_parameters_are_cast_once_a_step() -> None:
    case = ZOO["gpt"]()
    options = {"mesh": ap.Mesh(dp=2), "mode": "data", "pipeline": None, "recompute": "full"}
    plan = ap.plan(
        case.model,
        case.args,
        case.kwargs,
        cluster=Cluster.preset("dgx-h100"),
        precision=ap.Precision(),
        microbatches=4,
        states="whole",
        **options,
    )
    casts = [
        plan.prices(node)
        for node in plan.program.graph.nodes
        if node.target is torch.ops.aten.to.dtype and node.all_input_nodes[0].op == "placeholder"
    ]
    learned = [price for price in casts if price.cast]
    assert len(learned) == len(list(case.model.parameters()))
    assert all(price.forward == price.again == price.gathered == 0 for price in learned)


def test_cores_of_a_host_take_whole_blocks_of_keys_and_exponentials() -> None:
    """Cores compute half a block more of a causal mask for each query; a device does not."""

    def seconds(causal: bool, keys: int, machines: ap.Cluster) -> float:
        shape = 1, 4, keys, 64
        inputs = tuple(torch.empty(shape, device="meta", requires_grad=True) for _ in range(3))
        plan = ap.plan(Attention(causal), inputs, cluster=machines, mesh=ap.Mesh(dp=1), mode="data")
        return plan.cost.compute

    local = ap.Cluster.local(1, measure=False)
    short, long = (seconds(True, keys, local) / seconds(False, keys, local) for keys in (512, 4096))
    assert short == pytest.approx(1, rel=0.05)
    assert 0.5 < long < 0.65
    node = replace(ap.Cluster.preset("dgx-h100").nodes[0], devices=1)
    one = replace(ap.Cluster.preset("dgx-h100"), nodes=(node,))
    assert seconds(True, 4096, one) / seconds(False, 4096, one) == pytest.approx(0.5, abs=0.1)


class Moved(TorchDispatchMode):
    """Bytes that products and sums read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func.overloadpacket in (aten.mm, aten.addmm_, aten.add_):
            is_new = kwargs.get("beta", 1) == 0  # what was there is overwritten
            self.read += sum(x.nbytes for x in args[is_new:])
            self.written += made.nbytes
        return made


def of_pieces(way: str, learns: bool = True) -> tuple[Facts, Strategy]:
    """A product of x[16, 64] and w[32, 64] in pieces on four ranks."""
    x = torch.empty(16, 64, device="meta", requires_grad=learns)
    linear = nn.Linear(64, 32, bias=False, device="meta")
    options = {"cluster": Cluster.preset("dgx-h100"), "mesh": ap.Mesh(x=4), "mode": "data"}
    captured = ap.plan(linear, (x,), **options).captured
    (node,) = [one for one in captured.operators if "linear" in str(one.target)]
    rule = captured.priced[node.name]
    assert rule is not None
    return facts_of(node, rule, node.all_input_nodes), Strategy.of(**{way: "x"})


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_pieces_of_a_product_are_priced_by_the_bytes_that_they_move(way: str, learns: bool) -> None:
    (facts, strategy), mesh = of_pieces(way, learns), ap.Mesh(x=4)
    done = operator_work(facts, ShardSizes(facts.rule, [strategy], mesh))
    inside = price_joint_call(facts, strategy, mesh)
    assert inside is not None
    assert inside.traffic.further is not None
    forward, backward = inside.traffic.further
    rows = ShardedDim(0, tuple((4 * at, 4) for at in range(4)))
    if way == "gather":
        group = KernelGroup(4, 0, (rows, None), (None,), (learns, True))
        x, weight, grad = torch.ones(4, 64), torch.ones(8, 64), torch.ones(16, 8)
    else:
        group = KernelGroup(4, 0, (None, None), (rows,), (learns, True))
        x, weight, grad = torch.ones(16, 16), torch.ones(32, 16), torch.ones(4, 32)
    with Moved() as moved:
        drive_without_messages([inside.kernel.forward(group, x, weight)])
    assert moved.read == done.read + 3 * forward.read
    assert moved.written == done.written + 3 * forward.written
    with Moved() as moved:
        drive_without_messages([inside.kernel.backward(group, (x, weight), None, grad)])
    unread = 0 if learns else weight.nbytes  # which counts as read for its own gradient
    assert moved.read == done.backward_read - unread + 3 * backward.read
    assert moved.written == done.backward_written + 3 * backward.written


@pytest.mark.parametrize("way", ["gather", "scatter"])
@pytest.mark.parametrize("bandwidth", [1e9, 1e15])
@pytest.mark.parametrize("far", [0.0, 1e-9])
def test_computing_in_pieces_takes_no_less(way: str, bandwidth: float, far: float) -> None:
    facts, strategy = of_pieces(way)
    made = Cluster.preset("dgx-h100").device
    device = replace(made, bandwidth=bandwidth, near_bytes=20e3, far_seconds=far, overhead=0.0)
    machines = Cluster((Node(device, 4, Link(0.0, 1e30)),), Link(0.0, 1e30))
    price = ClusterPrice(machines, ap.Mesh(x=4), 1 << 20)
    found = joint_message_cost(facts, strategy, price, 0.0, ComputeSeconds(0.0, 0.0))
    assert min(found.forward, found.backward) >= 0
    if bandwidth == 1e9 and far:
        assert min(found.forward, found.backward) > 1e-6
