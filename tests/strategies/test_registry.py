"""Registering rules for own operators, and finding the rule of a node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.strategies import OperatorCall, Rule, has_rule, register_rule, rule_of, tensor_inputs
from autopar.strategies.language import Options, Pattern, validate_options
from tests.strategies.rule_law import Case, check_all


@torch.library.custom_op("registry_test::scaled_product", mutates_args=())
def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    return scale * (left @ right)


def rotate(x: Tensor, angle: Tensor | None = None, steps: int = 1) -> Tensor:
    return x.roll(steps, -1) if angle is None else x.roll(steps, -1) * angle


def check(case: Case) -> Rule:
    return check_all(case, Mesh(a=2, b=2))


@pytest.mark.parametrize(
    "named",
    [
        scaled_product,
        "registry_test.scaled_product",
        "registry_test::scaled_product",
        torch.ops.registry_test.scaled_product,
        torch.ops.registry_test.scaled_product.default,
    ],
    ids=["custom_op", "name", "qualified name", "packet", "overload"],
)
def test_operator_of_a_library(named: object) -> None:
    register_rule(named, "m k, k n -> m n")
    target = torch.ops.registry_test.scaled_product.default
    assert has_rule(target)
    left, right = torch.randn(5, 3).double(), torch.randn(3, 4).double()
    rule = rule_of(Case("scaled", target, (left, right, 2.0)).node())
    assert rule is not None
    assert rule.cuttable == ("m", "k", "n")


def test_plain_function_with_an_absent_input() -> None:
    register_rule(rotate, "... d!, d! -> ... d!")
    x = torch.randn(5, 4, dtype=torch.float64)
    assert check(Case("rotate", rotate, (x, x[0]))).cuttable == ("d0",)
    assert check(Case("rotate", rotate, (x,), {"steps": 2})).cuttable == ("d0",)


def test_a_function_may_make_the_rule() -> None:
    def my_sum(x: Tensor, dim: int) -> Tensor:
        return x.sum(dim)

    def rule(call: OperatorCall) -> Rule:
        dims = [("x",), ("y",)]
        remaining = [dim for i, dim in enumerate(dims) if i != call.dim(call["dim"])]
        return call.rule([dims], remaining, dict(zip("xy", call.shapes[0])), passes=[(0,)])

    register_rule(my_sum, rule)
    x = torch.randn(5, 4, dtype=torch.float64)
    checked = check(Case("my_sum", my_sum, (x, -1)))
    assert checked.text == "x y -> x"
    assert len(checked.passes) == 1


def test_mistakes_are_told_at_registration() -> None:
    with pytest.raises(InvalidInput, match="exactly one"):
        register_rule(rotate, "a b")
    with pytest.raises(InvalidInput, match="operator that exists"):
        register_rule("aten.no_such_operator", "a -> a")
    with pytest.raises(InvalidInput, match="operator that exists"):
        register_rule("special_bessel_j0", "... -> ...")  # any name may be that of a library
    with pytest.raises(InvalidInput, match="operator or a function"):
        register_rule(3, "a -> a")


def test_a_line_that_does_not_fit_names_the_source() -> None:
    def own(x: Tensor) -> Tensor:
        return x + 1

    register_rule(own, "a b c -> a b c")
    node = Case("own", own, (torch.ones(2, 3),)).node()
    node.meta["source"] = "model.py:12"
    with pytest.raises(InvalidInput, match="every dim") as caught:
        rule_of(node)
    assert "model.py:12" in str(caught.value)


def test_unknown_operators_have_no_rule() -> None:
    node = Case("unknown", lambda x: x + 1, (torch.ones(3),)).node()
    assert rule_of(node) is None
    assert tensor_inputs(node) == (node.args[0],)
    assert rule_of(node.args[0]) is None  # a placeholder  # type: ignore[arg-type]


def test_inputs_come_in_the_order_of_the_schema() -> None:
    x, ids = torch.ones(5, 4), torch.tensor([1])
    call = Case("index", torch.ops.aten.index.Tensor, (x, [None, ids])).node()
    assert [tuple(node.meta["val"].shape) for node in tensor_inputs(call)] == [(5, 4), (1,)]
    named = Case(
        "linear", torch.ops.aten.linear.default, (), {"weight": torch.ones(3, 4), "input": x}
    ).node()
    assert [tuple(node.meta["val"].shape) for node in tensor_inputs(named)] == [(5, 4), (3, 4)]


def test_a_bool_is_no_partial_sum() -> None:
    target = torch.ops.aten.view.default
    number = rule_of(Case("view", target, (torch.ones(4, 3), [12])).node())
    truth = rule_of(Case("view", target, (torch.ones(4, 3, dtype=torch.bool), [12])).node())
    assert number is not None
    assert truth is not None
    assert (len(number.passes), len(truth.passes)) == (1, 0)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"even": ("q",)}, "even= of a rule names factors of its line"),
        ({"kernels": {"q": "cut_embedding"}}, "kernels= of a rule names factors"),
        ({"kernels": {"h": "other"}}, "kernels= of a rule gives known ones"),
        ({"sizes": {"q": 3}}, "sizes= of a rule names factors"),
        ({"passes": [(2,)]}, "passes= of a rule has sets of inputs"),
        ({"passes": [0]}, "passes= of a rule has sets of inputs"),
        ({"saved": "0 outputs"}, "saved= of a rule has inputs"),
        ({"saved": "2"}, "saved= of a rule has inputs"),
        ({"extra": "float99: h"}, "no dtype of torch"),
    ],
)
def test_what_a_line_does_not_know_is_no_option(options: dict[str, Any], rule: str) -> None:
    """Passed over, it would cut a factor that must be even, or without its kernel."""
    with pytest.raises(InvalidInput, match=rule):
        register_rule("aten.mul", "... h, h -> ... h", **options)


def test_options_may_name_what_a_line_has() -> None:
    known = Options(even=("d0", "h"), sizes={"q": 3}, extra="q", saved="1 output")
    validate_options(Pattern.read("... h, h -> ... h"), known)


def test_a_function_gives_a_rule() -> None:
    def ten(x: torch.Tensor) -> torch.Tensor:
        return x * 10

    register_rule(ten, lambda call: "... -> ...")  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidInput, match="gives a Rule, or None"):
        rule_of(Case("ten", ten, (torch.ones(3),)).node())
