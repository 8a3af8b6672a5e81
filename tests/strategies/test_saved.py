"""Autograd keeps the storages that rules predict, each counted once, and never more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.strategies import Rule, rule_of, tensor_inputs
from tests.strategies.rule_cases import CASES, t
from tests.strategies.rule_law import Case, run_call

aten = torch.ops.aten
NUMBERS = {torch.float64: torch.complex128, torch.float32: torch.complex64}
# torch keeps less than rules predict of a broadcast input: sums of it, or the input itself.
BROADCAST = (aten.einsum.default, aten.hinge_embedding_loss.default)
LOG_TARGET = Case("kl_div-log", aten.kl_div.default, (t(5, 4), t(5, 4), 0), {"log_target": True})


def of_dtype(case: Case, dtype: torch.dtype) -> Case:
    """Return a case with its real numbers in another dtype."""

    def converted(value: object) -> object:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        if isinstance(value, Tensor) and value.is_complex():
            return value.to(NUMBERS[dtype])
        return value

    args, kwargs = pytree.tree_map(converted, (case.args, case.kwargs))
    return Case(case.name, case.target, args, kwargs, constants=case.constants)


def learning(case: Case) -> Iterator[tuple[int, ...]]:
    """Yield all inputs that can learn, then each of them alone."""
    values = [node.meta["val"] for node in tensor_inputs(case.node())]
    able = [i for i, v in enumerate(values) if v.is_floating_point() or v.is_complex()]
    every = tuple(i for i in able if i not in case.constants)
    yield from dict.fromkeys((every, *((index,) for index in every)))


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class KeptBytes(NamedTuple):
    """Bytes that autograd keeps of a call, those that its rule predicts, and their tensors."""

    actual: int
    predicted: int
    actual_names: set[str]
    predicted_names: set[str]


def kept_bytes(case: Case, learn: tuple[int, ...]) -> KeptBytes:
    """Run a call whose inputs `learn` take a gradient, and return the bytes it keeps."""
    node = case.node()
    nodes = tensor_inputs(node)
    for index, value in enumerate(nodes):
        value.meta["differentiable"] = index in learn
    rule = rule_of(node)
    assert rule is not None
    values = [value.meta["val"] for value in nodes]
    leaves = [v.detach().clone().requires_grad_(i in learn) for i, v in enumerate(values)]
    saved: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        saved.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        outputs = run_call(case.target, node.args, node.kwargs, dict(zip(nodes, leaves)))
    if not any(output.requires_grad for output in outputs):
        return KeptBytes(0, 0, set(), set())
    actual = {storage(value): value.untyped_storage().nbytes() for value in saved}
    named = {storage(leaf): f"input {index}" for index, leaf in enumerate(leaves)}
    named |= {storage(output): "output" for output in outputs if storage(output) not in named}
    saved_inputs = rule.saved.inputs_for([index in learn for index in range(len(leaves))])
    predicted = {storage(leaves[index]): leaves[index].nbytes for index in saved_inputs}
    if rule.saved.output:
        predicted |= {storage(o): o.nbytes for o in outputs if o.requires_grad}
    whole = sum(predicted.values()) + sum(extra_bytes(rule, outputs[0].dtype))
    actual_names = {named[pointer] for pointer in actual if pointer in named}
    names = {named[pointer] for pointer in predicted}
    return KeptBytes(sum(actual.values()), whole, actual_names, names)


def extra_bytes(rule: Rule, dtype: torch.dtype) -> Iterator[int]:
    for extra in rule.saved.extra:
        count = math.prod(rule.sizes[factor] for dim in extra.dims for factor in dim)
        yield count * (extra.dtype or dtype).itemsize


@pytest.mark.sampled(60)
@pytest.mark.parametrize("case", [*CASES, LOG_TARGET], ids=lambda case: case.name)
def test_saved(case: Case) -> None:
    """With all inputs learning the very bytes; with one alone at least what is kept."""
    for dtype in (torch.float64, torch.float32):
        assert_saved(of_dtype(case, dtype), dtype)


def assert_saved(case: Case, dtype: torch.dtype) -> None:
    for number, learn in enumerate(learning(case)):
        actual, predicted, inputs, named = kept_bytes(case, learn)
        assert actual <= predicted, (learn, dtype)
        # The memory of an LSTM by oneDNN is measured, not known.
        is_measured = case.target is aten.lstm.input and dtype is torch.float32
        if number == 0 and case.target not in BROADCAST and not is_measured:
            assert actual == predicted, dtype
            assert inputs - {"output"} <= named


@pytest.mark.sampled(60)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_half_precision_is_never_kept_for_less(case: Case) -> None:
    """Statistics are wider than what they are of; on a GPU always, on a CPU at times."""
    case = of_dtype(case, torch.bfloat16) if not _has_complex(case) else case
    try:
        case.node()
    except RuntimeError:
        pytest.skip("torch has no such kernel in half precision")
    for learn in learning(case):
        actual, predicted, _, _ = kept_bytes(case, learn)
        assert actual <= predicted, learn


def _has_complex(case: Case) -> bool:
    return any(isinstance(v, Tensor) and v.is_complex() for v in pytree.tree_leaves(case.args))
