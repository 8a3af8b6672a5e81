"""The reasons why an operator runs, or a parameter is kept, the way it does.

    print(plan.explain("layers.0.mlp.up"))
    print(plan.explain("stages"))              # of the whole step: autopar/plans/step_reasons.py

Every candidate with its own time, that of the movements to its neighbours as they were decided, and
the time of the whole step if this candidate were forced and everything else chosen anew.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from autopar.capture.listing import operator_name
from autopar.capture.marker import ANNOTATE
from autopar.capture.origins import is_of_parameters
from autopar.capture.regions import runs
from autopar.cost.deferred_reductions import reads_as_linear
from autopar.cost.footprint import parameter_bytes
from autopar.defaults import QUESTIONS
from autopar.errors import InvalidInput, known_arguments
from autopar.layout import Layout, ParameterPlacement, Placement
from autopar.plans.explanation import Explanation, OperatorGroup, PricedCandidate
from autopar.plans.formulas import LayoutChange, PricedChange, operator_formulas, price_change
from autopar.plans.grouping import grouped
from autopar.plans.plan_value import PlanValue
from autopar.plans.search_account import SearchAccount, search_account
from autopar.plans.step_reasons import WayExplanation, explain_way
from autopar.search.candidates import Candidates, NodeClasses
from autopar.search.constraints import Constraints
from autopar.search.reshard_table import Placements
from autopar.solver.forced_choice import forced
from autopar.strategies import rule_of
from autopar.strategies.node_info import info
from autopar.strategies.results import maker, result_index, tensors_of, values_of
from autopar.tensor_type import TensorType

_NEAR = 4  # names that are suggested for an unknown one
WHOLE = "plan:"  # before a question about the whole step; no module has such a name


@known_arguments
def explain(plan: PlanValue, name: str) -> Explanation | WayExplanation | SearchAccount:
    """Return why something of the program runs as it does: every candidate, with its cost.

    Args:
        name: A parameter, a module path or a node of the captured graph. Or a decision
            about the whole step: "stages", "schedule", "microbatches", "mesh", "states" or
            "recompute", or "search" for all that the planner asked. Where a module has such a
            name, they are "plan:stages" and so on.
    """
    if not isinstance(name, str) or not name:
        raise InvalidInput(
            "explain() is asked by the name of a parameter, a module or a node, or of a choice",
            got=repr(name),
            remedy=f'plan.explain("{QUESTIONS[0]}")',
        )
    question = name.removeprefix(WHOLE)
    is_of_step = question in QUESTIONS
    explainer = _Explainer(plan)
    if is_of_step and (name != question or not explainer.knows(name)):
        return search_account(plan) if question == "search" else explain_way(plan, question)
    explanation = explainer.explain(name)
    return replace(explanation, namesake=f"{WHOLE}{name}") if is_of_step else explanation


class _Explainer:
    """Explains the operators and parameters of one plan."""

    def __init__(self, plan: PlanValue) -> None:
        self.plan, self.captured, self.decisions = plan, plan.captured, plan.decisions
        self.mesh, self.price = plan.mesh, plan.prices.price
        self.kinds = NodeClasses(self.captured, self.mesh, plan.cluster.device, self.price)
        self.nodes = {node.name: node for node in self.captured.graph.nodes}
        self.constraints = plan.constraints or Constraints()

    def knows(self, name: str) -> bool:
        """Return whether a parameter, a node, or a module with operators has this name."""
        names = {*self.captured.parameters.values(), *self.captured.tied, *self.nodes}
        return name in names or any(self._inside(name))

    def _inside(self, name: str) -> Iterator[fx.Node]:
        """Yield the operators in a module."""
        for node in self.captured.operators:
            if node.target is not ANNOTATE and f"{info(node).module}.".startswith(f"{name}."):
                yield node

    def explain(self, name: str) -> Explanation:
        placeholders = {n: p for p, n in self.captured.parameters.items()}
        placeholders |= {
            alias: placeholders[original]
            for alias, original in self.captured.tied.items()
            if original in placeholders
        }
        name = placeholders.get(name, name)
        node = self.nodes.get(name)
        if name in self.captured.parameters:
            return self._parameter(self.nodes[name])
        if node is not None and node.op == "call_function" and node.target is not ANNOTATE:
            return self._operator(maker(node), [])
        inside = list(self._inside(name))
        if not inside:
            raise self._unknown(name, [*placeholders])
        heaviest = max(inside, key=self._weight)
        others = [n for n in inside if n is not heaviest]
        explanation = self._operator(heaviest, [n.name for n in others])
        return replace(explanation, blocks=self._in_blocks(inside))

    def _in_blocks(self, nodes: Sequence[fx.Node]) -> tuple[OperatorGroup, ...]:
        """Return operators with their strategies, equal ones of repeated blocks together."""

        def described(node: fx.Node) -> tuple[str, tuple[str, str]]:
            module = info(node).module or "the model"
            strategy = self.decisions.strategies.get(node.name)
            return module, (operator_name(node.target), str(strategy or "replicated"))

        groups = grouped(map(described, nodes))
        return tuple(OperatorGroup(name, *what, count) for name, what, count in groups)

    def _unknown(self, name: str, parameters: list[str]) -> InvalidInput:
        nodes = self.captured.graph.nodes
        calls = [n for n in nodes if n.op == "call_function" and n.target is not ANNOTATE]
        modules = {info(n).module for n in calls if info(n).module}
        kinds = {
            "parameter": parameters,
            "module": sorted(modules),
            "node": [n.name for n in calls],
        }
        known = [*itertools.chain(*kinds.values()), *QUESTIONS]
        near = [path for path in known if name in path.split(".")]
        near += difflib.get_close_matches(name, known, _NEAR)
        close = ", ".join([*dict.fromkeys(near)][:_NEAR])
        others = ", ".join(f"a {kind}, as {of[0]}" for kind, of in kinds.items() if of)
        return InvalidInput(
            "explain() takes the name of a parameter, a module or a node of the graph, or a "
            "question about the whole step",
            got=repr(name),
            remedy=f"{f'close to it: {close}' if close else others}; of the whole step: "
            f"{', '.join(QUESTIONS)}; print(plan) says what it takes, in time and memory",
        )

    def _weight(self, node: fx.Node) -> tuple[float, float]:
        rule = self.kinds.rule(node)
        candidates = self.kinds.candidates(node)
        return (rule.flops if rule else 0.0, float(candidates.cost.max()))

    # Operators

    def _operator(self, node: fx.Node, others: list[str]) -> Explanation:
        offered, chosen = self._offered(node)
        steps = self._steps_of_operator(node, offered)
        has_rule = self.captured.rules[node.name] is not None
        candidates = [
            PricedCandidate(
                strategy=str(strategy) if has_rule else "replicated: no rule",
                inputs=tuple(
                    str(TensorType.of(info(value).val, states[index].layout))
                    for value, states in zip(self.kinds.inputs(node), offered.inputs)
                ),
                output=", ".join(
                    str(TensorType.of(tensor, states[index].layout))
                    for tensor, states in zip(tensors_of(node), offered.results)
                ),
                forward=float(offered.forward[index]),
                backward=float(offered.backward[index]),
                inside=float(offered.inside[index]),
                memory=float(offered.extra[index]),
                edges=tuple(self._edges(node, offered, index)),
                step=steps[index],
                chosen=index == chosen,
                excluded=self._why_not(node, offered, index),
                formulas=operator_formulas(offered, index, self.plan.cluster.device),
            )
            for index, strategy in enumerate(offered.strategies)
        ]
        rule = self.kinds.rule(node)
        bound = [
            f"input {position} is {constraint.layout}, annotated at {constraint.source}"
            for position, constraint in self.constraints.bound.get(node.name, {}).items()
        ]
        return Explanation(
            name=node.name,
            what=operator_name(node.target),
            module=info(node).module or "",
            source=info(node).source or "",
            rule=rule.text if rule is not None else "",
            mesh=str(self.mesh),
            bound=tuple(bound),
            candidates=tuple(candidates),
            others=tuple(others),
            step_is_lower_bound=self._multiplier > 0,
            times=self._times,
            region=self._region(node),
        )

    def _region(self, operator: fx.Node) -> str:
        """Return the region of an operator, and what is recomputed of it."""
        decided = self.decisions.recompute
        of_parameters = partial(is_of_parameters, captured=self.captured)
        for name, nodes in runs(self.captured.graph, decided, of_parameters):
            if operator in nodes:
                return f"{name}, {decided[name].words}"
        return ""

    def _offered(self, node: fx.Node) -> tuple[Candidates, int]:
        """Return the candidates that a decision was among, and the index of the chosen one."""
        strategy = self.decisions.strategies.get(node.name)
        offered = self.kinds.candidates(node)
        if strategy is None:
            whole = Placement.whole(tensors_of(node)[0].ndim)
            chosen = offered.outputs.index(whole) if whole in offered.outputs else 0
            return offered, chosen
        if strategy not in offered.strategies:
            offered = self.kinds.candidates(node, in_all_orders=True)
        if strategy in offered.strategies:
            return offered, offered.strategies.index(strategy)
        return offered, -1

    def _why_not(self, node: fx.Node, offered: Candidates, index: int) -> str:
        for position, constraint in self.constraints.bound.get(node.name, {}).items():
            if offered.inputs[position][index].layout != constraint.layout:
                return f"annotated otherwise at {constraint.source}"
        is_cut = self.plan.search is not None and offered.strategies[index].axes
        if is_cut and node.name in self.plan.cost_graph.prologue:
            return "not asked: what follows from the inputs alone is whole on every rank"
        return ""

    def _edges(self, node: fx.Node, offered: Candidates, index: int) -> Iterator[PricedChange]:
        for position, value in enumerate(self.kinds.inputs(node)):
            way = self.decisions.ways.get((value.name, node.name, position))
            first = way[-1] if way else self._gives(value)
            meanwhile = self._meanwhile(value, node, offered, index)
            wants = offered.inputs[position][index]
            learns = info(node).learns and info(value).learns
            change = LayoutChange(value.name, first, wants, meanwhile, learns)
            yield self._priced(value, change)
        for value in values_of(node):
            gives = offered.results[result_index(value)][index]
            for reader, wants in self._wanted(value):
                yield self._edge_to(value, reader, gives, wants)

    def _priced(self, value: fx.Node, change: LayoutChange) -> PricedChange:
        of_parameters = is_of_parameters(value, self.captured)
        return price_change(value, change, self.price, of_parameters=of_parameters)

    def _edge_to(
        self, value: fx.Node, name: str, first: Placement, second: Placement
    ) -> PricedChange:
        """Return the change of a value for the reader of that name, or for what readers share."""
        learns = info(self.nodes.get(name, value)).learns and info(value).learns
        meanwhile = self._of_readers(value, name)
        return self._priced(value, LayoutChange(name, first, second, meanwhile, learns))

    def _of_readers(self, value: fx.Node, name: str) -> float:
        """Return the seconds that the reader of that name, or else all, compute meanwhile."""
        readers = [node for node in value.users if node.op == "call_function"]
        readers = [node for node in readers if node.name == name] or readers
        seconds = [self._meanwhile(value, node, *self._offered(node)) for node in readers]
        is_sum = is_of_parameters(value, self.captured) or all(seconds)
        return sum(seconds) if is_sum else 0.0

    def _meanwhile(self, value: fx.Node, reader: fx.Node, offered: Candidates, way: int) -> float:
        """Return the seconds of a reader that hide what brings back the gradient of a value.

        For a parameter they are the reader's backward, else the gradients of its weights.
        """
        if is_of_parameters(value, self.captured):
            return float(offered.backward[way])
        return float(offered.weight_seconds[way]) if reads_as_linear(reader, value) else 0.0

    def _gives(self, node: fx.Node) -> Placement:
        for decided in (self.decisions.fixed, self.decisions.placeholders):
            if node.name in decided:
                return Placement(decided[node.name])
        operator = maker(node)
        strategy, rule = self.decisions.strategies.get(operator.name), rule_of(operator)
        if strategy is None or rule is None:
            return Placement.whole(info(node).val.ndim)
        return Placement(rule.signature(strategy).outputs[result_index(node)])

    def _wanted(self, node: fx.Node) -> list[tuple[str, Placement]]:
        """Return the readers of a value, each with the state it reads; a shared state once."""
        readers: dict[tuple[str, Placement], None] = {}
        for reader in node.users:
            if reader.op == "output":
                state = self._gives(node)
                if state.partial:
                    readers["the output", Placement(state.layout.with_partial(()))] = None
                continue
            for position, value in enumerate(self.kinds.inputs(reader)):
                if value is not node:
                    continue
                if way := self.decisions.ways.get((node.name, reader.name, position)):
                    readers["its readers", way[0]] = None
                else:
                    readers[reader.name, self._wants(reader, position)] = None
        return list(readers)

    def _wants(self, reader: fx.Node, position: int) -> Placement:
        if reader.name in self.decisions.fixed:
            return Placement(self.decisions.fixed[reader.name])
        offered, chosen = self._offered(reader)
        return offered.inputs[position][chosen]

    # Parameters

    def _parameter(self, node: fx.Node) -> Explanation:
        name = self.captured.parameters[node.name]
        now = self._gives(node)
        constraint = self.constraints.parameters.get(name)
        variable = self.plan.cost_graph.parameters[node.name]
        states, steps = variable.states, self._steps(variable.number, len(variable.states))
        if now not in states:
            states = Placements([now, *states])
            steps = [None] * len(states)
        wanted = self._wanted(node)
        candidates = []
        for state, step in zip(states, steps):
            stored = str(TensorType.of(info(node).val, state.layout))
            places = self._places(node, state.layout)
            candidates.append(
                PricedCandidate(
                    strategy=f"kept as {stored}{', on the host' * bool(places.on_host)}",
                    output=stored,
                    memory=float(sum(parameter_bytes(node, places, self.mesh))),
                    edges=tuple(
                        self._edge_to(node, reader, state, wants) for reader, wants in wanted
                    ),
                    step=step,
                    chosen=state == now,
                )
            )
        bound = constraint and f"{constraint.layout}, annotated at {constraint.source}"
        return Explanation(
            name=name,
            what="parameter",
            source=info(node).source or "",
            mesh=str(self.mesh),
            bound=(bound,) if bound else (),
            candidates=tuple(candidates),
            others=tuple(dict.fromkeys(reader.name for reader in node.users)),
            step_is_lower_bound=self._multiplier > 0,
            times=self._times,
        )

    def _places(self, node: fx.Node, layout: Layout) -> ParameterPlacement:
        """Return the places of a parameter, if it were read in `layout`."""
        decided = self.decisions.parameter(node.name)
        if layout == decided.working:
            return decided
        axes = [axis for axis in self.mesh if axis not in layout.axes]
        return self.plan.states.places(
            layout,
            tuple(info(node).val.shape),
            axes,
            self.mesh,
            learns=info(node).learns,
            runs_on_host=info(node).on_host,
        )

    # The whole step with one decision forced

    @property
    def _multiplier(self) -> float:
        return self.plan.search.multiplier if self.plan.search is not None else 0.0

    def _steps(self, variable: int, count: int) -> list[float | None]:
        """Return the least seconds of a step with each choice of a variable; None unsearched."""
        if self.plan.search is None:
            return [None] * count
        built, limit = self.plan.cost_graph, self.plan.limit
        limit = None if limit is None else limit - built.fixed_bytes
        least = forced(built.graph, variable, self._multiplier, limit)
        return [float(seconds) for seconds in least * self._times]

    @property
    def _times(self) -> float:
        """The number of times that a step takes the seconds of the program.

        Each micro-batch takes them once, and the ranks of a pipeline share them.
        """
        pipelining = self.plan.pipelining
        return self.plan.microbatches / (pipelining.schedule.ranks if pipelining else 1)

    def _steps_of_operator(self, node: fx.Node, offered: Candidates) -> list[float | None]:
        """Return the least seconds of a step with each candidate of an operator."""
        variable = self.plan.cost_graph.operators[node.name]
        assert variable.candidates is not None
        searched = variable.candidates.strategies
        known = dict(zip(searched, self._steps(variable.number, len(searched))))
        unknown = None if self.plan.search is None else math.inf
        return [known.get(strategy, unknown) for strategy in offered.strategies]
