"""Parallel module: a parallel program with the interface of the model that it was made from."""

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
from autopar.layout import Layout
from autopar.plans.plan import Plan
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.backends.program_checks import ProgramChecks
from autopar.runtime.batches.batch_checks import BatchCheck, SliceCheck
from autopar.runtime.module.call_outputs import user_outputs, wants_outputs
from autopar.runtime.module.loss_scale import (
    LossScale,
    require_scale,
    restore_gradients,
    set_gradients_aside,
)
from autopar.runtime.module.programs import Programs
from autopar.runtime.module.refused_wrappers import RefusesWrappers
from autopar.runtime.module.running_program import ModuleCall, RunningProgram
from autopar.runtime.module.runs import RunsBatches
from autopar.runtime.module.step_arguments import split_step_arguments
from autopar.runtime.module.step_loss import StepLoss
from autopar.runtime.module.submodule_view import (
    ClosedModule,
    ModelAttributes,
    add_submodule_views,
    attach_model_state,
    class_like,
    refuse_late_hooks,
    register_tensor,
    require_free_attributes,
    warn_about_state_hooks,
)
from autopar.runtime.module.training_modes import TrainingModes
from autopar.runtime.observation.expert_balance import expert_balance
from autopar.runtime.observation.step_figures import StepListeners
from autopar.runtime.observation.step_observation import StepObservation
from autopar.runtime.parameters.gather_state import gather_state, save_with_full_state
from autopar.runtime.parameters.gradient_norm import limit_norm
from autopar.runtime.parameters.initial_values import InitialValues
from autopar.runtime.parameters.old_parameters import note_old_parameters
from autopar.runtime.parameters.refused_optimizers import register_module
from autopar.runtime.parameters.tensor_tree import ModuleTensors
from autopar.tensor_type import TensorType
from autopar.text.units import counted


