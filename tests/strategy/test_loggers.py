"""``CompressionStats`` with loggers in real fits: a double that is strict about what it gets, W&B offline, MLflow's file store.

CSV and TensorBoard are tested on two ranks in test_callbacks_fit.py. W&B and MLflow bring dozens of packages, so they are no part of
the development set: their tests run where they are installed (``pip install wandb mlflow-skinny``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fake_trainer import documented_metrics
from harness import run_ranks
from lightning_support import enter, loader, make_module, onebit, quiet_trainer

STEPS = 8


def fit(logger: Any) -> Any:
    """Eight steps, six of them compressed, each logged."""
    pl = enter(0)
    import lightning_onebit.lightning as bound

    trainer = quiet_trainer(
        pl,
        "onebit_adam",
        logger=logger,
        log_every_n_steps=1,
        callbacks=[bound.CompressionStats(1)],
        max_epochs=1,
    )
    trainer.fit(make_module(pl, onebit(2, _alone=True)), loader(64, 8))
    return trainer


def with_a_strict_double(rank: int, world: int, folder: str) -> list[dict[str, float]]:
    enter(rank)
    from lightning.pytorch.loggers import Logger

    class Double(Logger):
        """As an online service that keeps all runs in one folder; takes plain numbers under plain names only."""

        name, version, save_dir = "project", "run7", folder

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[dict[str, float]] = []

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            assert isinstance(step, int)
            for name, value in metrics.items():
                assert isinstance(name, str) and type(value) in (float, int), (name, value)
            self.seen.append(dict(metrics))

    double = Double()
    fit(double)
    return double.seen


def test_a_logger_gets_plain_numbers(tmp_path: Path) -> None:
    (seen,) = run_ranks(with_a_strict_double, 1, str(tmp_path))
    ours = [values for values in seen if "onebit/bytes_sent" in values]
    assert len(ours) == STEPS
    assert {name for values in ours for name in values if name.startswith("onebit/")} <= documented_metrics()
    assert [values["onebit/dense_step"] for values in ours] == [1, 1, 0, 0, 0, 0, 0, 0]


def with_wandb(rank: int, world: int, folder: str) -> dict[str, float]:
    enter(rank)
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(project="project", save_dir=folder, offline=True, settings=wandb.Settings(silent=True))
    fit(logger)
    found = {name: float(value) for name, value in dict(logger.experiment.summary).items() if "onebit/" in name}
    wandb.finish()
    return found


def test_weights_and_biases_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    (found,) = run_ranks(with_wandb, 1, str(tmp_path), timeout=120)
    assert found["onebit/dense_step"] == 0
    assert found["onebit/collectives"] == 2
    assert set(found) <= documented_metrics()


def with_mlflow(rank: int, world: int, folder: str) -> list[float]:
    enter(rank)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # newer releases want to be asked
    from lightning.pytorch.loggers import MLFlowLogger

    logger = MLFlowLogger(experiment_name="project", tracking_uri=f"file:{folder}")
    fit(logger)
    history = logger.experiment.get_metric_history(logger.run_id, "onebit/dense_step")
    return [metric.value for metric in history]


def test_mlflow_with_its_file_store(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    (history,) = run_ranks(with_mlflow, 1, str(tmp_path), timeout=120)
    assert history == [1, 1, 0, 0, 0, 0, 0, 0]
