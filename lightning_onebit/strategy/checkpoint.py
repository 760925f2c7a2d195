"""The checkpoints of a strategy: what it writes and removes, and which one it can go on from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_onebit._say import rank_zero_info
from lightning_onebit.engine import OnebitOptimizer
from lightning_onebit.strategy.ranks import Ranks
from lightning_onebit.strategy.shards import (
    STAMP_KEY,
    ShardError,
    remove_shards,
    restore_residuals,
    save_shards,
    shard_ids,
)

# An asynchronous plugin may still be writing this many checkpoints of the same name: their shards stay.
_ASYNC_GENERATIONS = 3


class Checkpoints:
    """The checkpoints of a run: those that it can go on from, and those that an asynchronous plugin has not written yet.

    ``strategy`` is Lightning's or Fabric's, ``optimizers`` are those whose state is in a checkpoint.
    """

    def __init__(self) -> None:
        # loaded or written, oldest first
        self._good: list[str] = []
        # by path: ids of the checkpoints that an asynchronous plugin was given, oldest first
        self._in_flight: dict[str, list[str]] = {}

    def add(self, path: str, optimizers: Iterable[OnebitOptimizer]) -> None:
        """Notes a file that has been written or loaded."""
        self._good = [other for other in self._good if other != path] + [path]
        self.tell(optimizers)

    def tell(self, optimizers: Iterable[OnebitOptimizer]) -> None:
        """Lets optimizers name the newest one when they refuse to be saved."""
        for optimizer in optimizers:
            optimizer.note_checkpoint(self._good[-1] if self._good else None)

    def save(
        self, strategy: Any, path: str, optimizers: Sequence[OnebitOptimizer], publish: Callable[[dict[str, Any]], None]
    ) -> None:
        """Writes a checkpoint, and beside it what differs by rank; removes what belonged to the one it overwrites. Collective.

        ``publish`` is given further entries and makes the file appear.

        Raises:
            ShardError: on every rank, if any of them cannot write its part; an older checkpoint of this name stays whole.
        """
        states = [optimizer.residual_state_dict() for optimizer in optimizers]
        ranks = Ranks(strategy.timeout, strategy.root_device, "checkpoint")
        later, replicas = strategy.writes_later, strategy.replicas
        cleans = strategy.local_rank == 0
        if any(state["world_size"] != replicas.count for state in states):
            rank_zero_warn(
                f"{path} is saved without residuals, which are on {states[0]['world_size']} ranks: {replicas.count} of them take part."
            )
            states = []
        if states:
            path, written, older = save_shards(
                path,
                states,
                ranks,
                lambda s: publish({STAMP_KEY: s.as_dict()}),
                replicas=replicas,
                cleans=cleans,
                asynchronous=later,
            )
        else:
            written, older = "", shard_ids(path)
            publish({})
        if cleans:
            self._sweep(path, written, older, later)
        if optimizers:
            self.add(path, optimizers)

    def _sweep(self, path: str, written: str, older: set[str], later: bool) -> None:
        """Removes those of the ``older`` shards that belong to checkpoints which the one just saved has overwritten."""
        kept = [written]
        if later:
            kept = self._in_flight.setdefault(path, [])
            kept.append(written)
            del kept[:-_ASYNC_GENERATIONS]
            if len(kept) < _ASYNC_GENERATIONS:
                return
        remove_shards(path, older.difference(kept))

    def restore(
        self,
        strategy: Any,
        path: str | None,
        loaded: Mapping[str, Any],
        optimizers: Sequence[OnebitOptimizer],
        strict: bool | None = None,
    ) -> None:
        """Completes optimizers whose state was loaded from a file (None: from elsewhere) with what lies beside it. Collective.

        Raises:
            ShardError: residuals cannot be restored, and ``strict`` is set; otherwise it is a warning (None: there is no such option).
        """
        if path is not None:
            self.add(path, optimizers)
        if not optimizers:
            return
        try:
            ranks = Ranks(strategy.timeout, strategy.root_device, "checkpoint")
            said = restore_residuals(loaded, path, optimizers, ranks, strategy.replicas)
            if said is not None:
                rank_zero_info(f"{path}: {said}.")
        except ShardError as lost:
            if strict:
                raise ShardError(
                    f"strict_residuals=True: {lost}. Restore the folder `<name>.ckpt.onebit` beside the checkpoint, or set "
                    "strict_residuals=False to go on with residuals that start from zero."
                ) from lost
            hint = "" if strict is None else f" (`{strategy._shown_name}(strict_residuals=True)` makes this an error)"
            rank_zero_warn(
                f"resuming {' and '.join(type(o).__name__ for o in optimizers)} without residuals: {lost}. Weights, momentum and variance "
                "continue from the checkpoint; residuals (the compression error that is carried from step to step, different on every "
                f"rank) start from zero. Training goes on, but not bit for bit as without the interruption{hint}."
            )

    def remove(self, strategy: Any, path: str, optimizers: Iterable[OnebitOptimizer]) -> None:
        """Notes that a file has been removed, and removes what lies beside it."""
        self._good = [other for other in self._good if other != path]
        self.tell(optimizers)
        if strategy.local_rank == 0:  # on every node: disks may be the nodes' own
            self._in_flight.pop(path, None)
            remove_shards(path)

    def close(self) -> None:
        """Call it when an asynchronous plugin has written everything."""
        while self._in_flight:
            path, written = self._in_flight.popitem()
            remove_shards(path, shard_ids(path).difference(written[-1:]))
