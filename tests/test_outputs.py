"""What a call gives on the virtual mesh; tests/distributed/checks.py has the same on processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar import Mesh
from autopar.strategies.node_info import info
from tests.kept_tensors import (
    kept_tensors_are_those_of_the_model,
    stages_keep_what_one_device_keeps,
)
from tests.outputs import (
    LAWS,
    PIPELINES,
    WithLoss,
    batch_norm_in_stages_sees_the_whole_batch_in_a_call,
    made,
    parallel,
    random,
    stages_give_what_one_device_gives,
)
from tests.pipeline.models import share_captures  # noqa: F401


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(dp=4, tp=1)], ids=str)
@pytest.mark.parametrize(
    "law", [*LAWS, kept_tensors_are_those_of_the_model], ids=lambda law: law.__name__
)
def test_a_call_gives_what_the_model_gives(law, mesh: Mesh) -> None:
    law(mesh=mesh, backend="virtual")


class Meeting(nn.Module):
    """An output in which all samples meet, beside a loss in which they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y.square().mean(), y.detach().softmax(0)


def test_outputs_of_micro_batches_that_make_none_of_the_batch_are_refused() -> None:
    model, x = made(Meeting), random(8, 4)
    options = {"mesh": Mesh(dp=2), "backend": "virtual"}
    pm = parallel(model, x, **options, microbatches=2)
    with pytest.raises(ap.InvalidInput, match="joined from those of each") as caught:
        pm.step(x, outputs=True)
    assert "softmax" in str(caught.value.got)
    assert caught.value.remedy == "microbatches=1, or outputs=False"
    loss, (_, found) = parallel(model, x, **options).step(x, outputs=True)
    torch.testing.assert_close(pm.step(x), loss)
    torch.testing.assert_close(found, model(x)[1])


def test_a_step_that_gives_outputs_is_the_one_that_was_searched() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(512, 64), nn.Linear(64, 512)
            self.block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64))

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            found = self.out(self.block(self.words(ids)))
            return nn.functional.cross_entropy(found.flatten(0, 1), ids.flatten()), found

    ids = torch.arange(64).view(8, 8)
    options = {"mode": "auto", "microbatches": 2, "backend": "virtual"}
    pm = ap.parallelize(Reads().double(), (ids,), mesh=Mesh(a=2, b=2), **options)
    step, telling = pm.plan.program, pm.plan.program_with_outputs
    assert telling.decisions.strategies == step.decisions.strategies
    moved = [
        [info(node).bytes for node in one.graph.nodes if info(node).movement is not None]
        for one in (step, telling)
    ]
    assert moved[0] == moved[1], "outputs are made whole outside"
    loss, (_, found) = pm.step(ids, outputs=True)
    grads = pm.full_grads()
    pm.zero_grad()
    torch.testing.assert_close(pm.step(ids), loss)
    for name, grad in pm.full_grads().items():
        torch.testing.assert_close(grad, grads[name])
    torch.testing.assert_close(found, pm(ids)[1].detach())


@pytest.mark.parametrize("options", PIPELINES, ids=lambda options: options["schedule"])
def test_stages_give_what_one_device_gives(options: dict[str, Any]) -> None:
    stages_give_what_one_device_gives(backend="virtual", **options)
    stages_keep_what_one_device_keeps(backend="virtual", **options)


def test_batch_norm_in_stages_sees_the_whole_batch_in_a_call() -> None:
    batch_norm_in_stages_sees_the_whole_batch_in_a_call(backend="virtual", **PIPELINES[0])


def test_a_call_of_stages_has_no_gradients_and_a_step_takes_no_other_word() -> None:
    inputs = random(4, 4), torch.arange(4)
    options = {"mesh": Mesh(pp=2, tp=1), "microbatches": 2, "backend": "virtual"}
    pm = parallel(made(WithLoss), *inputs, **options)
    with pytest.raises(ap.InvalidInput, match="a call of a pipeline has no gradients"):
        pm(*inputs)
    with pytest.raises(ap.InvalidInput, match="whether it gives them"):
        pm.step(*inputs, outputs=inputs[0])
    assert not pm.full_grads()
