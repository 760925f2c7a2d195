"""0/1 Adam."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_onebit.algorithms.local_steps import Local
from lightning_onebit.algorithms.moments import beta1, decay, new_share
from lightning_onebit.algorithms.refresh import RefreshedMoments, RefreshOptions
from lightning_onebit.algorithms.schedules import LocalSteps, SyncPolicy, VariancePolicy, replay_schedule
from lightning_onebit.algorithms.updates import compression_noise
from lightning_onebit.engine.arenas import Phase
from lightning_onebit.engine.masters import adopted
from lightning_onebit.engine.optimizer import OnebitOptimizer
from lightning_onebit.engine.options import ExchangeOptions, takes
from lightning_onebit.engine.rule import Rounds, Rule, Saved
from lightning_onebit.engine.step import Facts, Group, Step
from lightning_onebit.kernels.common import bit_sums

log = logging.getLogger("lightning_onebit")

#: how far noise may move weights in a one-bit round by the published rule, root mean square in units of lr, where the variance is young
LARGEST_NOISE = 3.0
#: refreshes from which a variance is no longer young
MATURE = 32


def largest_step(b1: float, b2: float) -> float:
    """How far Adam moves a weight in one step at most, in units of ``lr_t``: ``max(1, (1-b1) / sqrt(1-b2))``.

    Source: "Adam", arXiv 1412.6980, section 2.1. It is what a weight moves by whose first gradient comes now: its variance takes
    that gradient in. A frozen variance does not.
    """
    return max(1.0, (1.0 - b1) / (1.0 - b2) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class ZeroOneAdamOptions(RefreshOptions):
    """Options of 0/1 Adam.

    Attributes:
        freeze_step: last step in which the variance is refreshed as often as it is young, >= 1. None: by ``freeze()``. Before step 100 the
            variance is noise, see docs/freeze.
        local_steps: how rarely ranks synchronise after it. None: at every step; ``LocalSteps()`` is the published schedule. Local steps
            save bytes, need 12 bytes per parameter more, and cost loss (docs/convergence).
        recipe: ``"default"``, or ``"published"``: momenta themselves are compressed, refreshes grow rarer from the 18th step on, a refresh
            counts for one update of the variance (not for the steps since the last one), nothing refreshes it after the freeze, and
            local steps are not bounded. A variance that freezes before its 32nd refresh is then refused where one-bit noise divided by
            it would move the weights of a tensor by more than 3 lr in a step.
        refresh: see ``RefreshOptions``.
        bias_correction: see ``MomentOptions``.
        denominator_floor: see ``MomentOptions``.
        max_grad_norm: see ``Options``.
    """

    local_steps: LocalSteps | None = None

    def __post_init__(self) -> None:
        """Checks every option."""
        super().__post_init__()
        if not isinstance(self.local_steps, LocalSteps | None):
            raise TypeError(
                f"local_steps={self.local_steps!r} must be a LocalSteps or None, not {type(self.local_steps).__name__}"
            )


class ZeroOne(RefreshedMoments):
    """The rule of ``ZeroOneAdam``: which kind of step comes when, and what it does."""

    has_dense_warm_up: ClassVar[bool] = False  # in it, refreshes are few and grow rarer
    frozen_phase: ClassVar[Phase] = Phase.LOCAL
    fixed_exchange: ClassVar[dict[str, Any]] = {"overlap": "step"}

    def __init__(self, options: ZeroOneAdamOptions, exchange: ExchangeOptions) -> None:
        super().__init__(options, exchange)
        self.sync_policy = SyncPolicy(options.local_steps)
        self.local = Local(self.kept, preconditioned=self.preconditioned)
        # steps since the last synchronisation, and S, of a checkpoint: they count once this rank's own part is loaded
        self._interrupted: tuple[int, list[float]] | None = None

    # ----- schedule ----------------------------------------------------------------------------------------------------

    def wants_dense(self) -> bool:
        """Refreshes."""
        warm_up = self.kept.phase is Phase.WARMUP
        return (warm_up and self.variance_policy.due(self.kept.steps + 1)) or self.refresh_due()

    def may_be_dense(self) -> bool:
        """See the base: refreshes, and steps at lr = 0."""
        return True

    def _stands_still(self) -> bool:
        """Whether a one-bit round would have no units to be sent in: at lr = 0. To be asked once ranks have agreed on lr."""
        return all(g["lr"] == 0 for g in self.kept.groups if g["compress"]) and not any(self.local.way)

    def _schedule_lr(self) -> float:
        return float(self.kept.groups[0]["lr"])

    def freezes(self) -> None:
        if not self.preconditioned and self.variance_policy.refreshes < MATURE:
            self._refuse_noise()
        super().freezes()
        self.sync_policy.start(self.kept.steps, self._schedule_lr())

    def _refuse_noise(self) -> None:
        """Raises where a young variance is so uneven that noise of momenta would move weights much further than Adam does.

        All ranks alike: second moments are the same on all of them.
        """
        kept, how = self.kept, {"phi": self.options.denominator_floor, "block_size": self.kept.exchange.block_size}
        parts = {i: kept.part("v", i) for i in kept.layout.slots} if kept.compresses else {}
        rows = [compression_noise(parts[i], sums=sums, **how) for i, sums in self.sums_of(parts).items()]
        squares = kept.over_shards(torch.stack(rows), list(parts)).tolist() if rows else []
        for i, (total, elements) in zip(parts, squares, strict=True):
            noise = math.sqrt(total / max(1, elements))
            if noise > LARGEST_NOISE:
                raise ValueError(
                    f"recipe='published': the variance of {kept.name_of(i)} freezes at step {kept.steps} after "
                    f"{self.variance_policy.refreshes} refreshes, and one-bit noise divided by it would move weights by "
                    f"{noise:.1f} lr in a step (root mean square; at most {LARGEST_NOISE:g} are allowed); leave recipe out, or "
                    f"freeze after {MATURE} refreshes or more"
                )

    # ----- dense rounds: t in T_v --------------------------------------------------------------------------------------

    def step_dense(self, step: Step, active: list[int]) -> None:
        """Adam on the averaged gradient, by which v learns; after the freeze a refresh."""
        kept = self.kept
        if not kept.compresses:
            step.update(active)
            return
        planned = [i for i in active if i in kept.layout.slot_of and i not in kept.late]
        if self.refresh_due():
            self.local.drop_arenas()  # replicas are equal
            self.refresh(step, planned)
            self._record_round(synchronised=True)
        else:
            number, before, by_bucket = kept.steps + 1, kept.momentum, "m" not in kept.flat
            kept.hold_flat()
            step.update(planned)
            if by_bucket:
                kept.hold_by_bucket()
                self._restore_momentum(before, set(planned))
            if kept.worker is None:
                for i in planned:  # whose step has been counted
                    self.updates[i] = self.updates.get(i, kept.t[i] - 1) + 1
            self.variance_policy.record(number)
            if kept.worker is None and not self.variance_policy.due(number + 1):
                self._prepare_one_bit()
        step.update([i for i in active if i not in kept.layout.slot_of or i in kept.late])

    def dense(self, s: Group) -> None:
        """Adam, except that denominators obey the floor once m holds compression noise."""
        kept = self.kept
        # (a world of one rank may hold residuals for a later, larger one: it has no denominators to invert)
        used = kept.worker is not None and "r" in kept.flat
        noisy = [i for i in s.indices if i in kept.layout.slot_of and i not in kept.late and used]
        super().dense(Group(s.step, s.of, [i for i in s.indices if i not in noisy]) if noisy else s)
        self.learn_and_move(s.step, noisy)

    def _step_without_variance(self, step: Step) -> None:
        """A dense round at lr = 0: momenta of all ranks meet again, v is not touched and x does not move."""
        kept, before, by_bucket = self.kept, self.kept.momentum, "m" not in self.kept.flat
        step.average_exchanged()
        step.whole.writes()
        kept.hold_flat()
        active = [i for i in kept.layout.slots if step.active[i]]
        for i in active:
            kept.moment("m", i).lerp_(kept.grad(i).float(), 1 - kept.group(i)["betas"][0])
        step.count(active)
        if by_bucket:
            kept.hold_by_bucket()
            self._restore_momentum(before, set(active))
        if kept.phase is Phase.LOCAL:
            self._record_round(synchronised=True)

    def updates_of_refresh(self, p: Facts) -> float:
        """See the base; 1 by the published rule."""
        return super().updates_of_refresh(p) if self.preconditioned else 1.0

    def _prepare_one_bit(self) -> None:
        """Makes what one-bit rounds need: residuals and reciprocal denominators."""
        flat = self.kept.flat
        if "r" not in flat:
            flat["r"] = torch.zeros_like(flat["v"], dtype=self.r_dtype)
            self.keep_updates()
            self.invert_all(flat["v"], flat["r"])
        self.kept.allocate_residuals()

    def enter_compressed(self) -> None:
        self._prepare_one_bit()
        self.kept.flat.pop("v", None)

    # ----- one-bit rounds and local steps ------------------------------------------------------------------------------

    def step_compressed(self, step: Step) -> bool:
        """A one-bit round, a local step, or one with a synchronisation behind it."""
        kept, local = self.kept, self.local
        if self._stands_still():
            self._step_without_variance(step)
            step.update_dense_groups()
            return True
        self._prepare_one_bit()
        # a group at lr = 0 is left alone, for what it would exchange has no units; unless local steps have given it some
        moving = [group["lr"] > 0 for group in kept.groups]
        group_of = kept.layout.group_of
        for slot, i in enumerate(kept.layout.slots):
            step.active[i] = step.active[i] and (moving[group_of[i]] or local.way[slot] > 0)
        number, lr, alone = kept.steps + 1, self._schedule_lr(), self._steps_alone()
        # (a refresh begins where replicas are equal)
        synchronised = not alone or self.sync_policy.due(number, lr) or self.refresh_within(2)
        if alone:
            self._local_step(step, synchronised)
        else:
            self._exchange_all(step)
            kept.exchanged = 1
            local.reset()
        if kept.phase is Phase.LOCAL:
            self._record_round(synchronised)
        return False

    def _steps_alone(self) -> bool:
        """Whether the next one-bit round is one of this rank alone, with a synchronisation behind it or not."""
        sync = self.sync_policy
        return self.kept.phase is Phase.LOCAL and (
            sync.since > 0 or sync.gap(self.kept.steps + 1, self._schedule_lr()) > 1
        )

    def scales_tell(self) -> bool:
        """See the base; a step alone sends none, nor does a group at lr = 0."""
        return not self._steps_alone() and all(group["lr"] > 0 for group in self.kept.groups)

    def _exchange_all(self, step: Step) -> None:
        """A one-bit round; where it fails the momentum lies as it did before."""
        kept, before = self.kept, self.kept.flat.get("m")
        if before is not None:
            kept.flat["m"] = before.clone()
            kept.hold_by_bucket()
        try:
            step.exchange_all()
        except BaseException:
            if before is not None and not step.whole.written:
                kept.flat["m"], kept.momentum = before, []
            raise

    def _record_round(self, synchronised: bool) -> None:
        self.sync_policy.record(synchronised)
        if synchronised:
            self.local.reset()

    def _local_step(self, step: Step, synchronise: bool) -> None:
        """``m_i = b1 m_i + (1-b1) g_i ; u_i += lr_t m_i ; x_i -= lr wd x_i + clip(lr_t m_i r, -a, a) ; anchor -= lr wd anchor``."""
        kept, local = self.kept, self.local
        step.whole.writes()
        kept.hold_flat()
        local.anchor_here()
        stepped = [i for i in kept.layout.slots if step.active[i]]
        step.count(stepped)
        ways = zip(kept.layout.slots, local.way, step.by_slot(self.lr_t), strict=True)
        local.way = [way + lr_t if step.active[i] else way for i, way, lr_t in ways]
        local.steps += 1
        with step.link.ledger.compressing("apply"):
            for s in step.parts():
                factors = s.each(beta1, new_share, self.lr_t, decay, self._bound)
                s.kernels.local_step(s.blocks, s.x, s.g, s["m"], s["u"], s["r"], s["anchor"], factors)
        dense = [i for i in kept.layout.dense if step.active[i]]
        if synchronise:
            self.local.synchronise(step)
        moved = set(stepped)
        kept.publish([i for i in kept.layout.slots if step.active[i] or i in moved])
        step.update(dense)

    def _bound(self, p: Facts) -> float:
        """How far a local step may move a weight of a parameter; by the published rule any way."""
        return self.lr_t(p) * largest_step(*p["betas"]) if self.preconditioned else math.inf

    # ----- replicas that differ for a while ----------------------------------------------------------------------------

    @property
    def mid_local(self) -> bool:
        return self.kept.phase is Phase.LOCAL and self.sync_policy.since > 0

    def show_shared(self) -> None:
        if self.mid_local and not self.kept.showing:
            self.kept.show(self.local.anchor)

    def synchronise(self, step: Step) -> None:
        self.local.synchronise(step)
        self.kept.publish([i for i in self.kept.layout.slots if step.active[i]])
        self._record_round(synchronised=True)

    # ----- parameters that join or learn late --------------------------------------------------------------------------

    def leaving_world(self) -> None:
        """See the base; what a rank has done alone means nothing in another world."""
        if self.mid_local:
            self.kept.show_own()
            for i in self.kept.layout.slots:
                self.kept.weight(i).copy_(self.local.anchor(i))
            self.kept.publish(self.kept.layout.slots)
            self.sync_policy.record(True)

    def laid_out(self, kept: Mapping[int, Mapping[str, Tensor]], *, in_use: bool, grew: bool) -> None:
        self.local.reset()
        if in_use:
            log.warning(
                "a parameter joins zero_one_adam between one-bit rounds: all blocks are dealt anew, and residuals start from zero"
            )
            self._prepare_one_bit()
        if grew:
            # the next refresh there would have been may lie behind the freeze
            self.variance_policy.bring_forward(self.kept.steps + 1)

    def joined(self, indices: Sequence[int]) -> None:
        super().joined(indices)
        self.local.way += [0.0] * len(indices)
        self.local.anchor_late(indices)

    def first_gradients(self, step: Step, indices: list[int]) -> None:
        super().first_gradients(step, indices)
        for i in indices:
            self.local.way[self.kept.layout.slot_of[i]] = 0.0  # with gradients of 0, nowhere

    def stepped_late(self, indices: Sequence[int]) -> None:
        self.local.anchor_late(indices)

    def may_take_in(self) -> bool:
        return not self.mid_local

    # ----- saving ------------------------------------------------------------------------------------------------------

    def shared_master(self, index: int) -> Tensor:
        kept = self.kept
        if self.mid_local and index in kept.layout.slot_of:
            anchor = self.local.anchor(index)
            return adopted(kept.layout.params[index].detach(), anchor) if kept.showing else anchor.clone()
        return super().shared_master(index)

    def books(self) -> dict[str, Any]:
        return {
            **super().books(),
            "sync_policy": self.sync_policy.state_dict(),
            "travelled": list(self.local.way),
            "exchanged_steps": self.kept.exchanged,
            "one_bit": self.kept.worker is not None,
        }

    def load(self, phase: Phase, books: Mapping[str, Any], saved: Saved, enter: Callable[[Phase], None]) -> None:
        kept = self.kept
        self._interrupted = None
        if books:
            self.sync_policy.load_state_dict(books["sync_policy"])
            kept.exchanged = books.get("exchanged_steps", 1)
            if len(books["travelled"]) == len(kept.layout.slots):  # there are none before the first step
                self._interrupted = self.sync_policy.since, list(books["travelled"])
            # this is the model of the last synchronisation; what ranks have done since lies in their own parts
            self.sync_policy.since = 0
        super().load(phase, books, saved, enter)
        # (states of earlier releases do not say it; no parameter may have had a gradient yet)
        one_bit = books.get("one_bit", any("reciprocal_denominator" in s for s in saved.values()))
        if phase is Phase.WARMUP and kept.compresses and one_bit and kept.layout.slots:
            self._prepare_one_bit()
            self.load_frozen(saved, books)

    def rank_layout(self) -> dict[str, Any]:
        """See the base; also what the model of the last synchronisation is known by."""
        layout = super().rank_layout()
        if not self.mid_local:
            return layout
        self.kept.adopt_shown()
        return {**layout, "shared_weights": bit_sums([self.local.anchor(i) for i in self.kept.layout.slots])}

    def rank_state(self) -> dict[str, Tensor]:
        if not self.mid_local:
            return {}
        flat = self.kept.flat
        return {"local_momentum": flat["m"], "local_update": flat["u"], "local_weights": self.local.own_weights()}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        """See the base: other weights."""
        known = state.get("shared_weights")
        if known is not None and known != bit_sums([self.kept.weight(i) for i in self.kept.layout.slots]):
            raise ValueError(
                "the model holds other weights than all ranks shared when this state was saved, between two synchronisations, "
                "when model.state_dict() has a rank's own: save it within `with optimizer.consensus():`, and load it before the "
                "optimizer's state"
            )

    def load_rank_state(self, tensors: Mapping[str, Tensor]) -> None:
        """See the base; the weights as loaded are the anchor, this rank's own weights and momentum lie beside them."""
        kept, local = self.kept, self.local
        if "local_momentum" in tensors:
            kept.hold_flat()
            kept.flat["m"].copy_(tensors["local_momentum"])
        if "local_update" not in tensors or self._interrupted is None:
            return
        self.sync_policy.since, local.way = self._interrupted
        local.steps = self.sync_policy.since
        local.anchor_here()
        kept.flat["u"].copy_(tensors["local_update"])
        for i in kept.layout.slots:
            kept.weight(i).copy_(kept.layout.view(tensors["local_weights"], i))
        kept.publish(kept.layout.slots)


