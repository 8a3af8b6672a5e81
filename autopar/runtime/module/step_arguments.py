"""Words: what a step is told beside the arguments of the model.

pm.step(x, scale=1 / 4)        the step's, if the model's forward takes no scale
pm.step(x, scale=2.0)          the model's, if the example call has one
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.capture.captured import Example
from autopar.errors import InvalidInput

_REMEDIES = {
    "scale": "microbatches=n of parallelize makes one update of n parts",
    "outputs": "the call of the module gives outputs",
}


def split_step_arguments(
    example: Example, args: tuple, kwargs: Mapping[str, Any], words: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the model is given by name, and what the step is told: of `words`, None is not said."""
    given, told = dict(kwargs), dict(words)
    for name, value in words.items():
        if value is None:
            continue
        if name in example.kwargs:
            given[name], told[name] = value, None
        elif _takes(example.model, name, args):
            raise InvalidInput(
                "a word that a step and the model both know belongs to the model if the example "
                "call has it",
                got=f"step({name}=...), and forward{inspect.signature(example.model.forward)}, "
                "of which the example gave none",
                remedy=f"for the model's: parallelize with {name} among the example's keyword "
                f"arguments. For the step's: give the model's before it; or {_REMEDIES[name]}",
            )
    return given, told


def _takes(model: nn.Module, name: str, args: tuple) -> bool:
    """Whether forward has a parameter of this name beside those that `args` are for. What it takes
    by `**` it has no name for."""
    signature = inspect.signature(model.forward)
    found = signature.parameters.get(name)
    if found is None or found.kind not in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY):
        return False
    return name not in list(signature.parameters)[: len(args)]
