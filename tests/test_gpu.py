"""What only a GPU can prove: the cases of benchmarks/gpu.py, held to what they should show."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("case", [gpu.parity, gpu.shared])
def test_a_plan_computes_what_the_model_does(case) -> None:
    for figures in case(CUDA, 1):
        assert figures["relative_difference"] < 1e-9, figures


def test_the_peak_of_memory_is_the_plans() -> None:
    for figures in gpu.memory(CUDA, 1):
        assert figures["ratio"] == pytest.approx(1.0, abs=0.15), figures


def test_the_kind_of_gpu_is_known_or_measured() -> None:
    for figures in gpu.calibration(CUDA, 1):
        assert 0 < figures.get("ratio", 1.0) < 2, figures


def test_a_step_is_timed() -> None:
    for figures in gpu.speed(CUDA, 3):
        assert figures["autopar_ms"] > 0, figures
