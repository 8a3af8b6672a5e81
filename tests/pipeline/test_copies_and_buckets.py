"""Gathered copies and gradient buckets: a plan counts those that the runtime allocates."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.cost.bucket_prices import BucketConfig, program_buckets
from autopar.cost.copy_groups import copied_parameters, copy_groups
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.stage_ranks import StageRanks, TensorReaders
from autopar.runtime.parameters.gradient_buckets import BucketEntry, make_buckets
from autopar.runtime.parameters.local_parameters import LocalParameters
from autopar.runtime.parameters.parameter_movement import parameter_movements
from autopar.strategies.node_info import info
from tests import models
from tests.models import Case


class Mirrored(nn.Module):
    """Its ends share several parameters, and read them in opposite orders."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.middle = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.ends, *self.middle, *reversed(self.ends)):
            x = torch.tanh(layer(x))
        return x.square().mean()


def mirrored() -> Case:
    return Case("mirrored", Mirrored().double(), (torch.randn(8, 12).double(),))


CASES = {"gpt": partial(models.shared, "gpt", layers=4), "mirrored": mirrored}


def planned(case: Case, mesh: ap.Mesh, states: str, schedule: str) -> RuntimeProgram:
    return ap.plan(
        case.model,
        case.args,
        case.kwargs,
        mesh=mesh,
        mode="data",
        states=states,
        schedule=schedule,
        microbatches=4,
    ).program


def buckets_of(program: RuntimeProgram) -> list[tuple[tuple[int, ...], list[str]]]:
    """As the runtime fills them: the stages that read their parameters, and the names of these."""
    mesh, routes, readers = program.mesh, parameter_movements(program), TensorReaders(program)
    ranks, slots = StageRanks(program, 0), []
    leaves = LocalParameters(copy_groups(routes.values(), mesh, program.buffer_bytes), mesh=mesh)
    for name, route in routes.items():
        key = readers.sum_key(route)
        if (
            len(ranks.places_of(key.stages)) > 1
            or key.backward_axes
            or key.step_axes
            or key.all_reduce_axes
        ):
            size = math.prod(route.leaf.largest_shape(route.shape, mesh)) * route.dtype.itemsize
            leaf = torch.empty(0, dtype=route.dtype)
            slots.append((BucketEntry(name, leaf, leaf, size, reduce=route.reduce), key))
    cut = {k: leaves.cut_bytes(k.stages) for _, k in slots if k.backward_axes or k.step_axes}
    made = make_buckets(slots, cut, program.buffer_bytes)
    return [(bucket.key.stages, [entry.name for entry in bucket.entries]) for bucket in made]


@pytest.mark.parametrize(
    ("name", "mesh", "schedule", "states"),
    [
        ("gpt", ap.Mesh(pp=2, dp=2), "1f1b", "zero3"),
        ("gpt", ap.Mesh(pp=2, dp=2), "zb-v", "zero1"),
        ("mirrored", ap.Mesh(pp=2, dp=2), "1f1b", "zero1"),
        ("mirrored", ap.Mesh(pp=2, dp=2), "interleaved", "zero3"),
        ("mirrored", ap.Mesh(pp=2, dp=2), "chimera", "zero3"),
        ("mirrored", ap.Mesh(pp=2), "1f1b", "whole"),
        ("mirrored", ap.Mesh(pp=2), "zb-v", "whole"),
        ("mirrored", ap.Mesh(pp=2), "chimera", "whole"),
    ],
    ids=str,
)
def test_stages_bring_and_sum_together_what_the_runtime_does(
    name: str, mesh: ap.Mesh, schedule: str, states: str
) -> None:
    program = planned(CASES[name](), mesh, states, schedule)
    inner, buffer_bytes = program.mesh, program.buffer_bytes
    made = copy_groups(parameter_movements(program).values(), inner, buffer_bytes)
    assert states == "whole" or any(len(group.kind.stages) > 1 for group in made)
    buckets = buckets_of(program)
    for stage in program.stages:
        own = copy_groups(copied_parameters(stage.graph.nodes, inner).values(), inner, buffer_bytes)
        wanted = [group for group in made if stage.index in group.kind.stages]
        assert {(g.kind, g.names) for g in own} == {(g.kind, g.names) for g in wanted}
        sums = program_buckets(stage.graph, inner, BucketConfig(buffer_bytes))
        summed = [[info(g.parameter).origin[1] for g in one.gradients] for one in sums]
        assert summed == [names for stages, names in buckets if stage.index in stages]
