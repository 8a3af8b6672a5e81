"""How an autograd.Function may be cut, where nobody has said so: found by following pieces.

Its forward and backward are followed once, on tensors without values, as the operators that they
come to. Then one axis is led through them by the operators' own rules: which dims of the arguments
may be cut so that every operator works on the pieces that it finds, nothing moves, and each
gradient is a piece, or a partial sum of what an argument lacks? Each way through is a factor.

What a Function reads of shapes (a count, by which it divides) is no operator: so it is followed on
pieces as well, and has to come to the same operators with the same numbers. In doubt it stays
whole.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autopar.capture.graph_builder import GraphBuilder
from autopar.capture.normalisations import cleanup, inplace, shapes, tuples
from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.strategies import OperatorCall, Rule, rule_of, traits_of
from autopar.strategies.language import line_of
from autopar.strategies.node_info import info
from autopar.strategies.observed_rules import observed_rule
from autopar.strategies.rule import Dim

# By which operators have the forms that have rules.
_FORMS = (
    inplace.functionalise,
    tuples.single_results,
    cleanup.canonical_names,
    cleanup.canonical_casts,
    shapes.repeats_are_expands,
    shapes.canonical_reshapes,
    shapes.canonical_transposes,
    shapes.canonical_expands,
    shapes.canonical_slices,
    shapes.canonical_selections,
    cleanup.drop_identities,
)

# What a function of (tensors, gradients of results) gives: results, and gradients of the tensors.
Both = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Sequence[Any], Sequence[Any]]]
_MOST = 64  # ways through that are looked at
_LONGEST = 400  # calls that are followed
_AXIS = Mesh(x=2)
_WHOLE, _SUM = None, -1  # where one axis has a value, if it does not cut a dim
_Cut = int | None


def followed_rule(call: OperatorCall, both: Both) -> Rule | None:
    """The rule of a call of a Function; None where all stays whole."""
    given = [_Form.of(info(node).val) for node in call.inputs]
    graph = _graph(both, given, [*map(_Form.of, call.outputs)])
    if graph is None:
        return None
    found = [way for way in _ways(graph) if _is_same_on_pieces(way, graph, both)]
    return _rule(call, graph, found) if found else None


class _Form(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Tensor, shape: Sequence[int] | None = None) -> _Form:
        """Of one, or of a piece of it of another shape, with its dims in memory as they are."""
        if shape is None:
            return cls(tuple(value.shape), value.stride(), value.dtype, value.device)
        order = sorted(range(value.ndim), key=lambda dim: (-value.stride()[dim], dim))
        made = torch.empty([shape[dim] for dim in order], device="meta")
        stride = made.permute([order.index(dim) for dim in range(value.ndim)]).stride()
        return cls(tuple(shape), stride, value.dtype, value.device)


@dataclass(frozen=True)
class _Graph:
    """What a Function comes to."""

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    slopes: tuple[fx.Node, ...]  # gradients of its results
    results: tuple[Any, ...]
    gradients: tuple[Any, ...]  # a node or None for each input
    called: tuple[Any, ...]  # the operators as they were called
    constants: list[Any]  # that it makes of numbers, as plain data


@dataclass(frozen=True)
class _Way:
    """Where one axis has each value, and whether it wants equal pieces."""

    at: Mapping[fx.Node, tuple[_Cut, ...]]
    is_even: bool

    def cut(self, node: Any) -> _Cut:
        return self.at.get(node, (_WHOLE,))[0]


def _graph(both: Both, inputs: Sequence[_Form], outputs: Sequence[_Form]) -> _Graph | None:
    """None where it cannot be followed, or writes to something."""
    count = len(inputs)

    def run(*given: Tensor) -> list[Any]:
        return [*itertools.chain(*both(given[:count], given[count:]))]

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        given = [
            torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=one.device)
            for one in (*inputs, *outputs)
        ]
        try:
            module = make_fx(run, pre_dispatch=True)(*given)
        except Exception:  # whatever a Function of the user's raises without values
            return None
    graph = module.graph
    for node in [*graph.nodes]:
        if node.target is torch._C._set_grad_enabled:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    if any("val" not in node.meta for node in graph.nodes if node.op != "output"):
        return None
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if len(calls) > _LONGEST:
        return None
    called = tuple(node.target for node in calls)
    spec = pytree.tree_structure(0)
    builder = GraphBuilder(mode, {}, spec, spec, graph, shares_values=True)
    try:
        for form in _FORMS:
            form(builder)
    except InvalidInput:  # it writes to what it is given, say
        return None
    placeholders = graph.find_nodes(op="placeholder")
    given_back: Any = graph.output_node().args[0]
    of_results = len(outputs)
    return _Graph(
        graph,
        tuple(placeholders[:count]),
        tuple(placeholders[count:]),
        tuple(given_back[:of_results]),
        tuple(given_back[of_results:]),
        called,
        [_value(getattr(module, node.target)) for node in graph.find_nodes(op="get_attr")],
    )


def _ways(made: _Graph) -> list[_Way]:
    """Those in which an axis cuts something, and every gradient is where its value is."""
    found = list(itertools.islice(_through([*made.graph.nodes], 0, {}, False), _MOST + 1))
    if len(found) > _MOST:
        return []
    return [way for way in found if _is_whole_rule(way, made)]


def _is_whole_rule(way: _Way, made: _Graph) -> bool:
    """Whether a way is one that a factor of a rule stands for."""
    given = [way.cut(result) for result in made.results]
    if all(cut is _WHOLE for cut in map(way.cut, made.inputs)):
        return False
    if not (all(cut == _SUM for cut in given) or all(cut not in (_WHOLE, _SUM) for cut in given)):
        return False
    slopes = zip(made.slopes, given)
    if any(way.cut(slope) != (_WHOLE if cut == _SUM else cut) for slope, cut in slopes):
        return False
    for value, gradient in zip(made.inputs, made.gradients):
        wanted = _SUM if way.cut(value) is _WHOLE else way.cut(value)
        if gradient is not None and way.cut(gradient) != wanted:
            return False
    return True


def _through(
    nodes: Sequence[fx.Node], at: int, known: dict[fx.Node, tuple[_Cut, ...]], is_even: bool
) -> Iterator[_Way]:
    """All ways on from a node; what is given is where its first reader wants it."""
    node = nodes[at]
    if node.op == "output":
        yield _Way(known, is_even)
        return
    if node.op != "call_function" or node.target is operator.getitem:
        for cut in _standing(node, known):
            yield from _through(nodes, at + 1, known if cut is None else known | cut, is_even)
        return
    for inputs, outputs, wants_even in _options(node):
        read = zip(OperatorCall(node).inputs, inputs)
        new = dict(known)
        if all(new.setdefault(value, (cut,)) == (cut,) for value, cut in read):
            yield from _through(nodes, at + 1, new | {node: outputs}, is_even or wants_even)


def _standing(node: fx.Node, known: Mapping[fx.Node, Any]) -> Iterator[dict[fx.Node, Any] | None]:
    """Where one axis may have what no operator makes; None: where its first reader wants it."""
    if node.target is operator.getitem:
        many, place = node.args
        yield {node: (known[many][place],)}  # type: ignore[index]
    elif node.op == "get_attr":
        yield {node: (_WHOLE,)}
    elif any(user.op == "call_function" for user in node.users):
        yield None
    else:
        yield from ({node: (cut,)} for cut in (_WHOLE, *range(info(node).val.ndim)))


def _value(constant: Tensor) -> Any:
    """Of a tensor that is made of numbers; a value of its own if that is not known."""
    held = getattr(constant, "constant", constant)
    return object() if held is None else (held.dtype, held.tolist())


def _options(
    node: fx.Node,
) -> Iterator[tuple[tuple[_Cut, ...], tuple[_Cut, ...], bool]]:
    """Where one axis may have what a call reads and gives."""
    call, rule = OperatorCall(node), rule_of(node)
    if rule is None or not call.inputs:
        yield (_WHOLE,) * len(call.inputs), (_WHOLE,) * len(info(node).values), False
        return
    for strategy in rule.strategies(_AXIS):
        if rule.kernel(strategy) is not None:
            continue  # it asks where a piece begins, or others for theirs
        signature = rule.signature(strategy)
        even = any(rule.must_be_even(factor) for factor, _ in strategy.cuts)
        inputs, outputs = (
            tuple(map(_cut_of, layouts)) for layouts in (signature.inputs, signature.outputs)
        )
        yield inputs, outputs, even


def _cut_of(layout: Layout) -> _Cut:
    return _SUM if layout.partial else layout.dim_of("x")


def _is_same_on_pieces(way: _Way, made: _Graph, both: Both) -> bool:
    """Whether pieces of a half, and of a third, come to the same operators and numbers, and the
    smallest pieces to the same operators."""
    cuts = ((info(node).val.shape, way.cut(node)) for node in made.inputs)
    size = next(shape[cut] for shape, cut in cuts if cut is not _WHOLE)
    valued = [node for node in made.graph.nodes if node.op != "output"]
    smallest = next(piece for piece in range(1, size + 1) if _pieces(valued, way, piece, size))
    pieces = sorted({smallest, -(-size // 2), -(-size // 3)} - {size})
    cut_so = [cut for piece in pieces if (cut := _pieces(valued, way, piece, size)) is not None]
    for number, cut in enumerate(cut_so):
        inputs, results = (
            [_Form.of(info(node).val, cut[node][0]) for node in some]
            for some in (made.inputs, made.results)
        )
        other = _graph(both, inputs, results)
        if other is None or (other.called, other.constants) != (made.called, made.constants):
            return False
        is_least = number == 0 and len(cut_so) > 1  # where dims of size 1 have other forms
        if not is_least and not _is_alike(made.graph, other.graph, cut):
            return False
    return bool(cut_so)


def _pieces(
    nodes: Sequence[fx.Node], way: _Way, piece: int, size: int
) -> dict[fx.Node, tuple[tuple[int, ...], ...]] | None:
    """The shapes of values on a piece; None where there is no such piece."""
    found = {}
    for node in nodes:
        if (shapes := _piece(node, way, piece, size)) is None:
            return None
        found[node] = shapes
    return found


def _piece(node: fx.Node, way: _Way, piece: int, size: int) -> tuple[tuple[int, ...], ...] | None:
    """The shapes of a node's values on a piece; None where there is no such piece."""
    found = []
    cuts = way.at.get(node, ())
    for place, value in enumerate(v for v in info(node).values if isinstance(v, Tensor)):
        shape = [*value.shape]
        cut = cuts[place] if place < len(cuts) else _WHOLE
        if cut not in (_WHOLE, _SUM):
            assert cut is not None
            if shape[cut] * piece % size:
                return None
            shape[cut] = shape[cut] * piece // size
        found.append(tuple(shape))
    return tuple(found)


