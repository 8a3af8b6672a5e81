"""Running program: a program on its backend, and the calls that it serves."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar._torch.tensors import version_of
from autopar.capture.captured import Captured
from autopar.capture.containers import fill, filled
from autopar.capture.effects_between import may_read
from autopar.capture.shared_containers import require_separate
from autopar.capture.writes import carry_out, put_between
from autopar.plans.plan import Plan
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import is_among_others
from autopar.runtime.execution.call_numbers import Unalike
from autopar.runtime.module.call_signature import CallSignature
from autopar.runtime.module.resizing import ALIKE, Resizing, SizedForm
from autopar.strategies.node_info import info

Inputs = dict[str, Tensor]
_MOST_TRIED = 3  # programs that a new one is laid beside


class RunningProgram:
    """One program in its forms for calls and steps, with their backends."""

    def __init__(
        self, plan: Plan, backend: Backend, signature: CallSignature, *, both: bool
    ) -> None:
        """`both`: the program serves calls and steps, not only the kind of its signature."""
        self.plan, self.backend, self.signature = plan, backend, signature
        self.for_calls, self.for_steps = both or not signature.is_step, both or signature.is_step
        self.modes = {signature.training}  # training modes that it serves
        self.unfrozen, self.frozen = signature.unfrozen, signature.frozen
        self.shapes = backend.input_shapes()
        self.sizes: SizeFamily | None = None  # the programs of its plan, if sizes vary
        self.resizing: Resizing | None = None  # that serves other sizes of inputs
        self.routing_program: tuple[Plan, Backend] | None = None  # for expert_balance
        self._bounded: dict[str, tuple[Tensor, int]] = {}  # clamped parameters and their ages

    @property
    def mode(self) -> str:
        """Return the training modes that it was captured in as a text."""
        return self.signature.mode

    @cached_property
    def call_form(self) -> tuple[RuntimeProgram, Backend]:
        """Return the program and backend of a call, which takes the whole batch at once."""
        if not self.for_steps or (self.plan.batches is None and self.plan.pipelining is None):
            return self.plan.program, self.backend
        return self.plan.whole_program, self.backend.with_same_copies(self.plan.whole_program)

    @cached_property
    def outputs_form(self) -> tuple[RuntimeProgram, Backend]:
        """Return the program and backend of a step that returns outputs too."""
        if self.plan.batches is None and self.plan.pipelining is None:
            return self.plan.program, self.backend
        program = self.plan.program_with_outputs
        return program, self.backend.with_same_copies(program)

    def step_form(self, *, with_outputs: bool) -> tuple[RuntimeProgram, Backend]:
        """Return the program and backend of a step."""
        return self.outputs_form if with_outputs else (self.plan.program, self.backend)

    def clamp_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Clamp the parameters that forward bounds, if they have changed since."""
        for name, bounds in self.plan.original.bounds.items():
            if (parameter := parameters.get(name)) is None:  # on another rank
                continue
            known, age = self._bounded.get(name, (None, 0))
            if known is not parameter or age != version_of(parameter):
                put_between(bounds, parameter)
                self._bounded[name] = parameter, version_of(parameter)

    def close(self) -> None:
        """Release the backends of all forms."""
        forms = (vars(self).get(form) for form in ("call_form", "outputs_form", "routing_program"))
        for backend in (self.backend, *(form[1] for form in forms if form is not None)):
            backend.close()
        self._bounded.clear()

    def takes(self, call: ModuleCall) -> bool:
        """Return whether it serves the kind of a call: step or plain call."""
        return self.for_steps if call.is_step else self.for_calls

    def serves(self, call: ModuleCall) -> bool:
        """Return whether it serves a call by kind, mode and parameters, whatever the inputs are."""
        is_in_mode = call.training in self.modes
        goes_alike = call.frozen == self.frozen or not self.plan.original.asks_what_learns
        learns_alike = call.unfrozen <= self.unfrozen and goes_alike
        return self.takes(call) and is_in_mode and learns_alike

    def matches(self, call: ModuleCall) -> bool:
        """Return whether it serves a call whose signatures all ranks have exchanged."""
        if not self.serves(call) or call.global_inputs is None:
            return self.serves(call)
        other = call.signature
        return other == replace(
            self.signature,
            training=other.training,
            unfrozen=other.unfrozen,
            is_step=call.is_step,
            frozen=other.frozen,
        )

    def bind(self, call: ModuleCall) -> Inputs | None:
        """Return the inputs of a call by placeholder; None if it does not serve the call."""
        if not self.serves(call):
            return None
        program = self.plan.program
        leaves = program.flat_arguments(call.args, call.kwargs)
        if leaves is None:
            return None
        inputs = program.bind_flat(leaves, self.shapes)
        if inputs is not None or self.resizing is None or not self._is_of_resized_form(call):
            return inputs
        if call.is_of_own_size:
            return None
        return self.resizing.bind(leaves)

    def changes_size(self, inputs: Inputs | None) -> bool:
        """Return whether a call with these inputs has another size than the call before it."""
        if inputs is None or self.resizing is None:
            return False
        return self.resizing.size_of(inputs) != self.resizing.size

    def _is_of_resized_form(self, call: ModuleCall) -> bool:
        """Return whether a call runs in the form that takes other sizes, and in the modes in which
        they were rehearsed."""
        known = self.signature
        if (call.training, call.unfrozen) != (known.training, known.unfrozen):
            return False
        if self.plan.batches is None and self.plan.pipelining is None:
            return True
        return call.is_step == self.signature.is_step and not call.with_outputs

    def resize_with(self, others: Sequence[RunningProgram]) -> Resizing | None:
        """Return how this program serves other sizes of inputs than its own; None if it cannot.

        `others`: programs of other sizes, otherwise alike."""
        forms = [
            SizedForm(*(p.step_form(with_outputs=False) if p.signature.is_step else p.call_form))
            for p in (*others, self)
        ]
        try:
            return Resizing(forms)
        except Unalike:
            return None


