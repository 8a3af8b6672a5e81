"""Memory of hosts: reported as the most of all places, and limited by what each node has."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar as ap
from autopar.cluster import Host
from tests import models
from tests.toy import machines

HOSTED = ap.States(optimizer_device="host")
KEPT = ap.Recompute("full", keep="host")
WAYS = [
    ("table", {"mesh": ap.Mesh(dp=4)}),
    ("table", {"mesh": ap.Mesh(pp=2, dp=2)}),
    ("table", {"mesh": ap.Mesh(dp=2, pp=2), "schedule": "chimera", "microbatches": 2}),
    ("gpt", {"mesh": ap.Mesh(dp=2, pp=2), "states": HOSTED}),
    ("gpt", {"mesh": ap.Mesh(pp=4), "states": HOSTED, "recompute": KEPT, "microbatches": 4}),
]


class Loss(nn.Module):
    def forward(self, x):
        return x.square().mean()


def with_table_there(rows: int = 1000) -> models.Case:
    """A table on the host that the first stage reads, and linears that it does not need."""
    table = ap.shard(nn.Embedding(rows, 16), device="host")
    model = nn.Sequential(table, *(nn.Linear(16, 16) for _ in range(4)), Loss())
    return models.Case("table", model, (torch.zeros(16, 4, dtype=torch.int64),))


def cluster_of(nodes: int, devices: int, host: float = 1e9, memory: float = 1e9) -> ap.Cluster:
    """Equal nodes, in whose hosts each device has so many bytes."""
    made = machines(devices, memory=memory)
    device = replace(made.nodes[0].device, host=Host(memory=host))
    return replace(made, nodes=(replace(made.nodes[0], device=device),) * nodes)


def planned(case: models.Case, **options: object) -> ap.Plan:
    return ap.plan(case.model, case.args, case.kwargs, **options)


@pytest.mark.parametrize(("name", "options"), WAYS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_each_memory_is_the_most_of_all_places(name, options, nodes):
    case = with_table_there() if name == "table" else models.gpt(layers=4)
    plan = planned(case, cluster=cluster_of(nodes, 4 // nodes), mode="propagate", **options)
    assert plan.memory.host == max(place.host for place in plan.memories) > 0
    assert plan.memory.host == sum(plan.memory.on_host.values())
    assert plan.memory.peak == max(place.peak for place in plan.memories)
    sums = [0.0] * nodes
    for rank in range(4):
        sums[rank * nodes // 4] += plan.memories[plan.place_of(rank)].host
    load = plan.fullest_host
    assert (load.ranks, load.needed, load.memory) == (4 // nodes, max(sums), 4 // nodes * 1e9)


def test_ranks_of_a_node_share_its_host():
    """The rank of the second stage leaves its part to that of the first, on the same node alone."""
    size = 4 * with_table_there().model[0].weight.nbytes  # with its gradient and two moments
    options = {"mesh": ap.Mesh(pp=2), "states": "whole", "recompute": None}
    options |= {"schedule": "1f1b", "microbatches": 2}
    plan = planned(with_table_there(), cluster=cluster_of(1, 2, host=0.6 * size), **options)
    assert [place.host for place in plan.memories] == [pytest.approx(size, rel=0.01), 0]
    with pytest.raises(ap.InvalidInput, match="fits into the memory that it has") as error:
        planned(with_table_there(), cluster=cluster_of(2, 1, host=0.6 * size), **options)
    assert "of 1 rank, where it has 153.6 kB" in str(error.value)
    with pytest.raises(ap.InvalidInput, match=r"of 2 ranks, where it has 204\.8 kB"):
        planned(with_table_there(), cluster=cluster_of(1, 2, host=0.4 * size), **options)


@pytest.mark.parametrize(("host", "states"), [(1.1, "whole"), (0.6, "zero2"), (0.3, "zero3")])
def test_the_automatic_choice_keeps_to_what_hosts_have(host, states):
    """Less of the table is kept on each rank, the less room there is."""
    size = 4 * with_table_there().model[0].weight.nbytes
    plan = planned(with_table_there(), cluster=cluster_of(1, 4, host=host * size), mode="data")
    assert plan.states == ap.States.of(states)
    assert plan.fullest_host.room >= 0


def test_no_pipeline_is_chosen_whose_host_is_too_small():
    size = 4 * with_table_there().model[0].weight.nbytes
    cluster = cluster_of(1, 2, host=0.4 * size)
    options = {"microbatches": 1, "states": "whole", "recompute": None}
    with pytest.raises(ap.InvalidInput, match=r"of 2 ranks, where it has 204\.8 kB"):
        planned(with_table_there(), cluster=cluster, **options)
