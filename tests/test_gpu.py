"""What only a GPU can prove: the cases of benchmarks/gpu.py, held to what they should show."""

from __future__ import annotations

import math

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
    *rates, links = gpu.calibration(CUDA, 1)
    assert {"f32", "f64"} <= {figures["dtype"] for figures in rates}
    for figures in rates:
        assert_positive(figures, "measured_tflops", "taken_tflops", "ratio")
    what = ("gb_per_s", "overhead_us")
    assert_positive(links, *(f"{whose}_{name}" for whose in ("measured", "taken") for name in what))


def test_a_step_is_timed() -> None:
    (figures,) = gpu.speed(CUDA, 3)
    steps = ("autopar_ms", "eager_ms", "compiled_ms", "predicted_ms")
    assert_positive(figures, *steps, "over_eager", "over_compiled")
    assert figures["over_eager"] == pytest.approx(figures["autopar_ms"] / figures["eager_ms"])


def assert_positive(figures: gpu.Figures, *names: str) -> None:
    """A benchmark printed a number for each of these."""
    for name in names:
        assert math.isfinite(figures[name]), figures
        assert figures[name] > 0, figures
