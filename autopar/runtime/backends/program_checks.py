"""Check the programs of `parallelize(..., check=True)` as they run.

The first training call (a step, or a call in training mode with gradients) compares its captured
program with the plain model. On several processes every call also compares the ranks' batches and
frozen parameters. Replicas on the virtual mesh are compared in `replica_checks.py`.
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
from autopar.runtime.batches.batch_checks import require_same_batch
from autopar.runtime.module import programs
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


class ProgramChecks:
    """Checks every call of a module before it runs."""

    def __init__(self, model: nn.Module, captured: Captured, *, on_processes: bool) -> None:
        self._captured, self._on_processes = captured, on_processes
        self._model: nn.Module | None = own_copy(model)  # until the first step

    def check_locally(self, call: programs.ModuleCall, first: programs.RunningProgram) -> None:
        """Compare a call's program with the plain model once; `first` is the planned program."""
        learns = call.is_step or (torch.is_grad_enabled() and any(call.training))
        if self._model is None or not (learns or call.running is first):
            return
        captured = call.captured if call.running is None else call.running.plan.original
        assert captured is not None
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for path, is_training in zip(self._captured.example.modes, call.training):
            modules[path].training = is_training
        for name, parameter in self._model.named_parameters():
            learned = parameter.requires_grad and name not in call.frozen
            parameter.requires_grad_(learned or name in call.unfrozen)
        with switched(self._captured.example.autocasts), state_put_back(self._model):
            _require_plain(self._model, captured, (call.args, call.kwargs))
        self._model = None

    def compare_ranks(
        self, args: tuple, kwargs: Mapping[str, Any], parameters: Mapping[str, Tensor]
    ) -> None:
        """Refuse a call whose batches or frozen parameters differ between ranks."""
        if self._on_processes:
            learns = {name: value.requires_grad for name, value in parameters.items()}
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, (_digest((args, dict(kwargs))), learns))
            require_same_batch([digest for digest, _ in of_ranks])
            _require_same_frozen([learns for _, learns in of_ranks])


def _require_plain(model: nn.Module, captured: Captured, call: CallArguments) -> None:
    """Refuse a captured program that trains differently from the model.

    A coarse dtype hides differences, so the model is also captured and compared in float64.
    """
    if captured.example.precision is not None:  # a deliberate difference of the plan
        captured = capture(model, *call)
    _compare(model, captured, call, model_dtype(model))
    precise, inputs, dtype = to_double(model, call)
    if dtype not in {parameter.dtype for parameter in model.parameters()}:
        _compare(precise, capture(precise, *inputs), inputs, dtype)


def _compare(model: nn.Module, captured: Captured, call: CallArguments, dtype: torch.dtype) -> None:
    plain, other = own_copy(model), own_copy(model)
    with torch.enable_grad():
        expected, rate = train_module(plain, plain, call, steps=1)
        actual, _ = train_module(CapturedModule(other, captured), other, call, 1, rate)
        tolerances = measure_tolerances(captured, RunInputs(model, call, dtype), actual, rate)
    rows = compare_training(actual, expected, tolerances)
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


def _require_same_frozen(learns_by_rank: Sequence[Mapping[str, bool]]) -> None:
    """Refuse a step in which some ranks wait for gradients that others do not compute."""
    first: dict[str, tuple[int, bool]] = {}
    for rank, parameters in enumerate(learns_by_rank):
        for name, learns in parameters.items():
            other, expected = first.setdefault(name, (rank, learns))
            if learns != expected:
                frozen, learning = (other, rank) if learns else (rank, other)
                raise InvalidInput(
                    "a parameter is frozen on every rank that holds it, or on none",
                    got=f"{name} is frozen on rank {frozen} and learns on rank {learning}",
                    remedy="call requires_grad_() on every rank alike",
                )


def _digest(inputs: Any) -> str:
    digest = hashlib.sha256()
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            data = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
