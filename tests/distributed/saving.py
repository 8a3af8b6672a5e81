"""A run that is saved by some ranks goes on on others as if nothing had been."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar as ap
from autopar import Mesh
from tests import models
from tests.models import Case
from tests.runtime.resuming import Run, assert_alike

WAYS: dict[str, dict[str, Any]] = {
    "one": {"mesh": Mesh(one=1), "backend": "virtual"},
    "zero3": {"mesh": Mesh(dp=4), "mode": "data", "states": "zero3"},
    "1f1b": {"mesh": Mesh(pp=2, dp=2), "mode": "data", "schedule": "1f1b", "microbatches": 2},
    "tp": {"mesh": Mesh(dp=2, tp=2), "mode": "auto", "states": "whole"},
}


@cache
def dropping() -> Case:
    return models.gpt(layers=2, dropout=0.2)


def shared_folder() -> Path:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def resumes_on_other_meshes() -> None:
    """From virtual ranks to processes, to others, to others, and back."""
    case, folder = dropping(), shared_folder()
    one = Run(case, **WAYS["one"])
    one.train(2)
    if dist.get_rank() == 0:
        one.save(folder / "0")
    dist.barrier()
    one.train(2)
    for number, name in enumerate(("zero3", "1f1b", "tp", "one")):
        torch.manual_seed(dist.get_rank())
        run = Run(case, **WAYS[name])
        run.load(folder / f"{number}")
        if name != "one":
            run.save(folder / f"{number + 1}", asynchronous=name == "1f1b")
        run.train(2)
        if name != "one" and run.saving is not None:
            run.saving.wait()
        assert_alike(run, one)
        if name == "zero3":
            is_wrong = dist.get_rank() == 2
            with pytest.raises(ap.InvalidInput, match="nothing" if is_wrong else "rank 2: a check"):
                ap.load(folder / ("wrong" if is_wrong else "0"), run.module)
            whole_model_goes_through_a_file(run, folder / "model.safetensors")
    dist.barrier()


def whole_model_goes_through_a_file(run: Run, path: Path) -> None:
    ap.save_safetensors(path, run.module)
    options = WAYS["1f1b"] | {"weights": path}
    other = ap.parallelize(run.case.model, run.case.args, run.case.kwargs, **options)
    state = run.module.full_state_dict()
    for name, value in other.full_state_dict().items():
        assert torch.equal(value, state[name]), name
