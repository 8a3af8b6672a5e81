"""Follow the global random generators of another process.

Only the main thread follows them, in which a script draws: other threads may draw at any time.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch

States = Mapping[str, Any]  # comparable states by the name of a generator
Moves = Mapping[str, tuple[Any, Any]]  # the states of each before and after draws


def states() -> States:
    """Return the states of torch's generator on the host, python's, and numpy's if loaded."""
    current = {"torch": torch.get_rng_state().numpy().tobytes(), "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        current["numpy"] = pickle.dumps(numpy.random.get_state(legacy=False))
    return current


def moves_since(before: States) -> Moves:
    """Return the moves of the generators that have drawn since `states` returned `before`."""
    after = states() if _is_followed() else before
    return {name: (old, after[name]) for name, old in before.items() if old != after[name]}


def follow(moves: Moves) -> None:
    """Repeat the moves of another process, for generators that were in the same state."""
    current = states() if moves and _is_followed() else {}
    for name, (old, new) in moves.items():
        if current.get(name) != old:
            continue
        if name == "torch":
            torch.set_rng_state(torch.frombuffer(bytearray(new), dtype=torch.uint8))
        elif name == "python":
            random.setstate(new)
        else:
            sys.modules["numpy"].random.set_state(pickle.loads(new))


def _is_followed() -> bool:
    return threading.current_thread() is threading.main_thread()
