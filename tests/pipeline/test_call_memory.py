"""What calls take, seen on meta tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import autopar as ap
from autopar.cost.host_kernels import HostKernels
from autopar.pipeline.memory import call_memory
from autopar.pipeline.memory.call_memory import CallMemories
from autopar.strategies.node_info import info
from tests import models
from tests.annotations import attention, sequence

MESH, HERE = ap.Mesh(dp=2), HostKernels.here()


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> fx.Node:
    """Of a program of which nothing has been seen."""
    monkeypatch.setattr(CallMemories, "_seen", {})
    case = models.shared("mlp")
    made = ap.plan(case.model, case.args, case.kwargs, mesh=MESH, mode="data")
    monkeypatch.setattr(CallMemories, "_seen", {})
    nodes = made.program.graph.nodes
    return next(node for node in nodes if node.target is torch.ops.aten.linear.default)


def fail(*args: Any) -> Any:
    raise ZeroDivisionError


def test_what_cannot_run_without_values_takes_no_more_than_its_gradients(
    linear: fx.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_memory, "local_call", lambda *given: (fail, linear.args, {}))
    seen = CallMemories(MESH, HERE)(linear)
    sizes = [info(value).type.local_bytes(MESH) for value in seen.inputs]
    learns = [info(value).differentiable for value in seen.inputs]
    assert (seen.forward, seen.backward) == (0, 0)
    assert list(seen.gradients) == [size if one else None for size, one in zip(sizes, learns)]


def test_a_count_that_fails_is_heard_of(linear: fx.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostKernels, "workspace", fail)
    with pytest.raises(ZeroDivisionError):
        CallMemories(MESH, HERE)(linear)
    assert CallMemories(MESH)(linear).inputs


def test_what_was_seen_holds_for_the_same_kernels_alone(linear: fx.Node) -> None:
    for kernels in (None, HERE, HERE, replace(HERE, threads=HERE.threads + 1)):
        CallMemories(MESH, kernels)(linear)
    assert len(CallMemories._seen) == 3


def test_what_ranks_carry_out_together_is_seen_once_in_all_blocks() -> None:
    case, mesh = attention(sequence(models.gpt(layers=3), "sp"), rows="sp"), ap.Mesh(sp=2)
    made = ap.plan(case.model, case.args, case.kwargs, mesh=mesh, mode="propagate")
    joint = [node for node in made.program.graph.nodes if info(node).joint is not None]
    CallMemories._seen.clear()
    found = [CallMemories(mesh)(node) for node in joint]
    assert len(joint) == 3
    assert len(CallMemories._seen) == 1
    assert found[0].gradients == found[1].gradients == found[2].gradients
