"""Groups: rows in pieces of which values say how long they are, each multiplied by its own matrix.

    pieces = rows.split(sizes.tolist())
    y = torch.cat([act(linear(piece, matrix)) for piece, matrix in zip(pieces, weight)])

Nothing is computed of a piece. Joined again in their order, pieces are all rows, of which each
chooses its matrix (`kernels/chosen_products.py`); operators of elements are those of all rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from autopar.capture.guards import VALUES
from autopar.capture.hooks import replaced
from autopar.errors import InvalidInput
from autopar.strategies.kernels.experts.chosen_products import CHOSEN_PRODUCTS
from autopar.text.source_lines import caller

_JOINED = (torch.cat, torch.concat, torch.concatenate)
PRODUCTS = (functional.linear, torch.matmul, torch.mm, Tensor.matmul, Tensor.mm)
_OPERANDS = ("input", "weight", "other", "mat2", "bias")
CASTS = ("to", "type_as", "float", "double", "half", "bfloat16")
OPERATORS = ("add", "sub", "mul", "truediv", "pow", "neg", "matmul")


class Sizes:
    """What `.tolist()` gives of numbers that nobody knows: lengths of pieces, and nothing else."""

    def __init__(self, tensor: Tensor) -> None:
        self.count, self.ends = len(tensor), tensor.cumsum(0)

    def __len__(self) -> int:
        return self.count

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(f"{name} of a list of numbers that tensors hold")

    def _refused(self, *_: Any) -> NoReturn:
        _refuse("a number of a list that .tolist() gives")

    __iter__ = __getitem__ = __contains__ = __add__ = __radd__ = __mul__ = __eq__ = _refused
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class _Call:
    """What a piece is made by, with its arguments flat; and what each had been changed by then."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    versions: list[int]


@dataclass(frozen=True, eq=False)
class _Piece:
    """One of the pieces of some rows, or what is made of it."""

    sizes: Sizes
    number: int
    made: Tensor | _Call  # all rows; or how
    version: int = 0  # of all rows

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        if function in _JOINED and not any(args[1:]) and not any((kwargs or {}).values()):
            return _joined(args[0])
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        found = [leaf for leaf in leaves if isinstance(leaf, _Piece)]
        is_one = len({(id(piece.sizes), piece.number) for piece in found}) == 1
        if is_one and (function in PRODUCTS or name in CASTS or is_of_elements(name)):
            return _Piece(
                found[0].sizes, found[0].number, _Call(function, leaves, spec, _versions(leaves))
            )
        _refuse(f"{name} of a piece of rows")

    def __getattr__(self, name: str) -> Any:
        function = getattr(Tensor, name, None)
        if not callable(function):
            _refuse(f"{name} of a piece of rows")
        return lambda *args, **kwargs: self.__torch_function__(function, (), (self, *args), kwargs)

    def _refused(self, *_: Any) -> NoReturn:
        _refuse("what is asked of a piece of rows")

    __len__ = __iter__ = __getitem__ = __bool__ = __int__ = __float__ = _refused


def _operation(name: str, is_right: bool) -> Callable[..., Any]:
    function = getattr(torch, name.replace("truediv", "true_divide"))

    def operate(self: _Piece, *others: Any) -> Any:
        args = (*others, self) if is_right else (self, *others)
        return self.__torch_function__(function, (), args)

    return operate


for _name in OPERATORS:
    for _side in ("", "r"):
        if hasattr(operator, f"__{_name}__"):
            setattr(_Piece, f"__{_side}{_name}__", _operation(_name, bool(_side)))


@contextmanager
def groups_followed() -> Iterator[None]:
    """Within, rows can be split into pieces of unknown lengths."""
    plain = Tensor.split

    @wraps(plain)
    def split(self: Tensor, split_size: Any, dim: int = 0) -> Any:
        if not isinstance(split_size, Sizes):
            return plain(self, split_size, dim)
        if dim not in (0, -self.ndim):
            _refuse("pieces of another dim than the first")
        return tuple(_Piece(split_size, n, self, self._version) for n in range(len(split_size)))

    with ExitStack() as stack:
        stack.enter_context(replaced(Tensor, "split", split))
        yield


