"""Postponing of garbage collection while planning makes many objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

AT_ONCE = 50_000  # objects are made before garbage is looked for


@contextmanager
def deferred_collection() -> Iterator[None]:
    """Collect no garbage inside of a `with`."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Inside of a `with`, collect garbage seldom, and only among objects that are made there."""
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
