"""Bad words about pipelines are refused before anything runs: rule, what was given, remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.pipeline import load, save, schedule
from tests.pipeline.models import share_captures, shared  # noqa: F401
from tests.toy import machines

SIX = machines(6)


def make(**options):
    case = shared("gpt2", 8, 2)
    return ap.parallelize(case.model, case.args, case.kwargs, backend="virtual", **options)


def assert_explained(error, file=__file__):
    assert error.rule
    assert error.got
    assert error.remedy
    assert Path(file).name in error.source


@pytest.mark.parametrize("mode", ["propagate", "auto"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": ap.Mesh(pp=3), "schedule": "chimera"}, "even number of stages"),
        (
            {"mesh": ap.Mesh(pp=4), "schedule": {"name": "chimera", "pipes": 6}},
            "k divides half the number",
        ),
        (
            {"mesh": ap.Mesh(pp=4), "microbatches": 4, "schedule": "1f1b"},
            "as many stages as the model has layers",
        ),
        (
            {"mesh": ap.Mesh(pp=2), "microbatches": 3, "schedule": "1f1b"},
            "equal parts of the batch",
        ),
        ({"mesh": ap.Mesh(dp=2), "microbatches": 3}, "equal parts of the batch"),
        ({"mesh": ap.Mesh(dp=2), "schedule": "1f1b"}, "a schedule is for a pipeline"),
        ({"mesh": ap.Mesh(dp=2), "recompute": "all"}, "recompute is"),
        ({"mesh": ap.Mesh(dp=2), "recompute": {"layers.9": "full"}}, "names modules of the model"),
        ({"mesh": ap.Mesh(dp=2), "schedule_options": {"pipes": 2}}, "a schedule is for a pipeline"),
        ({"pipeline": 2, "schedule": "1f1b"}, "a schedule is for a pipeline"),
        ({"mesh": ap.Mesh(pp=2), "schedule": "fastest"}, "schedule is one of"),
        ({"mesh": ap.Mesh(pp=2), "schedule": "mine.csv"}, "remedy: .*load reads from a file"),
        ({"mesh": ap.Mesh(pp=2), "schedule": 3}, "given by its name"),
        ({"mesh": ap.Mesh(pp=2), "pipeline": "stages"}, "pipeline is the name of an axis"),
    ],
)
def test_bad_words(mode, options, message):
    with pytest.raises(ap.InvalidInput, match=message) as caught:
        make(mode=mode, **options)
    assert_explained(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": ap.Mesh(pp=4)}, "as many stages as the model has layers"),
        ({"mesh": ap.Mesh(pp=2), "microbatches": 3}, "equal parts of the batch"),
        ({"mesh": ap.Mesh(pp=2), "schedule_options": {"pipes": 2}}, "name of the schedule"),
        ({"pipeline": 3, "microbatches": 6, "cluster": SIX}, "micro-batches"),
        ({"pipeline": 4, "microbatches": 4, "cluster": SIX}, "share the devices"),
        ({"pipeline": 8, "cluster": SIX}, "share the devices"),
        ({"pipeline": "tp"}, "a name for its axis"),
        ({"pipeline": 0}, "a name for its axis"),
    ],
)
def test_bad_words_where_pipelines_are_weighed(options, message):
    with pytest.raises(ap.InvalidInput, match=message) as caught:
        make(mode="auto", **options)
    assert_explained(caught.value)


def test_a_number_of_stages_needs_a_mesh_where_nothing_is_weighed():
    with pytest.raises(ap.InvalidInput, match="on a given mesh") as caught:
        make(mode="propagate", pipeline=2)
    assert_explained(caught.value)


@pytest.mark.parametrize(("count", "message"), [(0, "no 1B1"), (2, "1B1 2 times")])
@pytest.mark.parametrize(("suffix", "between"), [("txt", " "), ("csv", ",")])
def test_a_file_with_a_missing_or_doubled_action(tmp_path, suffix, between, count, message):
    path = tmp_path / f"mine.{suffix}"
    save(schedule("1f1b", stages=2, microbatches=2), path)
    text, action = path.read_text(), f"{between}1B1"
    assert text.count(action) == 1
    path.write_text(text.replace(action, action * count))
    with pytest.raises(ap.InvalidInput, match="one F, and one B") as caught:
        make(mode="propagate", mesh=ap.Mesh(pp=2), schedule=load(path))
    assert message in caught.value.got
    assert_explained(caught.value, path)


@pytest.mark.parametrize("count", [0, 2])
def test_a_schedule_object_with_a_missing_or_doubled_action(count):
    made = schedule("1f1b", stages=2, microbatches=2)
    spoiled = (*made.orders[0][:-1], *made.orders[0][-1:] * count)
    with pytest.raises(ap.InvalidInput, match="one F, and one B") as caught:
        make(
            mode="propagate",
            mesh=ap.Mesh(pp=2),
            schedule=replace(made, orders=(spoiled, made.orders[1])),
        )
    assert ("0B1 2 times" if count else "no 0B1") in caught.value.got
    assert_explained(caught.value)


def test_a_schedule_for_another_mesh():
    made = schedule("1f1b", stages=4, microbatches=2)
    with pytest.raises(ap.InvalidInput, match="fits the mesh and the micro-batches") as caught:
        make(mode="propagate", mesh=ap.Mesh(pp=2), schedule=made)
    assert_explained(caught.value)


def test_a_boundary_pinned_inside_a_residual():
    case = shared("residuals", 8, 2)
    model = case.fresh().model
    ap.shard(model.get_submodule("blocks.1.convolutions.1"), stage=1)
    with pytest.raises(ap.InvalidInput, match="inside a residual") as caught:
        ap.parallelize(
            model,
            case.args,
            mode="propagate",
            mesh=ap.Mesh(pp=2),
            microbatches=2,
            backend="virtual",
        )
    assert_explained(caught.value)


def test_a_pipeline_differentiates_steps_only():
    module = make(mode="propagate", mesh=ap.Mesh(pp=2), microbatches=2)
    case = shared("gpt2", 8, 2)
    with pytest.raises(ap.InvalidInput, match="a call of a pipeline has no gradients"):
        module(*case.args, **case.kwargs)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.ones(4, 1)), nn.Parameter(torch.ones(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.rows + self.columns).square().mean()


def test_a_model_that_reads_no_input_has_no_stages() -> None:
    with pytest.raises(ap.InvalidInput, match="what forward computes from its inputs") as caught:
        ap.parallelize(Table(), (torch.ones(4),), mesh=ap.Mesh(pp=2), backend="virtual")
    assert_explained(caught.value)
