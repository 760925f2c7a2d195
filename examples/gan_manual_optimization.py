"""Train a small GAN on handwritten digits: two optimizers under manual optimization.

    python examples/gan_manual_optimization.py
    python examples/gan_manual_optimization.py --compress-discriminator     # what goes wrong then

Each optimizer has its own freeze, residuals and ledger. ``toggle_optimizer`` keeps the other network out of a backward
pass, as always in Lightning; the strategy sees to the rest.

A GAN is a hard case for a frozen variance: the discriminator's gradients change their size as long as training goes on.
So its parameters are in a group with ``compress=False``, averaged densely, with a variance that keeps learning; the
generator is compressed, in small blocks, and its frozen variance stays as it froze.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

try:
    import lightning.pytorch as pl
except ModuleNotFoundError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

from data import load_digits
from text_gpt import replicas_identical

import lightning_onebit as ob

NOISE = 16


class DigitGAN(pl.LightningModule):
    """Generator and discriminator over 8x8 images.

    Args:
        width: Size of the hidden layers.
        lr: Learning rate of both.
        compress_discriminator: Whether its gradients are compressed, too.
    """

    def __init__(self, width: int = 128, lr: float = 1e-3, compress_discriminator: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr, self.compress_discriminator = lr, compress_discriminator
        self.generator = nn.Sequential(
            nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(
            spectral_norm(nn.Linear(64, width)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(width, width)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(width, 1)),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """One step of each network."""
        images = batch[0]
        # noise of this rank's own: with that of another one it would compute the same gradients
        draws = torch.Generator().manual_seed(self.global_step * self.trainer.world_size + self.global_rank)
        noise = torch.randn(len(images), NOISE, generator=draws).to(self.device)
        optimizers: Any = self.optimizers()
        for_generator, for_discriminator = optimizers

        self.toggle_optimizer(for_generator)
        for_generator.zero_grad()
        self.manual_backward(-self.discriminator(self.generator(noise)).mean())
        for_generator.step()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        for_discriminator.zero_grad()
        fake = self.generator(noise).detach()
        # the hinge loss
        self.manual_backward(
            F.relu(1 - self.discriminator(images)).mean() + F.relu(1 + self.discriminator(fake)).mean()
        )
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)

    def configure_optimizers(self) -> Any:
        """One optimizer per network, both made by the strategy."""
        make: Any = self.trainer.strategy.optimizer  # type: ignore[attr-defined]
        judge = {"params": self.discriminator.parameters(), "compress": self.compress_discriminator}
        common = {"lr": self.lr, "betas": (0.5, 0.99)}
        return [make(self.generator.parameters(), **common), make([judge], **common)], []

    @torch.no_grad()
    def distance(self, real: Tensor) -> float:
        """Mean difference between the mean generated and the mean real image, in grey levels from 0 to 1."""
        noise = torch.randn(1024, NOISE, generator=torch.Generator().manual_seed(0)).to(self.device)
        return float((self.generator(noise).mean(0) - real.to(self.device).mean(0)).abs().mean())


def main(arguments: list[str] | None = None) -> None:
    """Train and compare images."""
    options = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--devices", type=int, default=2, help="processes")
    options.add_argument("--block-size", type=int, default=64, help="elements that share one scale")
    options.add_argument("--compress-discriminator", action="store_true", help="both networks, not only the generator")
    options.add_argument("--epochs", type=int, default=40, help="passes over the data")
    options.add_argument("--freeze-step", type=int, default=240, help="dense steps of each optimizer")
    chosen = options.parse_args(arguments)

    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    pl.seed_everything(1, workers=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=chosen.devices,
        strategy=ob.OnebitStrategy(
            "onebit_adam",
            denominator_floor=0.1,
            refresh="never",  # single gradients say too little about a variance that goes on changing
            exchange=ob.ExchangeOptions(block_size=chosen.block_size),
        ),
        max_epochs=chosen.epochs,
        callbacks=[ob.callbacks.VarianceFreeze(step=chosen.freeze_step), ob.callbacks.CompressionStats()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    model = DigitGAN(compress_discriminator=chosen.compress_discriminator)
    train, validation = load_digits()
    real = validation.tensors[0]
    before = model.distance(real)
    trainer.fit(model, DataLoader(train, 32, shuffle=True, drop_last=True))
    identical = replicas_identical(model)
    if trainer.is_global_zero:
        print(f"distance of the mean images: {before:.3f} before, {model.distance(real):.3f} after training")
        print(f"replicas {'identical' if identical else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
