"""Region: a function that is called eagerly on DTensors, and runs as one parallel graph.

    attention = ap.shard(scores, (("dp", "tp", None, None),) * 3)
    y = attention(q, k, v)              # q, k, v are DTensors, and so is y

    feed_forward = ap.region(feed_forward, mode="auto", cluster=cluster)

The function is captured once for each kind of call (shapes, dtypes, placements), planned around
the placements that came in and the annotations, and run on the local tensors; autograd goes
through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture import capture
from autopar.capture.effects import carry_out_all
from autopar.cluster import Cluster
from autopar.collectives import LinkPrice
from autopar.errors import InvalidInput, require_one_of
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes import localize, rewrite
from autopar.passes.localize import axes_used
from autopar.placements import from_placements, to_placements
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.process_groups import Groups, equalize_group_counts
from autopar.runtime.execution.eager_program import compile_graph
from autopar.runtime.parameters.placing import dtensor_wrapper
from autopar.search.constraints import Constraints, LayoutConstraint, read_constraints
from autopar.search.layout_search import LayoutSearch
from autopar.search.propagation import propagate
from autopar.strategies.node_info import info

RegionMode = Literal["auto", "propagate"]


def region(
    function: Callable | None = None, *, mode: RegionMode = "auto", cluster: Cluster | None = None
) -> Callable:
    """Return a function that plans itself: called on DTensors, it runs as one parallel graph.

    It can be a decorator, `@ap.region(mode="auto", cluster=cluster)`. Annotations of `ap.shard`
    inside hold. Called on plain tensors, it is the function itself.

    Args:
        function: Takes and gives tensors, or trees of them.
        mode: "auto" looks for the layouts of its operators by which forward and backward are
            fastest, from the placements that come in; "propagate" spreads these and what is
            annotated.
        cluster: The machines that layouts are chosen for, as the first rank of the mesh knows
            them. None: this machine, without measuring it.
    """
    require_one_of("mode", mode, get_args(RegionMode))
    if function is None:
        return functools.partial(region, mode=mode, cluster=cluster)
    regions: dict[Any, Any] = {}  # compiled, by kind of call

    @functools.wraps(function, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        is_distributed = any(isinstance(x, DTensor) for x in pytree.tree_leaves((args, kwargs)))
        if torch.compiler.is_exporting() or not is_distributed:
            return function(*args, **kwargs)
        return run_region(regions, lambda a, k: function(*a, **k), args, kwargs, mode, cluster)

    return called


def run_region(
    regions: dict[Any, Any],
    function: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    mode: RegionMode = "propagate",
    cluster: Cluster | None = None,
) -> Any:
    """Run `function(args, kwargs)` as a parallel graph, kept in `regions` for the next call."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    distributed = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    device_mesh = distributed[0].device_mesh
    if any(leaf.device_mesh != device_mesh for leaf in distributed):
        raise InvalidInput(
            "the DTensors of one region live on one mesh",
            got=", ".join(str(leaf.device_mesh) for leaf in distributed),
            remedy="redistribute them to one mesh first",
        )
    key = (spec, device_mesh, tuple(map(_kind, leaves)))
    if key not in regions:
        regions[key] = _compile(function, leaves, spec, device_mesh, mode, cluster)
    return regions[key](leaves)


@dataclass(frozen=True)
class _CompiledRegion:
    """A compiled region: local tensors in, DTensors out."""

    program: RuntimeProgram
    run: Callable[..., tuple[Tensor, ...]]
    constants: tuple[Tensor, ...]
    device_mesh: DeviceMesh
    function: _Function

    def __call__(self, leaves: list[Any]) -> Any:
        program = self.program
        inputs = [
            _local(leaf, program.type_of(name).layout, program.mesh)
            for leaf, name in zip(leaves, program.captured.inputs)
            if name is not None
        ]
        results = self.run(*self.constants, *inputs, *self._key())
        outputs = [
            dtensor_wrapper(info(node).type.layout, info(node).type.shape, self.device_mesh)(value)
            for value, node in zip(results, program.outputs)
        ]
        carry_out_all(program.captured.effects, self.function, outputs)
        return program.structure(outputs)

    def _key(self) -> list[Tensor]:
        """Return the keys of random numbers as the first rank has them."""
        drawn = self.program.captured.draw().values()
        keys = [key.to(self.device_mesh.device_type) for key in drawn]
        for key in keys:
            for dim in range(self.device_mesh.ndim):
                torch.distributed.broadcast(key, group=self.device_mesh.get_group(dim), group_src=0)
        return keys


