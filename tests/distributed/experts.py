"""Tokens that processes send to the ranks that have their experts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

import autopar as ap
from autopar import Mesh
from autopar.layout import chunk
from tests.mixtures import mixture, mixture_cut, tokens_of_experts
from tests.models import Case
from tests.parity import assert_equal, parallel_outcome, single_outcome


@cache
def routed() -> list[tuple[Case, Mesh, dict[str, Any]]]:
    """Experts that do not divide, and experts in stages."""
    stages = {"microbatches": 2, "schedule": "1f1b"}
    limited = {"blocks": 2, "capacity": 0.8, "balance_loss": 0.1, "over": "sequence"}
    ways: list[tuple[Mesh, dict[str, Any], dict[str, Any]]] = [
        (Mesh(ep=4), {}, {}),
        (Mesh(pp=2, ep=2), limited, stages),
    ]
    return [
        (mixture_cut(mixture(experts=6, **sizes), mesh), mesh, options)
        for mesh, sizes, options in ways
    ]


def sends_tokens_to_their_experts() -> None:
    for case, mesh, options in routed():
        about = {"mesh": mesh, "mode": "propagate", **options}
        module = ap.parallelize(case.model, case.args, **about)
        assert "routed_experts(" in str(module.graph)
        balance = [list(one.tokens) for one in module.expert_balance(*case.args)]
        assert balance == tokens_of_experts(case)
        assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
        held = [p for name, p in module.named_parameters() if name.endswith(".gate")]
        assert held
        for parameter in held:
            assert isinstance(parameter, DTensor)
            place = mesh.position(dist.get_rank(), ("ep",))
            assert parameter.to_local().shape[0] == chunk(6, mesh["ep"], place)[1]
