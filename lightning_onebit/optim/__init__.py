"""The optimizers: pure update rules on one engine."""

from lightning_onebit.optim.adam import AdamOptions, OnebitAdam
from lightning_onebit.optim.arena import Phase
from lightning_onebit.optim.base import OnebitOptimizer
from lightning_onebit.optim.binsgdm import BinSGDM, BinSGDMOptions
from lightning_onebit.optim.lamb import LambCoefficients, LambOptions, OnebitLamb
from lightning_onebit.optim.options import ExchangeOptions, Options
from lightning_onebit.optim.policies import LocalSteps
from lightning_onebit.optim.torn import TornStep
from lightning_onebit.optim.zero_one_adam import ZeroOneAdam, ZeroOneAdamOptions

__all__ = [
    "AdamOptions",
    "BinSGDM",
    "BinSGDMOptions",
    "ExchangeOptions",
    "LambCoefficients",
    "LambOptions",
    "LocalSteps",
    "OnebitAdam",
    "OnebitLamb",
    "OnebitOptimizer",
    "Options",
    "Phase",
    "TornStep",
    "ZeroOneAdam",
    "ZeroOneAdamOptions",
]
