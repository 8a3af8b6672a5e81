"""`ap.optimizer` on the virtual mesh, and what it finds out of classes of optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.runtime.optimizers.update_scope import UpdateScope, update_kind
from tests import models, optimizer_changes, optimizers
from tests.distributed.checks import tensor_parallel_gpt

O = torch.optim  # noqa: E741
CPU = torch.device("cpu")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("setting", ["zero3", "tp", "host", "pipeline", "chimera"])
@pytest.mark.parametrize("recipe", optimizers.RECIPES)
def test_updates_are_those_of_one_process(recipe: str, setting: str) -> None:
    case = tensor_parallel_gpt() if setting == "tp" else models.shared("gpt", layers=2)
    options = optimizers.SETTINGS[2][setting] | {"backend": "virtual"}
    module = optimizers.parallel(case, options)
    optimizers.assert_updates_alike(
        module, case.fresh(), optimizers.RECIPES[recipe], with_schedule=recipe != "sgd"
    )


def test_states_go_round_and_gradients_of_any_kind_are_used() -> None:
    case = models.shared("mlp")
    options = optimizers.SETTINGS[2]["zero3"] | {"backend": "virtual"}
    optimizers.assert_state_dicts_go_round(optimizers.parallel(case, options), case)
    optimizers.assert_unusual_gradients_are_used(optimizers.parallel(case, options), case)
    optimizers.assert_scaled_alike(optimizers.parallel(case, options), case)
    optimizers.assert_refused(optimizers.parallel(case, options))


@pytest.mark.parametrize("name", optimizer_changes.CHANGES)
def test_changes_are_taken_up_as_by_torch(name: str) -> None:
    case, change = models.shared("mlp"), optimizer_changes.CHANGES[name]
    options = optimizers.SETTINGS[2]["zero3"] | {"backend": "virtual"}
    module = optimizers.parallel(case, options)
    optimizer_changes.assert_changes_are_taken_up(module, case, O.AdamW, change)


def test_methods_hooks_and_states_are_those_of_torch() -> None:
    case = models.shared("mlp")
    options = optimizers.SETTINGS[2]["zero3"] | {"backend": "virtual"}
    module = optimizers.parallel(case, options)
    optimizer_changes.assert_the_users_methods_are_called(module, case)
    module.zero_grad()
    optimizer_changes.assert_loading_hooks_see_parameters(module, case)
    optimizer_changes.assert_states_are_written_before_a_step(module, case)


class Blocked(O.SGD):
    """Adds the mean of each row of gradients, of rows that are at least `least` long."""

    def __init__(self, params: Any, lr: float = 0.1, least: int = 2) -> None:
        super().__init__(params, lr=lr)
        self._least = least

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            if parameter.ndim and parameter.shape[-1] >= self._least:
                parameter.grad += parameter.grad.mean(-1, keepdim=True)
        return super().step(closure)


class Late(O.SGD):
    """Keeps sums of rows that it uses after many steps."""

    def step(self, closure: Any = None) -> Any:
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            self.state[parameter]["rows"] = parameter.grad.sum(-1)
        return super().step(closure)


class Noisy(O.SGD):
    """Draws numbers."""

    def step(self, closure: Any = None) -> Any:
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            parameter.grad += torch.randn_like(parameter)
        return super().step(closure)


ELEMENT, PARAMETER = UpdateScope.ELEMENT, UpdateScope.PARAMETER


@pytest.mark.parametrize(
    ("kind", "options", "shape", "scope"),
    [
        (O.AdamW, {"lr": 0.0}, (8, 12), ELEMENT),  # as a schedule begins
        (O.Adam, {"lr": torch.tensor(0.0), "amsgrad": True}, (8, 12), ELEMENT),
        (O.SGD, {"lr": 0.1, "momentum": 0.9}, (3,), ELEMENT),
        (O.Rprop, {}, (8, 12), ELEMENT),
        (O.NAdam, {}, (8, 12), ELEMENT),
        (O.Adafactor, {}, (8, 12), PARAMETER),
        (O.Adafactor, {}, (8,), PARAMETER),
        (O.Muon, {}, (8, 12), PARAMETER),
        (Blocked, {}, (8, 12), PARAMETER),
        (Blocked, {"least": 128}, (12, 8), ELEMENT),
        (Blocked, {"least": 128}, (12, 3000), PARAMETER),  # large ones alone
        (Late, {}, (8, 12), PARAMETER),
    ],
)
def test_what_an_update_depends_on_is_found_by_a_trial(
    kind: Any, options: dict[str, Any], shape: tuple[int, ...], scope: UpdateScope
) -> None:
    torch.manual_seed(0)
    assert update_kind(kind, options, [shape], CPU).scope == scope
    assert int(torch.randint(1000, ())) == 44, "a trial draws none of the caller's numbers"


def test_fused_kernels_are_used_unless_the_caller_chooses() -> None:
    for options, is_fused in (({}, True), ({"foreach": True}, False), ({"fused": False}, False)):
        assert update_kind(O.AdamW, options, [(4, 4)], CPU).has_fused == is_fused
    assert not update_kind(O.RMSprop, {}, [(4, 4)], CPU).has_fused


def test_what_draws_numbers_is_refused() -> None:
    with pytest.raises(ap.InvalidInput, match="or at random"):
        update_kind(Noisy, {}, [(4, 4)], CPU)


def test_the_class_and_its_messages_are_the_users() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Flatten())
    module = ap.parallelize(model, (torch.randn(4, 4),), mesh=ap.Mesh(dp=2), mode="data")
    optimizer = ap.optimizer(O.AdamW, module)
    assert type(optimizer).__name__ == "AdamW"
    assert repr(optimizer) == repr(O.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        ap.optimizer(O.Muon, module)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda made, *_: seen.extend(made.param_groups[0]["params"]))
    module(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    assert [*map(id, seen)] == [*map(id, module.parameters())]
