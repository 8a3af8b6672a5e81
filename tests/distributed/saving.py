"""A run that is saved by some ranks goes on on others as if nothing had been."""

from __future__ import annotations

import copy
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import autopar as ap
from autopar import Mesh
from tests import fused, models
from tests.models import Case
from tests.runtime.resuming import Run, assert_alike

WAYS: dict[str, dict[str, Any]] = {
    "one": {"mesh": Mesh(one=1), "backend": "virtual"},
    "zero3": {"mesh": Mesh(dp=4), "mode": "data", "states": "zero3"},
    "partial": {"mesh": Mesh(dp=4), "mode": "data", "states": ap.States(4, 2, 2)},
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
    for number, name in enumerate(("zero3", "partial", "1f1b", "tp", "one")):
        torch.manual_seed(dist.get_rank())
        run = Run(case, **WAYS[name])
        run.load(folder / f"{number}")
        if name != "one":
            form = "dcp" if name in ("zero3", "1f1b") else "autopar"
            run.save(folder / f"{number + 1}", asynchronous=name == "1f1b", format=form)
        if name == "zero3":
            plain_torch_reads(folder / f"{number + 1}", run)
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


def plain_torch_reads(path: Path, run: Run) -> None:
    """Each rank by itself, without autopar."""
    values, states = get_state_dict(*_plain_training(run.case))
    state = {"model": values, "optimizer": states}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    expected = run.module.full_state_dict()
    for name, value in state["model"].items():
        assert torch.equal(value, expected[name]), name
    whole = StateDictOptions(full_state_dict=True)
    _, full_states = get_state_dict(run.module, run.optimizer, options=whole)
    for name, values in full_states["state"].items():
        for key, value in values.items():
            assert torch.equal(state["optimizer"]["state"][name][key], value), (name, key)


def _plain_training(case: Case) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = case.fresh().model
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == wide]} for wide in (True, False)]
    return model, torch.optim.AdamW(groups)


def what_is_cut_in_parts_goes_on() -> None:
    """On processes as on one device, and from there to a plan that cuts it otherwise, and back."""
    case, folder = fused.small("fused", 4), shared_folder()
    ways = [
        {**fused.options(Mesh(dp=2, tp=2)), "states": "zero3"},
        WAYS["zero3"],
        {**fused.options(Mesh(tp=4))},
    ]
    one, runs = Run(case, **WAYS["one"]), [Run(case, **way) for way in ways]
    assert [any("@/" in str(t) for t in run.module.plan.types.values()) for run in runs] == [
        *(True, False, True)
    ]
    for number, run in enumerate(runs):
        if number:
            run.load(folder / f"{number}")
        run.train(1)
        one.train(1)
        assert_alike(run, one)
        run.save(folder / f"{number + 1}")
        state = one.module.full_state_dict()
        for name, value in run.module.named_parameters():
            torch.testing.assert_close(value.full_tensor(), state[name], rtol=0, atol=1e-12)
    dist.barrier()


def optimizers_with_states_of_other_shapes_go_on() -> None:
    """Adafactor keeps sums over rows and columns, which are DTensors with places of their own."""
    case, folder, losses = models.shared("mlp"), shared_folder(), []
    cut = {"mesh": Mesh(dp=4), "mode": "data", "states": "whole"}
    ways = [WAYS["one"], cut, WAYS["1f1b"] | {"states": "whole"}]
    modules = [ap.parallelize(case.model, case.args, **way) for way in ways]
    optimizers = [torch.optim.Adafactor(one.parameters(), lr=0.1) for one in modules]
    for number, (module, optimizer) in enumerate(zip(modules, optimizers)):
        if number == 2:
            ap.load(folder / "a", module, optimizer)
        for step in range(2 if number == 2 else 4):
            if (number, step) == (1, 2):
                ap.save(folder / "a", module, optimizer)
            losses.append(float(module.step(*case.args)))
            optimizer.step()
            optimizer.zero_grad()
    assert losses[4:8] == pytest.approx(losses[:4], rel=1e-9)
    assert losses[8:] == pytest.approx(losses[2:4], rel=1e-9)


