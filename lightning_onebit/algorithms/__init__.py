"""The algorithms: a page each."""

from lightning_onebit.algorithms.adam import AdamOptions, OnebitAdam
from lightning_onebit.algorithms.binsgdm import BinSGDM, BinSGDMOptions
from lightning_onebit.algorithms.lamb import LambCoefficients, LambOptions, OnebitLamb
from lightning_onebit.algorithms.schedules import LocalSteps
from lightning_onebit.algorithms.sgd import OnebitSGD
from lightning_onebit.algorithms.zero_one_adam import ZeroOneAdam, ZeroOneAdamOptions

__all__ = [
    "AdamOptions",
    "BinSGDM",
    "BinSGDMOptions",
    "LambCoefficients",
    "LambOptions",
    "LocalSteps",
    "OnebitAdam",
    "OnebitLamb",
    "OnebitSGD",
    "ZeroOneAdam",
    "ZeroOneAdamOptions",
]
