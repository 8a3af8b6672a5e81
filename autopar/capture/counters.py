"""Counters: plain numbers that a module counts from call to call, which a program cannot.

Export runs forward once, and keeps the value that a number had then. One that is set to the same
value at every call (a length taken from the input) does no harm; one that a second call would
change again is told to the user.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.fake import FakeTensorMode
from autopar.lines import caller, frames_to_caller


@dataclass
class Change:
    """An attribute of a module that forward gave another number."""

    module: nn.Module
    name: str
    before: float
    after: float
    source: str | None


Changes = dict[tuple[int, str], Change]


@contextmanager
def changes_seen() -> Iterator[Changes]:
    """What becomes of plain numbers that modules hold, while forward runs."""
    seen: Changes = {}
    plain = nn.Module.__setattr__

    def notice(self: nn.Module, name: str, value: Any) -> None:
        before = self.__dict__.get(name)
        if isinstance(before, int | float) and isinstance(value, int | float) and before != value:
            key = id(self), name
            if key not in seen:
                seen[key] = Change(self, name, before, value, caller())
            elif value != seen[key].before:  # export puts back what was there
                seen[key].after = value
        plain(self, name, value)

    nn.Module.__setattr__ = notice  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        nn.Module.__setattr__ = plain  # type: ignore[method-assign]


def warn_of_counters(
    model: nn.Module,
    mode: FakeTensorMode,
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
    seen: Changes,
) -> None:
    """Tell which of the numbers that were `seen` to change would change at every `call`."""
    if not seen:
        return
    for change in seen.values():
        setattr(change.module, change.name, change.after)
    with changes_seen() as again, mode, torch.no_grad():
        model(*call[0], **call[1])
    for change in (*again.values(), *seen.values()):
        setattr(change.module, change.name, change.before)
    paths = {id(module): path for path, module in model.named_modules()}
    for key in seen.keys() & again.keys():
        change = seen[key]
        path = ".".join(filter(None, (paths.get(key[0], ""), change.name)))
        warnings.warn(
            f"{path} is another number after every call ({change.source}): a program keeps "
            "the one of its capture; a buffer changes with the steps",
            stacklevel=frames_to_caller(),
        )
