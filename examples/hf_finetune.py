"""GPT-2 of transformers, fine-tuned by a plain loop in bfloat16, whole or by adapters.

    python examples/hf_finetune.py
    torchrun --nproc-per-node 2 examples/hf_finetune.py --mesh dp=2 --states zero3 --folder run/gpt2

What it measures is the same on every mesh, as `--mesh dp=2,tp=2` or `--mesh pp=2,dp=2` on four
ranks; without `torchrun` they are virtual. It saves checkpoints into `--folder`, and goes on from
the last one there that is whole, on any mesh. With `--lora` adapters of peft learn alone. The lines
that are autopar's are marked.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

import autopar as ap

STEPS, EVERY, SEQUENCE = 20, 5, 32
Measured = dict[int, dict[str, float]]  # by step


def text(seed: int, rows: int) -> dict[str, Tensor]:
    """Sums, as bytes: the same on every rank, which gives the whole batch."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 50, (rows, SEQUENCE // 4, 2), generator=random).tolist()
    lines = ["".join(f"{a}+{b}={a + b};" for a, b in line) for line in numbers]
    ids = torch.tensor([list(line.encode()[:SEQUENCE]) for line in lines])
    return {"input_ids": ids, "labels": ids}


def build(lora: bool) -> nn.Module:
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": SEQUENCE}
    tokens: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, use_cache=False))
    if lora:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
        model = get_peft_model(model, adapter)
    return model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Of what learns, matrices decay, and norms and biases do not."""
    found: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found["ln_" not in name and not name.endswith("bias")].append(parameter)
    return [
        {"params": found[True], "weight_decay": 0.1},
        {"params": found[False], "weight_decay": 0.0},
    ]


@torch.no_grad()
def evaluate(model: nn.Module) -> dict[str, float]:
    """The loss of other text, and the part of its bytes that is foreseen."""
    model.eval()
    batch = text(seed=-1, rows=16)
    found = model(**batch)
    model.train()
    hits = found.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
    return {"unseen": found.loss.item(), "accuracy": hits.double().mean().item()}


def train(options: argparse.Namespace) -> Measured:
    how: dict[str, Any] = {"mesh": ap.Mesh(**options.mesh), "states": options.states}
    if not options.float64:
        how["precision"] = ap.Precision(compute=torch.bfloat16)
    torch.manual_seed(0)
    plain = build(options.lora)
    plain = plain.double() if options.float64 else plain
    model = ap.parallelize(plain, kwargs=text(0, rows=8), **how)  # autopar: on a mesh
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, STEPS // 10, STEPS)
    first, measured = 0, {}
    if options.folder and ap.is_saved(options.folder):
        extra = ap.load(options.folder, model, optimizer)  # autopar: from any other mesh
        first, measured = extra["step"], extra["measured"]
        schedule.load_state_dict(extra["schedule"])
    for step in range(first, STEPS):
        loss = model.step(**text(step, rows=8))  # autopar: for model(...).loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        measured[step] = {"loss": loss.item()}
        if (step + 1) % EVERY == 0:
            measured[step] |= evaluate(model)
            if options.folder:
                extra = {"step": step + 1, "measured": measured, "schedule": schedule.state_dict()}
                ap.save(options.folder, model, optimizer, extra=extra, asynchronous=True)
        if not dist.is_initialized() or dist.get_rank() == 0:
            said = "  ".join(f"{name} {value:.4f}" for name, value in measured[step].items())
            print(f"step {step + 1}: {said}", flush=True)
    return measured


def read_mesh(axes: str) -> dict[str, int]:
    return {name: int(size) for name, size in (axis.split("=") for axis in axes.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", type=read_mesh, default={"one": 1})
    parser.add_argument("--states", default="whole")
    parser.add_argument("--lora", action="store_true", help="train adapters of peft")
    parser.add_argument("--folder", help="of checkpoints")
    parser.add_argument("--float64", action="store_true", help="compute without rounding")
    train(parser.parse_args())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
