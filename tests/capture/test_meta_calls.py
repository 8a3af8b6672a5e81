"""Functions are computed on meta tensors only where these give what fake ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.capture.fake import new_mode
from autopar.capture.meta_calls import MetaCalls

MODE = new_mode()


def fake(*shape: int, learns: bool = False) -> Tensor:
    with MODE:
        return torch.empty(*shape).requires_grad_(learns)


def results_at_another_size(function: Any, small: tuple, large: tuple, **options: Any) -> Any:
    calls = MetaCalls()
    with MODE:
        result = function(*small, **options)
        calls.compare(function, small, options, [result])
        return calls.results(function, large, options)


def test_a_function_that_was_compared_gives_the_form_of_another_call() -> None:
    weight = fake(5, 4, learns=True)
    made = results_at_another_size(F.linear, (fake(2, 3, 4), weight), (fake(2, 7, 4), weight))
    ((meta, device, learns),) = made.forms
    assert (meta.shape, meta.device.type, device.type, learns) == ((2, 7, 5), "meta", "cpu", True)


def test_a_function_that_was_not_compared_is_not_called() -> None:
    assert MetaCalls().results(F.linear, (fake(2, 4), fake(5, 4)), {}) is None


@pytest.mark.parametrize(
    ("function", "small", "large", "options"),
    [
        (F.relu, (fake(2),), (fake(3),), {"inplace": True}),
        (F.scaled_dot_product_attention, (fake(1, 1, 2, 4),) * 3, (fake(1, 1, 3, 4),) * 3, {}),
        (Tensor.to, (fake(2), "cpu"), (fake(3), "cpu"), {}),
        (torch.zeros_like, (fake(2),), (fake(3),), {"device": torch.device("cpu")}),
    ],
    ids=["in place", "attention", "a device by name", "a device"],
)
def test_what_may_differ_is_left_to_fake_tensors(
    function: Any, small: tuple, large: tuple, options: dict[str, Any]
) -> None:
    assert results_at_another_size(function, small, large, **options) is None
