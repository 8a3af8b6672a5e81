"""What others put around a model, into it, or read of it: Accelerate, peft, transformers, DDP."""

from __future__ import annotations

import copy
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar as ap
from autopar import Mesh
from autopar.runtime.parameters.weight_files import INDEX, open_weights
from examples import accelerate_loop, hf_finetune, lightning_module
from tests import models
from tests.captures import shared_captures
from tests.parity import Outcome, assert_equal


@pytest.fixture
def module() -> ap.ParallelModule:
    case = models.shared("mlp")
    return ap.parallelize(case.model, case.args, mesh=Mesh(dp=2), backend="virtual")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        FullyShardedDataParallel,
        lambda module: fully_shard(module, mesh=init_device_mesh("cpu", (1,))),
        lambda module: fully_shard(nn.Sequential(module), mesh=init_device_mesh("cpu", (1,))),
        lambda module: module._replicate_for_data_parallel(),
    ],
)
def test_nothing_is_put_around_a_parallel_module(
    wrap: Callable, module: ap.ParallelModule, world: None
) -> None:
    with pytest.raises(ap.InvalidInput, match="nothing is put around it"):
        wrap(module)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_torch_reads_and_sets_its_state(
    full: bool, on_host: bool, module: ap.ParallelModule, world: None
) -> None:
    """On virtual ranks parameters are whole tensors; also where a model holds the module."""
    case, options = (
        models.shared("mlp"),
        StateDictOptions(full_state_dict=full, cpu_offload=on_host),
    )
    optimizer = torch.optim.AdamW(module.parameters())
    module.step(*case.args)
    optimizer.step()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    values, states = get_state_dict(module, optimizer, options=options)
    holder = nn.Sequential(module)
    held = get_model_state_dict(holder, options=options)
    assert held.keys() == {f"0.{name}" for name in before}
    kept = copy.deepcopy((values, states, held))
    for other in (module, holder):
        with torch.no_grad():
            for value in module.parameters():
                value.zero_()
        if other is module:
            set_state_dict(
                module,
                optimizer,
                model_state_dict=kept[0],
                optim_state_dict=kept[1],
                options=options,
            )
        else:
            set_model_state_dict(holder, kept[2], options=options)
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name]), name
    assert (
        get_optimizer_state_dict(module, optimizer)["state"].keys()
        == dict(module.named_parameters()).keys()
    )


def test_accelerate_leaves_it_as_it_is(module: ap.ParallelModule) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    prepared, own = accelerator.prepare(module, optimizer)
    assert prepared is module
    case = models.shared("mlp")
    accelerator.backward(prepared(*case.args))
    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
    own.step()
    own.zero_grad()


def gpt2() -> transformers.GPT2LMHeadModel:
    config: dict[str, Any] = {"vocab_size": 61, "n_positions": 8, "n_embd": 32, "n_head": 4}
    tokens = {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**config, **tokens, n_layer=2, use_cache=False)
    )
    return models.made_precise(made.double())


