"""What the callbacks share: checks of options, the compressed optimizers of a Trainer, errors of its tree."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_onebit._trees import PACKAGES, check_tree, tree_of


def check_count(name: str, value: Any, *, remedy: str = "give a whole number of steps, at least 1") -> None:
    """Raises unless ``value`` is an integer of at least 1.

    Raises:
        TypeError: not an integer.
        ValueError: smaller than 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer, got {value!r}: {remedy}.")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value!r}: {remedy}.")


def check_number(name: str, value: Any, low: float, high: float, remedy: str) -> None:
    """Raises unless ``value`` is a real number with ``low < value < high``.

    Raises:
        TypeError: not a number.
        ValueError: outside of the interval (or not a number at all, ``nan``).
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a number, got {value!r}: {remedy}.")
    if math.isnan(value) or not low < value < high:
        raise ValueError(f"`{name}` must lie between {low:g} and {high:g} (both excluded), got {value!r}: {remedy}.")


def check_flag(name: str, value: Any) -> None:
    """Raises unless ``value`` is a bool.

    Raises:
        TypeError: not a bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")


def misconfiguration(owner: Any, message: str) -> Exception:
    """Lightning's ``MisconfigurationException`` of the tree that ``owner`` (a Trainer) belongs to."""
    tree = tree_of(owner)
    if tree is None:
        return ValueError(message)
    error: Exception = importlib.import_module(f"{PACKAGES[tree]}.utilities.exceptions").MisconfigurationException(
        message
    )
    return error


def check_trainer(callback: Any, trainer: Any) -> None:
    """Raises unless ``trainer`` is of the callback's Lightning tree and trains with one of this package's strategies.

    Raises:
        TypeError: the callback is bound to the other Lightning tree.
        MisconfigurationException: another strategy, under which the callback could do nothing.
    """
    check_tree(callback, trainer)
    if not hasattr(trainer.strategy, "onebit_optimizers"):
        name = type(callback).__name__
        raise misconfiguration(
            trainer,
            f"{name} works with the strategies of lightning_onebit, but the Trainer uses "
            f"{type(trainer.strategy).__name__}: "
            f'set `strategy="onebit_adam"` (or an OnebitStrategy), or remove {name}.',
        )


def compressed_optimizers(callback: Any, trainer: Any) -> Sequence[Any]:
    """The compressed optimizers of the running fit.

    Raises:
        MisconfigurationException: there are none, so that the callback could do nothing.
    """
    optimizers: Sequence[Any] = trainer.strategy.onebit_optimizers
    if not optimizers:
        name = type(callback).__name__
        raise misconfiguration(
            trainer,
            f"{name} found no compressed optimizer: `configure_optimizers` returned none and none was converted. "
            f"Return `strategy.optimizer(...)` or an optimizer of lightning_onebit, or remove {name}.",
        )
    return optimizers


def set_up_anew(trainer: Any, watched: Sequence[Any]) -> bool:
    """Whether the program has set its optimizers up anew since a callback began to watch them (``strategy.setup_optimizers(trainer)``)."""
    now = trainer.strategy.onebit_optimizers
    return bool(now) and now != list(watched)


def optimizer_name(index: int, count: int, optimizer: Any) -> str:
    """How messages call an optimizer: its class, with its number where there are several."""
    name = type(optimizer).__name__
    return name if count == 1 else f"{name} {index}"


def loss_of(outputs: Any, trainer: Any) -> torch.Tensor | None:
    """The loss that ``training_step`` returned; None if it returned none.

    Lightning hands callbacks the loss divided by the accumulation factor, which a GradientAccumulationScheduler changes.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() * trainer.accumulate_grad_batches if isinstance(loss, torch.Tensor) else None


def stepped_batches(trainer: Any) -> int:
    """Batches that ended in an optimizer step so far: what ``trainer.estimated_stepping_batches`` estimates.

    ``trainer.global_step`` is no substitute: it counts the steps of all optimizers together.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
