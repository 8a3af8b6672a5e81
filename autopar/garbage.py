"""Garbage: planning makes many objects that stay, and collecting while it does finds nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """What is made inside is looked through for garbage once, afterwards, if at all."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def set_aside() -> Iterator[None]:
    """What is there stays, and is not looked through whenever garbage among what is made inside
    is looked for."""
    is_first = gc.get_freeze_count() == 0
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        if is_first:
            gc.unfreeze()
