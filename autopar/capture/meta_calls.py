"""Meta calls: functions of torch that are computed on meta tensors, at a part of a fake one's cost.

    calls = MetaCalls()
    calls.compare(F.linear, (x, weight), {}, [y])      # on fake tensors, at known sizes
    calls.results(F.linear, (longer, weight), {})      # the form of what another call gives

A function is computed so where both gave tensors of the same forms in all calls that were compared.
Attention is not: which kernel torch takes, and so its strides, may follow from sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopar._torch.tensors import without_functions
from autopar.capture.autocasts import active
from autopar.capture.fake import FakeTensor

_NEVER = {F.scaled_dot_product_attention, F.multi_head_attention_forward}


class MetaResults(NamedTuple):
    """What a call gives."""

    kind: type | None  # a list or a tuple; None: a tensor
    # Tensors on the meta device, the devices that they stand for, and whether they take a gradient.
    forms: list[tuple[Tensor, torch.device, bool]]


class MetaCalls:
    """Tells which functions may be called on meta tensors in the place of fake ones."""

    def __init__(self) -> None:
        self._is_alike: dict[Any, bool] = {}  # by function

    def compare(self, function: Any, args: Any, kwargs: Any, results: Sequence[Tensor]) -> None:
        """Note whether a function gives on meta tensors what it gave on fake ones."""
        if not self._is_alike.get(function, True):
            return
        others = self._call(function, args, kwargs)
        forms = None if others is None else [_described(*form) for form in others.forms]
        self._is_alike[function] = forms == [
            _described(result, result.device, result.requires_grad) for result in results
        ]

    def results(self, function: Any, args: Any, kwargs: Any) -> MetaResults | None:
        """Return what a call gives, if its function was compared and is alike."""
        return self._call(function, args, kwargs) if self._is_alike.get(function) else None

    def _call(self, function: Any, args: Any, kwargs: Any) -> MetaResults | None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        is_odd = any(
            isinstance(leaf, torch.device)
            or (isinstance(leaf, str) and _is_device(leaf))
            or (isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor))
            for leaf in leaves
        )
        if len(devices) != 1 or is_odd or function in _NEVER or active():
            return None
        known = dict[int, Tensor]()
        with suppress(Exception), _disable_current_modes(), without_functions():
            metas = [_meta(leaf, known) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            versions = [meta._version for meta in known.values()]
            args, kwargs = pytree.tree_unflatten(metas, spec)
            result = function(*args, **kwargs)
            kind = type(result) if type(result) in (tuple, list) else None
            results = [result] if kind is None else [*result]
            is_new = versions == [meta._version for meta in known.values()]
            is_new &= not any(result is meta for result in results for meta in known.values())
            if is_new and all(type(result) is Tensor and result.is_meta for result in results):
                (device,) = devices
                forms = [(result.detach(), device, result.requires_grad) for result in results]
                return MetaResults(kind, forms)
        return None


def _is_device(text: str) -> bool:
    with suppress(RuntimeError):
        return torch.device(text) is not None
    return False


def _meta(tensor: Tensor, known: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in known:
        size, stride = tensor.size(), tensor.stride()
        meta = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
        known[id(tensor)] = meta.requires_grad_(tensor.requires_grad)
    return known[id(tensor)]


def _described(tensor: Tensor, device: torch.device, learns: bool) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.dtype, device, learns
