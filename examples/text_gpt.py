"""Train a byte-level GPT of 3.3 M parameters on the text of the Python standard library.

    python examples/text_gpt.py --strategy ddp
    python examples/text_gpt.py --strategy onebit_adam

The model, the data order, AdamW and its schedule are the same in both; the strategy's name is the only difference.
``examples/demo.py`` runs both and compares them. Works with ``lightning`` and with ``pytorch_lightning``.
"""

from __future__ import annotations

import argparse
import csv
import gc
import hashlib
import json
import math
import statistics
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import TQDMProgressBar
except ModuleNotFoundError:
    import pytorch_lightning as pl  # type: ignore[no-redef]
    from pytorch_lightning.callbacks import TQDMProgressBar  # type: ignore[assignment]

from data import VOCABULARY, TextWindows, available_cores, load_corpus

import lightning_onebit as ob
from lightning_onebit.comm import disconnect


def rotate(x: Tensor) -> Tensor:
    """Turn queries or keys by their position (rotary embedding, arXiv 2104.09864).

    Args:
        x: Shape ``(..., time, size)``, ``size`` even.

    Returns:
        The same shape. Scores of rotated queries and keys depend on the distance of their positions only.
    """
    steps, half = x.shape[-2], x.shape[-1] // 2
    rates = 1e4 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(steps, device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Block(nn.Module):
    """One pre-norm transformer layer: causal self-attention, then a feed-forward network of four times the width.

    Args:
        width: Size of the residual stream.
        heads: Attention heads; must divide ``width``.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, width)`` to the same shape."""
        batch, steps, width = x.shape
        heads = self.query_key_value(self.norm_attention(x)).view(batch, steps, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, steps, width))
        return x + self.feed_forward(self.norm_feed_forward(x))


class TextGPT(pl.LightningModule):
    """A small GPT over bytes.

    Args:
        layers: Transformer layers.
        width: Size of the residual stream.
        heads: Attention heads per layer.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay.
        warmup_steps: Steps over which the learning rate rises linearly; a cosine to a tenth of ``lr`` follows.
        optimizer: ``"adamw"``: plain AdamW, which DDP trains as it is and compressing strategies convert if they can;
            ``"strategy"``: the one that the strategy's own factory makes.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 256,
        heads: int = 4,
        lr: float = 2e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 20,
        optimizer: Literal["adamw", "strategy"] = "adamw",
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"heads={heads}: width={width} must be a multiple of twice their number; choose another")
        self.save_hyperparameters()
        self.lr, self.weight_decay, self.warmup_steps = lr, weight_decay, warmup_steps
        self.optimizer = optimizer
        self.token = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.02)
        for name, parameter in self.blocks.named_parameters():
            if parameter.dim() == 2:
                # What writes into the residual stream starts smaller, so that its variance does not grow with depth.
                writes = name.endswith(("project.weight", "feed_forward.2.weight"))
                nn.init.normal_(parameter, std=(2 * layers * width if writes else width) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next byte.

        Args:
            tokens: int64, shape ``(batch, time)``.

        Returns:
            Logits of shape ``(batch, time, 256)``.
        """
        return self.head(self.norm(self.blocks(self.token(tokens))))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte over windows of shape ``(batch, time + 1)``."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """One micro-batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the validation loss, averaged over all ranks."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        """Optimizer and learning-rate schedule."""
        strategy: Any = self.trainer.strategy
        make = torch.optim.AdamW if self.optimizer == "adamw" else strategy.optimizer
        optimizer = make(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        total = max(1, int(self.trainer.estimated_stepping_batches))

        def factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            done = min(1.0, (step - self.warmup_steps) / max(1, total - self.warmup_steps))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}


class TextData(pl.LightningDataModule):
    """Windows of the standard library's text; training windows are shuffled by the trainer's seed.

    Args:
        batch_size: Windows per process and micro-batch.
        context: Bytes per window.
        train_bytes: Training text, in bytes.
        validation_windows: Windows of held-out files used by each validation, over all processes.
    """

    def __init__(
        self, batch_size: int = 8, context: int = 128, train_bytes: int = 4 << 20, validation_windows: int = 256
    ) -> None:
        super().__init__()
        self.batch_size, self.context = batch_size, context
        self.train_bytes, self.validation_windows = train_bytes, validation_windows

    def setup(self, stage: str) -> None:
        """Read the text."""
        needed = self.validation_windows * self.context + 1
        train, validation = load_corpus(self.train_bytes, needed)
        self.train = TextWindows(train, self.context)
        self.validation = TextWindows(validation, self.context, self.validation_windows)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled training windows."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Validation windows in order."""
        return DataLoader(self.validation, 2 * self.batch_size)


