"""`ap.optimizer` on processes: what it computes, saves and costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar as ap
from autopar._torch.tensors import local_of
from tests import models, optimizer_changes, optimizers
from tests.distributed.checks import tensor_parallel_gpt
from tests.distributed.saving import shared_folder
from tests.models import Case
from tests.optimizers import RECIPES, SETTINGS, parallel
from tests.runtime.resuming import Run, assert_alike
from tests.sampling import some

O = torch.optim  # noqa: E741


def cases() -> list[tuple[Case, None]]:
    """What is captured before the ranks are there."""
    shared = models.shared("gpt", layers=2), models.shared("mlp"), tensor_parallel_gpt()
    return [(case, None) for case in shared]


def case_of(setting: str) -> Case:
    return tensor_parallel_gpt() if "tp" in setting else models.shared("gpt", layers=2)


def updates_like_one_process(ranks: int) -> None:
    for setting, options in SETTINGS[ranks].items():
        case = case_of(setting)
        module, begin = parallel(case, options), case.fresh().model.state_dict()
        for name, recipe in some([*RECIPES.items()], 2, setting):
            module.load_state_dict(begin)
            optimizers.assert_updates_alike(
                module, case.fresh(), recipe, with_schedule=name != "sgd"
            )


def states_go_round(ranks: int) -> None:
    for setting in ("whole", "zero3", "tp"):
        case = case_of(setting)
        optimizers.assert_state_dicts_go_round(parallel(case, SETTINGS[ranks][setting]), case)


def gradients_of_any_kind_are_used(ranks: int) -> None:
    for setting in ("whole", "zero3"):
        case, options = models.shared("mlp"), SETTINGS[ranks][setting]
        optimizers.assert_unusual_gradients_are_used(parallel(case, options), case)
        optimizers.assert_scaled_alike(parallel(case, options), case)
    optimizers.assert_refused(parallel(case, options))


def changes_are_taken_up(ranks: int) -> None:
    for setting in ("whole", "zero3"):
        case = models.shared("mlp")
        module = parallel(case, SETTINGS[ranks][setting])
        for name, change in optimizer_changes.CHANGES.items():
            for kind in (O.AdamW, O.Adafactor):
                if kind is O.AdamW or name not in optimizer_changes.OF_STATES:
                    optimizer_changes.assert_changes_are_taken_up(module, case, kind, change)
        module.zero_grad()
        optimizer_changes.assert_the_users_methods_are_called(module, case)
        module.zero_grad()
        optimizer_changes.assert_loading_hooks_see_parameters(module, case)
        optimizer_changes.assert_states_are_written_before_a_step(module, case)


def scalers_of_pipelines_are_refused(ranks: int) -> None:
    case = models.shared("mlp")
    module = parallel(case, SETTINGS[ranks]["pipeline"])
    scaler = torch.amp.GradScaler("cpu")
    for optimizer in (ap.optimizer(O.SGD, module, lr=0.1), O.SGD(module.parameters(), lr=0.1)):
        scaler.scale(module.step(*case.args, **case.kwargs))
        with pytest.raises(ap.InvalidInput, match="skipped on all ranks"):
            scaler.step(optimizer)


def goes_on_after_loading_elsewhere(ranks: int) -> None:
    """Saved with one layout and optimizer of torch or autopar, and loaded with another."""
    case, folder = models.shared("mlp"), shared_folder()
    settings = ("zero3", "pipeline", "whole", "zero1")
    for kind in ("AdamW", "Adafactor"):
        one = _run(case, kind, {"mesh": ap.Mesh(one=1), "backend": "virtual"})
        place: Path | None = None
        for number, setting in enumerate(settings):
            options = SETTINGS[ranks][setting]
            by_torch = kind == "AdamW" and setting == "pipeline"
            run = _run(case, kind, options, by_torch=by_torch)
            if place is not None:
                run.load(place)
            for each in (run, one):
                each.train(2)
            assert_alike(run, one)
            place = folder / f"{kind}{number}"
            run.save(place, asynchronous=number == 1)
            if number == 1:
                run.saving.wait()


def _run(case: Case, kind: str, options: Any, *, by_torch: bool = False) -> Run:
    run = Run(case, **options)
    settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4} if kind == "AdamW" else {"lr": 1e-2}
    run.optimizer = (
        O.AdamW(run.module.parameters(), **settings)
        if by_torch
        else ap.optimizer(getattr(O, kind), run.module, **settings)
    )
    run.schedule = O.lr_scheduler.CosineAnnealingLR(run.optimizer, 8)
    return run


def calls_what_plain_tensors_do(ranks: int) -> None:
    """Functions of Python in a step: those of torch for local tensors, and a few more."""
    case = models.shared("gpt", layers=2)
    for setting in ("whole", "zero3", "pipeline"):
        module = parallel(case, SETTINGS[ranks][setting])
        module.step(*case.args, **case.kwargs)
        alike = [local_of(parameter).detach().clone() for parameter in module.parameters()]
        for tensor, parameter in zip(alike, module.parameters()):
            assert parameter.grad is not None
            tensor.grad = local_of(parameter.grad).clone()
        updates = [ap.optimizer(O.AdamW, module), O.AdamW(alike, fused=True)]
        counts = [_calls(update) for update in updates]
        assert counts[0] < counts[1] + 60, counts


def _calls(optimizer: O.Optimizer) -> int:
    optimizer.step()
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return count


def owners_hold_states_alone(ranks: int) -> None:
    """Of a parameter in pieces one rank keeps the states of Muon; none keeps the whole tensor."""
    case = models.shared("mlp")
    module = parallel(case, SETTINGS[ranks]["zero3"])
    names = [name for name, parameter in module.named_parameters() if parameter.ndim == 2]
    optimizer: Any = ap.optimizer(O.Muon, names, module, lr=1e-2)
    module.step(*case.args, **case.kwargs)
    optimizer.step()
    (exchange,) = optimizer.exchanges
    held = [item.parameter for item in exchange.tensors if item.is_here]
    assert [*map(id, optimizer.state)] == [*map(id, held)]
    counts: list[Any] = [None] * ranks
    dist.all_gather_object(counts, len(held))
    assert sum(counts) == len(names)
    assert min(counts) > 0
    for item in exchange.tensors:
        assert item.whole.is_meta or item.whole.untyped_storage().nbytes() == 0


CHECKS = {
    2: (
        updates_like_one_process,
        states_go_round,
        gradients_of_any_kind_are_used,
        changes_are_taken_up,
        scalers_of_pipelines_are_refused,
        goes_on_after_loading_elsewhere,
        calls_what_plain_tensors_do,
        owners_hold_states_alone,
    ),
    4: (updates_like_one_process,),
}
