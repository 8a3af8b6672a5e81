"""Schedules as text and as CSV, in torch.distributed.pipelining's notation plus the pipe.

An action is written stage, kind, micro-batches: ``1F2`` is the forward of micro-batch 2 on stage 1.
Several micro-batches done together are joined by ``+``, a pipe other than 0 follows ``@``:
``0B4+5@1``. Two that overlap share a cell: ``(0F4;1B2)OVERLAP_F_B``. A sum of gradients names no
micro-batch: ``1REDUCE_GRAD``. An update names those whose gradients it applies: ``0U0+1``.

>>> from autopar.pipeline import schedule
>>> print(to_text(schedule("1f1b", stages=2, microbatches=2)))
name: 1f1b
microbatches: 2
pipe 0: 0 1
rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1B0 1F1 1B1

CSV has one row for each rank and one action in a cell. torch reads the rows of a schedule with one
pipe and no updates; a first row that starts with ``#`` carries the rest and is left out by
``header=False``. All files that torch writes are read (`torch_notation`).
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from autopar.base.files import write_file
from autopar.errors import InvalidInput
from autopar.pipeline.checker import check
from autopar.pipeline.schedule import (
    SUM,
    UPDATE,
    Action,
    Kind,
    Option,
    Schedule,
    cells,
    heading,
    make,
    to_text,
)
from autopar.pipeline.sums import without_sums
from autopar.pipeline.torch_notation import read_cells

_NUMBER = r"[0-9]{1,6}"  # larger numbers are refused
_NUMBERS = rf"{_NUMBER}(?:\+{_NUMBER})*"
ACTION = re.compile(rf"({_NUMBER})(?:([FBIWU])({_NUMBERS})|({SUM}))(?:@({_NUMBER}))?")
OVERLAP = re.compile(r"\(([^;]+);([^;]+)\)OVERLAP_F_B")
KEYS = "keys are name, microbatches, parts, slices, delays, options, pipe 0, ..., rank 0, ..."
REMEDY = "write stage, kind and micro-batch as in 1F2, with +3 for more and @1 for pipe 1"


def parse_action(text: str) -> Action:
    """Return the action that `text` stands for: the inverse of `str(action)`."""
    match = ACTION.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(
            f"an action is written as stage, kind (F, B, I, W, U or {SUM}) and micro-batches",
            got=repr(text[:80]),
            remedy=REMEDY,
        )
    stage, kind, microbatches, is_sum, pipe = match.groups()
    numbers = () if is_sum else tuple(map(int, microbatches.split("+")))
    return Action(cast(Kind, kind or is_sum), int(pipe or 0), int(stage), numbers)


def parse_cell(text: str) -> list[Action]:
    """Return the one action, or the two that overlap, in a cell of an order."""
    match = OVERLAP.fullmatch(text.strip())
    if match is None:
        return [parse_action(text)]
    first, second = (parse_action(part) for part in match.groups())
    return [replace(first, overlaps=True), second]


def read_option(text: str) -> Option:
    """Return the value of a written option: a number, numbers joined by +, or a word."""
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if re.fullmatch(r"[0-9.e-]+(\+[0-9.e-]+)+", text) and not _is_number(text):
        return tuple(
            int(part) if part.isdecimal() else float(_finite(part)) for part in text.split("+")
        )
    return float(_finite(text)) if _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _finite(text: str) -> str:
    """Return `text` if it is a finite number; raise `InvalidInput` otherwise."""
    if not _is_number(text) or not math.isfinite(float(text)):
        raise InvalidInput(
            "the numbers of a schedule's options are finite",
            got=repr(text[:80]),
            remedy="write options: backward=2.0 or the like",
        )
    return text


@contextmanager
def _naming_source(source: str | None) -> Iterator[None]:
    """Name the file `source` in the errors that are raised inside."""
    try:
        yield
    except InvalidInput as error:
        error.source = source or error.source
        raise


def from_text(text: str, source: str | None = None, *, of_call: bool = False) -> Schedule:
    """Return the schedule that `text` describes, checked; `of_call` allows forward alone."""
    fields: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, colon, value = map(str.strip, line.partition(":"))
        if not colon or key in fields:
            raise InvalidInput(
                "a schedule's text has one line `key: value` for each key",
                got=line.strip()[:80],
                remedy=KEYS,
                source=f"{source or 'text'}:{number}",
            )
        fields[key] = value
    with _naming_source(source):
        orders = _numbered(fields, "rank")
        return _assemble(fields, [_order(row.split()) for row in orders], of_call=of_call)


def _order(words: Iterable[str]) -> list[Action]:
    return [action for word in read_cells(words) for action in parse_cell(word)]


def to_csv(schedule: Schedule, *, header: bool = True) -> str:
    """Return the schedule as CSV; without the header torch.distributed.pipelining reads it.

    torch then adds the sums of gradients itself, each right after the last backward.
    """
    if not header and any(action.kind == UPDATE for _, action in schedule.short.actions):
        raise InvalidInput(
            "schedules of torch.distributed.pipelining have no updates",
            got=f"a schedule with {UPDATE}, {schedule.name}",
            remedy="to_csv(schedule), with the header",
        )
    schedule = schedule if header else without_sums(schedule)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if header:
        writer.writerow([f"# {'; '.join(f'{k}: {v}'.rstrip() for k, v in heading(schedule))}"])
    writer.writerows(cells(order) for order in schedule.orders)
    return out.getvalue()


def from_csv(text: str, source: str | None = None, name: str = "csv") -> Schedule:
    """Return the schedule in `text`, checked; without a header, actions give the placement."""
    with _naming_source(source):
        return _from_csv(text, name)


def _from_csv(text: str, name: str) -> Schedule:
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise InvalidInput(
            "a schedule is CSV with one row for each rank",
            got=str(error),
            remedy="write one action in a cell",
        ) from None
    fields = {"name": name}
    if rows and rows[0] and rows[0][0].startswith("#"):
        for field in rows.pop(0)[0].lstrip("# ").split(";"):
            key, _, value = map(str.strip, field.partition(":"))
            if key in fields and key != "name":
                raise InvalidInput(
                    "the first row of a schedule has each key once",
                    got=key[:80],
                    remedy="keep one of them",
                )
            fields[key] = value
    orders = [_order(row) for row in rows]
    if "microbatches" not in fields:
        fields |= _derive(orders)
    return _assemble(fields, orders)


def save(schedule: Schedule, path: str | Path) -> None:
    """Write to `path`: CSV when it ends in .csv, else text."""
    write = to_csv if str(path).endswith(".csv") else to_text
    write_file(path, write(schedule).rstrip("\n") + "\n", "the file of a schedule")


def load(path: str | Path) -> Schedule:
    """Read and check the schedule at `path`: CSV when it ends in .csv, else text."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            "a schedule is read from a text or CSV file",
            got=f"{path}: {getattr(error, 'strerror', None) or 'no text'}",
            remedy="name a file that autopar.pipeline.save wrote",
        ) from error
    read = from_csv if str(path).endswith(".csv") else from_text
    return read(text, str(path))


