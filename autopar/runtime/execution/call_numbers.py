"""Call numbers: the numbers in the calls of a program that follow a size of its inputs.

    forms = NumberForms(sizes=(8, 9, 12))                       # of these programs
    template = forms.of([[4, 8, 2], [4, 9, 2], [4, 12, 2]])     # [4, Affine(1, 0), 2]
    filled(template, 16)                         # [4, 16, 2]

Arguments of one call in several programs are laid side by side. What is equal stays; whole numbers
that differ lie on a line over the sizes; whatever else differs makes the programs `Unalike`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor, fx

from autopar.base.exact_values import is_same_tensor, is_same_value


@dataclass(frozen=True)
class Affine:
    """A number that follows a size: `(times * size + plus) / divisor`."""

    times: int
    plus: int
    divisor: int = 1

    def __call__(self, size: int) -> int:
        return (self.times * size + self.plus) // self.divisor

    def fits(self, size: int) -> bool:
        """Return whether the number is a whole one."""
        return (self.times * size + self.plus) % self.divisor == 0

    @classmethod
    def through(cls, sizes: Sequence[int], numbers: Sequence[int]) -> Affine | None:
        """Return the form that gives these numbers at these sizes, of which two at least differ."""
        (first, *_, last), (start, *_, end) = sizes, numbers
        slope = Fraction(end - start, last - first)
        plus = start - slope * first
        divisor = math.lcm(slope.denominator, plus.denominator)
        form = cls(int(slope * divisor), int(plus * divisor), divisor)
        pairs = zip(sizes, numbers)
        return form if all(form.fits(size) and form(size) == n for size, n in pairs) else None


class Unalike(Exception):
    """Programs differ in more than numbers that follow a size."""


class NumberForms:
    """Finds the forms of numbers in programs that were made at several sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.seen: dict[Affine, None] = {}  # all forms so far, in order
        self._pairs: dict[fx.Node, fx.Node] = {}  # node of a program -> that of the last one

    def pair(self, graphs: Sequence[fx.Graph]) -> list[tuple[fx.Node, ...]]:
        """Return the nodes of these graphs side by side, which later templates may name."""
        columns = [list(graph.nodes) for graph in graphs]
        if len({len(column) for column in columns}) > 1:
            raise Unalike("number of calls")
        rows = list(zip(*columns))
        for row in rows:
            if len({node.op for node in row}) > 1:
                raise Unalike(f"{row[-1].name}")
            self._pairs.update(dict.fromkeys(row, row[-1]))
        return rows

    def of(self, values: Sequence[Any]) -> Any:
        """Return one template of these arguments, with a form where numbers differ."""
        last = values[-1]
        if len({type(value) for value in values}) > 1:
            raise Unalike(f"{values}")
        if isinstance(last, fx.Node):
            if any(self._pairs.get(value) is not last for value in values):
                raise Unalike(f"the readers of {last.name}")
            return last
        if isinstance(last, list | tuple):
            if len({len(value) for value in values}) > 1:
                raise Unalike(f"{values}")
            return _sequence(last, [self.of(items) for items in zip(*values)])
        if isinstance(last, dict):
            if any([*value] != [*last] for value in values):
                raise Unalike(f"{values}")
            return {key: self.of([value[key] for value in values]) for key in last}
        if isinstance(last, slice):
            ends = [(value.start, value.stop, value.step) for value in values]
            return slice(*self.of(ends))
        if isinstance(last, partial):
            split = [(value.func, value.args, value.keywords) for value in values]
            function, args, keywords = self.of(split)
            return partial(function, *args, **keywords)
        if isinstance(last, int) and not isinstance(last, bool):
            return self._number(values)
        if not all(_is_equal(value, last) for value in values):
            raise Unalike(f"{values}")
        return last

    def _number(self, values: Sequence[int]) -> int | Affine:
        if len({*values}) == 1:
            return values[0]
        form = Affine.through(self.sizes, values)
        if form is None:
            raise Unalike(f"{values} at sizes {self.sizes}")
        self.seen.setdefault(form)
        return form


def filled(template: Any, size: int) -> Any:
    """Return arguments at a size, of their template."""
    return with_numbers(template, lambda form: form(size))


def with_numbers(template: Any, number: Callable[[Affine], Any]) -> Any:
    """Return a template with something in the place of each form of a number."""
    if isinstance(template, Affine):
        return number(template)
    if isinstance(template, list | tuple):
        return _sequence(template, [with_numbers(item, number) for item in template])
    if isinstance(template, dict):
        return {key: with_numbers(item, number) for key, item in template.items()}
    if isinstance(template, slice):
        return slice(*with_numbers((template.start, template.stop, template.step), number))
    if isinstance(template, partial):
        args, keywords = with_numbers((template.args, template.keywords), number)
        return partial(template.func, *args, **keywords)
    return template


def _sequence(like: Any, items: list[Any]) -> Any:
    """Return a list or tuple like another one, which may have names."""
    return type(like)._make(items) if hasattr(like, "_make") else type(like)(items)


def forms_in(template: Any) -> Iterator[Affine]:
    """Yield the forms of numbers in a template."""
    if isinstance(template, Affine):
        yield template
    elif isinstance(template, list | tuple):
        for item in template:
            yield from forms_in(item)
    elif isinstance(template, dict):
        yield from forms_in([*template.values()])
    elif isinstance(template, slice):
        yield from forms_in((template.start, template.stop, template.step))
    elif isinstance(template, partial):
        yield from forms_in((template.args, template.keywords))


def varies(template: Any) -> bool:
    """Return whether a template has forms of numbers."""
    return any(True for _ in forms_in(template))


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor):
        return is_same_tensor(one, other)
    if isinstance(one, float | complex):
        return is_same_value(one, other)
    if isinstance(one, FunctionType):
        return _is_same_function(one, other)
    return bool(one == other)


def _is_same_function(one: FunctionType, other: FunctionType) -> bool:
    """Return whether two functions that were made in one place hold the same."""
    if one.__code__ is not other.__code__ or one.__defaults__ != other.__defaults__:
        return False
    cells = zip(one.__closure__ or (), other.__closure__ or ())
    return all(_is_equal(a.cell_contents, b.cell_contents) for a, b in cells)


SetSize = Callable[[int], None]
