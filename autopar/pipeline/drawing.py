"""A timeline as text: a line for each rank, time to the right."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.pipeline.timeline import Timeline

WIDTH = 160


def draw(timeline: Timeline, width: int = WIDTH) -> str:
    """Each action as kind and micro-batch where that fits `width` columns, else as its kind.

    Pipes other than 0 are in small letters. Dots are idle time.
    """
    schedule = timeline.schedule
    title = (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} micro-batches, "
        f"makespan {timeline.makespan:g}, bubble {timeline.bubble_ratio:.1%}"
    )
    margin = len(f"rank {schedule.ranks - 1}")
    room = max(width - margin - len(" ||"), 1)
    rows = [f"{f'rank {rank}':<{margin}} |{row}|" for rank, row in enumerate(_rows(timeline, room))]
    return "\n".join([title, *rows])


def _rows(timeline: Timeline, width: int) -> list[str]:
    schedule = timeline.schedule
    span = timeline.makespan or 1.0
    shortest = min(
        (
            end - start
            for starts, ends in zip(timeline.starts, timeline.ends)
            for start, end in zip(starts, ends)
            if end > start
        ),
        default=span,
    )
    label = max(
        len("+".join(map(str, action.microbatches)))
        for order in schedule.orders
        for action in order
    )
    # One column more than the label, so that neighbours stay apart.
    scale = (label + 2) / shortest
    labelled = round(scale * span) <= width
    if not labelled:
        scale = width / span
    rows = []
    for order, starts, ends in zip(schedule.orders, timeline.starts, timeline.ends):
        row = ["."] * round(scale * span)
        for action, start, end in zip(order, starts, ends):
            first, past = round(start * scale), round(end * scale)
            letter = action.kind.lower() if action.pipe % 2 else action.kind
            text = letter + "+".join(map(str, action.microbatches)) if labelled else letter
            fill = " " if labelled else letter
            row[first:past] = text.ljust(past - first, fill)[: past - first]
        rows.append("".join(row))
    return rows
