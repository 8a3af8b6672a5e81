"""Make one rank's graph a Python function that is as fast as hand-written code.

Forms of a graph that help passes cost time at each call. Here they end: operators that capture took
apart are joined, and become functions of torch's Python interface. Movements are called without the
dispatcher, and sum in place if nobody else reads the value. A recomputed region is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autopar._torch.operators import python_call
from autopar.collectives.eager_movements import EAGER, DeferredSum, defer_sum
from autopar.mesh import Mesh
from autopar.passes import LocalContext, ParameterCopies, run_local_passes
from autopar.passes.flow import copy_subgraph
from autopar.pipeline.running.weight_halves import WeightHalves
from autopar.runtime.execution.activation_offload import ActivationOffload
from autopar.runtime.execution.call_numbers import (
    Affine,
    NumberForms,
    Unalike,
    forms_in,
    with_numbers,
)
from autopar.runtime.execution.profiler_ranges import profiled_function
from autopar.runtime.execution.region_calls import RegionSettings, call_regions
from autopar.runtime.parameters.gathered_copies import GatherWindow
from autopar.strategies.node_info import info

# Compiles the regions of a graph in place, without some of its calls.
CompileRegions = Callable[[fx.Graph, Collection[fx.Node]], None]


@dataclass(frozen=True)
class EagerProgram:
    """A graph as a function of its placeholders, and of some inputs in full."""

    function: Callable[..., Any]
    whole_inputs: tuple[str, ...]  # the names of these inputs, which come last
    graph: fx.Graph  # that it runs
    # By call what it called before its own forms replaced that; None where calls are inside others.
    targets: dict[fx.Node, Any] | None

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def resizable(
        self, others: Sequence[EagerProgram], forms: NumberForms
    ) -> tuple[Callable[..., Any], list[Affine]]:
        """Return the function with further arguments, and the forms of these numbers.

        `others`: the programs of other sizes."""
        programs, templates = [*others, self], dict[fx.Node, Any]()
        for row in forms.pair([program.graph for program in programs]):
            if any(program.targets is None for program in programs):
                raise Unalike("a program with regions, or one that is compiled")
            known = [program.targets.get(node) for program, node in zip(programs, row)]  # type: ignore[union-attr]
            if any(forms_in(forms.of(known))):
                raise Unalike(f"a function of numbers, {known[-1]}")
            template = forms.of([(node.args, node.kwargs) for node in row])
            if any(forms_in(template)):
                templates[row[-1]] = template
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        numbers = dict[Affine, fx.Node]()
        used = list(dict.fromkeys(forms_in([*templates.values()])))
        for node in self.graph.nodes:
            if node.op != "placeholder" and not numbers and used:
                for form in used:
                    numbers[form] = graph.placeholder(f"number_{len(numbers)}")
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node in templates:
                template = fx.map_arg(templates[node], copies.__getitem__)
                copies[node].args, copies[node].kwargs = with_numbers(template, numbers.__getitem__)
        return profiled_function(graph), used


def compile_graph(
    graph: fx.Graph,
    *,
    late: list[DeferredSum] | None = None,
    outputs: int = 0,
    whole: fx.Graph | None = None,
    mesh: Mesh | None = None,
    halves: WeightHalves | None = None,
    copies: ParameterCopies | None = None,
    window: GatherWindow | None = None,
    offload: ActivationOffload | None = None,
    compile_regions: CompileRegions | None = None,
) -> EagerProgram:
    """Return `graph`, the program of one rank, as a function. None leaves an option out.

    - `late`: sums of numbers among the first `outputs` results are appended there for the caller.
    - `whole`: the program of all ranks of `mesh`, if the caller has inputs in full.
    - `halves`: backward is split, and they record the second halves.
    - `copies`: the program reads copies of parameters, which come and go through `window`.
    - `offload`: offloads the values of regions that ask for it.
    - `compile_regions`: compiles the calls that may be compiled.
    """

    def sum_for_caller(x: Tensor, group: str, pending: bool) -> Tensor:
        assert late is not None
        return defer_sum(x, group, late)

    quick = copy_subgraph(graph, graph.nodes)
    returned = 0 if late is None else outputs
    is_split, copies = halves is not None, copies or ParameterCopies()
    # A program of a step, or one that is called on processes, is differentiated once.
    is_once = window is not None
    options = {"is_differentiated_once": is_once, "compiled": compile_regions is not None}
    run_local_passes(quick, LocalContext(whole, mesh, returned, is_split, copies, **options))
    if compile_regions is not None:
        split_calls = [node for node in quick.nodes if info(node).weight_inputs is not None]
        compile_regions(quick, frozenset(split_calls if is_split else ()))
    window_calls = {} if window is None else window.calls
    origins = [info(node).origin for node in quick.nodes if node.op == "placeholder"]
    plain: dict[fx.Node, Any] = {}
    has_regions = any(info(node).region is not None for node in quick.nodes)
    is_hidden = has_regions or halves is not None or compile_regions is not None
    targets = None if is_hidden else {node: node.target for node in quick.nodes}
    for node in quick.nodes:
        if node.target in window_calls:
            node.target = window_calls[node.target]
        elif node.target is defer_sum:
            node.target = sum_for_caller
        elif node.target in EAGER:
            node.target = EAGER[node.target]
        elif node.op == "call_function":
            node.target, node.kwargs = python_call(node.target, node.args, node.kwargs)
        if halves is not None and (weights := info(node).weight_inputs) is not None:
            plain[node] = node.target
            node.target = halves.deferring(node.target, weights)
    contexts = [halves.discarding] if halves is not None else []
    contexts = contexts if window is None else [*contexts, window.rerun_forward]
    call_regions(quick, RegionSettings(contexts, plain, offload, window))
    wholes = tuple(name for kind, name in origins if kind == "whole")
    return EagerProgram(profiled_function(quick), wholes, quick, targets)
