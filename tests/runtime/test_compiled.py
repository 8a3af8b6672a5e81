"""What is compiled computes what is not; regions that are equal are compiled once."""

from __future__ import annotations

import copy
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import autopar as ap
from autopar import InvalidInput, Mesh, admission
from autopar.capture.regions import repeated
from autopar.passes import localize
from autopar.passes.flow import ancestors
from autopar.runtime import compiled
from autopar.runtime.compiled import Compiler
from autopar.strategies.node_info import info
from tests import models, signatures
from tests.annotations import megatron, sequence
from tests.models import Case
from tests.parity import assert_equal, assert_parity, parallel_outcome, single_outcome
from tests.partly_learned import partly_learned, without_gradient
from tests.pipeline.models import share_captures  # noqa: F401

TRACED = {"backend": "aot_eager", "fullgraph": True}  # as torch's compiler, without machine code
ONE = Mesh(one=1)


class Dropped(nn.Module):
    """Two blocks with dropout, in attention, too."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        block = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def made(case: Case, compile: Any = True, **options: Any) -> ap.ParallelModule:
    """On a mesh of one rank."""
    options = {"mesh": ONE, "mode": "propagate", "backend": "virtual", **options}
    return ap.parallelize(case.model, case.args, case.kwargs, compile=compile, **options)


def regions(module: ap.ParallelModule) -> int:
    assert module.backend.compiler is not None
    return len(module.backend.compiler.made)


def test_the_number_of_compiled_regions_does_not_grow_with_depth():
    # What comes before the blocks, a block, and what comes after them.
    cases = [models.shared("gpt", layers=layers) for layers in (2, 4)]
    assert [regions(made(case, {"backend": "eager"})) for case in cases] == [3, 3]


@cache
def dropped() -> Case:
    torch.manual_seed(0)
    return Case("dropped", Dropped().double(), (torch.randn(4, 3, 8).double(),))


def test_compiled_steps_compute_and_draw_what_others_do():
    outcomes = []
    for compile in (False, TRACED):
        module = made(dropped().fresh(), compile, microbatches=2, recompute="full")
        torch.manual_seed(1)
        outcomes.append(parallel_outcome(module, dropped()))
    assert_equal(*outcomes)
    assert regions(module) == 3  # before and behind attention, of both blocks; the loss


def test_it_is_called_and_differentiated():
    case = models.shared("mlp", layers=2)
    module = made(case, TRACED)
    expected, found = case.run(), module(*case.args)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found, [module.get_parameter(FIRST)])
    (wanted,) = torch.autograd.grad(expected, [case.model.get_parameter(FIRST)])
    torch.testing.assert_close(gradient, wanted)
    with torch.no_grad():
        torch.testing.assert_close(module(*case.args), expected)


FIRST = next(name for name, _ in models.shared("mlp", layers=2).model.named_parameters())


def test_movements_of_a_region_come_in_one_order():
    """A compiler that reorders calls, each rank its own, leaves them in this one."""
    case = sequence(megatron(models.gpt(layers=2)), "tp", batch="dp")
    mesh = Mesh(dp=2, tp=2)
    program = ap.plan(case.model, case.args, case.kwargs, mesh=mesh, mode="propagate").program
    graph = localize(program.graph, mesh, 1, torch.device("cpu"), "-".join)
    several = 0
    for region in compiled._regions(graph, repeated(program.captured), ()):
        moving = [node for node in region if info(node).movement is not None]
        several += len(moving) > 1
        for one, other in pairwise(moving):
            assert one in ancestors([other])
    assert several
    Compiler({"backend": "eager"}, torch.device("cpu"), repeated(program.captured))(graph, ())
    graph.lint()
    assert not [node for node in graph.nodes if info(node).movement is not None and node.users]


def refused(rule: str, **options: Any) -> str:
    case = models.shared("mlp", layers=2)
    with pytest.raises(InvalidInput, match=rule) as error:
        made(case, **options)
    return str(error.value)


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    refused("True, False or options", compile="yes")
    assert "model" in refused("takes these options", compile={"model": 3})
    assert "fast" in refused("takes the options", compile={"mode": "fast"})
    assert "Mesh(dp=2)" in refused("the program of one rank", compile=TRACED, mesh=Mesh(dp=2))
    monkeypatch.setattr(admission, "missing_cpp_compiler", lambda: "none found")
    assert "CXX" in refused("takes a C\\+\\+ compiler")
    assert regions(made(models.shared("mlp", layers=2), TRACED)) == 1  # which needs none


def test_torch_compile_of_a_parallel_module_says_what_to_do():
    module = made(models.shared("mlp", layers=2), compile=False)
    for attempt in (torch.compile, lambda module: module.compile()):
        with pytest.raises(InvalidInput, match="compiled where it is made") as error:
            attempt(module)
        assert "compile=True" in str(error.value)


def test_a_function_that_calls_a_parallel_module_can_be_compiled():
    case = models.shared("mlp", layers=2)
    module = made(case, compile=False)
    twice = torch.compile(lambda *inputs: 2 * module(*inputs), backend="eager")
    torch.testing.assert_close(twice(*case.args), 2 * case.run())


def test_parity_on_one_rank():
    assert_parity(models.shared("gpt", layers=1), ONE, compile=TRACED)


def test_no_gradient_stays_none():
    """What a result reaches is not what others of its region reach."""
    case = partly_learned()
    module = made(case, TRACED)
    for output in (0, 1):
        module.zero_grad()
        module(*case.args)[output].sum().backward()
        missing = without_gradient(case, output)
        assert set(module.full_grads()) == {n for n, _ in case.model.named_parameters()} - missing
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))


def test_other_programs_on_the_same_parameters():
    """Of another batch and another mode, with dropout; and when parameters are frozen."""
    options = {"mesh": Mesh(tp=1), "backend": "virtual", "compile": TRACED}
    signatures.trains_and_evaluates_in_turn(((8, 6), (5, 6)), **options)
    signatures.unfreezes(**options)
