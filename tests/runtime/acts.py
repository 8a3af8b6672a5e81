"""What a user may do to a module between two steps, and what is refused.

Each act is done to the parallel module and to the model it was made from; afterwards both train
alike. `at(module, path)` is None where a rank of a pipeline does not hold what the act is about.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar as ap
from autopar import shard
from tests.models import Case
from tests.parity import assert_equal, parallel_outcome, single_outcome


class Tree(nn.Module):
    """Cut, tied, frozen parameters and buffers, in layers that can be the stages of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        cut = {"weight": ("d", None)}
        self.a, self.b, self.c = (
            shard(nn.Linear(4, 6), params=cut),
            nn.Linear(6, 6),
            nn.Linear(6, 6),
        )
        self.c.weight = self.b.weight
        self.frozen = shard(nn.Linear(6, 6), params=cut).requires_grad_(False)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(torch.relu(self.a(x)))
        x = self.norm(x + torch.tanh(self.c(torch.relu(self.b(x)))) * self.scale)
        return self.head(x).square().mean()


def tree() -> Case:
    torch.manual_seed(0)
    return Case("tree", Tree().double(), (torch.randn(8, 4).double(),))


shared_tree = cache(tree)  # which nobody changes


def at(module: nn.Module, path: str) -> Any:
    """What stands there, or None."""
    for part in path.split("."):
        module = getattr(module, part, None)  # type: ignore[assignment]
    return module


def freeze(m: nn.Module) -> None:
    for path in ("a.weight", "head"):
        if (held := at(m, path)) is not None:
            held.requires_grad_(False)


def freeze_and_back(m: nn.Module) -> None:
    freeze(m)
    for path in ("a.weight", "head"):
        if (held := at(m, path)) is not None:
            held.requires_grad_(True)


def put_parameters(m: nn.Module) -> None:
    for path in ("a", "head"):
        if at(m, path + ".weight") is not None:
            layer = at(m, path)
            layer.weight = nn.Parameter(2 * layer.weight.detach())


def put_frozen_parameter(m: nn.Module) -> None:
    if at(m, "a.weight") is not None:
        m.a.weight = nn.Parameter(2 * m.a.weight.detach(), requires_grad=False)  # type: ignore


def put_both_tied(m: nn.Module) -> None:
    held = at(m, "b.weight") if at(m, "b.weight") is not None else at(m, "c.weight")
    if held is None:
        return
    both = nn.Parameter(3 * held.detach())
    for path in ("b", "c"):
        if at(m, path + ".weight") is not None:
            at(m, path).weight = both


def put_buffer(m: nn.Module) -> None:
    if at(m, "scale") is not None:
        m.scale = 2 * m.scale  # type: ignore


def register_buffer_again(m: nn.Module) -> None:
    if at(m, "scale") is not None:
        m.register_buffer("scale", 2 * m.scale)  # type: ignore


def load_whole(m: nn.Module) -> None:
    m.load_state_dict({name: 0.7 * value for name, value in _whole(m).items()})


def load_pieces(m: nn.Module) -> None:
    m.load_state_dict({name: 0.7 * value for name, value in m.state_dict().items()})


def assign_whole(m: nn.Module) -> None:
    some = {name: 0.7 * v for name, v in _whole(m).items() if "weight" in name and name[0] in "ah"}
    m.load_state_dict(some, strict=False, assign=True)


def copy_in(m: nn.Module) -> None:
    if (held := at(m, "a.weight")) is not None:
        with torch.no_grad():
            held.copy_(2 * held)
    if (held := at(m, "head.weight")) is not None:
        held.data.copy_(2 * held.data)


def give_gradient(m: nn.Module) -> None:
    for path in ("a.weight", "head.bias"):
        if (held := at(m, path)) is not None:
            held.grad = torch.ones_like(held.detach())


def drop_gradient(m: nn.Module) -> None:
    give_gradient(m)
    if (held := at(m, "a.weight")) is not None:
        held.grad = None


def _whole(m: nn.Module) -> dict[str, Tensor]:
    return m.full_state_dict() if isinstance(m, ap.ParallelModule) else m.state_dict()


