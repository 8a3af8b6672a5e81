"""The parity law on the virtual mesh: every model, mesh and way to annotate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest

from autopar import Mesh
from tests import models
from tests.annotations import hidden, megatron, sequence, stored, vocabulary
from tests.models import Case
from tests.parity import assert_parity
from tests.pipeline.models import share_captures  # noqa: F401

Make = Callable[..., Case]

TRANSFORMERS = ["gpt", "gpt-fused", "gpt2", "llama", "bert", "vit"]
FUSED: dict[str, Make] = {"gpt-fused": partial(models.gpt, fused=True)}
# One layer: deeper ones are in stages (tests/pipeline/test_parity_law.py) and on 64 ranks.
ZOO: dict[str, Make] = {
    name: partial(make, layers=1) if name in TRANSFORMERS else make
    for name, make in (models.ZOO | FUSED).items()
}
DP4, TP4, DP2_TP2 = Mesh(dp=4), Mesh(tp=4), Mesh(dp=2, tp=2)
THREE_AXES = Mesh(dp=2, sp=2, tp=2)


@pytest.mark.parametrize("name", ZOO)
def test_without_annotations_the_batch_is_cut(name: str) -> None:
    module = assert_parity(ZOO[name](), DP4)
    assert not [r for r in module.plan.movements() if r.forward in ("all_gather", "all_to_all")]


@cache
def cut(name: str) -> Case:
    return vocabulary(megatron(ZOO[name]()))


@pytest.mark.parametrize("mesh", [TP4, DP2_TP2], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_layers_cut_by_columns_and_rows_and_the_vocabulary_cut(name: str, mesh: Mesh) -> None:
    assert_parity(cut(name), mesh)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [*((name, THREE_AXES) for name in TRANSFORMERS), ("gpt-fused", TP4), ("llama", TP4)],
    ids=str,
)
def test_the_sequence_cut_between_cut_layers(name: str, mesh: Mesh) -> None:
    axis = "sp" if "sp" in mesh else "tp"
    assert_parity(sequence(megatron(ZOO[name]()), axis), mesh)


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_three_axes(name: str) -> None:
    assert_parity(ZOO[name](), THREE_AXES)
    assert_parity(megatron(ZOO[name](), ("sp", "tp")), THREE_AXES)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert"])
def test_the_sequence_cut_alone(name: str) -> None:
    assert_parity(sequence(ZOO[name](layers=1)), DP2_TP2)


@pytest.mark.parametrize("name", ["gpt", "llama", "vit"])
def test_the_hidden_dim_cut(name: str) -> None:
    assert_parity(hidden(ZOO[name](layers=1)), DP2_TP2)


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt", "llama"])
def test_parameters_stored_cut_and_gathered_at_use(name: str) -> None:
    module = assert_parity(stored(ZOO[name]()), DP4)
    gathers = [r for r in module.plan.movements() if r.forward == "all_gather"]
    assert {record.backward for record in gathers} == {"reduce_scatter"}


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")], ids="".join)
def test_several_axes_on_one_dim(axes: tuple[str, ...]) -> None:
    assert_parity(vocabulary(megatron(models.gpt(layers=1), axes), axes), Mesh(a=2, b=2))
    assert_parity(stored(models.mlp(), axes), Mesh(a=2, b=2))


UNEVEN = {
    "batch 6 on 4": (partial(models.gpt, batch=6, layers=1), DP4),
    "batch 6 on 4, with batch norm": (partial(models.resnet, batch=6), DP4),
    "batch 5 on 2": (partial(models.vit, batch=5, layers=1), DP2_TP2),
    "6 heads on 4": (partial(models.gpt, heads=6, hidden=48, layers=1), TP4),
    "6 heads in groups of 2 on 4": (
        partial(models.llama, heads=6, key_heads=3, hidden=48, layers=1),
        TP4,
    ),
    "hidden 30 on 4": (partial(models.mlp, hidden=30), TP4),
    "hidden 128 on 3": (partial(models.gpt, layers=1), Mesh(tp=3)),
    "channels 6 and 12 on 4": (partial(models.resnet, width=6), TP4),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_sizes_that_do_not_divide(name: str) -> None:
    make, mesh = UNEVEN[name]
    assert_parity(vocabulary(megatron(make())) if "tp" in mesh else make(), mesh)


def test_the_sequence_cut_unevenly() -> None:
    assert_parity(sequence(megatron(models.gpt(sequence=7, layers=1))), Mesh(tp=3))


def test_64_ranks_in_one_process() -> None:
    sizes = {"batch": 16, "sequence": 8, "heads": 4, "layers": 2}
    case = sequence(vocabulary(megatron(models.gpt(**sizes))), "sp")
    assert_parity(case, Mesh(dp=4, sp=4, tp=4))
