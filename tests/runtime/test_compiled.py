"""Compiled programs compute what eager ones do, and compile equal regions once."""

from __future__ import annotations

import copy
import re
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
from autopar.runtime.execution import block_groups, compiled_regions
from autopar.runtime.execution.block_groups import Together
from autopar.runtime.execution.compiled_regions import RegionCompiler
from autopar.states import BUFFER_BYTES
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
    """Blocks with dropout, in attention, too."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        block = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(blocks))

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
    return len(module.backend.compiler.functions)


@pytest.mark.parametrize(("most", "expected"), [(1, [3, 3]), (2, [1, 3])])
def test_the_number_of_compiled_regions_does_not_grow_with_depth(monkeypatch, most, expected):
    """What comes before the blocks, a group of them, what comes after; of a shallow program one."""
    monkeypatch.setattr(block_groups, "MOST", most)
    cases = [models.shared("gpt", layers=layers) for layers in (2, 4)]
    assert [regions(made(case, {"backend": "eager"})) for case in cases] == expected


BYTES = 120_000  # a block of the GPT has 101,632


@pytest.mark.parametrize(
    ("travelling", "states", "expected"),
    [
        (10 * BYTES, "whole", [{0, 1, 2, 3}]),
        (2 * BYTES, "whole", [{0, 1}, {2, 3}]),
        (2 * BYTES, "zero1", [{0, 1}, {2, 3}]),
        (0, "whole", [{0}, {1}, {2}, {3}]),
        (10 * BYTES, "zero2", [{0}, {1}, {2}, {3}]),
        (10 * BYTES, "zero3", [{0}, {1}, {2}, {3}]),
    ],
)
def test_a_group_of_blocks_holds_what_travels_together(travelling, states, expected):
    """Nothing has to happen between its blocks, and its gradients are one bucket's."""
    case, mesh = models.shared("gpt", layers=4), Mesh(dp=2)
    options = {"mesh": mesh, "mode": "data", "states": states}
    program = ap.plan(case.model, case.args, case.kwargs, **options).program
    graph = localize(program.graph, mesh, 0, torch.device("cpu"), "-".join)
    places = Together(mesh, travelling).places(graph, repeated(program.captured))
    found = dict[Any, set[int]]()
    for node in graph.nodes:
        if node in places and (block := re.search(r"\d+", info(node).module)):
            found.setdefault(places[node], set()).add(int(block[0]))
    assert list(found.values()) == expected


@cache
def dropped() -> Case:
    torch.manual_seed(0)
    return Case("dropped", Dropped().double(), (torch.randn(4, 3, 8).double(),))


@cache
def dropped_in_groups() -> Case:
    case = models.gpt(layers=5, hidden=8, heads=2, dropout=0.1)
    return Case("dropped in groups", case.model, case.args, case.kwargs)


@pytest.mark.parametrize(
    ("case", "expected", "options"),
    [
        # Before and behind attention, of both blocks; the loss.
        (dropped, 3, {"microbatches": 2, "recompute": "full"}),
        # Before, between and behind the attention of two blocks; before the blocks, after them.
        (dropped_in_groups, 5, {"microbatches": 2}),
    ],
)
def test_compiled_steps_compute_and_draw_what_others_do(monkeypatch, case, expected, options):
    monkeypatch.setattr(block_groups, "MOST", 2)
    outcomes = []
    for compile in (False, TRACED):
        module = made(case().fresh(), compile, **options)
        torch.manual_seed(1)
        outcomes.append(parallel_outcome(module, case()))
    assert_equal(*outcomes)
    assert regions(module) == expected


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
    blocks, together = repeated(program.captured), Together(mesh, BUFFER_BYTES)
    several = 0
    for region in compiled_regions._cut_regions(graph, together.places(graph, blocks), ()):
        moving = [node for node in region if info(node).movement is not None]
        several += len(moving) > 1
        for one, other in pairwise(moving):
            assert one in ancestors([other])
    assert several
    RegionCompiler({"backend": "eager"}, torch.device("cpu"), blocks, together)(graph, ())
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