def test_shards_are_read_by_weights_and_by_others(tmp_path: Path) -> None:
    model, ids = gpt2(), torch.randint(0, 61, (4, 8))
    call: dict[str, Any] = {"kwargs": {"input_ids": ids, "labels": ids}}
    module = ap.parallelize(model, **call, mesh=Mesh(dp=2), backend="virtual", states="zero3")
    folder = tmp_path / "model"
    ap.save_safetensors(folder, module, max_shard_size=1e9)
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
    ap.save_safetensors(folder, module, max_shard_size=50_000)
    (folder / "notes.txt").write_text("stays")
    ap.save_safetensors(folder, module, max_shard_size=100_000)
    index = json.loads((folder / INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    assert sorted(file.name for file in folder.glob("*.safetensors")) == files
    assert (folder / "notes.txt").exists()
    assert len(files) > 1
    sizes = [(folder / file).stat().st_size for file in files]
    assert all(size < 105_000 for size in sizes)
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    weights, expected = open_weights(folder), model.state_dict()
    assert weights.tensors.keys() == set(module.saved_names)
    for name, held in weights.tensors.items():
        bounds = tuple((0, size) for size in held.shape)
        assert torch.equal(weights.read(name, bounds), expected[name])
    model.config.save_pretrained(folder)
    others = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
    assert all(torch.equal(value, expected[name]) for name, value in others.state_dict().items())
    for path, size in ((folder, 0), (folder, "5GB"), (folder / "notes.txt", 1e9)):
        with pytest.raises(ap.InvalidInput, match="shards are files of at most so many bytes"):
            ap.save_safetensors(path, module, max_shard_size=size)  # type: ignore[arg-type]


@cache
def adapted() -> nn.Module:
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    torch.manual_seed(1)
    return peft.get_peft_model(gpt2(), config).double()


IDS = torch.arange(32).view(4, 8) % 61
CALL = {"input_ids": IDS, "labels": IDS}


def adaptation(**options: Any) -> Outcome:
    """What three steps of it leave behind."""
    module = ap.parallelize(adapted(), kwargs=CALL, **options, backend="virtual")
    learning = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert learning
    assert all("lora_" in name for name in learning)
    optimizer = torch.optim.AdamW(learning.values(), lr=1e-2)
    torch.manual_seed(3)
    losses, gradients = [], {}
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(module.step(**CALL))
        gradients = module.full_grads()
        optimizer.step()
    assert gradients.keys() == learning.keys()
    return Outcome(losses, gradients, module.full_state_dict())


def test_the_example_of_fine_tuning_measures_the_same_on_every_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it prints: losses in training, of unseen text in evaluation, and the accuracy there."""
    build = hf_finetune.build
    monkeypatch.setattr(hf_finetune, "build", lambda lora: models.made_precise(build(lora)))
    monkeypatch.setattr(hf_finetune, "STEPS", 4)
    monkeypatch.setattr(hf_finetune, "EVERY", 2)
    asked = {"lora": False, "folder": None, "float64": True}

    def measured(states: str = "whole", **mesh: int) -> Any:
        return hf_finetune.train(Namespace(mesh=mesh, states=states, **asked))

    one = measured(one=1)
    assert [*one[3]] == ["loss", "unseen", "accuracy"]
    for found in (measured("zero3", dp=2, tp=2), measured(pp=2, dp=2)):
        for step, expected in one.items():
            assert found[step] == pytest.approx(expected, rel=1e-9)


def test_adapters_of_peft_learn_as_on_one_device(tmp_path: Path) -> None:
    """On a frozen base, with dropout in both; the adapter alone is saved as peft reads it."""
    with shared_captures():
        one = adaptation(mesh=Mesh(one=1))
        for options in (
            {"mesh": Mesh(dp=2, tp=2)},
            {"mesh": Mesh(dp=4), "mode": "data", "states": "zero3"},
            {"mesh": Mesh(pp=2, dp=2), "mode": "data", "microbatches": 2},
        ):
            found = adaptation(**options)
            assert_equal(found, one, tolerance=1e-9)
    adapted().save_pretrained(tmp_path, state_dict=found.state)
    again = peft.PeftModel.from_pretrained(gpt2(), tmp_path)
    saved = peft.get_peft_model_state_dict(again)
    for name, value in peft.get_peft_model_state_dict(adapted(), found.state).items():
        assert torch.equal(saved[name], value.to(saved[name].dtype))


@pytest.mark.parametrize("states", ["whole", "zero3"])
def test_lightning_trains_as_without_autopar(states: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = lightning_module.fit(lightning_module.Writer()).losses
    assert expected[-1] < expected[0] / 4
    assert lightning_module.train(tmp_path, states) == pytest.approx(expected, rel=1e-4)


def test_accelerate_trains_and_generates_as_without_autopar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = accelerate_loop.train(tmp_path / "parallel", "zero2")
    monkeypatch.setattr(ap, "parallelize", lambda model, **_: model)
    monkeypatch.setattr(ap, "save", lambda *_: None)
    alone = accelerate_loop.train(tmp_path / "alone")
    assert parallel["written"] == alone["written"] == [*range(8)]
    assert parallel["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    models_saved = [tmp_path / name / "model" for name in ("parallel", "alone")]
    trained = [transformers.LlamaForCausalLM.from_pretrained(path) for path in models_saved]
    for ours, theirs in zip(*(model.parameters() for model in trained), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
