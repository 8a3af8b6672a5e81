"""Plans whose pages are looked at, each made once."""

from __future__ import annotations

from functools import lru_cache

import autopar as ap
from autopar.cluster.machines import Link, Node
from autopar.plans.plan import Plan
from tests import models


@lru_cache
def pipelined() -> Plan:
    """Chimera over two stages, two ranks in each."""
    case = models.gpt(layers=6)
    about = {"schedule": "chimera", "microbatches": 4, "cluster": ap.Cluster.preset("dgx-h100")}
    return ap.plan(case.model, case.args, case.kwargs, mesh=ap.Mesh(pp=2, tp=2), **about)


def small(nodes: int = 2, devices: int = 2) -> ap.Cluster:
    """A few devices, with a slow network between nodes."""
    device = ap.Cluster.preset("dgx-a100").device
    node = Node(device, devices, Link(1e-6, 300e9))
    return ap.Cluster((node,) * nodes, Link(1e-5, 10e9), "small")


@lru_cache
def chosen() -> Plan:
    """Among all ways to run a step on two nodes."""
    case = models.gpt(layers=6, batch=16)
    return ap.plan(case.model, case.args, case.kwargs, cluster=small(), seconds=None)


def tensor_parallel(case: models.Case) -> models.Case:
    """With its linears cut over `tp`, by annotation."""
    for block in case.model.layers:
        for linear in (block.attention.q, block.attention.k, block.attention.v, block.up):
            ap.shard(linear, params={"weight": ("tp", None)})
    return case


@lru_cache
def megatron() -> Plan:
    """Tensor parallelism of four ranks by annotation; all else is asked for, too."""
    case = tensor_parallel(models.gpt(layers=6, tied=False))
    about = {"mesh": ap.Mesh(tp=4), "cluster": ap.Cluster.preset("dgx-h100")}
    about |= {"microbatches": 1, "states": "whole", "recompute": None}
    return ap.plan(case.model, case.args, case.kwargs, mode="propagate", **about)
