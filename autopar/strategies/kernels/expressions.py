"""Expressions: functions of elements, as text among the arguments of an operator.

>>> evaluate("mul(silu(gate), up)", gate=torch.zeros(2), up=torch.ones(2))
tensor([0., 0.])

A text names operators of torch and their arguments: values, numbers, None, `key=number`. A part
that is written twice is computed once.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.errors import InvalidInput


def evaluate(text: str, **values: Tensor) -> Tensor:
    """Return the value of an expression of `values`."""
    return _value_of(_parsed(text), dict[str, Any](values))


def _value_of(node: ast.expr, values: dict[str, Any]) -> Any:
    """Return the value of a part of an expression; `values` has known ones by their text."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return -_value_of(node.operand, values)
    key = ast.unparse(node)
    if key not in values:
        assert isinstance(node, ast.Call)
        named = {word.arg or "": _value_of(word.value, values) for word in node.keywords}
        operator = getattr(torch.ops.aten, ast.unparse(node.func))
        values[key] = operator(*(_value_of(part, values) for part in node.args), **named)
    return values[key]


def require(text: str, values: tuple[str, ...]) -> None:
    """Refuse a text that is no expression of `values`."""
    try:
        tree = _parsed(text)
    except SyntaxError:
        raise _refusal(text, values) from None
    called = set[ast.expr]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called.add(node.func)
            is_known = isinstance(node.func, ast.Name) and hasattr(torch.ops.aten, node.func.id)
        elif isinstance(node, ast.Name):
            is_known = node in called or node.id in values
        elif isinstance(node, ast.UnaryOp):
            is_known = isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
        else:
            is_known = isinstance(node, ast.Constant | ast.keyword | ast.Load | ast.USub)
        if not is_known:
            raise _refusal(text, values)


@cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _refusal(text: str, values: tuple[str, ...]) -> InvalidInput:
    return InvalidInput(
        f"an expression names operators of torch, numbers, and {' and '.join(values)}",
        got=repr(text),
        remedy='write it like "mul(silu(gate), up)"',
    )
