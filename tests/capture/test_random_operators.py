"""What torch says to be random is drawn by place, or refused with what to do instead of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autopar.capture.normalisations.draws import by_place, instead
from autopar.capture.randomness import is_random
from autopar.strategies.node_info import info

VALUES = {"float": 0.5, "number": 0.5, "int": 2, "bool": True, "List[int]": [4, 3]}
NAMED = {"dropout": 0.5, "dropout_p": 0.5, "p": 0.5, "training": True, "train": True}


def seeded() -> list[torch._ops.OpOverload]:
    """All overloads of torch that draw random numbers, but those that write into what is given."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        library, _, name = schema.name.partition("::")
        if library != "aten" or any(argument.is_out for argument in schema.arguments):
            continue
        packet = getattr(torch.ops.aten, name, None)
        overload = getattr(packet, schema.overload_name or "default", None)
        if torch.Tag.nondeterministic_seeded in getattr(overload, "tags", ()):
            found.append(overload)
    return found


def called(overload: torch._ops.OpOverload) -> fx.Node:
    """A call of it on small tensors, with everything else as it is by default, or the like."""
    graph = fx.Graph()

    def value(argument: Any) -> Any:
        kind = str(argument.type)
        if argument.name in NAMED and kind != "Tensor":
            return NAMED[argument.name]
        if kind in ("Tensor", "List[Tensor]"):
            node = graph.placeholder(argument.name)
            info(node).val = torch.rand(4, 3)
            return node if kind == "Tensor" else [node]
        return argument.default_value if argument.has_default_value() else VALUES.get(kind)

    arguments = {argument.name: value(argument) for argument in overload._schema.arguments}
    node = graph.call_function(overload, (), arguments)
    info(node).val = torch.rand(4, 3)
    return node


def test_random_operators_are_drawn_by_place_or_have_a_remedy_of_their_own() -> None:
    overloads = seeded()
    assert len(overloads) > 80
    drawn = [overload for overload in overloads if by_place(called(overload)) is not None]
    assert {str(overload) for overload in drawn} >= {"aten.poisson.default", "aten.rand.generator"}
    unknown = torch.ops.aten.relu.default
    for overload in overloads:
        node = called(overload)
        assert is_random(node), overload
        if overload not in drawn:
            assert instead(node) != instead(called(unknown)), overload


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
def test_one_layer_has_no_dropout(name: str) -> None:
    overload = getattr(torch.ops.aten, name).input
    node = called(overload)
    node.kwargs = {**node.kwargs, "num_layers": 1}
    assert not is_random(node)