@takes(ZeroOneAdamOptions)
class ZeroOneAdam(OnebitOptimizer):
    r"""0/1 Adam: one-bit rounds from the start, a variance refreshed ever more rarely, then local steps if wanted.

    With ``lr_t = lr / (1-b1^t)``::

        t a refresh (T_v):      g = mean_i g_i ; m, v as in Adam ; x -= lr*wd*x + lr_t*m/(sqrt(vhat)+eps)
        other t <= var_freeze:  m = exchange(b1 m + (1-b1) g_i) ; x -= lr*wd*x + lr_t*m/(sqrt(vhat)+eps)
        local (t > var_freeze): m_i = b1 m_i + (1-b1) g_i ; u_i += lr_t*m_i ; S += lr_t ; H += 1
                                x_i -= lr*wd*x_i + clip(lr_t*m_i/(sqrt(vhat)+eps), -a, a) ; anchor -= lr*wd*anchor
        ... a synchronisation:  ubar = (S/H)*exchange(u_i/(S/H)) ; m = ubar/S ; x = anchor - ubar/(sqrt(vhat)+eps)
                                anchor = x ; u = S = H = 0

    with ``a = lr_t*max(1, (1-b1)/sqrt(1-b2))``, the largest step that Adam ever makes, whatever denominators have frozen.

    By the default recipe what travels is divided by the denominators ``D = sqrt(vhat) + eps`` first: it is the
    very change of the weights in units of lr, ``exchange((b1 m + (1-b1) g_i)/D)`` and ``exchange(u_i/(S/H)/D)``.

    The first 100 steps are refreshes, so that second moments are means of as many gradients; by the published schedule, 45 of them would
    be. Refreshes go on after the freeze, on the same schedule (``refresh``); ranks synchronise in the step before each.

    Source: "0/1 Adam", arXiv 2202.06009, algorithm 1; this library's differences are listed in docs/differences.

    Between synchronisations replicas differ on purpose; ``consensus()`` shows the model that all ranks share, and
    ``synchronise()`` brings them together at once, which should end a training (the strategy does it). A group
    whose lr is 0 at a step and has been since the last synchronisation is left alone in it; when that holds for all
    groups, the step averages gradients densely and does not touch v.
    The small control round is made at every step, silent ones included, so that skipping and clipping stay in lockstep.

    Args:
        params: parameters or parameter groups (see ``OnebitAdam``).
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        exchange: how ranks exchange, see ``ExchangeOptions``; ``overlap="backward"`` cannot take effect.
        **options: see ``ZeroOneAdamOptions``.

    Raises:
        TypeError: an option or parameter of the wrong type.
        ValueError: an option out of range; at the freeze, a variance too young for ``recipe="published"``.

    Example:
        >>> optimizer = ZeroOneAdam(model.parameters(), lr=4e-4, freeze_step=12_500)
    """

    algorithm = "zero_one_adam"
    rule_class: ClassVar[type[Rule]] = ZeroOne
    local_steps: ClassVar[bool] = True
    SILENT_STEP_BYTES = 30.0  # reads and writes m, u and x, reads g and denominators

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

    @property
    def sync_policy(self) -> SyncPolicy:
        """When ranks synchronise."""
        policy: SyncPolicy = self._engine.rule.sync_policy  # type: ignore[attr-defined]
        return policy

    @classmethod
    def count_rounds(cls, steps: int, freeze_step: int, **schedule: Any) -> Rounds:
        """See the base; takes ``local_steps``."""
        policy = SyncPolicy(schedule.get("local_steps"))
        return Rounds(**replay_schedule(steps, freeze_step=freeze_step, policy=policy))
