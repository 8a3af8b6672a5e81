"""Laws of inputs whose sizes vary, for both backends: one plan is the model at every size."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export import Dim

import autopar as ap
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.module import call_capture
from autopar.search.layout_search import LayoutSearch
from tests.captures import alike
from tests.models import Case, gpt, mlp
from tests.outputs import assert_close, gradients, state

Size = tuple[int, int]  # batch and length
BATCH, LENGTH = Dim("batch", max=9), Dim("length", min=2, max=8)
ENDS = ((1, 2), (9, 8), (1, 8), (9, 2))


def both_vary() -> dict[int, Any]:
    return {0: BATCH, 1: LENGTH}


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(batch * length).view(batch, length) * 7 % 13
    return ids, (ids * 3 + 1) % 13


def samples(batch: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * 10 + length)
    shape = batch, length
    about: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    return torch.randn(*shape, 6, **about), torch.randn(*shape, 4, **about)


def small_gpt() -> Case:
    return gpt(batch=2, sequence=8, vocabulary=13, hidden=8, heads=2, layers=1)


def small_mlp() -> Case:
    return mlp(inputs=6, hidden=8, outputs=4, layers=2)


Made = tuple[Callable[[], Case], Callable[[int, int], tuple[Tensor, Tensor]]]
MODELS: dict[str, Made] = {"gpt": (small_gpt, tokens), "mlp": (small_mlp, samples)}


def sampled(seed: str, count: int = 2) -> list[Size]:
    """At both ends of the range, and inside; some come twice."""
    drawn = random.Random(seed)
    inside = [(drawn.randint(1, 9), drawn.randint(2, 8)) for _ in range(count)]
    return [*drawn.sample(ENDS, 2), *inside, *inside[:1], (8, 8)]


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often something is searched, and captured, meanwhile."""
    found = {"searches": 0, "captures": 0}
    search, capture = LayoutSearch.run, call_capture.captured_again

    def run(*args: Any, **kwargs: Any) -> Any:
        found["searches"] += 1
        return search(*args, **kwargs)

    def again(*args: Any, **kwargs: Any) -> Any:
        found["captures"] += 1
        return capture(*args, **kwargs)

    with (
        patch.object(LayoutSearch, "run", run),
        patch.object(call_capture, "captured_again", again),
    ):
        yield found


def start(name: str, size: Size = (8, 8), **options: Any) -> tuple[nn.Module, ap.ParallelModule]:
    """A model, and its parallel module that was planned at a size for those of the range."""
    build, inputs = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = alike(build().model.double(), build)
    asked = {"mesh": ap.Mesh(dp=2, tp=2), "dynamic_shapes": (both_vary(), both_vary())}
    return copy.deepcopy(model), ap.parallelize(model, inputs(*size), **(asked | options))


def serves_every_size(
    name: str, sizes: Sequence[Size], local: bool = False, **options: Any
) -> None:
    """Losses, gradients and parameters are those of one device, step by step; calls of the same
    sizes in evaluation; nothing is searched, and what comes again is known."""
    model, module = start(name, **options)
    pair, inputs, local = (model, module), MODELS[name][1], options.get("local_inputs", False)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-3) for one in pair]
    with counted() as count:
        for size in sizes:
            given = inputs(*size)
            for one in pair:
                one.train().zero_grad()
            loss = first_of(model(*given))
            loss.backward()
            mine = slices_of(module, given) if local else given
            assert_close(module.step(*mine), loss.detach())
            assert_close(module.full_grads(), gradients(model))
            for optimizer in optimizers:
                optimizer.step()
            assert_close(module.full_state_dict(), state(model))
            for one in pair:
                one.eval()
            with torch.no_grad():
                assert_close(first_of(module(*mine)), first_of(model(*given)))
    assert not count["searches"]
    assert count["captures"] <= 2 * len({*sizes})
    assert len(module.programs) == 1
    with counted() as count:
        for size in {*sizes}:
            given = inputs(*size)
            mine = slices_of(module, given) if local else given
            module.train().step(*mine)
    assert count == {"searches": 0, "captures": 0}
    return module


def first_of(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


def slices_of(module: ap.ParallelModule, given: Sequence[Tensor]) -> list[Tensor]:
    """This rank's, of the inputs of a whole batch."""
    placed, names = module.plan.decisions.placeholders, module.plan.captured.inputs
    found = []
    assert isinstance(module.backend, TorchBackend)
    for name, value in zip(names, given):
        assert name is not None
        at = module.plan.mesh, module.backend.ranks.rank_in_stage
        bounds = placed[name].local_bounds(value.shape, *at)
        found.append(value[tuple(slice(start, start + count) for start, count in bounds)])
    return found
