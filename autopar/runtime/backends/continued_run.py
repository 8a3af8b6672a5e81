"""Continued run: steps of an asynchronous pipeline that follow one another without a drain.

    run = ContinuedRun(backend, tensors, step_inputs)
    run.add(inputs)              # of step 0, and of as many more as `run.ahead`
    loss = run.step(end=None)    # to the update of step 0; forwards of the next steps are under way
    with run.updating():
        optimizer.step()

Each rank goes to its own next update: it waits for values of its neighbours, not for the slowest.
Before each action the weights of its stage get the version that its step reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from autopar._torch.communication import wait_for
from autopar.pipeline.continued_steps import ContinuedSteps
from autopar.pipeline.running.continued_messages import ContinuedMessages
from autopar.pipeline.running.executor import InProcessTransport, RankRunner, Transport
from autopar.pipeline.running.worker import sum_in_order
from autopar.pipeline.schedule import Action
from autopar.runtime.backends.backend import Backend, Batch
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.backends.loss_shares import received_loss
from autopar.runtime.backends.stage_messages import Messages
from autopar.runtime.parameters.stale_weights import StaleWeights

_Work = dist.Work | None


class ContinuedRun:
    """The steps of a backend whose schedule is asynchronous, from fill to drain."""

    def __init__(
        self, backend: Backend, tensors: Mapping[str, Tensor], stale: StaleWeights
    ) -> None:
        """`stale`: the older versions of the module's parameters, for all of its programs."""
        self.backend, self.stale = backend, stale
        self.steps = ContinuedSteps(backend.schedule)
        self.ahead, self.number = self.steps.ahead, 0
        self._tensors, self._batches = tensors, RunBatches(self.steps.period)
        self._names = {n: run.stage.holds("parameter") for n, run in backend.stages.items()}
        self._ended_at: int | None = None  # the number of all steps, once it is known
        # Losses of steps that other ranks are still to receive, with their sums.
        self._sent: list[tuple[Tensor, dist.Work]] = []
        self._transport: Transport = _RunTransport()
        if isinstance(backend, TorchBackend):
            times = ContinuedMessages(self.steps)
            shapes = backend.message_shapes
            self._transport = RunMessages(backend.ranks, shapes, backend.device, times)
            backend.loss_shares.is_summed_in_steps = False
        self._reports = [_StepReport(self, r, self._transport) for r in backend.runners]
        self.stale.take_up(tensors)
        backend.begin_run(tensors, self._batches)
        self.stale.is_running = True

    def add(self, inputs: Mapping[str, Tensor], draws: Mapping[str, Tensor]) -> None:
        """Add the batch of one more step; `draws`: its random numbers, of which those of rank 0
        count."""
        backend, works = self.backend, list[_Work]()
        if isinstance(backend, TorchBackend) and backend.world.size > 1:
            draws = {name: value.to(backend.world.carrier) for name, value in draws.items()}
            works = [
                dist.broadcast(value, 0, group=backend.world.group, async_op=True)
                for value in draws.values()
            ]
            self._sent += [(value, work) for value, work in zip(draws.values(), works) if work]
            works = [] if backend.world.rank == 0 else works

        def split() -> list[dict[str, Tensor]]:
            for work in works:
                if work is not None:
                    wait_for(work)
            return backend.split({**inputs, **draws})

        self._batches.add(split)

    def step(self, end: int | None = None) -> Tensor:
        """Run the next step to its updates and return its loss; leave out what belongs to steps
        from `end` on."""
        backend, number = self.backend, self.number
        self._ended_at, self._batches.current = end, number
        for runner in backend.runners:
            order = self.steps.order(runner.rank, number, end)
            last = number + 1 + self.ahead if end is None else end
            following = () if number + 1 == end else self.steps.order(runner.rank, number + 1, last)
            # What a forward reads is sent before the update of this step, and so always comes.
            runner.set_order(order, following if following and following[0].kind == "F" else ())
        for report in self._reports:
            report.begin()
        if not self._has_losses:
            self._send_loss()
        backend.do_step(is_first=True)
        loss = self._loss()
        for worker in backend.workers.values():
            for microbatch in self._batches:
                worker.outputs.pop(microbatch, None)
                worker.statistics.pop(microbatch, None)
        self._batches.drop()
        for runner in backend.runners:
            runner.finish()
        self.number += 1
        if self.stale.read_newest():
            backend.forget_copies()
        self.stale.keep_newest()
        return loss

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Return the context of the update that follows a step."""
        with self.stale.updating():
            yield
        self.backend.forget_copies()

    def close(self, *, is_broken: bool = False) -> None:
        """End the run: drop what is under way of steps that have not ended. `is_broken`: no other
        rank is waited for."""
        backend = self.backend
        self.stale.is_running = False
        self.stale.read_newest()
        for report in self._reports:
            report.end()
        if isinstance(backend, TorchBackend):
            backend.loss_shares.is_summed_in_steps = True
        if isinstance(self._transport, RunMessages) and not is_broken:
            self._transport.drop(self.steps, self.number - 1, self._ended_at)
            for _, work in self._sent:
                wait_for(work)
        backend.forget_copies()
        backend.begin_run({}, {})

    def read(self, action: Action) -> None:
        """Have the weights of a stage hold the version that an action reads."""
        ahead = self.steps.step_of(action.microbatches[0]) - self.number
        if self.stale.read(self._names[action.stage], ahead):
            self.backend.forget_copies()
        if action.kind != "F":  # a forward asks for what it reads
            self.backend.gather_copies()

    def _losses(self) -> dict[int, Tensor]:
        """Return the losses of this step that this process computes."""
        losses, micro = self.backend.losses(), enumerate(self._batches)
        return {at: losses[microbatch] for at, microbatch in micro if microbatch in losses}

    def _send_loss(self) -> None:
        """Begin the sum of the losses of this step on ranks that compute none, or have all."""
        if isinstance(self.backend, TorchBackend):
            reduced = self.backend.loss_shares.reduce(self._losses(), self.steps.period)
            self._sent += [] if reduced is None else [reduced]

    @property
    def _has_losses(self) -> bool:
        """Return whether this process computes the losses: the last stage is here."""
        return self.backend.schedule.stages - 1 in self.backend.stages

    def _loss(self) -> Tensor:
        """Return the loss of this step; do not wait for ranks that are to receive it."""
        if self._has_losses:
            self._send_loss()
            loss = sum_in_order(self._losses())
        else:
            loss = received_loss(*self._sent.pop())
        self._sent = [(tensor, work) for tensor, work in self._sent if not work.is_completed()]
        return loss


class RunBatches(Mapping[int, Batch]):
    """The micro-batches of the steps that are under way; iterates over those of the step that runs.

    Each step's inputs are cut when its first micro-batch is read."""

    def __init__(self, period: int) -> None:
        self._period, self.current = period, 0
        self._steps: dict[int, Callable[[], list[dict[str, Tensor]]]] = {}
        self._split: dict[int, list[dict[str, Tensor]]] = {}
        self._count = 0

    def add(self, split: Callable[[], list[dict[str, Tensor]]]) -> None:
        """Add a step; `split` returns its micro-batches."""
        self._steps[self._count] = split
        self._count += 1

    def drop(self) -> None:
        """Let go of the step that has run."""
        self._split.pop(self.current, None)
        self._steps.pop(self.current, None)

    def __getitem__(self, microbatch: int) -> Batch:
        step, at = divmod(microbatch, self._period)
        if step not in self._split:
            self._split[step] = self._steps[step]()
        return self._split[step][at]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.current * self._period, (self.current + 1) * self._period))

    def __len__(self) -> int:
        return self._period