def torch_reads_and_sets_its_state() -> None:
    """By torch.distributed.checkpoint.state_dict: in pieces or whole, of stages too, and from one
    module into another, which then goes on alike."""
    case = models.shared("mlp")
    for way in ("zero3", "1f1b"):
        runs = [Run(case, **WAYS[way]) for _ in range(2)]
        runs[0].train(1)
        for is_full in (False, True):
            module, optimizer = runs[0].module, runs[0].optimizer
            options = StateDictOptions(full_state_dict=is_full)
            whole, own = module.full_state_dict(), module.state_dict()
            values, states = get_state_dict(module, optimizer, options=options)
            assert values.keys() == own.keys() == get_model_state_dict(module).keys()
            for name, value in values.items():
                assert isinstance(value, DTensor) != is_full
                assert torch.equal(whole[name], value.full_tensor() if not is_full else value)
            on_host = StateDictOptions(full_state_dict=is_full, cpu_offload=True)
            there = get_model_state_dict(module, options=on_host)
            assert there.keys() == (own.keys() if not is_full or dist.get_rank() == 0 else set())
            set_state_dict(
                runs[1].module,
                runs[1].optimizer,
                model_state_dict=copy.deepcopy(values),
                optim_state_dict=copy.deepcopy(states),
                options=options,
            )
            for run in runs:
                run.train(1)
            whole = module.full_state_dict()
            for name, value in runs[1].module.full_state_dict().items():
                assert torch.equal(value, whole[name]), name


def ranks_save_and_load_the_same() -> None:
    """What they do apart is refused on all, by name, and nothing has changed."""
    case, folder, is_odd = models.shared("mlp"), shared_folder(), dist.get_rank() == 2
    options: dict[str, Any] = {"mesh": Mesh(dp=4), "mode": "data", "states": "zero3"}
    module = ap.parallelize(case.model, case.args, **options)
    optimizer = torch.optim.AdamW(module.parameters())
    module.step(*case.args)
    optimizer.step()
    for name in "ab":
        ap.save(folder / name, module, optimizer)
    before = module.full_state_dict()
    with pytest.raises(ap.InvalidInput, match="all ranks load one checkpoint"):
        ap.load(folder / ("b" if is_odd else "a"), module, optimizer)
    with pytest.raises(ap.InvalidInput, match="all with an optimizer or all without"):
        ap.load(folder / "a", module, None if is_odd else optimizer)
    with pytest.raises(ap.InvalidInput, match="the same call"):
        ap.save(folder / "c", module, asynchronous=is_odd)
    with pytest.raises(ap.InvalidInput, match="the same call"):
        (ap.load if is_odd else ap.save)(folder / "a", module)
    kept = optimizer.state[next(iter(module.parameters()))]
    whole = dict(kept)
    if is_odd:
        del kept["exp_avg_sq"]
    with pytest.raises(ap.InvalidInput, match="is not whole"):
        ap.save(folder / "a", module, optimizer)
    kept.update(whole)
    ap.load(folder / "a", module, optimizer)
    file = folder / "b" / "rank-1.safetensors"
    if is_odd:
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    dist.barrier()
    with pytest.raises(ap.InvalidInput, match=r"in rank-1\.safetensors has changed"):
        ap.load(folder / "b", module, optimizer)
    for name, value in module.full_state_dict().items():
        assert torch.equal(value, before[name]), name
    dist.barrier()
    assert sorted(one.name for one in folder.iterdir()) == ["a", "b"]


def whole_model_goes_through_a_file(run: Run, path: Path) -> None:
    ap.save_safetensors(path, run.module)
    options = WAYS["1f1b"] | {"weights": path}
    other = ap.parallelize(run.case.model, run.case.args, run.case.kwargs, **options)
    state = run.module.full_state_dict()
    for name, value in other.full_state_dict().items():
        assert torch.equal(value, state[name]), name
