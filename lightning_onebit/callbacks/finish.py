"""What the strategy adds to a Trainer so that training ends with the model of all ranks (0/1 Adam)."""

from __future__ import annotations

from typing import Any


class FinalSynchronisationMixin:
    """Synchronises replicas that differ, before any other callback's ``on_train_end``.

    The strategy puts it in front of all callbacks where ranks take steps of their own. A hook of the strategy would come too late:
    Lightning calls callbacks first.
    """

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Brings the replicas together. Collective; reached by all ranks, as ``on_train_end`` is."""
        trainer.strategy.synchronise()
