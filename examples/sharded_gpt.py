"""A model that is sharded within each node and replicated between nodes by one bit per parameter: Lightning.

    python examples/sharded_gpt.py

Four processes play two nodes of two ranks and train the byte-level GPT of ``text_gpt.py``: first with a warm-up that never ends, which is
dense HSDP with AdamW, then with 1-bit Adam, from the same weights on the same text. The strategy's name is all that differs from a
program for Lightning's own ``ModelParallelStrategy``. Needs torch 2.9 or newer.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from typing import Any

import torch
from sharded_torch import tensor_bytes
from text_gpt import TextData, TextGPT, pl
from torch.distributed.fsdp import fully_shard

import lightning_onebit as ob
from lightning_onebit.comm import disconnect


class ShardedGPT(TextGPT):
    """``TextGPT``, whose layers are gathered one at a time."""

    def configure_model(self) -> None:
        """Shards the model over the ranks of a node."""
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


class Measure(pl.Callback):
    """Keeps what the table says of a run."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Weights are there, gradients and state are not."""
        self.before = tensor_bytes()

    least = float("inf")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Refreshes are dense; the other steps after the freeze send least."""
        self.least = min(self.least, trainer.strategy.onebit_optimizers[0].ledger.last.bytes_sent)  # type: ignore[attr-defined]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Every rank of a node sends its own shard."""
        (optimizer,) = trainer.strategy.onebit_optimizers  # type: ignore[attr-defined]
        sent = torch.tensor([optimizer.ledger.total.bytes_sent, self.least], dtype=torch.float64)
        torch.distributed.all_reduce(sent)
        nodes = trainer.strategy.device_mesh["replicate"].size()  # type: ignore[attr-defined]
        self.run, self.step = (sent / nodes / 1e6).tolist()
        self.memory = (tensor_bytes() - self.before) / 1e6


def fit(options: argparse.Namespace, freeze_step: int) -> tuple[Any, float]:
    """Trains once; returns what was measured, and the loss on held-out text."""
    pl.seed_everything(1, workers=True)
    measure = Measure()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=ob.OnebitModelParallelStrategy("onebit_adam", replicate_size=2, freeze_step=freeze_step),
        max_steps=options.steps,
        max_epochs=-1,
        val_check_interval=options.steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[measure],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(ShardedGPT(options.layers, options.width), TextData(4, train_bytes=1 << 20, validation_windows=64))
    return measure, float(trainer.callback_metrics["val_loss"])


def main() -> None:
    """Trains twice and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps; a fifth of them is dense")
    parser.add_argument("--layers", type=int, default=2, help="transformer layers")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    rows = {
        "dense HSDP, AdamW": fit(options, options.steps + 1),
        "1-bit Adam": fit(options, max(1, options.steps // 5)),
    }
    if torch.distributed.get_rank() == 0:
        print(
            f"{'2 nodes of 2 ranks':<20}{'loss':>7}{'MB a node sent':>16}{'in the least step':>19}{'MB of state and gradients':>27}"
        )
        for name, (measured, loss) in rows.items():
            print(f"{name:<20}{loss:>7.3f}{measured.run:>16.2f}{measured.step:>19.4f}{measured.memory:>27.2f}")
    gc.collect()
    disconnect()


if __name__ == "__main__":
    main()
