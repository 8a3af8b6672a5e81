"""Period cuts: where the part of a schedule begins and ends that longer ones repeat.

A cut follows from one micro-batch of each pipe: it lies behind all actions that their forwards on
the last stage wait for, on each rank. The cut of the next micro-batch lies one period further.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.schedule import Action, Schedule

Cut = tuple[int, ...]  # by rank, how many of its actions lie before it


def period_cuts(short: Schedule, period: int) -> tuple[Cut, Cut] | None:
    """Return cuts between which lies a period of so many micro-batches, and behind which another
    one; None if there are none."""
    if period % short.pipes:
        return None
    number, counts = dict[int, int](), [0] * short.pipes  # of each part, among those of its pipe
    for part, pipe in enumerate(short.pipe_of):
        number[part] = counts[pipe]
        counts[pipe] += 1
    step, forwards = period // short.pipes * short.parts, _last_forwards(short, number)
    cuts, cut = list[Cut](), (0,) * short.ranks
    for member in range((min(counts) - 1) % step, min(counts), step):
        cut = _closed(short, cut, [by_number[member] for by_number in forwards])
        cuts.append(cut)

    def described(action: Action, moved: int) -> tuple[object, ...]:
        """Return an action with its micro-batches numbered in its pipe, so many before."""
        numbers = [number[part] - moved for part in action.microbatches]
        return action.kind, action.pipe, action.stage, action.overlaps, numbers

    def are_equal(start: Cut, middle: Cut, end: Cut) -> bool:
        """Return whether each rank does in two periods the same, and something."""
        for rank, order in enumerate(short.orders):
            first, second = order[start[rank] : middle[rank]], order[middle[rank] : end[rank]]
            if [described(action, 0) for action in first] != [
                described(action, step) for action in second
            ]:
                return False
        return all(start[rank] < middle[rank] for rank in range(short.ranks))

    for at in reversed(range(len(cuts) - 2)):
        if are_equal(*cuts[at : at + 3]):
            return cuts[at], cuts[at + 1]
    return None


def _last_forwards(short: Schedule, number: dict[int, int]) -> list[dict[int, tuple[int, int]]]:
    """Return by pipe, and number of a part there, rank and position of its last forward."""
    last, forwards = short.stages - 1, list[dict[int, tuple[int, int]]]()
    for pipe, ranks in enumerate(short.placement):
        forwards.append({
            number[part]: (ranks[last], position)
            for position, action in enumerate(short.orders[ranks[last]])
            if (action.kind, action.pipe, action.stage) == ("F", pipe, last)
            for part in action.microbatches
        })  # fmt: skip
    return forwards


def _closed(short: Schedule, cut: Cut, actions: Sequence[tuple[int, int]]) -> Cut:
    """Return the first cut behind another one and behind some actions, by rank and position."""
    closed, todo = list(cut), list(actions)
    while todo:
        rank, position = todo.pop()
        past = position + 1 + short.orders[rank][position].overlaps
        for key, _, _ in short.messages[rank][closed[rank] : past]:
            if key >= 0:
                sender, sent_at = short.senders[key]
                if sent_at >= closed[sender]:
                    todo.append((sender, sent_at))
        closed[rank] = max(closed[rank], past)
    return tuple(closed)
