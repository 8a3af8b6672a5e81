"""Failure: what a model that cannot be captured tells its user.

Capture follows the tensors, not their values: whatever needs a value (an `if`, `.item()`, numpy)
stops it. The error names the user's line and what to write instead.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import nn

from autopar.capture.source import describe, lines_before, of_traceback, passes_through
from autopar.errors import AutoparError, InvalidInput

VALUES = "forward must not depend on the values of tensors, only on their shapes"
# torch's own text names unknowns that mean nothing to users.
DECISION = "a Python decision (if, while, int(), range()) on a value that a tensor holds"
# By which torch says that it knows nothing of what an operator would give.
_UNKNOWN_RESULTS = ("DynamicOutputShapeException", "UnsupportedOperatorException")
# What it says of tensors that have no values, wherever these are asked for.
_WITHOUT_VALUES = ("data pointer", "data is not allocated", "FakeTensor")
VALUES_REMEDY = "compute with tensors (torch.where, masks), or decide outside forward"


def check_call(model: object, args: object, kwargs: Mapping[str, Any]) -> None:
    """Refuse what is not a model with arguments for its forward."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            "a model is a torch.nn.Module",
            got=f"{type(model).__name__}",
            remedy="wrap a function into a module with this forward",
        )
    if not isinstance(args, tuple):
        raise InvalidInput(
            "the positional example inputs are a tuple",
            got=f"{type(args).__name__}",
            remedy="write (x,) for one input",
        )
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        code = getattr(inspect.unwrap(model.forward), "__code__", None)
        raise InvalidInput(
            "the example inputs fit the signature of forward",
            got=f"{error}; forward{inspect.signature(model.forward)}",
            remedy="pass example inputs for every argument without a default",
            source=code and describe(code.co_filename, code.co_firstlineno, None),
        ) from error


def explain(error: Exception, model: nn.Module) -> AutoparError:
    """The error for the user, from what export ran into."""
    if isinstance(error, AutoparError):
        return error
    source = of_traceback(error.__traceback__)
    text = str(error)
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in text:
        remedy = _of_layer_drop(error.__traceback__) or VALUES_REMEDY
        if passes_through(error.__traceback__, "torch/nn/modules/batchnorm.py"):
            remedy = "give batch norm a momentum: without one it divides by a count it keeps"
        return InvalidInput(VALUES, got=DECISION, remedy=remedy, source=source)
    if kind in _UNKNOWN_RESULTS:
        return InvalidInput(
            "torch can tell the shape of every result without its values",
            got=f"{text.strip().splitlines()[0]}, of which it cannot",
            remedy="compute it outside forward, or make it an operator by "
            "torch.library.custom_op with register_fake, and a rule by register_rule()",
            source=source,
        )
    if any(word in text for word in _WITHOUT_VALUES):
        return InvalidInput(
            VALUES,
            got="an operation that reads the memory of a tensor, which has none while forward "
            f"is followed ({kind}: {_first_lines(text, 1).partition('. If')[0]})",
            remedy=VALUES_REMEDY,
            source=source,
        )
    if ".numpy()" in text or (
        "numpy" in text.lower() and isinstance(error, RuntimeError | TypeError)
    ):
        return InvalidInput(
            VALUES,
            got="a tensor handed to numpy",
            remedy="write the computation with torch",
            source=source,
        )
    if "not a known type" in text:
        return InvalidInput(
            "forward returns tensors in tuples, lists, dicts, or dataclasses that torch knows",
            got=_first_lines(text).partition(" in output")[0].removeprefix("Found "),
            remedy="call torch.export.register_dataclass(its class), or return a tuple or a dict",
            source=source,
        )
    return InvalidInput(
        "torch.export can follow forward on the example inputs",
        got=f"{kind} in {type(model).__name__}: {_first_lines(text)}",
        remedy="see whether model(*args, **kwargs) runs on its own; if it does, it goes another "
        "way while it is followed: write this line without asking for that",
        source=source,
    )


def _of_layer_drop(trace: TracebackType | None) -> str | None:
    """What to set where a model leaves out layers at random, as transformers call it."""
    found = re.search(r"< self\.(?:config\.)?(\w*layerdrop)\b", lines_before(trace))
    if found is None:
        return None
    return f"set {found[1]} of the configuration (or the module) to 0: layers are dropped at random"


def _first_lines(text: str, count: int = 3) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines[:count]) if lines else "no message"
