"""Programs: one set of parameters, and a program for each kind of call of a module.

    pm.step(x, labels=y)       the program that was planned
    pm.eval()(x[:3])           another program, for that mode, batch and signature, made once

A call with another structure, shape, dtype, mode or plain value, or with newly unfrozen parameters,
may need another program. It is captured from the copy of the model that the first capture left, and
planned with the same mesh, states and places of parameters, on processes by all ranks together.

With `dynamic_shapes` all sizes of the declared range share one plan and count as one program.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, overload

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.capture.again import THIS
from autopar.capture.captured import Captured
from autopar.capture.effects_between import require_independent
from autopar.capture.failure import check_call, require_one_dtype
from autopar.capture.fingerprint import fingerprint_of
from autopar.capture.key_value_caches import register_caches
from autopar.capture.plain_tensors import is_plain
from autopar.errors import InvalidInput
from autopar.plans.companion_plan import (
    follow_companion,
    plan_companion,
    resize_companion,
    stage_companion,
)
from autopar.plans.plan import Plan
from autopar.plans.verdict import require_rules, tell
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import is_among_others
from autopar.runtime.batches.local_inputs import input_layouts, join_call
from autopar.runtime.module.call_capture import CallCapture, require_data
from autopar.runtime.module.call_signature import CallSignature, changing_values
from autopar.runtime.module.plan_broadcast import Attach, agree_on_plan
from autopar.runtime.module.running_program import (
    ModuleCall,
    RunningProgram,
    SizeFamily,
    differs_in_sizes,
    share_sizes,
)
from autopar.runtime.module.torch_contexts import refuse_transforms
from autopar.runtime.module.training_modes import TrainingModes
from autopar.runtime.parameters.initial_values import require_constants
from autopar.runtime.parameters.tensor_tree import ModuleTensors
from autopar.text.progress import reporter
from autopar.text.source_lines import frames_to_caller
from autopar.text.tables import table

WARN_ABOVE = 8  # programs without a warning
_MOST_PROGRAMS = 1 << 20


class Programs(Sequence[RunningProgram]):
    """The programs of a parallel module, the planned one first. Prints as a table."""

    def __init__(
        self, plan: Plan, backend: Backend, modes: TrainingModes, tensors: ModuleTensors
    ) -> None:
        register_caches()
        self._modes, self._tensors = modes, tensors
        example = plan.original.example
        signature = CallSignature.of(
            example.args, example.kwargs, modes.now, frozenset[str](), is_step=True
        )
        self._last = RunningProgram(plan, backend, signature, both=True)
        self._listed = [self._last]
        self._with_all_sizes = [self._last]
        self._calls = CallCapture(self._with_all_sizes, modes, tensors)
        self._known: dict[CallSignature, RunningProgram] = {}
        self._numbers: dict[CallSignature, int] = {}  # of this rank's calls, in order
        self._by_rank_numbers: dict[tuple[int, ...], RunningProgram] = {}
        if plan.dynamic is not None:
            across = plan.dynamic.across(example.model, example.args, example.kwargs)
            self._start_sizes(self._last, across)

    def __len__(self) -> int:
        return len(self._listed)

    @overload
    def __getitem__(self, at: int) -> RunningProgram: ...

    @overload
    def __getitem__(self, at: slice) -> list[RunningProgram]: ...

    def __getitem__(self, at: int | slice) -> RunningProgram | list[RunningProgram]:
        return self._listed[at]

    def __str__(self) -> str:
        rows = [("", "call", "mode", "micro-batches", "mesh")]
        for number, running in enumerate(self._listed):
            plan, text = running.plan, running.signature.text
            if running.sizes is not None:
                text += f", sizes of {plan.dynamic} ({running.sizes.count} so far)"
            batches, mesh = str(plan.microbatches), str(plan.whole_mesh)
            rows.append((str(number), text, running.mode, batches, mesh))
        return "\n".join(table(rows))

    def bind(self, values: Mapping[str, Tensor]) -> None:
        """Have all programs read the tensors that the module holds now."""
        for running in self._with_all_sizes:
            running.backend.bind(values)

    def close(self) -> None:
        """Release all programs."""
        for running in self._with_all_sizes:
            running.close()

    def program_for(
        self, args: tuple, kwargs: Mapping[str, Any], *, is_step: bool
    ) -> RunningProgram:
        """Return the program of a call, made if it is new."""
        call = self.accept(args, kwargs, is_step=is_step)
        self.exchange_numbers(call)
        self.look_up(call)
        return self.build(call)

    def accept(
        self,
        args: tuple,
        kwargs: Mapping[str, Any],
        *,
        is_step: bool,
        with_outputs: bool = False,
    ) -> ModuleCall:
        """Return the record of a call on this rank; refuse transforms and odd tensors."""
        refuse_transforms()
        for running in self._with_all_sizes:
            running.backend.require_callable()
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        if not all(is_plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
            check_call(self._listed[0].plan.original.example.model, args, kwargs, THIS)
        programs = (running.plan.original for running in self._with_all_sizes)
        frozen = self._calls.frozen(*programs)
        call = ModuleCall(args, kwargs, self._modes.now, self._tensors.unfrozen, frozen, is_step)
        call.with_outputs = with_outputs
        return call

    def exchange_numbers(self, call: ModuleCall) -> None:
        """Exchange the number of each rank's call, where a rank cannot know the program by itself.

        That is so with local inputs, and in pipelines with frozen parameters: a rank sees a part
        of the batch, or of the parameters that may learn now. Elsewhere ranks exchange signatures,
        and only when the program changes."""
        first = self._listed[0]
        backend, trainable = first.backend, first.plan.program.was_trainable
        sees_part = first.plan.pipelining and not all(trainable.values())
        if is_among_others(backend) and (sees_part or backend.local_inputs):
            number = self._number_of(call)
            with backend.guard(agreed=True):
                call.numbers = backend.world.gather_numbers(number)

    def _number_of(self, call: ModuleCall) -> int:
        """Return the number of a call on this rank: below 0, of a program and a size that it serves
        beside its own; else of its signature."""
        for at, running in enumerate(self._with_all_sizes):
            numbers = running.plan.original.numbers
            if not numbers and running.resizing is None:
                continue
            if (inputs := running.bind(call)) is not None:
                size = 0 if running.resizing is None else running.resizing.size_of(inputs)
                values = repr([size, *(inputs[name].item() for name in sorted(numbers))])
                return -1 - at - zlib.crc32(values.encode()) * _MOST_PROGRAMS
        return self._numbers.setdefault(call.signature, len(self._numbers))

    def look_up(self, call: ModuleCall) -> None:
        """Find the program of a call among the known ones; capture a new one otherwise."""
        numbers = call.numbers
        if not (self._look_up(call) if numbers is None else self._look_together(call, numbers)):
            self._capture(call)

    def _look_together(self, call: ModuleCall, numbers: tuple[int, ...]) -> bool:
        """Return whether a known program serves the calls that the ranks made."""
        known = self._by_rank_numbers.get(numbers)
        if numbers[0] < 0 and len({*numbers}) == 1:
            known = self._with_all_sizes[(-1 - numbers[0]) % _MOST_PROGRAMS]
        if known is not None and self._assign(call, known):
            return True
        self._exchange_signatures(call)
        call.is_of_own_size = True
        return any(self._assign(call, p) for p in self._with_all_sizes if p.matches(call))

    def _exchange_signatures(self, call: ModuleCall) -> None:
        """Exchange signatures of a call: slices join to whole inputs, and a parameter learns if it
        learns on a rank that holds it."""
        first, backend = self._listed[0], self._listed[0].backend
        is_staged = first.plan.pipelining is not None
        messages = backend.exchange_call(call.signature.message, str(call.signature))
        shapes, call.unfrozen = _require_alike(
            messages, of_pieces=backend.local_inputs, of_stages=is_staged
        )
        if backend.local_inputs:
            call.global_inputs = join_call(first.plan, call.args, call.kwargs, shapes)
        args, kwargs = call.global_inputs or (call.args, call.kwargs)
        call.signature = CallSignature.of(
            args,
            kwargs,
            call.training,
            call.unfrozen,
            is_step=call.is_step,
            frozen=call.frozen,
        )
        call.is_agreed = True

    def _look_up(self, call: ModuleCall) -> bool:
        """Return whether a known program serves a call, and try the last call's program first."""
        call.inputs, call.running = self._last.bind(call), self._last
        is_served, changes_size = call.inputs is not None, self._last.changes_size(call.inputs)
        if is_served and not changes_size:
            return True
        if len(self._with_all_sizes) > 1 and is_among_others(self._last.backend):
            self._exchange_signatures(call)  # do all change to another program, or size?
        if is_served:
            return True
        known = self._known.get(call.signature)
        candidates = self._with_all_sizes if known is None else [known]
        return any(self._assign(call, candidate) for candidate in candidates)

    def _assign(self, call: ModuleCall, running: RunningProgram) -> bool:
        """Assign a program to a call if the inputs fit; return whether they do."""
        call.inputs, call.running = running.bind(call), running
        if call.inputs is None:
            call.running = None
            return False
        if call.numbers is None:
            self._last = running
            if running.resizing is None and not running.plan.original.numbers:
                self._known[call.signature] = running
        elif call.numbers[0] >= 0:
            self._by_rank_numbers[call.numbers] = running
        return True

    def _capture(self, call: ModuleCall) -> None:
        first = self._listed[0]
        original, backend = first.plan.original, first.backend
        check_call(original.example.model, call.args, call.kwargs, THIS)
        require_data(call)
        if backend.local_inputs and not call.is_agreed:
            self._exchange_signatures(call)
        args, kwargs = call.global_inputs or (call.args, call.kwargs)
        if (dynamic := first.plan.dynamic) is not None:
            dynamic.require(original.example.model, args, kwargs)
            call.size_family_key = dynamic.across(original.example.model, args, kwargs)
        with reporter(first.plan.progress) as report:
            report("capture", type(original.example.model).__name__)
            captured = self._calls.capture(call, args, kwargs)
        require_constants(captured)
        require_one_dtype(captured, "hand over inputs in the dtype that the model computes in")
        if call.is_step:
            _ = captured.loss_index  # refuse a program without a loss
        for running in self._with_all_sizes:
            require_independent(captured, running.plan.original)
        if not self._is_other(call, captured):
            return
        call.captured = captured
        if not call.is_agreed:
            self._exchange_signatures(call)

    def _is_other(self, call: ModuleCall, captured: Captured) -> bool:
        """Return whether a captured program is new. Modes that change no operator make none."""
        fingerprint = fingerprint_of(captured)
        for running in self._with_all_sizes:
            if running.takes(call) and not fingerprint.differences(running.plan.fingerprint):
                running.modes.add(call.training)
                running.unfrozen |= call.unfrozen
                return not self._assign(call, running)
        call.like = next((r for r in self._with_all_sizes if differs_in_sizes(r, call)), None)
        if call.like is not None and call.like.plan.fingerprint.form != fingerprint.form:
            call.like = None
        ranges = (running.sizes for running in self._listed if running.sizes is not None)
        key, form = call.size_family_key, fingerprint.form
        call.sizes = next((sizes for sizes in ranges if sizes.includes(call, key, form)), None)
        return True

    def build(self, call: ModuleCall) -> RunningProgram:
        """Return the program of a call, planned by all ranks together if it is new."""
        if call.running is not None:
            return call.running
        first, captured = self._listed[0], call.captured
        assert captured is not None
        plan, backend, is_step = first.plan, first.backend, call.is_step
        sizes = call.sizes
        if sizes is not None:
            is_step = sizes.first.for_steps
        inputs = input_layouts(plan, captured) if backend.local_inputs else None
        with backend.guard(agreed=True):
            if plan.strict:
                require_rules(captured)

            def decide() -> Plan:
                like = call.like if sizes is None else sizes.first
                if like is not None:
                    resized = resize_companion(
                        plan, like.plan, captured, is_step=is_step, inputs=inputs
                    )
                    if sizes is not None or plan.limit is None or resized.memory.peak <= plan.limit:
                        return resized
                return plan_companion(plan, captured, is_step=is_step, inputs=inputs)

            def prepare() -> Attach:
                return partial(follow_companion, plan, captured, is_step=is_step)

            new_plan = agree_on_plan(decide, prepare) if is_among_others(backend) else decide()
            new_plan = stage_companion(plan, new_plan, is_step=is_step)
            tell(captured, new_plan, sizes.first.plan if sizes is not None else plan)
        with backend.guard():
            both = plan.batches is None and plan.pipelining is None
            if sizes is not None:
                both = sizes.first.for_steps and sizes.first.for_calls
            running = RunningProgram(
                new_plan, backend.with_new_copies(new_plan.program), call.signature, both=both
            )
        self._with_all_sizes.append(running)
        if sizes is not None:
            running.sizes = sizes
            sizes.add(running, new_plan.fingerprint.form)
        else:
            self._listed.append(running)
            self._start_sizes(running, call.size_family_key)
            self._warn_of_many()
        is_assigned = self._assign(call, running)
        assert is_assigned
        share_sizes(self._with_all_sizes, running)
        return running

    def inner_program(
        self, running: RunningProgram, capture_inside: Callable[[Captured], Captured]
    ) -> tuple[Plan, Backend]:
        """Return a program for values inside of another one, in their layouts there.

        `capture_inside` derives it from the captured program. Its results are whole; on processes
        all ranks make it together."""
        if running.routing_program is None:
            first = self._listed[0]
            with first.backend.local_checks():
                captured = capture_inside(running.plan.original)
            is_local = first.backend.local_inputs
            inputs = input_layouts(first.plan, captured) if is_local else None
            with first.backend.guard(agreed=True):
                like = running.plan
                inner_plan = resize_companion(
                    first.plan, like, captured, is_step=False, inputs=inputs
                )
                inner_plan = stage_companion(first.plan, inner_plan, is_step=False)
            with first.backend.guard():
                inner_backend = first.backend.with_new_copies(inner_plan.program, is_plain=True)
                running.routing_program = inner_plan, inner_backend
        return running.routing_program

    def _start_sizes(self, running: RunningProgram, across: Hashable) -> None:
        if running.plan.dynamic is not None:
            forms = {running.plan.fingerprint.form}
            running.sizes = SizeFamily(running, across, forms, {*running.modes})

    def _warn_of_many(self) -> None:
        if len(self._listed) == WARN_ABOVE + 1:
            sizes = sum(
                running.sizes.count - 1 for running in self._listed if running.sizes is not None
            )
            also = f", and {sizes} more of other sizes" if sizes else ""
            forward = self._listed[0].plan.original.example.model.forward
            changing = changing_values([running.signature for running in self._listed], forward)
            remedy = "Inputs of few sizes, as by padding, need few"
            if changing:
                remedy = f"{' and '.join(changing)} had several values, and each value makes a "
                remedy += "program: hand over what changes as a tensor, as torch.tensor(value)"
            warnings.warn(
                f"{len(self._listed)} programs were made of this module{also}, each captured and "
                f"planned for a call that differs: print(module.programs) lists them. {remedy}",
                stacklevel=frames_to_caller(),
            )


def _require_alike(
    messages: Sequence[str], *, of_pieces: bool, of_stages: bool
) -> tuple[list[list[tuple[int, ...]]], frozenset[str]]:
    """Return the input shapes of each rank, and the unfrozen parameters of all ranks.

    Refuse calls that differ, except in shapes if these are `of_pieces`, and in parameters if these
    are `of_stages`."""
    texts, digests, shapes, unfrozen = zip(*map(json.loads, messages))
    is_alike = len(set(digests)) == 1
    is_alike &= of_pieces or all(other == shapes[0] for other in shapes)
    is_alike &= of_stages or all(other == unfrozen[0] for other in unfrozen)
    if not is_alike:
        raise InvalidInput(
            "all ranks make the same call: a new program is made by all of them together",
            got="\n".join(f"rank {rank}: {other}" for rank, other in enumerate(texts)),
            remedy="call with inputs of the same shapes, in the same modes, on all ranks",
        )
    return list(shapes), frozenset().union(*unfrozen)
