"""Pre-train a byte-level GPT on Python source with 1-bit Adam, then fine-tune the checkpoint on English with 0/1 Adam.

    python examples/finetune.py

The two runs use different algorithms, so only the weights are taken over; fine-tuning starts with a fresh optimizer.
(The *same* run goes on from a checkpoint with ``trainer.fit(..., ckpt_path=...)``, residuals included.)
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

try:
    import lightning.pytorch as pl
except ModuleNotFoundError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

from data import TextWindows, available_cores, load_manual
from text_gpt import TextData, TextGPT, replicas_identical

import lightning_onebit as ob


def trainer_for(strategy: Any, steps: int, devices: int, callbacks: list[Any]) -> pl.Trainer:
    """What both runs share."""
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[ob.callbacks.CompressionStats(), *callbacks],
        logger=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


@torch.no_grad()
def mean_loss(model: TextGPT, text: Tensor, context: int, windows: int) -> float:
    """Mean loss, nats per byte, over the first windows of a text."""
    data = TextWindows(text, context, windows)
    return float(model.loss(torch.stack([data[i] for i in range(len(data))])))


def main(arguments: list[str] | None = None) -> None:
    """Pre-train, save, load, fine-tune."""
    options = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = options.add_argument
    add("--devices", type=int, default=2, help="processes")
    add("--steps", type=int, default=150, help="steps of pre-training")
    add("--tune-steps", type=int, default=100, help="steps of fine-tuning")
    add("--batch-size", type=int, default=8, help="windows per process")
    add("--context", type=int, default=64, help="bytes per window")
    add("--layers", type=int, default=2, help="transformer layers")
    add("--width", type=int, default=128, help="size of the residual stream")
    add("--out", type=Path, default=Path("demo_out/finetune"), help="folder for the checkpoint")
    chosen = options.parse_args(arguments)

    torch.set_num_threads(max(1, available_cores() // chosen.devices))
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    pl.seed_everything(1, workers=True)

    trainer = trainer_for("onebit_adam", chosen.steps, chosen.devices, [ob.callbacks.VarianceFreeze(0.2)])
    trainer.fit(TextGPT(chosen.layers, chosen.width, lr=4e-3), TextData(chosen.batch_size, chosen.context))
    path = chosen.out / "pretrained.ckpt"
    trainer.save_checkpoint(path)  # and beside it, in a folder, the residuals of each rank

    # The optimizer of the strategy this time: 0/1 Adam, gentler. Hyperparameters come from the checkpoint.
    model = TextGPT.load_from_checkpoint(path, lr=1e-3, warmup_steps=5, optimizer="strategy")
    train, validation = load_manual()
    before = mean_loss(model, validation, chosen.context, 256)
    quarter = max(1, chosen.tune_steps // 4)
    strategy = ob.OnebitStrategy("zero_one_adam", freeze_step=quarter)
    trainer = trainer_for(strategy, chosen.tune_steps, chosen.devices, [])
    trainer.fit(model, DataLoader(TextWindows(train, chosen.context), chosen.batch_size, shuffle=True, drop_last=True))
    identical = replicas_identical(model)
    if trainer.is_global_zero:
        after = mean_loss(model, validation, chosen.context, 256)
        print(f"loss on held-out English: {before:.4f} before, {after:.4f} after fine-tuning (nats per byte)")
        print(f"replicas {'identical' if identical else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
