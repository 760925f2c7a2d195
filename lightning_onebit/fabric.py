"""The strategy for Lightning Fabric: ``OnebitStrategy`` is that of the Fabric the program has imported, or of the one installed."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from lightning_onebit.strategy.trees import FABRICS

if TYPE_CHECKING:
    from lightning_onebit.strategy.fabric_lightning import OnebitStrategy

__all__ = ["OnebitStrategy"]


def __getattr__(name: str) -> Any:
    if name != "OnebitStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in sorted(FABRICS, key=lambda package: package not in sys.modules):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            continue
        return importlib.import_module(FABRICS[package]).OnebitStrategy
    raise ModuleNotFoundError("lightning_onebit.fabric needs Fabric: install `lightning` or `lightning-fabric`.")
