"""Reading of data from files into values of declared types, or a message that names the key.

`write` is the inverse: values of the same types become plain data.

    @dataclass(frozen=True)
    class Nodes:
        devices: Count
        link: Link
        names: tuple[str, ...] = ()

    read(Nodes, {"devices": 0, "link": {}})      # Mismatch: devices is a whole number from 1 ...

Nothing else is accepted: no other key, no other type, no size beyond the declared one. Pairs of a
name and a value are a table. A mapping whose keys are tuples is a list of rows, key then value. A
class with `parse` is text; one with `FORM`, `to_form` and `of_form` stands in a file as that form.
A field's metadata may give another `key`.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from autopar.errors import AutoparError
from autopar.text.suggestions import nearest

At = tuple[str | int, ...]  # the keys that lead to a value
LARGEST = 1 << 62  # whole numbers, in either direction
FURTHEST = 1e300  # numbers, in either direction
MOST = 1 << 17  # of what is counted: devices, axes' ranks, micro-batches


class Mismatch(Exception):
    """An error: the data at the keys `at` is not of the declared type."""

    def __init__(self, at: At, rule: str, got: object, remedy: str) -> None:
        super().__init__(rule)
        self.at, self.rule, self.got, self.remedy = at, rule, got, remedy

    @property
    def key(self) -> str:
        return ".".join(map(str, self.at)) or "the file"

    def __str__(self) -> str:
        return f"{self.key} {self.rule}: {_short(self.got)}"


@dataclass(frozen=True)
class Above:
    """A bound on numbers: at least `least`, or more than it, and at most `most`."""

    least: float
    included: bool = True
    most: float = math.inf

    def holds(self, value: float) -> bool:
        return (value >= self.least if self.included else value > self.least) and value <= self.most

    def __str__(self) -> str:
        least = f"{'at least' if self.included else 'more than'} {self.least:g}"
        return least if math.isinf(self.most) else f"{least}, at most {self.most:g}"


Positive = Annotated[float, Above(0, included=False)]
NotNegative = Annotated[float, Above(0)]
Part = Annotated[float, Above(0, most=1)]
Count = Annotated[int, Above(1, most=MOST)]
Index = Annotated[int, Above(0)]
Size = Annotated[int, Above(1)]


def is_count(value: object, least: int = 1) -> bool:
    """Return whether a value is a whole number (numpy's too) of at least `least`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= least  # type: ignore[operator]


def read(kind: Any, data: Any, at: At = ()) -> Any:
    """Return `data` as a value of `kind`, or raise `Mismatch`."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:  # read further by the caller
        return data
    if origin is Annotated and callable(args[1]):  # text, and what reads it
        return _parsed(args[1], data, at)
    if origin is Annotated:
        value = read(args[0], data, at)
        if not args[1].holds(value):
            raise Mismatch(at, f"{_PLAIN[args[0]][1]}, {args[1]}", data, "give such a number")
        return value
    if origin in (Union, types.UnionType):
        return _one_of(args, data, at)
    if origin is Literal:
        if not any(type(data) is type(value) and data == value for value in args):
            remedy = f"one of {', '.join(map(repr, args))}"
            raise Mismatch(at, "is one of the values that are known", data, remedy)
        return data
    if pairs := _pairs(kind):
        return tuple(read(pairs, data, at).items())
    if origin is tuple or origin is list:
        return _sequence(kind, data, at)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if rows := _rows(kind):
            return dict(map(rows.pair, read(rows.kind, data, at)))
        return {
            read(args[0], key, (*at, key)): read(args[1], value, (*at, key))
            for key, value in _table(data, at).items()
        }
    if kind in _PLAIN:
        return _plain(kind, data, at)
    if hasattr(kind, "FORM"):
        return _sound(kind.of_form, read(kind.FORM, data, at), at)
    if is_dataclass(kind) and not hasattr(kind, "parse"):
        return _fields(kind, data, at)
    return _parsed(kind.parse, data, at)


def _parsed(parse: Callable[[str], Any], data: Any, at: At) -> Any:
    try:
        return parse(_plain(str, data, at))
    except AutoparError as error:
        raise Mismatch(at, f"is text of its kind ({error.rule})", data, str(error.remedy)) from None


def _one_of(kinds: tuple[Any, ...], data: Any, at: At) -> Any:
    """Read data as the first of `kinds` that fits; the error is that of the last."""
    if data is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    for kind in kinds[:-1]:
        try:
            return read(kind, data, at)
        except Mismatch:
            continue
    return read(kinds[-1], data, at)


def _sequence(kind: Any, data: Any, at: At) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if not isinstance(data, list | tuple):
        raise Mismatch(at, "is a list", data, "write [ ... ]")
    if origin is list or args[1:] == (Ellipsis,):
        return origin(read(args[0], value, (*at, i)) for i, value in enumerate(data))
    if len(data) != len(args):
        raise Mismatch(at, f"is a list of {len(args)}", data, "write all of them, and no more")
    return tuple(read(inner, value, (*at, i)) for i, (inner, value) in enumerate(zip(args, data)))


def _fields(kind: Any, data: Any, at: At) -> Any:
    known = _declared(kind)
    for key in _table(data, at):
        if key not in known:
            close = " or ".join(map(repr, nearest(key, [*known])))
            remedy = f"did you mean {close}?" if close else f"use {sorted(known)}"
            raise Mismatch((*at, key), "is not a key here", data[key], remedy)
    for key, (field, _) in known.items():
        if key not in data and field.default is MISSING and field.default_factory is MISSING:
            raise Mismatch(at, f"needs the key {key!r}", sorted(data), f"add {key} = ...")
    values = {known[key][0].name: read(known[key][1], data[key], (*at, key)) for key in data}
    return _sound(lambda values: kind(**values), values, at)


def _sound(make: Callable[[Any], Any], value: Any, at: At) -> Any:
    """Call `make` on a value; turn its refusal into a `Mismatch`."""
    try:
        return make(value)
    except AutoparError as error:
        raise Mismatch(at, f"is sound ({error.rule})", error.got, str(error.remedy)) from None


@cache
def _declared(kind: Any) -> dict[str, tuple[Field[Any], Any]]:
    """Return the fields of a dataclass that a file holds, with their types, by key."""
    hints = get_type_hints(kind, include_extras=True)
    stored = [field for field in fields(kind) if field.init and field.metadata.get("stored", True)]
    return {field.metadata.get("key", field.name): (field, hints[field.name]) for field in stored}


def _pairs(kind: Any) -> Any:
    """Return the mapping type of a tuple of pairs of a name and a value; None for other types."""
    args = get_args(kind)
    if get_origin(kind) is not tuple or args[1:] != (Ellipsis,) or get_origin(args[0]) is not tuple:
        return None
    inner = get_args(args[0])
    is_pair = len(inner) == 2 and inner[0] is str and inner[1] is not Ellipsis
    return Mapping[str, inner[1]] if is_pair else None  # type: ignore[valid-type]


@dataclass(frozen=True)
class _RowMapping:
    """The form of a mapping with tuples as keys: a list of rows."""

    kind: Any
    parts: int  # of a key
    is_flat: bool  # the value has a number of parts of its own, which stand in the row

    def pair(self, row: tuple[Any, ...]) -> tuple[Any, Any]:
        value = row[self.parts :]
        return row[: self.parts], value if self.is_flat else value[0]

    def row(self, key: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
        return (*key, *(value if self.is_flat else (value,)))


def _rows(kind: Any) -> _RowMapping | None:
    keys, values = get_args(kind)
    if get_origin(keys) is not tuple:
        return None
    is_flat = get_origin(values) is tuple and get_args(values)[1:] != (Ellipsis,)
    parts = get_args(values) if is_flat else (values,)
    return _RowMapping(tuple[tuple[(*get_args(keys), *parts)], ...], len(get_args(keys)), is_flat)  # type: ignore[misc]


def write(value: Any, kind: Any = None) -> Any:
    """Return `value`, of `kind`, as plain data that `read` accepts."""
    kind = type(value) if kind is None else kind
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return str(value) if callable(args[1]) else write(value, args[0])
    if value is None or kind is Any or kind in _PLAIN or origin is Literal:
        return value
    if origin in (Union, types.UnionType):
        return write(value)
    if pairs := _pairs(kind):
        return write(dict(value), pairs)
    if isinstance(value, Mapping):
        inner = args[1] if args else None
        if rows := _rows(kind) if args else None:
            return write([rows.row(*item) for item in value.items()], rows.kind)
        return {str(key): write(entry, inner) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        is_long = not args or origin is list or args[1:] == (Ellipsis,)
        kinds = [args[0] if args else None] * len(value) if is_long else args
        return [write(entry, inner) for entry, inner in zip(value, kinds)]
    if hasattr(kind, "FORM"):
        return write(value.to_form(), kind.FORM)
    if is_dataclass(kind) and not hasattr(kind, "parse"):
        known = _declared(kind).items()  # type: ignore[arg-type]
        return {key: write(getattr(value, field.name), inner) for key, (field, inner) in known}
    return str(value) if hasattr(kind, "parse") else value


def json_text(data: Any) -> str:
    """Return figures as JSON, with null for infinite numbers and NaN, which JSON has not."""
    return json.dumps(_finite(data), allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _table(data: Any, at: At) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise Mismatch(at, "is a table", data, "write { key = value, ... }")
    return data


def _is_whole(data: Any) -> bool:
    return is_count(data, -LARGEST) and data <= LARGEST


def _is_number(data: Any) -> bool:
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    return is_number and abs(data) <= FURTHEST  # NaN is not


# For each plain type a test of the data, its rule and its remedy.
_PLAIN: dict[type, tuple[Callable[[Any], bool], str, str]] = {
    str: (lambda data: isinstance(data, str), "is text", "put it in quotes"),
    int: (_is_whole, "is a whole number", "give a count"),
    float: (_is_number, "is a number", "give it in seconds, bytes or FLOP/s"),
    bool: (lambda data: isinstance(data, bool), "is true or false", "write true or false"),
}


def _plain(kind: type, data: Any, at: At) -> Any:
    holds, rule, remedy = _PLAIN[kind]
    if not holds(data):
        raise Mismatch(at, rule, data, remedy)
    return kind(data)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 120 else f"{text[:100]} ..."
