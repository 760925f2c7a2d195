"""Lightning Fabric: your own training loop, the same strategies.

    python examples/fabric.py
    python examples/fabric.py --strategy binsgdm

Gradients are accumulated over two micro-batches, and clipped by the norm over all ranks.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

try:
    from lightning.fabric import Fabric
except ModuleNotFoundError:
    from lightning_fabric import Fabric  # type: ignore[assignment]

from data import load_digits
from text_gpt import replicas_identical

import lightning_onebit as ob


def main(arguments: list[str] | None = None) -> None:
    """Train, save and load, validate."""
    options = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--strategy", default="onebit_adam", help="onebit_adam, onebit_lamb, zero_one_adam, binsgdm")
    options.add_argument("--devices", type=int, default=2, help="processes")
    options.add_argument("--epochs", type=int, default=20, help="passes over the data")
    options.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    chosen = options.parse_args(arguments)

    fabric = Fabric(accelerator="cpu", devices=chosen.devices, strategy=chosen.strategy)
    fabric.launch()
    fabric.seed_everything(1)
    train, validation = load_digits()
    loader = fabric.setup_dataloaders(DataLoader(train, 16, shuffle=True, drop_last=True))
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    model, optimizer = fabric.setup(net, fabric.strategy.optimizer(net.parameters(), lr=chosen.lr))  # type: ignore[attr-defined]

    freeze_after = max(1, chosen.epochs // 5)
    with tempfile.TemporaryDirectory() as mine:
        path = Path(fabric.broadcast(mine)) / "digits.ckpt"
        for epoch in range(chosen.epochs):
            if epoch == freeze_after and optimizer.phase is ob.Phase.WARMUP and not chosen.strategy.startswith("bin"):
                optimizer.freeze()
            for number, (images, labels) in enumerate(loader):
                accumulating = number % 2 == 0
                with fabric.no_backward_sync(model, enabled=accumulating):
                    fabric.backward(F.cross_entropy(model(images), labels) / 2)
                if not accumulating:
                    fabric.clip_gradients(model, optimizer, max_norm=1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            if epoch == chosen.epochs // 2:  # residuals of each rank lie beside the file
                fabric.save(path, {"model": model, "optimizer": optimizer})
                fabric.load(path, {"model": model, "optimizer": optimizer})
        fabric.barrier()

    images, labels = validation.tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean()
    identical = replicas_identical(net)
    ledger = optimizer.ledger
    fabric.print(f"accuracy {100 * accuracy:.1f} %, replicas {'identical' if identical else 'DIFFERENT'}")
    fabric.print(
        f"{ledger.dense_steps} dense and {ledger.compressed_steps} compressed steps, {ledger.ratio:.1f}x fewer bytes"
    )


if __name__ == "__main__":
    main()
