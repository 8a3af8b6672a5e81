"""Labels of schedules, in the words that plans and reports use.

>>> schedule_words("chimera", {"pipes": 4, "scale": "halving", "forward": 1, "latency": 0})
'chimera, 4 pipes, backwards halved'
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.pipeline.schedule import Option

_COUNTED = ("pipes", "chunks")
_LISTED = 8  # lengths of slices
_SCALES = {"doubling": "forwards doubled", "halving": "backwards halved", "list": "order by list"}
# Options that a schedule was planned for; its order tells more than they do.
_TIMES = ("forward", "backward", "backward_input", "backward_weight", "latency")


def schedule_words(name: str, options: Mapping[str, bool | Option]) -> str:
    """Return the schedule's name with the options that change the work of ranks."""
    words = [name]
    for option, value in options.items():
        if option in _COUNTED:
            words.append(f"{value} {option}")
        elif option == "scale" and value in ("direct", *_SCALES):
            words += [_SCALES[str(value)]] if value in _SCALES else []
        elif option == "slices":
            words.append(_slices(value))
        elif option not in _TIMES:
            words.append(f"{option} {value}")
    return ", ".join(words)


def _slices(value: bool | Option) -> str:
    """Return how many slices of tokens there are, and their lengths if they are few or alike."""
    if not isinstance(value, tuple):
        return f"{value} slices"
    first, last, count = min(value), max(value), len(value)
    if count <= _LISTED:
        return f"slices of {' + '.join(map(str, value))} tokens"
    return f"{count} slices of {first} to {last} tokens" if first < last else f"{count} slices"
