"""A user's script: trains on two processes and writes what every rank ended up with to a folder.

    python lightning_script.py OUT TREE MODE [alone] [CLI ARGUMENTS]

MODE is ``string:NAME`` (strategy by name), ``instance`` or ``cli`` (LightningCLI with the remaining arguments); ``alone`` makes the other
Lightning tree unimportable.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

OUT, TREE, MODE = sys.argv[1:4]
ALONE = "alone" in sys.argv[4:]
PACKAGES = {"lightning": ("lightning",), "pytorch_lightning": ("pytorch_lightning", "lightning_fabric")}


class Refuse:
    """Finder that knows nothing of some packages, as if they were not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        refused = [package for tree, packages in PACKAGES.items() if tree != TREE for package in packages]
        if name.split(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if ALONE:
    sys.meta_path.insert(0, Refuse())  # type: ignore[arg-type]

import torch  # noqa: E402

import lightning_onebit as ob  # noqa: E402

pl = importlib.import_module({"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}[TREE])


class Model(pl.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))

    def training_step(self, batch: Any, _: int) -> Any:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self) -> Any:
        x = torch.randn(64, 6, generator=torch.Generator().manual_seed(3))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)

    def on_train_end(self) -> None:
        trainer = self.trainer
        [optimizer] = trainer.strategy.onebit_optimizers
        weights = b"".join(p.detach().numpy().tobytes() for p in self.parameters())
        facts = {
            "strategy": f"{type(trainer.strategy).__module__}.{type(trainer.strategy).__name__}",
            "launcher": type(trainer.strategy.launcher).__name__ if trainer.strategy.launcher else None,
            "start_method": trainer.strategy._start_method,
            "timeout": trainer.strategy._timeout.total_seconds(),
            "optimizer": type(optimizer).__name__,
            "lr": optimizer.param_groups[0]["lr"],
            "steps": optimizer.steps,
            "dense_steps": optimizer.ledger.dense_steps,
            "compressed_steps": optimizer.ledger.compressed_steps,
            "callbacks": [type(c).__module__ for c in trainer.callbacks if type(c).__name__ == "VarianceFreeze"],
            "world": trainer.world_size,
            "weights": hashlib.sha256(weights).hexdigest(),
        }
        Path(OUT, f"rank-{trainer.global_rank}.json").write_text(json.dumps(facts))


class Configured(Model):
    def configure_optimizers(self) -> Any:
        return self.trainer.strategy.optimizer(self.parameters(), lr=0.02)


def main() -> None:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if MODE == "cli":
        cli = importlib.import_module(f"{pl.__name__}.cli")
        arguments = [a for a in sys.argv[4:] if a != "alone"]
        cli.LightningCLI(Model, args=["fit", *arguments], trainer_defaults=settings, save_config_callback=None)
        return
    callbacks = [ob.callbacks.VarianceFreeze(3)]
    strategy = ob.OnebitStrategy() if MODE == "instance" else MODE.removeprefix("string:")
    pl.Trainer(strategy=strategy, callbacks=callbacks, **settings).fit(Configured())


if __name__ == "__main__":
    main()
