"""Refreshes: single dense steps, ever rarer, in which second moments that have frozen learn again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_onebit._choices import Recipe, RefreshRule, choices
from lightning_onebit.algorithms.moments import FrozenMoments, MomentOptions
from lightning_onebit.algorithms.schedules import FEWEST_GRADIENTS, REFRESHES_PER_DOUBLING, VariancePolicy
from lightning_onebit.algorithms.updates import fp32_zeros_like
from lightning_onebit.comm.ranges import ranged
from lightning_onebit.engine.arenas import Phase
from lightning_onebit.engine.options import ExchangeOptions, check_choice, check_integer
from lightning_onebit.engine.rule import Saved
from lightning_onebit.engine.step import Step
from lightning_onebit.kernels import Packed

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
    # refreshes after which the gap between refreshes doubles, from the first step on: for tests
    _doubling: int | None = None

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


class RefreshedMoments(FrozenMoments):
    """Second moments that are refreshed by dense steps on 0/1 Adam's schedule."""

    def __init__(self, options: RefreshOptions, exchange: ExchangeOptions) -> None:
        dense = FEWEST_GRADIENTS if options.recipe == "default" and options._doubling is None else 0
        self.variance_policy = VariancePolicy(options._doubling or REFRESHES_PER_DOUBLING, dense)
        super().__init__(options, exchange)

    def dense_steps_after_freeze(self, freeze_step: int, steps: int) -> int:
        """See the base: refreshes."""
        after = replace(self.variance_policy, interval=self.interval)
        return after.count(freeze_step, steps) if self.refreshes else 0

    @property
    def preconditioned(self) -> bool:
        return bool(self.options.recipe == "default")

    @property
    def refreshes(self) -> bool:
        """Whether there are refreshes after the freeze."""
        return bool(self.options.refresh != "never" and self.options.recipe == "default")

    @property
    def interval(self) -> int | None:
        """Steps from a refresh after the freeze to the next, where the user has said how many are compressed between them."""
        refresh = self.options.refresh
        return None if isinstance(refresh, str) else refresh + 1

    def refresh_within(self, steps: int) -> bool:
        """Whether one of the next ``steps`` steps is a refresh of frozen second moments."""
        frozen = self.kept.phase is not Phase.WARMUP
        return self.refreshes and frozen and self.variance_policy.due(self.kept.steps + steps)

    def refresh_due(self) -> bool:
        """Whether the next step is one, which needs equal replicas."""
        return self.refresh_within(1) and not self.mid_local

    @ranged("refresh")
    def refresh(self, step: Step, members: list[int]) -> None:
        """A dense step: momenta meet, second moments learn, and weights move by the denominators that these give."""
        kept = self.kept
        before = kept.momentum
        kept.hold_flat()
        step.late.step(step, self.wake(step, members))
        members = [i for i in members if i not in kept.late]
        r = kept.flat["r"]
        kept.flat["v"] = self.second_moments(r, fp32_zeros_like(r), aged=False)
        self.learn_and_move(step, members)
        del kept.flat["v"]
        kept.publish(members)
        step.count(members)
        kept.hold_by_bucket()
        self._restore_momentum(before, set(members))
        self.variance_policy.record(kept.steps + 1)

    def learn_and_move(self, step: Step, members: list[int]) -> None:
        """``m = b1 m + (1-b1) g ; v = keep v + (1-keep) g^2 ; x -= lr wd x + lr_t m r``, as if that gradient had come several times.

        ``keep = b2^k`` of ``k`` updates; the denominators are those of the new v, with their floor.
        """
        kept, moments = self.kept, []
        for p in map(step.facts, members):
            updates, (b1, b2) = self.updates_of_refresh(p), p["betas"]
            g, keep = kept.grad(p.index).float(), b2**updates
            m = kept.moment("m", p.index).lerp_(g, 1 - b1)
            kept.moment("v", p.index).mul_(keep).addcmul_(g, g, value=1 - keep)
            self.updates[p.index] = self.updates.get(p.index, p.t) + updates
            moments.append(m)
        sums = self.sums_of({i: kept.part("v", i) for i in members})
        for p, m in zip(map(step.facts, members), moments, strict=True):
            self.invert(p.index, kept.part("v", p.index), kept.part("r", p.index), sums[p.index])
            lr_t = p["lr"] / self.first_correction(p, ahead=1)
            x = kept.weight(p.index).mul_(1 - p["lr"] * p["weight_decay"])
            x.addcmul_(m, kept.moment("r", p.index), value=-lr_t)

    def updates_of_refresh(self, p: Any) -> float:
        """For how many updates of a second moment the next step counts, if it refreshes: see ``VariancePolicy.updates``."""
        return self.variance_policy.updates(self.kept.steps + 1, p["betas"][1], self.updates.get(p.index, p.t))

    def _restore_momentum(self, before: list[Tensor | Packed], learned: set[int]) -> None:
        """Gives those without a gradient in a refresh their momentum back, which its change of form and back has rounded."""
        kept, layout = self.kept, self.kept.layout
        idle = torch.tensor([i not in learned and i not in kept.late for i in layout.slots], device=layout.device)
        for bucket, held in zip(layout.buckets, before, strict=False):
            mask = idle[bucket.block_param]
            now = kept.momentum[bucket.index]
            if isinstance(now, Tensor) and bool(mask.any()):
                whole = kept.unpack(held, bucket, torch.empty_like(now))
                now.view(-1, bucket.block_size)[mask] = whole.view(-1, bucket.block_size)[mask]

    def freezes(self) -> None:
        self.variance_policy.freeze(self.kept.steps, self.interval, learned=self.has_dense_warm_up)

    def leave_compressed(self) -> None:
        """See the base; schedules are those of a warm-up again."""
        super().leave_compressed()
        self.variance_policy.frozen, self.variance_policy.interval = False, None

    def made(self) -> None:
        """See the base; alone, second moments learn at every step."""
        if not self.kept.compresses and self.kept.steps > self.variance_policy.last_step:
            self.variance_policy.record(self.kept.steps)

    def first_gradients(self, step: Step, indices: list[int]) -> None:
        """See the base; a refresh follows once those have moved a little."""
        super().first_gradients(step, indices)
        self._refresh_by(self.kept.steps + 1 + STEPS_BEFORE_REFRESH)

    def take_in(self, index: int, own: dict[str, Tensor], updates: int) -> None:
        """See the base; a refresh follows."""
        super().take_in(index, own, updates)
        self._refresh_by(self.kept.steps + 1)

    def _refresh_by(self, step: int) -> None:
        """Makes ``step`` a refresh of frozen second moments, unless there is one before it."""
        if self.refreshes and self.kept.phase is not Phase.WARMUP:
            self.variance_policy.bring_forward(step)

    # ----- saving ------------------------------------------------------------------------------------------------------

    def books(self) -> dict[str, Any]:
        return {**super().books(), "variance_policy": self.variance_policy.state_dict()}

    def load(self, phase: Phase, books: Mapping[str, Any], saved: Saved, enter: Callable[[Phase], None]) -> None:
        policy = self.variance_policy
        if "variance_policy" in books:
            policy.load_state_dict(books["variance_policy"])
        else:  # nobody's, or a state of plain Adam
            policy = self.variance_policy = VariancePolicy(policy.scaler, policy.dense)
            if self.kept.steps:
                policy.record(self.kept.steps)
        policy.frozen = phase is not Phase.WARMUP
        policy.interval = self.interval if policy.frozen else None
        super().load(phase, books, saved, enter)
