"""ParallelModule: the parallel program in the clothes of the model it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from inspect import get_annotations
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from autopar._torch.compiler import left_uncompiled
from autopar._torch.modules import state_names
from autopar.capture.autocasts import require_same, switched
from autopar.capture.effects import carry_out_all
from autopar.capture.failure import Parallel
from autopar.capture.listing import Listing
from autopar.errors import InvalidInput
from autopar.layout import Layout, TensorType
from autopar.plan.plan import Plan
from autopar.plan.runtime_program import Program
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.backends.program_checks import Checks
from autopar.runtime.module.batch_checks import BatchCheck, SliceCheck
from autopar.runtime.module.call_outputs import wants_outputs
from autopar.runtime.module.loss_scale import (
    LossScale,
    require_scale,
    restore_gradients,
    take_gradients,
)
from autopar.runtime.module.programs import Programs
from autopar.runtime.module.refused_wrappers import RefusesWrappers
from autopar.runtime.module.running_program import ModuleCall, RunningProgram
from autopar.runtime.module.step_arguments import split_step_arguments
from autopar.runtime.module.step_loss import StepLoss
from autopar.runtime.module.submodule_view import (
    ClosedModule,
    ModelAttributes,
    add_submodule_views,
    attach_model_state,
    class_like,
    refuse_late_hooks,
    require_free_attributes,
    submodule_at,
    warn_about_state_hooks,
)
from autopar.runtime.module.training_modes import TrainingModes
from autopar.runtime.observation.expert_balance import expert_balance
from autopar.runtime.observation.step_figures import StepListeners
from autopar.runtime.observation.step_observation import StepObservation
from autopar.runtime.parameters.gather_state import gather_state, save_with_full_state
from autopar.runtime.parameters.initial_values import InitialValues
from autopar.runtime.parameters.old_parameters import note_old_parameters
from autopar.runtime.parameters.refused_optimizers import register_module
from autopar.runtime.parameters.tensor_tree import ModuleTensors
from autopar.text.units import counted


class ParallelModule(RefusesWrappers, ModelAttributes, StepObservation, Parallel):
    """Called and differentiated like the original; `step` takes a whole global batch.

    A call runs the batch in one go, a step in the micro-batches of the plan: what the plan says of
    memory is for steps. In a pipeline calls go forward alone, under `torch.no_grad()`, in
    micro-batches where these give the same. Other batches, modes and arguments than those that were
    planned make other programs on the same parameters, which `programs` has. A call gives whole,
    plain tensors in the model's own output type, of which a loss may be made outside, the same on
    all ranks; with `outputs="dtensor"` or `"local"` what is cut stays so, as DTensors or in pieces.

    It and its submodules are of the model's classes, and have its attributes and methods but for
    names that a ParallelModule has itself. What a method of the model calls, as `generate()` does,
    is this module; submodules do not run themselves. Parameters and buffers stand under their
    original names, tied ones under all their names. Freeze and replace them on all ranks alike:
    `check=True` compares what is frozen. On processes set DTensors by `copy_()`, not by `.data`.
    """

    program: Program
    plan: Plan
    backend: Backend
    loss_scale: LossScale | None  # what the loss of a step is scaled by; None: it is not
    _check: Checks | None
    _batch_check: BatchCheck | None = None
    _layouts: dict[str, Layout]
    _names: tuple[str, ...]
    _programs: Programs
    _tensors: ModuleTensors

    def __new__(cls, model: nn.Module, *args: Any, **kwargs: Any) -> ParallelModule:
        kinds: tuple[Any, Any] = cls, type(model)
        return object.__new__(class_like(*kinds))

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        plan: Plan,
        backend: Backend,
        check: Checks | None = None,
        values: InitialValues | None = None,
    ) -> None:
        """`values`: where those of its tensors come from; if not given, from the model."""
        super().__init__()
        self.program, self.plan, self.backend, self._check = program, plan, backend, check
        if isinstance(backend, TorchBackend):
            world, is_local = backend.world, backend.local_inputs
            self._batch_check = SliceCheck(world, plan) if is_local else BatchCheck(world)
        captured = program.captured
        types = {
            name: replace(program.type_of(placeholder), layout=program.kept_layout(placeholder))
            for placeholder, name in (captured.parameters | captured.buffers).items()
        }
        values = values or InitialValues(model)
        for name, value in values.tensors.items():
            types.setdefault(name, TensorType.of(value, Layout.replicated(value.ndim)))
        self._layouts = {name: types[name].layout for name in values.tensors}
        self._names = tuple(state_names(model))
        names = {name: [name] for name in self._layouts}
        for alias, name in captured.tied.items():
            names[name].append(alias)
        add_submodule_views(self, model)
        found = values.place(backend, types)
        for name, value in values.tensors.items():
            placed = found.pop(name)
            if placed is None:
                continue
            if isinstance(value, nn.Parameter):
                placed = nn.Parameter(placed, requires_grad=value.requires_grad)
            for own in names[name]:
                path, _, key = own.rpartition(".")
                owner = submodule_at(self, path)
                if isinstance(placed, nn.Parameter):
                    owner.register_parameter(key, placed)
                else:
                    owner.register_buffer(key, placed, persistent=own in self._names)
                vars(owner).setdefault("_tensor_types", {})[key] = types[name]
        scaled = plan.precision is not None and plan.precision.loss_scale is not None
        self.loss_scale = LossScale() if scaled else None
        self._peak = None
        rank = backend.world.rank if isinstance(backend, TorchBackend) else 0
        self._listeners = StepListeners(rank, backend.device)
        modes = TrainingModes(self, plan.original)
        self._tensors = ModuleTensors(self, captured.tied, program.learns)
        backend.bind(self._tensors.values)
        self._programs = Programs(plan, backend, modes, self._tensors)
        self.describe(model, {*RESERVED_NAMES, *vars(self)})
        if captured.effects:
            require_free_attributes(captured.effects, RESERVED_NAMES)
            attach_model_state(self, model, captured.effects)
        warn_about_state_hooks(model)
        note_old_parameters(model, self)
        if isinstance(backend, TorchBackend):
            register_module(self, has_stages=bool(program.stages))

    def close(self) -> None:
        """Let go of what only this module holds: parameters, buffers, programs, gradients.

        Process groups stay with the world, for the next module on the same ranks.
        """
        for module in self.modules():
            module._parameters.clear()
            module._buffers.clear()
        if not isinstance(self.backend, ClosedModule):
            self._programs.close()
            self._programs, self._tensors = (
                cast(Programs, ClosedModule()),
                cast(ModuleTensors, ClosedModule()),
            )
        self._check = None
        self.backend = cast(Backend, ClosedModule())

    def __enter__(self) -> ParallelModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def graph(self) -> Listing:
        """This rank's program: prints one line a node."""
        return Listing(self.backend.graph())

    @property
    def graphs(self) -> list[Listing]:
        """The programs of all stages."""
        count = len(self.program.stages)
        return [Listing(self.backend.graph(i)) for i in range(count)] or [self.graph]

    @property
    def programs(self) -> Programs:
        """All that run on these parameters, the one that was planned first; prints as a table.

        A call of another structure, shape, dtype or mode, or with other values that are no tensors,
        makes one when it first comes; all sizes of a range that `dynamic_shapes` declares are one.
        Each has a `plan`; `plan`, `program`, `graph` and `memory` of the module are those of the
        first."""
        _ = self.backend.program  # of one that is closed
        return self._programs

    @left_uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.backend.local_checks():
            if self.program.stages and torch.is_grad_enabled():
                raise InvalidInput(
                    "a call of a pipeline has no gradients: its backward is part of a step's "
                    "schedule",
                    got="a call, with gradients, of a program in "
                    + counted(len(self.program.stages), "stage"),
                    remedy="call step() to train, or this under torch.no_grad(); or parallelize "
                    "with pipeline=None",
                )
            call = self._accept(args, kwargs, step=False)
        self._programs.meet(call)
        with self.backend.local_checks():
            self._find(call)
        running = self._make(call)
        self._check_together(call)
        with self.backend.guard(), switched(()):
            program, backend = running.called
            inputs = call.taken(running, self._tensors.values) | self.backend.draw(program)
            outputs = backend.call(self._tensors.values, inputs)
            carry_out_all(program.captured.effects, self, outputs)
            return program.structure(outputs)

    def _accept(self, args: tuple, kwargs: Mapping[str, Any], step: bool) -> ModuleCall:
        """A call as it comes to this rank; or refuse it."""
        require_same(self.plan.original.example.autocasts)
        refuse_late_hooks(self, self._kept(), step)
        return self._programs.call(args, kwargs, step)

    def _find(self, call: ModuleCall) -> None:
        """What is known of its program; or refuse it."""
        self._programs.find(call)
        if self._check is not None:
            self._check.alone(call, self._programs[0])

    def _make(self, call: ModuleCall) -> RunningProgram:
        """Its program, made if it is a new one."""
        running = self._programs.make(call)
        require_free_attributes(running.plan.original.effects, RESERVED_NAMES)
        return running

    def _check_together(self, call: ModuleCall) -> None:
        if self._check is not None:
            with self.backend.guard(agreed=True):
                self._check.together(call.args, call.kwargs, dict(self.named_parameters()))
        elif self._batch_check is not None and self._batch_check.is_due(call.args, call.kwargs):
            with self.backend.guard(agreed=True):
                self._batch_check.compare(str(call.signature), call.args, call.kwargs)

    @overload
    def step(
        self, *args: Any, scale: float | None = ..., outputs: Literal[False] = ..., **kwargs: Any
    ) -> Tensor: ...

    @overload
    def step(
        self, *args: Any, scale: float | None = ..., outputs: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Any]: ...

    @overload  # step(**batch), where each value of a batch is a tensor
    def step(self, *args: Any, **kwargs: Any) -> Tensor: ...

    @left_uncompiled
    def step(
        self, *args: Any, scale: float | None = None, outputs: bool | None = None, **kwargs: Any
    ) -> Any:
        """Forward and backward of one global batch, all micro-batches of it: the batch's loss.

        Gradients add up over steps until `zero_grad()`: a step that finds some holds its own beside
        them till it has ended. `scale`: what they are multiplied by, as 1/n in each of n steps that
        make one update; the loss that is returned is not. One step of `microbatches=n` does the
        same, and sums over ranks once. `outputs=True`: the loss, and what the model gives for the
        whole batch, in its own type, detached and whole. Those of micro-batches are joined along
        the batch, shares of numbers summed; where neither gives the batch's it is refused. Where
        the model's forward takes arguments of these names, they are its own if the example call has
        them, and refused if not. A step that breaks off leaves gradients as they were."""
        with torch.inference_mode(False), torch.enable_grad():
            begun = self._listeners.begin()
            with self.backend.local_checks():
                example, said = self.program.captured.example, {"scale": scale, "outputs": outputs}
                kwargs, said = split_step_arguments(example, args, kwargs, said)
                tells = wants_outputs(said["outputs"])
                call = self._accept(args, kwargs, step=True)
                self._require_learning(tree_leaves((args, kwargs)))
            self._programs.meet(call)
            with self.backend.local_checks():
                self._find(call)
                by = require_scale(said["scale"], call.require_step(tells))
            running = self._make(call)
            self._check_together(call)
            with self.backend.guard(), switched(()):
                program, backend = running.stepped(tells)
                kept = self._tensors.values
                inputs = call.taken(running, kept) | backend.draw(program)
                loss, found = self._scaled(backend, kept, backend.split(inputs), tells, by)
                carry_out_all(program.captured.effects, self, found)
        self._listeners.notify(begun, loss, running.plan)
        told = StepLoss.of(loss)
        return (told, program.structure(found)) if tells else told

    def no_sync(self) -> AbstractContextManager[None]:
        """Around backward passes and steps whose gradients the first one outside sums over ranks.

        Inside, gradients are partial sums (`parameter.grad` is a DTensor that says so). Those that
        are kept in pieces (zero2, zero3), add up in another dtype or are scaled are summed each
        time all the same, and so are a pipeline's, those of other programs than the one that was
        planned, and all those of parameters that have a gradient from outside already. `step()` of
        a plan with several micro-batches sums once by itself.
        """
        return self.backend.no_sync() if self.loss_scale is None else nullcontext()

    def _scaled(
        self,
        backend: Backend,
        kept: Mapping[str, Tensor],
        batches: Sequence[Mapping[str, Tensor]],
        tells: bool,
        by: float,
    ) -> tuple[Tensor, list[Tensor]]:
        """A step whose gradients are multiplied `by`, and whose loss is scaled beside that, if it
        was asked for. One that breaks off leaves gradients as they were."""
        scaled = self.loss_scale
        before, scale, is_good = (
            take_gradients(kept.values()),
            1.0 if scaled is None else scaled.value,
            True,
        )
        is_first = all(earlier is None for _, earlier in before)
        try:
            found = backend.step(kept, batches, tells, by * scale, is_first)
            if scaled is not None:
                is_good = bool(self.backend.norm(self._gradients(), 1.0).isfinite())
        except BaseException:
            restore_gradients(before, scale, is_good=False)
            raise
        restore_gradients(before, scale, is_good=is_good)
        if scaled is not None:
            scaled.update(is_good=is_good)
        return found

    def _require_learning(self, inputs: Iterable[Any]) -> None:
        """Before anything runs. A rank that holds some of the stages does not know."""
        if not self._tensors.are_frozen:
            return
        if not any(isinstance(v, Tensor) and v.requires_grad for v in inputs):
            raise InvalidInput(
                "the loss of a step takes a gradient",
                got="a model whose parameters are all frozen",
                remedy="requires_grad_() on those that learn",
            )

    @property
    def saved_names(self) -> list[str]:
        """Of all that a state dict holds, on all ranks; what is tied has its first name alone."""
        tied = self.program.captured.tied
        return list(dict.fromkeys(tied.get(name, name) for name in self._names))

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole tensors under the names of the original model's state dict; the caller's own. All
        ranks ask for it together."""
        return gather_state(self, self.state_dict(), "full_state_dict()")

    def full_grads(self) -> dict[str, Tensor]:
        """Whole gradients under the original names, where there are some, in the same manner."""
        return gather_state(self, self._gradients(), "full_grads()")

    _written_whole, expert_balance = save_with_full_state, expert_balance

    def _gradients(self) -> dict[str, Tensor]:
        self.backend.sum_waiting()
        every = ((name, parameter.grad) for name, parameter in self.named_parameters())
        return {name: gradient for name, gradient in every if gradient is not None}

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; the norm before.

        It is that of the whole model, every parameter counted once, and the same on every rank.
        `torch.nn.utils.clip_grad_norm_(module.parameters(), ...)` does the same without a pipeline
        (of what is cut over two axes torch logs that it makes two sums, where this makes one).
        On a rank of a pipeline it would see the gradients of this rank's stages alone, and scale
        them by another number than other ranks do: use this method there.
        """
        with self.backend.local_checks():
            if not norm_type > 0:
                raise InvalidInput(
                    "the norm of gradients is of a positive order, or inf",
                    got=f"norm_type={norm_type!r}",
                    remedy="norm_type=2.0",
                )
        with self.backend.guard():
            total = self.backend.norm(self._gradients(), float(norm_type))
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, total)
        return total

    def _kept(self) -> Mapping[str, Tensor]:
        """The parameters and buffers by name, as they are in the tree now."""
        if self._tensors.changed:
            self._tensors.take()
            self._programs.bind(self._tensors.values)
        return self._tensors.values

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load pieces, as `state_dict` gives them, or whole tensors, as `full_state_dict` does.

        On a rank of a pipeline, what belongs to other ranks is left out.
        """
        aliases = self.program.captured.tied
        own, given = self.state_dict(keep_vars=True), dict(state_dict)
        for name, value in state_dict.items():
            if name not in own and name in self._names:
                del given[name]
            elif _is_whole_of(value, own.get(name)):
                first = aliases.get(name, name)
                layout = self._layouts[first]
                given[name] = self.backend.cut(first, value.detach(), layout)
        return super().load_state_dict(given, strict, assign)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        for name, kept in self._tensors.values.items():
            before = torch.empty(0, dtype=kept.dtype, device=kept.device)
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise InvalidInput(
                    "a parallel module keeps the dtype and the device that it was planned for",
                    got=f"{name}: {before.dtype} on {before.device} to {after.dtype} on "
                    f"{after.device}",
                    remedy="convert the model first, then parallelize it",
                )
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidInput(
            "a parallel module is bound to the ranks that run it: it is not copied or pickled",
            got="copy.deepcopy (as AveragedModel does) or pickle of a ParallelModule",
            remedy="parallelize the model again with plan=module.plan and load full_state_dict(), "
            "or save that. For a moving average: clones of named_parameters(), lerp_() after each "
            "update, and load_state_dict(average, strict=False) into a second such module",
        )

    def __deepcopy__(self, memo: dict) -> Any:
        return self.__reduce_ex__(2)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, [super().extra_repr(), f"mesh={self.program.mesh}"]))


RESERVED_NAMES = frozenset(dir(ParallelModule)).union(
    *(get_annotations(kind) for kind in ParallelModule.__mro__)
)


def _is_whole_of(value: Any, own: Any) -> bool:
    """Whether `value` is a whole tensor of which a rank has `own`."""
    is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return is_plain and isinstance(own, DTensor) and value.shape == own.shape
