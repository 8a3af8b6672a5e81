"""Alike stages: what is known of one is what would be seen of the other."""

from __future__ import annotations

import numpy as np
import pytest

from autopar import Cluster, Mesh, plan
from autopar.candidates import laid_out_program
from autopar.passes.stages import StageCut, cut_stage
from autopar.pipeline.memory.alike_stages import StageMemories
from autopar.pipeline.memory.step_memory import StageMemory
from tests.models import gpt


@pytest.mark.parametrize(
    ("states", "recompute"),
    [
        ("whole", None),
        ("zero3", None),
        ("zero1", "selective"),
        ("zero3", "full"),
        ("whole", "full"),
    ],
)
def test_alike_stages_take_the_same(
    monkeypatch: pytest.MonkeyPatch, states: str, recompute: str | None
) -> None:
    case, met = gpt(layers=6), list[bool]()

    class Compared(StageMemories):
        def __call__(self, cut: StageCut, index: int, is_split: bool) -> StageMemory:
            before = len(self._seen)
            found = super().__call__(cut, index, is_split)
            met.append(len(self._seen) == before)
            stage = cut_stage(cut, index)
            seen = StageMemory.of_stage(stage, self.mesh, self.travel, is_split=is_split)
            assert np.array_equal(found.sizes, seen.sizes)
            assert (dict(found.learned), found.at_once) == (dict(seen.learned), seen.at_once)
            assert found.host == seen.host
            return found

    monkeypatch.setattr(laid_out_program, "StageMemories", Compared)
    plan(
        case.model,
        case.args,
        case.kwargs,
        mesh=Mesh(pp=4, dp=2),
        cluster=Cluster.preset("dgx-a100"),
        schedule="zb-h1",
        microbatches=4,
        states=states,
        recompute=recompute,
        mode="data",
    )
    assert len(met) == 4
