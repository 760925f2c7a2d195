"""1-bit Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_onebit.algorithms.refresh import RefreshedMoments, RefreshOptions
from lightning_onebit.algorithms.schedules import VariancePolicy
from lightning_onebit.engine.optimizer import OnebitOptimizer
from lightning_onebit.engine.options import ExchangeOptions, takes
from lightning_onebit.engine.rule import Rounds, Rule
from lightning_onebit.engine.step import Step


@dataclass(frozen=True, kw_only=True)
class AdamOptions(RefreshOptions):
    """Options of 1-bit Adam; see ``RefreshOptions`` and ``MomentOptions``."""


class Adam(RefreshedMoments):
    """The rule of ``OnebitAdam``: warm-up, freeze and an exchange are ``FrozenMoments``', refreshes are ``RefreshedMoments``'."""

    sends_at_once: ClassVar[bool] = True

    def wants_dense(self) -> bool:
        """The warm-up and refreshes."""
        return super().wants_dense() or self.refresh_due()

    def may_be_dense(self) -> bool:
        return super().may_be_dense() or self.refreshes

    def step_dense(self, step: Step, active: list[int]) -> None:
        """A refresh of what is exchanged, if it is one, and a dense update of the rest."""
        planned: set[int] = set()
        if self.kept.compresses and self.refresh_due():
            planned = self.kept.layout.slot_of.keys() - self.kept.late.keys()
            # even where no parameter has a gradient in this step: its turn is over then
            self.refresh(step, [i for i in active if i in planned])
        step.update([i for i in active if i not in planned])


@takes(AdamOptions)
class OnebitAdam(OnebitOptimizer):
    r"""1-bit Adam: Adam with a frozen second moment and one-bit, error-compensated momentum.

    For ``t <= freeze_step`` (warm-up) gradients are averaged densely and the step is that of ``torch.optim.AdamW``.
    Afterwards::

        m = exchange(b1 m + (1-b1) g_i)                        # the averaged, compressed momentum becomes m
        x -= lr*wd*x + lr * mhat / (sqrt(vhat_freeze) + eps)

    By the default recipe it is the step, not the momentum, that is compressed, so that every coordinate gets compression noise in
    proportion to the step it takes: with ``D = sqrt(vhat_freeze) + eps``::

        u = exchange(b1 u + (1-b1) g_i / D) ; x -= lr*wd*x + lr * uhat        # u = m/D

    Source: "1-bit Adam", arXiv 2102.02888, algorithm 1; this library's differences are listed in docs/differences.

    ``.grad`` holds the local gradient; ``step()`` does all communication that is pending. Do not wrap the module in
    DistributedDataParallel. Weight decay is decoupled, as in AdamW. Parameters may be fp32, bf16 or fp16 (fp32 master
    weights are kept for the latter two); all state is fp32.

    Args:
        params: parameters or parameter groups. A group may set ``lr``, ``betas``, ``eps``, ``weight_decay`` and
            ``compress=False`` (always averaged densely; its second moments keep learning).
        lr: learning rate, >= 0.
        betas: decay of the first and second moment, each in ``[0, 1)``.
        eps: added to the denominator, >= 0.
        weight_decay: decoupled weight decay, >= 0; 0.0 by default, where torch's AdamW has 0.01.
        exchange: how ranks exchange, see ``ExchangeOptions``.
        **options: see ``AdamOptions``.

    Raises:
        TypeError: an option or parameter of the wrong type (sparse and complex parameters among them).
        ValueError: an option out of range; the message names it, its value and the range.

    Example:
        >>> optimizer = OnebitAdam(model.parameters(), lr=1e-3, weight_decay=0.01, freeze_step=1000)
        >>> loss(model(x)).backward()
        >>> optimizer.step()
    """

    algorithm = "onebit_adam"
    rule_class: ClassVar[type[Rule]] = Adam

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        exchange: ExchangeOptions | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, options, exchange
        )

    @property
    def variance_policy(self) -> VariancePolicy:
        """When second moments are refreshed."""
        policy: VariancePolicy = self._engine.rule.variance_policy  # type: ignore[attr-defined]
        return policy

    @classmethod
    def count_rounds(cls, steps: int, freeze_step: int, **schedule: Any) -> Rounds:
        """See the base; refreshes are dense."""
        dense = freeze_step + VariancePolicy().count(freeze_step, steps)
        return Rounds(dense, steps - dense)
