"""Overlaps: parameters and buffers of a model that are pieces of one another.

    self.register_buffer("whole", torch.ones(8, 8))
    self.register_buffer("part", self.whole[:2])    # what changes one changes the other

Ranks keep each by itself, which is the same as long as a step changes neither.
"""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor, nn

from autopar._torch import memory_of
from autopar.capture.captured import Captured
from autopar.errors import InvalidInput


def require_no_overlaps(model: nn.Module, captured: Captured) -> None:
    """Refuse what a step changes, as parameters that learn and some buffers, if it is a piece of
    another tensor of the program, or has one."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    learns = {name for name, one in parameters.items() if one.requires_grad}
    changed = {*learns, *captured.mutations}
    own = {*captured.parameters.values(), *captured.buffers.values()}
    found: dict[int, dict[int, tuple[str, Tensor]]] = defaultdict(dict)
    for name, tensor in (parameters | dict(model.named_buffers(remove_duplicate=False))).items():
        if name in own:  # under one of its names
            found[memory_of(tensor)].setdefault(id(tensor), (name, tensor))
    for tensors in found.values():
        last = ends = (0, "")  # of all so far, and of those that are changed: where, and which
        for start, end, name in sorted((*_span(one), name) for name, one in tensors.values()):
            is_changed = name in changed
            far, other = last if is_changed else ends
            if start < far:
                raise InvalidInput(
                    "what a step changes shares no memory with another parameter or buffer",
                    got=f"{other} and {name}, where {name if is_changed else other} changes",
                    remedy="one tensor, of which forward reads pieces, or a copy (.clone())",
                )
            last, ends = max(last, (end, name)), max(ends, (end, name)) if is_changed else ends


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its memory that it begins and ends at."""
    steps = zip(tensor.shape, tensor.stride())
    last = sum((size - 1) * stride for size, stride in steps) if tensor.numel() else -1
    first, size = tensor.storage_offset(), tensor.itemsize
    return int(first) * size, (int(first) + int(last) + 1) * size
