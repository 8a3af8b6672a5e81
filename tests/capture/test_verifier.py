"""Every invariant of every stage is broken once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from autopar.capture import capture, verify
from autopar.errors import InvalidInput, VerifierError
from autopar.layout import Layout, Placement
from autopar.mesh import Mesh
from autopar.tensor_type import TensorType

aten = torch.ops.aten
MESH = Mesh(dp=2, tp=2)


def small() -> fx.Graph:
    """A graph with a type and wishes on every node."""
    graph = capture(nn.Linear(4, 4), (torch.randn(2, 4),)).graph
    for node in graph.nodes:
        inputs = [value.meta["val"].ndim for value in node.all_input_nodes]
        if node.op != "placeholder":
            node.meta["wants"] = tuple(Placement.whole(ndim) for ndim in inputs)
        if node.op != "output":
            value = node.meta["val"]
            layout = Layout.replicated(value.ndim)
            node.meta["type"] = TensorType(tuple(value.shape), value.dtype, layout)
    return graph


def at(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def in_place(graph: fx.Graph) -> None:
    at(graph, "add").target = aten.add_.Tensor


def user_function(graph: fx.Graph) -> None:
    at(graph, "add").target = small


def late_placeholder(graph: fx.Graph) -> None:
    with graph.inserting_before(at(graph, "add")):
        graph.placeholder("late")


def attribute(graph: fx.Graph) -> None:
    with graph.inserting_before(at(graph, "add")):
        graph.create_node("call_method", "neg", (at(graph, "linear"),))


def backwards(graph: fx.Graph) -> None:
    at(graph, "linear").prepend(at(graph, "add"))


def nested_output(graph: fx.Graph) -> None:
    graph.output_node().args = ((at(graph, "add"), 1),)


def no_source(graph: fx.Graph) -> None:
    del at(graph, "add").meta["source"]


def several(graph: fx.Graph) -> None:
    at(graph, "add").meta["val"] = (torch.zeros(1), torch.zeros(1))


def set_type(name: str, text: str | None) -> Callable[[fx.Graph], None]:
    def change(graph: fx.Graph) -> None:
        at(graph, name).meta["type"] = text and TensorType.parse(text)

    return change


def set_wants(*wants: Layout) -> Callable[[fx.Graph], None]:
    def change(graph: fx.Graph) -> None:
        at(graph, "add").meta["wants"] = tuple(Placement(layout) for layout in wants)

    return change


PAIR, LINE = Layout(None, None), Layout(None)


@pytest.mark.parametrize(
    ("stage", "damage", "rule"),
    [
        ("captured", backwards, "the graph passes fx's lint"),
        ("captured", attribute, "a node is a placeholder, a call or the output"),
        ("captured", late_placeholder, "placeholders come before all calls"),
        ("captured", user_function, "a call is of a torch operator or a kernel of autopar"),
        ("captured", in_place, "no operator changes its arguments"),
        ("captured", no_source, r"every node has meta\['source'\]"),
        ("captured", several, "several results are read one by one"),
        ("captured", nested_output, "the output is one flat tuple of nodes"),
        ("typed", set_type("add", None), "every value has a TensorType"),
        ("typed", set_type("add", "f32[2, 5]"), "a type has the shape and dtype of its value"),
        ("typed", set_type("add", "f64[2, 4]"), "a type has the shape and dtype of its value"),
        ("typed", set_type("add", "f32[2@pp, 4]"), "a layout uses axes of the mesh"),
        ("typed", set_wants(PAIR), "a node has one wish for each tensor input"),
        ("typed", set_wants(PAIR, PAIR), "a wish names every dim of the input"),
        ("moved", set_type("linear", "f32[2@dp, 4]"), "a consumer gets the layout it wants"),
        ("moved", set_wants(Layout("tp", None), LINE), "a consumer gets the layout it wants"),
    ],
)
def test_each_invariant(stage: str, damage: Callable[[fx.Graph], None], rule: str) -> None:
    graph = small()
    verify(graph, stage, MESH)
    damage(graph)
    with pytest.raises(VerifierError, match=rule):
        verify(graph, stage, MESH)


def test_stages_are_known() -> None:
    with pytest.raises(InvalidInput, match="'captured', 'typed', 'moved'"):
        verify(small(), "later")
