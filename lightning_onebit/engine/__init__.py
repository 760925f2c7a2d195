"""The engine: it drives a rule through layout, steps, phases, exchange and checkpoints."""

from lightning_onebit.engine.arenas import Phase
from lightning_onebit.engine.optimizer import OnebitOptimizer
from lightning_onebit.engine.options import ExchangeOptions, Options
from lightning_onebit.engine.whole import TornStep

__all__ = ["ExchangeOptions", "OnebitOptimizer", "Options", "Phase", "TornStep"]
