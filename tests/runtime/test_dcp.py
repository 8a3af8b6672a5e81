"""The law of formats: a run goes on from a checkpoint in DCP form as from autopar's own, on other
meshes, in plain torch without autopar, and the other way round.

Processes are in `tests/distributed/saving.py`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar as ap
from tests import models
from tests.captures import shared_captures
from tests.models import Case
from tests.runtime.resuming import Run, assert_alike
from tests.runtime.test_saving import ONE, WAYS, dropping, small

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def capture_once() -> Iterator[None]:
    with shared_captures():
        yield


class Plain:
    """A training in plain torch, without dropout."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, case.fresh().model
        by_rank = [[p for p in self.model.parameters() if (p.ndim > 1) == w] for w in (True, False)]
        groups = [{"params": by_rank[0], "weight_decay": 0.1}, {"params": by_rank[1], "lr": 2e-2}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(*self.case.args, **self.case.kwargs)
            (loss if isinstance(loss, Tensor) else loss[0]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        values, states = get_state_dict(self.model, self.optimizer)
        return {"model": values, "optimizer": states}

    def load(self, path: Path) -> None:
        state = self.state
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def train(module: ap.ParallelModule, optimizer: torch.optim.Optimizer, case: Case) -> None:
    for _ in range(2):
        module.step(*case.args, **case.kwargs)
        optimizer.step()
        optimizer.zero_grad()


def assert_same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_a_run_goes_on_from_either_form_on_other_meshes(tmp_path: Path) -> None:
    case = dropping()
    first = Run(case, **ONE)
    first.train(1)
    first.save(tmp_path / "start", format="dcp")
    first.train(2)
    for before, after, form in (("zero3", "1f1b", "dcp"), ("tp", "zero3", "autopar")):
        run = Run(case, **WAYS[before])
        torch.manual_seed(0)
        run.load(tmp_path / "start")
        run.train(1)
        run.save(tmp_path / before, format=form, asynchronous=before == "zero3")
        other = Run(case, **WAYS[after])
        if before == "zero3":
            run.saving.wait()
        other.load(tmp_path / before)
        other.train(1)
        assert_alike(other, first)
        assert ap.is_saved(tmp_path / before)
    first.save(tmp_path / "tp", format="dcp")  # takes the place of one in the other form
    assert ap.load(tmp_path / "tp", first.module)["losses"]
    first.save(tmp_path / "tp")
    assert not (tmp_path / "tp" / ".metadata").exists()


@pytest.mark.parametrize("way", ["zero3", "1f1b"])
def test_plain_torch_goes_on_and_comes_back(way: str, tmp_path: Path) -> None:
    case = models.gpt(layers=2)  # its head is tied
    plain, run = Plain(case), Run(case, **WAYS[way])
    plain.train(2)
    train(run.module, run.optimizer, case)
    ap.save(tmp_path / "ours", run.module, run.optimizer, format="dcp")
    again = Plain(case)
    again.train(1)  # its states exist, with other values
    again.load(tmp_path / "ours")
    for one in (plain, again):
        one.train(2)
    train(run.module, run.optimizer, case)
    assert_same(again.model.state_dict(), plain.model.state_dict())
    assert_same(run.module.full_state_dict(), plain.model.state_dict())
    dcp.save(again.state, checkpoint_id=tmp_path / "theirs")
    other = Run(case, **WAYS["tp"])
    assert ap.load(tmp_path / "theirs", other.module, other.optimizer) is None
    again.train(2)
    train(other.module, other.optimizer, case)
    assert_same(other.module.full_state_dict(), again.model.state_dict())


def test_tied_names_are_all_there_and_stored_once(tmp_path: Path) -> None:
    case = models.gpt(layers=1)
    module = ap.parallelize(case.model, case.args, **ONE)
    ap.save(tmp_path / "a", module, format="dcp")
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    values = torch.load(tmp_path / "a.pt", weights_only=True)["model"]
    assert values.keys() == case.model.state_dict().keys()
    assert_same(values, case.model.state_dict())
    places = dcp.FileSystemReader(tmp_path / "a").read_metadata().storage_data
    assert len(places) == len(values) == len(module.saved_names) + 1
    assert len({place.offset for place in places.values()}) == len(module.saved_names)


def test_the_state_dict_of_a_model_alone_is_loaded(tmp_path: Path) -> None:
    case, resnet = small(), models.resnet(blocks=1)
    dcp.save(case.model.state_dict(), checkpoint_id=tmp_path / "a")
    module = ap.parallelize(small().model, case.args, **WAYS["zero3"])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    ap.load(tmp_path / "a", module)
    assert_same(module.full_state_dict(), case.model.state_dict())
    optimizer = torch.optim.AdamW(module.parameters())
    with pytest.raises(ap.InvalidInput, match="saved with one"):
        ap.load(tmp_path / "a", module, optimizer)
    with pytest.raises(ap.InvalidInput, match="missing: stem"):
        ap.load(tmp_path / "a", ap.parallelize(resnet.model, resnet.args, **ONE))
    with pytest.raises(ap.InvalidInput, match="takes the place of another"):
        ap.save(tmp_path / "a", module)


@pytest.mark.parametrize(("kind", "options"), [("SGD", {"momentum": 0.9}), ("Adafactor", {})])
def test_optimizers_with_other_states_go_on(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    case, results = small(), []
    for resumes in (False, True):
        module = ap.parallelize(case.model, case.args, **ONE)
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.1, **options)
        torch.manual_seed(1)
        train(module, optimizer, case)
        if resumes:
            ap.save(tmp_path / "a", module, optimizer, format="dcp")
            module = ap.parallelize(case.model, case.args, **ONE)
            optimizer = getattr(torch.optim, kind)(module.parameters(), lr=7.0)
            ap.load(tmp_path / "a", module, optimizer)
        train(module, optimizer, case)
        results.append(module.full_state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def hidden_call(path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(path.parent / "was run"),)

    (path / ".metadata").write_bytes(pickle.dumps(Evil(), protocol=2))


def cut_short(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-8])


def changed(path: Path) -> None:
    (path / "beside.pt").write_bytes(b"")


@pytest.mark.parametrize(
    "spoil", [hidden_call, cut_short, changed, lambda path: (path / "__0_0.distcp").unlink()]
)
def test_damaged_checkpoints_are_refused(spoil: Callable[[Path], Any], tmp_path: Path) -> None:
    run = Run(small(), **ONE)
    run.save(tmp_path / "a", format="dcp")
    spoil(tmp_path / "a")
    with pytest.raises(ap.InvalidInput, match=r"as ap\.save"):
        run.load(tmp_path / "a")
    assert not (tmp_path / "was run").exists()


def test_other_formats_are_refused(tmp_path: Path) -> None:
    module = ap.parallelize(small().model, small().args, **ONE)
    with pytest.raises(ap.InvalidInput, match=r"that of torch\.distributed\.checkpoint"):
        ap.save(tmp_path / "a", module, format="safetensors")  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()
