"""Mixtures of experts: recognised, cut by experts, and equal to one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import autopar as ap
from autopar import Mesh
from autopar.capture import capture, listing
from autopar.collectives import together
from tests.mixtures import FAMILIES, cut_experts, family
from tests.models import Case
from tests.parity import assert_parity

TRAINED = ["Mixtral", "Qwen2Moe", "DeepseekV3", "GptOss"]


def routed(case: Case, *axes: str) -> Case:
    """The batch cut by axes of which the last cuts the experts."""
    ap.shard(case.model.model.embed_tokens, ((axes, None),))
    return cut_experts(case, axes[-1])


def steer(case: Case, experts: int) -> Case:
    """Every token chooses among the first `experts`, so that the others have none."""
    for name, module in case.model.named_modules():
        if name.endswith("gate") and isinstance(getattr(module, "weight", None), nn.Parameter):
            with torch.no_grad():
                module.weight[experts:] = 0
                module.weight[:experts].abs_()
    return case


@contextmanager
def trades() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of what one member sends to another, of every trade of the first member."""
    seen: list[tuple[int, ...]] = []
    deliver = together._delivered

    def watched(asked: Any) -> Any:
        if isinstance(asked[0], together.Trade):
            seen.append(tuple(asked[0].tensors[0].shape))
        return deliver(asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "_delivered", watched)
        yield seen


@pytest.mark.parametrize("name", TRAINED)
def test_families_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens go to the ranks that have their experts: the model is what it is on one device."""
    case = routed(family(name, monkeypatch), "dp", "ep")
    module = assert_parity(case, Mesh(dp=2, ep=2))
    assert str(module.graph).count("routed_experts(") == 1


@pytest.mark.parametrize(
    ("mesh", "batch", "experts"),
    [(Mesh(ep=3), 6, 5), (Mesh(ep=8), 8, 8), (Mesh(ep=4), 4, 5), (Mesh(ep=2, dp=2), 4, 4)],
    ids=str,
)
def test_meshes(mesh: Mesh, batch: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that do not divide, a rank without experts, another order of axes."""
    case = family("Mixtral", monkeypatch, batch=batch, experts=experts)
    axes = ("dp", "ep") if "dp" in mesh else ("ep",)
    module = assert_parity(routed(case, *axes), mesh)
    assert "routed_experts(" in str(module.graph)


def test_all_tokens_choose_the_experts_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    case = steer(family("Mixtral", monkeypatch), 2)
    assert_parity(routed(case, "ep"), Mesh(ep=2))


def test_experts_cut_where_tokens_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank adds what its experts give; on the other axis their rows are cut inside."""
    case = family("GptOss", monkeypatch)
    cut = {
        "gate_up_proj": ("ep", None, "tp"),
        "gate_up_proj_bias": ("ep", "tp"),
        "down_proj": ("ep", "tp", None),
    }
    ap.shard(case.model.get_submodule("model.layers.0.mlp.experts"), params=cut)
    module = assert_parity(case, Mesh(ep=2, tp=2))
    assert "f64[4@ep, 16, 48@tp]" in str(module.graph)


def test_tokens_are_exchanged_twice_forward_and_twice_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = routed(family("Mixtral", monkeypatch, batch=8, experts=8), "ep")
    module = ap.parallelize(
        case.model, case.args, case.kwargs, mesh=Mesh(ep=8), mode="propagate", backend="virtual"
    )
    with trades() as seen:
        module.step(*case.args, **case.kwargs)
    assert sum(shape[-1] == 16 for shape in seen) == 4
    graph = str(module.graph)
    assert "f64[8@ep, 48, 16]" in graph
    assert "f64[8@ep, 16, 24]" in graph


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = family(name, monkeypatch)
    captured = capture(case.model, case.args, case.kwargs)
    text = listing(captured.graph)
    assert text.count("autopar.experts(") == 1
    assert "histc" not in text
    assert "sort(" not in text
