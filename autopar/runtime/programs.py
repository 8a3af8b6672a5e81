"""Programs: one set of parameters, and a program for each way in which a module is called.

    pm.step(x, labels=y)       the program that was planned
    pm.eval()(x[:3])           another one, of that mode, batch and signature: made once, then known

A call of another structure, shape, dtype, mode, or with other values that are no tensors, or with
parameters that were frozen when the module was planned, may be another program. It is captured from
the copy of the model that the first capture left, and planned with mesh, states, and the places of
all parameters and buffers as they are. On processes all ranks make it together.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.capture.again import captured_again
from autopar.capture.captured import Captured
from autopar.capture.failure import check_call, require_one_dtype
from autopar.capture.fingerprint import fingerprint_of
from autopar.errors import InvalidInput
from autopar.lines import frames_to_caller
from autopar.plan.beside import follow_beside, plan_beside, staged_beside
from autopar.plan.plan import Plan
from autopar.plan.program import Program
from autopar.planner.verdict import tell
from autopar.runtime.backend import Backend
from autopar.runtime.distributed import TorchBackend
from autopar.runtime.local_inputs import layouts_of, whole_call
from autopar.runtime.modes import Modes
from autopar.runtime.plan_broadcast import agree
from autopar.runtime.signature import Signature
from autopar.runtime.tensors import Tensors
from autopar.runtime.values import require_constants
from autopar.strategies.node_info import info
from autopar.units import table

FEW = 8  # programs, of which nothing is said

Inputs = dict[str, Tensor]


class Running:
    """One program, in the forms in which it is called, and where they run."""

    def __init__(self, plan: Plan, backend: Backend, signature: Signature, both: bool) -> None:
        """`both`: it serves calls and steps, not only what its signature says."""
        self.plan, self.backend, self.signature = plan, backend, signature
        self.calls, self.steps = both or not signature.is_step, both or signature.is_step
        self.modes = {signature.training}  # in which this is the model's program
        self.unfrozen = signature.unfrozen
        self.shapes = backend.input_shapes()

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

    def bind(self, call: Call) -> Inputs | None:
        """The inputs of a call by placeholder, if this is its program."""
        serves = self.steps if call.is_step else self.calls
        if not serves or call.training not in self.modes or not call.unfrozen <= self.unfrozen:
            return None
        return self.plan.program.bind(call.args, call.kwargs, self.shapes)


@dataclass
class Call:
    """One call of a module, and what is known of it."""

    args: tuple
    kwargs: Mapping[str, Any]
    training: tuple[bool, ...]
    unfrozen: frozenset[str]
    is_step: bool
    # The program, or what it is to be made of.
    running: Running | None = None
    inputs: Inputs | None = None
    captured: Captured | None = None

    @property
    def bound(self) -> Inputs:
        """Its inputs by placeholder, once its program is known."""
        assert self.inputs is not None
        return self.inputs

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
    def signature(self) -> Signature:
        about = self.training, self.unfrozen, self.is_step
        return Signature.of(self.args, self.kwargs, *about)


class Programs(Sequence[Running]):
    """Those of a parallel module, the first one first. Prints as a table."""

    def __init__(self, plan: Plan, backend: Backend, modes: Modes, tensors: Tensors) -> None:
        self._modes, self._tensors = modes, tensors
        example = plan.original.example
        about = modes.now, frozenset[str]()
        signature = Signature.of(example.args, example.kwargs, *about, is_step=True)
        self._last = Running(plan, backend, signature, both=True)
        self._all = [self._last]
        self._known: dict[Signature, Running] = {}

    def __len__(self) -> int:
        return len(self._all)

    @overload
    def __getitem__(self, at: int) -> Running: ...

    @overload
    def __getitem__(self, at: slice) -> list[Running]: ...

    def __getitem__(self, at: int | slice) -> Running | list[Running]:
        return self._all[at]

    def __str__(self) -> str:
        rows = [("", "call", "mode", "micro-batches", "mesh")]
        for number, one in enumerate(self._all):
            plan, text = one.plan, one.signature.text
            about = text, one.mode, str(plan.microbatches), str(plan.whole_mesh)
            rows.append((str(number), *about))
        return "\n".join(table(rows))

    def bind(self, values: Mapping[str, Tensor]) -> None:
        """Let all read what the module holds now."""
        for one in self._all:
            one.backend.bind(values)

    def find(self, args: tuple, kwargs: Mapping[str, Any], is_step: bool) -> Call:
        """What is known of a call; its program is captured if it is none of these."""
        for one in self._all:
            one.backend.require_callable()
        call = Call(args, kwargs, self._modes.now, self._tensors.unfrozen, is_step)
        if not self._look(call):
            self._capture(call)
        return call

    def _look(self, call: Call) -> bool:
        """That of the last call costs no more than to look at the inputs."""
        call.inputs, call.running = self._last.bind(call), self._last
        if call.inputs is not None:
            return True
        known = self._known.get(call.signature)
        for one in self._all if known is None else [known]:
            call.inputs, call.running = one.bind(call), one
            if call.inputs is not None:
                self._last = self._known[call.signature] = one
                return True
        call.running = None
        return False

    def _capture(self, call: Call) -> None:
        first = self._all[0]
        original, backend = first.plan.original, first.backend
        check_call(original.example.model, call.args, call.kwargs)
        _require_data(call)
        args, kwargs = call.args, call.kwargs
        if backend.local_inputs:
            shapes = _alike(backend.everyones(call.signature.said), of_pieces=True)
            args, kwargs = whole_call(first.plan, args, kwargs, shapes)
        modes = self._modes.by_path
        captured = captured_again(original, args, kwargs, modes, call.unfrozen)
        require_constants(captured)
        require_one_dtype(captured, "hand over inputs in the dtype that the model computes in")
        if call.is_step:
            _ = captured.loss_index  # a program without one is refused
        if not self._is_other(call, captured):
            return
        call.captured = captured
        if not backend.local_inputs:
            _alike(backend.everyones(call.signature.said))

    def _is_other(self, call: Call, captured: Captured) -> bool:
        """Whether it is another program. Modes that change no operator make none."""
        found = fingerprint_of(captured)
        for one in self._all:
            serves = one.steps if call.is_step else one.calls
            if serves and not found.differences(one.plan.fingerprint):
                one.modes.add(call.training)
                one.unfrozen |= call.unfrozen
                return not self._look(call)
        return True

    def make(self, call: Call) -> Running:
        """The program of a call; on processes all ranks make it together."""
        if call.running is not None:
            return call.running
        first, captured = self._all[0], call.captured
        assert captured is not None
        plan, backend, is_step = first.plan, first.backend, call.is_step
        inputs = layouts_of(plan, captured) if backend.local_inputs else None
        with backend.guard(agreed=True):

            def decide() -> Plan:
                return plan_beside(plan, captured, is_step, inputs)

            several = isinstance(backend, TorchBackend) and backend.world.size > 1
            follow = partial(follow_beside, plan, captured, is_step)
            made = agree(decide, follow) if several else decide()
            made = staged_beside(plan, made, is_step)
            tell(captured, made, plan)
        with backend.guard():
            both = plan.batches is None and plan.pipelining is None
            running = Running(made, backend.beside(made.program), call.signature, both)
        self._all.append(running)
        self._known[call.signature] = running
        self._tell_of_many()
        found = self._look(call)
        assert found
        return running

    def _tell_of_many(self) -> None:
        if len(self._all) == FEW + 1:
            warnings.warn(
                f"{len(self._all)} programs were made of this module, each captured and planned "
                "for a call that differs: print(module.programs) lists them. Inputs of few sizes, "
                "as by padding, need few",
                stacklevel=frames_to_caller(),
            )


def _require_data(call: Call) -> None:
    for value in pytree.tree_leaves((call.args, dict(call.kwargs))):
        if isinstance(value, Tensor) and value.is_meta:
            raise InvalidInput(
                "a program that runs needs inputs with data",
                got=f"an input {tuple(value.shape)} on the meta device",
                remedy="hand over tensors of a device; plan() alone needs no data",
            )


def _alike(said: Sequence[str], of_pieces: bool = False) -> list[list[tuple[int, ...]]]:
    """The shapes of the inputs of each rank, whose calls are alike; but for these, if they are `of
    pieces`."""
    words, rests, shapes = zip(*map(json.loads, said))
    if len(set(rests)) > 1 or (not of_pieces and any(one != shapes[0] for one in shapes)):
        raise InvalidInput(
            "all ranks make the same call: a new program is made by all of them together",
            got="\n".join(f"rank {rank}: {one}" for rank, one in enumerate(words)),
            remedy="call with inputs of the same shapes, in the same modes, on all ranks",
        )
    return list(shapes)
