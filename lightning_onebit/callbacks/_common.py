"""What the callbacks share: the Trainer, strategy and optimizers that they work with, hooks on steps, a meeting of all ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from lightning_onebit._names import shown_as
from lightning_onebit.comm import ByteLedger, Topology, Transport
from lightning_onebit.strategy.trees import PACKAGES, check_tree, tree_of


@shown_as("Callback")
class OnebitCallback:
    """A callback that works with the strategies of this package only."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses a Trainer that the callback cannot work with.

        Raises:
            TypeError: the callback is bound to the other Lightning tree.
            MisconfigurationException: another strategy, under which the callback could do nothing.
        """
        if stage != "fit":
            return
        check_tree(self, trainer)
        if not hasattr(trainer.strategy, "onebit_optimizers"):
            name = type(self).__name__
            raise misconfiguration(
                trainer,
                f"{name} works with the strategies of lightning_onebit, but the Trainer uses "
                f"{type(trainer.strategy).__name__}: "
                f'set `strategy="onebit_adam"` (or an OnebitStrategy), or remove {name}.',
            )


@shown_as("Callback")
class WatchingCallback(OnebitCallback):
    """A callback that keeps something per compressed optimizer, and what it has changed elsewhere until training ends.

    ``on_train_start`` fills ``_watches``, of which every item has its optimizer as ``optimizer``, and ``_undo``.
    """

    on_train_start: Callable[[Any, Any], None]

    def __init__(self) -> None:
        super().__init__()
        self._watches: list[Any] = []
        self._undo: list[Callable[[], None]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Watches the new optimizers where the program has set them up anew (``strategy.setup_optimizers(trainer)``)."""
        now = trainer.strategy.onebit_optimizers
        if now and now != [watch.optimizer for watch in self._watches]:
            self.on_train_start(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stops watching."""
        self._release()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stops watching."""
        self._release()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stops watching."""
        self._release()

    def _release(self) -> None:
        while self._undo:
            self._undo.pop()()


def misconfiguration(owner: Any, message: str) -> Exception:
    """Lightning's ``MisconfigurationException`` of the tree that ``owner`` (a Trainer) belongs to."""
    tree = tree_of(owner)
    if tree is None:
        return ValueError(message)
    exceptions = importlib.import_module(f"{PACKAGES[tree]}.utilities.exceptions")
    error: Exception = exceptions.MisconfigurationException(message)
    return error


def named_optimizers(callback: Any, trainer: Any) -> list[tuple[str, Any]]:
    """The compressed optimizers of the running fit, each with its name in messages: its class, and its number if there are several.

    Raises:
        MisconfigurationException: there are none, so that the callback could do nothing.
    """
    optimizers = trainer.strategy.onebit_optimizers
    if not optimizers:
        name = type(callback).__name__
        raise misconfiguration(
            trainer,
            f"{name} found no compressed optimizer: `configure_optimizers` returned none and none was converted. "
            f"Return `strategy.optimizer(...)` or an optimizer of lightning_onebit, or remove {name}.",
        )
    numbered = len(optimizers) > 1
    return [
        (f"{type(one).__name__} {index}" if numbered else type(one).__name__, one)
        for index, one in enumerate(optimizers)
    ]


def everyone(trainer: Any, name: str) -> Transport:
    """All ranks, for small rounds that the optimizers' ledgers do not count; the strategy's timeout bounds every wait."""
    return Transport(Topology.create(), ByteLedger(), trainer.strategy.timeout, name)


def column(trainer: Any, name: str) -> Transport:
    """The same of the ranks that hold the same part of the model, one in each replica; all of them if the model is not sharded."""
    return Transport(Topology.create(column_group(trainer)), ByteLedger(), trainer.strategy.timeout, name)


def column_group(trainer: Any) -> Any:
    """The process group of these ranks; None: of all."""
    strategy = trainer.strategy
    return strategy.device_mesh["replicate"].get_group() if strategy.replicas.shards > 1 else None


def uncompressed(trainer: Any) -> str:
    """What to train with where compression does not pay."""
    return "Lightning's ModelParallelStrategy" if trainer.strategy.replicas.shards > 1 else '`strategy="ddp"`'
