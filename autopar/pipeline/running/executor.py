"""Executor: each rank does its actions of a schedule in the listed order.

    runner = RankRunner(schedule, rank, workers, transport)
    runner.start()
    while not runner.done:
        runner.advance()          # waits for the input of its next action, does it, sends

What moves between stages goes through a `Transport`, each message under its own key: direction,
pipe, receiving stage and micro-batch. Sends never block, so every order that the checker accepts
comes to its end. `recorded` lists the actions that were done, and the peak of activations.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.profiler import record_function

from autopar._torch.autograd import is_profiling
from autopar.errors import InvalidInput
from autopar.pipeline.running.movement_spans import MovementSpan
from autopar.pipeline.running.worker import Value, Worker
from autopar.pipeline.schedule import KIND_NAMES, KINDS, Action, Schedule
from autopar.text.units import counted


@dataclass(frozen=True)
class MessageKey:
    """Identify one message, which goes forward or backward to `stage`."""

    forward: bool
    pipe: int
    stage: int  # the receiver
    microbatch: int


def messages_of(schedule: Schedule, action: Action, *, sent: bool) -> list[tuple[MessageKey, int]]:
    """Return the messages that an action sends, or awaits, each with its receiver or sender."""
    forward, pipe = action.kind == "F", action.pipe
    other = action.stage + (1 if forward == sent else -1)
    if action.kind not in ("F", "B", "I") or not 0 <= other < schedule.stages:
        return []
    neighbour = schedule.rank_of(pipe, other)
    stage = other if sent else action.stage
    return [(MessageKey(forward, pipe, stage, m), neighbour) for m in action.microbatches]


class Transport(Protocol):
    """Carries messages between the ranks of a pipeline."""

    def start(self) -> None:
        """Begin a step."""

    def expect(self, key: MessageKey, sender: int) -> None:
        """Prepare for a message that will be received soon."""

    def receive(self, key: MessageKey, sender: int) -> list[Value]:
        """Wait for a message and return its values."""

    def send(self, key: MessageKey, receiver: int, values: list[Value]) -> None:
        """Send a message without waiting for anybody."""

    def arrived(self, key: MessageKey) -> bool:
        """Return whether `receive` would not wait."""


@dataclass
class RankRecord:
    """List the actions of a rank in its last step, with the peak of its activations."""

    order: list[Action] = field(default_factory=list)
    peak_activations: float = 0.0


@dataclass
class StepTimes:
    """List when a rank did each action of one step."""

    actions: list[tuple[Action, float, float]] = field(default_factory=list)  # with start and end
    movements: list[MovementSpan] = field(default_factory=list)  # gathers and sums beside actions
    end: float = 0.0  # of the work after the last action


@dataclass(eq=False)
class Recorder:
    """Record the times of `wanted` steps of a rank, as long as somebody references it."""

    wanted: int
    clock: Callable[[], float]
    steps: list[StepTimes] = field(default_factory=list)  # without errors

    @property
    def left(self) -> int:
        return self.wanted - len(self.steps)


Workers = Mapping[tuple[int, int], Worker]


class RankRunner:
    """Do one rank's actions of a step, one after another."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        workers: Workers,
        transport: Transport,
        on_action_done: Callable[[int], None] = lambda position: None,
        before_action: Callable[[Action], None] = lambda action: None,
    ) -> None:
        """Prepare the messages of all actions; call `before_action` with each action before it is
        done, and `on_action_done(i)` when action i is done."""
        self.schedule, self.rank, self.workers = schedule, rank, workers
        self.transport = transport
        self.on_action_done, self.before_action = on_action_done, before_action
        self.set_order(schedule.orders[rank])
        self._kept = [worker.kept for worker in workers.values()]
        self._entries_per_microbatch = schedule.chunks * schedule.parts * schedule.slice_count
        self.recorded = RankRecord()
        self._recorder: Callable[[], Recorder | None] = lambda: None  # a weak reference
        self._recording: tuple[Recorder, StepTimes] | None = None  # of the running step

    def set_order(self, order: Sequence[Action], following: Sequence[Action] = ()) -> None:
        """Do these actions from the next `start` on; `following`: those that come after them."""
        inputs = [messages_of(self.schedule, a, sent=False) for a in (*order, *following[:1])]
        self.order, self._inputs = order, inputs if following else [*inputs, []]
        self._outputs = [messages_of(self.schedule, action, sent=True) for action in order]

    def record(self, recorder: Recorder) -> None:
        """Give the times of the next steps to `recorder`."""
        self._recording = None  # of a step that failed
        earlier = self._recorder()
        if earlier is not None and earlier.left:
            raise InvalidInput(
                "steps are recorded by one recording at a time",
                got=f"another, while {counted(earlier.left, 'step')} of the first are to come",
                remedy="make these steps first, or stop() the first",
            )
        self._recorder = weakref.ref(recorder)

    def start(self) -> None:
        """Begin a step."""
        self.recorded = RankRecord()
        self.transport.start()
        recorder, self._recording = self._recorder(), None
        if recorder is not None and recorder.left and self.schedule.goes_back:
            self._recording = recorder, StepTimes()

    def finish(self) -> None:
        """End a step without errors, and record it; a step that failed is never recorded."""
        if self._recording is not None:
            recorder, times = self._recording
            times.end = recorder.clock()
            recorder.steps.append(times)
            self._recording = None

    def begin_movement(self, name: str) -> MovementSpan | None:
        """Return the span of a gather or sum that begins now; None if the step is not recorded."""
        if self._recording is None:
            return None
        span = MovementSpan(name, time.perf_counter())
        self._recording[1].movements.append(span)
        return span

    @property
    def _position(self) -> int:
        """Return the position of the next action."""
        return len(self.recorded.order)

    @property
    def done(self) -> bool:
        return self._position == len(self.order)

    @property
    def ready(self) -> bool:
        """Return whether the input of the next action has arrived."""
        inputs = self._inputs[self._position]
        return not self.done and all(self.transport.arrived(key) for key, _ in inputs)

    def advance(self) -> None:
        """Do the next action: wait for its input, run it, send its results."""
        position, transport = self._position, self.transport
        action, received = self.order[position], {}
        for key, sender in self._inputs[position]:
            received[key.microbatch] = transport.receive(key, sender)
        for key, sender in self._inputs[position + 1]:
            transport.expect(key, sender)
        self.before_action(action)
        outputs, recording = self._outputs[position], self._recording
        start = 0.0 if recording is None else recording[0].clock()
        for number, microbatch in enumerate(action.microbatches if action.kind in KINDS else ()):
            values = self._do(action, microbatch, received.get(microbatch, []))
            if outputs:
                transport.send(*outputs[number], values)
        if recording is not None and action.kind in KINDS:
            recorder, times = recording
            times.actions.append((action, start, recorder.clock()))
        self.recorded.order.append(action)
        self.on_action_done(position)

    def _do(self, action: Action, microbatch: int, received: list[Value]) -> list[Value]:
        """Run one micro-batch, in a named range for a profiler; return the values to send."""
        if not is_profiling():
            return self._run(action, microbatch, received)
        pipe = f", pipe {action.pipe}" if self.schedule.pipes > 1 else ""
        place = f"stage {action.stage}, micro-batch {microbatch}{pipe}"
        with record_function(f"{KIND_NAMES[action.kind]}: {place}"):
            return self._run(action, microbatch, received)

    def _run(self, action: Action, microbatch: int, received: list[Value]) -> list[Value]:
        worker = self.workers[action.pipe, action.stage]
        if action.kind == "F":
            sent = worker.forward(microbatch, received)
            share = sum(map(len, self._kept)) / self._entries_per_microbatch
            self.recorded.peak_activations = max(self.recorded.peak_activations, share)
            return sent
        if action.kind == "B":
            return worker.backward(microbatch, received)
        if action.kind == "I":
            return worker.backward_inputs(microbatch, received)
        worker.backward_weights(microbatch)
        return []


class InProcessTransport:
    """Pass values between ranks that live in one process."""

    def __init__(self) -> None:
        self._values: dict[MessageKey, list[Value]] = {}

    def start(self) -> None:
        self._values.clear()

    def expect(self, key: MessageKey, sender: int) -> None:
        """Do nothing: no buffer is needed."""

    def receive(self, key: MessageKey, sender: int) -> list[Value]:
        return self._values.pop(key)

    def send(self, key: MessageKey, receiver: int, values: list[Value]) -> None:
        self._values[key] = values

    def arrived(self, key: MessageKey) -> bool:
        return key in self._values


def run_together(runners: Sequence[RankRunner]) -> None:
    """Run a step on the ranks of one process, in turns, each as far as its inputs allow."""
    for runner in runners:
        runner.start()
    while any(not runner.done for runner in runners):
        before = [len(runner.recorded.order) for runner in runners]
        for runner in runners:
            if runner.ready:
                runner.advance()
        assert before != [len(runner.recorded.order) for runner in runners], "a deadlock"
