"""A training loop of Accelerate on a parallel module; the lines that are autopar's are marked.

    python examples/accelerate_loop.py run/accelerate
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --states zero3 run/accelerate

It trains, evaluates, generates, and saves a checkpoint and what `from_pretrained` reads. Loaders
are not prepared: each rank gives the whole batch, of which it computes its part. `split_batches`
tells Accelerate so; otherwise a prepared schedule goes on by a step for each process.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import autopar as ap

SIZES: dict[str, Any] = {
    "vocab_size": 26,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
EPOCHS = 3


def loader(seed: int, count: int) -> DataLoader:
    """Return lines of the alphabet, in the same order on all ranks."""
    starts = torch.randint(0, 26, (count, 1), generator=torch.Generator().manual_seed(seed))
    lines = (starts + torch.arange(16)) % 26
    rows: Any = [{"input_ids": line, "labels": line} for line in lines]
    return DataLoader(rows, batch_size=8, generator=torch.Generator().manual_seed(seed))


def train(folder: Path, states: Any = "whole") -> dict[str, Any]:
    """Return the loss of the evaluation, and what the model goes on to write."""
    whole = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=whole)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False, eos_token_id=None))
    training, evaluation = loader(1, 64), loader(2, 16)

    batch = next(iter(evaluation))
    parallel = ap.parallelize(model, kwargs=batch, mode="data", states=states)  # autopar
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 4, EPOCHS * len(training))
    parallel, optimizer, schedule = accelerator.prepare(parallel, optimizer, schedule)
    for epoch in range(EPOCHS):
        parallel.train()
        for batch in training:
            loss = parallel(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(parallel.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    parallel.eval()
    with torch.no_grad():
        losses = [parallel(**batch).loss for batch in evaluation]
    loss = torch.stack(losses).mean().item()
    prompt = torch.arange(4)[None]
    written = parallel.generate(prompt, max_new_tokens=4, do_sample=False)[0].tolist()
    ap.save(folder / "checkpoint", parallel, optimizer.optimizer)  # autopar
    accelerator.unwrap_model(parallel).save_pretrained(folder / "model")
    accelerator.print(f"evaluated: loss {loss:.3f}, {written}")
    accelerator.end_training()
    return {"loss": loss, "written": written}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--states", default="whole")
    arguments = parser.parse_args()
    train(arguments.folder, arguments.states)


if __name__ == "__main__":
    main()
