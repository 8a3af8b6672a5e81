"""The law of saving: a run that is saved and taken up elsewhere is the run that went on; a
checkpoint is whole or not there; what is none, or another model's, is refused.

Processes are in `tests/distributed/saving.py`.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import autopar as ap
from autopar import Mesh
from autopar.plans.plan import SavedPlan
from autopar.runtime.checkpoints import checkpoint_folders
from autopar.runtime.checkpoints.checkpoint_writing import Job
from tests import models
from tests.captures import shared_captures
from tests.models import Case
from tests.mutations import sealed
from tests.runtime.resuming import Run, assert_alike

ONE: dict[str, Any] = {"mesh": Mesh(one=1), "mode": "data"}
WAYS: dict[str, dict[str, Any]] = {
    "one": ONE,
    "zero3": {"mesh": Mesh(dp=4), "mode": "data", "states": "zero3"},
    "tp": {"mesh": Mesh(dp=2, tp=2), "mode": "auto"},
    "1f1b": {"mesh": Mesh(pp=2, dp=2), "mode": "data", "schedule": "1f1b", "microbatches": 2},
}


@pytest.fixture(autouse=True)
def capture_once() -> Iterator[None]:
    with shared_captures():
        yield


def dropping() -> Case:
    return models.gpt(layers=2, dropout=0.2)


def small(width: int = 6) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 4))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).square().mean()

    return Case("small", Loss(), (torch.randn(8, 4, dtype=torch.float64),))


def test_a_run_that_is_taken_up_elsewhere_is_the_one_that_went_on(tmp_path: Path) -> None:
    case = dropping()
    first = Run(case, **WAYS["one"])
    first.train(1)
    first.save(tmp_path / "start")
    first.train(2)
    for before, after in (("zero3", "1f1b"), ("tp", "zero3"), ("1f1b", "one")):
        run = Run(case, **WAYS[before])
        torch.manual_seed(0)
        run.load(tmp_path / "start")
        run.train(1)
        run.save(tmp_path / before)
        other = Run(case, **WAYS[after])
        torch.rand(3)
        other.load(tmp_path / before)
        other.train(1)
        assert_alike(other, first)


def test_buffers_scales_and_plans_are_saved(tmp_path: Path) -> None:
    case = models.resnet(blocks=1)
    first = Run(case, **ONE)
    first.train(1)
    first.save(tmp_path / "a")
    first.train(1)
    other = Run(case, mesh=Mesh(dp=2), mode="data")
    other.load(tmp_path / "a")
    other.train(1)
    assert_alike(other, first)
    assert ap.Plan.load(tmp_path / "a" / "plan.json").mesh == first.module.plan.mesh
    half = {**ONE, "precision": ap.Precision(torch.float16, loss_scale="dynamic")}
    scaled = [ap.parallelize(case.model, case.args, **half) for _ in range(2)]
    assert scaled[0].loss_scale is not None
    scaled[0].loss_scale.value = 2.0
    scaled[0].loss_scale.good = 7
    scaled[0].plan.save(tmp_path / "plan.json")
    with patch.object(SavedPlan, "to_json", side_effect=AssertionError):  # the bytes are kept
        ap.save(tmp_path / "b", scaled[0])
    assert (tmp_path / "b" / "plan.json").read_bytes() == (tmp_path / "plan.json").read_bytes()
    assert ap.load(tmp_path / "b", scaled[1]) is None
    assert scaled[1].loss_scale == scaled[0].loss_scale


def test_a_thread_writes_what_was_there_when_it_was_asked(tmp_path: Path) -> None:
    case = small()
    first, other = Run(case, **ONE), Run(case, **ONE)
    first.train(1)
    may_write, write = threading.Event(), Job.write

    def wait_first(job: Job) -> None:
        may_write.wait(60)
        write(job)

    with patch.object(Job, "write", wait_first):
        first.save(tmp_path / "a", asynchronous=True)
        first.train(1)
        assert not (tmp_path / "a").exists()
        may_write.set()
        first.saving.wait()
    other.load(tmp_path / "a")
    other.train(1)
    assert_alike(other, first)


def test_the_error_of_a_thread_is_raised_where_one_waits(tmp_path: Path) -> None:
    run = Run(small(), **ONE)
    with patch.object(Job, "write", side_effect=OSError(28, "No space left on device")):
        run.save(tmp_path / "a", asynchronous=True)
        run.saving._thread.join()
    with pytest.raises(OSError, match="No space left"):
        run.save(tmp_path / "b")  # waits for the earlier one
    run.save(tmp_path / "b")
    run.load(tmp_path / "b")


class Killed(BaseException):
    pass


def test_one_that_is_killed_leaves_the_last_one_whole(tmp_path: Path) -> None:
    """At each of the moments between which something is on the disk."""
    run, path = Run(small(), **ONE), tmp_path / "a"
    moments, seen = ("fsync", "rename", "mkdir", "replace"), set()
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in moments}
    killed, left = 0, 0

    def killing(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                seen.add(name)
                raise Killed
            left -= 1
            return real[name](*args, **kwargs)

        return call

    assert not ap.is_saved(path)
    ap.save(path, run.module, run.optimizer, extra=0)
    last = 0
    while True:
        left = killed
        patches = [patch.object(os, name, killing(name)) for name in moments]
        for one in patches:
            one.start()
        try:
            ap.save(path, run.module, run.optimizer, extra=killed + 1)
            break
        except Killed:
            pass
        finally:
            for one in patches:
                one.stop()
        assert ap.is_saved(path)
        found = ap.load(path, run.module, run.optimizer)
        assert found in (last, killed + 1)
        last = found
        killed += 1
    assert killed >= 8
    assert seen == {*moments}
    assert ap.load(path, run.module, run.optimizer) == killed + 1
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def a_hidden_call(path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(path.parent / "was run"),)

    (path / "beside.pt").write_bytes(pickle.dumps(Evil(), protocol=2))


def without_a_file(path: Path) -> None:
    (path / "rank-0.safetensors").unlink()


def cut_short(path: Path) -> None:
    file = path / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def without_a_piece(path: Path) -> None:
    index = json.loads((path / "checkpoint.json").read_text())
    index["values"]["model.0.weight"]["pieces"] = []
    (path / "checkpoint.json").write_bytes(sealed(json.dumps(index).encode()))


def of_another_version(path: Path) -> None:
    index = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**index, "version": 2}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (a_hidden_call, "as ap.save"),
        (without_a_file, "as ap.save"),
        (cut_short, "as ap.save"),
        (without_a_piece, "model.0.weight is not whole"),
        (of_another_version, "version"),
        (lambda path: (path / "checkpoint.json").unlink(), "something else is"),
        (shutil.rmtree, "nothing is"),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused(
    spoil: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    run, path = Run(small(), **ONE), tmp_path / "a"
    run.save(path)
    spoil(path)
    with pytest.raises(ap.InvalidInput, match=message) as error:
        run.load(path)
    assert error.value.remedy
    assert not (tmp_path / "was run").exists()


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run, path = Run(small(), **ONE), tmp_path / "a"
    run.train(1)
    run.save(path)
    ap.save(tmp_path / "b", run.module)
    other = ap.parallelize(small(8).model, small(8).args, **ONE)
    resnet = models.resnet(blocks=1)
    for module, message in (
        (other, r"misshapen: model.0.weight \[6, 4\] torch.float64, not \[8, 4\]"),
        (ap.parallelize(resnet.model, resnet.args, **ONE), "missing: stem"),
    ):
        with pytest.raises(ap.InvalidInput) as error:
            ap.load(path, module)
        assert error.match(message) or message in str(error.value)
    fresh = Run(small(), **ONE)
    before = fresh.module.full_state_dict()
    parameters = list(fresh.module.parameters())
    for optimizer, message in (
        (torch.optim.SGD(parameters), "of the class that was saved"),
        (torch.optim.AdamW(parameters), "in the same groups"),
        (torch.optim.AdamW(small().model.parameters()), "not this module's"),
        (None, "torch.optim.Optimizer"),
    ):
        with pytest.raises(ap.InvalidInput, match=message):
            ap.load(path, fresh.module, optimizer or fresh.schedule)  # type: ignore[arg-type]
    with pytest.raises(ap.InvalidInput, match="saved with one"):
        ap.load(tmp_path / "b", fresh.module, fresh.optimizer)
    for name, value in fresh.module.full_state_dict().items():
        assert torch.equal(value, before[name])


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    run = Run(small(), **ONE)
    run.save(tmp_path / "a")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").touch()
    with pytest.raises(ap.InvalidInput, match="plain data"):
        ap.save(tmp_path / "a", run.module, extra={"path": tmp_path, "call": small})
    with pytest.raises(ap.InvalidInput, match="takes the place of another"):
        ap.save(tmp_path / "notes", run.module)
    with pytest.raises(ap.InvalidInput, match="has a path"):
        ap.save(None, run.module)  # type: ignore[arg-type]
    with pytest.raises(ap.InvalidInput, match="is a parallel module"):
        ap.save(tmp_path / "c", small().model)  # type: ignore[arg-type]
    lbfgs = torch.optim.LBFGS(run.module.parameters())
    lbfgs.step(lambda: run.module.step(*run.case.args))
    with pytest.raises(ap.InvalidInput, match="of one parameter each"):
        ap.save(tmp_path / "c", run.module, lbfgs)
    run.load(tmp_path / "a")
    assert checkpoint_folders.INDEX in os.listdir(tmp_path / "a")


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adafactor, {}), (torch.optim.Adam, {})],
)
def test_optimizers_go_on(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    case, results = small(), []
    for resumes in (False, True):
        module = ap.parallelize(case.model, case.args, **ONE)
        optimizer = kind(module.parameters(), lr=0.1, **options)
        torch.manual_seed(1)
        for index in range(4):
            if resumes and index == 2:
                ap.save(tmp_path / "a", module, optimizer)
                module = ap.parallelize(case.model, case.args, **ONE)
                optimizer = kind(module.parameters(), lr=7.0)
                ap.load(tmp_path / "a", module, optimizer)
            optimizer.zero_grad()
            module.step(*case.args)
            optimizer.step()
        results.append(module.full_state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_a_whole_model_is_a_file_that_is_read_again(tmp_path: Path) -> None:
    case, path = models.gpt(layers=1), tmp_path / "model.safetensors"
    module = ap.parallelize(case.model, case.args, **WAYS["zero3"])
    ap.save_safetensors(path, module)
    with torch.device("meta"):
        empty = models.gpt(layers=1).model
    again = ap.parallelize(empty, case.args, **ONE, weights=path)
    expected = module.full_state_dict()
    for name, value in again.full_state_dict().items():
        assert torch.equal(value, expected[name])
    (tmp_path / "notes").write_text("no model")
    with pytest.raises(ap.InvalidInput, match="weights are a safetensors file"):
        ap.save_safetensors(tmp_path / "notes", module)
