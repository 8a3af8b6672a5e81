"""Formula: what a person reads and what a program computes, made from one expression.

>>> from sympy import Symbol
>>> ring = Formula("all_gather", (Symbol("p") - 1) / Symbol("p") * Symbol("V") / Symbol("B"))
>>> ring(p=8, V=1e9, B=100e9)
0.00875
>>> ring.text
'all_gather = V*(p - 1)/(B*p)'
>>> print(ring.explain(p=8, V=1e9, B=100e9))
all_gather = V*(p - 1)/(B*p) = 1e9*(8 - 1)/(1e11*8) = 0.00875

Arguments may be numpy arrays; the answer then has their shape.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import numpy
import sympy
from sympy.printing.numpy import NumPyPrinter

from autopar.errors import InvalidInput


class _Printer(NumPyPrinter):
    """A printer of maxima between numbers and arrays, which numpy's own does not foresee."""

    def _print_Max(self, expression: sympy.Expr, of_two: str = "maximum") -> str:
        text = self._print(expression.args[0])
        for argument in expression.args[1:]:
            text = f"numpy.{of_two}({text}, {self._print(argument)})"
        return text

    def _print_Min(self, expression: sympy.Expr) -> str:
        return self._print_Max(expression, "minimum")


class Formula:
    """A named expression; its symbols are the keyword arguments of a call."""

    def __init__(self, name: str, expression: sympy.Expr) -> None:
        self.name, self.expression = name, expression
        self.symbols: tuple[str, ...] = tuple(
            sorted(symbol.name for symbol in expression.free_symbols)
        )

    @cached_property
    def _compiled(self) -> Any:
        symbols = [sympy.Symbol(name) for name in self.symbols]
        printer = _Printer({"fully_qualified_modules": True, "inline": True})
        return sympy.lambdify(symbols, self.expression, modules=[{"numpy": numpy}], printer=printer)

    def __call__(self, **values: Any) -> Any:
        """Return the number (or the array of numbers) for these values of the symbols."""
        try:
            result = self._compiled(*(values[name] for name in self.symbols))
        except KeyError as missing:
            raise InvalidInput(
                "a formula needs a value for each of its symbols",
                got=f"{self.text} without {missing}",
                remedy=f"give {', '.join(self.symbols)}",
            ) from None
        return result if getattr(result, "shape", ()) else float(result)

    @property
    def text(self) -> str:
        """Return the formula as a person writes it."""
        return f"{self.name} = {sympy.sstr(self.expression)}"

    def explain(self, **values: Any) -> str:
        """Return the formula, the formula with the numbers in it, and the result."""
        names = "|".join(map(re.escape, sorted(self.symbols, key=len, reverse=True)))
        filled = re.sub(
            rf"\b({names})\b", lambda match: _number(values[match[0]]), sympy.sstr(self.expression)
        )
        return f"{self.text} = {filled} = {_number(self(**values))}"


def _number(value: Any) -> str:
    """Return a short text of a number: 8, 0.00875, 1e9, 1.5e-06."""
    text = f"{float(value):.6g}"
    mantissa, mark, exponent = text.partition("e")
    if not mark and float(value).is_integer() and abs(float(value)) >= 1e6:
        mantissa, _, exponent = f"{float(value):e}".partition("e")
        mark = "e"
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}" if mark else mantissa
