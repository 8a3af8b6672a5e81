"""Named: what functions and objects can read and change besides what they are given.

That is what objects hold, and what is named in the globals of their files, in closures and in
classes by functions; and what all these lead to in turn. Of torch nothing is. Where it is told
which code `ran`, functions that did not run lead nowhere.
"""

from __future__ import annotations

import dis
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from autopar.base.user_code import is_users_class, is_users_function
from autopar.capture.attributes import is_equal
from autopar.capture.hidden import Hiding
from autopar.capture.object_contents import (
    ABSENT,
    LEAVES,
    PLAIN,
    bases_of,
    class_space_of,
    is_a,
    reader_of,
    space_of,
)

_Names = frozenset[str]
_Found = tuple[tuple[str, ...] | None, list[Any]]  # values, and the names that they have
_NONE = _Names()
_LOOKED_INTO = (FunctionType, type, ModuleType, FrameType)
_NOT_FOLLOWED = ("torch", "autopar")


class Named:
    """All that functions, classes, objects or a frame lead to, `but` some."""

    def __init__(
        self,
        *roots: Any,
        but: Callable[[Any], bool] = lambda value: False,
        ran: Mapping[int, Any] | None = None,
    ) -> None:
        self.is_whole = True  # nothing holds what nobody sees
        self.codes = set[int]()  # of the functions it leads to, by identity
        self._but, self._ran = but, ran
        self._held = list[tuple[str, Callable[[], _Found], list[Any]]]()
        waiting, seen = deque(("", root, _NONE, True) for root in roots), set[Any]()
        while waiting:
            name, value, asked, is_named = waiting.popleft()
            kind = type(value)
            way = asked if is_a(value, ModuleType) else name if ran is None else ""
            key = id(value), way
            is_far = ran is None and not is_named and is_a(value, *_LOOKED_INTO)
            if kind in PLAIN or key in seen or is_far or but(value):
                continue
            seen.add(key)
            found = self._reader(value, asked)
            if found is None:
                continue
            read, asked = found
            names, values = read()
            self._held.append((name, read, values))
            for at, one in enumerate(values):
                if type(one) not in PLAIN:
                    own = names[at] if names is not None and at < len(names) else name
                    waiting.append((own, one, asked, names is not None))
            if (is_named or ran is not None) and is_users_class(kind):
                waiting.append(("", kind, _NONE, True))

    def now(self) -> dict[str, list[Any]]:
        """Of each value, by name, what tells whether it, or what it holds, changes."""
        found = defaultdict[str, list[Any]](list)
        for name, read, _ in self._held:
            names, values = read()
            for at, value in enumerate(values):
                if names is None:
                    found[name].append(value)
                elif not self._but(value):
                    found[names[at] if at < len(names) else name].append(value)
        return found

    def is_as_before(self) -> bool:
        for _, read, before in self._held:
            now = read()[1]
            # Identities are compared first, which is quick; what is not the same one by one.
            is_same = len(now) == len(before) and all(map(operator.is_, now, before))
            if not is_same and not is_equal(before, now):
                return False
        return True

    def _reader(self, value: Any, asked: _Names) -> tuple[Callable[[], _Found], _Names] | None:
        """What gives what a value leads to, now; and what is asked of that."""
        if is_a(value, FunctionType):
            return self._of_function(value)
        if is_a(value, type):
            return (lambda: _of_class(value), _NONE) if is_users_class(value) else None
        if is_a(value, ModuleType):
            space = space_of(value) or {}
            is_followed = str(space.get("__name__")).partition(".")[0] not in _NOT_FOLLOWED
            return (lambda: _among(space, asked), asked) if is_followed else None
        if is_a(value, FrameType):
            named, own = _names_of(value.f_code)
            return lambda: _of_frame(value, named), own
        if is_a(value, *LEAVES, Hiding):
            return None
        look = reader_of(value)
        if look is None:
            self.is_whole = False
            return None
        return lambda: (None, look()), _NONE

    def _of_function(self, value: FunctionType) -> tuple[Callable[[], _Found], _Names] | None:
        code, is_own = value.__code__, is_users_function(value)
        if self._ran is None and not is_own:
            return None
        if self._ran is not None and id(code) not in self._ran:
            return None
        self.codes.update(map(id, _codes_in(code)))
        named, asked = _names_of(code) if is_own else (_NONE, _NONE)
        names, cells = (*sorted(named), *code.co_freevars), value.__closure__ or ()
        space = value.__globals__

        def read() -> _Found:
            found = [space.get(name, ABSENT) for name in names[: len(named)]]
            found += map(_content, cells)
            found += value.__defaults__ or ()
            found += (value.__kwdefaults__ or {}).values()
            return names, [*found, *vars(value).values()]

        return read, asked


def _content(cell: CellType) -> Any:
    return cell.cell_contents if cell != CellType() else ABSENT


def _of_class(kind: type) -> _Found:
    """Its bases, and what it has besides what is Python's own."""
    names, values = [""] * len(bases := bases_of(kind)), [*bases]
    for name, value in class_space_of(kind).items():
        is_pythons = name.startswith("__") and not is_a(value, FunctionType)
        if not is_pythons and name not in ("__init__", "_abc_impl"):
            names.append(name)
            values.append(value)
    return tuple(names), values


def _among(space: Mapping[str, Any], names: Collection[str]) -> _Found:
    found = [name for name in sorted(names) if name in space]
    return tuple(found), [space[name] for name in found]


def _of_frame(frame: FrameType, named: _Names) -> _Found:
    names, values = _among(frame.f_globals, named)
    own, others = _among(frame.f_locals, [*frame.f_locals])
    return (*(names or ()), *(own or ())), values + others


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes_in(one)


@cache
def _names_of(code: CodeType) -> tuple[_Names, _Names]:
    """The globals that code reads or sets, and all that it asks others for; with that of functions
    in it."""
    named = {one.argval for one in dis.get_instructions(code) if "_GLOBAL" in one.opname}
    asked = {*code.co_names}
    for one in code.co_consts:
        if isinstance(one, CodeType):
            named |= _names_of(one)[0]
            asked |= _names_of(one)[1]
    return _Names(named), _Names(asked)
