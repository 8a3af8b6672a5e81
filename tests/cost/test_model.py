"""Cost formulas: worked numbers, and text that says what the number is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from autopar.cluster import AxisLink, Cluster, Device, Link
from autopar.cluster.pace import Pace
from autopar.cost.formula import Formula
from autopar.cost.rooflines import (
    COLLECTIVES,
    FAR,
    HIDDEN,
    MEMORY_BOUND,
    ROOFLINE,
    collective_seconds,
    collective_values,
    operator_formula,
    operator_values,
)
from autopar.errors import InvalidInput

GB = 1e9


def axis(size: int, bandwidth: float = 100e9, alpha: float = 0.0) -> AxisLink:
    return AxisLink("tp", size, "inside", Link(alpha, bandwidth), bandwidth)


def test_collectives_of_a_gigabyte_over_eight_ranks() -> None:
    link = axis(8)
    assert collective_seconds("all_reduce", link, GB) == pytest.approx(17.5e-3)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert collective_seconds(kind, link, GB) == pytest.approx(8.75e-3)
    assert collective_seconds("broadcast", link, GB) == pytest.approx(30e-3)


def test_latency_grows_with_the_logarithm_but_to_a_neighbour() -> None:
    values = {"p": 8, "V": 0.0, "B": 1.0, "a": 1e-6}
    messages = {"all_reduce": 6, "all_gather": 3, "reduce_scatter": 3, "all_to_all": 3, "shift": 1}
    for kind, count in messages.items():
        assert COLLECTIVES[kind](**values) == pytest.approx(count * 1e-6)


def test_one_rank_moves_nothing() -> None:
    assert collective_seconds("all_reduce", axis(1), GB) == 0
    assert collective_seconds("slice", axis(8), GB) == 0


def operator_seconds(
    device: Device, dtype: Any, *, flops: Any, read: Any, written: Any = 0.0
) -> Any:
    return operator_formula(flops)(**operator_values(device, dtype, flops, read, written))


def test_the_roofline_is_the_slower_of_arithmetic_and_memory() -> None:
    device = Cluster.preset("dgx-h100").device
    big = operator_seconds(device, torch.bfloat16, flops=1e15, read=1e6)
    assert big == pytest.approx(1e15 / (989e12 * 0.7), rel=1e-2)
    wide = operator_seconds(device, torch.bfloat16, flops=1e6, read=1e12)
    assert wide == pytest.approx(1e12 / (3.35e12 * 0.75), rel=1e-2)
    assert operator_seconds(device, "bf16", flops=0, read=0) >= device.overhead


def test_writes_come_after_the_arithmetic() -> None:
    """Products with the same results: the fewer sums each has, the slower is the arithmetic."""
    device, rates = Cluster.preset("dgx-a100").device, []
    for sums in (256, 1024, 4096, 16384):
        flops, read = 2.0 * 8192 * 8192 * sums, 2 * 2.0 * 8192 * sums
        seconds = operator_seconds(device, "bf16", flops=flops, read=read, written=2.0 * 8192**2)
        rates.append(flops / seconds / device.peak("bf16"))
    assert rates == sorted(rates)
    assert rates[0] < 0.7 < 0.95 < rates[-1] < 1


def test_small_work_runs_slower() -> None:
    device = Cluster.preset("dgx-h100").device
    whole = operator_seconds(device, "bf16", flops=1e11, read=0)
    half = operator_seconds(device, "bf16", flops=0.5e11, read=0)
    assert half > 0.5 * whole
    values = operator_values(device, "bf16", device.half_flops, 0.0)
    rate = device.half_flops / (ROOFLINE(**values) - device.overhead)
    assert rate == pytest.approx(device.peak("bf16") / 2)


def test_an_operator_without_flops_knows_only_memory() -> None:
    assert operator_formula(0) is MEMORY_BOUND
    assert operator_formula(np.array([0.0, 1.0])) is ROOFLINE


def test_cores_take_in_the_matrices_that_caches_do_not_hold() -> None:
    local = Cluster.local(2, measure=False).device
    device = replace(local, overhead=0.0, near_bytes=4e6, far_seconds=2e-10)
    about = {"flops": 1e9 * 400, "read": 2e6, "written": 1e6}
    formula = operator_formula(1e9, has_far=True)
    assert formula is FAR
    near = formula(**operator_values(device, "f32", **about))
    assert near == operator_seconds(device, "f32", **about)
    about["read"] = 9e6
    far = formula(**operator_values(device, "f32", **about))
    assert far == pytest.approx(operator_seconds(device, "f32", **about) + 6e6 * 2e-10)
    # Backward is two products, of which caches hold as much each.
    two = formula(**operator_values(device, "f32", **about, products=2))
    assert far - two == pytest.approx(4e6 * 2e-10)
    # One row is multiplied as it is read.
    about["flops"] = 1e6
    row = formula(**operator_values(device, "f32", **about))
    products = 2e6 / device.peak("f32")
    assert row == pytest.approx(operator_seconds(device, "f32", **about) + products)


def test_a_slower_pace_takes_in_matrices_slower() -> None:
    device = replace(Cluster.local(2, measure=False).device, near_bytes=4e6, far_seconds=2e-10)
    slower = Pace(compute=1.5).device(device)
    assert (slower.near_bytes, slower.far_seconds) == (4e6, 3e-10)


def test_computing_beside_a_collective_hides_a_part_of_it() -> None:
    """No more than the part by which both together are faster, or than there is to compute."""
    assert HIDDEN(C=2.0, o=0.75, K=10.0) == 1.5
    assert HIDDEN(C=2.0, o=0.75, K=1.0) == 1.0


def test_arrays_give_the_numbers_of_their_elements() -> None:
    device = Cluster.preset("dgx-a100").device
    flops, moved = np.array([1e9, 1e12, 1e6]), np.array([1e9, 1e6, 1e3])
    together = operator_seconds(device, "f32", flops=flops, read=moved)
    alone = [operator_seconds(device, "f32", flops=f, read=m) for f, m in zip(flops, moved)]
    assert together.tolist() == pytest.approx(alone)
    sizes = np.array([1e3, 1e6])
    both = collective_seconds("all_gather", axis(4, alpha=1e-6), sizes)
    assert both.tolist() == [
        collective_seconds("all_gather", axis(4, alpha=1e-6), size) for size in sizes
    ]


def test_the_text_holds_the_formula_the_numbers_and_the_result() -> None:
    text = COLLECTIVES["all_gather"].explain(**collective_values("all_gather", axis(8), GB))
    name, formula, filled, result = text.split(" = ")
    assert (name, result) == ("all_gather", "0.00875")
    assert set(formula.split(" + ")) == {"V*(p - 1)/(B*p)", "a*log(p)/log(2)"}
    assert set(filled.split(" + ")) == {"1e9*(8 - 1)/(1e11*8)", "0*log(8)/log(2)"}


def test_the_numbers_in_the_text_compute_to_the_result() -> None:
    device = Cluster.preset("dgx-a100").device
    values = operator_values(device, "f32", 1e12, 1e9)
    _, _, filled, result = ROOFLINE.explain(**values).split(" = ")
    assert eval(filled, {"Max": max}) == pytest.approx(float(result), rel=1e-4)


def test_a_missing_value_is_named() -> None:
    with pytest.raises(InvalidInput, match="each of its symbols") as error:
        COLLECTIVES["all_gather"](p=8, V=1.0, B=1.0)
    assert "'a'" in str(error.value)


def test_measured_figures_are_used_where_there_are_any() -> None:
    link = Link(1e-3, 1e9, {("all_reduce", 2): (1e-5, 5e9), ("all_reduce", 8): (1e-4, 2e9)})
    assert link.of("all_reduce", 2) == (1e-5, 5e9)
    assert link.of("all_reduce", 6) == (1e-4, 2e9)
    assert link.of("all_gather", 2) == (1e-5, 5e9)  # by the same algorithm
    assert link.of("shift", 2) == (1e-3, 1e9)


def test_a_formula_without_symbols() -> None:
    import sympy

    assert Formula("nothing", sympy.Integer(0))() == 0.0
