"""Operators that change their argument: each has the functional form with the same arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.capture.normalisations.inplace import functional_of
from autopar.strategies.registry import has_rule
from tests.capture.support import DTYPE, program, random

aten = torch.ops.aten
# Copies and diagonals have forms of their own; lists are Python's; polygamma takes its order first.
OTHERS = {"aten::copy_", "aten::fill_diagonal_", "aten::polygamma_"}


def types(overload: Any) -> list[str]:
    return [str(argument.type) for argument in overload._schema.arguments]


def overloads_that_write() -> Iterator[Any]:
    """Those of operators that have a rule without the underscore."""
    for name in sorted({schema.name for schema in torch._C._jit_get_all_schemas()}):
        library, _, name = name.partition("::")
        functional = getattr(aten, name.rstrip("_"), None) if name[0] != "_" else None
        if library == "aten" and name.endswith("_") and functional is not None:
            overloads = [getattr(functional, one) for one in functional.overloads()]
            if any(map(has_rule, overloads)):
                yield from (
                    getattr(getattr(aten, name), o) for o in getattr(aten, name).overloads()
                )


def test_each_has_a_functional_form_with_the_same_arguments() -> None:
    writing = [one for one in overloads_that_write() if one._schema.is_mutable]
    assert len(writing) > 150
    for one in writing:
        if one._schema.name not in OTHERS and "Tensor" in types(one):
            form = functional_of(one)
            assert form is not None, one
            assert types(form) == types(one), one
            assert not form._schema.is_mutable, form


def changed(change: Callable[..., Any], *given: Any) -> Callable[[Any, Tensor], Tensor]:
    """A model that changes a copy of what its layer gives, by a method or an operator."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.linear(x).abs() + 1
        copied = h.clone()
        copied = change(copied, *given)
        return copied * h

    return forward


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (operator.ipow, 3),
        (Tensor.pow_, random(4).abs()),
        (Tensor.float_power_, 2.0),
        (Tensor.ldexp_, torch.ones(4, dtype=torch.int64)),
        (operator.imod, 2),
    ],
)
def test_powers_and_their_kin(change: Callable[..., Any], given: Any) -> None:
    program(changed(change, given), random(3, 4))


def test_whole_numbers_and_bits() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        whole, wanted = (x * 8).long(), x > 0
        whole //= 3
        whole **= 2
        whole <<= 2
        whole |= 1
        wanted &= x < 1
        wanted ^= x < -1
        return self.linear(x) * whole * wanted

    program(forward, random(3, 4))


def to_slice(z: Tensor) -> None:
    z[:, 1:] = z[:, 1:] * 2j


def to_column(z: Tensor) -> None:
    z[:, 0] = 1j


def to_part(z: Tensor) -> None:
    z.imag[:, 1:] *= 3
    torch.view_as_real(z)[0, :, 0] = 1


def to_conjugate(z: Tensor) -> None:
    z.conj()[:, :2] = z[:, 2:].clone()


@pytest.mark.parametrize("write", [to_slice, to_column, to_part, to_conjugate])
def test_parts_of_complex_tensors(write: Callable[[Tensor], None]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        z = torch.complex(self.linear(x), x)
        write(z)
        return z.abs() + z.imag

    program(forward, random(3, 4))


def test_real_values_in_a_complex_tensor() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        z = torch.zeros(3, 4, dtype=DTYPE.to_complex())
        z[:, 1:] = self.linear(x)[:, 1:]
        return z.real

    program(forward, random(3, 4))
