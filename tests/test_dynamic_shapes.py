"""dynamic_shapes: one plan serves a range of sizes, and what is outside is refused by name."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import autopar as ap
from tests import models
from tests.dynamic import BATCH, counted, sampled, samples, serves_every_size, start
from tests.outputs import assert_close, gradients, random
from tests.pipeline.models import share_captures  # noqa: F401

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto, zero2": ("gpt", {"mode": "auto", "states": "zero2"}),
    "1f1b": ("gpt", {"mode": "propagate", "mesh": ap.Mesh(pp=2, dp=2), "microbatches": 4}),
    "auto": ("mlp", {"mode": "auto"}),
    "data, zero3": ("mlp", {"mode": "data", "mesh": ap.Mesh(dp=3), "states": "zero3"}),
    "micro-batches": ("mlp", {"mode": "propagate", "mesh": ap.Mesh(dp=2), "microbatches": 2}),
    "compiled": ("mlp", {"mesh": ap.Mesh(one=1), "compile": {"backend": "aot_eager"}}),
    "chimera": ("mlp", {"mesh": ap.Mesh(pp=2), "schedule": "chimera", "microbatches": 4}),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_plan_is_the_model_at_every_size(way: str) -> None:
    name, options = WAYS[way]
    serves_every_size(name, sampled(name), **options)


class Pair(nn.Module):
    """Inputs in containers, of which one has twice as many samples; other operators for few."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, batch: dict[str, Any], *rest: Tensor, scale: float = 1.0) -> Tensor:
        x, (y, z) = batch["x"], batch["both"]
        x = self.drop(torch.tanh(self.up(x)))
        if x.shape[0] > 3:
            x = x + x.mean(1, keepdim=True)
        x = torch.cat([x, x]) + y + z.sum() * scale
        return (self.last(x).square() * (rest[0] if rest else 1)).mean()


def pair(batch: int, length: int) -> dict[str, Any]:
    y = random(2 * batch, length, 8, seed=2)
    return {"x": random(batch, length, 6), "both": (y, random(length + 1, seed=3))}


def rows_of(module: ap.ParallelModule) -> list[str]:
    """The table of a module's programs: its heading, and what it says of each of them."""
    return [" ".join(row.split()) for row in re.split(r"\n(?=  \d)", str(module.programs))]


def test_containers_derived_dims_hints_and_modes() -> None:
    model = Pair().double()
    said = {"batch": {"x": (BATCH, Dim.DYNAMIC(min=2, max=8), Dim.STATIC)}}
    said["batch"]["both"] = ({0: 2 * BATCH, 1: Dim.AUTO}, [Dim.AUTO])
    options: dict[str, Any] = {"mesh": ap.Mesh(dp=2), "dynamic_shapes": said, "backend": "virtual"}
    module = ap.parallelize(copy.deepcopy(model), (pair(4, 5),), **options)
    for one in (model.eval(), module.eval()):
        one.zero_grad()
    for count, (batch, length) in enumerate(((9, 2), (2, 8), (1, 3), (4, 5)), 1):
        given = pair(batch, length)
        for one in (model, module):
            one(given, scale=0.5).backward()
        assert_close(module.full_grads(), gradients(model))
        assert len(module.programs) == 2
        assert f"({count} so far)" in rows_of(module)[2]
    module.train()
    for size in ((9, 2), (4, 5)):
        module.step(pair(*size))
    rows = rows_of(module)
    assert len(rows) == 3
    assert "batch 1 to 9, dim 1 of batch['x'] 2 to 8, dim 1 of batch['both'][0] from 1" in rows[1]
    assert "(2 so far)" in rows[1]
    for wrong, words in (
        (
            pair(10, 5),
            r"a size of 10 in dim 0 of batch\['x'\], which is batch, where batch is 1 to 9",
        ),
        (
            pair(4, 9),
            r"a size of 9 in dim 1 of batch\['x'\], where dim 1 of batch\['x'\] is 2 to 8",
        ),
        (
            {**pair(4, 5), "both": pair(3, 5)["both"]},
            r"batch is 4 by dim 0 of .*, and 3 by dim 0 of",
        ),
        ({**pair(4, 5), "x": random(4, 5, 7)}, "model runs on the inputs of this call"),
    ):
        with pytest.raises(ap.InvalidInput, match=r"range|one name|this call") as error:
            module.step(wrong)
        assert re.search(words, str(error.value))
        assert "test_dynamic_shapes.py" in str(error.value.source) or "this call" in words
    odd = pair(4, 5)
    odd["both"] = (random(7, 5, 8), odd["both"][1])
    with pytest.raises(ap.InvalidInput, match="range") as error:
        module.step(odd)
    assert "a size of 7 in dim 0 of batch['both'][0], which is 2*batch" in str(error.value)


