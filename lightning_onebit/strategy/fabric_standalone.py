"""The strategy for ``lightning_fabric``."""

from lightning_fabric.strategies import STRATEGY_REGISTRY, DDPStrategy

from lightning_onebit.strategy.fabric import FabricMixin

__all__ = ["OnebitStrategy"]


class OnebitStrategy(FabricMixin, DDPStrategy):  # noqa: D101  the mixin's
    __doc__ = FabricMixin.__doc__


OnebitStrategy.register_strategies(STRATEGY_REGISTRY)
