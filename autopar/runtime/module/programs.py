"""Programs: one set of parameters, and a program for each way in which a module is called.

    pm.step(x, labels=y)       the program that was planned
    pm.eval()(x[:3])           another one, of that mode, batch and signature: made once, then known

A call of another structure, shape, dtype, mode, or with other values that are no tensors, or with
parameters that were frozen when the module was planned, may be another program. It is captured from
the copy of the model that the first capture left, and planned with mesh, states, and the places of
all parameters and buffers as they are. On processes all ranks make it together.

With `dynamic_shapes` calls that differ in sizes of the declared range alone have one plan, whose
decisions a size that is new takes over; they count as one program.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard, overload

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.capture.again import THIS, captured_again
from autopar.capture.captured import Captured
from autopar.capture.failure import check_call, require_one_dtype
from autopar.capture.fingerprint import fingerprint_of
from autopar.capture.plain_tensors import is_plain
from autopar.errors import InvalidInput
from autopar.plan.companion_plan import (
    follow_companion,
    plan_companion,
    resize_companion,
    stage_companion,
)
from autopar.plan.plan import Plan
from autopar.planner.verdict import require_rules, tell
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.module.call_signature import CallSignature, changing_values
from autopar.runtime.module.local_inputs import input_layouts, join_call
from autopar.runtime.module.plan_broadcast import agree_on_plan
from autopar.runtime.module.running_program import ModuleCall, RunningProgram, SizeFamily
from autopar.runtime.module.torch_contexts import refuse_transforms
from autopar.runtime.module.training_modes import TrainingModes
from autopar.runtime.parameters.initial_values import require_constants
from autopar.runtime.parameters.tensor_tree import ModuleTensors
from autopar.text.progress import reporter
from autopar.text.source_lines import frames_to_caller
from autopar.text.tables import table

WARN_ABOVE = 8  # programs, of which nothing is said


class Programs(Sequence[RunningProgram]):
    """Those of a parallel module, the first one first. Prints as a table."""

    def __init__(
        self, plan: Plan, backend: Backend, modes: TrainingModes, tensors: ModuleTensors
    ) -> None:
        self._modes, self._tensors = modes, tensors
        example = plan.original.example
        signature = CallSignature.of(
            example.args, example.kwargs, modes.now, frozenset[str](), is_step=True
        )
        self._last = RunningProgram(plan, backend, signature, both=True)
        self._all = [self._last]
        self._every = [self._last]  # of all sizes
        self._known: dict[CallSignature, RunningProgram] = {}
        self._numbers: dict[CallSignature, int] = {}  # of this rank's calls, as they came
        self._met: dict[tuple[int, ...], RunningProgram] = {}  # by the numbers of all ranks
        if plan.dynamic is not None:
            inputs = example.model, example.args, example.kwargs
            self._start_sizes(self._last, plan.dynamic.across(*inputs))

    def __len__(self) -> int:
        return len(self._all)

    @overload
    def __getitem__(self, at: int) -> RunningProgram: ...

    @overload
    def __getitem__(self, at: slice) -> list[RunningProgram]: ...

    def __getitem__(self, at: int | slice) -> RunningProgram | list[RunningProgram]:
        return self._all[at]

    def __str__(self) -> str:
        rows = [("", "call", "mode", "micro-batches", "mesh")]
        for number, one in enumerate(self._all):
            plan, text = one.plan, one.signature.text
            if one.sizes is not None:
                text += f", sizes of {plan.dynamic} ({one.sizes.count} so far)"
            about = text, one.mode, str(plan.microbatches), str(plan.whole_mesh)
            rows.append((str(number), *about))
        return "\n".join(table(rows))

    def bind(self, values: Mapping[str, Tensor]) -> None:
        """Let all read what the module holds now."""
        for one in self._every:
            one.backend.bind(values)

    def close(self) -> None:
        """Let go of all programs."""
        for running in self._every:
            running.close()

    def of(self, args: tuple, kwargs: Mapping[str, Any], is_step: bool) -> RunningProgram:
        """The program of a call, made if it is not known."""
        call = self.call(args, kwargs, is_step)
        self.meet(call)
        self.find(call)
        return self.make(call)

    def call(self, args: tuple, kwargs: Mapping[str, Any], is_step: bool) -> ModuleCall:
        """A call as it comes to this rank."""
        refuse_transforms()
        for one in self._every:
            one.backend.require_callable()
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        if not all(is_plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
            check_call(self._all[0].plan.original.example.model, args, kwargs, THIS)
        return ModuleCall(args, kwargs, self._modes.now, self._tensors.unfrozen, is_step)

    def meet(self, call: ModuleCall) -> None:
        """Where a rank cannot know the program by itself, each says in a number which call of its
        own has come: with local inputs and in pipelines, of which a rank sees a part, and where
        several programs are known."""
        first = self._all[0]
        backend, sees_part = first.backend, first.plan.pipelining or first.backend.local_inputs
        if _is_among_others(backend) and (sees_part or len(self._every) > 1):
            number = self._numbers.setdefault(call.signature, len(self._numbers))
            with backend.guard(agreed=True):
                call.numbers = backend.world.numbers(number)

    def find(self, call: ModuleCall) -> None:
        """What is known of a call; its program is captured if it is none of these."""
        numbers = call.numbers
        if not (self._look(call) if numbers is None else self._look_together(call, numbers)):
            self._capture(call)

    def _look_together(self, call: ModuleCall, numbers: tuple[int, ...]) -> bool:
        """What all ranks have found for these calls of theirs; or find it."""
        known = self._met.get(numbers)
        if known is not None and self._take(call, known):
            return True
        self._hear(call)
        return any(self._take(call, one) for one in self._every if one.has(call))

    def _hear(self, call: ModuleCall) -> None:
        """Take together what ranks say of a call: slices make the whole inputs, and a parameter
        learns that does on the ranks which hold it."""
        first, backend = self._all[0], self._all[0].backend
        is_staged = first.plan.pipelining is not None
        said = backend.everyones(call.signature.message, str(call.signature))
        shapes, call.unfrozen = _require_alike(said, backend.local_inputs, is_staged)
        if backend.local_inputs:
            call.whole = join_call(first.plan, call.args, call.kwargs, shapes)
        args, kwargs = call.whole or (call.args, call.kwargs)
        call.signature = CallSignature.of(
            args, kwargs, call.training, call.unfrozen, is_step=call.is_step
        )

    def _look(self, call: ModuleCall) -> bool:
        """That of the last call costs no more than to look at the inputs."""
        call.inputs, call.running = self._last.bind(call), self._last
        if call.inputs is not None:
            return True
        known = self._known.get(call.signature)
        among = self._every if known is None else [known]
        return any(self._take(call, one) for one in among)

    def _take(self, call: ModuleCall, one: RunningProgram) -> bool:
        """Let a call be of a program, if it is."""
        call.inputs, call.running = one.bind(call), one
        if call.inputs is None:
            call.running = None
            return False
        if call.numbers is None:
            self._last = self._known[call.signature] = one
        else:
            self._met[call.numbers] = one
        return True

    def _capture(self, call: ModuleCall) -> None:
        first = self._all[0]
        original, backend = first.plan.original, first.backend
        check_call(original.example.model, call.args, call.kwargs, THIS)
        _require_data(call)
        if backend.local_inputs and call.whole is None:
            self._hear(call)
        args, kwargs = call.whole or (call.args, call.kwargs)
        if (dynamic := first.plan.dynamic) is not None:
            dynamic.require(original.example.model, args, kwargs)
            call.across = dynamic.across(original.example.model, args, kwargs)
        modes = self._modes.by_path
        with reporter(first.plan.progress) as report:
            report("capture", type(original.example.model).__name__)
            captured = captured_again(original, args, kwargs, modes, call.unfrozen)
        require_constants(captured)
        require_one_dtype(captured, "hand over inputs in the dtype that the model computes in")
        if call.is_step:
            _ = captured.loss_index  # a program without one is refused
        if not self._is_other(call, captured):
            return
        call.captured = captured
        if call.numbers is None and call.whole is None:
            self._hear(call)

    def _is_other(self, call: ModuleCall, captured: Captured) -> bool:
        """Whether it is another program. Modes that change no operator make none."""
        found = fingerprint_of(captured)
        for one in self._every:
            if one.takes(call) and not found.differences(one.plan.fingerprint):
                one.modes.add(call.training)
                one.unfrozen |= call.unfrozen
                return not self._take(call, one)
        ranges = (one.sizes for one in self._all if one.sizes is not None)
        theirs = (sizes for sizes in ranges if sizes.have(call, call.across, found.form))
        call.sizes = next(theirs, None)
        return True

    def make(self, call: ModuleCall) -> RunningProgram:
        """The program of a call; on processes all ranks make it together."""
        if call.running is not None:
            return call.running
        first, captured = self._all[0], call.captured
        assert captured is not None
        plan, backend, is_step = first.plan, first.backend, call.is_step
        sizes = call.sizes
        if sizes is not None:
            is_step = sizes.first.steps
        inputs = input_layouts(plan, captured) if backend.local_inputs else None
        with backend.guard(agreed=True):
            if plan.strict:
                require_rules(captured)

            def decide() -> Plan:
                if sizes is not None:
                    like = sizes.first.plan
                    return resize_companion(plan, like, captured, is_step=is_step, inputs=inputs)
                return plan_companion(plan, captured, is_step=is_step, inputs=inputs)

            follow = partial(follow_companion, plan, captured, is_step=is_step)
            made = agree_on_plan(decide, follow) if _is_among_others(backend) else decide()
            made = stage_companion(plan, made, is_step=is_step)
            tell(captured, made, sizes.first.plan if sizes is not None else plan)
        with backend.guard():
            both = plan.batches is None and plan.pipelining is None
            if sizes is not None:
                both = sizes.first.steps and sizes.first.calls
            running = RunningProgram(made, backend.beside(made.program), call.signature, both)
        self._every.append(running)
        if sizes is not None:
            running.sizes = sizes
            sizes.add(running, made.fingerprint.form)
        else:
            self._all.append(running)
            self._start_sizes(running, call.across)
            self._tell_of_many()
        found = self._take(call, running)
        assert found
        return running

    def inside(
        self, running: RunningProgram, asked: Callable[[Captured], Captured]
    ) -> tuple[Plan, Backend]:
        """A program that is `asked` for of one: values inside of it, in the layouts that they have
        there. Its results are whole; on processes all ranks make it together."""
        if running.inside is None:
            first = self._all[0]
            with first.backend.local_checks():
                captured = asked(running.plan.original)
            is_local = first.backend.local_inputs
            inputs = input_layouts(first.plan, captured) if is_local else None
            with first.backend.guard(agreed=True):
                like = running.plan
                made = resize_companion(first.plan, like, captured, is_step=False, inputs=inputs)
                made = stage_companion(first.plan, made, is_step=False)
            with first.backend.guard():
                running.inside = made, first.backend.beside(made.program, plainly=True)
        return running.inside

    def _start_sizes(self, running: RunningProgram, across: Hashable) -> None:
        if running.plan.dynamic is not None:
            forms = {running.plan.fingerprint.form}
            running.sizes = SizeFamily(running, across, forms, {*running.modes})

    def _tell_of_many(self) -> None:
        if len(self._all) == WARN_ABOVE + 1:
            sizes = sum(one.sizes.count - 1 for one in self._all if one.sizes is not None)
            also = f", and {sizes} more of other sizes" if sizes else ""
            forward = self._all[0].plan.original.example.model.forward
            changing = changing_values([one.signature for one in self._all], forward)
            remedy = "Inputs of few sizes, as by padding, need few"
            if changing:
                remedy = f"{' and '.join(changing)} had several values, and each value makes a "
                remedy += "program: hand over what changes as a tensor, as torch.tensor(value)"
            warnings.warn(
                f"{len(self._all)} programs were made of this module{also}, each captured and "
                f"planned for a call that differs: print(module.programs) lists them. {remedy}",
                stacklevel=frames_to_caller(),
            )


def _require_data(call: ModuleCall) -> None:
    for value in pytree.tree_leaves((call.args, dict(call.kwargs))):
        if isinstance(value, Tensor) and value.is_meta:
            raise InvalidInput(
                "a program that runs needs inputs with data",
                got=f"an input {tuple(value.shape)} on the meta device",
                remedy="hand over tensors of a device; plan() alone needs no data",
            )


def _is_among_others(backend: Backend) -> TypeGuard[TorchBackend]:
    return isinstance(backend, TorchBackend) and backend.world.size > 1


def _require_alike(
    said: Sequence[str], of_pieces: bool, of_stages: bool
) -> tuple[list[list[tuple[int, ...]]], frozenset[str]]:
    """The shapes of the inputs of each rank, and what learns now and did not. The calls of all are
    alike, but for shapes `of pieces`, and for the parameters `of stages`."""
    words, rests, shapes, unfrozen = zip(*map(json.loads, said))
    is_alike = len(set(rests)) == 1
    is_alike &= of_pieces or all(one == shapes[0] for one in shapes)
    is_alike &= of_stages or all(one == unfrozen[0] for one in unfrozen)
    if not is_alike:
        raise InvalidInput(
            "all ranks make the same call: a new program is made by all of them together",
            got="\n".join(f"rank {rank}: {one}" for rank, one in enumerate(words)),
            remedy="call with inputs of the same shapes, in the same modes, on all ranks",
        )
    return list(shapes), frozenset().union(*unfrozen)
