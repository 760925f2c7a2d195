"""Options that have fixed values: a type for each, which LightningCLI's ``--help`` shows and checks, and the one list of its values."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

StartMethod: TypeAlias = Literal["popen", "spawn", "fork", "forkserver"]
OtherOptimizers: TypeAlias = Literal["error", "dense"]

Backend: TypeAlias = Literal["auto", "reference", "cpu", "cuda"]
Overlap: TypeAlias = Literal["step", "backward"]
StateDtype: TypeAlias = Literal["float32", "bfloat16"]
Automatic: TypeAlias = Literal["auto"]
RefreshRule: TypeAlias = Literal["auto", "never"]
GapRule: TypeAlias = Literal["lr_halving"]
OnNonfinite: TypeAlias = Literal["skip", "raise"]
Recipe: TypeAlias = Literal["default", "published"]


def choices(kind: Any) -> tuple[str, ...]:
    """The values of one of these types.

    Example:
        >>> choices(Overlap)
        ('step', 'backward')
    """
    return get_args(kind)
