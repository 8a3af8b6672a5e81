"""What the runtime holds of each part that a plan predicts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import autopar as ap
from tests.models import Case


def kept_for_backward(module: ap.ParallelModule, case: Case) -> int:
    """Bytes that autograd keeps from forward to backward in this process, each storage once."""
    parameters = [*case.model.parameters(), *module.parameters()]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    own = {tensor.untyped_storage().data_ptr() for tensor in local}
    own |= {b.untyped_storage().data_ptr() for b in (*case.model.buffers(), *module.buffers())}
    inputs = [*case.args, *case.kwargs.values()]
    own |= {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, Tensor)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        is_parameter = tensor.is_leaf and tensor.requires_grad
        storage = tensor.untyped_storage()
        if not is_parameter and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(*case.args, **case.kwargs)
        del outputs
    return sum(kept.values())


def local_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of this rank's pieces."""
    pieces = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum(piece.numel() * piece.itemsize for piece in pieces)
