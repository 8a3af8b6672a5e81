"""Modes: which modules of a parallel module are in training mode now; a program is that of some."""

from __future__ import annotations

from operator import attrgetter

from torch import nn

from autopar.capture.captured import Captured
from autopar.runtime.module.submodule_view import submodule_at

_TRAINING = attrgetter("training")


class TrainingModes:
    """Those of a parallel module, which gets a submodule for each of the model's, in the mode that
    it was captured in."""

    def __init__(self, root: nn.Module, captured: Captured) -> None:
        self._modules: dict[str, nn.Module] = {}
        for path, is_training in captured.example.modes.items():
            module = self._modules[path] = submodule_at(root, path)
            module.training = is_training

    @property
    def now(self) -> tuple[bool, ...]:
        """In the order of the modules."""
        return tuple(map(_TRAINING, self._modules.values()))

    @property
    def by_path(self) -> dict[str, bool]:
        return dict(zip(self._modules, self.now))
