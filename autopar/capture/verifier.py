"""Verifier: the invariants of a graph, each a small function; run after capture and every pass.

>>> verify(graph, "captured")        # VerifierError names the broken invariant and the node

Each stage has its own invariants besides those of the stages it contains: "captured" (global
values), "typed" (layouts are assigned), "moved" (every consumer gets the layouts it wants). What
one rank runs is "local": any functions in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.errors import InvalidInput, VerifierError
from autopar.mesh import Mesh
from autopar.strategies.node_info import flat_values, info
from autopar.strategies.results import has_results, is_result, tensor_arguments
from autopar.tensor_type import TensorType
from autopar.text.units import counted

Invariant = Callable[[fx.Graph, Mesh | None], None]


def verify(graph: fx.Graph, stage: str, mesh: Mesh | None = None) -> None:
    """Check every invariant of `stage`; with `mesh`, layouts must fit it."""
    if stage not in STAGES:
        raise InvalidInput(
            "a graph is verified at a stage that has invariants",
            got=repr(stage),
            remedy=f"use one of {', '.join(map(repr, STAGES))}",
        )
    for invariant in STAGES[stage]:
        invariant(graph, mesh)


def is_well_formed(graph: fx.Graph, mesh: Mesh | None) -> None:
    """fx's own rules hold: arguments come before their users, names are unique."""
    try:
        graph.lint()
    except Exception as error:
        raise VerifierError("the graph passes fx's lint", got=str(error)) from error


def is_flat(graph: fx.Graph, mesh: Mesh | None) -> None:
    """Placeholders, calls and one output at the end: nothing else."""
    nodes = list(graph.nodes)
    if not nodes or nodes[-1].op != "output":
        raise VerifierError("the last node is the output", got=nodes[-1] if nodes else "no nodes")
    for node in nodes[:-1]:
        if node.op not in ("placeholder", "call_function"):
            _fail("a node is a placeholder, a call or the output", node, node.op)


def has_placeholders_first(graph: fx.Graph, mesh: Mesh | None) -> None:
    """Placeholders precede all calls."""
    for node in graph.find_nodes(op="placeholder"):
        if node.prev.op == "call_function":
            _fail("placeholders come before all calls", node, "a call stands before it")


def has_known_targets(graph: fx.Graph, mesh: Mesh | None) -> None:
    """A call is of an operator overload, or of a function of autopar's own kernels."""
    for node in _calls(graph):
        if isinstance(node.target, torch._ops.OpOverload):
            continue
        if not getattr(node.target, "__module__", "").startswith("autopar."):
            _fail("a call is of a torch operator or a kernel of autopar", node, str(node.target))


def has_pure_calls(graph: fx.Graph, mesh: Mesh | None) -> None:
    """No operator writes to its arguments."""
    for node in _calls(graph):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            _fail("no operator changes its arguments", node, str(node.target))


def has_annotations(graph: fx.Graph, mesh: Mesh | None) -> None:
    """Every node but the output says its value, origin and whether it has a gradient."""
    for node in graph.nodes:
        for key in ("val", "source", "module", "differentiable"):
            if key not in node.meta:
                _fail(f"every node has meta[{key!r}]", node, f"only {sorted(node.meta)}")


def has_single_tensors(graph: fx.Graph, mesh: Mesh | None) -> None:
    """The value of a node is one tensor, or a tuple that only its results read."""
    for node in graph.nodes:
        value = info(node).val
        if node.op == "output" or isinstance(value, torch.Tensor):
            continue
        if not has_results(node) or value != flat_values(value):
            _fail("the value of a node is one tensor, or a flat tuple", node, type(value).__name__)
        for user in node.users:
            if not is_result(user):
                _fail("several results are read one by one", user, f"all of {node.name}")


def has_flat_output(graph: fx.Graph, mesh: Mesh | None) -> None:
    """The output is one flat tuple of nodes."""
    output = graph.output_node()
    results = output.args[0]
    if not isinstance(results, tuple) or not all(isinstance(r, fx.Node) for r in results):
        _fail("the output is one flat tuple of nodes", output, str(results))


def has_types(graph: fx.Graph, mesh: Mesh | None) -> None:
    """Every value has a type with the shape and dtype of its global value."""
    for node in graph.nodes:
        if node.op == "output":
            continue
        types, values = flat_values(node.meta.get("type")), info(node).values
        if len(types) != len(values):
            _fail("every result has a type", node, f"{len(types)} for {len(values)}")
        for type_, value in zip(types, values):
            _check_type(node, type_, value)


def _check_type(node: fx.Node, type_: Any, value: object) -> None:
    if isinstance(value, torch.Tensor):
        if not isinstance(type_, TensorType):
            _fail("every value has a TensorType", node, repr(type_))
        if (type_.shape, type_.dtype) != (tuple(value.shape), value.dtype):
            got = f"{type_}, the value has {value.dtype} {tuple(value.shape)}"
            _fail("a type has the shape and dtype of its value", node, got)


def has_fitting_layouts(graph: fx.Graph, mesh: Mesh | None) -> None:
    """Layouts use the axes of the mesh, and one entry for each dim."""
    for node in graph.nodes:
        if node.op == "output":
            continue
        for type_ in info(node).types:
            if type_.layout.ndim != len(type_.shape):
                _fail("a layout names every dim of its tensor", node, str(type_.layout))
            for axis in type_.layout.axes:
                if mesh is not None and axis not in mesh:
                    _fail("a layout uses axes of the mesh", node, f"{type_} on {mesh}")


def has_wants(graph: fx.Graph, mesh: Mesh | None) -> None:
    """Every call, and the output, says what it wants of each tensor input."""
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        wants = node.meta.get("wants")
        count = len(_inputs(node))
        if wants is None or len(wants) != count:
            got = f"{'none' if wants is None else len(wants)} for {counted(count, 'input')}"
            _fail("a node has one wish for each tensor input", node, got)
        for source, want in zip(_inputs(node), wants):
            if want.layout.ndim != info(source).val.ndim:
                _fail("a wish names every dim of the input", node, f"{want} for {source}")


def has_kept_wishes(graph: fx.Graph, mesh: Mesh | None) -> None:
    """What a consumer wants is the layout that its producer gives."""
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        for source, want in zip(_inputs(node), info(node).wants):
            if info(source).type.layout != want.layout:
                got = f"{source} is {info(source).type}, wanted {want}"
                _fail("a consumer gets the layout it wants", node, got)


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _inputs(node: fx.Node) -> list[fx.Node]:
    """The tensor inputs of a call in the order of its arguments, repetitions kept."""
    return [] if is_result(node) else tensor_arguments(node)


def _fail(invariant: str, node: fx.Node, got: str) -> None:
    raise VerifierError(invariant, got=f"{node.name}: {got}", source=info(node).source or None)


CAPTURED: tuple[Invariant, ...] = (
    is_well_formed,
    is_flat,
    has_placeholders_first,
    has_known_targets,
    has_pure_calls,
    has_annotations,
    has_single_tensors,
    has_flat_output,
)
TYPED: tuple[Invariant, ...] = (*CAPTURED, has_types, has_fitting_layouts, has_wants)
MOVED: tuple[Invariant, ...] = (*TYPED, has_kept_wishes)
STAGES: dict[str, tuple[Invariant, ...]] = {
    "captured": CAPTURED,
    "typed": TYPED,
    "moved": MOVED,
    "local": (is_well_formed, is_flat, has_placeholders_first, has_flat_output),
}
