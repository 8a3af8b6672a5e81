"""What ranks do not know of a call by themselves, they find together."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar as ap
from autopar import Mesh
from tests import models
from tests.dynamic import slices_of


def finds_the_batch_of_which_it_has_a_slice() -> None:
    """Of 9, 8 and 7 samples some of four ranks have as many; a batch of which ranks disagree is
    refused on all, and the next call is none the worse."""
    case = models.mlp(batch=9, hidden=8)
    options = {"mesh": Mesh(dp=4), "mode": "data"}
    local = ap.parallelize(case.model, case.args, local_inputs=True, **options)
    whole = ap.parallelize(case.model, case.args, **options)
    alone = ap.parallelize(case.model, case.args, backend="virtual", **options)
    for size in (9, 8, 7, 9, 8, 5, 7):
        batch = [value[:size] for value in case.args]
        losses = []
        for module, given in ((alone, batch), (whole, batch), (local, slices_of(local, batch))):
            module.zero_grad()
            losses.append(module.step(*given))
            assert_close(module.full_grads(), alone.full_grads())
        assert_close(losses, losses[:1] * 3)
    assert [len(module.programs) for module in (alone, whole, local)] == [4] * 3
    assert all("f64[" in one.signature.text for one in local.programs)
    assert len({one.signature.text for one in local.programs}) == 4
    n = 2 + dist.get_rank() % 2
    other = [value[: 2 + n] for value in case.args]  # no rank goes on with its last program
    for module, given, rule in (
        (whole, other, "all ranks make the same call"),
        (local, [value[-n:] for value in case.args], "each rank brings its slice"),
    ):
        with pytest.raises(ap.InvalidInput, match=rule):
            module.step(*given)
    assert_close(whole.step(*case.args), alone.step(*case.args))


def hears_of_parameters_that_others_hold() -> None:
    """One that is unfrozen in a pipeline learns from then on, on the ranks that hold it."""
    case = models.mlp(batch=8, hidden=8)
    case.model.layers[0].requires_grad_(False)
    options = {"mesh": Mesh(pp=2, dp=2), "mode": "data", "microbatches": 2}
    real = ap.parallelize(case.model, case.args, **options)
    alone = ap.parallelize(case.model, case.args, backend="virtual", **options)
    for learns in (False, True, False):
        for module in (real, alone):
            module.zero_grad()
            for parameter in module.layers[0].parameters():
                parameter.requires_grad_(learns)
        assert_close(real.step(*case.args), alone.step(*case.args))
        found = real.full_grads()
        assert ("layers.0.weight" in found) == learns
        assert_close(found, alone.full_grads())
    assert len(real.programs) == len(alone.programs) == 2


def exchanges_calls_only_when_the_program_changes() -> None:
    """Of several programs, also in a pipeline, whose ranks all see the whole batch."""
    case = models.mlp(batch=8, hidden=8)
    fewer = [value[:4] for value in case.args]
    for options in ({"mesh": Mesh(dp=4)}, {"mesh": Mesh(pp=2, dp=2), "microbatches": 2}):
        module = ap.parallelize(case.model, case.args, mode="data", **options)
        world = module.backend.world
        for batch in (case.args, fewer, case.args):  # the calls in which batches are compared
            expected = module.step(*batch)
        with (
            patch.object(type(world), "gather_numbers", side_effect=AssertionError),
            patch.object(type(world.liveness), "exchange_call", autospec=True) as exchange,
        ):
            for _ in range(3):
                assert_close(module.step(*case.args), expected)
            assert not exchange.call_count
        exchange = world.liveness.exchange_call
        with patch.object(world.liveness, "exchange_call", wraps=exchange) as seen:
            module.step(*fewer)
            module.step(*case.args)
        assert seen.call_count == 2
        other = [value[: 6 + dist.get_rank() % 2] for value in case.args]
        with pytest.raises(ap.InvalidInput, match="all ranks make the same call"):
            module.step(*other)
        assert_close(module.step(*case.args), expected)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, by: float = 1.0, mask: Tensor | None = None) -> Tensor:
        x = x if mask is None else x * mask
        return (self.linear(x) * by).square().mean()


def takes_what_is_no_tensor_as_it_is() -> None:
    """Beside slices, where a rank's word is the whole; a tensor needs a layout."""
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(8, 4, dtype=torch.float64)
    options = {"mesh": Mesh(dp=4), "mode": "data"}
    local = ap.parallelize(model, (x,), local_inputs=True, **options)
    alone = ap.parallelize(model, (x,), backend="virtual", **options)
    own = slices_of(local, [x])
    for more in ({"by": 2.0}, {}, {"mask": None}):
        assert_close(local.step(*own, **more), alone.step(x, **more))
    with pytest.raises(ap.InvalidInput, match=r"a tensor as kwargs\['mask'\], where the planned"):
        local.step(*own, mask=own[0])


def refuses_slices_of_what_is_whole() -> None:
    """What a plan cuts over one axis, or none, is the same on ranks that stand alike on it."""
    case, rank = models.mlp(batch=8, hidden=8), dist.get_rank()
    whole = {"mesh": Mesh(dp=4), "mode": "auto"}
    halves = {"mesh": Mesh(pp=2, dp=2), "mode": "data", "microbatches": 2}
    inner = halves | {"mesh": Mesh(dp=2, pp=2)}  # slices by the outer axis
    for options, parts, at in ((whole, 1, 0), (halves, 2, rank % 2), (inner, 2, rank // 2)):
        local = ap.parallelize(case.model, case.args, local_inputs=True, **options)
        alone = ap.parallelize(case.model, case.args, backend="virtual", **options)
        own = [value.chunk(parts)[at] for value in case.args]
        with pytest.raises(ap.InvalidInput, match=r"does not cut over .* is the same"):
            local.step(*(value + rank for value in own))
        assert_close(local.step(*own), alone.step(*case.args))
    mask = torch.arange(8) > 6
    with pytest.raises(ap.InvalidInput, match="asks nothing of values that ranks have slices of"):
        ap.parallelize(_Asks(), (mask,), mesh=Mesh(dp=4), mode="data", local_inputs=True)


class _Asks(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, mask: Tensor) -> Tensor:
        y = super().forward(mask.float()[:, None])
        return y.masked_fill(mask[:, None], 0.0).sum() if mask.any() else y.sum()


def assert_close(one: object, other: object) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
