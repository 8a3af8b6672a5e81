"""Grown lists: which of the lists that forward lets grow it reads as well.

    self.log.append(loss)       grows, and the next call cannot tell
    if len(self.log) > 2:       reads it: some later call computes something else

For one call each such list is replaced, wherever it stands, by one that notes what is asked of it.
A list in a tuple cannot be replaced, and is not watched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils import _pytree as pytree

from autopar.capture.holders import Holder, Path
from autopar.capture.python_state import PythonState


@contextmanager
def reads_noted(
    state: PythonState, lists: Sequence[Holder], read: set[Path | int]
) -> Iterator[None]:
    """Within, `read` gathers the places of those of these lists and deques that are asked for
    anything but to grow."""
    standing = [
        (holder.value, _watched(holder, read), state.places_with(holder.value))
        for holder in lists
        if type(holder.value) in _KINDS and not state.is_in_a_tuple(holder.value)
    ]
    for _, list_, places in standing:
        for holder, key in places:
            holder.write(holder.value, key, list_)
    try:
        yield
    finally:
        for plain, list_, places in standing:
            kind: Any = type(plain)
            plain.clear()
            plain.extend(kind.__iter__(list_))
            for holder, key in places:
                if holder.read().get(key) is list_:
                    holder.write(holder.value, key, plain)


def _watched(holder: Holder, read: set[Path | int]) -> Any:
    """Return what stands for a list or a deque, and holds the same."""
    kind: Any = type(holder.value)
    limits = () if kind is list else (holder.value.maxlen,)
    watched = _KINDS[kind](kind.__iter__(holder.value), *limits)
    watched.note = partial(read.add, holder.place)
    return watched


def _watching(kind: type) -> type:
    """Return a class of lists, or deques, that note what is asked of them but to grow."""

    def noting(name: str) -> Callable[..., Any]:
        plain = getattr(kind, name)

        def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.note()
            return plain(self, *args, **kwargs)

        return ask

    names = [name for name in vars(kind) if callable(getattr(kind, name)) and name not in _UNREAD]
    watching = type(kind.__name__, (kind,), {name: noting(name) for name in names})

    def flattened(value: Any) -> tuple[list[Any], None]:  # which a function of torch is given
        value.note()
        return [*kind.__iter__(value)], None  # type: ignore[attr-defined]

    pytree.register_pytree_node(watching, flattened, lambda items, _: kind(items))
    return watching


_UNREAD = (
    *("append", "appendleft", "extend", "extendleft", "__iadd__"),
    *("__new__", "__init__", "__getattribute__", "__class_getitem__", "__sizeof__"),
)
_KINDS = {kind: _watching(kind) for kind in (list, deque)}
