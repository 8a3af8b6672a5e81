"""The order that DualPipe and DualPipeV share: two lanes of micro-batches that meet on a rank.

DualPipe's lanes are the two pipes, DualPipeV's the two chunks of a V. A rank's `position` counts
from the end where lane 0 enters; the middle (or the turn of the V) is at `depth`. After DeepSeek-AI
(2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from autopar.pipeline.schedule import Kind

# Kind, lane, number of the micro-batch in its lane, whether it overlaps with the next.
Step = tuple[Kind, int, int, bool]


def two_lanes(
    position: int, depth: int, counts: tuple[int, int], *, overlap: bool
) -> Iterator[Step]:
    """Yield the steps of one rank when `counts` micro-batches go through the lanes.

    The order needs 2 x depth micro-batches in each lane; of fewer, the missing ones are left out.
    A forward whose backward partner is left out overlaps with nothing.
    """
    steps = list(_steps(position, depth, max(2 * depth, *counts), overlap=overlap))
    for (kind, lane, number, joint), after in zip(steps, [*steps[1:], None]):
        if number < counts[lane]:
            overlaps = joint and after is not None and after[2] < counts[after[1]]
            yield kind, lane, number, overlaps


def _steps(position: int, depth: int, microbatches: int, *, overlap: bool) -> Iterator[Step]:
    """Yield the steps for `microbatches` >= 2 x depth in each lane.

    With `overlap`, a forward and the backward after it are one step of the middle part. The rank
    in the middle does not overlap the first two: the backward waits for this very forward.
    """
    done = {"F": [0, 0], "B": [0, 0]}
    deferred: deque[tuple[int, int]] = deque()
    before = depth - 1 - position

    def forward(lane: int, *, overlaps: bool = False) -> Step:
        number = done["F"][lane]
        done["F"][lane] += 1
        return "F", lane, number, overlaps

    def backward(lane: int, *, split: bool = False) -> Step:
        number = done["B"][lane]
        done["B"][lane] += 1
        if split:
            deferred.append((lane, number))
        return "I" if split else "B", lane, number, False

    def weight() -> Step:
        return "W", *deferred.popleft(), False

    for _ in range(2 * before):
        yield forward(0)
    for _ in range(position + 1):
        yield forward(0)
        yield forward(1)
    for _ in range(before):
        yield backward(1, split=True)
        yield weight()
        yield forward(1)
    for number in range(microbatches - 2 * depth + position + 1):
        yield forward(0, overlaps=overlap and (number > 0 or before > 0))
        yield backward(1)
        yield forward(1, overlaps=overlap)
        yield backward(0)
    for _ in range(before):
        yield backward(1)
        yield forward(1, overlaps=overlap)
        yield backward(0)
    # The second half of the backwards that are left is split: its W fill the end.
    unsplit = position + 1
    for number in range(2 * (position + 1)):
        yield backward(1 - number % 2, split=number >= unsplit)
    for _ in range(before):
        yield weight()
        yield backward(0, split=True)
    while deferred:
        yield weight()
