"""Garbage: planning makes many objects that stay, and collecting while it does finds nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

AT_ONCE = 50_000  # objects are made before garbage is looked for


@contextmanager
def deferred_collection() -> Iterator[None]:
    """What is made inside is looked through for garbage once, afterwards, if at all."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def frozen_objects() -> Iterator[None]:
    """What is there stays, and is not looked through whenever garbage among what is made inside
    is looked for; that is seldom, since most of it is large."""
    is_first, thresholds = gc.get_freeze_count() == 0, gc.get_threshold()
    if is_first:
        gc.freeze()
    gc.set_threshold(thresholds[0] and max(thresholds[0], AT_ONCE), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if is_first:
            gc.unfreeze()
