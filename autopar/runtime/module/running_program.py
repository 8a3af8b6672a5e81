"""Running: a program where it runs, and the calls that it may be the program of."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar._torch.tensors import version_of
from autopar.capture.captured import Captured
from autopar.capture.containers import fill, filled
from autopar.capture.writes import carry_out, put_between
from autopar.plan.plan import Plan
from autopar.plan.runtime_program import Program
from autopar.runtime.backends.backend import Backend
from autopar.runtime.module.call_signature import CallSignature
from autopar.strategies.node_info import info

Inputs = dict[str, Tensor]


class RunningProgram:
    """One program, in the forms in which it is called, and where they run."""

    def __init__(self, plan: Plan, backend: Backend, signature: CallSignature, both: bool) -> None:
        """`both`: it serves calls and steps, not only what its signature says."""
        self.plan, self.backend, self.signature = plan, backend, signature
        self.calls, self.steps = both or not signature.is_step, both or signature.is_step
        self.modes = {signature.training}  # in which this is the model's program
        self.unfrozen = signature.unfrozen
        self.shapes = backend.input_shapes()
        self.sizes: SizeFamily | None = None  # all those of its plan, if its inputs vary
        self.inside: tuple[Plan, Backend] | None = None  # that of values inside of it
        self._bounded: dict[str, tuple[Tensor, int]] = {}  # parameters, and their ages then

    @property
    def mode(self) -> str:
        """Training or evaluation, of the modules that it was captured in."""
        return self.signature.mode

    @cached_property
    def called(self) -> tuple[Program, Backend]:
        """The program of a whole batch in one go."""
        if not self.steps or (self.plan.batches is None and self.plan.pipelining is None):
            return self.plan.program, self.backend
        return self.plan.whole_program, self.backend.of(self.plan.whole_program)

    @cached_property
    def telling(self) -> tuple[Program, Backend]:
        """That of a step which gives outputs too."""
        if self.plan.batches is None and self.plan.pipelining is None:
            return self.plan.program, self.backend
        return self.plan.telling_program, self.backend.of(self.plan.telling_program)

    def stepped(self, tells: bool) -> tuple[Program, Backend]:
        return self.telling if tells else (self.plan.program, self.backend)

    def bound(self, parameters: Mapping[str, Tensor]) -> None:
        """Put those that its forward bounds between their bounds, if they have changed since."""
        for name, bounds in self.plan.original.bounds.items():
            if (one := parameters.get(name)) is None:  # another rank's
                continue
            known, age = self._bounded.get(name, (None, 0))
            if known is not one or age != version_of(one):
                put_between(bounds, one)
                self._bounded[name] = one, version_of(one)

    def close(self) -> None:
        """Let go of where it runs, in all its forms."""
        forms = (vars(self).get(form) for form in ("called", "telling", "inside"))
        for backend in (self.backend, *(form[1] for form in forms if form is not None)):
            backend.close()
        self._bounded.clear()

    def takes(self, call: ModuleCall) -> bool:
        """Whether it is made for steps, or for calls, as this one is."""
        return self.steps if call.is_step else self.calls

    def serves(self, call: ModuleCall) -> bool:
        """Whether it may be the program of a call, but for its inputs."""
        is_in_mode = call.training in self.modes
        return self.takes(call) and is_in_mode and call.unfrozen <= self.unfrozen

    def has(self, call: ModuleCall) -> bool:
        """Whether it is the program of a call of which each rank has said its part."""
        if not self.serves(call) or call.whole is None:
            return self.serves(call)
        own, other = self.signature, call.signature
        own = replace(own, training=other.training, unfrozen=other.unfrozen, is_step=call.is_step)
        return own == other

    def bind(self, call: ModuleCall) -> Inputs | None:
        """The inputs of a call by placeholder, if this is its program."""
        if not self.serves(call):
            return None
        return self.plan.program.bind(call.args, call.kwargs, self.shapes)


@dataclass
class SizeFamily:
    """The programs of one plan, whose inputs have sizes of a range."""

    first: RunningProgram
    across: Hashable  # what their calls have in common
    forms: set[Hashable]  # their operators without sizes
    modes: set[tuple[bool, ...]]
    count: int = 1

    def have(self, call: ModuleCall, across: Hashable, form: Hashable) -> bool:
        """Whether a call is one of theirs. Modes that change no operator are theirs too."""
        is_theirs = self.first.takes(call) and across == self.across
        if not is_theirs or not call.unfrozen <= self.first.unfrozen:
            return False
        return call.training in self.modes or form in self.forms

    def add(self, running: RunningProgram, form: Hashable) -> None:
        self.forms.add(form)
        self.modes |= running.modes
        self.count += 1


@dataclass
class ModuleCall:
    """One call of a module, and what is known of it."""

    args: tuple
    kwargs: Mapping[str, Any]
    training: tuple[bool, ...]
    unfrozen: frozenset[str]
    is_step: bool
    # The program, or what it is to be made of.
    running: RunningProgram | None = None
    inputs: Inputs | None = None
    captured: Captured | None = None
    across: Hashable = None  # what it has in common with calls of other sizes
    sizes: SizeFamily | None = None  # those of a plan that it is one of
    numbers: tuple[int, ...] | None = None  # what ranks call theirs, where they say so
    whole: tuple[tuple, Mapping[str, Any]] | None = None  # the inputs of which this rank has slices

    @property
    def bound(self) -> Inputs:
        """Its inputs by placeholder, once its program is known."""
        assert self.inputs is not None
        return self.inputs

    def taken(self, by: RunningProgram, parameters: Mapping[str, Tensor]) -> Inputs:
        """These, for a program that runs now: what its forward writes to them, to parameters, and
        to containers, is written."""
        original = by.plan.original
        by.bound(parameters)
        left = filled(original.contents, (self.args, self.kwargs), self.bound)
        taken = self.bound | carry_out(original.writes, self.bound)
        fill(left)
        return taken

    def require_step(self, tells: bool) -> torch.dtype:
        """Refuse a step without a loss, or one that cannot give its outputs; the loss's dtype."""
        if self.running is None:
            assert self.captured is not None
            results: Any = self.captured.graph.output_node().args[0]
            return info(results[self.captured.loss_index]).val.dtype
        plan = self.running.plan
        _ = plan.captured.loss_index
        _ = tells and plan.telling_program
        return plan.program.loss_dtype

    @cached_property
    def signature(self) -> CallSignature:
        """Return the signature on this rank, until ranks have exchanged theirs."""
        return CallSignature.of(
            self.args, self.kwargs, self.training, self.unfrozen, is_step=self.is_step
        )
