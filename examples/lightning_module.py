"""A LightningModule whose net is a parallel module; the lines that are autopar's are marked.

    python examples/lightning_module.py run/lightning
    torchrun --nproc-per-node 2 examples/lightning_module.py --states zero2 run/lightning

Lightning trains as in one process: each rank gives the whole batch, of which it computes its part.
It optimizes, clips, evaluates and logs as it always does. Checkpoints are autopar's, which any
number of ranks reads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import autopar as ap

WIDTH, LENGTH, EPOCHS = 32, 8, 4


class Writer(nn.Module):
    """A net that tells the next letter from those so far."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(26, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, 26)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.out(self.block(x, src_mask=mask, is_causal=True))


class Training(lightning.LightningModule):
    """The loss, the optimizer, and what is logged."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []  # of the evaluations

    def loss(self, batch: list[Tensor]) -> Tensor:
        (letters,) = batch
        return F.cross_entropy(self.net(letters)[:, :-1].flatten(0, 1), letters[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("evaluation", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["evaluation"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def loader(seed: int, count: int) -> DataLoader:
    """Return lines of the alphabet, in the same order on all ranks."""
    starts = torch.randint(0, 26, (count, 1), generator=torch.Generator().manual_seed(seed))
    rows = TensorDataset((starts + torch.arange(LENGTH)) % 26)
    return DataLoader(rows, batch_size=8, generator=torch.Generator().manual_seed(seed))


def fit(net: nn.Module) -> Training:
    """Train a net, parallel or not, as Lightning does."""
    training = Training(net)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,  # of this process: its ranks belong to autopar
        use_distributed_sampler=False,
        max_epochs=EPOCHS,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        logger=False,
    )
    trainer.fit(training, loader(1, 64), loader(2, 16))
    return training


def train(folder: Path, states: Any = "whole") -> list[float]:
    """Return the losses of the evaluations."""
    torch.manual_seed(0)
    example = next(iter(loader(1, 8)))
    net = ap.parallelize(Writer(), tuple(example), mode="data", states=states)  # autopar
    training = fit(net)
    ap.save(folder / "last", net, training.trainer.optimizers[0])  # autopar
    return training.losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--states", default="whole")
    arguments = parser.parse_args()
    for epoch, loss in enumerate(train(arguments.folder, arguments.states)):
        print(f"epoch {epoch}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
