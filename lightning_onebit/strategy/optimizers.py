"""What a strategy makes of its options: compressed optimizers, new ones or converted ones, and an end of the warm-up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from lightning_onebit._say import rank_zero_info
from lightning_onebit.engine import ExchangeOptions, OnebitOptimizer, Phase
from lightning_onebit.strategy.convert import (
    convert,
    no_counterpart,
    obstacle,
    repoint_schedulers,
    stand_down,
    stand_in,
    untrainable,
)
from lightning_onebit.strategy.registry import SHARDED, Algorithm, check_options


@dataclass(eq=False)
class OptimizerMaker:
    """Makes the optimizers of one algorithm, and knows which ones it has made.

    Attributes:
        algorithm: what it makes.
        options: of the algorithm, as the strategy was given them.
        exchange: of the strategy; None: the optimizers' own.
        converts: whether plain optimizers are converted.
        dense: whether those that cannot be compressed are trained with dense averages.
        error: what is raised where an optimizer cannot be trained.
        sharded: whether the strategy is that for sharded models, for messages.
    """

    algorithm: Algorithm
    options: dict[str, Any]
    exchange: ExchangeOptions | None
    converts: bool
    dense: bool
    error: type[Exception]
    sharded: bool = False
    _made: WeakSet[OnebitOptimizer] = field(default_factory=WeakSet, init=False)
    _converted: WeakKeyDictionary[torch.optim.Optimizer, OnebitOptimizer] = field(
        default_factory=WeakKeyDictionary, init=False
    )

    def __post_init__(self) -> None:
        """Checks the options."""
        check_options(self.algorithm, self.options, self.exchange)
        if self.exchange is not None and self.exchange.process_group is not None:
            raise ValueError(
                "process_group of the exchange: the strategy makes process groups of all ranks by itself; leave it out"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process has made nothing."""
        given = (self.algorithm, self.options, self.exchange, self.converts, self.dense, self.error, self.sharded)
        return type(self), given

    @property
    def given(self) -> dict[str, Any]:
        """All that the strategy was told of its optimizers."""
        return {**self.options, **({} if self.exchange is None else {"exchange": self.exchange})}

    @property
    def strategy(self) -> str:
        """Class of the strategy."""
        return "OnebitModelParallelStrategy" if self.sharded else "OnebitStrategy"

    def __str__(self) -> str:
        """The same as keyword arguments."""
        return ", ".join(f"{name}={value!r}" for name, value in self.given.items())

    def make(self, params: Any, **kwargs: Any) -> OnebitOptimizer:
        """An optimizer with the strategy's options and others; ``ValueError`` where they contradict each other."""
        for name, value in self.given.items():
            if name in kwargs and kwargs[name] != value:
                raise ValueError(
                    f"{name}={kwargs[name]!r} was given to strategy.optimizer() and {name}={value!r} to the strategy; keep one of them"
                )
        made = self.algorithm.optimizer(params, **{**self.given, **kwargs})
        self._made.add(made)
        return made

    def adopt(self, optimizer: torch.optim.Optimizer, schedulers: Iterable[Any]) -> torch.optim.Optimizer:
        """The optimizer that trains in the place of one of ``configure_optimizers``; schedulers follow a conversion."""
        name = type(optimizer).__name__
        if isinstance(optimizer, OnebitOptimizer):
            self._check_direct(optimizer, name)
            return optimizer
        if name == "_MockOptimizer":  # Lightning's stand-in for "no optimizer"
            return optimizer
        if type(optimizer) in self.algorithm.converts:
            reason = obstacle(optimizer) or (untrainable(optimizer) if self.dense else None)
            if self.converts and reason is None:
                return self._convert(optimizer, schedulers)
            reason = reason or "conversion is turned off (convert_optimizers=False)"
        else:
            reason = no_counterpart(optimizer)
        if self.dense:
            rank_zero_info(f"{name} is trained with dense averaging, as DDP would train it ({reason}).")
            return optimizer
        raise self.error(
            f"{name} cannot be trained by {self.algorithm.name!r}: {reason}. Return `self.trainer.strategy.optimizer(params, ...)` or "
            f"`lightning_onebit.{self.algorithm.optimizer.__name__}(params, ...)` from `configure_optimizers`, or train it uncompressed, "
            f'as DDP would, with `{self.strategy}(other_optimizers="dense")`.'
        )

    def _check_direct(self, optimizer: OnebitOptimizer, name: str) -> None:
        if optimizer.algorithm != self.algorithm.name:
            suggested = f'`strategy="{optimizer.algorithm}{SHARDED if self.sharded else ""}"`'
            raise self.error(
                f"the strategy's algorithm is {self.algorithm.name!r}, but `configure_optimizers` returned {name}: set "
                f"{suggested}, or return `self.trainer.strategy.optimizer(params, ...)`."
            )
        if self.given and optimizer not in self._made:
            raise self.error(
                f"{self} of the strategy cannot take effect: `configure_optimizers` built {name} itself. Return "
                f"`self.trainer.strategy.optimizer(params, ...)`, which knows the strategy's options, or give them to {name}."
            )

    def _convert(self, optimizer: torch.optim.Optimizer, schedulers: Iterable[Any]) -> OnebitOptimizer:
        converted = self._converted.get(optimizer)  # the module may have returned the same object in an earlier fit()
        if converted is None:
            converted = self._converted[optimizer] = convert(optimizer, self.algorithm.optimizer, self.given)
            self._made.add(converted)
            rank_zero_info(
                f"{type(optimizer).__name__} is converted to {type(converted).__name__} with the same hyperparameters, parameter groups "
                f"and schedulers (`{self.strategy}(convert_optimizers=False)` turns conversion off)."
            )
        try:
            repoint_schedulers(schedulers, optimizer, converted)
        except ValueError as error:
            raise self.error(str(error)) from error
        stand_in(optimizer, converted)
        return converted

    def stand_in(self) -> None:
        """Makes plain optimizers show what trains in their place, after a load, which makes new groups."""
        for plain, converted in self._converted.items():
            stand_in(plain, converted)

    def stand_down(self) -> None:
        """Gives plain optimizers back to the program."""
        for plain, converted in self._converted.items():
            stand_down(plain, converted)


