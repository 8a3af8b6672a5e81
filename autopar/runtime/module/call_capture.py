"""Call capture: a call of a module that no known program serves is captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.base.exact_values import is_same_value
from autopar.capture.again import captured_again
from autopar.capture.captured import Captured
from autopar.capture.code_names import asks_for_classes
from autopar.capture.number_formulas import is_number
from autopar.errors import AutoparError, InvalidInput
from autopar.runtime.module.running_program import ModuleCall, RunningProgram
from autopar.runtime.module.training_modes import TrainingModes
from autopar.runtime.parameters.tensor_tree import ModuleTensors


class CallCapture:
    """Captures calls of a module whose programs are known, as it is now."""

    def __init__(
        self, programs: Sequence[RunningProgram], modes: TrainingModes, tensors: ModuleTensors
    ) -> None:
        """`programs`: the known ones, the planned one first; more may be added."""
        self._programs, self._modes, self._tensors = programs, modes, tensors

    def frozen(self, *programs: Captured) -> frozenset[str]:
        """Return the parameters that were frozen after planning, if forward asks which learn in any
        of these programs; refuse such a forward in a pipeline."""
        frozen = self._tensors.frozen
        if not frozen or not any(captured.asks_what_learns for captured in programs):
            return frozenset()
        if self._programs[0].plan.pipelining is not None:
            raise InvalidInput(
                "a rank of a pipeline knows of its own stages alone which parameters learn, which "
                "forward asks for",
                got=", ".join(sorted(frozen)[:4]) + ", frozen since it was planned",
                remedy="freeze them in the model, then parallelize it",
            )
        return frozen

    def capture(self, call: ModuleCall, args: tuple, kwargs: Mapping[str, Any]) -> Captured:
        """Return the captured program of a call, with what learns where forward asks for that."""
        captured = self._captured(call, args, kwargs)
        if (frozen := self.frozen(captured)) and frozen != call.frozen:
            call.frozen = frozen
            captured = self._captured(call, args, kwargs)
        return captured

    def _captured(self, call: ModuleCall, args: tuple, kwargs: Mapping[str, Any]) -> Captured:
        """Capture a call; the numbers in it that change are inputs of its program, where they can
        be."""
        first = self._programs[0]
        names = first.plan.original.input_spec.children()[1].context
        if {*names} == kwargs.keys():
            kwargs = {name: kwargs[name] for name in names}
        capture_call = partial(
            captured_again,
            first.plan.original,
            args,
            kwargs,
            self._modes.by_path,
            learning=call.unfrozen,
            frozen=call.frozen,
        )
        is_plain = first.plan.precision is None and first.plan.dynamic is None
        is_plain &= not first.plan.original.example.autocasts and not first.backend.local_inputs
        numbers = self._changing_numbers(args, kwargs) if is_plain else frozenset[int]()
        if numbers and not asks_for_classes(first.plan.original.example.model):
            with suppress(AutoparError):  # forward does with a number what a tensor is not good for
                return capture_call(numbers=numbers)
        return capture_call()

    def _changing_numbers(self, args: tuple, kwargs: Mapping[str, Any]) -> frozenset[int]:
        """Return the places of flat arguments that are numbers, and differ in a known program."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        places = set[int]()
        for running in self._programs:
            known = running.plan.original
            if known.input_spec == spec:
                places |= {at for at, name in enumerate(known.inputs) if name in known.numbers}
                static = known.static_inputs.items()
                places |= {at for at, value in static if not is_same_value(value, leaves[at])}
        return frozenset(at for at in places if is_number(leaves[at]))


def require_data(call: ModuleCall) -> None:
    """Refuse a call with inputs that have no values."""
    for value in pytree.tree_leaves((call.args, dict(call.kwargs))):
        if isinstance(value, Tensor) and value.is_meta:
            raise InvalidInput(
                "a program that runs needs inputs with data",
                got=f"an input {tuple(value.shape)} on the meta device",
                remedy="hand over tensors of a device; plan() alone needs no data",
            )
