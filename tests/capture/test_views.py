"""Views: dims that change places or do not, views changed in place, memory read with strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar.errors import InvalidInput
from tests.capture.support import Function, program, random, targets

Views = Callable[[Tensor], Any]


def run(function: Views, x: Tensor | None = None) -> list[str]:
    """The operators of a function of what the linear layer gives, which it may change in place."""
    x = random(6, 4) if x is None else x
    return targets(program(lambda self, x: function(self.linear(x) * 1.5), x))[3:]


@pytest.mark.parametrize("name", ["transpose", "swapaxes", "swapdims", "movedim", "moveaxis"])
def test_dims_change_places_by_any_number(name: str) -> None:
    def every(h: Tensor) -> list[Tensor]:
        move, dims = getattr(torch, name), range(-h.ndim, h.ndim)
        return [move(h, first, second) * 2 for first in dims for second in dims]

    assert set(run(every)) == {"mul", "transpose"}
    assert set(run(lambda h: every(h.sum(0)))) == {"sum", "mul"}
    three = run(lambda h: every(h.view(2, 3, 4)))
    assert set(three) <= {"reshape", "mul", "transpose", "permute"}
    assert run(lambda h: getattr(torch, name)(h, 1, -1)) == []


def test_lists_of_dims_change_places() -> None:
    def some(h: Tensor) -> list[Tensor]:
        h = h.view(2, 3, 4)
        return [h.movedim((0, -1), (-1, 0)), h.movedim((2, 1), (0, 1)), h.permute(1, -1, 0), h.mT]

    assert run(some) == ["reshape", "transpose", "transpose", "permute", "transpose"]


def a_view_is_transposed(h: Tensor) -> Any:
    v = h[:4]
    v.t_()
    return h, v


def and_written(h: Tensor) -> Any:
    v = h[:4]
    v.t_()
    v[0].mul_(2.0)
    h[1].add_(1.0)
    return h, v


def with_all_that_it_is_called(h: Tensor) -> Any:
    v = h[:4]
    w = v.t_()
    w.unsqueeze_(0)
    v.add_(1.0)
    u = w[0]
    v.squeeze_(0)
    u.mul_(2.0)
    return h, v * w, u


def between_writes(h: Tensor) -> Any:
    h.add_(1.0)
    h.unsqueeze_(-1)
    h[2].zero_()
    h.squeeze_()
    h.transpose_(0, 1)
    return h


def by_other_names(h: Tensor) -> Any:
    v = h.view(2, 3, 4)
    v.swapaxes_(0, 1)
    v.swapdims_(1, -1)
    v.mul_(2.0)
    w = h.swapaxes(0, 1).movedim(0, 1)
    w.copy_(h + 1.0)
    h.mT[0].mul_(2.0)
    return h, v


def without_its_gradient(h: Tensor) -> Any:
    twice = h * 2
    twice.detach_()
    return h + twice


@pytest.mark.parametrize(
    "function",
    [
        a_view_is_transposed,
        and_written,
        with_all_that_it_is_called,
        between_writes,
        by_other_names,
        without_its_gradient,
    ],
)
def test_a_tensor_becomes_another_view(function: Views) -> None:
    run(function)


def test_buffers_keep_their_shape() -> None:
    def turned(self: Any, x: Tensor) -> Tensor:
        self.state.t_()
        return self.linear(x) + self.state.sum()

    with pytest.raises(InvalidInput, match="the shape of a buffer"):
        program(turned, random(6, 4), state=torch.ones(2, 3))


def test_lists_changed_in_place_are_refused() -> None:
    with pytest.raises(InvalidInput, match="has a form that does not"):
        run(lambda h: torch._foreach_add_([h, h * 2], 1.0))


def test_strides_are_those_of_the_model() -> None:
    assert run(lambda h: h.t().contiguous().as_strided((3, 3), (1, 2), 1)) == [
        "transpose",
        "strided",
    ]
    run(lambda h: h.view(2, 3, 4).transpose(0, 2).as_strided((3, 3), (1, 2)))
    run(lambda h: torch.as_strided_copy(h.t(), (3, 3), (1, 2), 1))
    run(lambda h: h.as_strided_scatter(h.detach().tanh()[:3, :3], (3, 3), (4, 1), 1))
    run(lambda h: h * h.detach().t().as_strided_scatter(h[:3, :3].detach(), (3, 3), (1, 4)).t())
    with pytest.raises(InvalidInput, match="as_strided reads elements of its input"):
        run(lambda h: h[2:].as_strided((3, 3), (1, 2), 0))


def test_writes_and_views_by_strides() -> None:
    def diagonal(h: Tensor) -> Tensor:
        y = h.clone()
        y.fill_diagonal_(3.0)
        return y.square()

    def read_after_a_write(h: Tensor) -> Tensor:
        y = h.clone()
        some = y.as_strided((3, 3), (1, 2))
        y.mul_(2)
        return y + some.sum()

    run(diagonal)
    run(read_after_a_write)
    with pytest.raises(InvalidInput, match="a write through as_strided"):
        run(lambda h: h.clone().as_strided((3, 3), (4, 1)).zero_())
    with pytest.raises(InvalidInput, match="has a form that does not"):
        run(lambda h: h.clone().view(-1, 2).fill_diagonal_(1.0, wrap=True))


class Bits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8).double()

    def forward(self, x: Tensor, as_whole: Tensor) -> Tensor:
        y = self.up(x)
        same = ((x * 2).view(torch.int64) & 255).double()
        halves = ((x * 2).t().contiguous().view(torch.int32) & 255).double()
        back = (as_whole * 2).view(torch.float64)
        return (y[:, :4] * same).sum() + y.sum() * halves.mean() + (y[:, :4] * back).sum()


@pytest.mark.parametrize("mesh", [ap.Mesh(x=2), ap.Mesh(x=3), ap.Mesh(dp=2, tp=2)])
def test_bits_seen_as_another_dtype(mesh: ap.Mesh) -> None:
    torch.manual_seed(0)
    model, x = Bits(), random(6, 4)
    whole = random(6, 4, seed=2).view(torch.int64) // 2
    expected = model(x, whole)
    expected.backward()
    parallel = ap.parallelize(model, (x, whole), mesh=mesh, mode="data", backend="virtual")
    torch.testing.assert_close(parallel.step(x, whole), expected.detach(), rtol=1e-9, atol=0)
    for name, gradient in parallel.full_grads().items():
        wanted = model.get_parameter(name).grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-9)


def attended(queries: int, keys: int, mask: Tensor) -> list[Any]:
    """What is left of a constant mask: itself, and whether attention is causal."""

    def function(self: Any, x: Tensor) -> Tensor:
        h = self.linear(x).unsqueeze(1)
        q, k = h[:, :, :queries], h[:, :, :keys]
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask.clone())

    captured = program(function, random(2, 5, 4))
    call = next(n for n in captured.graph.nodes if "attention" in str(n.target))
    return [call.args[3] is not None, call.args[5]]


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 5), (5, 3), (1, 5)])
def test_masks_are_read_for_every_query_and_key(queries: int, keys: int) -> None:
    every = torch.ones(queries, keys, dtype=torch.bool)
    assert attended(queries, keys, every) == [False, False]
    assert attended(queries, keys, every[:1]) == [False, False]
    causal = [False, True] if queries > 1 else [True, False]
    assert attended(queries, keys, every.tril()) == causal
    for lead in ((1,), (1, 1, 1), (2, 1, 1)):
        first = torch.zeros(*lead, keys, dtype=torch.bool)
        first[..., 0] = True
        assert attended(queries, keys, first) == [True, False]


def test_a_scale_of_zero_is_a_scale() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        h = self.linear(x)
        return F.scaled_dot_product_attention(h, h, x, scale=0.0)

    program(function, random(2, 5, 4))


def test_copies_of_views_are_views_once_nothing_is_changed() -> None:
    def copied(h: Tensor) -> list[Tensor]:
        first, second = torch.split_with_sizes_copy(h, [1, 5])
        turned = torch.t_copy(h)
        first += 1
        turned *= 2
        rows = torch.unbind_copy(h, 1)
        return [first, second * h[1:], turned, rows[2] * 2, torch.diagonal_copy(h) * 2]

    assert set(run(copied)) == {"slice", "add", "mul", "transpose", "select", "diagonal"}


def test_what_is_written_through_a_detached_view_has_no_gradient_beside_it() -> None:
    def forward(self: Function, x: Tensor) -> Tensor:
        base = x.exp()
        view = base.detach().to(x.device)
        view += self.linear(x)
        return (view * base * self.linear(x)).sum()

    program(forward, random(4, 4))
