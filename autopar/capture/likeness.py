"""Likeness: whether two values of a place are the same but for the numbers in their tensors.

A value that forward makes anew in each call is like the one before; a counter is not, whatever
class it is of. Nothing is asked of objects of the user's classes: what stands in them is compared.

>>> is_alike(Phase.WARM_UP, Phase.TRAIN), is_alike([torch.zeros(3)], [torch.ones(3)])
(False, True)
"""

from __future__ import annotations

from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from autopar.base.user_code import is_users_class
from autopar.capture.holders import VALUES, held_by, is_same
from autopar.capture.object_contents import is_a, items_of, reader_of


def is_alike(one: Any, other: Any, compared: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Return whether two values differ in nothing but what stands in their tensors. Objects into
    which nobody can look differ. `compared`: pairs of objects around these."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype)
    pair, kind = (id(one), id(other)), type(one)
    if is_same(one, other) or pair in compared:
        return True
    if kind is not type(other) or kind in VALUES or is_a(one, nn.Module, type):
        return False
    items, others = _contents_of(one), _contents_of(other)
    if _has_equality(one):
        return bool(one == other)
    if items is None or others is None:
        return False
    in_order = list if is_a(one, dict) else set
    return in_order(items) == in_order(others) and all(
        is_alike(items[key], others[key], compared | {pair}) for key in items
    )


def _contents_of(value: Any) -> dict[Any, Any] | None:
    """Return what stands in a value by key or number; None where the object does not show it."""
    if (items := items_of(value)) is not None:
        return items
    if is_a(value, *_FUNCTIONS):
        return dict(enumerate(held_by(value)))
    read = reader_of(value)
    return None if read is None else dict(enumerate(read()))


def _has_equality(value: Any) -> bool:
    """Return whether the class of a value is a library's, as of a date, and says what equals it."""
    kind = type(value)
    is_object = items_of(value) is None and not is_a(value, *_FUNCTIONS)
    is_equal: Any = kind.__eq__
    is_value = is_equal is not object.__eq__ and kind.__hash__ is not None
    return is_object and is_value and not is_users_class(kind)


_FUNCTIONS = FunctionType, MethodType, partial
