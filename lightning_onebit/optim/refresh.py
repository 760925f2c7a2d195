"""Refreshes: single dense steps, ever rarer, in which second moments that have frozen learn again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_onebit._choices import Recipe, RefreshRule, choices
from lightning_onebit._names import shown_as
from lightning_onebit.comm.ranges import ranged
from lightning_onebit.kernels import Packed
from lightning_onebit.optim.arena import Phase
from lightning_onebit.optim.late import LateParameters
from lightning_onebit.optim.moments import MomentOptions
from lightning_onebit.optim.options import ExchangeOptions, check_choice, check_integer
from lightning_onebit.optim.policies import REFRESHES_PER_DOUBLING, VariancePolicy
from lightning_onebit.optim.rules import fp32_zeros_like

#: a refresh follows so many steps after the first gradient of a parameter, which changes what the others are given
STEPS_BEFORE_REFRESH = 4


@dataclass(frozen=True, kw_only=True)
class RefreshOptions(MomentOptions):
    """Options of the algorithms whose second moments are refreshed.

    Attributes:
        recipe: ``"default"``, or ``"published"`` for the rule of the paper (with the floor of the denominators): the momentum itself is
            compressed, not divided by its denominators, and nothing refreshes second moments that have frozen.
        refresh: compressed steps from one refresh of the frozen second moments, a dense step, to the next, >= 1. ``"auto"``: the
            schedule of 0/1 Adam, but 15 compressed steps at least: about a sixteenth to a thirty-second of the steps so far, so
            that refreshes cost ever less. ``"never"``: the second moments stay as they froze, as published. A refresh holds 8
            bytes per parameter more while it lasts.
    """

    recipe: Recipe = "default"
    refresh: int | RefreshRule = "auto"
    # refreshes after which the gap between refreshes doubles: smaller in tests
    _doubling: int = REFRESHES_PER_DOUBLING

    def __post_init__(self) -> None:
        """Checks every option."""
        super().__post_init__()
        check_choice("recipe", self.recipe, choices(Recipe))
        if isinstance(self.refresh, str):
            check_choice("refresh", self.refresh, choices(RefreshRule))
            return
        check_integer("refresh", self.refresh, least=1)
        if self.recipe == "published":
            raise ValueError(
                f"refresh={self.refresh!r} has no effect with recipe='published', which never refreshes; leave one of them out"
            )


@shown_as("OnebitOptimizer")
class RefreshingAdam(LateParameters):
    """Base of the optimizers whose second moments are refreshed by dense steps on 0/1 Adam's schedule; see ``OnebitAdam``."""

    options: RefreshOptions

    def __init__(
        self, params: Any, defaults: dict[str, Any], options: RefreshOptions, exchange: ExchangeOptions
    ) -> None:
        self.variance_policy = VariancePolicy(options._doubling)
        super().__init__(params, defaults, options, exchange)

    def dense_steps_after_freeze(self, freeze_step: int, steps: int) -> int:
        """How many steps of a run of ``steps`` that freezes after ``freeze_step`` are refreshes."""
        after = replace(self.variance_policy, interval=self._interval)
        return after.count(freeze_step, steps) if self._refreshes else 0

    @property
    def _preconditioned(self) -> bool:
        return self.options.recipe == "default"

    @property
    def _refreshes(self) -> bool:
        return self.options.refresh != "never" and self.options.recipe == "default"

    @property
    def _interval(self) -> int | None:
        """Steps from a refresh after the freeze to the next, where the user has said how many are compressed between them."""
        refresh = self.options.refresh
        return None if isinstance(refresh, str) else refresh + 1

    def _refresh_within(self, steps: int) -> bool:
        """Whether one of the next ``steps`` steps is a refresh of frozen second moments."""
        return self._refreshes and self._phase is not Phase.WARMUP and self.variance_policy.due(self._steps + steps)

    def _refresh_due(self) -> bool:
        """Whether the next step is one, which needs equal replicas."""
        return self._refresh_within(1) and not self.mid_local

    @ranged("refresh")
    def _refresh(self, members: list[int]) -> None:
        """A dense step: momenta meet, second moments learn, and weights move by the denominators that these give."""
        before = self._momentum
        self._hold_momentum_flat()
        self._step_late(self._wake(members))
        members = [i for i in members if i not in self._late]
        r = self._flat["r"]
        self._flat["v"] = self._second_moments(r, fp32_zeros_like(r), aged=False)
        for i in members:
            self._learn(i, self._updates_of_refresh(i))
            self._invert_slot(self._slot_of[i], self._flat["v"], r)
            self._move(i)
        del self._flat["v"]
        self._publish(members)
        self._count(members)
        self._hold_momentum_by_bucket()
        self._restore_momentum(before, set(members))
        self.variance_policy.record(self._steps + 1)

    def _updates_of_refresh(self, index: int) -> float:
        """For how many updates of a second moment the next step counts, if it refreshes: see ``VariancePolicy.updates``."""
        known = self._variance_steps.get(index, self._t[index])
        return self.variance_policy.updates(self._steps + 1, self._group(index)["betas"][1], known)

    def _restore_momentum(self, before: list[Tensor | Packed], learned: set[int]) -> None:
        """Gives who had no gradient in a refresh its momentum back, which its change of form and back has rounded."""
        idle = torch.tensor([i not in learned and i not in self._late for i in self._slots], device=self._device)
        for bucket, held in zip(self._buckets(), before, strict=False):
            mask = idle[bucket.block_param]
            now = self._momentum[bucket.index]
            if isinstance(now, Tensor) and bool(mask.any()):
                whole = torch.empty_like(now)
                if isinstance(held, Packed):
                    self._kernels.unpack(held, bucket.lengths, whole)
                else:
                    whole.copy_(held)
                now.view(-1, bucket.block_size)[mask] = whole.view(-1, bucket.block_size)[mask]

    def _freeze_now(self) -> None:
        self.variance_policy.freeze(self._steps, self._interval, learned=self._has_dense_warm_up)
        super()._freeze_now()

    def _advance(self) -> None:
        super()._advance()
        if not self.compresses and self._steps > self.variance_policy.last_step:
            self.variance_policy.record(self._steps)  # alone, they learn at every step

    def _first_gradients(self, indices: list[int]) -> None:
        """See the base; a refresh follows once those have moved a little."""
        super()._first_gradients(indices)
        self._refresh_by(self._steps + 1 + STEPS_BEFORE_REFRESH)

    def _take_in(self, index: int, state: dict[str, Tensor]) -> None:
        """See the base; a refresh follows."""
        super()._take_in(index, state)
        self._refresh_by(self._steps + 1)

    def _refresh_by(self, step: int) -> None:
        """Makes ``step`` a refresh of frozen second moments, unless there is one before it."""
        if self._refreshes and self._phase is not Phase.WARMUP:
            self.variance_policy.bring_forward(step)

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def _books(self) -> dict[str, Any]:
        return {**super()._books(), "variance_policy": self.variance_policy.state_dict()}

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        if "variance_policy" in books:
            self.variance_policy.load_state_dict(books["variance_policy"])
        else:  # nobody's, or a state of plain Adam
            self.variance_policy = VariancePolicy(self.variance_policy.scaler)
            if self._steps:
                self.variance_policy.record(self._steps)
        self.variance_policy.frozen = phase is not Phase.WARMUP
        self.variance_policy.interval = self._interval if self.variance_policy.frozen else None
        super()._load_phase(phase, books, saved)


@shown_as("OnebitOptimizer")
class CompressingAdam(RefreshingAdam):
    """Base of the optimizers that compress every step after the freeze but refreshes."""

    def _wants_dense(self) -> bool:
        return super()._wants_dense() or self._refresh_due()

    def _may_be_dense(self) -> bool:
        return super()._may_be_dense() or self._refreshes

    def _step_dense(self, active: list[int]) -> None:
        planned: set[int] = set()
        if self.compresses and self._refresh_due():
            planned = self._slot_of.keys() - self._late.keys()
            # even where no parameter has a gradient in this step: its turn is over then
            self._refresh([i for i in active if i in planned])
        super()._step_dense([i for i in active if i not in planned])
