"""The rule language: what a line says for given shapes, and what it says to a mistake."""

from __future__ import annotations

import pytest

from autopar.errors import InvalidInput
from autopar.strategies import Pattern, Rule, parse


def show(rule: Rule) -> str:
    """A rule as text: its dims with sizes, then the factors that can be cut."""

    def tensor(dims: tuple[tuple[str, ...], ...]) -> str:
        return "[" + " ".join("(" + " ".join(dim) + ")" for dim in dims) + "]"

    sides = [" ".join(map(tensor, side)) for side in (rule.inputs, rule.outputs)]
    sizes = " ".join(f"{factor}={rule.sizes[factor]}" for factor in rule.factors)
    return f"{sides[0]} -> {sides[1]} | {sizes} | {' '.join(rule.cuttable)}"


@pytest.mark.parametrize(
    ("line", "shapes", "wanted"),
    [
        (
            "... i, o i -> ... o",
            ((8, 4, 16), (32, 16)),
            "[(d0) (d1) (i)] [(o) (i)] -> [(d0) (d1) (o)] | d0=8 d1=4 i=16 o=32 | d0 d1 i o",
        ),
        (  # the bias lacks i: each rank would add it
            "... i, o i, o -> ... o",
            ((8, 16), (32, 16), (32,)),
            "[(d0) (i)] [(o) (i)] [(o)] -> [(d0) (o)] | d0=8 i=16 o=32 | d0 o",
        ),
        (  # inputs at the end may be absent
            "... h!, h!, h! -> ... h!",
            ((8, 4),),
            "[(d0) (h)] -> [(d0) (h)] | d0=8 h=4 | d0",
        ),
        (  # broadcast dims have no factor
            "..., ... -> ...",
            ((2, 3, 4), (3, 1)),
            "[(d0) (d1) (d2)] [(d1) ()] -> [(d0) (d1) (d2)] | d0=2 d1=3 d2=4 | d0 d1 d2",
        ),
        (
            "... v, ... -> ...",
            ((2, 3, 7), (2, 3)),
            "[(d0) (d1) (v)] [(d0) (d1)] -> [(d0) (d1)] | d0=2 d1=3 v=7 | d0 d1",
        ),
        (  # + asserts that the pieces add up
            "n+ c ...+, c -> c",
            ((5, 3, 2), (3,)),
            "[(n) (c) (d0)] [(c)] -> [(c)] | n=5 c=3 d0=2 | n c d0",
        ),
        (  # only the outermost factor of a group
            "b (h d), h -> b h d",
            ((2, 12), (4,)),
            "[(b) (h d)] [(h)] -> [(b) (h) (d)] | b=2 h=4 d=3 | b h",
        ),
        (  # of size above 1
            "b (h d), h -> b h d",
            ((2, 12), (1,)),
            "[(b) (d)] [()] -> [(b) () (d)] | b=2 d=12 | b d",
        ),
        ("a b! (c d)! -> a b c!", ((2, 3, 4),), None),
        (", c -> c", ((), (3,)), "[] [(c)] -> [(c)] | c=3 | c"),
        ("...! -> ", ((2, 3),), "[(d0) (d1)] -> [] | d0=2 d1=3 | "),
        ("... -> ", ((2, 3),), "[(d0) (d1)] -> [] | d0=2 d1=3 | d0 d1"),
        ("a, b -> ", ((2,), (3,)), "[(a)] [(b)] -> [] | a=2 b=3 | "),
    ],
)
def test_line(line: str, shapes: tuple[tuple[int, ...], ...], wanted: str | None) -> None:
    if wanted is None:
        with pytest.raises(InvalidInput, match="sizes of"):
            parse(line, shapes)
    else:
        assert show(parse(line, shapes)) == wanted


def test_sizes_come_from_outputs_or_by_name() -> None:
    line = "b (h d) -> b h d"
    by_shape = parse(line, ((2, 12),), ((2, 4, 3),))
    by_name = parse(line, ((2, 12),), sizes={"h": 4})
    assert dict(by_shape.sizes) == dict(by_name.sizes) == {"b": 2, "h": 4, "d": 3}
    with pytest.raises(InvalidInput, match="lets the sizes of \\(h d\\) be found"):
        parse(line, ((2, 12),))


def test_absent_inputs_in_the_middle() -> None:
    rule = parse("n c, c!, c -> n c", ((5, 3), (3,)), slots=(0, 2), passes=[(0,), (2,)])
    assert rule.inputs == ((("n",), ("c",)), (("c",),))
    assert rule.passes == (frozenset({0}), frozenset({1}))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("a b", "exactly one '->'"),
        ("a -> b -> c", "exactly one '->'"),
        ("a (b -> a b", "every \\( has its \\)"),
        ("a ((b c)) -> a", "groups do not nest"),
        ("a () -> a", "at least one factor"),
        ("a ? -> a", "'\\?' is not part of the language"),
        ("! a -> a", "'!' follows a factor"),
        ("a a -> a", "not 'a' twice"),
        ("... a ... -> a", "not '...' twice"),
        ("(... a) -> a", "'...' stands outside groups"),
        ("a -> ...", "must also stand in an input"),
    ],
)
def test_malformed_lines(line: str, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint) as caught:
        Pattern.read(line)
    assert repr(line) in str(caught.value)
    assert "remedy" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "inputs", "outputs", "complaint"),
    [
        ("m k, k n -> m n", ((2, 3), (4, 5)), None, "gives 'k' one size, not 3 and 4"),
        ("m k, k n -> m n", ((2, 3), (3, 5)), ((2, 6),), "gives 'n' one size, not 5 and 6"),
        ("m k -> m", ((2, 3, 4),), None, "names every dim"),
        ("... a b -> ...", ((2,),), None, "at most the dims"),
        ("a -> a", ((2,), (3,)), None, "names every tensor input"),
        ("a -> a", ((2,),), ((2,), (2,)), "names every output"),
        ("..., ... -> ...", ((2, 3), (4, 3)), None, "gives 'd0' one size, not 2 and 4"),
        ("a (b c), b -> a", ((2, 7), (2,)), None, "gives \\(b c\\) a product of 7"),
        ("d0 ..., ... -> ...", ((2, 3), (3,)), None, "leaves the name 'd0'"),
        ("a -> a new", ((2,),), None, "gives 'new' a size"),
    ],
)
def test_lines_that_do_not_fit(line, inputs, outputs, complaint) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput, match=complaint) as caught:
        parse(line, inputs, outputs, source="model.py:7")
    message = str(caught.value)
    assert repr(line) in message
    assert str(list(inputs)) in message
    assert "model.py:7" in message


def test_flops() -> None:
    shapes = ((8, 4, 16), (32, 16))
    assert parse("... i, o i -> ... o", shapes).flops == 2 * 8 * 4 * 16 * 32
    assert parse("..., ... -> ...", ((8, 4), (4,)), cost=3).flops == 3 * 32
    assert parse("a b -> a", ((8, 4),)).flops == 32
    assert parse("a -> a", ((8,),), flops=lambda sizes: 7 * sizes["a"]).flops == 56


def test_what_is_saved() -> None:
    rule = parse(
        "... h!, h!, h! -> ... h!",
        ((8, 4), (4,)),
        slots=(0, 2),
        saved="0 1 2 output",
        extra="..., ... h",
    )
    assert rule.saved.inputs == (0, 1)
    assert rule.saved.output
    assert [extra.dims for extra in rule.saved.extra] == [(("d0",),), (("d0",), ("h",))]
