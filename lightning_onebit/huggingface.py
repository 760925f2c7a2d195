"""The optimizers under Accelerate and ``transformers.Trainer``: one call each.

Both wrap the model in DistributedDataParallel themselves. What is here connects ``lightning_onebit.ddp`` with their clipping and their
checkpoints. Neither library is imported before it is used.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_onebit import ddp
from lightning_onebit.engine import OnebitOptimizer
from lightning_onebit.strategy.checks import params_of
from lightning_onebit.strategy.ddp import innermost

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer


def onebit_accelerate(accelerator: Accelerator, *models: torch.nn.Module) -> None:
    """Connects models and optimizers that ``accelerator.prepare`` has returned. Call it after that, on all ranks.

    Dense steps are averaged by DistributedDataParallel, compressed ones by the optimizer; ``accelerator.clip_grad_norm_`` clips
    by the norm over all ranks; ``save_state`` and ``load_state`` keep residuals, in ``residuals.json`` and a folder beside it.

    Args:
        accelerator: with at least one prepared optimizer of this package. Other optimizers are left alone.
        *models: all models that these optimizers train, as ``prepare`` has returned them.

    Raises:
        ValueError: no optimizer of this package was prepared, or one that trains none of the models.
        TypeError: a model is not wrapped in DistributedDataParallel (FSDP, DeepSpeed); see ``onebit_ddp``.

    Example:
        >>> model, optimizer, loader = accelerator.prepare(model, OnebitAdam(model.parameters(), freeze_step=1000), loader)
        >>> onebit_accelerate(accelerator, model)
    """
    optimizers = [o for o in map(innermost, accelerator._optimizers) if isinstance(o, OnebitOptimizer)]
    if not optimizers:
        raise ValueError(
            "onebit_accelerate(): no optimizer of lightning_onebit was prepared; call it after accelerator.prepare(model, optimizer, ...)"
        )
    left = list(optimizers)
    for model in models:
        own = {id(p) for p in model.parameters()}
        mine = [o for o in left if any(id(p) in own for p in params_of(o))]
        left = [o for o in left if o not in mine]
        if mine:
            ddp.onebit_ddp(model, *mine, scaler=accelerator.scaler)
    if left:
        raise ValueError(
            f"onebit_accelerate(): {type(left[0]).__name__} trains none of the {len(models)} models that were given; give all that "
            "accelerator.prepare has returned"
        )
    _clip_by_all_ranks(accelerator, optimizers)
    accelerator.register_save_state_pre_hook(lambda _, __, folder: ddp.save_residuals(folder, *optimizers))
    loading = _Loading(optimizers)
    accelerator.register_load_state_pre_hook(lambda _, folder: loading.begin(folder))


def onebit_trainer(trainer: Trainer) -> Trainer:
    """Connects a ``transformers.Trainer`` whose optimizer is one of this package. Call it before ``trainer.train()``.

    ``TrainingArguments(max_grad_norm=...)`` clips by the norm over all ranks. Checkpoints keep residuals, and
    ``resume_from_checkpoint`` brings them back. Evaluation and checkpoints see the model that all ranks share; 0/1 Adam synchronises
    when training ends. Loggers get ``onebit/bytes_sent`` (of the last step), ``onebit/dense_step`` and ``onebit/total_ratio`` beside the
    training loss.

    Args:
        trainer: made with ``optimizer_cls_and_kwargs=(OnebitAdam, {...})`` or ``optimizers=(optimizer, None)``.

    Returns:
        The same trainer.

    Raises:
        TypeError: when training begins: its optimizer is none of this package, or the model is sharded.

    Example:
        >>> adam = (OnebitAdam, {"lr": 5e-5, "weight_decay": 0.01, "freeze_step": 1000})
        >>> trainer = onebit_trainer(Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=adam))
        >>> trainer.train()
    """
    resumed_from: list[str] = []
    load = trainer._load_optimizer_and_scheduler

    @functools.wraps(load)
    def remember(checkpoint: str | None, *args: Any, **kwargs: Any) -> Any:
        resumed_from[:] = [checkpoint] if checkpoint else []
        return load(checkpoint, *args, **kwargs)

    trainer._load_optimizer_and_scheduler = remember  # type: ignore[method-assign]
    training, statistics = _callbacks(trainer, resumed_from)
    trainer.callback_handler.callbacks.insert(0, statistics)
    trainer.add_callback(training)
    return trainer


def _callbacks(trainer: Trainer, resumed_from: list[str]) -> tuple[Any, Any]:
    """What connects the optimizer when training begins and keeps residuals in checkpoints; what adds to the logs."""
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    class OnebitCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            optimizer = _trained_by(trainer)
            if args.max_grad_norm > 0 and optimizer.options.max_grad_norm is not None:
                raise ValueError(
                    f"TrainingArguments(max_grad_norm={args.max_grad_norm}) clips, and so does the optimizer "
                    f"(max_grad_norm={optimizer.options.max_grad_norm}); set max_grad_norm=0 in TrainingArguments"
                )
            ddp.onebit_ddp(trainer.model_wrapped, optimizer, scaler=trainer.accelerator.scaler)
            _clip_by_all_ranks(trainer.accelerator, [optimizer])
            if resumed_from:
                ddp.load_residuals(resumed_from.pop(), optimizer)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if control.should_training_stop:
                _trained_by(trainer).synchronise()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not args.save_only_model:
                folder = os.path.join(trainer._get_output_dir(None), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
                ddp.save_residuals(folder, _trained_by(trainer))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not args.load_best_model_at_end:  # the best one is in its place by now
                _trained_by(trainer).synchronise()

    class OnebitStatistics(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            ledger = _trained_by(trainer).ledger
            if logs is not None and "loss" in logs and ledger.last is not None:
                logs["onebit/bytes_sent"], logs["onebit/dense_step"] = ledger.last.bytes_sent, int(ledger.last.dense)
                logs["onebit/total_ratio"] = ledger.total.ratio

    return OnebitCallback(), OnebitStatistics()


def _trained_by(trainer: Any) -> OnebitOptimizer:
    optimizer = innermost(trainer.optimizer)
    if not isinstance(optimizer, OnebitOptimizer):
        raise TypeError(
            f"onebit_trainer(): the trainer's optimizer is {type(optimizer).__name__}; make the trainer with "
            "optimizer_cls_and_kwargs=(OnebitAdam, {...}) or optimizers=(optimizer, None)"
        )
    return optimizer


def _clip_by_all_ranks(accelerator: Any, optimizers: Sequence[OnebitOptimizer]) -> None:
    """Lets ``accelerator.clip_grad_norm_`` agree on the norm."""

    def clip(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        accelerator.unscale_gradients()
        return ddp.clip_grad_norm_(parameters, max_norm, *optimizers, norm_type=norm_type)

    accelerator.clip_grad_norm_ = clip


class _Loading:
    """Restores residuals once ``accelerator.load_state`` has loaded the model and the last of the optimizers."""

    def __init__(self, optimizers: Sequence[OnebitOptimizer]) -> None:
        self._optimizers = list(optimizers)
        self._folder: str | None = None
        self._left: list[torch.optim.Optimizer] = []
        for optimizer in optimizers:
            optimizer.register_load_state_dict_post_hook(self._loaded)

    def begin(self, folder: str) -> None:
        self._folder, self._left = folder, list(self._optimizers)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        if self._folder is None:
            return
        self._left = [other for other in self._left if other is not optimizer]
        if not self._left:
            folder, self._folder = self._folder, None
            ddp.load_residuals(folder, *self._optimizers)
