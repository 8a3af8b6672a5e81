"""Propagation: annotations spread along factors until nothing changes; no costs are weighed.

An annotated parameter cuts the operators that read it (tensor parallelism), unless annotations of
activations make its axis cut the batch: then the parameter is only stored cut, and gathered at use
(ZeRO-3). From there, and from annotated activations, cuts spread; the first that reaches an
operator on an axis stays, but where a second one makes a joint of both that follows. Last, the axes
that nobody claimed cut the batch: the first dim of every input that has the first input's size
there. A partial sum is carried on where that costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from autopar.capture.captured import Captured
from autopar.errors import InvalidInput
from autopar.layout import Layout, axes_of
from autopar.mesh import Mesh
from autopar.search.constraints import Constraints, LayoutConstraint
from autopar.search.decisions import Decisions, Fallback
from autopar.strategies import Rule, Strategy, tensor_inputs
from autopar.strategies.node_info import info
from autopar.strategies.results import has_results, maker, result_index, values_of
from autopar.strategies.rules.equal_parts import choice_of


def propagate(
    captured: Captured, mesh: Mesh, constraints: Constraints | None = None, *, batch: bool = True
) -> Decisions:
    """Decide every layout from `constraints`; without constraints this is plain data parallelism.
    `batch`: whether the axes that no constraint names cut the batch."""
    constraints = constraints or Constraints()
    activations = [*constraints.values, *constraints.inputs]
    parameters = [
        key for key, name in captured.parameters.items() if name in constraints.parameters
    ]
    spread = _Propagation(captured, mesh, constraints)
    spread.bind_operators()
    batch_axes = frozenset[str]()  # that annotated parameters are not to take
    if parameters:
        alone = _Propagation(captured, mesh, constraints)
        alone.bind_operators()
        alone.start(activations)
        batch_axes = alone.batch_axes()
    spread.bind_readers(parameters, batch_axes)
    spread.start(activations)
    spread.start(parameters)
    if batch:
        spread.cut_batch([a for a in mesh.names if mesh[a] > 1 and a not in constraints.axes])
    spread.carry_partial_sums()
    return spread.decisions()


def with_batch_axis(
    captured: Captured, mesh: Mesh, axis: str, constraints: Constraints
) -> Constraints:
    """Return the constraints with `axis` reserved for the batch, cut as in data parallelism."""
    batch_only = propagate(captured, Mesh(**{axis: mesh[axis]}))
    cuts = {name: frozenset(dict(way.cuts)) for name, way in batch_only.strategies.items()}
    return replace(constraints, batch_axis=axis, batch_cuts=cuts)


class _Propagation:
    """Hold the working state: for each operator, which factor each axis cuts."""

    def __init__(self, captured: Captured, mesh: Mesh, constraints: Constraints) -> None:
        self.captured, self.mesh, self.constraints = captured, mesh, constraints
        self.nodes = {node.name: node for node in captured.graph.nodes}
        self.rules: dict[fx.Node, Rule] = {}
        self.arguments: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.fallbacks: list[Fallback] = []
        for node in captured.operators:
            rule = captured.rules[node.name]
            if rule is None:
                self.fallbacks.append(Fallback.of(node))
            else:
                self.rules[node] = rule
                self.arguments[node] = tensor_inputs(node)
        self.cuts: dict[fx.Node, dict[str, str]] = {node: {} for node in self.rules}
        self.passes: dict[fx.Node, dict[str, int]] = {node: {} for node in self.rules}
        # Placeholder -> axis -> dim, and in how many parts it is cut; 1: as a whole.
        self.placed: dict[fx.Node, dict[str, tuple[int, int]]] = {}
        self.batch = frozenset[str]()  # axes that cut it
        self.fixed: dict[fx.Node, Layout] = {
            self.nodes[name]: constraint.layout
            for name, constraint in [*constraints.values.items(), *constraints.inputs.items()]
        }
        for placeholder, name in captured.parameters.items():
            if name in self.constraints.parameters:
                self.fixed[self.nodes[placeholder]] = self.constraints.parameters[name].layout
        self.events: deque[tuple[fx.Node, str, int]] = deque()
        # Of readers, the last one first: an axis for a dim of a value, in so many parts.
        self.wanted: list[tuple[fx.Node, str, int, int]] = []

    def bind_operators(self) -> None:
        """Give operators whose inputs were annotated exactly the cuts of those inputs."""
        for name, constraints in self.constraints.bound.items():
            operator = self.nodes[name]
            for axis, choice in self._bound_cuts(operator, constraints).items():
                self._cut(operator, axis, choice)

    def _bound_cuts(
        self, operator: fx.Node, constraints: Mapping[int, LayoutConstraint]
    ) -> dict[str, str]:
        """Return for each axis the factor, or the joint of several, that annotations give it."""
        rule, factors = self.rules[operator], dict[str, set[str]]()
        for position, constraint in constraints.items():
            for dim, axes in zip(rule.inputs[position], constraint.layout.dims):
                for axis in axes:
                    factor = _outer_factor(rule, dim)
                    assert factor is not None
                    factors.setdefault(axis, set()).add(factor)
        choices = {axis: rule.joint_of(names) for axis, names in factors.items()}
        return {axis: choice for axis, choice in choices.items() if choice is not None}

    def bind_readers(self, parameters: Iterable[str], batch_axes: frozenset[str]) -> None:
        """Let annotated parameters cut the operators that read them."""
        for name in parameters:
            node = self.nodes[name]
            for dim, axes in enumerate(self.fixed[node].dims):
                for axis in axes_of(axes):
                    if axis not in batch_axes:
                        self._offer(node, axis, dim)
        self._settle()

    def batch_axes(self) -> frozenset[str]:
        """Return the axes that cut the first dim of an input."""
        inputs = {self.nodes[name] for name in self.captured.inputs if name is not None}
        return frozenset(
            axis
            for node in inputs & self.placed.keys()
            for axis, (dim, _) in self.placed[node].items()
            if dim == 0
        )

    def start(self, names: Iterable[str]) -> None:
        """Spread from values whose layout is fixed."""
        for name in names:
            node = self.nodes[name]
            for dim, axes in enumerate(self.fixed[node].dims):
                for axis in axes_of(axes):
                    self.events.append((node, axis, dim))
        self._settle()

    def cut_batch(self, axes: list[str]) -> None:
        """Let `axes` cut the batch of every input."""
        inputs = [self.nodes[name] for name in self.captured.inputs if name is not None]
        inputs = [node for node in inputs if info(node).val.ndim]
        if not axes or not inputs:
            return
        batch = info(inputs[0]).val.shape[0]
        if batch < self.mesh.degree(axes):
            raise InvalidInput(
                "axes that no annotation claims cut the batch, which must not be smaller",
                got=f"batch {batch} (first dim of {inputs[0].name!r}) on "
                + ", ".join(f"{axis}={self.mesh[axis]}" for axis in axes),
                remedy="a larger batch, a smaller mesh, or annotations that use these axes",
            )
        self.batch = frozenset(axes)
        for node in inputs:
            if info(node).val.shape[0] == batch:
                for axis in axes:
                    self._place(node, axis, 0, 1)
        self._settle()

    def carry_partial_sums(self) -> None:
        """Let a partial sum run on through linear operators, where it does not grow."""
        for node, rule in self.rules.items():
            if node in self.fixed or node.name in self.constraints.bound or has_results(node):
                continue
            for axis in self.mesh.names:
                if axis in self.cuts[node]:
                    continue
                partial = frozenset(
                    index
                    for index, argument in enumerate(self.arguments[node])
                    if self._is_partial(argument, axis)
                )
                # Of several partial sums that do not pass together, the others are made whole.
                passing = max((p for p in rule.passes if p and p <= partial), key=len, default=None)
                if passing is None:
                    continue
                carried = [self.arguments[node][index] for index in passing]
                size = sum(info(argument).val.numel() for argument in carried)
                if info(node).val.numel() <= size and all(len(a.users) == 1 for a in carried):
                    self.passes[node][axis] = rule.passes.index(passing)

    def decisions(self) -> Decisions:
        """Return the finished decisions, checked against the annotations of bound operators."""
        strategies = {node.name: self._strategy(node) for node in self.rules}
        self._check_bound(strategies)
        placeholders = {}
        for node in self.captured.graph.nodes:
            if node.op == "placeholder":
                placeholders[node.name] = self.fixed.get(node) or self._placed_layout(node)
        return Decisions(
            mesh=self.mesh,
            placeholders=placeholders,
            strategies=strategies,
            fixed=self.constraints.fixed,
            fallbacks=tuple(self.fallbacks),
            recompute=self.constraints.recompute,
        )

    def _settle(self) -> None:
        while self.events:
            value, axis, dim = self.events.popleft()
            self._offer(value, axis, dim)
            if maker(value) in self.rules:
                self._try(maker(value), axis, self._choice(value, dim, self._parts(value, axis)))

    def _offer(self, value: fx.Node, axis: str, dim: int) -> None:
        """Offer a cut of `value` to its readers."""
        number = self._parts(value, axis)
        for reader in value.users:
            if reader in self.rules and reader not in self.fixed:
                rule = self.rules[reader]
                for index, argument in enumerate(self.arguments[reader]):
                    if argument is value:
                        self._try(reader, axis, choice_of(rule, rule.inputs[index][dim], number))

    def _parts(self, value: fx.Node, axis: str) -> int:
        """Return in how many parts an axis cuts a dim of a value; 1 for the dim as a whole."""
        if value in self.fixed:
            dim = self.fixed[value].dim_of(axis)
            return next((number for at, number in self.fixed[value].parts if at == dim), 1)
        if value in self.placed:
            return self.placed[value].get(axis, (0, 1))[1]
        operator = maker(value)
        choice = self.cuts.get(operator, {}).get(axis, "")
        parts = self.rules[operator].parts.get(choice) if choice else None
        cut = None if parts is None else parts.outputs[result_index(value)]
        return 1 if cut is None else cut[1]

    def _try(self, node: fx.Node, axis: str, factor: str | None) -> None:
        """Cut an operator if it may be, and then what it reads: deep first, however deep."""
        self._take(node, axis, factor)
        while self.wanted:
            self._reach(*self.wanted.pop())

    def _take(self, node: fx.Node, axis: str, factor: str | None) -> None:
        if factor is None:
            return
        if (before := self.cuts[node].get(axis)) is None:
            factor = self.rules[node].cut_alone(factor)
        else:
            joint = self._joint(node, before, factor)
            if joint is None:
                return
            factor = joint
        if not self._may_cut(node, axis, factor):
            return
        if node in self.fixed and not self._agrees_with_marker(node, axis, factor):
            return
        self._cut(node, axis, factor)

    def _joint(self, node: fx.Node, before: str, factor: str) -> str | None:
        """Return the factor or joint for an axis that cuts `before` and comes to cut `factor`, too.
        `None` if it cannot. Operators with annotated inputs take any joint of the two."""
        rule = self.rules[node]
        if node.name not in self.constraints.bound or before in (factor, *rule.joints):
            return rule.joint_after(before, factor)
        return rule.joint_of({before, factor})

    def _cut(self, node: fx.Node, axis: str, choice: str) -> None:
        rule = self.rules[node]
        self.cuts[node][axis] = choice
        inputs, outputs = rule.factors_of(choice)
        parts = rule.parts.get(choice)
        numbers = [cut[1] if cut else 1 for cut in parts.inputs] if parts else [1] * len(inputs)
        if parts is not None and axis not in self.batch:
            inputs = [None] * len(inputs)  # these are followed, and not asked for
        for value in values_of(node) if node not in self.fixed else ():
            for dim, factors in enumerate(rule.outputs[result_index(value)]):
                if outputs[result_index(value)] in factors:
                    self.events.append((value, axis, dim))
        self.wanted += reversed(
            [
                (argument, axis, dim, number)
                for argument, dims, factor, number in zip(
                    self.arguments[node], rule.inputs, inputs, numbers
                )
                for dim, factors in enumerate(dims)
                if factor in factors
            ]
        )

    def _reach(self, value: fx.Node, axis: str, dim: int, number: int) -> None:
        """Cut `dim` of `value` by `axis` for a reader that wants it, if the value is still free."""
        if value in self.fixed:
            return
        if value.op == "placeholder":
            self._place(value, axis, dim, number)
        elif maker(value) in self.rules:
            self._take(maker(value), axis, self._choice(value, dim, number))

    def _choice(self, value: fx.Node, dim: int, number: int) -> str | None:
        """Return the factor or joint that cuts a dim of an operator's result in parts."""
        rule = self.rules[maker(value)]
        return choice_of(rule, rule.outputs[result_index(value)][dim], number)

    def _place(self, node: fx.Node, axis: str, dim: int, number: int) -> None:
        placed = self.placed.setdefault(node, {})
        captured = self.captured
        is_kept = node.name in captured.parameters or node.name in captured.buffers
        if node in self.fixed or axis in placed or (is_kept and number > 1):
            return
        other_axes = [other for other, (at, _) in placed.items() if at == dim]
        size, degree = info(node).val.shape[dim], self.mesh.degree([*other_axes, axis])
        is_divisible = size >= degree if number == 1 else size % (number * degree) == 0
        if is_divisible and all(placed[other] == (dim, number) for other in other_axes):
            placed[axis] = dim, number
            self.events.append((node, axis, dim))

    def _may_cut(self, node: fx.Node, axis: str, factor: str) -> bool:
        rule = self.rules[node]
        inputs, _ = rule.factors_of(factor)
        for position in self.constraints.bound.get(node.name, ()):
            if any(inputs[position] in dim for dim in rule.inputs[position]):
                return False
        if rule.why_whole(factor) is not None:
            return False
        cuts = dict[str, list[str]]()
        for other, choice in (self.cuts[node] | {axis: factor}).items():
            cuts.setdefault(choice, []).append(other)
        degree = self.mesh.degree(cuts[factor])
        return rule.fits(factor, degree) and rule.can_combine(cuts, self.mesh)

    def _agrees_with_marker(self, node: fx.Node, axis: str, factor: str) -> bool:
        dim = self.fixed[node].dim_of(axis)
        return dim is not None and factor in self.rules[node].outputs[0][dim]

    def _is_partial(self, value: fx.Node, axis: str) -> bool:
        if value in self.fixed:
            return axis in self.fixed[value].partial
        operator = maker(value)
        if operator not in self.rules:
            return False
        if axis in self.passes[operator]:
            return True
        factor, rule = self.cuts[operator].get(axis), self.rules[operator]
        if factor is None or factor in rule.gathered or factor in rule.joints:
            return False
        if factor in rule.parts:
            return rule.parts[factor].outputs[result_index(value)] is None
        return not any(factor in dim for dim in rule.outputs[result_index(value)])

    def _strategy(self, node: fx.Node) -> Strategy:
        if node in self.fixed:
            dims = zip(self.rules[node].outputs[0], self.fixed[node].dims)
            return Strategy.of(**{dim[0]: axes for dim, axes in dims if axes})
        by_factor: dict[str, tuple[str, ...]] = {}
        for axis in self.mesh.names:
            if axis in self.cuts[node]:
                factor = self.cuts[node][axis]
                by_factor[factor] = (*by_factor.get(factor, ()), axis)
        rule, cuts = self.rules[node], self.cuts[node]
        joint = {axis for axis, choice in cuts.items() if choice in rule.joints}
        for position, constraint in self.constraints.bound.get(node.name, {}).items():
            for dim, axes in zip(rule.inputs[position], constraint.layout.dims):
                if left := tuple(axis for axis in axes if axis not in joint):
                    by_factor[dim[0]] = left
        return Strategy.of(self.passes[node], **by_factor)

    def _placed_layout(self, node: fx.Node) -> Layout:
        dims: list[tuple[str, ...]] = [() for _ in range(info(node).val.ndim)]
        for axis in self.mesh.names:
            if axis in self.placed.get(node, {}):
                dim, number = self.placed[node][axis]
                prefix = (f"/{number}",) if number > 1 and not dims[dim] else ()
                dims[dim] += (*prefix, axis)
        return Layout(*dims)

    def _check_bound(self, strategies: dict[str, Strategy]) -> None:
        for name, constraints in self.constraints.bound.items():
            rule = self.rules[self.nodes[name]]
            signature = rule.signature(strategies[name])
            for position, constraint in constraints.items():
                if signature.inputs[position] != constraint.layout:
                    others = [
                        other.source for other in constraints.values() if other is not constraint
                    ]
                    raise InvalidInput(
                        "the annotations of one operator contradict each other",
                        got=f"input {position} of {self.nodes[name].target} is asked to be "
                        f"{constraint.layout}\nother inputs at "
                        f"{', '.join(others) or 'the same place'} "
                        f"make it {signature.inputs[position]}; the rule is {rule.text!r}",
                        remedy="cut shared dims the same way, and use each axis once",
                        source=constraint.source,
                    )


def _outer_factor(rule: Rule, dim: tuple[str, ...]) -> str | None:
    """Return the factor of a dim that axes may cut: the outermost of more than one element."""
    return next((factor for factor in dim if rule.sizes[factor] > 1), None)
