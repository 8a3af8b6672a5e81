"""Rules that functions derive from a node, as lines; and that the law catches wrong ones."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.mesh import Mesh
from autopar.strategies import Strategy, register_rule, rule_of
from autopar.strategies.rules.shapes import reshape_factors
from tests.strategies.rule_cases import i, operator, t
from tests.strategies.rule_law import Case, check_all


@pytest.mark.parametrize(
    ("name", "args", "line"),
    [
        ("view.default", (t(8, 6, 4), [-1, 4]), "d0 d1 d2 -> (d0 d1) d2"),
        ("view.default", (t(8, 12), [8, -1, 3]), "d0 (d1 d2) -> d0 d1 d2"),
        ("view.default", (t(8, 12), [8, 1, 12]), "d0 d1 -> d0 1 d1"),
        ("view.default", (t(4, 6), [2, 12]), "(d0 d1) d2 -> d0 (d1 d2)"),
        ("view.default", (t(6, 4), [4, 6]), "(d0 d1!) d2! -> (d0 d3!) d4!"),
        ("view.default", (t(3, 4), [4, 3]), "d1! d2! -> d3! d4!"),
        ("view.default", (t(8, 3, 0), [8, 0]), "d0 d1! d2! -> d0 d3!"),
        ("view.default", (t(8, 12, 0), [8, 3, 4, 0]), "d0 (d1 d2) d3! -> d0 d1 d2 d4!"),
        ("view.default", (t(8, 0, 3), [2, 4, 0]), "(d0 d1) d2! d3! -> d0 d1 d4!"),
        ("transpose.int", (t(5, 3, 4), 1, -1), "d0 d1 d2 -> d0 d2 d1"),
        ("permute.default", (t(5, 3, 4), [2, 0, 1]), "d0 d1 d2 -> d2 d0 d1"),
        ("expand.default", (t(1, 4), [3, 2, 4]), "1 d2 -> d0 d1 d2"),
        ("select.int", (t(5, 3), 1, 0), "d0 d1! -> d0"),
        ("slice.Tensor", (t(5, 3), 1, 1, 3), "d0 d1! -> d0 n1!"),
        ("slice.Tensor", (t(5, 3), 1, 0, 99), "d0 d1 -> d0 d1"),
        ("cat.default", ([t(5, 3), t(5, 2)], 1), "d0 n0!, d0 n1! -> d0 d1!"),
        ("stack.default", ([t(5, 3), t(5, 3)], 1), "d0 d2, d0 d2 -> d0 d1! d2"),
        ("index.Tensor", (t(5, 3), [None, i(3, 7)]), "d0 d1!, j0 -> d0 j0"),
        ("gather.default", (t(5, 3), 1, i(3, 5, 7)), "d0 n1!, d0 d1 -> d0 d1"),
        ("sum.dim_IntList", (t(5, 3), [1]), "d0 d1 -> d0"),
        ("amax.default", (t(5, 3), [1]), "d0 d1! -> d0"),
        ("softmax.int", (t(5, 3), 0), "d0! d1 -> d0! d1"),
        ("layer_norm.default", (t(5, 3, 4), [4], t(4)), "d0 d1 d2!, d2! -> d0 d1 d2!"),
        (
            "conv2d.default",
            (t(3, 4, 5, 5), t(6, 4, 3, 3)),
            "n i x0! x1!, o i w0! w1! -> n o y0! y1!",
        ),
        (
            "conv2d.default",
            (t(3, 4, 5, 5), t(4, 1, 3, 3), None, [1, 1], [0, 0], [1, 1], 4),
            "n g x0! x1!, g 1 w0! w1! -> n g y0! y1!",
        ),
        (
            "scaled_dot_product_attention.default",
            (t(2, 6, 5, 4), t(2, 6, 7, 4), t(2, 6, 7, 4)),
            "b0 b1 q d!, b0 b1 k! d!, b0 b1 k! e! -> b0 b1 q e!",
        ),
        ("zeros.default", ([5, 3],), "-> d0 d1"),
        ("arange.default", (5,), "-> d0!"),
    ],
)
def test_line(name: str, args: tuple[Any, ...], line: str) -> None:
    rule = rule_of(Case(name, operator(name), args).node())
    assert rule is not None
    assert rule.text == line


def test_grouped_heads() -> None:
    target = torch.ops.aten.scaled_dot_product_attention.default
    args = (t(2, 6, 5, 4), t(2, 3, 5, 4), t(2, 3, 5, 4), None, 0.0, True)
    rule = rule_of(Case("attention", target, args, {"enable_gqa": True}).node())
    assert rule is not None
    assert rule.text == "b0 (b1 g) q d!, b0 b1 k! d!, b0 b1 k! e! -> b0 (b1 g) q e!"
    assert rule.cuttable == ("b0", "b1", "q")
    assert rule.kernel(Strategy.of(q="a")) == ("q", "cut_causal_attention")
    assert rule.kernel(Strategy.of(b0="a")) is None


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two ways to bundle the same row of small factors."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=1, max_size=5))

    def bundle() -> list[int]:
        cuts = sorted(draw(st.sets(st.integers(1, max(len(factors) - 1, 1)))))
        ends = [0, *(cut for cut in cuts if cut < len(factors)), len(factors)]
        shape = [math.prod(factors[a:b]) for a, b in itertools.pairwise(ends)]
        return shape + [1] * draw(st.integers(0, 1))

    return bundle(), bundle()


@settings(max_examples=60, deadline=None)
@given(reshapes())
def test_any_reshape_keeps_the_law(shapes: tuple[list[int], list[int]]) -> None:
    before, after = shapes
    case = Case("reshape", torch.ops.aten.reshape.default, (t(*before), after))
    check_all(case, Mesh(a=2), Mesh(a=2, b=2), Mesh(c=3), ordered=False)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_factors_of_reshapes_multiply_to_the_shapes(shape: list[int], random: Any) -> None:
    """Also for shapes whose dims do not nest."""
    after = list(shape)
    random.shuffle(after)
    into, out, sizes, _ = reshape_factors(shape, after)
    assert [math.prod(sizes[f] for f in dim) for dim in into] == shape
    assert [math.prod(sizes[f] for f in dim) for dim in out] == after


@pytest.mark.parametrize(
    ("function", "line", "options", "args"),
    [
        (lambda x: x.softmax(-1), "... d -> ... d", {}, (t(4, 6),)),
        (lambda x: x.exp(), "... -> ...", {"passes": "all"}, (t(4, 6),)),
        (lambda x, y: x + y, "..., ... -> ...", {"passes": "each"}, (t(4, 6), t(4, 6))),
        (lambda x, y: x * y, "..., ... -> ...", {"passes": "all"}, (t(4, 6), t(4, 6))),
        (lambda x, y: x @ y + 1, "m k, k n -> m n", {}, (t(4, 6), t(6, 4))),
        (lambda x: x.amax(-1), "a b -> a", {}, (t(4, 6),)),
        (lambda x: x.flip(0), "a -> a", {}, (t(4),)),
        (lambda x, y: (x - y).sum(0), "a+ b, b -> b", {"passes": [(1,)]}, (t(4, 6), t(6))),
    ],
    ids=["softmax", "exp", "add", "mul", "bias", "amax", "flip", "pass"],
)
def test_the_law_catches_wrong_rules(function, line, options, args) -> None:  # type: ignore[no-untyped-def]
    register_rule(function, line, **options)
    with pytest.raises(AssertionError):
        check_all(Case("wrong", function, args), Mesh(a=2))
