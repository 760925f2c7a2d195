"""What the strategy adds to a Trainer so that batches and training end with the model of all ranks (0/1 Adam)."""

from __future__ import annotations

from typing import Any


class FinalSynchronisationMixin:
    """Shows and synchronises the shared model, before any other callback looks.

    The strategy puts it in front of all callbacks where ranks take steps of their own. A hook of the strategy would come too late:
    Lightning calls callbacks first.
    """

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Shows the model that all ranks share where a batch made no step (an ``optimizer_step`` that only calls its closure)."""
        for optimizer in trainer.strategy.onebit_optimizers:
            optimizer.show_consensus()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Brings the replicas together. Collective; reached by all ranks, as ``on_train_end`` is."""
        trainer.strategy.synchronise()
