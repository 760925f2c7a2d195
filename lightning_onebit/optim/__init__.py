"""The optimizers: pure update rules on one engine."""

from lightning_onebit.optim.adam import OnebitAdam
from lightning_onebit.optim.arena import Phase
from lightning_onebit.optim.base import OnebitOptimizer
from lightning_onebit.optim.binsgdm import BinSGDM
from lightning_onebit.optim.lamb import OnebitLamb
from lightning_onebit.optim.options import CommonOptions
from lightning_onebit.optim.torn import TornStep
from lightning_onebit.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "BinSGDM",
    "CommonOptions",
    "OnebitAdam",
    "OnebitLamb",
    "OnebitOptimizer",
    "Phase",
    "TornStep",
    "ZeroOneAdam",
]
