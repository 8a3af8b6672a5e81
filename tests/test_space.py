"""Images cut in space: each rank gets the rows beside its own, and all is as on one device."""

from __future__ import annotations

import pytest

import autopar as ap
from autopar import Mesh
from tests.parity import assert_parity
from tests.space import in_space

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


def test_an_automatic_plan_cuts_large_images_in_space() -> None:
    """Of one sample, whose channels are few."""
    case = in_space("bilinear")
    cluster = ap.Cluster.preset("dgx-h100")
    images = case.args[0][:1].repeat(1, 1, 80, 112).to("meta")
    plan = ap.plan(case.model.to("meta"), (images,), mesh=Mesh(sp=8), cluster=cluster)
    halos = [r for r in plan.movements() if r.forward.startswith("cut_")]
    assert len(halos) >= 4
