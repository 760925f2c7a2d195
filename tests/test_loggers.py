"""``CompressionStats`` with loggers in real fits: a double that is strict about what it gets, W&B offline, MLflow's file store.

CSV and TensorBoard are tested on two ranks in test_callbacks_fit.py. W&B and MLflow bring dozens of packages, so they are no part of
the development set: their tests run where they are installed (``pip install wandb mlflow-skinny``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks
from lightning_support import enter, loader, make_module, onebit, quiet_trainer

from lightning_onebit.callbacks.stats import FIGURE_NAME, METRICS

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
        callbacks=[bound.CompressionStats(1, figure=True)],
        max_epochs=1,
    )
    trainer.fit(make_module(pl, onebit(2, force_compression=True)), loader(64, 8))
    return trainer


def with_a_strict_double(rank: int, world: int, folder: str) -> tuple[list[dict[str, float]], bool]:
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
    return double.seen, (Path(folder) / "project" / "run7" / FIGURE_NAME).is_file()


def test_a_logger_gets_plain_numbers_and_the_figure_lies_in_the_folder_of_its_run(tmp_path: Path) -> None:
    ((seen, drawn),) = run_ranks(with_a_strict_double, 1, str(tmp_path))
    ours = [values for values in seen if "onebit/bytes_sent" in values]
    assert len(ours) == STEPS
    assert {name for values in ours for name in values if name.startswith("onebit/")} <= set(METRICS)
    assert [values["onebit/dense_step"] for values in ours] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert drawn


def with_wandb(rank: int, world: int, folder: str) -> tuple[dict[str, float], list[str]]:
    enter(rank)
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(project="project", save_dir=folder, offline=True, settings=wandb.Settings(silent=True))
    trainer = fit(logger)
    found = {name: float(value) for name, value in dict(logger.experiment.summary).items() if name in METRICS}
    wandb.finish()
    assert trainer.log_dir == folder
    return found, [str(path.relative_to(folder).parent) for path in Path(folder).rglob(FIGURE_NAME)]


def test_weights_and_biases_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    ((found, drawn),) = run_ranks(with_wandb, 1, str(tmp_path), timeout=120)
    assert found["onebit/dense_step"] == 0
    assert found["onebit/collectives"] == 2
    assert len(drawn) == 1 and drawn[0].startswith("project/")


def with_mlflow(rank: int, world: int, folder: str) -> tuple[list[float], list[str], str]:
    enter(rank)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # newer releases want to be asked
    from lightning.pytorch.loggers import MLFlowLogger

    logger = MLFlowLogger(experiment_name="project", tracking_uri=f"file:{folder}")
    fit(logger)
    history = logger.experiment.get_metric_history(logger.run_id, "onebit/dense_step")
    drawn = [str(path.relative_to(folder).parent) for path in Path(folder).rglob(FIGURE_NAME)]
    return [metric.value for metric in history], drawn, f"{logger.experiment_id}/{logger.run_id}"


def test_mlflow_with_its_file_store(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    ((history, drawn, run),) = run_ranks(with_mlflow, 1, str(tmp_path), timeout=120)
    assert history == [1, 1, 0, 0, 0, 0, 0, 0]
    assert drawn == [run], "the figure lies in the folder of the run"


def test_without_a_logger_the_figure_lies_in_the_root_folder(tmp_path: Path) -> None:
    assert run_ranks(without_a_logger, 1, str(tmp_path)) == [True]


def without_a_logger(rank: int, world: int, folder: str) -> bool:
    os.chdir(folder)
    fit(False)
    return (Path(folder) / FIGURE_NAME).is_file()
