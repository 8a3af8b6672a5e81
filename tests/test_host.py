"""Modules on the host: the laws hold, and each side is counted by itself."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar as ap
from autopar.cluster import Host
from tests import models
from tests.annotations import megatron
from tests.parity import assert_parity
from tests.pipeline.models import share_captures  # noqa: F401
from tests.toy import machines


def with_tokens_there(case: models.Case) -> models.Case:
    """The embedding, which is tied to the head that is on the device."""
    ap.shard(case.model.tokens, device="host")
    return case


def with_a_block_there(case: models.Case) -> models.Case:
    """All of a block but its attention."""
    ap.shard(case.model.layers[0], device="host")
    ap.shard(case.model.layers[0].attention, device="device")
    return case


DP, TP = ap.Mesh(dp=4), ap.Mesh(dp=2, tp=2)
BOTH = ap.States("all", "all", "all", parameters_device="host", optimizer_device="host")
LAW = [
    (with_tokens_there, {"mesh": TP, "mode": "auto"}),
    (with_tokens_there, {"mesh": DP, "mode": "data", "states": "zero3", "microbatches": 2}),
    (with_a_block_there, {"mesh": DP, "mode": "data", "states": BOTH, "recompute": "full"}),
    (with_a_block_there, {"mesh": TP, "mode": "propagate", "states": "zero1"}),
    (
        with_a_block_there,
        {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "zb-h1", "microbatches": 2, "states": "zero2"},
    ),
]


@pytest.mark.parametrize(
    ("there", "options"), LAW, ids=lambda one: getattr(one, "__name__", str(one))
)
def test_parity(there, options):
    case = models.gpt(layers=2)
    assert_parity(there(megatron(case) if options["mesh"] is TP else case), **options)


def test_parity_with_masters():
    precision = ap.Precision(compute=torch.float64, reduce=torch.float64)
    case = with_tokens_there(models.gpt())
    assert_parity(case, ap.Mesh(dp=2), mode="data", states="zero3", precision=precision)


def test_each_side_is_counted_by_itself(tmp_path):
    options = {"mesh": ap.Mesh(dp=2), "mode": "data", "states": "whole"}
    case, other = (models.gpt(layers=2, vocabulary=1000) for _ in range(2))
    for one in (case, other):
        one.model.head.weight = nn.Parameter(one.model.head.weight.detach().clone())
    plain = ap.plan(other.model, other.args, other.kwargs, **options)
    ap.shard(case.model.tokens, device="host")
    plan = ap.plan(case.model, case.args, case.kwargs, **options)
    size = case.model.tokens.weight.nbytes
    memory, before = plan.memory, plain.memory
    assert memory.host_parameters == memory.host_gradients == size
    assert memory.host_optimizer == 2 * size
    for kind, count in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        assert getattr(memory, kind) == getattr(before, kind) - count * size
    assert memory.peak <= before.peak - 3 * size
    assert plan.memory.host_activations == sum(
        n.meta["type"].local_bytes(plan.mesh)
        for n in plan.program.graph.nodes
        if n.name == "to_host"
    )
    assert "on the host" in str(plan)
    assert "to_host" in str(plan.explain("to_host"))
    assert "to_host" in str(plan.program.graph)
    plan.save(tmp_path / "plan.json")
    again = ap.Plan.load(tmp_path / "plan.json").attach(case.model, case.args, case.kwargs)
    assert again.memory == memory
    with pytest.raises(ap.InvalidInput, match="to_host"):
        ap.Plan.load(tmp_path / "plan.json").attach(other.model, other.args, other.kwargs)


def test_what_crosses_has_its_price():
    """Bytes over a link without latency, forward and backward."""
    cluster = machines(2, 1e15, 0.0)
    (node,) = cluster.nodes
    host = Host(copy_alpha=0.0, copy_bandwidth=1.0, bandwidth=1e15, flops=1e15, overhead=0.0)
    node = replace(node, device=replace(node.device, host=host))
    cluster = replace(cluster, nodes=(node,))
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8))
    ids = torch.zeros(4, 5, dtype=torch.int64)
    ap.shard(model[0], device="host")
    plan = ap.plan(model, (ids,), mesh=ap.Mesh(dp=2), mode="data", cluster=cluster)
    crossing = [n for n in plan.program.graph.nodes if n.name in ("to_host", "to_device")]
    ids_, rows = 2 * 5 * 8, 2 * 5 * 8 * 4
    assert [plan.prices(n).forward for n in crossing] == [ids_, rows]
    assert [plan.prices(n).backward for n in crossing] == [0, rows]


class Turned(nn.Module):
    """An embedding that is scaled by a table, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(10, 8)
        self.register_buffer("table", torch.linspace(1, 2, 8))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, ids):
        self.calls += 1
        return self.rows(ids) * self.table


class Loss(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


def with_buffers_there() -> models.Case:
    torch.manual_seed(0)
    model = nn.Sequential(ap.shard(Turned(), device="host"), Loss(8, 8)).double()
    ids = torch.arange(8).view(4, 2) % 10
    return models.Case("turned", model, (ids,))


def test_buffers_that_stay_as_they_are_are_there():
    case = with_buffers_there()
    plan = ap.plan(case.model, case.args, case.kwargs, mesh=ap.Mesh(dp=2), mode="data")
    assert plan.memory.host_buffers == case.model[0].table.nbytes
    assert plan.memory.buffers == case.model[0].calls.nbytes
    assert plan.program.on_host == {"0.rows.weight", "0.table"}
    assert_parity(case, mesh=ap.Mesh(dp=2), mode="data")


def test_what_cannot_be_is_refused():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    with pytest.raises(ap.InvalidInput, match="'disk'") as error:
        ap.shard(model[0], device="disk")
    assert "test_host.py" in str(error.value)
    with pytest.raises(ap.InvalidInput, match="for builtin"):
        ap.shard(torch.matmul, device="host")
    ap.shard(model[0], device="host")
    with pytest.raises(ap.InvalidInput, match="on the host, or on the device"):
        ap.shard(model[0], device="device")
    other = nn.Sequential(nn.Linear(4, 4))
    ap.shard(other[0], device="device")
    with pytest.raises(ap.InvalidInput, match="states on the host"):
        ap.plan(other, (torch.ones(4, 4),), mesh=ap.Mesh(dp=2), mode="data", states=BOTH)


def test_an_operator_without_a_kernel_for_the_host_is_refused():
    with torch.library._scoped_library("autopar_tests", "FRAGMENT") as library:
        library.define("for_gpus(Tensor x) -> Tensor")
        library.impl("for_gpus", lambda x: x.clone(), "CUDA")
        library.impl("for_gpus", torch.empty_like, "Meta")

        class OnGPU(nn.Module):
            def forward(self, x):
                return torch.ops.autopar_tests.for_gpus(x)

        model = nn.Sequential(ap.shard(OnGPU(), device="host"), nn.Linear(4, 4))
        with pytest.raises(ap.InvalidInput, match="which no CPU runs"):
            ap.plan(model, (torch.ones(4, 4),), mesh=ap.Mesh(dp=2), mode="data")