class ParallelModule(RunsBatches, RefusesWrappers, ModelAttributes, StepObservation, Parallel):
    """A module that is called and differentiated like the original; `step` takes a global batch.

    A call runs the whole batch at once, a step runs the plan's micro-batches; the planned memory is
    that of steps. In a pipeline calls run forward alone, under `torch.no_grad()`, in micro-batches
    if these give the same. Other batches, modes and arguments make other programs on the same
    parameters, which `programs` lists. A call returns whole, plain tensors in the model's output
    type, equal on all ranks. With `outputs="dtensor"` or `"local"` cut tensors stay in pieces.

    The module and its submodules have the classes, attributes and methods of the model's, except
    names that a ParallelModule reserves. Methods such as `generate()` call this module; submodules
    do not run themselves. Parameters and buffers keep all their names. Freeze and replace them on
    all ranks alike: `check=True` compares frozen ones. Set DTensors by `copy_()`, not by `.data`.
    """

    program: RuntimeProgram
    plan: Plan
    backend: Backend
    _check: ProgramChecks | None
    _batch_check: BatchCheck | None = None
    _layouts: dict[str, Layout]
    _names: tuple[str, ...]

    def __new__(cls, model: nn.Module, *args: Any, **kwargs: Any) -> ParallelModule:
        kind: Any = class_like(cls, type(model))
        return object.__new__(kind)

    def __init__(
        self,
        model: nn.Module,
        program: RuntimeProgram,
        plan: Plan,
        backend: Backend,
        *,
        check: ProgramChecks | None = None,
        values: InitialValues | None = None,
    ) -> None:
        """Place the tensors and bind the planned program; `values` None: those of the model."""
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
        placed_tensors = values.place(backend, types)
        for name, value in values.tensors.items():
            if (placed := placed_tensors.pop(name)) is None:
                continue
            if isinstance(value, nn.Parameter):
                placed = nn.Parameter(placed, requires_grad=value.requires_grad)
            for full_name in names[name]:
                is_saved = full_name in self._names
                register_tensor(self, full_name, placed, types[name], is_persistent=is_saved)
        scaled = plan.precision is not None and plan.precision.loss_scale is not None
        self.loss_scale = LossScale() if scaled else None
        self._peak = None
        rank = backend.world.rank if isinstance(backend, TorchBackend) else 0
        self._listeners = StepListeners(rank, backend.device)
        modes = TrainingModes(self, plan.original)
        self._tensors = ModuleTensors(self, captured.tied, program.was_trainable)
        backend.bind(self._tensors.values)
        self._programs = Programs(plan, backend, modes, self._tensors)
        self.copy_attributes(model, {*RESERVED_NAMES, *vars(self)})
        if captured.effects:
            require_free_attributes(captured.effects, RESERVED_NAMES)
            attach_model_state(self, model, captured.effects)
        warn_about_state_hooks(model)
        note_old_parameters(model, self)
        if isinstance(backend, TorchBackend):
            register_module(self, has_stages=bool(program.stages))

    def close(self) -> None:
        """Release the parameters, buffers, programs and gradients of this module.

        Process groups stay with the world, for the next module on the same ranks."""
        for module in self.modules():
            module._parameters.clear()
            module._buffers.clear()
        if not isinstance(self.backend, ClosedModule):
            self._programs.close()
            self._programs = cast(Programs, ClosedModule())
            self._tensors = cast(ModuleTensors, ClosedModule())
        self._check = None
        self.backend = cast(Backend, ClosedModule())

    def __enter__(self) -> ParallelModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def graph(self) -> Listing:
        """Return this rank's program; on the virtual mesh, that of all ranks."""
        return Listing(self.backend.graph())

    @property
    def graphs(self) -> list[Listing]:
        """Return the programs of all stages."""
        count = len(self.program.stages)
        return [Listing(self.backend.graph(i)) for i in range(count)] or [self.graph]

    @property
    def programs(self) -> Programs:
        """Return all programs on these parameters, the planned one first; prints as a table.

        The first call with another structure, shape, dtype, mode or plain value makes a program.
        All sizes of a range of `dynamic_shapes` count as one. Each program has a `plan`; `plan`,
        `program`, `graph` and `memory` of the module are those of the first."""
        _ = self.backend.program  # refuse a closed module
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
            call = self._accept(args, kwargs, is_step=False)
        self._programs.exchange_numbers(call)
        with self.backend.local_checks():
            self._look_up(call)
        running = self._build(call)
        self._check_together(call)
        with self.backend.guard(), switched(()):
            program, backend = running.call_form
            inputs = call.apply_writes(running, self._tensors.values) | self.backend.draw(program)
            outputs = backend.call(self._tensors.values, inputs)
            carry_out_all(program.captured.effects, self, outputs)
            return user_outputs(program, args, kwargs, outputs)

    def _accept(self, args: tuple, kwargs: Mapping[str, Any], **options: bool) -> ModuleCall:
        """Return the record of a call on this rank, or refuse the call."""
        require_same(self.plan.original.example.autocasts)
        refuse_late_hooks(self, self._current_tensors(), is_step=options["is_step"])
        return self._programs.accept(args, kwargs, **options)

    def _look_up(self, call: ModuleCall) -> None:
        """Find the program of a call among the known ones, or refuse the call."""
        self._programs.look_up(call)
        if self._check is not None:
            self._check.check_locally(call, self._programs[0])

    def _build(self, call: ModuleCall) -> RunningProgram:
        """Return the program of a call, made if it is new."""
        running = self._programs.build(call)
        require_free_attributes(running.plan.original.effects, RESERVED_NAMES)
        return running

    def _check_together(self, call: ModuleCall) -> None:
        if self._check is not None:
            with self.backend.guard(agreed=True):
                self._check.compare_ranks(call.args, call.kwargs, dict(self.named_parameters()))
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
        """Run forward and backward of one global batch in micro-batches; return the batch's loss.

        Gradients add up over steps until `zero_grad()`. A step that breaks off leaves them as they
        were. An argument `scale` or `outputs` of forward itself must be in the example call.

        Args:
            args, kwargs: The arguments of the model's call.
            scale: A factor of the gradients, not of the returned loss. Example: 1/n in each of n
                steps that make one update. None: 1.
            outputs: Whether to return the model's outputs, too: detached, whole, in its own type.
                Those of micro-batches are joined or summed; others are refused. Default: False.
        """
        with torch.inference_mode(False), torch.enable_grad():
            begun = self._listeners.begin()
            with self.backend.local_checks():
                example = self.program.captured.example
                options: dict[str, Any] = {"scale": scale, "outputs": outputs}
                kwargs, options = split_step_arguments(example, args, kwargs, options)
                with_outputs = wants_outputs(options["outputs"])
                call = self._accept(args, kwargs, is_step=True, with_outputs=with_outputs)
                self._require_learning(tree_leaves((args, kwargs)))
            self._programs.exchange_numbers(call)
            with self.backend.local_checks():
                self._look_up(call)
                dtype = call.require_step(with_outputs=with_outputs)
                factor = require_scale(options["scale"], dtype)
            running = self._build(call)
            self._check_together(call)
            with self.backend.guard(), switched(()):
                program, backend = running.step_form(with_outputs=with_outputs)
                tensors = self._tensors.values
                inputs = call.apply_writes(running, tensors) | backend.draw(program)
                batches = backend.split(inputs)
                options = {"with_outputs": with_outputs, "factor": factor}
                loss, results = self._run_step(backend, tensors, batches, **options)
                carry_out_all(program.captured.effects, self, results)
        self._listeners.notify(begun, loss, running.plan)
        result = StepLoss.of(loss)
        return (result, program.structure(results)) if with_outputs else result

    def no_sync(self) -> AbstractContextManager[None]:
        """Defer sums of gradients over ranks to the first backward pass or step outside.

        Inside, gradients are partial sums (`parameter.grad` is a DTensor with `Partial()`). Some
        are summed each time nevertheless: gradients in pieces (zero2, zero3), in another dtype or
        scaled, a pipeline's, those of other programs than the planned one, and all if a parameter
        has a gradient from outside. A `step()` in micro-batches sums once by itself."""
        return self.backend.no_sync() if self.loss_scale is None else nullcontext()

    def _run_step(
        self,
        backend: Backend,
        tensors: Mapping[str, Tensor],
        batches: Sequence[Mapping[str, Tensor]],
        *,
        with_outputs: bool,
        factor: float,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run a step with scaled gradients; if it breaks off, restore the earlier ones."""
        before, scaled, is_good = set_gradients_aside(tensors.values()), self.loss_scale, True
        scale = 1.0 if scaled is None else scaled.value
        options = {"with_outputs": with_outputs, "is_first": all(g is None for _, g in before)}
        try:
            with self.backend.stale_weights.reading(tensors, is_first=options["is_first"]):
                results = backend.step(tensors, batches, loss_gradient=factor * scale, **options)
            if scaled is not None:
                is_good = bool(self.backend.norm(self._gradients(), 1.0).isfinite())
        except BaseException:
            restore_gradients(before, scale, is_good=False)
            raise
        restore_gradients(before, scale, is_good=is_good)
        if scaled is not None:
            scaled.update(is_good=is_good)
        return results

    def _require_learning(self, inputs: Iterable[Any]) -> None:
        """Refuse a step without gradients; a rank with some of the stages cannot tell."""
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
        """Return the names of a state dict of all ranks; tied tensors have their first name."""
        tied = self.program.captured.tied
        return list(dict.fromkeys(tied.get(name, name) for name in self._names))

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return copies of the whole tensors by original name; all ranks call this together."""
        return gather_state(self, self.state_dict(), "full_state_dict()")

    def full_grads(self) -> dict[str, Tensor]:
        """Return copies of the whole gradients that exist, under the original names, likewise."""
        return gather_state(self, self._gradients(), "full_grads()")

    _written_whole, expert_balance = save_with_full_state, expert_balance

    def _gradients(self) -> dict[str, Tensor]:
        self.backend.sum_waiting()
        gradients = ((name, parameter.grad) for name, parameter in self.named_parameters())
        return {name: gradient for name, gradient in gradients if gradient is not None}

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients to a norm of at most `max_norm`; return the norm before.

        The norm is that of the whole model, every parameter counted once, on every rank. Without a
        pipeline `torch.nn.utils.clip_grad_norm_(module.parameters(), ...)` does the same, slower.
        On a rank of a pipeline it is refused: it would see this rank's stages alone."""
        with self.backend.local_checks():
            if not norm_type > 0:
                raise InvalidInput(
                    "the norm of gradients is of a positive order, or inf",
                    got=f"norm_type={norm_type!r}",
                    remedy="norm_type=2.0",
                )
        with self.backend.guard():
            gradients = self._gradients()
            total = self.backend.norm(gradients, float(norm_type))
        return limit_norm(gradients.values(), max_norm, total)

    def _current_tensors(self) -> Mapping[str, Tensor]:
        """Return the parameters and buffers by name, as they are in the module tree now."""
        if self._tensors.has_changed:
            self._tensors.accept_changes()
            self._programs.bind(self._tensors.values)
        return self._tensors.values

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load pieces, as from `state_dict`, or whole tensors, as from `full_state_dict`; skip the
        tensors of other ranks of a pipeline."""
        aliases = self.program.captured.tied
        self.backend.stale_weights.clear()
        local_, to_load = self.state_dict(keep_vars=True), dict(state_dict)
        for name, value in state_dict.items():
            if name not in local_ and name in self._names:
                del to_load[name]
            elif _is_whole_of(value, local_.get(name)):
                first = aliases.get(name, name)
                layout = self._layouts[first]
                to_load[name] = self.backend.cut(first, value.detach(), layout)
        return super().load_state_dict(to_load, strict, assign)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        for name, tensor in self._tensors.values.items():
            before = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
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


def _is_whole_of(value: Any, piece: Any) -> bool:
    """Return whether `value` is the whole of a DTensor of which this rank has a piece."""
    is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return is_plain and isinstance(piece, DTensor) and value.shape == piece.shape
