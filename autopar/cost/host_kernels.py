"""Host kernels: the workspace of a convolution on a host, besides its results.

oneDNN copies tensors to layouts of its own, with channels in blocks. On newer processors it copies
tensors of lower precision with channels last, and those of bfloat16 where tiles are multiplied. It
adds up gradients of weights in bfloat16 in single precision. Any other convolution is a product
with columns, made from the whole input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar._torch.operators import multiplies_tiles, onednn_dtypes

# From here on torch prefers oneDNN: elements of one image, images where a product would do.
LEAST_ELEMENTS, LEAST_IMAGES = 20480, 16


@dataclass(frozen=True)
class HostKernels:
    """The convolution kernels of a host, and the facts by which torch chooses them."""

    threads: int
    onednn: frozenset[torch.dtype]  # of the tensors that oneDNN may work on
    channels_last: frozenset[torch.dtype] = frozenset()  # of those whose copies are so
    block: int = 16  # channels, of the layouts of oneDNN: as many numbers as an instruction takes

    @classmethod
    def here(cls) -> HostKernels:
        """Return the kernels of this process."""
        dtypes = onednn_dtypes()
        channels_last = {torch.half, torch.bfloat16} if multiplies_tiles() else {torch.half}
        is_wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        return cls(torch.get_num_threads(), dtypes, dtypes & channels_last, 16 if is_wide else 8)

    def workspace(self, operator: Any, args: Sequence[Any]) -> int:
        """Return the bytes that an ATen operator takes and frees when it is done."""
        if operator is torch.ops.aten.convolution.default:
            return _Convolution(self, *args[:2], *args[3:9]).forward
        if operator is torch.ops.aten.convolution_backward.default:
            call = _Convolution(self, *args[1:3], *args[4:10], gradient=args[0])
            return call.backward(args[10][:2])
        return 0


class _Convolution:
    """The sizes that the kernel of one convolution reads and writes."""

    def __init__(
        self,
        kernels: HostKernels,
        image: Tensor,
        weight: Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
        *,
        gradient: Tensor | None = None,
    ) -> None:
        self._kernels, self._image, self._weight, self._groups = kernels, image, weight, groups
        self._is_strided, self._transposed = max(stride) > 1, transposed
        self._is_dilated = max(dilation) > 1
        # More than a kernel reaches.
        self._is_padded = transposed and any(o >= s for o, s in zip(output_padding, stride))
        self._is_moved = self._is_strided or self._is_dilated
        kernel, space = weight.shape[2:], image.shape[2:]
        self._is_point = math.prod(kernel) == 1
        self._is_plain = self._is_point and not (self._is_moved or max(padding))
        if gradient is not None:
            self._given = tuple(gradient.shape)
        elif transposed:
            ways = zip(space, stride, padding, dilation, kernel, output_padding)
            after = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, s, p, d, k, o in ways]
            self._given = len(image), weight.shape[1] * groups, *after
        else:
            steps = zip(space, stride, padding, dilation, kernel)
            after = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, s, p, d, k in steps]
            self._given = len(image), len(weight), *after

    @property
    def forward(self) -> int:
        """Return the bytes that forward takes besides its result."""
        if not self._is_of_onednn:
            return self._columns(one_by_one=self._is_dilated)
        image = self._blocked(self._image.shape) if self._fills_blocks else 0
        output, copy = math.prod(self._given), self._blocked(self._given)
        back = copy * (1 + (self._has_channels_last or (self._transposed and self._is_strided)))
        return max(image + self._copy_of_weight + copy - output, back) * self._image.itemsize

    def backward(self, needs: Sequence[bool]) -> int:
        """Return the bytes that backward takes besides the gradients that it returns.

        `needs`: whether the image has a gradient, and the weight."""
        of_image, of_weight = needs
        if not self._is_of_onednn:
            return self._columns(one_by_one=self._is_dilated or self._transposed)
        has_blocks = self._fills_blocks or not self._is_strided
        image = self._blocked(self._image.shape) if has_blocks else self._image.numel()
        dtype, weight = self._image.dtype, self._copy_of_weight
        gradient, results = self._blocked(self._given), 0
        peaks = [0]
        if of_image:
            results, is_twice = self._image.numel(), self._is_strided or dtype == torch.half
            peaks = [gradient + weight + image, (1 + is_twice) * image + results]
        if of_weight:
            is_bf16 = dtype == torch.bfloat16
            is_read = self._fills_blocks or (is_bf16 and self._has_channels_last)
            read = image if is_read and dtype != torch.half else 0
            sums = weight * (3 if is_bf16 else 1)  # in float32, and as they are given
            peaks += [results + read + gradient + sums, results + weight + self._weight.numel()]
            results += self._weight.numel()
        return max(0, max(peaks) - results) * self._image.itemsize

    @cached_property
    def _is_of_onednn(self) -> bool:
        """Decide as torch does: by threads and sizes where it has good kernels of its own."""
        image, known = self._image, self._kernels
        if image.dtype not in known.onednn or self._is_padded:
            return False
        if image.dtype != torch.float32:
            return True
        kernel = (1, *self._weight.shape[2:])[-2:]  # torch looks at no more
        is_better = self._is_moved or len(image) >= LEAST_IMAGES or max(kernel) > 1
        elements = math.prod(image.shape[:4])
        is_large = len(image) > 1 or elements > LEAST_ELEMENTS or min(kernel) > 3
        return (is_better or known.threads > 1) and (is_large or self._groups > 1)

    @property
    def _fills_blocks(self) -> bool:
        return self._image.shape[1] >= self._kernels.block

    @property
    def _has_channels_last(self) -> bool:
        return self._image.dtype in self._kernels.channels_last

    def _columns(self, *, one_by_one: bool) -> int:
        """Return the bytes of columns, of all images or one by one, a group at a time, and of the
        results of groups before they are joined."""
        output, groups = math.prod(self._given), self._groups
        joined = output if groups > 1 else 0
        if self._is_plain:
            return joined * self._image.itemsize
        grid, over = self._given[2:], self._image.shape[1]
        if self._transposed:
            grid, over = self._image.shape[2:], self._given[1]
        images = 1 if one_by_one else len(self._image)
        columns = math.prod((images, over, *self._weight.shape[2:], *grid)) // groups
        return max(columns + joined // groups, joined) * self._image.itemsize

    @property
    def _copy_of_weight(self) -> int:
        outputs, inputs, *kernel = self._weight.shape
        if self._groups > 1:
            return self._weight.numel()
        return math.prod((self._in_blocks(outputs), self._in_blocks(inputs), *kernel))

    def _blocked(self, shape: Sequence[int]) -> int:
        """Return the elements of a copy in oneDNN's layout."""
        images, channels, *space = shape
        channels = channels if self._has_channels_last else self._in_blocks(channels)
        return math.prod((images, channels, *space))

    def _in_blocks(self, channels: int) -> int:
        return -(-channels // self._kernels.block) * self._kernels.block
