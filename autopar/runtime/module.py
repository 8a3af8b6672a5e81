"""ParallelModule: the parallel program in the clothes of the model it was made from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx, nn

from autopar import _torch
from autopar.capture.listing import Listing
from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.lines import frames_to_caller
from autopar.runtime.modes import Modes
from autopar.runtime.part import part_at, refuse_late_hooks
from autopar.runtime.program import Program


class Backend(Protocol):
    """A place where a program runs: the virtual mesh or torch.distributed."""

    def place_parameter(
        self, name: str, value: Tensor, layout: Layout, learn: bool
    ) -> nn.Parameter | None: ...
    def place_buffer(self, name: str, value: Tensor, layout: Layout) -> Tensor | None: ...
    def collect(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]: ...  # copies
    def norm(self, gradients: Mapping[str, Tensor], norm_type: float) -> Tensor: ...
    def input_shapes(self) -> dict[str, tuple[int, ...]]: ...
    def graph(self, stage: int | None = None) -> fx.Graph: ...
    def guard(self) -> AbstractContextManager[None]: ...


class WholeBackend(Backend, Protocol):
    """A place where a program runs whole, one micro-batch after another."""

    def of(self, program: Program) -> WholeBackend: ...
    def begin(self, first: bool, last: bool) -> None: ...
    def run(
        self, kept: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]: ...


class PipelineBackend(Backend, Protocol):
    """A place where the stages of a pipeline run."""

    def step(
        self, kept: Mapping[str, Tensor], batches: Sequence[Mapping[str, Tensor]]
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


class ParallelModule(nn.Module):
    """Called and differentiated like the original; `step` takes a whole global batch.

    A call runs the batch in one go, a step in the micro-batches of the plan: what the plan says of
    memory is for steps. A pipeline runs steps only.

    Parameters and buffers stand under their original names, tied ones under all their names.
    """

    def __init__(self, model: nn.Module, program: Program, plan: Any, backend: Backend) -> None:
        super().__init__()
        self.program, self.plan, self.backend = program, plan, backend
        captured = program.captured
        _refuse_meta(model)
        layouts = {
            name: program.type_of(placeholder).layout
            for placeholder, name in (captured.parameters | captured.buffers).items()
        }
        self._kept: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            layout = layouts.get(name, Layout.replicated(parameter.ndim))
            kept = backend.place_parameter(name, parameter, layout, parameter.requires_grad)
            if kept is None:
                continue
            self._kept[name] = kept
            _owner(self, name).register_parameter(name.rpartition(".")[2], kept)
        for alias, name in captured.tied.items():
            shared = self._kept.get(name)
            if isinstance(shared, nn.Parameter):
                _owner(self, alias).register_parameter(alias.rpartition(".")[2], shared)
        persistent = set(_torch.state_names(model))
        for name, buffer in model.named_buffers():
            layout = layouts.get(name, Layout.replicated(buffer.ndim))
            placed = backend.place_buffer(name, buffer, layout)
            if placed is None:
                continue
            self._kept[name] = placed
            _owner(self, name).register_buffer(
                name.rpartition(".")[2], placed, persistent=name in persistent
            )
        self._names = tuple(_torch.state_names(model))
        self._shapes = program.shapes(backend.input_shapes())
        self._modes = Modes(self, plan.original)
        _tell_of_state_hooks(model)

    @property
    def graph(self) -> Listing:
        """This rank's program: prints one line a node."""
        return Listing(self.backend.graph())

    @property
    def graphs(self) -> list[Listing]:
        """The programs of all stages."""
        count = len(self.program.stages)
        return [Listing(self.backend.graph(i)) for i in range(count)] or [self.graph]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.program.stages:
            raise InvalidInput(
                "a pipeline runs whole steps only: its backward is part of its schedule",
                got=f"a direct call of a program in {len(self.program.stages)} stages",
                remedy="call step(), or parallelize with pipeline=None",
            )
        with self.backend.guard():
            self._modes.require_same_program()
            refuse_late_hooks(self, step=False)
            program, backend = self._direct
            inputs = program.bind(args, kwargs, self._shapes)
            return program.structure(self._run(program, backend, inputs))

    @cached_property
    def _direct(self) -> tuple[Program, WholeBackend]:
        """The program of a whole batch in one go, and where it runs."""
        backend = cast(WholeBackend, self.backend)
        if self.program.batches is None:
            return self.program, backend
        program = self.plan.whole_program
        return program, backend.of(program)

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one global batch, all micro-batches of it: the batch's loss."""
        index = self.program.loss_index
        with self.backend.guard(), torch.inference_mode(False), torch.enable_grad():
            self._modes.require_same_program()
            refuse_late_hooks(self, step=True)
            inputs = self.program.bind(args, kwargs, self._shapes)
            total: Tensor | None = None
            batches = self.program.split(inputs)
            if self.program.stages:
                pipeline = cast(PipelineBackend, self.backend)
                total, mutated = pipeline.step(self._kept, batches)
                self._write(mutated)
                return total
            for number, batch in enumerate(batches):
                whole, is_last = cast(WholeBackend, self.backend), number == len(batches) - 1
                whole.begin(number == 0, is_last)
                later = frozenset() if is_last else self.program.once
                loss = self._run(self.program, whole, batch, later)[index]
                loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole tensors under the names of the original model's state dict; the caller's own."""
        found = self.backend.collect(self.state_dict())
        return {name: found[name] for name in self._names if name in found}

    def full_grads(self) -> dict[str, Tensor]:
        """Whole gradients under the original names, where there are some; the caller's own."""
        held = {
            name: parameter.grad
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }
        found = self.backend.collect(held)
        return {name: found[name] for name in self._names if name in found}

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; the norm before.

        It is that of the whole model, every parameter counted once, and the same on every rank.
        `torch.nn.utils.clip_grad_norm_(module.parameters(), ...)` does the same without a pipeline.
        On a rank of a pipeline it would see the gradients of this rank's stages alone, and scale
        them by another number than other ranks do: use this method there.
        """
        if not norm_type > 0:
            raise InvalidInput(
                "the norm of gradients is of a positive order, or inf",
                got=f"norm_type={norm_type!r}",
                remedy="norm_type=2.0",
            )
        gradients = {
            name: parameter.grad
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }
        with self.backend.guard():
            total = self.backend.norm(gradients, float(norm_type))
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, total)
        return total

    def _run(
        self,
        program: Program,
        backend: WholeBackend,
        inputs: Mapping[str, Tensor],
        later: Set[str] = frozenset(),
    ) -> list[Tensor]:
        """The outputs; buffers change, but for those in `later`."""
        # Backward may still read what a buffer was before its new value is written.
        before = {name: self._kept[name].clone() for name in program.captured.mutations}
        outputs, mutated = backend.run(self._kept | before, inputs)
        self._write({name: value for name, value in mutated.items() if name not in later})
        return outputs

    def _write(self, buffers: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in buffers.items():
                self._kept[name].copy_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        for name, kept in self._kept.items():
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
            got="copy.deepcopy or pickle of a ParallelModule",
            remedy="parallelize the model again with plan=module.plan and load full_state_dict(), "
            "or save that",
        )

    def extra_repr(self) -> str:
        return f"mesh={self.program.mesh}"


def _owner(root: nn.Module, name: str) -> nn.Module:
    """The submodule that holds `name`, made on the way."""
    path = name.rpartition(".")[0]
    part = part_at(root, path)
    if part is None:
        raise InvalidInput(
            "submodules keep their names beside those of the parallel module itself",
            got=f"{path}, which a ParallelModule has for itself",
            remedy="give the submodule another name",
        )
    return part


def _tell_of_state_hooks(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if _torch.state_hooks(module):
            warnings.warn(
                f"hooks of {path or 'the model'} on state_dict do not run: full_state_dict() has "
                "the names of parameters and buffers",
                stacklevel=frames_to_caller(),
            )


def _refuse_meta(model: nn.Module) -> None:
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.device.type == "meta":
            raise InvalidInput(
                "a program that runs needs parameters with data",
                got=f"{name} is on the meta device",
                remedy="materialise the model first (model.to_empty, then initialise); "
                "plan() alone needs no data",
            )
