"""Step arguments: keyword arguments of a step next to those of the model.

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
    example: Example, args: tuple, kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keyword arguments of the model, and those of the step; None is not given."""
    for_model, for_step = dict(kwargs), dict(options)
    for name, value in options.items():
        if value is None:
            continue
        if name in example.kwargs:
            for_model[name], for_step[name] = value, None
        elif _takes(example.model, name, args):
            raise InvalidInput(
                "a word that a step and the model both know belongs to the model if the example "
                "call has it",
                got=f"step({name}=...), and forward{inspect.signature(example.model.forward)}, "
                "of which the example gave none",
                remedy=f"for the model's: parallelize with {name} among the example's keyword "
                f"arguments. For the step's: give the model's before it; or {_REMEDIES[name]}",
            )
    return for_model, for_step


def _takes(model: nn.Module, name: str, args: tuple) -> bool:
    """Return whether forward has a parameter of this name that `args` do not fill; `**` does not
    count."""
    signature = inspect.signature(model.forward)
    parameter = signature.parameters.get(name)
    if parameter is None or parameter.kind not in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    ):
        return False
    return name not in list(signature.parameters)[: len(args)]
