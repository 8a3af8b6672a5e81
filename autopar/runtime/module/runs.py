"""Runs: training on batches one after another, with a pipeline that stays full.

    for loss in module.run(batches, optimizer):
        print(loss)

The steps of an asynchronous schedule follow one another without a drain. With any other schedule a
run is a loop of steps and updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.autocasts import switched
from autopar.errors import InvalidInput
from autopar.passes.stages import Stage
from autopar.runtime.backends.backend import Backend
from autopar.runtime.backends.continued_run import ContinuedRun
from autopar.runtime.module.loss_scale import LossScale
from autopar.runtime.module.programs import Programs
from autopar.runtime.module.running_program import ModuleCall, RunningProgram
from autopar.runtime.module.step_loss import StepLoss
from autopar.runtime.observation.step_figures import StepListeners
from autopar.runtime.parameters.tensor_tree import ModuleTensors
from autopar.strategies.node_info import info


class RunsBatches(nn.Module):
    """A module whose steps can follow one another without a drain."""

    _accept: Callable[..., ModuleCall]
    _look_up: Callable[[ModuleCall], None]
    _build: Callable[[ModuleCall], RunningProgram]
    _check_together: Callable[[ModuleCall], None]
    _require_learning: Callable[[Iterable[Any]], None]
    step: Callable[..., Any]

    backend: Backend
    loss_scale: LossScale | None  # scales the loss of a step; None: no scaling
    _listeners: StepListeners
    _programs: Programs
    _tensors: ModuleTensors

    def run(self, batches: Iterable[Any], optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        """Train on batches one after another, with an update for each; yield the loss of each.

        A pipeline with `asynchronous=True` stays full: it takes batches before the update of the
        one whose loss comes next. Those are dropped if the loop ends early. At each loss the
        gradients are those of its batch, and `optimizer` has applied them.

        Args:
            batches: The global batches: a tensor, a tuple or list of the arguments of the model's
                call, or a mapping of keyword arguments. All have the sizes of the first.
            optimizer: Its `step()` makes the updates. Gradients are dropped before each.
        """
        if not any(self.backend.program.schedule.delays):
            return self._run_step_by_step(batches, optimizer)
        return self._run_without_drains(batches, optimizer)

    def _run_step_by_step(
        self, batches: Iterable[Any], optimizer: torch.optim.Optimizer
    ) -> Iterator[Tensor]:
        for batch in batches:
            args, kwargs = _arguments(batch)
            self.zero_grad()
            loss = self.step(*args, **kwargs)
            optimizer.step()
            yield loss

    def _run_without_drains(
        self, batches: Iterable[Any], optimizer: torch.optim.Optimizer
    ) -> Iterator[Tensor]:
        waiting = iter(batches)
        first = next(waiting, None)
        if first is None:
            return
        call, running = self._first_call(first)
        backend, tensors = running.backend, self._tensors.values
        end: int | None = None
        with backend.guard():
            run = ContinuedRun(backend, tensors, self.backend.stale_weights)
        try:
            self._add(run, running, call)
            del first, call  # which a run drops with its step
            count = 1
            while end is None or run.number < end:
                begun = self._listeners.begin()
                while end is None and count <= run.number + run.ahead:
                    batch = next(waiting, None)
                    if batch is None:
                        end = count
                        break
                    self._add(run, running, self._next_call(running, batch))
                    count += 1
                if end is not None and run.number == end:
                    break
                self.zero_grad()
                with torch.inference_mode(False), torch.enable_grad():
                    loss = self._step_of_run(run, end)
                with run.updating():
                    optimizer.step()
                self._listeners.notify(begun, loss, running.plan)
                yield StepLoss.of(loss)
        except GeneratorExit:
            run.close()
            raise
        except BaseException:
            run.close(is_broken=True)
            raise
        run.close()

    def _step_of_run(self, run: ContinuedRun, end: int | None) -> Tensor:
        with self.backend.guard(), switched(()):
            return run.step(end)

    def _first_call(self, batch: Any) -> tuple[ModuleCall, RunningProgram]:
        """Return the call and the program of the first batch; refuse what no run does."""
        args, kwargs = _arguments(batch)
        with self.backend.local_checks():
            call = self._accept(args, kwargs, is_step=True)
            self._require_learning(pytree.tree_leaves((args, kwargs)))
        self._programs.exchange_numbers(call)
        with self.backend.local_checks():
            self._look_up(call)
            call.require_step(with_outputs=False)
        running = self._build(call)
        self._check_together(call)
        with self.backend.local_checks():
            _require_plain(running, self.loss_scale)
        return call, running

    def _next_call(self, running: RunningProgram, batch: Any) -> ModuleCall:
        """Return the call of a later batch, of the first one's program."""
        args, kwargs = _arguments(batch)
        with self.backend.local_checks():
            call = self._accept(args, kwargs, is_step=True)
            call.inputs, call.running = running.bind(call), running
            if call.inputs is None:
                raise InvalidInput(
                    "all batches of a run have the sizes, dtypes and plain values of the first",
                    got=f"{call.signature}, after {running.signature}",
                    remedy="drop_last=True of a DataLoader, or another run for the others",
                )
        return call

    def _add(self, run: ContinuedRun, running: RunningProgram, call: ModuleCall) -> None:
        with self.backend.guard(), torch.inference_mode(False):
            inputs = call.apply_writes(running, self._tensors.values)
            run.add(inputs, running.plan.program.captured.draw())


def _arguments(batch: Any) -> tuple[tuple, Mapping[str, Any]]:
    """Return the arguments of the call that takes a batch."""
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def _require_plain(running: RunningProgram, loss_scale: LossScale | None) -> None:
    """Refuse programs whose steps depend on more than the weights of the steps before."""
    original, program = running.plan.original, running.plan.program
    changed = {*program.captured.mutations}
    read = {name for stage in program.stages for name in _buffers_read(stage)}
    reasons = {
        "a forward that writes attributes, inputs or parameters": original.effects
        or original.writes
        or original.contents
        or original.bounds,
        f"a forward that reads {', '.join(sorted(changed & read))}": changed & read,
        "precision with a loss scale": loss_scale,
        f"{', '.join(sorted(program.on_host)[:3])} on the host": program.on_host,
    }
    for subject, reason in reasons.items():
        if reason:
            raise InvalidInput(
                "a run begins steps before the updates of earlier ones: weights on the device, and "
                "buffers that no forward reads, are all that passes from step to step",
                got=subject,
                remedy="a loop over step(), which drains the pipeline each time",
            )


def _buffers_read(stage: Stage) -> list[str]:
    nodes = [info(node).origin for node in stage.graph.nodes if node.op == "placeholder"]
    return [name for kind, name in nodes if kind in ("buffer", "before")]