def _is_alike(graph: fx.Graph, other: fx.Graph, cut: Mapping[fx.Node, Any]) -> bool:
    """Whether two graphs have the same calls, the other one of these shapes."""
    pairs = [*itertools.zip_longest(graph.nodes, other.nodes)]
    same = {one: two for one, two in pairs if one is not None}
    for one, two in pairs:
        if one is None or two is None or one.op != two.op:
            return False
        if one.op == "call_function" and one.target != two.target:
            return False
        if one.op == "output":
            return bool(fx.map_arg(one.args, same.__getitem__) == two.args)
        if cut[one] != tuple(tuple(v.shape) for v in info(two).values if isinstance(v, Tensor)):
            return False
        shape = cut[one][0] if cut[one] else ()
        if one.op == "call_function" and not _reads_alike(one, two, same, shape):
            return False
    return True


def _reads_alike(
    one: fx.Node, two: fx.Node, same: Mapping[fx.Node, fx.Node], shape: Sequence[int]
) -> bool:
    """Whether calls have the same arguments, or those that belong to a piece of that shape."""
    if one.target is operator.getitem:
        return bool(fx.map_arg(one.args, same.__getitem__) == two.args)
    call, told = OperatorCall(one), traits_of(one).of_piece
    theirs = OperatorCall(two).arguments
    for name, value in call.arguments.items():
        mine = [fx.map_arg(value, same.__getitem__)]
        if name in told:
            mine.append(told[name](call, shape))
        if not any(_is_equal(own, theirs[name]) for own in mine):
            return False
    return True