def replicas_identical(module: nn.Module) -> bool:
    """Compare a hash of all weights and buffers over the ranks; every rank must call it.

    Returns:
        Whether every rank holds bitwise the same model.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if not torch.distributed.is_initialized():
        return True
    digests: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


def ring_all_reduce_bytes(module: nn.Module, ranks: int) -> int:
    """Bytes one rank sends when DDP averages the gradients of ``module`` once: ``2 (n-1)/n * sum(bytes)``."""
    gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return 2 * (ranks - 1) * gradients // ranks


# Strategies whose optimizer has no dense warm-up to end, and those that AdamW cannot be converted to.
WITHOUT_WARM_UP = ("binsgdm", "birder")
NO_ADAM = ("onebit_lamb", *WITHOUT_WARM_UP)


class Recorder(pl.Callback):
    """Keep loss, bytes sent and time per optimizer step, and write them as ``metrics.csv`` and ``result.json``.

    Bytes are those one rank has sent for gradients: taken from the byte ledger under a compressing strategy, and
    counted by the formula of a ring all-reduce under DDP, which keeps no count of its own.

    Args:
        out: Folder to write to; made if missing. Rank 0 writes.
        settings: Written into ``result.json`` as they are.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.out, self.settings = out, dict(settings)
        self.rows: list[dict[str, Any]] = []
        self._clock = 0.0

    def bytes_sent(self, trainer: pl.Trainer) -> int:
        """Bytes this rank has sent so far for gradients, momentum and the small agreement rounds."""
        compressed = getattr(trainer.strategy, "onebit_optimizers", [])
        if compressed:
            totals = [optimizer.ledger.total for optimizer in compressed]
            return sum(total.bytes_sent + total.control_bytes for total in totals)
        return trainer.global_step * ring_all_reduce_bytes(trainer.lightning_module, trainer.world_size)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock."""
        self._clock = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add a row."""
        seconds = time.perf_counter() - self._clock
        loss = float(outputs["loss"]) * trainer.accumulate_grad_batches
        if self.rows and self.rows[-1]["step"] == trainer.global_step:  # a micro-batch that did not step
            self.rows[-1]["seconds"] += seconds
            return
        self.rows.append(
            {
                "step": trainer.global_step,
                "train_loss": loss,
                "val_loss": None,
                "bytes_sent": self.bytes_sent(trainer),
                "seconds": seconds,
            }
        )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the validation loss to the row of its step."""
        if self.rows and "val_loss" in trainer.callback_metrics:
            self.rows[-1]["val_loss"] = float(trainer.callback_metrics["val_loss"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the replicas and write the files."""
        identical = replicas_identical(pl_module)
        if trainer.global_rank != 0:
            return
        steps = trainer.global_step
        validated = [row["val_loss"] for row in self.rows if row["val_loss"] is not None]
        compressed = getattr(trainer.strategy, "onebit_optimizers", [])
        result = {
            **self.settings,
            "parameters": sum(p.numel() for p in pl_module.parameters()),
            "ranks": trainer.world_size,
            "steps": steps,
            "dense_steps": compressed[0].ledger.dense_steps if compressed else steps,
            "val_loss": validated[-1] if validated else None,
            "bytes_sent": self.bytes_sent(trainer),
            "dense_bytes": steps * ring_all_reduce_bytes(pl_module, trainer.world_size),
            "bytes_counted": "by the ledger" if compressed else "by the formula of a ring all-reduce",
            "seconds_per_step": statistics.median(row["seconds"] for row in self.rows),
            "replicas_identical": identical,
            "torch": torch.__version__,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        with (self.out / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)


def parser() -> argparse.ArgumentParser:
    """Options of this example."""
    options = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = options.add_argument
    add("--strategy", default="onebit_adam", help="Lightning strategy by name, such as ddp or onebit_adam")
    add("--accelerator", default="cpu", help="Lightning accelerator")
    add("--devices", type=int, default=2, help="processes per machine")
    add("--num-nodes", type=int, default=1, help="machines; slurm.sbatch and multi_node.sh start them")
    add("--steps", type=int, default=400, help="optimizer steps")
    add("--batch-size", type=int, default=4, help="windows per process and micro-batch")
    add("--context", type=int, default=128, help="bytes per window")
    add("--layers", type=int, default=4, help="transformer layers")
    add("--width", type=int, default=256, help="size of the residual stream")
    add("--heads", type=int, default=4, help="attention heads")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--weight-decay", type=float, default=0.01, help="decoupled weight decay")
    add("--warmup-steps", type=int, default=20, help="linear learning-rate warm-up")
    add(
        "--freeze-fraction",
        type=float,
        help="share of the steps that is dense before compression starts (default: the automatic rule)",
    )
    add("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    add("--clip", type=float, default=None, help="largest global gradient norm")
    add("--precision", default="32-true", help="Lightning precision")
    add("--validate-every", type=int, help="steps between validations; must divide --steps (default: about six in all)")
    add("--validation-windows", type=int, default=256, help="held-out windows per validation")
    add("--train-bytes", type=int, default=4 << 20, help="bytes of training text")
    add("--seed", type=int, default=1, help="seed of weights and data order")
    add("--out", type=Path, default=Path("demo_out/text_gpt"), help="folder for metrics.csv and result.json")
    return options


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the options and decide how often to validate, so that the last step is always validated."""
    options = parser().parse_args(arguments)
    if options.validate_every is None:
        options.validate_every = options.steps // next(n for n in (6, 5, 7, 4, 8, 3, 2, 1) if options.steps % n == 0)
    elif options.steps % options.validate_every:
        parser().error(
            f"--validate-every {options.validate_every} does not divide --steps {options.steps}: "
            "the last step would not be validated; choose a divisor"
        )
    return options


def main(arguments: list[str] | None = None) -> None:
    """Train once and write the record of it."""
    options = parse(arguments)
    # Every process gets its share of the cores; without this each takes all of them and they get in each other's way.
    torch.set_num_threads(max(1, available_cores() // options.devices))
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # windows are slices of a tensor in memory
    pl.seed_everything(options.seed, workers=True)

    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    callbacks: list[pl.Callback] = [Recorder(options.out, settings), TQDMProgressBar(refresh_rate=5)]
    if not options.strategy.startswith("ddp"):
        callbacks.append(ob.callbacks.CompressionStats())
        if not options.strategy.startswith(WITHOUT_WARM_UP):
            callbacks.append(
                ob.callbacks.VarianceFreeze("auto" if options.freeze_fraction is None else options.freeze_fraction)
            )

    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=options.strategy,
        max_steps=options.steps,
        max_epochs=-1,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip,
        precision=options.precision,
        val_check_interval=options.validate_every * options.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = TextGPT(
        options.layers,
        options.width,
        options.heads,
        options.lr,
        options.weight_decay,
        options.warmup_steps,
        "strategy" if options.strategy.startswith(NO_ADAM) else "adamw",
    )
    data = TextData(options.batch_size, options.context, options.train_bytes, options.validation_windows)
    trainer.fit(model, data)
    # Lightning leaves the process group of "ddp" to the end of Python, where gloo's threads now and then abort the process.
    del trainer, model
    gc.collect()
    disconnect()


if __name__ == "__main__":
    main()
