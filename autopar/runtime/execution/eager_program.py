"""Eager: one rank's graph as a Python function that wastes no more time than hand-written code.

What passes and readers like costs time at each call. Here the last of it goes: what capture took
apart is joined again, operators become the functions of torch's Python interface, which are bound
with less work, a movement is called without the dispatcher and sums in place what nobody else
reads, and a region that is recomputed is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autopar._torch.operators import python_call
from autopar.collectives.eager_movements import EAGER, DeferredSum, defer_sum
from autopar.mesh import Mesh
from autopar.passes import LocalSetting, ParameterCopies, run_local_passes
from autopar.passes.flow import copy_subgraph
from autopar.pipeline.running.weight_halves import WeightHalves
from autopar.runtime.execution.activation_offload import ActivationOffload
from autopar.runtime.execution.profiler_ranges import profiled_function
from autopar.runtime.execution.region_calls import RegionSettings, call_regions
from autopar.runtime.parameters.gathered_copies import GatherWindow
from autopar.strategies.node_info import info

CompileRegions = Callable[
    [fx.Graph, Collection[fx.Node]], None
]  # of a graph, but for some of its calls


@dataclass(frozen=True)
class EagerProgram:
    """A graph as a function: of its placeholders, then of the whole of some inputs."""

    function: Callable[..., Any]
    whole_inputs: tuple[str, ...]

    def __call__(self, *arguments: Tensor) -> Any:
        return self.function(*arguments)


def compile_graph(
    graph: fx.Graph,
    late: list[DeferredSum] | None = None,
    outputs: int = 0,
    whole: fx.Graph | None = None,
    mesh: Mesh | None = None,
    halves: WeightHalves | None = None,
    copies: ParameterCopies | None = None,
    window: GatherWindow | None = None,
    keeper: ActivationOffload | None = None,
    compiling: CompileRegions | None = None,
) -> EagerProgram:
    """`graph`, the program of one rank, as a function.

    Given `late`, numbers among the first `outputs` results are left to be summed: the caller sees
    to what stands in `late`. Given `whole`, the program of all ranks of a mesh, the caller has
    whole inputs.
    Given `halves`, backward is split, and they record what is put off.
    Given `copies` of parameters, the program reads them, and they come and go through `window`.
    What its regions keep elsewhere goes through `keeper`.
    Given `compiling`, it is compiled, but for what has to stay outside.
    """

    def sum_for_caller(x: Tensor, group: str, pending: bool) -> Tensor:
        assert late is not None
        return defer_sum(x, group, late)

    quick = copy_subgraph(graph, graph.nodes)
    returned = 0 if late is None else outputs
    is_split, copies = halves is not None, copies or ParameterCopies()
    # What runs in a step, or is called on processes, is differentiated once.
    how = {"once": window is not None, "compiled": compiling is not None}
    setting = LocalSetting(whole, mesh, returned, is_split, copies, **how)
    run_local_passes(quick, setting)
    if compiling is not None:
        apart = [node for node in quick.nodes if info(node).weight_inputs is not None]
        compiling(quick, frozenset(apart if is_split else ()))
    coming = {} if window is None else window.calls
    origins = [info(node).origin for node in quick.nodes if node.op == "placeholder"]
    plain: dict[fx.Node, Any] = {}
    for node in quick.nodes:
        if node.target in coming:
            node.target = coming[node.target]
        elif node.target is defer_sum:
            node.target = sum_for_caller
        elif node.target in EAGER:
            node.target = EAGER[node.target]
        elif node.op == "call_function":
            node.target, node.kwargs = python_call(node.target, node.args, node.kwargs)
        if halves is not None and (weights := info(node).weight_inputs) is not None:
            plain[node] = node.target
            node.target = halves.deferring(node.target, weights)
    beside = [halves.discarding] if halves is not None else []
    beside = beside if window is None else [*beside, window.rerun_forward]
    call_regions(quick, RegionSettings(beside, plain, keeper, window))
    wholes = tuple(name for kind, name in origins if kind == "whole")
    return EagerProgram(profiled_function(quick), wholes)
