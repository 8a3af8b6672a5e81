"""Images cut in space: each rank gets the rows beside its own, and all is as on one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import autopar as ap
from autopar import Mesh
from autopar.collectives import joint_kernels
from autopar.collectives.joint_kernels import AllToAll, Steps
from autopar.cost.joint_kernels import price_joint_call
from autopar.errors import InvalidInput
from autopar.strategies import Strategy
from autopar.strategies.node_info import info
from autopar.strategies.rule import Facts
from tests.parity import assert_parity
from tests.space import in_space
from tests.strategies.rule_cases import operator, t
from tests.strategies.rule_law import Case, Reference

CASES = [
    ("classifier", Mesh(sp=2)),
    ("classifier", Mesh(sp=3)),
    ("classifier", Mesh(dp=2, sp=2)),
    ("transposed", Mesh(sp=4)),
    ("nearest", Mesh(sp=2)),
    ("bilinear", Mesh(sp=3)),
]


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=str)
def test_parity(name: str, mesh: Mesh) -> None:
    """Of strides, dilations and odd sizes."""
    module = assert_parity(in_space(name), mesh)
    records = module.plan.movements()
    halos = [record for record in records if record.forward.startswith("cut_")]
    assert len(halos) >= 6


@pytest.mark.parametrize("mode", ["auto", "propagate"])
def test_a_layer_is_annotated(mode: str) -> None:
    """Its input alone is cut, along one dim of space that leaves each rank some of the output."""
    images = torch.randn(2, 2, 8, 8, dtype=torch.float64)

    def found(dims: tuple, **options: int) -> Any:
        model = nn.Conv2d(2, 3, 3, padding=1, **options).double()
        ap.shard(model, (dims,))
        return ap.verify(model, (images,), mesh=Mesh(a=2, b=2), mode=mode)

    assert found((None, None, ("a", "b"), None)).ok
    for dims, options in (((None, None, "a", "b"), {}), ((1, 1, 4, 1), {"stride": 4})):
        with pytest.raises(InvalidInput, match="an operator has one joint"):
            found(dims, **options)


GEOMETRIES: list[tuple[str, tuple[Any, ...]]] = [
    ("conv1d.default", (t(1, 2, 11), t(2, 2, 3), None, [1], [1])),
    ("conv1d.default", (t(1, 2, 11), t(2, 2, 4), None, [3], [2])),
    ("conv1d.default", (t(1, 2, 12), t(2, 2, 3), None, [1], [0], [3])),
    ("conv1d.default", (t(1, 2, 13), t(2, 2, 1), None, [4])),
    ("conv_transpose1d.default", (t(1, 2, 7), t(2, 2, 3), None, [2], [1], [1])),
    ("conv_transpose1d.default", (t(1, 2, 7), t(2, 2, 2), None, [3])),
    ("max_pool1d.default", (t(1, 2, 12), [5], [1], [2])),
    ("avg_pool1d.default", (t(1, 2, 10), [2], [2])),
    ("upsample_linear1d.vec", (t(1, 2, 9), None, False, [3.0])),
    ("upsample_nearest1d.vec", (t(1, 2, 9), None, [2.0])),
]


@pytest.mark.parametrize(("name", "args"), GEOMETRIES, ids=lambda value: str(value)[:22])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_travels_is_what_is_predicted(name: str, args: tuple[Any, ...], count: int) -> None:
    """The most bytes that a rank sends to others or gets, wherever pieces lie."""
    mesh, reference = Mesh(sp=count), Reference(Case(name, operator(name), args))
    strategy = Strategy.of(space0="sp")
    assert strategy in reference.rule.strategies(mesh)
    sent: list[list[int]] = [[] for _ in range(count)]
    got: list[list[int]] = [[] for _ in range(count)]

    def noted(rank: int, steps: Steps) -> Steps:
        answer = None
        while True:
            try:
                asked = steps.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(asked, AllToAll):
                row, own = asked.tensors[0].element_size(), math.prod(asked.shapes[rank])
                sent[rank].append(sum(x.nbytes for x in asked.tensors) - asked.tensors[rank].nbytes)
                got[rank].append((sum(map(math.prod, asked.shapes)) - own) * row)
            answer = yield asked

    before = joint_kernels.in_lock_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            joint_kernels,
            "in_lock_step",
            lambda members: before([noted(*one) for one in enumerate(members)]),
        )
        reference.check(strategy, mesh)
    learns = tuple(value.is_floating_point() for value in reference.values)
    sizes = tuple(value.element_size() for value in reference.values)
    facts = Facts(reference.rule, sizes, learns, (torch.float64,), is_view=False)
    inside = price_joint_call(facts, strategy, mesh)
    assert inside is not None
    ways = inside.traffic.forward + inside.traffic.backward
    assert [size for _, size in ways] == [max(each) for each in zip(*sent, *got, strict=True)]


def test_windows_with_holes_reach_further() -> None:
    """The piece in the middle lacks two rows on each side, and has four for each of the others."""
    pool = nn.MaxPool2d((3, 1), 1, dilation=(3, 1))
    ap.shard(pool, ((None, None, "sp", None),))
    images = torch.randn(2, 2, 24, 4, requires_grad=True)
    plan = ap.plan(pool, (images,), mesh=Mesh(sp=3), mode="propagate")
    (node,) = (node for node in plan.rewritten.nodes if info(node).joint is not None)
    assert info(node).bytes == 8 * (2 * 2 * 4 * 4)


def test_what_is_resized_is_not_kept() -> None:
    """Its gradient has no need of it, and moves nothing but gradients."""
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Upsample(scale_factor=2, mode="bilinear"))
    images = torch.randn(2, 2, 8, 4)
    ap.shard(model[0], ((None, None, "sp", None),))
    module = ap.parallelize(model, (images,), mesh=Mesh(sp=2), mode="propagate", backend="virtual")
    kept = list[torch.Size]()

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = module(images)
    assert "cut_upsample_bilinear2d" in str(module.graph)
    assert kept.count(torch.Size((2, 2, 4, 4))) == 2  # what the convolution has read, on each rank
    y.sum().backward()


def test_complex_numbers_are_whole_in_space() -> None:
    """Of their convolution torch makes several."""
    model = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.complex128)
    images = torch.randn(2, 2, 6, 4, dtype=torch.complex128)
    ap.shard(model, ((None, None, "sp", None),))
    with pytest.raises(InvalidInput, match="needs 'x0' whole"):
        ap.plan(model, (images,), mesh=Mesh(sp=2))


def test_an_automatic_plan_cuts_large_images_in_space() -> None:
    """Of one sample, whose channels are few."""
    case = in_space("bilinear")
    cluster = ap.Cluster.preset("dgx-h100")
    images = case.args[0][:1].repeat(1, 1, 80, 112).to("meta")
    plan = ap.plan(case.model.to("meta"), (images,), mesh=Mesh(sp=8), cluster=cluster)
    halos = [r for r in plan.movements() if r.forward.startswith("cut_")]
    assert len(halos) >= 4
