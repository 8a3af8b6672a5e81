"""Checks: what `check=True` compares as a program runs, beside the replicas of the virtual mesh.

    parallelize(model, inputs, check=True)

The first step compares the captured program with the plain model; every step, on several
processes, the batches of all ranks and which parameters are frozen there.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture import capture
from autopar.capture.autocasts import switched
from autopar.capture.captured import Captured
from autopar.errors import ExecutionError, InvalidInput
from autopar.lines import frames_to_caller
from autopar.runtime.plan_broadcast import require_same_call
from autopar.runtime.world import World
from autopar.verification.references import (
    Call,
    CapturedModule,
    compare,
    first_module,
    in_double,
    own_dtype,
    train_module,
)
from autopar.verification.rounding import measure

LOOKS = 3  # calls whose batches are compared
_ALIKE = (
    "load the same batch on every rank, or parallelize with local_inputs=True, where each brings "
    "its own slice"
)
SAMPLED = 1 << 20  # elements of a tensor that are looked at, about


class Checks:
    """Called with the arguments of every call, before it runs."""

    def __init__(self, model: nn.Module, captured: Captured, on_processes: bool) -> None:
        self._captured, self._on_processes = captured, on_processes
        self._model: nn.Module | None = copy.deepcopy(model)  # until the first step

    def alone(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """What this process finds out by itself."""
        if self._model is not None:
            with switched(self._captured.example.autocasts):
                _require_plain(self._model, self._captured, (args, kwargs))
            self._model = None

    def together(
        self, args: tuple, kwargs: Mapping[str, Any], parameters: Mapping[str, Tensor]
    ) -> None:
        """What all ranks find out, or refuse, together."""
        if self._on_processes:
            learns = {name: value.requires_grad for name, value in parameters.items()}
            everyones: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, (_digest((args, dict(kwargs))), learns))
            _require_same_batch([digest for digest, _ in everyones])
            _require_same_frozen([learns for _, learns in everyones])


def _require_plain(model: nn.Module, captured: Captured, call: Call) -> None:
    """Refuse to train a program that export has made another than the model's.

    In coarse numbers little is seen, so the model is captured and compared in float64 as well.
    """
    if captured.example.precision is not None:  # which is for the plan to change, not for export
        captured = capture(model, *call)
    _compare(model, captured, call, own_dtype(model))
    precise, inputs, dtype = in_double(model, call)
    if dtype not in {parameter.dtype for parameter in model.parameters()}:
        _compare(precise, capture(precise, *inputs), inputs, dtype)


def _compare(model: nn.Module, captured: Captured, call: Call, dtype: torch.dtype) -> None:
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.enable_grad():
        expected, rate = train_module(plain, plain, call, steps=1)
        found, _ = train_module(CapturedModule(other, captured), other, call, 1, rate)
        tolerances = measure(captured, model, call, dtype, found, rate)
    rows = compare(found, expected, tolerances)
    unknown = [row for row in rows if not row.ok and not row.differs]
    if unknown:
        warnings.warn(
            "check=True cannot tell whether the captured program is the plain model, whose coarse "
            f"numbers say too little: {unknown[0]}",
            stacklevel=frames_to_caller(),
        )
    wrong = [row for row in rows if row.differs]
    if wrong:
        difference = first_module(model, captured, call, tolerances)
        raise ExecutionError(
            "the captured program computes what the plain model does",
            got="\n".join([*map(str, wrong[:3]), *([str(difference)] if difference else [])]),
            remedy="mend what the model does otherwise while it is exported; "
            "ap.verify() shows all that differs",
            source=difference.source if difference else None,
        )


class FirstBatches:
    """Looks at the batches of the first calls of a module on processes, and then at none: a loop in
    which each rank loads another batch does so from the start."""

    def __init__(self, world: World, remedy: str = _ALIKE) -> None:
        self._world, self._remedy, self.left = world, remedy, LOOKS

    def together(self, call: str, *given: Any) -> None:
        """Refuse, on all ranks, a global batch that is not the same on all of them, and a `call`
        that others do not make."""
        require_same_call(lambda: None, call=call)
        self.left -= 1
        found = 0
        for leaf in pytree.tree_leaves(given):
            if isinstance(leaf, Tensor) and leaf.numel():
                data = leaf.detach().reshape(-1)
                data = data[:: -(-data.numel() // SAMPLED)].cpu().contiguous()
                found = zlib.crc32(data.view(torch.uint8).numpy().tobytes(), found)
        _require_same_batch(self._world.numbers(found), self._remedy)


def _require_same_batch(digests: Sequence[object], remedy: str = _ALIKE) -> None:
    """Refuse a step for which ranks were given different global batches."""
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise InvalidInput(
            "every rank is given the same global batch",
            got=f"another batch than rank 0 has on rank {', '.join(map(str, others))}",
            remedy=remedy,
        )


def _require_same_frozen(everyones: Sequence[Mapping[str, bool]]) -> None:
    """Refuse a step in which some ranks wait for gradients that others do not make."""
    first: dict[str, tuple[int, bool]] = {}
    for rank, learns in enumerate(everyones):
        for name, one in learns.items():
            other, expected = first.setdefault(name, (rank, one))
            if one != expected:
                frozen, learning = (other, rank) if one else (rank, other)
                raise InvalidInput(
                    "a parameter is frozen on every rank that holds it, or on none",
                    got=f"{name} is frozen on rank {frozen} and learns on rank {learning}",
                    remedy="call requires_grad_() on every rank alike",
                )


def _digest(inputs: Any) -> str:
    found = hashlib.sha256()
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            data = leaf.detach().cpu().contiguous().reshape(-1)
            found.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()