class Sometimes(nn.Module):
    """Modes make a difference at some sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.drop = nn.Linear(3, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.last(x))
        return (self.drop(x) if x.shape[0] > 4 else x).square().mean()


def test_modes_of_one_size_are_not_those_of_another() -> None:
    model = Sometimes().double()
    options: dict[str, Any] = {"mesh": ap.Mesh(dp=2), "dynamic_shapes": ({0: BATCH},)}
    module = ap.parallelize(copy.deepcopy(model), (random(8, 3),), mode="data", **options)
    module.step(random(3, 3))
    for batch in (3, 2, 8, 3, 8, 5):
        x = random(batch, 3)
        assert_close(module.eval()(x), model.eval()(x))
    module.train()
    assert len({float(module.step(random(8, 3))) for _ in range(4)}) > 1
    assert len({float(module.step(random(2, 3))) for _ in range(4)}) == 1


REFUSED: list[tuple[Any, str]] = [
    ({"batch"}, "a mapping by names of inputs, or a tuple"),
    ({"x": {0: BATCH}}, "'x'; the example call has batch"),
    ((None, None), "2 entries for the inputs batch"),
    ({"batch": {"z": None}}, "'z' in batch, which has ['x', 'both']"),
    ({"batch": [None]}, "for batch, of type dict"),
    ({"batch": {"both": [None]}}, "1 entries for batch['both'], which has 2"),
    ({"batch": {"x": {3: BATCH}}}, "for batch['x'], a tensor of 3 dims"),
    ({"batch": {"x": (BATCH,)}}, "for batch['x'], a tensor of 3 dims"),
    ({"batch": {"x": {0: 5}}}, "5 for dim 0 of batch['x'], which has a size of 4"),
    ({"batch": {"x": {0: "batch"}}}, "'batch' for dim 0 of batch['x']"),
    ({"batch": {"x": {0: Dim("b", max=3)}}}, "a size of 4 in dim 0 of"),
    ({"batch": {"x": {0: BATCH}, "both": ({0: BATCH}, None)}}, "batch is 4 by dim 0 of"),
    ({"batch": {"x": {0: BATCH, 1: Dim("batch", max=5)}}}, "batch is 1 to 9, and 1 to 5 in dim 1"),
]


@pytest.mark.parametrize(("said", "words"), REFUSED)
def test_what_is_no_declaration_of_the_inputs_is_refused(said: Any, words: str) -> None:
    with pytest.raises(ap.InvalidInput) as error:
        ap.plan(Pair().double(), (pair(4, 5),), mesh=ap.Mesh(dp=2), dynamic_shapes=said)
    assert words in str(error.value)
    assert "test_dynamic_shapes.py" in str(error.value.source)


def test_an_input_that_nothing_is_said_of_is_refused() -> None:
    case = models.shared("mlp")
    with pytest.raises(ap.InvalidInput, match=r"nothing of (\w+)\n.*'\1': None"):
        ap.plan(case.model, case.args, mesh=ap.Mesh(dp=2), dynamic_shapes={"x": {0: BATCH}})


def test_a_file_keeps_the_range_and_any_size_of_it_takes_it_up(tmp_path: Path) -> None:
    model, module = start("mlp", mode="auto")
    module.plan.save(tmp_path / "plan.json")
    saved = ap.Plan.load(tmp_path / "plan.json")
    assert saved.dynamic == module.plan.dynamic
    for text in (str(saved), str(module.plan)):
        assert "inputs     any size: batch 1 to 9, length 2 to 8" in text
    x, y = samples(3, 5)
    other = ap.parallelize(copy.deepcopy(model), (x, y), plan=saved)
    assert other.plan.fingerprint == module.plan.fingerprint
    with counted() as count:
        assert_close(other.step(x, y), model(x, y).detach())
    assert not count["searches"]
    assert saved.attach(model, (x, y)).decisions == module.plan.decisions
    assert module.plan.attach(model, (x, y)) == module.plan
    assert ap.verify(model, (x, y), plan=saved).ok
    with pytest.raises(ap.InvalidInput, match="inputs have sizes in the range"):
        saved.attach(model, samples(10, 5))
    with pytest.raises(ap.InvalidInput, match="inputs of one shape"):
        saved.attach(model, (x, random(3, 5, 1)))
    with pytest.raises(ap.InvalidInput, match="a finished plan leaves nothing to decide"):
        ap.parallelize(model, (x, y), plan=saved, dynamic_shapes=(None, None))


class Annotated(nn.Module):
    """Axes by name and numbers of slices, on dims that vary; another program in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        ap.shard(self.up, ((2, 2, 1),))
        self.mix = ap.shard(torch.matmul, ((2, 1, 2), (2, 2, 1)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.up(ap.shard(x, (("dp", "tp"), None, None))))
        h = self.mix(self.mix(h, h.mT).tanh(), ap.shard(h, ("tp", "dp", None)))
        return (self.down(h if self.training else h.tanh()) - y).square().mean()


@pytest.mark.parametrize("mode", ["auto", "propagate"])
def test_annotations_give_way_where_a_dim_has_too_few_elements(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, said = Annotated().double(), {0: BATCH, 1: Dim("length", max=9)}
    options: dict[str, Any] = {"mesh": ap.Mesh(dp=2, tp=2), "dynamic_shapes": (said, said)}
    plan = ap.plan(model, samples(8, 8), mode=mode, **options)
    plan.save(tmp_path / "plan.json")
    module = ap.parallelize(
        copy.deepcopy(model), samples(1, 1), plan=ap.Plan.load(tmp_path / "plan.json")
    )
    for size in ((1, 1), (3, 5)):
        given = samples(*size)
        for one in (model.train(), module.train()):
            one.zero_grad()
        loss = model(*given)
        loss.backward()
        assert_close(module.step(*given), loss.detach())
        assert_close(module.full_grads(), gradients(model))
        assert_close(module.eval()(*given), model.eval()(*given))
    assert len(module.programs) == 2
    module.step(*samples(9, 5))  # is cut again, though this program was made for one element
    last, annotated = list(module.programs._known.values())[-1], module.plan.decisions.fixed
    assert [*last.plan.decisions.fixed.values()] == [*annotated.values()]


def test_sizes_that_are_not_declared_make_other_programs() -> None:
    model, module = start("mlp", dynamic_shapes=({0: BATCH}, {0: BATCH}), mode="data")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch, length in ((8, 8), *((batch, 5) for batch in range(1, 10))):
            given = samples(batch, length)
            assert_close(module(*given), model(*given))
    assert len(module.programs) == 2
    assert module.programs[1].plan.dynamic == module.plan.dynamic
    words = "3 programs were made of this module, and 2 more of other sizes"  # which serve the rest
    with (
        patch("autopar.runtime.module.programs.WARN_ABOVE", 2),
        pytest.warns(UserWarning, match=words),
    ):
        module(*samples(4, 6))
