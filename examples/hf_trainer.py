"""The Trainer of transformers on a parallel module: its evaluation, saving, resuming and logging.

    python examples/hf_trainer.py --mesh dp=2 run/trainer

Here ranks are virtual; started by `torchrun --nproc-per-node 2` in place of `python`, they are
processes. A batch of the Trainer's is the whole one, which every rank is given. Checkpoints are
resumed on any mesh, and their folders are read by `from_pretrained`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import autopar as ap

INSTEAD = {  # of what the Trainer would do to a model, or with its outputs in training
    "label_smoothing_factor": "a loss of the model's own",
    "compute_loss_func": "a loss of the model's own",
    "neftune_noise_alpha": "an embedding of the model's own",
    "bf16": "options={'precision': ap.Precision(compute=torch.bfloat16)}",
    "fp16": "options={'precision': ap.Precision(compute=torch.float16, loss_scale='dynamic')}",
    "torch_compile": "options={'compile': True}",
    "gradient_checkpointing": "options={'recompute': 'auto'}",
}


def refuse(args: TrainingArguments, others: dict[str, Any]) -> None:
    """Before anything is built: what would be passed over."""
    for name, instead in INSTEAD.items():
        if value := others.get(name, getattr(args, name, None)):
            raise ValueError(f"{name}={value!r} is not for a parallel module: {instead}")


class ParallelTrainer(Trainer):
    """`options` are those of `ap.parallelize`; `example` is a batch."""

    model: ap.ParallelModule
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: PreTrainedModel,
        example: dict,
        options: dict,
        args: TrainingArguments,
        **others: Any,
    ) -> None:
        refuse(args, others)
        args.average_tokens_across_devices = False  # each rank counts those of the whole batch
        self.plain = model
        parallel = ap.parallelize(model, kwargs=example, **options)
        super().__init__(parallel, args, **others, callbacks=[NextEpoch()])

    def create_accelerator_and_postprocess(self) -> None:
        """Batches and what is evaluated are whole on every rank: nothing is dealt or gathered."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_data_loader = lambda loader, *_, **__: loader
        self.accelerator.gather_for_metrics = lambda found, *_, **__: found

    def _get_train_sampler(self, dataset: Any = None) -> DistributedSampler:
        """The same order on all ranks, another in each epoch."""
        rows: Any = self.train_dataset if dataset is None else dataset
        return DistributedSampler(rows, num_replicas=1, rank=0, seed=self.args.seed)

    def _wrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model

    def training_step(self, model: Any, inputs: dict, num_items_in_batch: Any = None) -> Tensor:
        """The model's loss is a mean over the labels of a batch, of a model that is told how many
        there are until the next update the Trainer's is one over those."""
        model.train()
        inputs, scale = self._prepare_inputs(inputs), 1 / self.current_gradient_accumulation_steps
        if num_items_in_batch is not None:
            labels = inputs["labels"][..., 1:]  # those that are predicted
            scale = float((labels != -100).sum() / num_items_in_batch)
        return model.step(**inputs, scale=scale) * scale

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return model.clip_grad_norm_(self.args.max_grad_norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = output_dir or str(self.args.output_dir)
        ap.save_safetensors(folder, self.model, max_shard_size=5e9)
        if self.args.should_save:
            self.plain.config.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer, extra = self.optimizer.optimizer, self.lr_scheduler.state_dict()
        ap.save(Path(output_dir, "autopar"), self.model, optimizer, extra=extra)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            path = Path(checkpoint, "autopar")
            self.lr_scheduler.load_state_dict(ap.load(path, self.model, self.optimizer.optimizer))
            self.random = torch.get_rng_state()

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        """All is loaded when the optimizer is there, too."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Of one that is resumed, when its first batches have been passed over."""
        torch.set_rng_state(self.random)

    def _load_best_model(self) -> None:
        ap.load(Path(str(self.state.best_model_checkpoint), "autopar"), self.model)


class NextEpoch(TrainerCallback):
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        known["train_dataloader"].sampler.set_epoch(int(state.epoch or 0))


def rows(seed: int, count: int) -> list[dict[str, Tensor]]:
    """Sums, as bytes."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 50, (count, 8, 2), generator=random).tolist()
    lines = ["".join(f"{a}+{b}={a + b};" for a, b in line)[:32].encode() for line in numbers]
    return [{"input_ids": ids, "labels": ids} for ids in map(torch.tensor, map(list, lines))]


def accuracy(found: Any) -> dict[str, float]:
    hits = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
    return {"accuracy": float(hits.mean())}


def train(folder: str, mesh: dict[str, int], **arguments: Any) -> list[dict[str, float]]:
    """What the Trainer has logged."""
    asked: dict[str, Any] = {"max_steps": 20, "learning_rate": 3e-3, "lr_scheduler_type": "cosine"}
    asked |= dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), 5)
    asked |= {"eval_strategy": "steps", "report_to": [], "disable_tqdm": True} | arguments
    args = TrainingArguments(folder, use_cpu=not torch.cuda.is_available(), **asked)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 32}
    tokens: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
    trainer = ParallelTrainer(
        GPT2LMHeadModel(GPT2Config(**sizes, **tokens, use_cache=False)),
        example=default_data_collator(rows(0, 8)),
        options={"mesh": ap.Mesh(**mesh)},
        args=args,
        train_dataset=rows(1, 100),
        eval_dataset=rows(2, 12),
        compute_metrics=accuracy,
    )
    whole = (path.parent for path in Path(folder).glob("checkpoint-*/trainer_state.json"))
    last = max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    return trainer.state.log_history


def read_mesh(axes: str) -> dict[str, int]:
    return {name: int(size) for name, size in (axis.split("=") for axis in axes.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="of checkpoints")
    parser.add_argument("--mesh", type=read_mesh, default={"one": 1})
    options = parser.parse_args()
    train(options.folder, options.mesh)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
