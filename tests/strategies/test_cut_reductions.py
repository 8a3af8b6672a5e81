"""Reductions, softmax and scans over dims in pieces: numbers that are infinite or none, and what
their prices say of messages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.collectives import joint_kernels
from autopar.cost.joint_kernels import price_joint_call
from autopar.mesh import Mesh
from autopar.strategies import KernelCall
from autopar.strategies.kernels.recurrences import LINEAR_SCAN
from autopar.strategies.rule import Facts
from tests.strategies.rule_law import Case, Reference, check_all

aten = torch.ops.aten
REDUCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "std": (aten.std.correction, ([0],)),
    "var": (aten.var.correction, ([0],)),
    "logsumexp": (aten.logsumexp.default, ([0],)),
    "prod": (aten.prod.dim_int, (0,)),
    "amax": (aten.amax.default, ([0],)),
    "amin": (aten.amin.default, ([0],)),
    "max": (aten.max.default, ()),
    "min": (aten.min.default, ()),
} | {
    f"norm {order}": (aten.linalg_vector_norm.default, (order, [0]))
    for order in (0, 0.5, 1, 1.5, 2, 3, math.inf, -math.inf, -1)
}
MASKED = slice(0, 3)  # all of a piece
ODD = {"masked": (-math.inf, MASKED), "infinite": (math.inf, 1), "zero": (0.0, MASKED)}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_gradients_beside_infinite_numbers(name: str) -> None:
    """Gradients are those of the whole, also beside a piece that is all hidden."""
    target, args = REDUCTIONS[name]
    torch.manual_seed(0)
    for value, at in (*ODD.values(), (math.nan, 4)):
        x = torch.randn(5, 3, dtype=torch.float64)
        x[at, 1] = value
        check_all(Case(name, target, (x, *args)), Mesh(x=2), Mesh(x=3))


def _moved(request: Any) -> float:
    """Return the bytes that one member of two sends to the other."""
    match request:
        case joint_kernels.AllGather(tensor) | joint_kernels.AllReduce(tensor):
            return tensor.nbytes
    raise AssertionError(request)


TABLE = torch.randn(6, 40)
MOVING: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "softmax": (aten.softmax.int, (TABLE, 1), {}),
    "log_softmax": (aten.log_softmax.int, (TABLE.bfloat16(), 1), {}),
    "log_softmax in doubles": (
        aten.log_softmax.int,
        (TABLE.bfloat16(), 1, torch.float64),
        {},
    ),
    "amax": (aten.amax.default, (TABLE.bfloat16(), [1]), {}),
    "norm": (aten.linalg_vector_norm.default, (TABLE, 2, [1]), {"dtype": torch.float64}),
    "cumsum": (aten.cumsum.default, (TABLE > 0, 1), {}),
    "cumsum of halves": (aten.cumsum.default, (TABLE.bfloat16(), 1), {}),
    "scan": (LINEAR_SCAN, (TABLE.bfloat16(), TABLE.bfloat16(), None, 1), {}),
}


@pytest.mark.parametrize("name", MOVING)
def test_what_travels_is_what_is_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, args, kwargs = MOVING[name]
    case, mesh = Case(name, target, args, kwargs, tolerance=0.1), Mesh(x=2)
    reference = Reference(case)
    moved, deliver = list[float](), joint_kernels._deliver

    def delivered(requests: list[Any]) -> list[tuple[Tensor, ...]]:
        moved.append(max(map(_moved, requests)))
        return deliver(requests)

    monkeypatch.setattr(joint_kernels, "_deliver", delivered)
    learns = tuple(value.is_floating_point() for value in reference.values)
    sizes = tuple(value.element_size() for value in reference.values)
    dtypes = tuple(output.dtype for output in reference.outputs)
    facts = Facts(reference.rule, sizes, learns, dtypes, is_view=False)
    count = 0
    for strategy in reference.rule.strategies(mesh):
        call = KernelCall.of(reference.rule, strategy)
        if call is None:
            continue
        moved.clear()
        reference.check(strategy, mesh)
        inside = price_joint_call(facts, strategy, mesh)
        assert inside is not None
        traffic = inside.traffic
        predicted = traffic.forward + (traffic.backward if any(learns) else ())
        shares = {"all_gather": 0.5, "all_reduce": 1.0}
        assert moved == [size * shares[kind] for kind, size in predicted]
        count += 1
    assert count == 1
