"""Strategy and callbacks for ``pytorch_lightning``."""

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_onebit.callbacks.consistency import ReplicaConsistencyMixin
from lightning_onebit.callbacks.finish import FinalSynchronisationMixin
from lightning_onebit.callbacks.freeze import VarianceFreezeMixin
from lightning_onebit.callbacks.guard import DivergenceGuardMixin
from lightning_onebit.callbacks.probe import LinkProbeMixin
from lightning_onebit.callbacks.stats import CompressionStatsMixin
from lightning_onebit.strategy.sharded import ShardedMixin
from lightning_onebit.strategy.trainer import OnebitMixin

__all__ = [
    "CompressionStats",
    "DivergenceGuard",
    "LinkProbe",
    "OnebitModelParallelStrategy",
    "OnebitStrategy",
    "ReplicaConsistency",
    "VarianceFreeze",
]


class VarianceFreeze(VarianceFreezeMixin, Callback):  # type: ignore[misc]  # noqa: D101
    __doc__ = VarianceFreezeMixin.__doc__


class CompressionStats(CompressionStatsMixin, Callback):  # type: ignore[misc]  # noqa: D101
    __doc__ = CompressionStatsMixin.__doc__


class ReplicaConsistency(ReplicaConsistencyMixin, Callback):  # type: ignore[misc]  # noqa: D101
    __doc__ = ReplicaConsistencyMixin.__doc__


class DivergenceGuard(DivergenceGuardMixin, Callback):  # type: ignore[misc]  # noqa: D101
    __doc__ = DivergenceGuardMixin.__doc__


class LinkProbe(LinkProbeMixin, Callback):  # type: ignore[misc]  # noqa: D101
    __doc__ = LinkProbeMixin.__doc__


class _FinalSynchronisation(FinalSynchronisationMixin, Callback):
    pass


class OnebitStrategy(OnebitMixin, DDPStrategy):  # type: ignore[misc]  # noqa: D101
    __doc__ = OnebitMixin.__doc__

    _misconfiguration = MisconfigurationException
    _freeze_callback = VarianceFreeze
    _final_callback = _FinalSynchronisation


class OnebitModelParallelStrategy(ShardedMixin, ModelParallelStrategy):  # type: ignore[misc]  # noqa: D101
    __doc__ = ShardedMixin.__doc__

    _misconfiguration = MisconfigurationException
    _freeze_callback = VarianceFreeze
    _final_callback = _FinalSynchronisation


OnebitStrategy.register_strategies(StrategyRegistry)
OnebitModelParallelStrategy.register_strategies(StrategyRegistry)
