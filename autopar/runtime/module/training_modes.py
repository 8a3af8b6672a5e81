"""Training modes: which modules of a parallel module are in training mode, for each program."""

from __future__ import annotations

from operator import attrgetter

from torch import nn

from autopar.capture.captured import Captured
from autopar.runtime.module.submodule_view import submodule_at

_TRAINING = attrgetter("training")


class TrainingModes:
    """The modes of all modules of a parallel module, at first those of the capture."""

    def __init__(self, root: nn.Module, captured: Captured) -> None:
        self._modules: dict[str, nn.Module] = {}
        for path, is_training in captured.example.modes.items():
            module = self._modules[path] = submodule_at(root, path)
            module.training = is_training

    @property
    def now(self) -> tuple[bool, ...]:
        """Return the current modes in the order of the modules."""
        return tuple(map(_TRAINING, self._modules.values()))

    @property
    def by_path(self) -> dict[str, bool]:
        """Return the current modes by the paths of the modules."""
        return dict(zip(self._modules, self.now))
