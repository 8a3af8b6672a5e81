"""Who listens to steps is told what they did, and nobody else pays for it."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.errors import InvalidInput
from autopar.runtime.observation.step_figures import batch_size
from tests import models


def module_of(**about: Any) -> tuple[ap.ParallelModule, models.Case]:
    case = models.shared("gpt", layers=2)
    options = {"cluster": ap.Cluster.preset("dgx-h100"), "backend": "virtual", **about}
    return ap.parallelize(case.model, case.args, case.kwargs, **options), case


@pytest.mark.parametrize(
    "about", [{"mesh": ap.Mesh(dp=2)}, {"mesh": ap.Mesh(pp=2), "microbatches": 2}]
)
def test_figures_are_those_of_the_step(about: dict[str, Any]) -> None:
    module, case = module_of(**about)
    heard: list[ap.StepFigures] = []
    remove = module.on_step(heard.append)
    losses = [module.step(*case.args, **case.kwargs).item() for _ in range(2)]
    remove()
    module.step(*case.args, **case.kwargs)
    assert [one.step for one in heard] == [1, 2]
    assert [one.loss for one in heard] == losses
    ids = case.args[0]
    for one in heard:
        assert (one.samples, one.tokens, one.rank) == (ids.shape[0], ids.numel(), 0)
        assert one.predicted == module.plan.seconds
        assert one.seconds > 0
        assert one.tokens_per_second == ids.numel() / one.seconds


def test_adapters_write_them(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.found: dict[str, float] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.found[f"{name} {step}"] = value

    module, case = module_of(mesh=ap.Mesh(dp=2))
    writer, lines = Writer(), io.StringIO()
    for callback in (
        ap.JsonLines(tmp_path / "run.jsonl"),
        ap.TensorBoard(writer),
        ap.ProgressLine(every=0.0, file=lines),
    ):
        module.on_step(callback)
    losses = [module.step(*case.args, **case.kwargs).item() for _ in range(2)]
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == losses
    assert [writer.found[f"train/loss {step}"] for step in (1, 2)] == losses
    assert not any(name.startswith("train/memory") for name in writer.found)  # on no CPU
    first, second = lines.getvalue().splitlines()
    assert first.startswith(f"step 1: loss {losses[0]:.4g}, ")
    assert "(predicted " in second
    assert second.endswith("tokens/s")


def test_what_is_no_listener_is_refused(tmp_path: Path) -> None:
    module, _ = module_of(mesh=ap.Mesh(dp=2))
    with pytest.raises(InvalidInput, match="called with their figures"):
        module.on_step("run.jsonl")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="add_scalar"):
        ap.TensorBoard(object())
    with pytest.raises(InvalidInput, match="can be written"):
        ap.JsonLines(tmp_path / "missing" / "run.jsonl")


def test_all_hear_of_a_step_and_no_other_time_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a callback raises, or the step before broke off."""
    module, case = module_of(mesh=ap.Mesh(dp=2))
    heard: list[ap.StepFigures] = []

    def odd(figures: ap.StepFigures) -> None:
        if figures.step == 1:
            raise KeyError(figures.step)

    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    module.on_step(odd)
    module.on_step(heard.append)
    with pytest.raises(KeyError):
        module.step(*case.args, **case.kwargs)
    now[0] += 5.0
    module.step(*case.args, **case.kwargs)
    with pytest.raises(IndexError):
        module.step(torch.full_like(case.args[0], 10**6), *case.args[1:], **case.kwargs)
    now[0] += 7.0
    module.step(*case.args, **case.kwargs)
    assert [one.seconds for one in heard] == [0.0, 5.0, 0.0]


def test_one_of_two_equal_listeners_is_taken_away_once() -> None:
    module, case = module_of(mesh=ap.Mesh(dp=2))
    heard: list[ap.StepFigures] = []
    remove, _ = module.on_step(heard.append), module.on_step(heard.append)
    remove()
    remove()
    module.step(*case.args, **case.kwargs)
    assert len(heard) == 1


class Scaled(nn.Module):
    """Of which some input is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, 4), nn.Linear(4, 4)

    def forward(self, scale: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        known = self.table(rows) if rows.dtype == torch.int64 else rows[..., None].expand(8, 16, 4)
        return (self.out(known.float()) * scale.sum() * mask[..., None]).square().mean()


@pytest.mark.parametrize("mesh", [ap.Mesh(dp=2), ap.Mesh(tp=2)])
@pytest.mark.parametrize(("dtype", "tokens"), [(torch.int64, 128), (torch.uint8, None)])
def test_the_batch_is_what_most_inputs_have(
    mesh: ap.Mesh, dtype: torch.dtype, tokens: int | None
) -> None:
    inputs = torch.ones(3), torch.ones(8, 16, dtype=dtype), torch.ones(8, 16, dtype=torch.bool)
    assert batch_size(ap.plan(Scaled(), inputs, mesh=mesh)) == (8, tokens)


def test_adapters_meet_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = ap.StepFigures(1, 0, float("nan"), 1.0, 1.0, 1, None, None)
    monkeypatch.setattr(sys, "stderr", None)
    ap.ProgressLine()(figures)
    path = tmp_path / "gone" / "run.jsonl"
    path.parent.mkdir()
    lines = ap.JsonLines(path)
    lines(figures)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["loss"] is None
    path.unlink()
    path.parent.rmdir()
    with pytest.raises(InvalidInput, match="can be written"):
        lines(figures)