def _derive(orders: list[list[Action]]) -> dict[str, str]:
    """Return the fields `microbatches` and `pipe N` as they follow from the actions alone."""
    ranks: dict[tuple[int, int], int] = {}
    last = -1
    for rank, order in enumerate(orders):
        for action in order:
            first = ranks.setdefault((action.pipe, action.stage), rank)
            if first != rank:
                raise InvalidInput(
                    "each stage of a pipe is on one rank",
                    got=f"{action} on rank {rank}, others of this stage on rank {first}",
                    remedy="move the action, or write another copy of the stage as another pipe",
                )
            last = max(last, *action.microbatches, -1)
    pipes = 1 + max((pipe for pipe, _ in ranks), default=-1)
    stages = 1 + max((stage for _, stage in ranks), default=-1)
    every = itertools.product(range(pipes), range(stages))
    missing = (
        f"stage {stage} of pipe {pipe}" for pipe, stage in every if (pipe, stage) not in ranks
    )
    shown = ", ".join(itertools.islice(missing, 8))  # few: a mistyped number may be very large
    if shown or not ranks:
        raise InvalidInput(
            "every stage of every pipe has actions on some rank",
            got=shown or "no action",
            remedy="correct the numbers, add the missing actions, or a header row that gives the "
            "placement",
        )
    fields = {"microbatches": str(last + 1)}
    for pipe in range(pipes):
        fields[f"pipe {pipe}"] = " ".join(str(ranks[pipe, stage]) for stage in range(stages))
    return fields


def _numbered(fields: dict[str, str], word: str) -> list[str]:
    """Return the values of `word 0`, `word 1`, ...: at least one, with no number left out."""
    keys = {key for key in fields if re.fullmatch(rf"{word} \d+", key)}
    expected = [f"{word} {number}" for number in range(len(keys))]
    if not keys or set(expected) != keys:
        raise InvalidInput(
            f"a schedule has one line `{word} N` for each {word}, counted from 0",
            got=", ".join(sorted(keys)) or "none",
            remedy=f"add `{word} 0: ...` and so on",
        )
    return [fields[key] for key in expected]


def _integers(text: str, key: str) -> tuple[int, ...]:
    words = text.split()
    if not words or not all(re.fullmatch(_NUMBER, word) for word in words):
        raise InvalidInput(
            f"`{key}` is given in whole numbers",
            got=repr(text[:80]),
            remedy=f"write `{key}: 4` or the like",
        )
    return tuple(map(int, words))


def _integer(text: str, key: str) -> int:
    numbers = _integers(text, key)
    if len(numbers) > 1:
        _integers("", key)
    return numbers[0]


def _assemble(
    fields: dict[str, str], orders: Iterable[Iterable[Action]], *, of_call: bool = False
) -> Schedule:
    known = re.compile(r"name|microbatches|parts|slices|delays|options|(pipe|rank) \d+")
    unknown = [key for key in fields if not known.fullmatch(key)]
    if unknown or "microbatches" not in fields:
        raise InvalidInput(
            "a schedule says its microbatches, and only keys that are known",
            got=", ".join(unknown)[:80] or "no microbatches",
            remedy=KEYS,
        )
    options: dict[str, Option] = {}
    for word in fields.get("options", "").split():
        key, _, value = word.partition("=")
        if not key.isidentifier() or key in options:
            raise InvalidInput(
                "the options of a schedule are name=value, each name once",
                got=word[:80],
                remedy="write options: pipes=2 or the like",
            )
        options[key] = read_option(value)
    microbatches = _integer(fields["microbatches"], "microbatches")
    parts = _integer(fields.get("parts", "1"), "parts")
    schedule = make(
        fields.get("name", "text"),
        microbatches,
        [_integers(row, "pipe") for row in _numbered(fields, "pipe")],
        orders,
        parts,
        _integers(fields["slices"], "slices") if "slices" in fields else (),
        **options,
    )
    if "delays" in fields:
        schedule = replace(schedule, delays=_integers(fields["delays"], "delays"))
    check(schedule, of_call=of_call)
    return schedule
