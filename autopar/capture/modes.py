"""Modes: whether a program is the same when some of its modules are in another mode.

    in_modes(captured, {"": False, "drop": False})    # the same call, captured in evaluation mode

Which operators a mode changes is for the model to say: its forward is captured again.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.capture.autocasts import switched
from autopar.capture.captured import Captured
from autopar.capture.export import capture


def in_modes(captured: Captured, training: Mapping[str, bool]) -> Captured:
    """What the call that was captured gives with these modules in training mode, or not."""
    example = captured.example
    before = example.modes
    modules = dict(example.model.named_modules(remove_duplicate=False))
    try:
        for path, is_training in training.items():
            modules[path].training = is_training
        with switched(example.autocasts):
            return capture(example.model, example.args, example.kwargs, example.precision)
    finally:
        for path, was_training in before.items():
            modules[path].training = was_training
