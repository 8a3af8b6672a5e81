"""What counts as the same value on two ranks."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.backends.replica_checks import are_replicas

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_replicas_are_the_same_but_for_rounding(dtype):
    value = torch.tensor([1.0, -2.0, 4.0, 0.0])
    one, other = (v.to(dtype) for v in (value, value * torch.tensor([1.0, 1.0, 1.5, 1.0])))
    assert are_replicas(one, one.clone())
    assert not are_replicas(one, other)


def test_complex_replicas_may_be_rounded():
    one = torch.tensor([1.0 + 2.0j], dtype=torch.complex64)
    assert are_replicas(one, one * (1 + 2e-7))