def _is_equal(one: Any, other: Any) -> bool:
    kinds = [(type(leaf), leaf) for leaf in pytree.tree_leaves(one)]
    return kinds == [(type(leaf), leaf) for leaf in pytree.tree_leaves(other)]


def _rule(call: OperatorCall, made: _Graph, ways: Sequence[_Way]) -> Rule | None:
    """A factor for each way, those first that cut most; dims that none cuts stay whole."""
    names: dict[tuple[int, int], str] = {}  # (tensor, dim), results after inputs
    even, sums = set[str](), set[str]()
    tensors = (*made.inputs, *made.results)
    for way in sorted(ways, key=lambda way: -sum(way.cut(node) is not _WHOLE for node in tensors)):
        cuts = [(number, way.cut(node)) for number, node in enumerate(tensors)]
        places = [(number, cut) for number, cut in cuts if cut not in (_WHOLE, _SUM)]
        if names.keys() & set(places):
            continue
        name = f"f{len({*names.values()})}"
        names |= dict.fromkeys(places, name)
        if way.is_even:
            even.add(name)
        if any(cut == _SUM for _, cut in cuts):
            sums.add(name)
    seen, sizes = observed_rule(call.node), dict[str, int]()

    def dims(number: int, own: Sequence[Dim], value: Tensor) -> tuple[Dim, ...]:
        found: list[Dim] = []
        for dim, (factors, size) in enumerate(zip(own, value.shape)):
            name = names.get((number, dim))
            factors = factors if name is None or size == 1 else (name,)
            sizes.update(dict.fromkeys(factors, size))
            found.append(factors)
        return tuple(found)

    values = [*(info(node).val for node in call.inputs), *call.outputs]
    shown = [
        dims(number, own, value)
        for number, (own, value) in enumerate(zip((*seen.inputs, *seen.outputs), values))
    ]
    count = len(seen.inputs)
    inputs, outputs, cuttable = tuple(shown[:count]), tuple(shown[count:]), {*names.values()}
    whole = frozenset(sizes) - cuttable
    extra = {name: seen.sizes[name] for one in seen.saved.extra for dim in one.dims for name in dim}
    return replace(
        seen,
        inputs=inputs,
        outputs=outputs,
        sizes=sizes | extra,
        whole=whole,
        even=frozenset(even),
        sums=frozenset(sums),
        text=line_of(inputs, outputs, whole),
    )