class DefaultFreeze:
    """The ``VarianceFreeze`` that a strategy adds to a Trainer where nothing says when the dense warm-up ends."""

    def __init__(self, callback: type[Any]) -> None:
        self._callback = callback
        self._added: Any = None

    def offer(self, trainer: Any, wanted: bool) -> None:
        """Adds it early enough to be set up and restored from a checkpoint like any other, if it is ``wanted`` and there is none."""
        self.withdraw(trainer)
        if trainer.state.fn == "fit" and wanted and not any(isinstance(c, self._callback) for c in trainer.callbacks):
            self._added = self._callback()
            trainer.callbacks.insert(0, self._added)

    def keep_if_needed(self, trainer: Any, optimizers: Sequence[OnebitOptimizer], error: type[Exception]) -> None:
        """Keeps it only if the optimizers leave the freeze to it; ``error`` where only some of them do."""
        if self._added is None:
            return
        own = [optimizer.freeze_step is not None for optimizer in optimizers]
        if any(own) and not all(own):
            raise error(
                "some compressed optimizers have a `freeze_step` and others have none: give it to all of them, or to none and add "
                "VarianceFreeze to the Trainer's callbacks."
            )
        if any(own) or all(optimizer.phase is not Phase.WARMUP for optimizer in optimizers):
            self.withdraw(trainer)
            return
        rank_zero_info(
            "Nothing says when the dense warm-up ends: added VarianceFreeze(), which ends it when the learning rate no longer rises, "
            "after 10 % of the planned steps at the earliest and 20 % at the latest (after 20 % if nothing refreshes the variance), but "
            "not before 100 steps or half of the run. Add "
            "VarianceFreeze to the Trainer's callbacks, or give `freeze_step`, to choose."
        )

    def withdraw(self, trainer: Any) -> None:
        """Takes it out of the callbacks, if it is there."""
        if self._added is not None:
            trainer.callbacks[:] = [c for c in trainer.callbacks if c is not self._added]
            self._added = None
