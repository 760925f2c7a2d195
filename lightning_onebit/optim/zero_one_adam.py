"""0/1 Adam."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit._choices import (
    Backend,
    LocalStepPolicy,
    RefreshRule,
    StateDtype,
    VarianceDecay,
    choices,
)
from lightning_onebit.comm import Bucket
from lightning_onebit.kernels import Packed
from lightning_onebit.kernels.common import bit_sums
from lightning_onebit.kernels.transfer import upload
from lightning_onebit.optim.arena import PLAN_LANE, Coefficients, Phase
from lightning_onebit.optim.masters import adopt_, adopted
from lightning_onebit.optim.options import CommonOptions, check_choice, check_flag, check_integer
from lightning_onebit.optim.policies import (
    LOCAL_STEP_POLICIES,
    IntervalPolicy,
    Rounds,
    make_sync_policy,
    replay_schedule,
)
from lightning_onebit.optim.refresh import RefreshingAdam
from lightning_onebit.optim.rules import compression_noise

log = logging.getLogger("lightning_onebit")

VARIANCE_DECAYS = choices(VarianceDecay)
#: how far noise may move weights in a one-bit round by the published rule, root mean square in units of lr, where the variance is young
LARGEST_NOISE = 3.0
#: refreshes from which a variance is no longer young
SETTLED = 32


def largest_step(b1: float, b2: float) -> float:
    """How far Adam moves a weight in one step at most, in units of ``lr_t``: ``max(1, (1-b1) / sqrt(1-b2))``.

    Source: "Adam", arXiv 1412.6980, section 2.1. It is what a weight moves by whose first gradient comes now: its variance takes
    that gradient in. A frozen variance does not.
    """
    return max(1.0, (1.0 - b1) / (1.0 - b2) ** 0.5)


class ZeroOneAdam(RefreshingAdam):
    r"""0/1 Adam: one-bit rounds from the start, a variance refreshed ever more rarely, then local steps.

    With ``lr_t = lr / (1-b1^t)``::

        t a refresh (T_v):      g = mean_i g_i ; m, v as in Adam ; x -= lr*wd*x + lr_t*m/(sqrt(vhat)+eps)
        other t <= var_freeze:  m = exchange(b1 m + (1-b1) g_i) ; x -= lr*wd*x + lr_t*m/(sqrt(vhat)+eps)
        t > var_freeze (local): m_i = b1 m_i + (1-b1) g_i ; u_i += lr_t*m_i ; S += lr_t ; H += 1
                                x_i -= lr*wd*x_i + clip(lr_t*m_i/(sqrt(vhat)+eps), -a, a) ; anchor -= lr*wd*anchor
        ... a synchronisation:  ubar = (S/H)*exchange(u_i/(S/H)) ; m = ubar/S ; x = anchor - ubar/(sqrt(vhat)+eps)
                                anchor = x ; u = S = H = 0

    with ``a = lr_t*max(1, (1-b1)/sqrt(1-b2))``, the largest step that Adam ever makes, whatever denominators have frozen.

    Where it is ``preconditioned``, as by default, what travels is divided by the denominators ``D = sqrt(vhat) + eps`` first: it is the
    very change of the weights in units of lr, ``exchange((b1 m + (1-b1) g_i)/D)`` and ``exchange(u_i/(S/H)/D)``.

    Refreshes go on after the freeze, on the same schedule (``refresh``); ranks synchronise in the step before each.

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
        var_freeze_step: last step that may refresh the variance, >= 1; local steps follow. None: by ``freeze()``.
        var_update_scaler: refreshes after which the gap between refreshes doubles.
        var_decay: what the second beta counts. ``"step"`` (None): a refresh stands for all steps since the last one,
            ``v = b2^gap*v + (1-b2^gap)*g^2``, so that v is Adam's average over time, from fewer samples (``1-b2^gap`` is at most 1/16, or
            ``1-b2``). ``"refresh"``, as published: refreshes, so that v is an average in which the first, close ones weigh as much as the
            late, rare ones.
        local_step_scaler: steps after which the gap between synchronisations doubles (policy ``"interval"``).
        local_step_clipper: largest gap between synchronisations; 1: no local steps, and no memory for them.
        local_step_policy: ``"interval"``, or ``"learning_rate"`` (the gap doubles each time lr has halved since the
            freeze).
        bias_correction: as in ``OnebitAdam``.
        block_size: as in ``OnebitAdam``, like the options after it.
        max_grad_norm: see ``OnebitAdam``.
        denominator_floor: see ``OnebitAdam``.
        preconditioned: compress updates divided by their denominators, see ``OnebitAdam``; False, as published: local steps are not bounded
            then, and a variance that freezes before its 32nd refresh is refused where one-bit noise divided by it would move the weights
            of a tensor by more than 3 lr in a step.
        refresh: see ``OnebitAdam``.
        process_group: see ``OnebitAdam``.
        force_compression: see ``OnebitAdam``.
        bucket_mb: see ``OnebitAdam``.
        max_consecutive_skips: see ``OnebitAdam``.
        kernels: see ``OnebitAdam``.
        timeout: see ``OnebitAdam``.
        residual_dtype: see ``OnebitAdam``.
        denominator_dtype: see ``OnebitAdam``.

    Raises:
        TypeError: an option or parameter of the wrong type.
        ValueError: an option out of range; at the freeze, a variance too young for ``preconditioned=False``.

    Example:
        >>> optimizer = ZeroOneAdam(model.parameters(), lr=4e-4, var_freeze_step=12_500)
    """

    algorithm = "zero_one_adam"
    local_steps = True
    SILENT_STEP_BYTES = 32.0  # reads and writes m, u and x, reads g and denominators
    EXCHANGES_SOON: ClassVar[dict[str, Any]] = {"var_freeze_step": 1, "local_step_clipper": 1}
    _scales_tell = False  # a step between synchronisations sends none
    # in it, refreshes are few and grow rarer
    _has_dense_warm_up = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int | None = None,
        var_update_scaler: int = 16,
        var_decay: VarianceDecay | None = None,
        local_step_scaler: int = 32768,
        local_step_clipper: int = 16,
        local_step_policy: LocalStepPolicy = "interval",
        bias_correction: bool = True,
        block_size: int = 2048,
        max_grad_norm: float | None = None,
        denominator_floor: float = 0.1,
        preconditioned: bool = True,
        refresh: int | RefreshRule = "auto",
        process_group: dist.ProcessGroup | None = None,
        force_compression: bool = False,
        bucket_mb: float | None = None,
        max_consecutive_skips: int = 100,
        kernels: Backend = "auto",
        timeout: float = 1800.0,
        residual_dtype: StateDtype = "float32",
        denominator_dtype: StateDtype = "float32",
    ) -> None:
        check_integer("var_freeze_step", var_freeze_step, least=1, optional=True)
        check_integer("var_update_scaler", var_update_scaler, least=1)
        check_flag("preconditioned", preconditioned)
        if var_decay is not None:
            check_choice("var_decay", var_decay, VARIANCE_DECAYS)
        skips = var_update_scaler + 2
        if var_decay is not None and refresh == "never" and var_freeze_step is not None and var_freeze_step < skips:
            raise ValueError(
                f"var_decay={var_decay!r} has no effect with var_freeze_step={var_freeze_step}: with var_update_scaler={var_update_scaler} "
                f"the first step without a refresh is step {skips}; leave it out, or freeze later"
            )
        check_choice("local_step_policy", local_step_policy, LOCAL_STEP_POLICIES)
        if local_step_policy != "interval" and local_step_scaler != 32768:
            raise ValueError(
                f"local_step_scaler={local_step_scaler} has no effect with local_step_policy={local_step_policy!r}; leave it out"
            )
        if local_step_clipper == 1 and (local_step_scaler != 32768 or local_step_policy != "interval"):
            given = f"local_step_scaler={local_step_scaler}"
            if local_step_policy != "interval":
                given = f"local_step_policy={local_step_policy!r}"
            raise ValueError(
                f"{given} has no effect with local_step_clipper=1, which means no local steps; leave it out, or allow larger gaps"
            )
        self.sync_policy = make_sync_policy(local_step_policy, scaler=local_step_scaler, clipper=local_step_clipper)
        # by slot: sum of lr_t since the last synchronisation; local steps since then, and steps of the last exchange
        self._travelled: list[float] = []
        self._travelled_steps, self._exchanged_steps = 0, 1
        self._anchored = False
        self._exchanging_local = False
        # steps since the last synchronisation, and _travelled, of a checkpoint: they count once this rank's own part is loaded
        self._interrupted: tuple[int, list[float]] | None = None
        # by parameter index: this rank's own weights while the shared model is shown in their place
        self._hidden: dict[int, Tensor] = {}
        # whether all of them show it
        self._showing = False
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            CommonOptions(
                block_size=block_size,
                max_grad_norm=max_grad_norm,
                process_group=process_group,
                force_compression=force_compression,
                bucket_mb=bucket_mb,
                max_consecutive_skips=max_consecutive_skips,
                kernels=kernels,
                timeout=timeout,
                residual_dtype=residual_dtype,
                denominator_dtype=denominator_dtype,
            ),
            {
                "var_freeze_step": var_freeze_step,
                "bias_correction": bias_correction,
                "denominator_floor": denominator_floor,
                "preconditioned": preconditioned,
                "refresh": refresh,
                "var_update_scaler": var_update_scaler,
                "var_decay": var_decay or "step",
                "local_step_scaler": local_step_scaler,
                "local_step_clipper": local_step_clipper,
                "local_step_policy": local_step_policy,
            },
        )

    # ----- what users see ---------------------------------------------------------------------------------------------

    @classmethod
    def count_rounds(cls, steps: int, freeze_step: int, **schedule: Any) -> Rounds:
        """See the base; takes ``var_update_scaler``, ``local_step_scaler`` and ``local_step_clipper``."""
        policy = IntervalPolicy(schedule["local_step_clipper"], scaler=schedule["local_step_scaler"])
        scaler = schedule["var_update_scaler"]
        return Rounds(**replay_schedule(steps, var_freeze_step=freeze_step, var_update_scaler=scaler, policy=policy))

    @property
    def freeze_step(self) -> int | None:
        """``var_freeze_step``: last step that may refresh the variance."""
        return self.settings["var_freeze_step"]

    @property
    def mid_local(self) -> bool:
        """Whether replicas differ now: local steps have been taken since the last synchronisation."""
        return self._phase is Phase.LOCAL and self.sync_policy.since > 0

    def _momentum_energy(self, bucket: Bucket) -> Tensor:
        """See the base; of a synchronisation of local steps residuals hold what all of their momenta together have left."""
        return super()._momentum_energy(bucket) * self._exchanged_steps**2

    @torch.no_grad()
    def synchronise(self) -> None:
        """Brings the replicas together now: the synchronisation that the schedule has for later, without a step.

        What ranks have done alone since the last one enters the model that all share, as at any synchronisation. Does nothing
        between other steps. A collective: call it on all ranks, for instance when training ends (the strategy does so before
        ``on_train_end``). Residuals carry over; the ledger counts its bytes in the totals, and no step.
        """
        super().synchronise()
        self._prepare()
        self.show_local()
        if not self.mid_local:
            return
        self._verdict = None
        with self._changing("synchronise()"):
            self._exchange_local()
            self._publish([i for i in self._slots if self._active[i]])
            self._record_round(synchronised=True)
            self.ledger.settle()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Shows the model that all ranks share: the weights of the last synchronisation, decayed since.

        No communication; outside of local steps it does nothing. Training continues as if nobody had looked. What is written
        into a weight inside the context changes the shared model alone.
        """
        shown = self._showing
        self.show_consensus()
        try:
            yield
        finally:
            if not shown:
                self.show_local()

    def show_consensus(self) -> None:
        """Points parameters at the shared model until ``show_local()`` or the next ``step()``; nothing is copied (fp32)."""
        if not self.mid_local or self._showing:
            return
        for slot, i in enumerate(self._slots):
            p = self._params[i]
            anchor = self._known_plan().view(self._flat["anchor"], slot, p)
            self._hidden.setdefault(
                i, p.data
            )  # (there already, where a signal has broken the last call or the way back)
            p.data = anchor if p.dtype == anchor.dtype else torch.empty_like(p.data).copy_(anchor)
        self._showing = True

    def show_local(self) -> None:
        """Points parameters back at this rank's own weights."""
        self._adopt_shown()
        self._showing = False
        for i, data in self._hidden.items():
            self._params[i].data = data
        self._hidden = {}

    @torch.no_grad()
    def _adopt_shown(self) -> None:
        """Takes into the shared model what the program has written into the 16-bit copies that showed it."""
        for i in self._hidden.keys() & self._masters.keys() if self._showing else ():
            p = self._params[i]
            adopt_([(p, self._known_plan().view(self._flat["anchor"], self._slot_of[i], p))])

    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """See ``OnebitOptimizer.step``."""
        self.show_local()
        return super().step(closure)

    def release_communication(self) -> None:
        """See the base; where the shared model is shown, it stays, in memory of the parameters' own."""
        self._adopt_shown()
        for i in self._hidden:
            self._params[i].data = self._params[i].data.clone()
        super().release_communication()

    def _weight(self, index: int) -> Tensor:
        hidden = self._hidden.get(index)
        return super()._weight(index) if hidden is None or index in self._masters else hidden

    # ----- schedule ---------------------------------------------------------------------------------------------------

    def _wants_dense(self) -> bool:
        return (self._phase is Phase.WARMUP and self.variance_policy.due(self._steps + 1)) or self._refresh_due()

    def _stands_still(self) -> bool:
        """Whether a one-bit round would have no units to be sent in: at lr = 0. To be asked once ranks have agreed on lr."""
        return all(g["lr"] == 0 for g in self.param_groups if g["compress"]) and not any(self._travelled)

    def _schedule_lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    def _may_be_dense(self) -> bool:
        return True  # refreshes, and steps at lr = 0

    def _freeze_now(self) -> None:
        if not self.settings["preconditioned"] and self.variance_policy.refreshes < SETTLED:
            self._refuse_noise()
        self.variance_policy.freeze(self._steps, self._interval, learned=False)
        self._phase = Phase.LOCAL
        self._decision = None
        self._state_shown.renew()
        self.sync_policy.start(self._steps, self._schedule_lr())
        if self.compresses and self._plan is not None:
            self._start_compression()

    def _refuse_noise(self) -> None:
        """Raises where a young variance is so uneven that noise of momenta would move weights much further than Adam does.

        All ranks alike: second moments are the same on all of them.
        """
        if not self.compresses or self._plan is None:
            return
        for slot, i in enumerate(self._slots):
            noise = compression_noise(
                self._part(self._flat["v"], slot),
                phi=self.settings["denominator_floor"],
                block_size=self.options.block_size,
            )
            if noise > LARGEST_NOISE:
                raise ValueError(
                    f"preconditioned=False: the variance of {self.name_of(i)} freezes at step {self._steps} after "
                    f"{self.variance_policy.refreshes} refreshes, and one-bit noise divided by it would move weights by "
                    f"{noise:.1f} lr in a step (root mean square; at most {LARGEST_NOISE:g} are allowed); leave preconditioned out, or "
                    f"freeze after {SETTLED} refreshes or more"
                )

    # ----- dense rounds -----------------------------------------------------------------------------------------------

    def _step_dense(self, active: list[int]) -> None:
        if not self.compresses:
            super()._step_dense(active)
            return
        step = self._steps + 1
        planned = [i for i in active if i in self._slot_of and i not in self._late]
        if self._refresh_due():
            for name in ("u", "anchor"):  # replicas are equal
                self._flat.pop(name, None)
            self._refresh(planned)
            self._anchored = False
            self._record_round(synchronised=True)
        elif self.next_step_is_dense:
            self._hold_momentum_flat()
            super()._step_dense(planned)
            self._refreshed(planned, step)
        super()._step_dense([i for i in active if i not in self._slot_of or i in self._late])

    def _dense_update(self, group: dict[str, Any], members: list[int]) -> None:
        """Adam, except that denominators obey the floor once m holds compression noise."""
        # (a world of one rank may hold residuals for a later, larger one: it has no denominators to invert)
        used = self._worker_residual is not None and "r" in self._flat
        noisy = [i for i in members if i in self._slot_of and i not in self._late and used]
        super()._dense_update(group, [i for i in members if i not in noisy])
        for i in noisy:
            self._learn(i, self._updates_of_refresh(i))
            self._invert_slot(self._slot_of[i], self._flat["v"], self._flat["r"])
            self._move(i)

    def _refreshed(self, planned: list[int], step: int) -> None:
        """Keeps the number of updates of v, and the reciprocal denominators if the next steps need them."""
        if self._worker_residual is None:
            for i in planned:  # whose step has been counted
                self._variance_steps[i] = self._variance_steps.get(i, self._t[i] - 1) + 1
        self.variance_policy.record(step)
        if self._worker_residual is None and not self.variance_policy.due(step + 1):
            self._prepare_one_bit()

    def _step_without_variance(self, planned: list[int]) -> None:
        """A dense round at lr = 0: momenta of all ranks meet again, v is not touched and x does not move."""
        self._hold_momentum_flat()
        if self._reducer is not None:
            self._reducer.select({PLAN_LANE})
            self._reducer.finish()
        if self._grad_scale != 1.0 and (grads := [g for i in planned if (g := self._params[i].grad) is not None]):
            torch._foreach_mul_(grads, self._grad_scale)
        for i in planned:
            self._moment("m", i).lerp_(self._grad(i).float(), 1 - self._group(i)["betas"][0])
        self._count(planned)
        self._anchored = False
        if self._phase is Phase.LOCAL:
            self._record_round(synchronised=True)

    def _prepare_one_bit(self) -> None:
        """Allocates what one-bit rounds need: residuals and reciprocal denominators."""
        if "r" not in self._flat:
            self._flat["r"] = torch.zeros_like(self._flat["v"], dtype=self._reciprocal_dtype)
            self._count_variance_steps()
            self._invert(self._flat["v"], self._flat["r"])
        self._allocate_residuals()

    def _enter_compressed(self) -> None:
        self._prepare_one_bit()
        self._flat.pop("v", None)

    def _build(self, *, connect: bool = True, newcomers: bool = True) -> None:
        """See the base; where everything is cut anew, one-bit rounds have put some state elsewhere than the base looks."""
        before = len(self._slots) if self._plan is not None else None
        if self._plan is not None and not self._plan_stays(newcomers):
            self._hold_momentum_flat()
        elif self.mid_local and not self._in_its_world():
            self._drop_local_progress()
        super()._build(connect=connect, newcomers=newcomers)
        if before is not None and len(self._slots) > before and self._phase is Phase.WARMUP:
            # the next refresh there would have been may lie behind the freeze
            self.variance_policy.bring_forward(self._steps + 1)

    def _drop_local_progress(self) -> None:
        """Goes on from the model that all ranks share: what a rank has done alone means nothing in another world."""
        self.show_local()
        for slot, i in enumerate(self._slots):
            self._weight(i).copy_(self._known_plan().view(self._flat["anchor"], slot, self._params[i]))
        self._publish(self._slots)
        self.sync_policy.record(True)

    def _layout(self, kept: dict[int, dict[str, Tensor]]) -> None:
        in_use = self._worker_residual is not None
        super()._layout(kept)
        self._travelled, self._travelled_steps = [0.0] * len(self._slots), 0
        self._momentum, self._worker_residual, self._server_residual = [], None, None
        if in_use:
            log.warning(
                "a parameter joins %s between one-bit rounds: all blocks are dealt anew, and residuals start from zero",
                self.algorithm,
            )
            self._prepare_one_bit()

    # ----- parameters whose first gradient comes late -----------------------------------------------------------------

    def _append(self) -> None:
        first = sum(self._segments)
        super()._append()
        self._travelled += [0.0] * (len(self._slots) - first)
        self._anchor_late(self._slots[first:])

    def _first_gradients(self, indices: list[int]) -> None:
        super()._first_gradients(indices)
        for i in indices:
            self._travelled[self._slot_of[i]] = 0.0  # with gradients of 0, nowhere

    def _step_late(self, members: list[int]) -> None:
        super()._step_late(members)
        self._anchor_late(members)

    def _anchor_late(self, indices: list[int]) -> None:
        """What all ranks have alike belongs to the shared model at once."""
        if self._anchored and "anchor" in self._flat:
            for i in indices:
                self._known_plan().view(self._flat["anchor"], self._slot_of[i], self._params[i]).copy_(self._weight(i))

    def _may_take_in(self) -> bool:
        return super()._may_take_in() and not self.mid_local

    def _updates_of_refresh(self, index: int) -> float:
        return super()._updates_of_refresh(index) if self.settings["var_decay"] == "step" else 1.0

    # ----- one-bit rounds and local steps -----------------------------------------------------------------------------

    def _step_compressed(self) -> bool:
        if self._stands_still():
            self._step_without_variance([i for i in self._slots if self._active[i]])
            super()._step_dense([i for i in self._dense if self._active[i]])
            return True
        self._prepare_one_bit()
        # a group at lr = 0 is left alone, for what it would exchange has no units; unless local steps have given it some
        moving = [group["lr"] > 0 for group in self.param_groups]
        for slot, i in enumerate(self._slots):
            self._active[i] = self._active[i] and (moving[self._group_of[i]] or self._travelled[slot] > 0)
        step, lr = self._steps + 1, self._schedule_lr()
        local = self._phase is Phase.LOCAL and (self.sync_policy.since > 0 or self.sync_policy.gap(step, lr) > 1)
        # (a refresh begins where replicas are equal)
        synchronised = not local or self.sync_policy.due(step, lr) or self._refresh_within(2)
        if local:
            self._local_round(synchronised)
        else:
            self._hold_momentum_by_bucket()
            super()._step_compressed()
            self._anchored = False
        if self._phase is Phase.LOCAL:
            self._record_round(synchronised)
        return False

    def _record_round(self, synchronised: bool) -> None:
        self.sync_policy.record(synchronised)
        if synchronised:
            self._travelled, self._travelled_steps = [0.0] * len(self._slots), 0
            self._anchored = False  # what the program writes into weights from here on belongs to the shared model

    def _local_round(self, synchronise: bool) -> None:
        self._hold_momentum_flat()
        self._anchor_here()
        stepped = [i for i in self._slots if self._active[i]]
        self._count(stepped)
        ways = zip(self._slots, self._travelled, self._by_slot("lr_t", self._lr_t), strict=True)
        self._travelled = [way + lr_t if self._active[i] else way for i, way, lr_t in ways]
        self._travelled_steps += 1
        with self.ledger.compressing("apply"):
            for bucket in self._buckets():
                self._kernels.local_step(
                    bucket,
                    self._bind_weights(bucket),
                    self._bind_grads(bucket),
                    bucket.slice(self._flat["m"]),
                    bucket.slice(self._flat["u"]),
                    bucket.slice(self._flat["r"]),
                    bucket.slice(self._flat["anchor"]),
                    self._local_factors(bucket),
                )
        dense = [i for i in self._dense if self._active[i]]
        if synchronise:
            self._exchange_local()
        moved = set(stepped)
        self._publish([i for i in self._slots if self._active[i] or i in moved])
        super()._step_dense(dense)

    def _exchange_local(self) -> None:
        """Exchanges the updates of whoever has travelled, whether or not the last step had a gradient."""
        self._active = [False] * len(self._params)
        for slot, i in enumerate(self._slots):
            self._active[i] = self._travelled[slot] > 0
        self._exchanging_local = True
        try:
            self._exchange_active()
        finally:
            self._exchanging_local = False

    def _anchor_here(self) -> None:
        """Makes sure that ``u`` and the anchor exist, and that the anchor is the model of the last synchronisation."""
        if "anchor" not in self._flat:
            self._flat["u"] = torch.zeros(self._known_plan().elements, dtype=torch.float32, device=self._device)
            self._flat["anchor"] = torch.zeros_like(self._flat["u"])
            self._anchored = False
        if not self._anchored:
            for slot, i in enumerate(self._slots):
                self._known_plan().view(self._flat["anchor"], slot, self._params[i]).copy_(self._weight(i))
            self._anchored = True

    def _local_factors(self, bucket: Bucket) -> Tensor:
        values: tuple[Callable[[int], float], ...] = (
            lambda i: self._group(i)["betas"][0],
            lambda i: (1.0 - self._group(i)["betas"][0]) * self._grad_scale,
            self._lr_t,
            self._decay,
            self._local_bound,
        )
        return self._by_block("local", bucket, *values)

    def _local_bound(self, index: int) -> float:
        """How far a local step may move a weight of a parameter; by the published rule any way."""
        if not self.settings["preconditioned"]:
            return math.inf
        return self._lr_t(index) * largest_step(*self._group(index)["betas"])

    def _lr_t(self, index: int) -> float:
        return float(self._group(index)["lr"] / self._first_correction(index))

    def _contribution(self, bucket: Bucket) -> Tensor | list[Tensor | None]:
        """Gradients, or at a synchronisation of local steps the accumulated update itself."""
        return bucket.slice(self._flat["u"]) if self._exchanging_local else super()._contribution(bucket)

    def _coefficients(self, bucket: Bucket, lo: int, hi: int) -> Coefficients:
        """The momentum, or at a synchronisation of local steps their momenta together: ``u`` over the mean of their ``lr_t``."""
        if not self._exchanging_local:
            return super()._coefficients(bucket, lo, hi)
        b = self._mean_lr_t("b", bucket, -1)
        return Coefficients(None, None, b[lo:hi], self._scaling(bucket, lo, hi))

    def _mean_lr_t(self, name: str, bucket: Bucket, power: int) -> Tensor:
        """fp32 ``(blocks,)``: that of the local steps since the last synchronisation (1 where a parameter takes no part), to a power."""
        tables = self._lookups.tables
        if name not in tables:
            steps = self._travelled_steps
            values = self._spread([(way / steps) ** power if way > 0 else 1.0 for way in self._travelled])
            tables[name] = values.split([bucket.blocks for bucket in self._buckets()])
        return tables[name][bucket.index]

    def _apply(self, bucket: Bucket, packed: Packed) -> None:
        r = None if self._preconditioned else bucket.slice(self._flat["r"])
        if not self._exchanging_local:
            decay, alpha = self._by_block("decay", bucket, self._decay), self._by_block("alpha", bucket, self._lr_t)
            self._kernels.apply_adam(bucket, self._bind_weights(bucket), packed, r, decay, alpha)
            self._exchanged_steps = 1
            return
        anchor = bucket.slice(self._flat["anchor"])
        views = [anchor[s.block * bucket.block_size : s.block * bucket.block_size + s.numel] for s in bucket.spans]
        moving = [v if self._active[self._slots[s.param]] else None for v, s in zip(views, bucket.spans, strict=True)]
        ones = torch.ones(bucket.blocks, dtype=torch.float32, device=self._device)
        alpha = self._mean_lr_t("alpha", bucket, 1)
        self._kernels.apply_adam(bucket, moving, packed, r, ones, alpha)
        self._kernels.scatter(bucket, anchor, self._bind_weights(bucket))
        self._exchanged_steps = self._travelled_steps
        packed.scales.div_(self._travelled_steps)  # the mean of their momenta
        momentum, u = bucket.slice(self._flat["m"]), bucket.slice(self._flat["u"])
        idle = upload([not self._active[i] for i in self._slots], self._device)[bucket.block_param]
        kept = momentum.view(-1, bucket.block_size)[idle]
        self._kernels.unpack(packed, bucket.lengths, momentum)
        self._from_exchanged(momentum, bucket.first_block * bucket.block_size)
        momentum.view(-1, bucket.block_size)[idle] = kept
        u.zero_()

    def finish(self, bucket: Bucket, gathered: Tensor) -> None:
        """See the base; after local steps the momentum stays an fp32 arena."""
        if not self._exchanging_local:
            super().finish(bucket, gathered)
            return
        packed = Packed(gathered, bucket.blocks // self._ranks().size, bucket.block_size)
        self._arrived.append((bucket, gathered))
        self._apply(bucket, packed)
        if guard := self._protected.get(bucket.index):
            guard.restore()

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def _abandon_step(self) -> None:
        self._hidden, self._showing = (
            {},
            False,
        )  # the weights that are shown are those the state that is loaded belongs to
        super()._abandon_step()

    def residual_state_dict(self) -> dict[str, Any]:
        """See the base. Between synchronisations it holds this rank's own weights: save the model within ``consensus()``."""
        state = super().residual_state_dict()
        return {**state, "shared_weights": self._shared_weights()} if self.mid_local else state

    def _shared_weights(self) -> list[int]:
        """What the model of the last synchronisation is known by."""
        self._adopt_shown()
        plan, anchor = self._known_plan(), self._flat["anchor"]
        return bit_sums([plan.view(anchor, slot, self._params[i]) for slot, i in enumerate(self._slots)])

    @torch.no_grad()
    def load_residual_state_dict(self, state: dict[str, Any]) -> None:
        """See the base.

        Raises:
            ValueError: besides, where the model's weights are not those that all ranks shared when the state was saved.
        """
        known = state.get("shared_weights")
        if known is not None and known != bit_sums([self._weight(i) for i in self._slots]):
            raise ValueError(
                "the model holds other weights than all ranks shared when this state was saved, between two synchronisations, "
                "when model.state_dict() has a rank's own: save it within `with optimizer.consensus():`, and load it before the "
                "optimizer's state"
            )
        super().load_residual_state_dict(state)

    def _shared_master(self, index: int) -> Tensor:
        if self.mid_local and index in self._slot_of:
            anchor = self._known_plan().view(self._flat["anchor"], self._slot_of[index], self._params[index])
            return adopted(self._params[index].detach(), anchor) if self._showing else anchor.clone()
        return super()._shared_master(index)

    def _books(self) -> dict[str, Any]:
        return {
            **super()._books(),
            "sync_policy": self.sync_policy.state_dict(),
            "travelled": list(self._travelled),
            "exchanged_steps": self._exchanged_steps,
            "one_bit": self._worker_residual is not None,
        }

    def _rank_state(self) -> dict[str, Tensor]:
        state = super()._rank_state()
        if self.mid_local:
            weights = torch.zeros_like(self._flat["u"])
            for slot, i in enumerate(self._slots):
                own = self._weight(i)
                if i in self._masters:
                    own = adopted(self._hidden.get(i, self._params[i].detach()), own)
                self._known_plan().view(weights, slot, self._params[i]).copy_(own)
            state |= {"local_momentum": self._flat["m"], "local_update": self._flat["u"], "local_weights": weights}
        return state

    def _load_rank_state(self, tensors: dict[str, Tensor]) -> None:
        """Besides residuals: the weights as loaded are the anchor, this rank's own weights and momentum lie beside them."""
        super()._load_rank_state(tensors)
        if "local_momentum" in tensors:
            self._hold_momentum_flat()
            self._flat["m"].copy_(tensors["local_momentum"])
        if "local_update" not in tensors or self._interrupted is None:
            return
        self.sync_policy.since, self._travelled = self._interrupted
        self._travelled_steps = self.sync_policy.since
        self._anchor_here()
        self._flat["u"].copy_(tensors["local_update"])
        for slot, i in enumerate(self._slots):
            self._weight(i).copy_(self._known_plan().view(tensors["local_weights"], slot, self._params[i]))
        self._publish(self._slots)

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        self._anchored, self._interrupted = False, None
        if books:
            self.sync_policy.load_state_dict(books["sync_policy"])
            self._exchanged_steps = books.get("exchanged_steps", 1)
            if len(books["travelled"]) == len(self._slots):  # there are none before the first step
                self._interrupted = (self.sync_policy.since, list(books["travelled"]))
            # this is the model of the last synchronisation; what ranks have done since lies in their own parts
            self.sync_policy.since = 0
        super()._load_phase(phase, books, saved)
        # (states of earlier releases do not say it; no parameter may have had a gradient yet)
        one_bit = books.get("one_bit", any("reciprocal_denominator" in s for s in saved.values()))
        if phase is Phase.WARMUP and self.compresses and one_bit and self._slots:
            self._prepare_one_bit()
            self._load_frozen(saved)
