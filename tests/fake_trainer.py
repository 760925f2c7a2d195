"""Just enough of a Trainer to drive a callback around real optimizers in one process."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import grouped

from lightning_onebit.algorithms import OnebitAdam
from lightning_onebit.strategy.ranks import Replicas


def documented_metrics() -> set[str]:
    """Names that docs/metrics.md promises to loggers."""
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    return set(re.findall(r"^\| `(onebit/\w+)`", page, re.MULTILINE))


class FakeStrategy:
    def __init__(self, optimizers: list[Any]) -> None:
        self.onebit_optimizers = optimizers
        self.broadcasts = 0
        self.timeout = timedelta(seconds=30)
        self.replicas = Replicas(2)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        self.broadcasts += 1
        return value


class FakeTrainer:
    """Counts and estimates like Lightning's."""

    def __init__(self, optimizers: list[Any], planned: float = 100, callbacks: list[Any] | None = None) -> None:
        self.strategy: Any = FakeStrategy(optimizers)
        self.callbacks = callbacks or []
        self.estimated_stepping_batches = planned
        self.max_epochs, self.max_steps, self.num_training_batches = 1, -1, planned
        self.optimizers = optimizers
        self.lightning_module = SimpleNamespace(automatic_optimization=True)
        self.world_size = 2
        self.accumulate_grad_batches = 1
        self.progress_bar_callback: Any = None
        self._logger_connector = SimpleNamespace(should_update_logs=True)
        self.is_last_batch = False
        self.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))

    @property
    def global_step(self) -> int:
        return self.fit_loop.epoch_loop._batches_that_stepped

    def start(self, callback: Any, module: Any = None) -> None:
        if callback not in self.callbacks:
            self.callbacks.append(callback)
        callback.setup(self, module, "fit")
        callback.on_fit_start(self, module)
        callback.on_train_start(self, module)

    def step(self, scale: float = 1.0, only: Any = None) -> None:
        """One batch: every optimizer (or ``only`` one) steps on fresh random gradients."""
        for optimizer in self.strategy.onebit_optimizers if only is None else [only]:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.randn_like(p) * scale
            optimizer.step()
        self.fit_loop.epoch_loop._batches_that_stepped += 1


class FakeModule:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.logged: list[dict[str, float]] = []

    def log_dict(self, values: dict[str, float], **kwargs: Any) -> None:
        assert kwargs["on_step"] and not kwargs["on_epoch"]
        self.logged.append(dict(values))


def onebit_adam(**options: Any) -> OnebitAdam:
    """A small OnebitAdam that compresses though it is alone."""
    parameters = [torch.nn.Parameter(torch.randn(33, 5)), torch.nn.Parameter(torch.randn(7))]
    defaults = {"_alone": True, "refresh": "never", "block_size": 32, "kernels": "reference"}
    return OnebitAdam(parameters, **grouped(defaults, **options))