def is_of_elements(name: str) -> bool:
    """Whether an operator does the same to each element, and draws none."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, one) for one in packet.overloads()] if packet else []
    tags = [one.tags for one in overloads if not one._schema.is_mutable]
    return any(
        torch.Tag.pointwise in one and torch.Tag.nondeterministic_seeded not in one for one in tags
    )


def _joined(pieces: Any) -> Tensor:
    """All pieces, one behind the other."""
    if all(isinstance(piece, _Piece) for piece in pieces):
        sizes = pieces[0].sizes
        numbers = [piece.number for piece in pieces if piece.sizes is sizes]
        if numbers == [*range(len(sizes))] and len(pieces) == len(sizes):
            return _of_all(pieces)
    _refuse("some pieces of rows, joined")


def _of_all(pieces: Sequence[_Piece]) -> Tensor:
    """What is made of each, made of all rows."""
    first = pieces[0].made
    if isinstance(first, Tensor):
        if any(piece.made is not first for piece in pieces):
            _refuse("pieces of several tensors, joined")
        if first._version != pieces[0].version:
            _refuse("rows that are changed in place before their pieces are joined")
        return first
    calls = [piece.made for piece in pieces if isinstance(piece.made, _Call)]
    forms = [(call.function, call.spec) for call in calls]
    if any(_versions(call.leaves) != call.versions for call in calls):
        _refuse("what is changed in place before pieces of rows are joined")
    if len(calls) < len(pieces) or any(form != forms[0] for form in forms):
        _refuse("pieces of rows that are not made alike, joined")
    leaves = [_argument(given) for given in zip(*(call.leaves for call in calls))]
    args, kwargs = pytree.tree_unflatten(leaves, first.spec)
    chosen = _chosen(pieces[0])
    if first.function in PRODUCTS:
        given = [*args, *(kwargs[name] for name in _OPERANDS if name in kwargs)]
        return _product(chosen, first.function is functional.linear, *given)

    def of_rows(given: _Matrices) -> Tensor:
        if given.stacked.ndim > 2:
            _refuse("an operator of elements of a matrix, and a piece of rows")
        return given.stacked[chosen].view(len(chosen), -1)

    args, kwargs = pytree.tree_map_only(_Matrices, of_rows, (args, kwargs))
    return first.function(*args, **kwargs)


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class _Matrices:
    """What pieces read besides, stacked."""

    stacked: Tensor


def _argument(given: Sequence[Any]) -> Any:
    """Of each piece, as one of all rows."""
    first = given[0]
    if isinstance(first, _Piece):
        return _of_all(given)
    if not isinstance(first, Tensor):
        if any(one != first for one in given):
            _refuse("pieces of rows that are not made alike, joined")
        return first
    base = first._base
    if base is not None and base.shape == (len(given), *first.shape):
        steps = [(one.storage_offset() - base.storage_offset(), one.stride()) for one in given]
        step, *inside = base.stride()
        is_all = steps == [(step * number, (*inside,)) for number in range(len(given))]
        if is_all and all(one._base is base for one in given):
            return _Matrices(base)
    return _Matrices(torch.stack(tuple(given)))


def _product(chosen: Tensor, is_linear: bool, rows: Any, matrices: Any, bias: Any = None) -> Tensor:
    if not isinstance(rows, Tensor) or not isinstance(matrices, _Matrices) or rows.ndim != 2:
        _refuse("a product of a piece of rows and another")
    stacked = matrices.stacked if is_linear else matrices.stacked.transpose(1, 2)
    y = CHOSEN_PRODUCTS(rows, stacked, chosen)
    return y if bias is None else y + bias.stacked[chosen]


def _chosen(piece: _Piece) -> Tensor:
    """The number of the piece that each row stands in."""
    while isinstance(made := piece.made, _Call):
        piece = next(leaf for leaf in made.leaves if isinstance(leaf, _Piece))
    ends = piece.sizes.ends
    return torch.searchsorted(ends, torch.arange(len(made), device=ends.device), right=True)


def _refuse(got: str) -> NoReturn:
    raise InvalidInput(
        VALUES,
        got=f"{got}, which follows from values",
        remedy="take pieces of rows by x.split(sizes.tolist()), each through products with its own "
        "matrix and operators of elements, and join all by torch.cat; or compute with all rows, "
        "and choose by torch.where and masks",
        source=caller(),
    )
