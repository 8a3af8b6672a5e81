"""The rule law: cut inputs, run one operator on every rank, put outputs and gradients together.

All ranks live in one process as a list of tensors. Nothing but rules, layouts and local calls is
used, so a failure is a failure of a rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.collectives.joint_kernels import drive_groups, run_joint_kernel
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.strategies import (
    KernelCall,
    Rule,
    Strategy,
    joint_arguments,
    localize_arguments,
    piece_call,
    placed_arguments,
    rule_of,
    tensor_inputs,
)
from autopar.strategies.node_info import flat_values
from autopar.strategies.results import has_results
from autopar.tensor_type import TensorType

Slopes = list[dict[int, Tensor]]  # of each rank: gradients of its results, by their places


@dataclass
class Case:
    """One call of an operator on small tensors."""

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
    constants: tuple[int, ...] = ()  # inputs without a gradient
    used: tuple[int, ...] | None = None  # the results that get a gradient; None: all
    # The parts of the dims of the result, and of the inputs.
    parts: tuple[tuple[tuple[int, int], ...], ...] = ()

    def node(self) -> fx.Node:
        """The call as a node of a graph, with tensors as placeholders that know their values."""
        graph = fx.Graph()

        def placeholder(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["val"] = value
            return node

        args, kwargs = pytree.tree_map(placeholder, (self.args, self.kwargs))
        node = graph.call_function(self.target, args, kwargs)
        node.meta |= {"val": self.target(*self.args, **self.kwargs), "differentiable": True}
        for value, parts in zip((node, *node.all_input_nodes), self.parts):
            value.meta["parts"] = parts
        return node


def run_call(
    function: Any, args: Any, kwargs: Any, values: dict[fx.Node, Tensor]
) -> tuple[Tensor, ...]:
    """Return all results of a call."""
    args, kwargs = fx.map_arg((args, kwargs), lambda node: values[node])
    # Through lists, since fx keeps its own immutable ones.
    args, kwargs = pytree.tree_map(lambda x: x, (list(args), dict(kwargs)))
    return flat_values(function(*args, **kwargs))


def cut(value: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """Return the pieces of `value` on all ranks; partial sums as random summands."""
    degree = mesh.degree(layout.partial)
    if value.is_floating_point() or value.is_complex():
        summands = [torch.randn_like(value) for _ in range(degree - 1)]
    else:
        summands = [torch.randint_like(value, -3, 3) for _ in range(degree - 1)]
    summands.append(value - sum(summands) if summands else value)
    pieces = []
    for rank in range(mesh.size):
        piece = summands[mesh.position(rank, layout.partial)]
        boxes = []
        for bounds in layout.boxes(value.shape, mesh, rank):
            inside = piece
            for dim, (start, length) in enumerate(bounds):
                inside = inside.narrow(dim, start, length)
            boxes.append(inside)
        pieces.append(joined_boxes(boxes, layout).clone())
    return pieces


def joined_boxes(boxes: list[Tensor], layout: Layout) -> Tensor:
    """Return a rank's tensor from the pieces of all parts of all dims."""
    for dim, count in reversed(layout.parts):
        groups = (boxes[at : at + count] for at in range(0, len(boxes), count))
        boxes = [torch.cat(group, dim) for group in groups]
    (piece,) = boxes
    return piece


def assemble(pieces: list[Tensor], layout: Layout, shape: torch.Size, mesh: Mesh) -> Tensor:
    """Return the whole tensor; check that replicas agree and have the right shape."""
    others = tuple(axis for axis in mesh if axis not in layout.axes)
    wholes: dict[int, Tensor] = {}
    for rank, piece in enumerate(pieces):
        assert tuple(piece.shape) == layout.local_shape(shape, mesh, rank)
        replica = mesh.position(rank, others)
        if piece.dtype == torch.bool:
            piece = piece.to(torch.int8)
        whole = wholes.setdefault(replica, torch.zeros(shape, dtype=piece.dtype))
        boxes, inside = layout.boxes(shape, mesh, rank), [piece]
        for dim, count in layout.parts:
            inside = [chunk for part in inside for chunk in part.chunk(count, dim)]
        for bounds, part in zip(boxes, inside):
            whole[tuple(slice(start, start + length) for start, length in bounds)] += part
    first, *rest = wholes.values()
    for other in rest:
        assert_same(other, first, 1e-9)
    return first