@dataclass
class SizeFamily:
    """The programs of one plan whose inputs have sizes of a declared range."""

    first: RunningProgram
    size_family_key: Hashable  # key that all their calls share
    forms: set[Hashable]  # fingerprints of operators without sizes
    modes: set[tuple[bool, ...]]
    count: int = 1

    def includes(self, call: ModuleCall, size_family_key: Hashable, form: Hashable) -> bool:
        """Return whether a call belongs to the family, also in modes that change no operator."""
        is_theirs = self.first.takes(call) and size_family_key == self.size_family_key
        learns_alike = call.unfrozen <= self.first.unfrozen and call.frozen == self.first.frozen
        if not is_theirs or not learns_alike:
            return False
        return call.training in self.modes or form in self.forms

    def add(self, running: RunningProgram, form: Hashable) -> None:
        """Add a program of another size."""
        self.forms.add(form)
        self.modes |= running.modes
        self.count += 1


@dataclass
class ModuleCall:
    """One call of a module, with the facts that are known about it so far."""

    args: tuple
    kwargs: Mapping[str, Any]
    training: tuple[bool, ...]
    unfrozen: frozenset[str]
    frozen: frozenset[str]  # if forward asks which parameters learn
    is_step: bool
    # The program, or the parts for making it.
    running: RunningProgram | None = None
    inputs: Inputs | None = None
    captured: Captured | None = None
    size_family_key: Hashable = None  # key shared with calls of other sizes
    sizes: SizeFamily | None = None  # the family that it belongs to
    numbers: tuple[int, ...] | None = None  # of the ranks' calls, if exchanged
    is_agreed: bool = False  # all ranks have exchanged their signatures of it
    global_inputs: tuple[tuple, Mapping[str, Any]] | None = None  # whole inputs without values
    with_outputs: bool = False  # whether a step returns its outputs
    is_of_own_size: bool = False  # whether ranks found no program that serves other sizes, too
    like: RunningProgram | None = None  # a program of other sizes, whose decisions it takes

    @property
    def bound(self) -> Inputs:
        """Return the inputs by placeholder, once the program is known."""
        assert self.inputs is not None
        return self.inputs

    def apply_writes(self, running: RunningProgram, parameters: Mapping[str, Tensor]) -> Inputs:
        """Return the inputs for a program that runs now, and do the writes of forward to inputs,
        parameters and containers."""
        original = running.plan.original
        if running.resizing is not None:
            running.resizing.set_size(running.resizing.size_of(self.bound))
        running.clamp_parameters(parameters)
        if original.changes_containers:
            require_separate(self.args, self.kwargs)
        left = filled(original.contents, (self.args, self.kwargs), self.bound)
        inputs = self.bound | carry_out(original.writes, self.bound)
        fill(left)
        return inputs

    def require_step(self, *, with_outputs: bool) -> torch.dtype:
        """Return the dtype of the loss; refuse a step without a loss or its outputs."""
        if self.running is None:
            assert self.captured is not None
            results: Any = self.captured.graph.output_node().args[0]
            return info(results[self.captured.loss_index]).val.dtype
        plan = self.running.plan
        _ = plan.captured.loss_index
        _ = with_outputs and plan.program_with_outputs
        return plan.program.loss_dtype

    @cached_property
    def signature(self) -> CallSignature:
        """Return the signature on this rank, until ranks have exchanged theirs."""
        return CallSignature.of(
            self.args,
            self.kwargs,
            self.training,
            self.unfrozen,
            is_step=self.is_step,
            frozen=self.frozen,
        )


def differs_in_sizes(running: RunningProgram, call: ModuleCall) -> bool:
    """Return whether the call that a program was made for differs in sizes of inputs alone."""
    return bool(running.takes(call) and running.signature.differing_dims(call.signature))


def share_sizes(programs: Sequence[RunningProgram], running: RunningProgram) -> None:
    """Have a new program serve other sizes, if two of the latest of its kind and it show how.
    None does that may read what another program leaves behind. Ranks do so together."""
    effects = [effect for known in programs for effect in known.plan.original.effects]
    for known in programs:
        if may_read(known.plan.original, effects):
            known.resizing = None
    if may_read(running.plan.original, effects):
        return
    kinds: dict[Any, list[RunningProgram]] = {}
    for known in programs:
        if dims := known.signature.differing_dims(running.signature):
            kinds.setdefault(dims, []).append(known)
    backend = programs[0].backend
    for members in kinds.values():
        for others in itertools.combinations(members[-_MOST_TRIED:], ALIKE - 1):
            with backend.guard(agreed=True):
                resizing = running.resize_with(others)
                if is_among_others(backend):
                    served = backend.world.gather_numbers(int(resizing is not None))
                    resizing = resizing if all(served) else None
            if resizing is not None:
                running.resizing = resizing
                return
