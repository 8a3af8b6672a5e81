"""All ranks carry out the plan of rank 0, and one that has another model or plan is named."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import autopar as ap
from autopar.runtime.launching import same_sources
from autopar.runtime.launching.launch import launch

MESH = ap.Mesh(dp=2)
X = torch.arange(32.0).reshape(4, 8) / 32


class Model(nn.Module):
    def __init__(self, hidden: int, shift: float = 0.0) -> None:
        super().__init__()
        self.shift = torch.full((8,), shift)
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.relu(self.up(x))) + self.shift).square().mean()


def _error(**options) -> str:
    try:
        ap.parallelize(options.pop("model", None) or Model(16), (X,), **options)
    except ap.AutoparError as error:
        return str(error)
    return ""


def _disagree(say):
    rank = dist.get_rank()
    other = "autopar 0, torch 2, Python 3" if rank else same_sources.identity()
    with patch.object(same_sources, "identity", lambda: other):
        sources = _error(mesh=MESH)
    module = ap.parallelize(Model(16), (X,), mesh=MESH, mode="auto")
    loss = float(module.step(X))
    layouts = {name: str(layout) for name, layout in module.plan.layouts.items()}
    other_model = _error(model=Model(16 if rank == 0 else 24), mesh=MESH)
    constant = _error(model=Model(16, shift=float(rank)), mesh=MESH)
    given = ap.plan(Model(16, shift=float(rank)), (X,), mesh=MESH, mode="data")
    constant += _error(model=Model(16, shift=float(rank)), plan=given)
    own = ap.plan(Model(16), (X,), mesh=MESH, mode="data" if rank else "auto")
    other_plan = _error(plan=own)
    no_plan = _error(mesh=MESH, mode="auto", memory=1000)
    return loss, layouts, sources, other_model, constant, other_plan, no_plan


def test_ranks_agree_or_say_who_does_not(warm_ranks):
    first, second = launch(_disagree, 2)
    expected = float(Model(16)(X).detach())
    assert abs(first[0] - expected) < 1e-6
    assert first[:2] == second[:2]
    for _, _, sources, other_model, constant, other_plan, no_plan in (first, second):
        assert "all ranks of a world run the same autopar, torch and Python" in sources
        assert "rank 1: autopar 0, torch 2, Python 3" in sources
        assert f"rank 0: {same_sources.identity()}" in sources
        assert constant.count("rank 1: ") == 2
        assert constant.count("constant c_shift: f32[8], sha256") == 2
        assert "rank 1: " in other_model
        assert "parameter up.weight: f32[24, 8]" in other_model
        assert "rank 1: " in other_plan
        assert "mode: data, not auto" in other_plan
        assert "the least that was found takes" in no_plan


def test_any_change_of_any_source_is_another_identity(tmp_path: Path, monkeypatch):
    (tmp_path / "room").mkdir()
    first, second = tmp_path / "a.py", tmp_path / "room" / "b.py"
    seen = set()
    assert Path(ap.__file__).parent == same_sources._LIBRARY
    monkeypatch.setattr(same_sources, "_LIBRARY", tmp_path)
    for one, two in (("x", "y"), ("x", "z"), ("w", "y"), ("xy", "")):
        first.write_text(one)
        second.write_text(two)
        same_sources.identity.cache_clear()
        seen.add(same_sources.identity())
    second.rename(tmp_path / "room" / "c.py")
    same_sources.identity.cache_clear()
    seen.add(same_sources.identity())
    same_sources.identity.cache_clear()
    assert len(seen) == 5
