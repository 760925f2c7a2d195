"""The digits of ``examples/digits.py`` under Ray Train: the counterpart of ``RayDDPStrategy``.

    python examples/ray_train.py --workers 2

Needs ``pip install "ray[train]"``. Ray starts the workers and connects them, here on this machine.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any


def train(options: dict[str, Any]) -> None:
    """What every worker runs."""
    import lightning.pytorch as pl
    import ray.train
    from data import load_digits
    from digits import Digits
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
    from torch.utils.data import DataLoader

    from lightning_onebit.lightning import CompressionStats, OnebitStrategy

    class RayOnebitStrategy(OnebitStrategy, RayDDPStrategy):  # type: ignore[misc]
        """``OnebitStrategy`` with the devices and ranks of Ray's workers."""

    trainer = prepare_trainer(
        pl.Trainer(
            accelerator="auto",
            devices="auto",
            strategy=RayOnebitStrategy("onebit_adam"),
            plugins=[RayLightningEnvironment()],
            callbacks=[CompressionStats()],
            max_epochs=options["epochs"],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
    )
    training, validation = load_digits()
    trainer.fit(Digits(), DataLoader(training, 32, shuffle=True, drop_last=True), DataLoader(validation, 256))
    found = trainer.callback_metrics
    ray.train.report({name: float(value) for name, value in found.items()})
    if trainer.is_global_zero:
        ratio = float(found["onebit/total_ratio"])
        print(
            f"validation accuracy {100 * found['val_accuracy']:.1f} %, {ratio:.1f}x fewer bytes than dense all-reduces"
        )


def main() -> None:
    """Start the workers and wait for them; what they print comes back."""
    options = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--workers", type=int, default=2, help="processes")
    options.add_argument("--epochs", type=int, default=10, help="passes over the data")
    options.add_argument("--gpu", action="store_true", help="one GPU for each of them")
    chosen = options.parse_args()

    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    # workers find the modules beside this one
    path = os.pathsep.join([str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}})
    scaling = ScalingConfig(num_workers=chosen.workers, use_gpu=chosen.gpu)
    TorchTrainer(train, train_loop_config={"epochs": chosen.epochs}, scaling_config=scaling).fit()


if __name__ == "__main__":
    main()
