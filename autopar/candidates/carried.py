"""Carried: the decisions about a program, for the same model with inputs of other sizes.

    carried_decisions = carried(decisions, planned, captured, placed, fixed)

An operator is found again by what it is and where it stands: at some sizes torch leaves one out (a
slice of everything), or takes others (for a batch of one). It keeps its strategy, but for cuts into
more pieces than there are elements, or uneven ones where these must be even. One that was not there
reads its inputs where they lie. Nothing is weighed: whatever strategies follow, the passes insert
the movements between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from autopar.capture.captured import Captured
from autopar.layout import Layout, Placement, axes_of, parts_of
from autopar.mesh import Mesh
from autopar.search.decisions import Decisions, Fallback
from autopar.strategies import Rule, Strategy, tensor_inputs
from autopar.strategies.node_info import info
from autopar.strategies.results import is_result, maker, result_index

Way = tuple[str, str, int]  # a value, its reader, and which input


def carried(
    decisions: Decisions,
    planned: Captured,
    captured: Captured,
    placed: Mapping[str, Layout],
    fixed: Mapping[str, Layout],
    *,
    by_name: bool = False,
) -> Decisions:
    """Return the decisions about `captured` that repeat those about `planned`. `placed`: layouts of
    parameters, buffers and inputs that are other ones; `fixed`: the layouts of its markers.
    `by_name`: operators have the names of those of `planned` that they stand for."""
    known = {node.name: node.name for node in captured.operators if node.name in planned.classes}
    before = known if by_name else counterparts(planned, captured)
    result = _CarriedDecisions(decisions, before, captured, placed, fixed)
    result.carry()
    missing = (node for node in captured.operators if captured.rules[node.name] is None)
    return replace(
        decisions,
        placeholders=result.placeholders,
        strategies=result.strategies,
        fixed=dict(fixed),
        fallbacks=tuple(map(Fallback.of, missing)),
        ways=dict(result.ways()),
        apart={},
    )


def fitting(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """Return a layout without the cuts of dims that have fewer elements than pieces, or uneven
    parts."""

    def fits(dim: tuple[str, ...], size: int) -> bool:
        parts, pieces = parts_of(dim), mesh.degree(axes_of(dim))
        return size % (parts * pieces) == 0 if parts else pieces <= size

    return Layout(*(dim if fits(dim, size) else () for dim, size in zip(layout.dims, shape)))


class _CarriedDecisions:
    """Carries decisions over to a program, one node after another."""

    def __init__(
        self,
        decisions: Decisions,
        before: Mapping[str, str],
        captured: Captured,
        placed: Mapping[str, Layout],
        fixed: Mapping[str, Layout],
    ) -> None:
        """`before`: by operator, the one of which decisions were made."""
        self.decisions, self.mesh, self.captured = decisions, decisions.mesh, captured
        self.fixed, self.before = fixed, before
        self.placeholders: dict[str, Layout] = {}
        self.strategies: dict[str, Strategy] = {}
        self._layouts: dict[fx.Node, Layout] = {}  # of every value
        for node in captured.graph.find_nodes(op="placeholder"):
            layout = placed.get(node.name) or self._as_before(node)
            self.placeholders[node.name] = self._layouts[node] = layout

    def _as_before(self, node: fx.Node) -> Layout:
        shape, layout = tuple(info(node).val.shape), self.decisions.placeholders.get(node.name)
        if layout is None or layout.ndim != len(shape):
            return Layout.replicated(len(shape))
        return fitting(layout, shape, self.mesh)

    def carry(self) -> None:
        outputs: dict[fx.Node, tuple[Layout, ...]] = {}
        for node in self.captured.graph.nodes:
            if is_result(node):
                layouts = outputs.get(maker(node))
                ndim = info(node).val.ndim
                self._layouts[node] = (
                    layouts[result_index(node)] if layouts else Layout.replicated(ndim)
                )
            elif node.name not in self.captured.classes:
                continue
            elif (rule := self.captured.rules[node.name]) is None:
                self._layouts[node] = self.fixed.get(node.name) or _whole(node)
            else:
                strategy = self.strategies[node.name] = self._strategy(node, rule)
                outputs[node] = rule.signature(strategy).outputs
                self._layouts[node] = self.fixed.get(node.name) or outputs[node][0]

    def _strategy(self, node: fx.Node, rule: Rule) -> Strategy:
        if node.name in self.fixed:
            dims = zip(rule.outputs[0], self.fixed[node.name].dims)
            return Strategy.of(**{dim[0]: axes for dim, axes in dims if axes})
        inputs = [self._layouts[value] for value in tensor_inputs(node)]
        before = self.decisions.strategies.get(self.before.get(node.name, ""))
        if before is None:
            return self._nearest(node, rule, inputs)
        cuts = (
            (factor, axes)
            for factor, axes in before.cuts
            if factor in rule.choices and rule.fits(factor, self.mesh.degree(axes))
        )
        passes = (pair for pair in before.passes if _goes_through(rule, pair, inputs))
        return Strategy(tuple(cuts), tuple(passes))

    def _nearest(self, node: fx.Node, rule: Rule, inputs: list[Layout]) -> Strategy:
        """Return the strategy that reads the most of its inputs where they lie."""
        sizes = [info(value).val.numel() for value in tensor_inputs(node)]

        def read(strategy: Strategy) -> int:
            targets = rule.signature(strategy).inputs
            pairs = list(zip(sizes, inputs, targets))
            whole = sum(size for size, layout, target in pairs if layout == target)
            return whole + sum(size for size, layout, target in pairs if layout.dims == target.dims)

        strategies = rule.strategies(self.mesh, ordered=False)
        possible = (
            s for s in strategies if all(_goes_through(rule, pair, inputs) for pair in s.passes)
        )
        return max((s for s in possible if not (s.passes and rule.is_heavy)), key=read)

    def ways(self) -> Iterator[tuple[Way, tuple[Placement, ...]]]:
        """Yield the ways of values that are what they were, where the dims are large enough."""
        after = {old: new for new, old in self.before.items()}
        nodes = {node.name: node for node in self.captured.graph.nodes}
        for (value, reader, position), way in self.decisions.ways.items():
            node = nodes.get(after.get(value, value if value in self.placeholders else ""))
            name = after.get(reader)
            if node is None or name is None or not self._is_as_before(node, value):
                continue
            if all(self._fits(at.layout, tuple(info(node).val.shape)) for at in way):
                yield (node.name, name, position), way

    def _fits(self, layout: Layout, shape: tuple[int, ...]) -> bool:
        return layout.ndim == len(shape) and fitting(layout, shape, self.mesh).dims == layout.dims

    def _is_as_before(self, node: fx.Node, value: str) -> bool:
        if node.op == "placeholder":
            return self.placeholders[node.name] == self.decisions.placeholders.get(value)
        return self.strategies.get(node.name) == self.decisions.strategies.get(value)


def counterparts(planned: Captured, captured: Captured) -> dict[str, str]:
    """Return by operator the name that it had in the planned program."""
    known: dict[object, list[str]] = defaultdict(list)
    for node in planned.operators:
        known[_key(node)].append(node.name)
    places = {key: iter(names) for key, names in known.items()}
    pairs = (
        (node.name, next(places.get(_key(node), iter(())), None)) for node in captured.operators
    )
    return {name: old for name, old in pairs if old is not None}


def _key(node: fx.Node) -> object:
    return node.target, info(node).module, info(node).source


def _goes_through(rule: Rule, pair: tuple[str, int], inputs: list[Layout]) -> bool:
    """Return whether the inputs of a pass are partial sums over its axis."""
    axis, index = pair
    members = rule.passes[index] if index < len(rule.passes) else ()
    return bool(members) and all(axis in inputs[member].partial for member in members)


def _whole(node: fx.Node) -> Layout:
    return Layout.replicated(getattr(info(node).val, "ndim", 0))
