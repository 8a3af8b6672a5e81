"""Checks: what `check=True` compares as a program runs, beside the replicas of the virtual mesh.

    parallelize(model, inputs, check=True)

The first call of a training, a step or one in training mode with gradients, compares its captured
program with the plain model, whichever of the programs that is; every call, on several processes,
the batches of all ranks and which parameters are frozen there.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture import capture
from autopar.capture.autocasts import switched
from autopar.capture.captured import Captured
from autopar.capture.fake import own_copy
from autopar.capture.python_state import state_put_back
from autopar.errors import ExecutionError, InvalidInput
from autopar.runtime.module import programs
from autopar.runtime.module.batch_checks import require_same_batch
from autopar.text.source_lines import frames_to_caller
from autopar.verification.references import (
    CallArguments,
    CapturedModule,
    RunInputs,
    compare_training,
    first_different_module,
    model_dtype,
    to_double,
    train_module,
)
from autopar.verification.rounding import measure_tolerances


class Checks:
    """Called with the arguments of every call, before it runs."""

    def __init__(self, model: nn.Module, captured: Captured, on_processes: bool) -> None:
        self._captured, self._on_processes = captured, on_processes
        self._model: nn.Module | None = own_copy(model)  # until the first step

    def alone(self, call: programs.ModuleCall, first: programs.RunningProgram) -> None:
        """What this process finds out by itself, once what runs is found or captured; `first`: the
        program that was planned."""
        learns = call.is_step or (torch.is_grad_enabled() and any(call.training))
        if self._model is None or not (learns or call.running is first):
            return
        captured = call.captured if call.running is None else call.running.plan.original
        assert captured is not None
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for path, is_training in zip(self._captured.example.modes, call.training):
            modules[path].training = is_training
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or name in call.unfrozen)
        with switched(self._captured.example.autocasts), state_put_back(self._model):
            _require_plain(self._model, captured, (call.args, call.kwargs))
        self._model = None

    def together(
        self, args: tuple, kwargs: Mapping[str, Any], parameters: Mapping[str, Tensor]
    ) -> None:
        """What all ranks find out, or refuse, together."""
        if self._on_processes:
            learns = {name: value.requires_grad for name, value in parameters.items()}
            everyones: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, (_digest((args, dict(kwargs))), learns))
            require_same_batch([digest for digest, _ in everyones])
            _require_same_frozen([learns for _, learns in everyones])


def _require_plain(model: nn.Module, captured: Captured, call: CallArguments) -> None:
    """Refuse to train a program that export has made another than the model's.

    In coarse numbers little is seen, so the model is captured and compared in float64 as well.
    """
    if captured.example.precision is not None:  # which is for the plan to change, not for export
        captured = capture(model, *call)
    _compare(model, captured, call, model_dtype(model))
    precise, inputs, dtype = to_double(model, call)
    if dtype not in {parameter.dtype for parameter in model.parameters()}:
        _compare(precise, capture(precise, *inputs), inputs, dtype)


def _compare(model: nn.Module, captured: Captured, call: CallArguments, dtype: torch.dtype) -> None:
    plain, other = own_copy(model), own_copy(model)
    with torch.enable_grad():
        expected, rate = train_module(plain, plain, call, steps=1)
        found, _ = train_module(CapturedModule(other, captured), other, call, 1, rate)
        tolerances = measure_tolerances(captured, RunInputs(model, call, dtype), found, rate)
    rows = compare_training(found, expected, tolerances)
    unknown = [row for row in rows if not row.ok and not row.differs]
    if unknown:
        warnings.warn(
            "check=True cannot tell whether the captured program is the plain model, whose coarse "
            f"numbers say too little: {unknown[0]}",
            stacklevel=frames_to_caller(),
        )
    wrong = [row for row in rows if row.differs]
    if wrong:
        difference = first_different_module(model, captured, call, tolerances)
        raise ExecutionError(
            "the captured program computes what the plain model does",
            got="\n".join([*map(str, wrong[:3]), *([str(difference)] if difference else [])]),
            remedy="mend what the model does otherwise while it is exported; "
            "ap.verify() shows all that differs",
            source=difference.source if difference else None,
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
