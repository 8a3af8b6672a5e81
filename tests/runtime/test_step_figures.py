"""Who listens to steps is told what they did, and nobody else pays for it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import autopar as ap
from autopar.errors import InvalidInput
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