DONE = [
    freeze,
    freeze_and_back,
    put_parameters,
    put_frozen_parameter,
    put_both_tied,
    put_buffer,
    register_buffer_again,
    load_whole,
    load_pieces,
    assign_whole,
    copy_in,
    give_gradient,
    drop_gradient,
]


def assert_done(module: ap.ParallelModule, act: Callable[[nn.Module], None]) -> None:
    """After one step, an act and two more, `module` is what the model is."""
    case = tree()
    module.load_state_dict(case.model.state_dict())
    single = case.fresh()
    module.step(*case.args)
    single.run().backward()
    for one in (module, single.model):
        one.zero_grad(set_to_none=False)
        act(one)
    _assert_same_gradients(module, single.model)
    module.step(*case.args)  # adds to what is there
    single.run().backward()
    _assert_same_gradients(module, single.model)
    assert_equal(parallel_outcome(module, case, 2), single_outcome(single, 2))


def _assert_same_gradients(module: ap.ParallelModule, model: nn.Module) -> None:
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = module.full_grads()
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def put_another_shape(m: Any) -> None:
    m.a.weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))


def put_another_dtype(m: Any) -> None:
    m.scale = m.scale.float()


def untie(m: Any) -> None:
    m.c.weight = nn.Parameter(m.b.weight.detach().clone())


def parametrize(m: Any) -> None:
    nn.utils.parametrize.register_parametrization(m.a, "weight", nn.Identity(), unsafe=True)


def weight_norm(m: Any) -> None:
    nn.utils.weight_norm(m.b)


def delete_module(m: Any) -> None:
    del m.a


def put_module(m: Any) -> None:
    m.a = nn.Linear(4, 6, dtype=torch.float64)


def add_parameter(m: Any) -> None:
    m.norm.gain = nn.Parameter(torch.ones(6, dtype=torch.float64))


def delete_buffer(m: Any) -> None:
    del m.scale


def buffer_that_learns(m: Any) -> None:
    m.scale = m.scale.clone().requires_grad_()


def assign_tied(m: Any) -> None:
    m.load_state_dict(m.full_state_dict(), assign=True)


def put_whole(m: Any) -> None:
    """A plain tensor where DTensors are."""
    m.a.weight = nn.Parameter(m.full_state_dict()["a.weight"])


def set_data(m: Any) -> None:
    if at(m, "a.weight") is not None:
        m.a.weight.data = 2 * m.a.weight.detach()


def set_data_often(m: Any) -> None:
    """Memory that was let go may come again."""
    for _ in range(8):
        set_data(m)


def set_data_to_a_view(m: Any) -> None:
    m.b.weight.data = m.b.weight.detach().t()


def set_data_of_another_shape(m: Any) -> None:
    m.a.weight.data = m.a.weight.detach()[:3]


REFUSED = [
    (put_another_dtype, "is of its kind"),
    (set_data_of_another_shape, "is of its kind"),
    (untie, "stay tied"),
    (parametrize, "has the parameters and buffers of the model|are those of the model"),
    (weight_norm, "what modules do is part of the program"),
    (delete_module, "are those of the model"),
    (put_module, "are those of the model"),
    (add_parameter, "has the parameters and buffers of the model"),
    (delete_buffer, "has the parameters and buffers of the model"),
    (buffer_that_learns, "buffers take no gradient"),
    (assign_tied, "stay tied"),
]
DONE_TO_WHOLE = [set_data, set_data_often, set_data_to_a_view]  # torch ignores it on DTensors
REFUSED_OF_PIECES = [
    (put_whole, "is of its kind"),
    *((act, "a DTensor keeps its data") for act in DONE_TO_WHOLE),
]


def assert_refused(module: ap.ParallelModule, act: Callable[[Any], None], rule: str) -> None:
    """No step runs after an act; only one that was refused as a whole leaves the step as it was."""
    case, is_done = tree(), False

    def step() -> Any:
        if dist.is_initialized():  # where a rank that is refused a step leaves the world
            module._accept(case.args, {}, is_step=True)
            return None
        return module.step(*case.args)

    loss = step()
    with pytest.raises(ap.InvalidInput, match=rule):  # noqa: PT012
        act(module)
        is_done = True
        step()
    try:
        after = step()
    except ap.InvalidInput:
        return
    assert not is_done
    assert after == loss
