"""Executor: a rank does the list that a schedule has for it, literally.

    runner = RankRunner(schedule, rank, workers, transport)
    runner.start()
    while not runner.done:
        runner.advance()          # waits for the input of its next action, does it, sends

What moves between stages goes through a `Transport`, each message under its own key: direction,
pipe, the stage that receives it, and the micro-batch. Sends never block, so whatever order the
checker accepts comes to its end. `recorded` is what was done, and the most that was kept at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.profiler import record_function

from autopar._torch.autograd import is_profiling
from autopar.errors import InvalidInput
from autopar.pipeline.running.worker import Value, Worker
from autopar.pipeline.schedule import WORDS, Action, Schedule
from autopar.text.units import counted


@dataclass(frozen=True)
class MessageKey:
    """One message: forward to `stage`, or backward to it."""

    forward: bool
    pipe: int
    stage: int  # that receives
    microbatch: int


def messages_of(schedule: Schedule, action: Action, *, sent: bool) -> list[tuple[MessageKey, int]]:
    """The messages that an action sends, or waits for; the rank that receives or sends each."""
    forward, pipe = action.kind == "F", action.pipe
    other = action.stage + (1 if forward == sent else -1)
    if action.kind == "W" or not 0 <= other < schedule.stages:
        return []
    neighbour = schedule.rank_of(pipe, other)
    stage = other if sent else action.stage
    return [(MessageKey(forward, pipe, stage, one), neighbour) for one in action.microbatches]


class Transport(Protocol):
    """Carries messages between the ranks of a pipeline."""

    def start(self) -> None:
        """A step begins."""

    def expect(self, key: MessageKey, sender: int) -> None:
        """This message will be wanted soon."""

    def receive(self, key: MessageKey, sender: int) -> list[Value]:
        """Wait for a message."""

    def send(self, key: MessageKey, receiver: int, values: list[Value]) -> None:
        """Send a message without waiting for anybody."""

    def arrived(self, key: MessageKey) -> bool:
        """Whether `receive` would not wait."""


@dataclass
class Recorded:
    """What one rank did in its last step."""

    order: list[Action] = field(default_factory=list)
    peak_activations: float = 0.0


@dataclass
class StepTimes:
    """When a rank did what in one step."""

    actions: list[tuple[Action, float, float]] = field(default_factory=list)  # each from, to
    end: float = 0.0  # of all that came after the last action


@dataclass(eq=False)
class Recorder:
    """Takes the times of so many steps of a rank, as long as somebody keeps it."""

    wanted: int
    clock: Callable[[], float]
    steps: list[StepTimes] = field(default_factory=list)  # those that ended well

    @property
    def left(self) -> int:
        return self.wanted - len(self.steps)


Workers = Mapping[tuple[int, int], Worker]


class RankRunner:
    """Does one rank's actions of a step, one after another."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        workers: Workers,
        transport: Transport,
        after: Callable[[int], None] = lambda position: None,
    ) -> None:
        """`workers` by (pipe, stage). `after(i)` is called when action i is done."""
        self.schedule, self.rank, self.workers = schedule, rank, workers
        self.order, self.transport, self.after = schedule.orders[rank], transport, after
        self._inputs = [*(messages_of(schedule, one, sent=False) for one in self.order), []]
        self._outputs = [messages_of(schedule, one, sent=True) for one in self.order]
        self._kept = [worker.kept for worker in workers.values()]
        self._whole = schedule.chunks * schedule.parts
        self.recorded = Recorded()
        self._recorder: Callable[[], Recorder | None] = lambda: None  # while it is kept
        self._recording: tuple[Recorder, StepTimes] | None = None  # of the step that runs

    def record(self, recorder: Recorder) -> None:
        """Give the times of the next steps to `recorder`."""
        self._recording = None  # of a step that broke off
        earlier = self._recorder()
        if earlier is not None and earlier.left:
            raise InvalidInput(
                "steps are recorded by one recording at a time",
                got=f"another, while {counted(earlier.left, 'step')} of the first are to come",
                remedy="make these steps first, or stop() the first",
            )
        self._recorder = weakref.ref(recorder)

    def start(self) -> None:
        """A step begins."""
        self.recorded = Recorded()
        self.transport.start()
        recorder, self._recording = self._recorder(), None
        if recorder is not None and recorder.left and self.schedule.goes_back:
            self._recording = recorder, StepTimes()

    def finish(self) -> None:
        """The step has ended well: one that has not is no recorded one."""
        if self._recording is not None:
            recorder, times = self._recording
            times.end = recorder.clock()
            recorder.steps.append(times)
            self._recording = None

    @property
    def _position(self) -> int:
        """Of the next action."""
        return len(self.recorded.order)

    @property
    def done(self) -> bool:
        return self._position == len(self.order)

    @property
    def ready(self) -> bool:
        """Whether the input of the next action is there."""
        inputs = self._inputs[self._position]
        return not self.done and all(self.transport.arrived(key) for key, _ in inputs)

    def advance(self) -> None:
        """Do the next action."""
        position, transport = self._position, self.transport
        action, received = self.order[position], {}
        for key, sender in self._inputs[position]:
            received[key.microbatch] = transport.receive(key, sender)
        for key, sender in self._inputs[position + 1]:
            transport.expect(key, sender)
        outputs, recording = self._outputs[position], self._recording
        begun = 0.0 if recording is None else recording[0].clock()
        for number, microbatch in enumerate(action.microbatches):
            values = self._do(action, microbatch, received.get(microbatch, []))
            if outputs:
                transport.send(*outputs[number], values)
        if recording is not None:
            recorder, times = recording
            times.actions.append((action, begun, recorder.clock()))
        self.recorded.order.append(action)
        self.after(position)

    def _do(self, action: Action, microbatch: int, received: list[Value]) -> list[Value]:
        """Run one micro-batch, in a range of its own while a profiler listens; what is sent on."""
        if not is_profiling():
            return self._run(action, microbatch, received)
        pipe = f", pipe {action.pipe}" if self.schedule.pipes > 1 else ""
        place = f"stage {action.stage}, micro-batch {microbatch}{pipe}"
        with record_function(f"{WORDS[action.kind]}: {place}"):
            return self._run(action, microbatch, received)

    def _run(self, action: Action, microbatch: int, received: list[Value]) -> list[Value]:
        worker = self.workers[action.pipe, action.stage]
        if action.kind == "F":
            sent = worker.forward(microbatch, received)
            share = sum(map(len, self._kept)) / self._whole
            self.recorded.peak_activations = max(self.recorded.peak_activations, share)
            return sent
        if action.kind == "B":
            return worker.backward(microbatch, received)
        if action.kind == "I":
            return worker.backward_inputs(microbatch, received)
        worker.backward_weights(microbatch)
        return []


class InProcessTransport:
    """Between ranks that live in one process."""

    def __init__(self) -> None:
        self._values: dict[MessageKey, list[Value]] = {}

    def start(self) -> None:
        self._values.clear()

    def expect(self, key: MessageKey, sender: int) -> None:
        """Nothing has to be made ready."""

    def receive(self, key: MessageKey, sender: int) -> list[Value]:
        return self._values.pop(key)

    def send(self, key: MessageKey, receiver: int, values: list[Value]) -> None:
        self._values[key] = values

    def arrived(self, key: MessageKey) -> bool:
        return key in self._values


def run_together(runners: Sequence[RankRunner]) -> None:
    """One step of the ranks of one process, in turns, each as far as its inputs are there."""
    for runner in runners:
        runner.start()
    while any(not runner.done for runner in runners):
        before = [len(runner.recorded.order) for runner in runners]
        for runner in runners:
            if runner.ready:
                runner.advance()
        assert before != [len(runner.recorded.order) for runner in runners], "a deadlock"
