"""The workspace of convolutions on a host, besides the memory of torch's allocator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.cost.host_kernels import HostKernels
from autopar.runtime.observation.memory_in_use import MemoryWatch

CLOSE = 0.15
# Images, channels, size, filters, kernel, stride, groups, dilation.
CALLS = [
    (8, 64, 16, 64, 3, 1, 1, 1),
    (8, 64, 16, 64, 3, 2, 1, 1),
    (8, 256, 12, 512, 1, 2, 1, 1),
    (4, 512, 3, 512, 3, 1, 1, 1),
    (2, 256, 4, 512, 1, 1, 1, 1),
    (16, 64, 12, 256, 1, 1, 1, 1),
    (8, 3, 96, 64, 7, 2, 1, 1),
    (8, 24, 16, 40, 3, 1, 1, 1),
    (8, 64, 16, 64, 3, 1, 4, 1),
    (8, 64, 16, 64, 3, 1, 1, 2),
]


class Workspaces(TorchDispatchMode):
    """Return the workspaces of the convolutions inside, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []
        self.kernels = HostKernels.here()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if "convolution" in function.name():
            self.found.append(self.kernels.workspace(function, args))
        return function(*args, **(kwargs or {}))


def convolution(call: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Any, list[Tensor]]:
    images, channels, size, filters, kernel, stride, groups, dilation = call
    shapes = (images, channels, size, size), (filters, channels // groups, kernel, kernel)
    inputs = [torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in shapes]
    about = stride, kernel // 2 * dilation, dilation, groups
    return lambda: F.conv2d(*inputs, None, *about), inputs


def assert_counted(call: tuple[int, ...], dtype: torch.dtype) -> None:
    run, inputs = convolution(call, dtype, "cpu")
    with MemoryWatch(torch.device("cpu")) as forward:
        made = run()
    seed = torch.randn_like(made)
    with MemoryWatch(torch.device("cpu")) as backward:
        torch.autograd.grad(made, inputs, seed)
    run, fakes = convolution(call, dtype, "meta")
    with Workspaces() as counted:
        fake = run()
        torch.autograd.grad(fake, fakes, torch.empty_like(fake))
    given = [made.nbytes, sum(value.nbytes for value in inputs)]
    for watched, results, more in zip((forward, backward), given, counted.found, strict=True):
        assert watched.most is not None
        assert results + more == pytest.approx(watched.most, rel=CLOSE)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_predicted_workspace_of_a_convolution_is_measured(
    call: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert_counted(call, dtype)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [*((call, torch.bfloat16) for call in CALLS), (CALLS[1], torch.half), (CALLS[5], torch.half)],
    ids=str,
)
def test_predicted_workspace_in_lower_precision_is_measured(
    call: tuple[int, ...], dtype: torch.dtype
) -> None:
    if dtype not in HostKernels.here().onednn:
        pytest.skip("oneDNN does not know it here")
    images, *rest = call
    # What oneDNN takes whatever the sizes is little beside larger ones; half is slow.
    assert_counted((images * (8 if dtype == torch.bfloat16 else 1), *rest), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_predicted_workspace_without_onednn_is_measured(dtype: torch.dtype) -> None:
    before = torch.backends.mkldnn.set_flags(_enabled=False)[0]
    try:
        assert HostKernels.here().onednn == frozenset()
        for call in CALLS[:2]:
            assert_counted(call, dtype)
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before)


def test_onednn_runs_a_pointwise_convolution_on_several_threads() -> None:
    one = HostKernels(1, frozenset({torch.float32}))
    image, weight = torch.empty(8, 64, 12, 12), torch.empty(32, 64, 1, 1)
    args = image, weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1
    operator = torch.ops.aten.convolution.default
    assert one.workspace(operator, args) == 0
    assert replace(one, threads=2).workspace(operator, args) > 0