class _StepReport:
    """Reports the actions of one step of a run as those of a step alone, whose order has the
    forwards that ran in the step before."""

    def __init__(self, run: ContinuedRun, runner: RankRunner, transport: Transport) -> None:
        self._run, self._runner, self._passed = run, runner, -1
        order = run.steps.one_step.orders[runner.rank]
        self._positions = {(a.kind, a.stage, a.microbatches): at for at, a in enumerate(order)}
        self._of_steps = runner.transport, runner.before_action, runner.on_action_done
        runner.transport = transport
        runner.before_action, runner.on_action_done = self._before, self._done

    def end(self) -> None:
        """Give the runner back to steps alone."""
        runner = self._runner
        runner.transport, runner.before_action, runner.on_action_done = self._of_steps
        runner.set_order(self._run.steps.one_step.orders[runner.rank])

    def begin(self) -> None:
        """Begin the next step."""
        self._passed = -1

    def _position(self, action: Action) -> int | None:
        """Return the position of an action in a step alone; None: it is another step's."""
        first = self._run.number * self._run.steps.period
        microbatches = tuple(microbatch - first for microbatch in action.microbatches)
        return self._positions.get((action.kind, action.stage, microbatches))

    def _before(self, action: Action) -> None:
        if (position := self._position(action)) is not None:
            self._pass(position - 1)
        self._run.read(action)

    def _done(self, at: int) -> None:
        if (position := self._position(self._runner.order[at])) is not None:
            self._pass(position)

    def _pass(self, position: int) -> None:
        for earlier in range(self._passed + 1, position + 1):
            self._run.backend.action_done(earlier)
        self._passed = max(self._passed, position)


class _RunTransport(InProcessTransport):
    """Passes values from step to step, too."""

    def start(self) -> None:
        """Keep the values that the next step reads."""


class RunMessages(Messages):
    """Messages of steps that follow one another."""

    def start(self) -> None:
        """Go on with the messages of the step before."""
        if not self._due:
            super().start()

    def finish(self) -> None:
        """Let sends run on beside the next step."""

    def drop(self, steps: ContinuedSteps, step: int, end: int | None) -> None:
        """Receive what neighbours have sent up to their update of `step`; wait for all sends."""
        for sender, due in self._due.items():
            last = steps.last_place(sender, step)
            while step >= 0:
                key = next(due)
                if self.times.sent_at(key) > last:
                    break
                if end is None or steps.step_of(key.microbatch) < end:
                    self._expect_next(key, sender)
        for values in self._expected.values():
            for _, work in values:
                if work is not None:
                    wait_for(work)
        self._expected.clear()
        self._due.clear()
        super().finish()
