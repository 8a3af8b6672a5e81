"""Mixtures of experts: recognised, cut by experts, and equal to one device."""

from __future__ import annotations

import pytest

from autopar import Mesh
from autopar.capture import capture, listing
from tests.mixtures import FAMILIES, cut_experts, family
from tests.parity import assert_parity

TRAINED = ["Mixtral", "Qwen2Moe", "DeepseekV3", "GptOss"]


@pytest.mark.parametrize("name", TRAINED)
def test_families_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their experts in pieces, and the batch: they are what they are on one device."""
    case = cut_experts(family(name, monkeypatch), "ep")
    assert_parity(case, Mesh(dp=2, ep=2))


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = family(name, monkeypatch)
    captured = capture(case.model, case.args, case.kwargs)
    text = listing(captured.graph)
    assert text.count("autopar.experts(") == 1
    assert "histc" not in text
    assert "sort(" not in text
