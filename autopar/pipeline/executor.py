"""Executor: a rank does the list that a schedule has for it, literally.

    runner = RankRunner(schedule, rank, workers, post)
    while not runner.done:
        runner.advance()          # waits for the input of its next action, does it, sends

What moves between stages goes through a `Transport`, each message under its own key: direction,
pipe, the stage that receives it, and the micro-batch. Sends never block, so whatever order the
checker accepts comes to its end. `recorded` is what was done, and the most that was kept at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from autopar.pipeline.schedule import Action, Schedule
from autopar.pipeline.worker import Value, Worker


@dataclass(frozen=True)
class Key:
    """One message: forward to `stage`, or backward to it."""

    forward: bool
    pipe: int
    stage: int  # that receives
    slice_: int


def received_by(schedule: Schedule, action: Action) -> list[tuple[Key, int]]:
    """The messages that an action waits for, and the rank that sends each."""
    return _crossing(schedule, action, arrives=True)


def sent_by(schedule: Schedule, action: Action) -> list[tuple[Key, int]]:
    """The messages that an action sends, and the rank that receives each."""
    return _crossing(schedule, action, arrives=False)


def _crossing(schedule: Schedule, action: Action, arrives: bool) -> list[tuple[Key, int]]:
    """The messages between an action and its stage's neighbour, with that one's rank."""
    forward, pipe = action.kind == "F", action.pipe
    other = action.stage + (1 if forward != arrives else -1)
    if action.kind == "W" or not 0 <= other < schedule.stages:
        return []
    neighbour = schedule.rank_of(pipe, other)
    stage = action.stage if arrives else other
    return [(Key(forward, pipe, stage, one), neighbour) for one in action.microbatches]


class Transport(Protocol):
    """Carries messages between the ranks of a pipeline."""

    def expect(self, key: Key, sender: int) -> None:
        """This message will be wanted soon."""

    def receive(self, key: Key, sender: int) -> list[Value]:
        """Wait for a message."""

    def send(self, key: Key, receiver: int, values: list[Value]) -> None:
        """Send a message without waiting for anybody."""

    def arrived(self, key: Key) -> bool:
        """Whether `receive` would not wait."""


@dataclass
class Recorded:
    """What one rank did in its last step."""

    order: list[Action] = field(default_factory=list)
    peak_activations: float = 0.0


Workers = Mapping[tuple[int, int], Worker]


class RankRunner:
    """Does one rank's actions of one step, one after another."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        workers: Workers,
        post: Transport,
        after: Callable[[int], None] = lambda position: None,
    ) -> None:
        """`workers` by (pipe, stage). `after(i)` is called when action i is done."""
        self.schedule, self.rank, self.workers, self.post = schedule, rank, workers, post
        self.order, self.after = schedule.orders[rank], after
        self.recorded = Recorded()
        self._position = 0

    @property
    def done(self) -> bool:
        return self._position == len(self.order)

    @property
    def ready(self) -> bool:
        """Whether the input of the next action is there."""
        return not self.done and all(
            self.post.arrived(key) for key, _ in self._inputs(self._position)
        )

    def advance(self) -> None:
        """Do the next action."""
        action = self.order[self._position]
        inputs = self._inputs(self._position)
        received = {key.slice_: self.post.receive(key, sender) for key, sender in inputs}
        for key, sender in self._inputs(self._position + 1):
            self.post.expect(key, sender)
        outputs = sent_by(self.schedule, action)
        for number, slice_ in enumerate(action.microbatches):
            values = self._do(action, slice_, received.get(slice_, []))
            if outputs:
                self.post.send(*outputs[number], values)
        self.recorded.order.append(action)
        self.after(self._position)
        self._position += 1

    def _inputs(self, position: int) -> list[tuple[Key, int]]:
        """The messages that the action at `position` waits for; none after the last action."""
        here = self.order[position : position + 1]
        return [pair for action in here for pair in received_by(self.schedule, action)]

    def _do(self, action: Action, slice_: int, received: list[Value]) -> list[Value]:
        """Run one micro-batch; what is sent on."""
        worker = self.workers[action.pipe, action.stage]
        if action.kind == "F":
            sent = worker.forward(slice_, received)
            self._record()
            return sent
        if action.kind == "B":
            return worker.backward(slice_, received)
        if action.kind == "I":
            return worker.backward_inputs(slice_, received)
        worker.backward_weights(slice_)
        return []

    def _record(self) -> None:
        kept = sum(len(worker.kept) for worker in self.workers.values())
        share = kept / (self.schedule.chunks * self.schedule.parts)
        self.recorded.peak_activations = max(self.recorded.peak_activations, share)


class InProcessTransport:
    """The post of ranks that live in one process."""

    def __init__(self) -> None:
        self._values: dict[Key, list[Value]] = {}

    def expect(self, key: Key, sender: int) -> None:
        """Nothing has to be made ready."""

    def receive(self, key: Key, sender: int) -> list[Value]:
        return self._values.pop(key)

    def send(self, key: Key, receiver: int, values: list[Value]) -> None:
        self._values[key] = values

    def arrived(self, key: Key) -> bool:
        return key in self._values


def run_together(runners: list[RankRunner]) -> None:
    """Run the ranks of one process in turns, each as far as its inputs are there."""
    while any(not runner.done for runner in runners):
        before = [len(runner.recorded.order) for runner in runners]
        for runner in runners:
            if runner.ready:
                runner.advance()
        assert before != [len(runner.recorded.order) for runner in runners], "a deadlock"
