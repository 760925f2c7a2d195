"""The optimizers: pure update rules on one engine."""

from lightning_onebit.optim.adam import OnebitAdam
from lightning_onebit.optim.base import OnebitOptimizer, Phase
from lightning_onebit.optim.options import CommonOptions

__all__ = ["CommonOptions", "OnebitAdam", "OnebitOptimizer", "Phase"]
