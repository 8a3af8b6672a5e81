"""Overlaps: parameters and buffers of a model that are pieces of one another.

    self.register_buffer("whole", torch.ones(8, 8))
    self.register_buffer("part", self.whole[:2])    # what changes one changes the other

Ranks keep each by itself, which is the same as long as a step changes neither.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from autopar._torch.tensors import memory_of
from autopar.capture.captured import Captured
from autopar.errors import InvalidInput
from autopar.strategies.node_info import info


def require_no_overlaps(model: nn.Module, captured: Captured) -> None:
    """Refuse what a step changes, as parameters that learn and some buffers, if it is a piece of
    another tensor of the program, or has one."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = parameters | dict(model.named_buffers(remove_duplicate=False))
    placeholders = captured.graph.find_nodes(op="placeholder")
    learns = {captured.parameters.get(n.name) for n in placeholders if info(n).learns}
    own = {*captured.parameters.values(), *captured.buffers.values()}
    found: dict[object, dict[int, tuple[str, Tensor]]] = defaultdict(dict)
    for name, tensor in kept.items():
        if name in own and tensor.numel():  # under one of its names
            found[_memory(tensor)].setdefault(id(tensor), (name, tensor))
    for tensors in found.values():
        for (one, first), (other, second) in _meeting(list(tensors.values())):
            changed = [name for name in (one, other) if name in learns | captured.mutations.keys()]
            if changed and _share(first, second):
                raise InvalidInput(
                    "what a step changes shares no memory with another parameter or buffer",
                    got=f"{one} and {other}, where {changed[0]} changes",
                    remedy="one tensor, of which forward reads pieces, or a copy (.clone()); after "
                    "load_state_dict(assign=True), what was tied is tied again",
                )


def _memory(tensor: Tensor) -> object:
    """What tensors have in common that may share elements."""
    return tensor.device if _has_address(tensor) else memory_of(tensor)


def _meeting(
    tensors: list[tuple[str, Tensor]],
) -> list[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """The pairs between whose first and last bytes lie some of both."""
    spans = sorted((_span(tensor), at) for at, (_, tensor) in enumerate(tensors))
    found, open_ = [], list[tuple[int, int]]()  # the ends of those that may go on, and which
    for (start, end), at in spans:
        open_ = [(far, other) for far, other in open_ if far > start]
        found += [(tensors[other], tensors[at]) for _, other in open_]
        open_.append((end, at))
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of memory that it begins and ends at."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    begins = int(tensor.storage_offset()) * tensor.itemsize
    first = tensor.data_ptr() if _has_address(tensor) else begins
    return first, first + (int(last) + 1) * tensor.itemsize


def _has_address(tensor: Tensor) -> bool:
    """Whether all memory is known by its address; else one storage is, by offsets in it."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, whose bytes meet, have some in common."""
    (first, end), (second, last) = _span(one), _span(other)
    size = one.itemsize
    if size != other.itemsize or (second - first) % size:
        return True
    begin = min(first, second)
    there = torch.zeros((max(end, last) - begin) // size, dtype=torch.bool)
    there.as_strided(one.shape, one.stride(), (first - begin) // size).fill_(True)
    return bool(there.as_strided(other.shape, other.stride(), (second - begin) // size).any())
