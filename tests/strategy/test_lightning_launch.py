"""Every way to start: by name and by instance, popen, spawn and fork, from LightningCLI, with only one Lightning tree installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harness import python

SCRIPT = Path(__file__).parents[1] / "lightning_script.py"


def launch(out: Path, *arguments: str) -> dict[str, Any]:
    """Runs the script and returns what rank 0 wrote, after comparing the ranks."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SCRIPT.parents[1]),
    }
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        environment.pop(name, None)
    done = subprocess.run(
        [python(), str(SCRIPT), str(out), *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=out,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1], "ranks ended differently"
    assert ranks[0]["world"] == 2
    # 4 batches per rank and epoch, 2 epochs, 3 dense steps
    assert (ranks[0]["steps"], ranks[0]["dense_steps"], ranks[0]["compressed_steps"]) == (8, 3, 5)
    return ranks[0]


def test_by_name_with_processes_started_by_popen(tmp_path: Path) -> None:
    found = launch(tmp_path, "lightning", "string:onebit_adam")
    assert found["strategy"] == "lightning_onebit.lightning.OnebitStrategy"
    assert (found["launcher"], found["start_method"]) == ("_SubprocessScriptLauncher", "popen")
    assert found["callbacks"] == ["lightning_onebit.lightning"]
    assert found["lr"] == 0.02


def test_by_name_with_processes_started_by_spawn(tmp_path: Path) -> None:
    found = launch(tmp_path, "pytorch_lightning", "string:onebit_adam_spawn")
    assert found["strategy"] == "lightning_onebit.pytorch_lightning.OnebitStrategy"
    assert (found["launcher"], found["start_method"]) == ("_MultiProcessingLauncher", "spawn")
    assert found["callbacks"] == ["lightning_onebit.pytorch_lightning"]


@pytest.mark.parametrize(
    ("tree", "mode"), [("lightning", "string:onebit_adam_fork"), ("pytorch_lightning", "instance")]
)
def test_with_one_lightning_tree_alone(tmp_path: Path, tree: str, mode: str) -> None:
    found = launch(tmp_path, tree, mode, "alone")
    assert found["strategy"] == f"lightning_onebit.{tree}.OnebitStrategy"
    assert found["callbacks"] == [f"lightning_onebit.{tree}"]


def test_lightning_cli_with_class_paths(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("""
trainer:
  strategy:
    class_path: lightning_onebit.OnebitStrategy
    init_args:
      freeze_step: 3
      timeout: "0:05:00"
      start_method: fork
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.03
""")
    found = launch(tmp_path, "pytorch_lightning", "cli", "--config", str(config))
    assert found["strategy"] == "lightning_onebit.pytorch_lightning.OnebitStrategy"
    assert found["timeout"] == 300.0
    assert (found["optimizer"], found["lr"]) == ("OnebitAdam", 0.03)
    assert found["callbacks"] == []


def test_lightning_cli_by_name_with_our_optimizer_and_callback(tmp_path: Path) -> None:
    found = launch(
        tmp_path,
        "lightning",
        "cli",
        "--trainer.strategy=onebit_adam",
        "--optimizer=lightning_onebit.OnebitAdam",
        "--optimizer.lr=0.04",
        "--optimizer.exchange.block_size=64",
        "--trainer.callbacks+=lightning_onebit.callbacks.VarianceFreeze",
        "--trainer.callbacks.at=3",
    )
    assert found["strategy"] == "lightning_onebit.lightning.OnebitStrategy"
    assert (found["optimizer"], found["lr"]) == ("OnebitAdam", 0.04)
    assert found["callbacks"] == ["lightning_onebit.lightning"]
