"""1-bit compressed data-parallel training for PyTorch Lightning.

Importing this package registers its strategies (``Trainer(strategy="onebit_adam")``) in every Lightning tree that is imported, before or
after it. ``OnebitStrategy`` and ``callbacks`` are those of the tree the user has loaded; ``lightning_onebit.lightning`` and
``lightning_onebit.pytorch_lightning`` hold those of one tree by name. The optimizers need no Lightning.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_onebit.algorithms import (
    BinSGDM,
    LambCoefficients,
    LocalSteps,
    OnebitAdam,
    OnebitLamb,
    OnebitSGD,
    ZeroOneAdam,
)
from lightning_onebit.comm import ByteLedger, CollectiveFailure, CollectiveTimeout, PlanMismatch
from lightning_onebit.engine import ExchangeOptions, OnebitOptimizer, Phase, TornStep
from lightning_onebit.strategy import trees
from lightning_onebit.strategy.registry import Algorithm, available_strategies, register_algorithm
from lightning_onebit.tools.migration import Migration, from_deepspeed_config

if TYPE_CHECKING:
    from lightning_onebit import callbacks
    from lightning_onebit.lightning import OnebitModelParallelStrategy, OnebitStrategy

__version__ = "0.2.0"

__all__ = [
    "Algorithm",
    "BinSGDM",
    "ByteLedger",
    "CollectiveFailure",
    "CollectiveTimeout",
    "ExchangeOptions",
    "LambCoefficients",
    "LocalSteps",
    "Migration",
    "OnebitAdam",
    "OnebitLamb",
    "OnebitOptimizer",
    "OnebitSGD",
    "Phase",
    "PlanMismatch",
    "TornStep",
    "ZeroOneAdam",
    "available_strategies",
    "from_deepspeed_config",
    "register_algorithm",
]
if trees.installed_trees():
    __all__ += ["OnebitModelParallelStrategy", "OnebitStrategy", "callbacks"]


def __getattr__(name: str) -> Any:
    if name in ("OnebitModelParallelStrategy", "OnebitStrategy"):
        return getattr(trees.bound_module(), name)
    if name == "callbacks":
        return importlib.import_module("lightning_onebit.callbacks")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# each of these modules registers its strategies as it is imported
for _package, _module in trees.BINDINGS.items():
    trees.when_imported(_package, partial(importlib.import_module, _module))
del _package, _module
