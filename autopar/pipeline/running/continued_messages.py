"""Continued messages: those of asynchronous steps that follow one another without a drain."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.pipeline.continued_steps import ContinuedSteps
from autopar.pipeline.running.executor import MessageKey, messages_of


class ContinuedMessages:
    """When the messages of endless steps are sent and read, in positions of their ranks."""

    def __init__(self, steps: ContinuedSteps) -> None:
        self._steps, self._schedule = steps, steps.one_step
        # No two messages under way have the same number.
        self.numbers = (steps.ahead + 2) * steps.period

    def sent_at(self, key: MessageKey) -> int:
        """Return the position of the action that sends a message."""
        stage = key.stage - 1 if key.forward else key.stage + 1
        return self._place(key, stage)

    def read_at(self, key: MessageKey) -> int:
        """Return the position of the action that reads a message."""
        return self._place(key, key.stage)

    def _place(self, key: MessageKey, stage: int) -> int:
        rank = self._schedule.rank_of(key.pipe, stage)
        return self._steps.place(rank, "F" if key.forward else "B", stage, key.microbatch)

    def in_order(self, sender: int, receiver: int) -> Iterator[MessageKey]:
        """Yield the messages from one rank to another, without end."""
        step = 0
        while True:
            for action in self._steps.order(sender, step):
                for key, other in messages_of(self._schedule, action, sent=True):
                    if other == receiver:
                        yield key
            step += 1
