"""1-bit compressed data-parallel training for PyTorch Lightning.

Importing this package registers its strategies (``Trainer(strategy="onebit_adam")``) in every Lightning tree that is imported, before or
after it. ``OnebitStrategy`` and ``callbacks`` are those of the tree the user has loaded; ``lightning_onebit.lightning`` and
``lightning_onebit.pytorch_lightning`` hold those of one tree by name. The optimizers need no Lightning.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_onebit import _trees  # first: it remembers which Lightning tree was loaded before this package
from lightning_onebit.algorithms import BinSGDM, LambCoefficients, LocalSteps, OnebitAdam, OnebitLamb, ZeroOneAdam
from lightning_onebit.comm import ByteLedger, CollectiveFailure, CollectiveTimeout, PlanMismatch
from lightning_onebit.engine import ExchangeOptions, OnebitOptimizer, Phase, TornStep
from lightning_onebit.registry import available_strategies, register_algorithm
from lightning_onebit.tools.migration import Migration, from_deepspeed_config

if TYPE_CHECKING:
    from lightning_onebit import callbacks
    from lightning_onebit.lightning import OnebitStrategy

__version__ = "0.2.0"

__all__ = [
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
    "Phase",
    "PlanMismatch",
    "TornStep",
    "ZeroOneAdam",
    "available_strategies",
    "from_deepspeed_config",
    "register_algorithm",
]
if _trees.installed_trees():
    __all__ += ["OnebitStrategy", "callbacks"]


def __getattr__(name: str) -> Any:
    if name == "OnebitStrategy":
        return _trees.bound_module().OnebitStrategy
    if name == "callbacks":
        return importlib.import_module("lightning_onebit.callbacks")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register(tree: _trees.Tree) -> None:
    """Puts the strategies into the registry of a tree."""
    registry = importlib.import_module(f"{_trees.PACKAGES[tree]}.strategies").StrategyRegistry
    bound = importlib.import_module(_trees.BOUND_MODULES[tree])
    # a program that imports the bound module first is still within that import: the module registers itself at its end
    if hasattr(bound, "OnebitStrategy"):
        bound.OnebitStrategy.register_strategies(registry)


def _register_fabric(package: str) -> None:
    """Puts the strategies into the registry of a Fabric."""
    registry = importlib.import_module(f"{package}.strategies").STRATEGY_REGISTRY
    bound = importlib.import_module(_trees.FABRICS[package])
    if hasattr(bound, "OnebitStrategy"):
        bound.OnebitStrategy.register_strategies(registry)


for _tree in _trees.TREES:
    _trees.when_loaded(_tree, partial(_register, _tree))
for _package in _trees.FABRICS:
    _trees.when_imported(_package, partial(_register_fabric, _package))
del _tree, _package