class _Function(nn.Module):
    """A function as a module, which is what capture takes."""

    def __init__(self, function: Callable, spec: pytree.TreeSpec) -> None:
        super().__init__()

        def call(leaves: tuple) -> Any:
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return function(args, kwargs)

        self.call = call  # a closure: torch copies modules deeply, and warns when it copies specs

    def forward(self, *leaves: Any) -> Any:
        return self.call(leaves)


def _compile(
    function: Callable,
    leaves: list[Any],
    spec: pytree.TreeSpec,
    device_mesh: DeviceMesh,
    mode: RegionMode,
    cluster: Cluster | None,
) -> _CompiledRegion:
    mesh = Mesh.from_device_mesh(device_mesh)
    examples = tuple(_example(leaf) for leaf in leaves)
    module = _Function(function, spec)
    captured = capture(module, examples)
    constraints = read_constraints(captured, mesh, {})
    inputs = {
        name: LayoutConstraint(_layout(leaf, mesh), "the placements of an argument")
        for name, leaf in zip(captured.inputs, leaves)
        if name is not None
    }
    constraints = Constraints(constraints.values, inputs=inputs, bound=constraints.bound)
    if mode == "auto":
        machines = _of_first_rank(cluster or Cluster.local(mesh.size, measure=False), device_mesh)
        machines.require_room(mesh)
        decisions = LayoutSearch(captured, machines, lambda _: constraints).run([mesh]).decisions
    else:
        decisions = propagate(captured, mesh, constraints, batch=False)
    graph = rewrite(captured, decisions, LinkPrice.uniform(mesh))
    ranks = device_mesh.mesh.flatten().tolist()
    rank = ranks.index(torch.distributed.get_rank())
    if len(ranks) < torch.distributed.get_world_size():
        equalize_group_counts(device_mesh)
    groups = Groups(mesh, axes_used(graph), [ranks])
    device = next(leaf.to_local().device for leaf in leaves if isinstance(leaf, DTensor))
    local: fx.Graph = localize(graph, mesh, rank, device, groups.name)
    program = RuntimeProgram(captured, decisions, graph)
    constants = tuple(value.to(device) for value in captured.constants.values())
    return _CompiledRegion(program, compile_graph(local), constants, device_mesh, module)


def _of_first_rank(cluster: Cluster, device_mesh: DeviceMesh) -> Cluster:
    """Return the machines as the first rank of a mesh has them: all ranks choose alike."""
    known = [cluster]
    for dim in range(device_mesh.ndim):
        group = device_mesh.get_group(dim)
        torch.distributed.broadcast_object_list(known, group=group, group_src=0)
    return known[0]


@lru_cache(maxsize=4096)
def _placements(layout: Layout, mesh: Mesh) -> tuple[Any, ...]:
    return to_placements(layout, mesh)


def _local(leaf: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Return the local tensor of a DTensor; its gradient has its layout, without partial sums."""
    if not isinstance(leaf, DTensor):
        return leaf
    return leaf.to_local(grad_placements=_placements(layout.gradient, mesh))


def _layout(leaf: Tensor, mesh: Mesh) -> Layout:
    if isinstance(leaf, DTensor):
        return from_placements(leaf.placements, mesh, leaf.ndim)
    return Layout.replicated(leaf.ndim)


def _example(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    example = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return example.requires_grad_(leaf.requires_grad and torch.is_grad_enabled())


def _kind(leaf: Any) -> Any:
    """Return the properties of an argument that a compiled region depends on."""
    if not isinstance(leaf, Tensor):
        return leaf
    placements = leaf.placements if isinstance(leaf, DTensor) else None
    needs_gradient = leaf.requires_grad and torch.is_grad_enabled()
    return tuple(leaf.shape), leaf.dtype, leaf.device, placements, needs_gradient
