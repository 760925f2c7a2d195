"""Train a masked language model at large batches with 1-bit LAMB: few steps, each of many accumulated micro-batches.

    python examples/bert_mlm_lamb.py
    python examples/bert_mlm_lamb.py --accumulate 32 --lr 0.06

A byte-level encoder in the manner of BERT on the text of the Python standard library: 15 % of the bytes are to be
guessed; of these 80 % are hidden, 10 % exchanged and 10 % left as they are. Gradients are exchanged once per step,
whatever the number of micro-batches, so that large batches and compression save alike.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

try:
    import lightning.pytorch as pl
except ModuleNotFoundError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

from data import VOCABULARY, available_cores
from text_gpt import TextData, replicas_identical

import lightning_onebit as ob

HIDDEN = VOCABULARY
"""The token that stands for a hidden byte."""


def hide(tokens: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Choose what is to be guessed (BERT, arXiv 1810.04805, section 3.1).

    Args:
        tokens: int64, shape ``(batch, time)``.
        generator: Source of the draws; torch's global one if None.

    Returns:
        Inputs, int64 of the same shape, and a mask that is True where the original is to be guessed.
    """
    kind = torch.rand(tokens.shape, generator=generator)
    others = torch.randint(VOCABULARY, tokens.shape, generator=generator)
    guessed = (kind < 0.15).to(tokens.device)
    inputs = tokens.masked_fill((kind < 0.12).to(tokens.device), HIDDEN)
    exchanged = ((kind >= 0.12) & (kind < 0.135)).to(tokens.device)
    return torch.where(exchanged, others.to(tokens.device), inputs), guessed


class MaskedLM(pl.LightningModule):
    """An encoder over bytes.

    Args:
        layers: Transformer layers.
        width: Size of the residual stream.
        heads: Attention heads per layer.
        context: Bytes per window.
        lr: Peak learning rate of LAMB: its steps are relative to the size of the weights.
        warmup_steps: Steps over which the learning rate rises linearly; a line down to a tenth follows.
    """

    def __init__(self, layers: int, width: int, heads: int, context: int, lr: float, warmup_steps: int) -> None:
        super().__init__()
        self.lr, self.warmup_steps = lr, warmup_steps
        self.token = nn.Embedding(VOCABULARY + 1, width)
        self.position = nn.Parameter(0.1 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def loss(self, windows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Mean cross-entropy, nats per guessed byte, of windows of shape ``(batch, context + 1)``."""
        tokens = windows[:, :-1]
        inputs, guessed = hide(tokens, generator)
        states = self.encoder(self.token(inputs) + self.position)
        return F.cross_entropy(self.head(states[guessed]), tokens[guessed])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """One micro-batch."""
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """The same bytes are hidden in every validation."""
        generator = torch.Generator().manual_seed(batch_idx)
        self.log("val_loss", self.loss(batch, generator), sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        """1-bit LAMB; norms and biases, as usual with LAMB, without weight decay."""
        strategy: Any = self.trainer.strategy
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = strategy.optimizer(
            [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], lr=self.lr
        )
        total = int(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            rise = (step + 1) / self.warmup_steps
            return min(rise, max(0.1, (total - step) / max(1, total - self.warmup_steps)))

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}


def main(arguments: list[str] | None = None) -> None:
    """Train and validate."""
    options = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = options.add_argument
    add("--accelerator", default="cpu", help="Lightning accelerator")
    add("--devices", type=int, default=2, help="processes")
    add("--steps", type=int, default=80, help="optimizer steps")
    add("--batch-size", type=int, default=16, help="windows per process and micro-batch")
    add("--accumulate", type=int, default=8, help="micro-batches per step")
    add("--context", type=int, default=64, help="bytes per window")
    add("--layers", type=int, default=2, help="transformer layers")
    add("--width", type=int, default=128, help="size of the residual stream")
    add("--heads", type=int, default=4, help="attention heads")
    add("--lr", type=float, default=0.03, help="peak learning rate")
    add(
        "--freeze-fraction",
        type=float,
        default=0.25,
        help="share of the steps that is dense: a hundred steps at least, where a run has them",
    )
    add("--train-bytes", type=int, default=4 << 20, help="bytes of training text")
    chosen = options.parse_args(arguments)

    torch.set_num_threads(max(1, available_cores() // chosen.devices))
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    pl.seed_everything(1, workers=True)
    trainer = pl.Trainer(
        accelerator=chosen.accelerator,
        devices=chosen.devices,
        strategy="onebit_lamb",
        max_steps=chosen.steps,
        max_epochs=-1,
        accumulate_grad_batches=chosen.accumulate,
        val_check_interval=chosen.steps * chosen.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[
            ob.callbacks.VarianceFreeze(chosen.freeze_fraction),
            ob.callbacks.CompressionStats(),
            ob.callbacks.ReplicaConsistency(),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    model = MaskedLM(chosen.layers, chosen.width, chosen.heads, chosen.context, chosen.lr, max(1, chosen.steps // 10))
    trainer.fit(model, TextData(chosen.batch_size, chosen.context, chosen.train_bytes))
    identical = replicas_identical(model)
    if trainer.is_global_zero:
        windows = chosen.batch_size * chosen.accumulate * trainer.world_size
        print(f"{windows} windows per step, replicas {'identical' if identical else 'DIFFERENT'}")
        print(f"validation loss {trainer.callback_metrics['val_loss']:.4f} nats per hidden byte")


if __name__ == "__main__":
    main()
