"""Modes: a program is that of the modes its modules were in; another mode may be another program.

Modules that are put into another mode (`train()`, `eval()`) before a call are compared with those
of capture. Whether that makes another program, the model's own forward says: it is captured again.
"""

from __future__ import annotations

from operator import attrgetter

from torch import nn

from autopar.capture.captured import Captured
from autopar.capture.fingerprint import fingerprint_of
from autopar.capture.modes import in_modes
from autopar.errors import InvalidInput
from autopar.runtime.part import part_at

_TRAINING = attrgetter("training")


class Modes:
    """Keeps watch over the modes of a parallel module, which gets a submodule for each of the
    model's, in the mode that it was captured in."""

    def __init__(self, root: nn.Module, captured: Captured) -> None:
        self._captured = captured
        self._modules: dict[str, nn.Module] = {}
        for path, is_training in captured.example.modes.items():
            module = self._modules[path] = part_at(root, path)
            module.training = is_training
        self._same = {self._current()}  # modes with this program

    def _current(self) -> tuple[bool, ...]:
        return tuple(map(_TRAINING, self._modules.values()))

    def require_same_program(self) -> None:
        """Refuse modes in which the model is another program."""
        current = self._current()
        if current in self._same:
            return
        wanted = dict(zip(self._modules, current))
        found = fingerprint_of(in_modes(self._captured, wanted))
        differences = found.differences(fingerprint_of(self._captured))
        if differences:
            raise self._refused(wanted, differences)
        self._same.add(current)

    def _refused(self, wanted: dict[str, bool], differences: list[str]) -> InvalidInput:
        planned = self._captured.example.modes
        others = [path for path, mode in wanted.items() if mode != planned[path]]
        named = ", ".join(path or "the model" for path in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        asked, was = ("training", "evaluation") if wanted[others[0]] else ("evaluation", "training")
        return InvalidInput(
            "a program is that of the modes, training or evaluation, that it was planned in",
            got=f"{asked} mode of {named}{more}, planned in {was} mode\n" + "\n".join(differences),
            remedy="put the modules back into the modes that were planned, or parallelize the "
            "model again in these: load_state_dict(module.full_state_dict()) brings it up to date",
        )
