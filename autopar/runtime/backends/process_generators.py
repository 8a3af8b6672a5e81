"""Generators: the random numbers of this process that nobody has a generator of his own for.

They are followed in the main thread, which a script draws in: beside it nobody knows who has drawn.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch

States = Mapping[str, Any]  # by the name of a generator, what can be compared and sent
Moves = Mapping[str, tuple[Any, Any]]  # where each stood, and stands


def states() -> States:
    """Where each stands: torch's on the host, python's, and numpy's if that is loaded."""
    found = {"torch": torch.get_rng_state().numpy().tobytes(), "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = pickle.dumps(numpy.random.get_state(legacy=False))
    return found


def moved(before: States) -> Moves:
    """Those that have drawn since."""
    after = states() if _is_followed() else before
    return {name: (stood, after[name]) for name, stood in before.items() if stood != after[name]}


def follow(moves: Moves) -> None:
    """Draw what another process has drawn, where a generator stands as its own did."""
    here = states() if moves and _is_followed() else {}
    for name, (stood, stands) in moves.items():
        if here.get(name) != stood:
            continue
        if name == "torch":
            torch.set_rng_state(torch.frombuffer(bytearray(stands), dtype=torch.uint8))
        elif name == "python":
            random.setstate(stands)
        else:
            sys.modules["numpy"].random.set_state(pickle.loads(stands))


def _is_followed() -> bool:
    return threading.current_thread() is threading.main_thread()
