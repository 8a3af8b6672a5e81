"""Rules: layouts, candidates and refusals that follow from them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.strategies import JointCut, Rule, Strategy, parse

LINEAR = parse("... i, o i -> ... o", ((8, 16), (32, 16)), passes="each")


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        (Strategy(), "[_, _] [_, _] | [_, _] [_, _] | [_, _]"),
        # data parallelism: the weight's gradient is a partial sum
        (Strategy.of(d0="dp"), "[@dp, _] [_, _] | [@dp, _] [_, _]{+dp} | [@dp, _]"),
        # by columns: the input's gradient is a partial sum
        (Strategy.of(o="tp"), "[_, _] [@tp, _] | [_, _]{+tp} [@tp, _] | [_, @tp]"),
        # by rows: the output is a partial sum
        (Strategy.of(i="tp"), "[_, @tp] [_, @tp] | [_, @tp] [_, @tp] | [_, _]{+tp}"),
        (
            Strategy.of(d0="dp", o=("tp", "sp")),
            "[@dp, _] [@tp@sp, _] | [@dp, _]{+sp, +tp} [@tp@sp, _]{+dp} | [@dp, @tp@sp]",
        ),
        # a partial sum passes: its gradient is a replica, that of the other input is partial
        (Strategy.of({"tp": 0}), "[_, _]{+tp} [_, _] | [_, _] [_, _]{+tp} | [_, _]{+tp}"),
    ],
)
def test_signature(strategy: Strategy, wanted: str) -> None:
    signature = LINEAR.signature(strategy)
    sides = (signature.inputs, signature.gradients, signature.outputs)
    assert " | ".join(" ".join(map(str, side)) for side in sides) == wanted


def degrees(rule: Rule, mesh: Mesh) -> set[tuple[int, ...]]:
    """Return the numbers of pieces of all factors, over the strategies that use every axis."""
    return {
        tuple(mesh.degree(strategy.by_factor.get(factor, ())) for factor in rule.factors)
        for strategy in rule.strategies(mesh)
        if len(strategy.axes) == len(mesh.names)
    }


def test_matmul_on_eight_devices_has_ten_strategies() -> None:
    mesh = Mesh(a=2, b=2, c=2)
    matmul = parse("m k, k n -> m n", ((64, 32), (32, 16)))
    all_degrees = degrees(matmul, mesh)
    assert len(all_degrees) == 10
    assert all(math.prod(pieces) == 8 for pieces in all_degrees)


@pytest.mark.parametrize(("mesh", "factors"), [(Mesh(a=2), 2), (Mesh(a=2, b=2), 3)])
def test_number_of_candidates(mesh: Mesh, factors: int) -> None:
    """Each axis to a factor, a pass or nothing; on one factor the axes come in every order."""
    names = "xyz"[:factors]
    rule = parse(f"{' '.join(names)} -> {' '.join(names)}", ((8,) * factors,), passes="all")
    axes, choices = len(mesh.names), factors + 2
    extra = {1: 0, 2: factors}[axes]  # the second order of both axes on one factor
    assert len(rule.strategies(mesh)) == choices**axes + extra
    assert len(rule.strategies(mesh, ordered=False)) == choices**axes
    assert len(set(rule.strategies(mesh))) == len(rule.strategies(mesh))


def test_no_piece_is_smaller_than_one_element() -> None:
    mesh = Mesh(a=2, b=2)
    rule = parse("x y -> x y", ((3, 2),))
    assert Strategy.of(x="a") in rule.strategies(mesh)
    assert not any(strategy.by_factor.get("x") == ("a", "b") for strategy in rule.strategies(mesh))
    assert not any(strategy.by_factor.get("y") == ("a", "b") for strategy in rule.strategies(mesh))


def test_groups_are_cut_evenly() -> None:
    rule = parse("(h d) -> h d", ((18,),), ((6, 3),))
    assert rule.must_be_even("h")
    assert {s.by_factor.get("h") for s in rule.strategies(Mesh(a=2, b=2))} == {
        None,
        ("a",),
        ("b",),
    }
    assert ("c",) in {s.by_factor.get("h") for s in rule.strategies(Mesh(c=3))}


def test_axes_of_one_rank_are_left_alone() -> None:
    assert LINEAR.strategies(Mesh(a=1)) == [Strategy()]


def test_every_candidate_is_valid() -> None:
    mesh = Mesh(a=2, b=4)
    for strategy in LINEAR.strategies(mesh):
        LINEAR.validate(strategy, mesh)


CARRIED = replace(
    parse("x! -> x", ((8,),)), joints={"carry": JointCut("cut_cumsum", ("x",), ("x",))}
)


@pytest.mark.parametrize(
    ("rule", "strategy", "complaint"),
    [
        (LINEAR, Strategy.of(i="zz"), "must be one of the mesh's"),
        (LINEAR, Strategy.of(q="a"), "'q' is not one of the rule's factors"),
        (LINEAR, Strategy.of(i="a", o="a"), "each axis to one factor"),
        (LINEAR, Strategy.of({"a": 2}), "only through one of the rule's passes"),
        (parse("x! -> x", ((8,),)), Strategy.of(x="a"), "needs 'x' whole"),
        (parse("x -> x", ((3,),)), Strategy.of(x=("a", "b")), "be at most the size"),
        (parse("(x y) -> x y", ((9,),), ((3, 3),)), Strategy.of(x="a"), "divide the size"),
        (parse("(x y) -> x y", ((9,),), ((3, 3),)), Strategy.of(y="a"), "is an inner one"),
        (parse("x y, y -> y", ((4, 4), (4,))), Strategy.of(x="a"), "an input lacks it"),
        (CARRIED, Strategy.of(carry=("b", "a")), "stand in the order of the mesh"),
    ],
)
def test_refusals(rule: Rule, strategy: Strategy, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint) as caught:
        rule.validate(strategy, Mesh(a=2, b=2), source="model.py:3")
    assert "remedy" in str(caught.value)


def test_bounds_and_work_of_a_piece() -> None:
    rule, mesh = parse("x y -> x y", ((5, 4),)), Mesh(a=2, b=2)
    strategy = Strategy.of(x=("b", "a"))
    # b cuts 5 into 3 and 2, then a cuts those into 2 and 1, 1 and 1
    assert [rule.bounds("x", strategy, mesh, rank) for rank in range(4)] == [
        (0, 2),
        (3, 1),
        (2, 1),
        (4, 1),
    ]
    assert rule.bounds("y", strategy, mesh, 3) == (0, 4)
    share = rule.bounds("x", strategy, mesh, 0)[1] / rule.sizes["x"]
    assert rule.flops * share == 20 * 2 / 5


def test_strategies_print() -> None:
    assert str(Strategy.of({"c": 0}, x=("a", "b"))) == "x@a@b pass 0+c"
    assert str(Strategy()) == "replicated"
