"""Plain data: values that a file holds and that are read again without running code.

>>> plain({"step": 3, "best": numpy.float64(0.5)}, "extra")
{'step': 3, 'best': 0.5}
>>> plain({"path": Path("a")}, "extra")
InvalidInput: ...  extra['path']: a value of type pathlib.PosixPath
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import InvalidInput

_LEAVES = (type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter)
_LISTS = (list, tuple, set)
_DICTS = (dict, OrderedDict)


def plain(value: Any, at: str) -> Any:
    """Return a value with Python's numbers for numpy's, or refuse it; errors call it `at`."""
    try:
        return _plain(value, at, frozenset())
    except RecursionError:
        raise _refused(f"{at}, which is too deep") from None


def to_bytes(data: Any) -> bytes:
    """Return plain data as the bytes of a file."""
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer.getvalue()


def from_file(file: Any) -> Any:
    """Return the data of a file, and run no code of it."""
    return torch.load(file, map_location="cpu", weights_only=True)


def _plain(value: Any, at: str, within: frozenset[int]) -> Any:
    kind = type(value)
    if id(value) in within:
        raise _refused(f"{at}, which holds itself")
    if kind in _DICTS:
        inside = within | {id(value)}
        return kind(
            (_plain(key, f"a key of {at}", inside), _plain(item, f"{at}[{key!r}]", inside))
            for key, item in value.items()
        )
    if kind in _LISTS:
        inside = within | {id(value)}
        return kind(_plain(item, f"{at}[{number}]", inside) for number, item in enumerate(value))
    if isinstance(value, DTensor):
        raise InvalidInput(
            "a checkpoint holds plain tensors beside the model's, which are rank 0's",
            got=f"{at}, a DTensor",
            remedy="give its full_tensor()",
        )
    if kind in _LEAVES:
        return value
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and _is_number(value):
        return value.item()
    if not _is_read_again(value):
        raise _refused(f"{at}: a value of type {kind.__module__}.{kind.__qualname__}")
    return value


def _is_number(value: Any) -> bool:
    """Return whether a numpy scalar holds a number or a text."""
    return isinstance(value, str | bytes) or type(value.item()) in (bool, int, float, complex)


def _is_read_again(value: Any) -> bool:
    try:
        from_file(io.BytesIO(to_bytes(value)))
    except Exception:
        return False
    return True


def _refused(got: str) -> InvalidInput:
    return InvalidInput(
        "extra, and what an optimizer keeps beside tensors, are plain data and tensors: loading a "
        "checkpoint runs no code",
        got=got,
        remedy="give numbers, texts, tensors, lists and dicts of these, such as the state_dict() "
        "of a scheduler",
    )
