"""``DivergenceGuard``: back to dense steps when a run blows up after the freeze."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_onebit._names import shown_as
from lightning_onebit._say import below_bar, rank_zero_info
from lightning_onebit.algorithms import OnebitAdam, OnebitLamb
from lightning_onebit.callbacks._common import OnebitCallback, everyone, misconfiguration, named_optimizers
from lightning_onebit.comm import Transport, share_values
from lightning_onebit.engine import Phase
from lightning_onebit.engine.options import check_integer, check_number


@shown_as("DivergenceGuard")
class DivergenceGuardMixin(OnebitCallback):
    """Watches loss and residuals while steps are compressed, and falls back to dense steps when they blow up.

    Every ``every_n_steps`` batches the ranks compare notes (24 bytes each), and judge if all those steps were compressed.
    A blow-up is a mean loss that is not finite or exceeds the best one so far by more than ``loss_factor - 1`` times its size,
    or a worker residual larger than ``residual_limit`` times the momentum on any rank. Batches whose step all ranks have skipped
    do not count, and a mean of fewer than half of the batches is not judged. After a blow-up all compressed optimizers take dense
    steps again, which clears the residuals and lets the variance learn what has changed; after ``dense_steps`` of them they
    freeze anew. After ``max_fallbacks`` the run stays dense. Every switch is announced, and all ranks make it together.

    For 1-bit Adam and 1-bit LAMB, with the freeze made by ``VarianceFreeze`` (or by the default).

    Args:
        every_n_steps: batches between two looks.
        loss_factor: how many times the best mean loss counts as a blow-up, more than 1; None: do not look at the loss.
        residual_limit: largest residual norm, relative to the momentum's; None: do not look at residuals.
        dense_steps: dense steps of a fallback; None takes ``1/(1 - beta2)``, the memory of the variance.
        max_fallbacks: fallbacks after which the run stays dense.

    Raises:
        TypeError: an option has the wrong type, or (at setup) the Trainer is from the other Lightning tree.
        ValueError: an option is out of range, or nothing is looked at.
        MisconfigurationException: (when fitting starts) an optimizer of another algorithm, or with its own
            ``freeze_step``; (at the first batch) ``training_step`` returns no loss although ``loss_factor`` is set.
        CollectiveTimeout: (while training, and where a checkpoint is saved) a rank did not take part within the strategy's
            ``timeout``.

    Example:
        >>> Trainer(strategy="onebit_adam", callbacks=[VarianceFreeze(0.15), DivergenceGuard()])
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        loss_factor: float | None = 1.5,
        residual_limit: float | None = 10.0,
        dense_steps: int | None = None,
        max_fallbacks: int = 3,
    ) -> None:
        super().__init__()
        check_integer("every_n_steps", every_n_steps, least=1)
        check_number("loss_factor", loss_factor, above=1, optional=True)
        check_number("residual_limit", residual_limit, above=0, optional=True)
        if loss_factor is None and residual_limit is None:
            raise ValueError(
                "loss_factor=None and residual_limit=None: DivergenceGuard would look at nothing; give one of them"
            )
        check_integer("dense_steps", dense_steps, least=1, optional=True)
        check_integer("max_fallbacks", max_fallbacks, least=1)
        self.every_n_steps = every_n_steps
        self.loss_factor = loss_factor
        self.residual_limit = residual_limit
        self.dense_steps = dense_steps
        self.max_fallbacks = max_fallbacks
        self.fallbacks = 0
        self.best_loss = math.inf
        self._refreeze_at: dict[int, int] = {}
        self._start_over()
        # the window of every rank, as last told or loaded; None: not since the last batch
        self._told: list[list[float]] | None = None
        self._resumed = False
        self._transport: Transport | None = None

    def _start_over(self) -> None:
        self._batches = 0
        self._compressed = 0  # batches since a step was dense
        self._compressing: dict[int, bool] = {}  # whether each optimizer's last step was compressed

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses optimizers that cannot fall back."""
        for name, optimizer in named_optimizers(self, trainer):
            if not isinstance(optimizer, (OnebitAdam, OnebitLamb)):
                raise misconfiguration(
                    trainer,
                    f"DivergenceGuard falls back to a dense warm-up, which {name} does not have: use onebit_adam or "
                    "onebit_lamb, or remove DivergenceGuard.",
                )
            if optimizer.freeze_step is not None:
                raise misconfiguration(
                    trainer,
                    f"{name} has freeze_step={optimizer.freeze_step} and would freeze again at once after a fallback of "
                    f"DivergenceGuard: give VarianceFreeze({optimizer.freeze_step}) instead.",
                )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Connects the ranks; goes on within the window that a checkpoint has cut."""
        self._transport = everyone(trainer, "DivergenceGuard")
        self._counted = _counts(trainer.strategy.onebit_optimizers)
        # sum and number of the losses since the last look, and of those of batches that no step has followed yet. Sums are tensors on
        # the losses' device, which nobody waits for, and go on from a saved one to the same bits.
        self._window: list[Any] = [0.0, 0, 0.0, 0]
        told, self._told = self._told, None
        if self._resumed and told is not None and self.loss_factor is not None:
            size, rank = self._transport.size, self._transport.topology.rank
            # on another number of ranks the mean of all parts
            self._window = told[rank] if len(told) == size else [sum(c) / len(told) for c in zip(*told, strict=True)]
        if not self._resumed:
            self._start_over()
        self._resumed = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Collects the loss, looks when it is time, and ends a fallback."""
        optimizers = trainer.strategy.onebit_optimizers
        self._told = None
        self._batches += 1
        for index, optimizer in enumerate(optimizers):
            # ledgers do not know of steps before a resume, after which no step may follow for batches
            if optimizer.ledger.last is not None:
                self._compressing[index] = not optimizer.ledger.last.dense
        self._compressed = self._compressed + 1 if any(self._compressing.values()) else 0
        if self.loss_factor is not None:
            self._collect(_loss_of(outputs, trainer), optimizers)
        self._end_fallbacks(trainer)
        if self._batches % self.every_n_steps:
            return
        loss, residual = self._compare_notes(trainer, pl_module, optimizers)
        # What happened in dense steps (the end of a fallback, say) is not to be blamed on compression.
        reason = self._blow_up(loss, residual) if self._compressed >= self.every_n_steps else None
        if loss is not None and math.isfinite(loss):
            self.best_loss = min(self.best_loss, loss)
        if reason is not None:
            self._fall_back(optimizers, reason, trainer.global_step)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the losses of a window that the checkpoint cuts, of every rank. Collective, as saving is."""
        if self._transport is not None:
            self._told = self._tell(trainer, pl_module)
        mine = checkpoint.get("callbacks", {}).get(getattr(self, "state_key", None))  # Lightning's Callback has it
        if mine is not None and self._told is not None:
            mine["window"] = self._told

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keeps the losses of every rank for a checkpoint that is saved when the ranks are no longer connected."""
        self._told = self._tell(trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lets go of the process group."""
        self._transport = None

    def state_dict(self) -> dict[str, Any]:
        """Best loss, fallbacks so far, the steps at which running fallbacks end, when it looks next and what steps were: plain numbers.

        The losses of a window that a checkpoint cuts differ by rank; ``on_save_checkpoint`` adds them. Without them the first look
        after resuming takes the mean of the losses since then, and leaves losses alone if these are fewer than half a window's.
        """
        return {
            "best_loss": self.best_loss,
            "fallbacks": self.fallbacks,
            "refreeze_at": dict(self._refreeze_at),
            "batches": self._batches,
            "compressed": self._compressed,
            "compressing": dict(self._compressing),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a checkpoint."""
        self.best_loss, self.fallbacks = state_dict["best_loss"], state_dict["fallbacks"]
        self._refreeze_at = dict(state_dict["refreeze_at"])
        self._batches, self._compressed = state_dict["batches"], state_dict["compressed"]
        self._compressing = dict(state_dict["compressing"])
        self._told = state_dict.get("window")
        self._resumed = True

    # ----- losses and residuals ---------------------------------------------------------------------------------------

    def _collect(self, loss: torch.Tensor, optimizers: Any) -> None:
        """Keeps the losses of batches whose step has been made; a step that all ranks skip does no harm, whatever its loss."""
        total, count, pending, batches = self._window
        pending, batches = pending + loss.double(), batches + 1
        (steps, skipped), before = _counts(optimizers), self._counted
        if (steps, skipped) != before:
            if skipped == before[1]:
                total, count = total + pending, count + batches
            pending, batches = 0.0, 0
        self._counted = steps, skipped
        self._window = [total, count, pending, batches]

    def _tell(self, trainer: Any, pl_module: Any) -> list[list[float]] | None:
        """The window: a row per rank."""
        if self.loss_factor is None:
            return None
        rows: list[list[float]] = self._gather(trainer, pl_module, self._window, "losses of a window").tolist()
        return rows

    def _gather(self, trainer: Any, pl_module: Any, mine: list[Any], what: str) -> torch.Tensor:
        """A row of every rank, on the host."""
        assert self._transport is not None  # on_train_start came first
        device = self._transport.device(pl_module.device)
        row = torch.tensor(list(map(float, mine)), dtype=torch.float64, device=device)
        self._transport.step = trainer.global_step
        return share_values(self._transport, row, what).cpu()

    def _compare_notes(self, trainer: Any, pl_module: Any, optimizers: Any) -> tuple[float | None, float]:
        """Mean loss since the last look over all ranks (None: of too few batches), and the largest residual ratio of any rank."""
        total, count, *pending = self._window
        self._window = [0.0, 0, *pending]
        residual = 0.0
        if self.residual_limit is not None:
            ratios = [o.residual_ratio() for o in optimizers if o.phase is Phase.COMPRESSED]
            # max() would pass over a nan.
            residual = math.inf if any(math.isnan(ratio) for ratio in ratios) else max(ratios, default=0.0)
        sums = self._gather(trainer, pl_module, [total, count, residual], "losses and residuals")
        batches = float(sums[:, 1].sum())
        few = 2 * batches < self.every_n_steps * len(sums)
        return None if few else float(sums[:, 0].sum()) / batches, float(sums[:, 2].max())

    def _blow_up(self, loss: float | None, residual: float) -> str | None:
        if loss is not None and self.loss_factor is not None:
            limit = self.best_loss + (self.loss_factor - 1) * abs(self.best_loss)
            if not math.isfinite(loss) or loss > limit:
                return f"the mean loss of the last {self.every_n_steps} batches is {loss:.4g}, the best was {self.best_loss:.4g}"
        if self.residual_limit is not None and residual > self.residual_limit:
            return f"the residual has grown to {residual:.3g} times the momentum"
        return None

    # ----- fallbacks --------------------------------------------------------------------------------------------------

    def _fall_back(self, optimizers: Any, reason: str, step: int) -> None:
        self.fallbacks += 1
        last = self.fallbacks >= self.max_fallbacks
        if last:  # of another optimizer, whose memory is longer
            self._refreeze_at.clear()
        for index, optimizer in enumerate(optimizers):
            if optimizer.phase is not Phase.COMPRESSED:
                continue
            optimizer.thaw()
            if not last:
                memory = max(1, round(1 / (1 - max(group["betas"][1] for group in optimizer.param_groups))))
                self._refreeze_at[index] = optimizer.steps + (self.dense_steps or memory)
        rank_zero_warn(
            f"DivergenceGuard: after step {step} {reason}. Fallback {self.fallbacks} of {self.max_fallbacks}: residuals are "
            "dropped, steps are dense and the variance learns again"
            + (", for the rest of the run." if last else f" until step {max(self._refreeze_at.values())}.")
        )

    def _end_fallbacks(self, trainer: Any) -> None:
        if not self._refreeze_at:
            return
        for index, (name, optimizer) in enumerate(named_optimizers(self, trainer)):
            if optimizer.steps < self._refreeze_at.get(index, math.inf):
                continue
            del self._refreeze_at[index]
            if optimizer.phase is Phase.WARMUP:
                optimizer.freeze()
                text = f"DivergenceGuard: {name} freezes its refreshed variance; the next step is compressed."
                rank_zero_info(below_bar(trainer, text))


def _counts(optimizers: Any) -> tuple[int, int]:
    """Steps that the optimizers have made and skipped, all together."""
    return sum(o.steps for o in optimizers), sum(o.skipped_steps for o in optimizers)


def _loss_of(outputs: Any, trainer: Any) -> torch.Tensor:
    """The loss that ``training_step`` returned, 0-d.

    Lightning hands callbacks the loss divided by the accumulation factor, which a GradientAccumulationScheduler changes.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, torch.Tensor):
        raise misconfiguration(
            trainer,
            "DivergenceGuard(loss_factor=...) needs the loss, but `training_step` returned none (manual optimization?): return "
            "it, or set loss_factor=None to watch residuals only.",
        )
    return (loss.detach() * trainer.accumulate_grad_batches).reshape(())
