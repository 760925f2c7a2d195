"""What the adapters of Lightning and of Fabric have in common."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_onebit._names import shown_as
from lightning_onebit.comm import DEFAULT_TIMEOUT
from lightning_onebit.engine import OnebitOptimizer
from lightning_onebit.strategy.files import durable
from lightning_onebit.strategy.ranks import Groups, Ranks, Replicas, connected, node_size
from lightning_onebit.strategy.registry import register

if TYPE_CHECKING:
    _Base: Any  # a DDPStrategy of either tree, or of its Fabric
else:
    _Base = object


@shown_as("OnebitStrategy")
class Adapter(_Base):
    """A strategy before it is bound to Lightning or to Fabric."""

    _ranks_per_node: int | None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers this class under the names of all algorithms and start methods."""
        register(cls, strategy_registry)

    @property
    def timeout(self) -> timedelta:
        """Bound of every wait for other ranks that is not within an optimizer's exchange."""
        return self._timeout or DEFAULT_TIMEOUT

    @property
    def checkpoint_io(self) -> Any:
        """The checkpoint plugin; Lightning's own ``TorchCheckpointIO`` replaces local files in one move (``DurableSave``)."""
        return durable(super().checkpoint_io)

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        super(Adapter, type(self)).checkpoint_io.fset(self, checkpoint_io)  # type: ignore[attr-defined]

    @property
    def replicas(self) -> Replicas:
        """How the ranks of the run share the model."""
        return Replicas(dist.get_world_size() if connected() else 1)

    @property
    def writes_later(self) -> bool:
        """Whether checkpoints are handed over to a plugin that writes them while training goes on."""
        return any(cls.__name__ == "AsyncCheckpointIO" for cls in type(self.checkpoint_io).__mro__)

    def _ranks(self, name: str, group: Any = None) -> Ranks:
        """All ranks, for small rounds that neither training nor its accounts know of."""
        return Ranks(self.timeout, self.root_device, name, group)

    def _join(self, groups: Groups, optimizers: list[OnebitOptimizer], error: type[Exception], **how: Any) -> None:
        """Gives each of these optimizers a process group of its own. Collective."""
        if optimizers:
            size = node_size(self._ranks_per_node, int(self.node_rank), self.root_device, error)
        for optimizer in optimizers:
            groups.join(optimizer, self._timeout, ranks_per_node=size, **how)