def assert_same(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    if wanted.is_complex():
        got, wanted = (torch.view_as_real(value.resolve_conj()) for value in (got, wanted))
    got, wanted = got.double(), wanted.double()
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


class Reference:
    """The uncut operator: its results, gradients for them, and the gradients of its inputs."""

    def __init__(self, case: Case) -> None:
        self.case, self.node = case, case.node()
        rule = rule_of(self.node)
        assert rule is not None, f"no rule for {case.name}"
        self.rule: Rule = rule
        self.nodes = tensor_inputs(self.node)
        self.values = [node.meta["val"] for node in self.nodes]
        leaves = [leaf(value, index, case) for index, value in enumerate(self.values)]
        # By position, so that one tensor given twice is two inputs.
        self.outputs = run_call(
            case.target, self.node.args, self.node.kwargs, dict(zip(self.nodes, leaves))
        )
        self.gradients: list[Tensor | None] = [None] * len(leaves)
        self.slopes = {
            place: torch.randn_like(output)
            for place, output in enumerate(self.outputs)
            if output.requires_grad and (case.used is None or place in case.used)
        }
        if self.slopes:
            self.gradients = gradients(self.outputs, leaves, self.slopes)

    def check(self, strategy: Strategy, mesh: Mesh) -> None:
        case, signature = self.case, self.rule.signature(strategy)
        self.rule.validate(strategy, mesh)
        pieces = [cut(v, lay, mesh) for v, lay in zip(self.values, signature.inputs)]
        local = [
            [leaf(piece[rank], index, case) for index, piece in enumerate(pieces)]
            for rank in range(mesh.size)
        ]
        slopes: list[dict[int, Tensor]] = [{} for _ in range(mesh.size)]
        for place, slope in self.slopes.items():
            for rank, part in enumerate(cut(slope, signature.outputs[place].gradient, mesh)):
                slopes[rank][place] = part
        call = KernelCall.of(self.rule, strategy)
        if call is not None and call.kernel.joint is not None:
            outputs, local_gradients = self.together(call, mesh, local, slopes)
        elif call is not None and call.kernel.expand is not None:
            outputs, local_gradients = self.expanded(call, mesh, local, slopes)
        else:
            outputs, local_gradients = self.direct(strategy, mesh, local, slopes)
        for place, wanted in enumerate(self.outputs):
            parts = [results[place].detach() for results in outputs]
            whole = assemble(parts, signature.outputs[place], wanted.shape, mesh)
            assert_same(whole, wanted.detach(), case.tolerance)
        for index, wanted in enumerate(self.gradients):
            if wanted is not None:
                parts = [slopes_of_rank[index] for slopes_of_rank in local_gradients]
                got = assemble(parts, signature.gradients[index], wanted.shape, mesh)
                assert_same(got, wanted, case.tolerance)

    def direct(
        self, strategy: Strategy, mesh: Mesh, local: list[list[Tensor]], slopes: Slopes
    ) -> tuple[list[tuple[Tensor, ...]], list[list[Tensor]]]:
        outputs, grads = [], []
        for rank, leaves in enumerate(local):
            call = self.local_call(strategy, mesh, rank)
            outputs.append(run_call(*call, dict(zip(self.nodes, leaves))))
            if slopes[rank]:
                grads.append(gradients(outputs[-1], leaves, slopes[rank]))
        return outputs, grads

    def local_call(self, strategy: Strategy, mesh: Mesh, rank: int) -> Any:
        """Return function and arguments on `rank`."""
        layouts, call = self.rule.signature(strategy).outputs, KernelCall.of(self.rule, strategy)
        types = tuple(
            TensorType(tuple(value.shape), value.dtype, layout)
            for value, layout in zip(self.outputs, layouts)
        )
        if call is None:
            kinds = types if has_results(self.node) else types[0]
            return piece_call(self.node, self.rule, strategy, types=kinds, mesh=mesh, rank=rank)
        args, kwargs = localize_arguments(self.node, types, mesh, rank)
        return call.kernel.function, args, {**kwargs, "start": call.start(mesh, rank)}

    def together(
        self, call: KernelCall, mesh: Mesh, local: list[list[Tensor]], slopes: Slopes
    ) -> tuple[list[tuple[Tensor, ...]], list[list[Tensor]]]:
        """Run all ranks at once, in groups over the axes of the factor or joint."""
        strategy = call.strategy
        types = tuple(
            TensorType(tuple(value.shape), value.dtype, layout)
            for value, layout in zip(self.outputs, self.rule.signature(strategy).outputs)
        )
        arguments = joint_arguments(self.node, types, mesh)
        groups, calls = [], []
        for rank, leaves in enumerate(local):
            groups.append(call.group(mesh, rank))
            values = dict(zip(self.nodes, leaves))
            placed = placed_arguments(arguments, self.rule, strategy, mesh, rank)
            calls.append(fx.map_arg(placed, lambda n: values[n]))  # noqa: B023
        outputs = run_joint_kernel(call.joint, groups, drive_groups(mesh.groups(call.axes)), calls)
        if not any(slopes):
            return outputs, []
        roots = [pair for of_rank in zip(outputs, slopes) for pair in _roots(*of_rank)]
        wanted = [leaf for leaves in local for leaf in leaves if leaf.requires_grad]
        ends, seeds = zip(*roots)
        grads = iter(torch.autograd.grad(ends, wanted, seeds, allow_unused=True))
        slopes_of = [[next(grads) if x.requires_grad else None for x in xs] for xs in local]
        return outputs, [
            [torch.zeros_like(x) if slope is None else slope for x, slope in zip(*of_rank)]
            for of_rank in zip(local, slopes_of)
        ]

    def expanded(
        self, call: KernelCall, mesh: Mesh, local: list[list[Tensor]], slopes: Slopes
    ) -> tuple[list[tuple[Tensor, ...]], list[list[Tensor]]]:
        """Run part, all-gather (backward: slice), and combine on all ranks."""
        expand, axes = call.kernel.expand, call.axes
        assert expand is not None
        layout = self.rule.signature(call.strategy).outputs[0]
        (whole,) = self.outputs
        output_type = TensorType(tuple(whole.shape), whole.dtype, layout)
        parts, outputs, grads = [], [], []
        calls = [
            localize_arguments(self.node, output_type, mesh, rank) for rank in range(mesh.size)
        ]
        for rank, leaves in enumerate(local):
            size, start = self.rule.sizes[call.name], call.start(mesh, rank)
            arguments = expand.part_call(*calls[rank], start, size)
            parts += run_call(expand.part, *arguments, dict(zip(self.nodes, leaves)))
            assert parts[-1].shape[-1] == expand.columns
        for group in mesh.groups(axes):
            gathered = torch.cat([parts[rank].detach() for rank in group], -1)
            for rank in group:
                leaves, mine = local[rank], gathered.clone().requires_grad_(bool(slopes[rank]))
                graph_node = fx.Graph().placeholder("gathered")
                arguments = expand.combine_call(graph_node, *calls[rank], len(group), whole.dtype)
                values = dict(zip(self.nodes, leaves)) | {graph_node: mine}
                output = run_call(expand.combine, *arguments, values)
                outputs.append((rank, output))
                if slopes[rank]:
                    slope = gradients(output, [mine], slopes[rank])[0]
                    at = mesh.position(rank, axes) * expand.columns
                    slope = slope.narrow(-1, at, expand.columns)
                    grads.append((rank, gradients((parts[rank],), leaves, {0: slope})))
        return in_order(outputs), in_order(grads)


def check_all(case: Case, *meshes: Mesh, ordered: bool = True) -> Rule:
    """Check the law for one call, under every strategy that its rule yields on `meshes`."""
    torch.manual_seed(0)
    reference = Reference(case)
    for mesh in meshes:
        for strategy in reference.rule.strategies(mesh, ordered=ordered):
            try:
                reference.check(strategy, mesh)
            except Exception as error:
                raise AssertionError(
                    f"{case.name} with {reference.rule.text!r} under {strategy} on {mesh}"
                ) from error
    return reference.rule


def _roots(outputs: tuple[Tensor, ...], slopes: dict[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(outputs[place], slope) for place, slope in slopes.items()]


def in_order(items: list[tuple[int, Any]]) -> list[Any]:
    """Return items by rank."""
    return [item for _, item in sorted(items, key=lambda pair: pair[0])]


def leaf(value: Tensor, index: int, case: Case) -> Tensor:
    differentiable = (
        value.is_floating_point() or value.is_complex()
    ) and index not in case.constants
    return value.detach().clone().requires_grad_(differentiable)


def gradients(
    outputs: tuple[Tensor, ...], leaves: list[Tensor], slopes: dict[int, Tensor]
) -> list[Tensor]:
    """Return gradients of all leaves, zeros for those that the outputs do not depend on."""
    wanted = [value for value in leaves if value.requires_grad]
    roots = {place: outputs[place] for place in slopes if outputs[place].requires_grad}
    if not roots:
        return [torch.zeros_like(value) for value in leaves]
    seeds = [slopes[place] for place in roots]
    grads = iter(torch.autograd.grad([*roots.values()], wanted, seeds, allow_unused=True))
    result = []
    for value in leaves:
        slope_of = next(grads) if value.requires_grad else None
        result.append(torch.zeros_like(value) if slope_of is None else slope_of)
    return result
