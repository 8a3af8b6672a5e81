"""Imports of packages whose binaries fit one build of torch only, without these binaries.

>>> import_without_binary("torchvision")
>>> import torchvision.models

Their models in pure Python need no more than the names of compiled operators.
"""

from __future__ import annotations

import importlib
import sys
import types
from contextlib import suppress

import torch

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARIES: list[torch.library.Library] = []  # operators live as long as these


def import_without_binary(package: str) -> None:
    """Import a package; where its binary does not load, with stand-ins for what this defines."""
    try:
        importlib.import_module(package)
    except (RuntimeError, OSError):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        _STAND_INS[package]()
        importlib.import_module(package)


def _declare_vision_operators() -> None:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + _NMS)
    _LIBRARIES.append(library)


def _replace_audio_extension() -> None:
    extension = types.ModuleType("torchaudio._extension")
    extension.__dict__.update(
        _IS_TORCHAUDIO_EXT_AVAILABLE=False, fail_if_no_align=lambda function: function
    )
    sys.modules[extension.__name__] = extension


_STAND_INS = {
    "torchvision": _declare_vision_operators,
    "torchaudio": _replace_audio_extension,
}


def prepare_imports() -> None:
    """Import those packages that others import with binaries that may not load."""
    for package in _STAND_INS:
        with suppress(ImportError):
            import_without_binary(package)
