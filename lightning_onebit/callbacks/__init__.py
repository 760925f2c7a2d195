"""Callbacks: when compression begins, whether it pays, what it saves, and whether the run stays sound.

The logic is in mixins that import no Lightning class. ``lightning_onebit.callbacks.VarianceFreeze`` and its siblings are
the mixins bound to the Lightning tree the user has loaded; ``lightning_onebit.lightning`` and
``lightning_onebit.pytorch_lightning`` hold those of one tree by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_onebit.strategy.trees import bound_module

if TYPE_CHECKING:
    from lightning_onebit.lightning import (
        CompressionStats,
        DivergenceGuard,
        LinkProbe,
        ReplicaConsistency,
        VarianceFreeze,
    )

__all__ = ["CompressionStats", "DivergenceGuard", "LinkProbe", "ReplicaConsistency", "VarianceFreeze"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(bound_module(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
