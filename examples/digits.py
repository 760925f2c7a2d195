"""Classify handwritten digits with any strategy by name: the smallest complete program.

    python examples/digits.py
    python examples/digits.py --strategy zero_one_adam
    python examples/digits.py --strategy ddp

The data come with scikit-learn.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

try:
    import lightning.pytorch as pl
except ModuleNotFoundError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

from data import load_digits

import lightning_onebit as ob


class Digits(pl.LightningModule):
    """A perceptron over 8x8 images.

    Args:
        width: Size of the hidden layers.
        lr: Learning rate.
    """

    def __init__(self, width: int = 96, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, 10)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of a batch."""
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log loss and accuracy, averaged over all ranks."""
        images, labels = batch
        logits = self.net(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        self.log_dict({"val_loss": F.cross_entropy(logits, labels), "val_accuracy": accuracy}, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the strategy's algorithm; AdamW where the strategy has none of its own (``ddp``)."""
        make: Any = getattr(self.trainer.strategy, "optimizer", torch.optim.AdamW)
        optimizer: torch.optim.Optimizer = make(self.parameters(), lr=self.lr, weight_decay=0.01)
        return optimizer


def main(arguments: list[str] | None = None) -> None:
    """Train, validate, say how it went."""
    options = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument(
        "--strategy", default="onebit_adam", help="ddp, onebit_adam, onebit_lamb, zero_one_adam, binsgdm"
    )
    options.add_argument("--accelerator", default="cpu", help="Lightning accelerator")
    options.add_argument("--devices", type=int, default=2, help="processes")
    options.add_argument("--epochs", type=int, default=20, help="passes over the data")
    options.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    options.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    chosen = options.parse_args(arguments)

    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the images are in memory
    pl.seed_everything(1, workers=True)
    # Nothing says when the warm-up ends: the strategy adds the automatic freeze, after 10 to 20 % of the steps.
    callbacks: list[pl.Callback] = (
        [ob.callbacks.CompressionStats()] if chosen.strategy in ob.available_strategies() else []
    )
    trainer = pl.Trainer(
        accelerator=chosen.accelerator,
        devices=chosen.devices,
        strategy=chosen.strategy,
        max_epochs=chosen.epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    train, validation = load_digits()
    trainer.fit(
        Digits(lr=chosen.lr),
        DataLoader(train, chosen.batch_size, shuffle=True, drop_last=True),
        DataLoader(validation, 256),
    )
    if trainer.is_global_zero:
        found = trainer.callback_metrics
        print(f"validation loss {found['val_loss']:.4f}, accuracy {100 * found['val_accuracy']:.1f} %")


if __name__ == "__main__":
    main()
