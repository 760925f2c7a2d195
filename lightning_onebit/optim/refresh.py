"""Refreshes: a few dense steps now and then, in which second moments that have frozen learn again."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from lightning_onebit._choices import RefreshRule, choices
from lightning_onebit._names import shown_as
from lightning_onebit.comm import Plan
from lightning_onebit.comm.ranges import ranged
from lightning_onebit.kernels import Packed
from lightning_onebit.kernels.transfer import Download
from lightning_onebit.optim.arena import Phase
from lightning_onebit.optim.late import LateParameters
from lightning_onebit.optim.options import CommonOptions, check_choice, check_integer
from lightning_onebit.optim.policies import ShrinkPolicy
from lightning_onebit.optim.rules import fp32_zeros_like

log = logging.getLogger("lightning_onebit")

#: dense steps of a refresh where nothing else is said
REFRESH_STEPS = 4
#: a refresh for a parameter whose first gradient comes late leaves so many steps, for each dense one, to the compressed ones before it
LEAST_BETWEEN = 4


@shown_as("OnebitOptimizer")
class RefreshingAdam(LateParameters):
    """Base of the optimizers whose frozen second moments are refreshed; see ``OnebitAdam`` for the options.

    What makes ``refresh_interval="auto"`` begin one is in ``_watch``: here that exchanged momenta have shrunk.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], options: CommonOptions, settings: dict[str, Any]) -> None:
        interval, steps = settings["refresh_interval"], settings["refresh_steps"]
        if isinstance(interval, str):
            check_choice("refresh_interval", interval, choices(RefreshRule))
        else:
            check_integer("refresh_interval", interval, least=1)
        check_integer("refresh_steps", steps, least=1, optional=True)
        if steps is not None and interval == "never":
            raise ValueError(
                f"refresh_steps={steps} has no effect with refresh_interval='never'; leave one of them out"
            )
        # steps since the freeze or the last refresh, and the parameters that have had a gradient in the refresh under way
        self._unrefreshed = 0
        self._learned: set[int] = set()
        # "auto": what says when, the energy of the last exchange, which counts at the end of the next step (a device need not be
        # waited for then), and after how many steps the refresh that is due or under way has begun
        self._shrinking = ShrinkPolicy()
        self._energy: Download | None = None
        self._begun_after: int | None = None
        # the step after which one is due because a parameter had its first gradient late, which changes what the others are given
        self._wanted: int | None = None
        self._lengths: tuple[Plan, Tensor] | None = None  # of all blocks of a plan, fp64
        # by bucket: the momentum before a refresh that is one step long
        self._momentum_before: list[Tensor | Packed] = []
        chosen = (steps or REFRESH_STEPS) if interval != "never" else None
        super().__init__(params, defaults, options, {**settings, "refresh_steps": chosen})

    @property
    def refreshed_share(self) -> float:
        """See the base: ``refresh_steps`` of ``refresh_interval + refresh_steps``; 0 for ``"auto"``, whose share nobody knows before."""
        interval, steps = self.settings["refresh_interval"], self.settings["refresh_steps"]
        return 0.0 if isinstance(interval, str) else steps / (interval + steps)

    @property
    def _interval(self) -> int | None:
        """Steps before the next refresh or the one under way; None: there is none in sight."""
        chosen = self.settings["refresh_interval"]
        return self._begun_after if isinstance(chosen, str) else chosen

    def _refresh_within(self, steps: int) -> bool:
        """Whether a refresh is due, or will be after ``steps`` more."""
        interval = self._interval
        return self._phase is not Phase.WARMUP and interval is not None and self._unrefreshed + steps >= interval

    def _refresh_due(self) -> bool:
        """Whether the next step is one of a refresh, which begins where replicas are equal."""
        return self._refresh_within(0) and not self.mid_local

    @property
    def _refreshing(self) -> bool:
        """Whether a refresh has begun and not ended."""
        return "v" in self._flat and "r" in self._flat

    def _may_take_in(self) -> bool:
        return not self._refreshing

    @ranged("refresh")
    def _refresh(self, members: list[int]) -> None:
        """A dense step of a refresh: momenta meet, second moments learn, and weights move by the denominators there are."""
        if "v" not in self._flat:
            if self.settings["refresh_steps"] == 1:
                self._momentum_before = self._momentum
            self._hold_momentum_flat()
            if self._wanted is not None and self._steps >= self._wanted:
                self._step_late(self._wake(members))
                members = [i for i in members if i not in self._late]
            r = self._flat["r"]
            self._flat["v"] = self._second_moments(r, fp32_zeros_like(r), aged=False)
        interval = self._interval
        assert interval is not None
        updates = 1 + interval // self.settings["refresh_steps"]
        for i in members:
            self._learn(i, updates)
            self._move(i)
        self._learned.update(members)
        self._publish(members)
        self._count(members)

    def _advance(self) -> None:
        frozen = self._phase is not Phase.WARMUP and self.compresses
        super()._advance()
        if not frozen or self.settings["refresh_interval"] == "never":
            return
        if self._refresh_within(0) and not self._refreshing:
            return  # it waits for replicas to be equal
        self._unrefreshed += 1
        interval = self._interval
        if interval is None:
            self._watch()
            self._begin_wanted()
        elif self._unrefreshed >= interval + self.settings["refresh_steps"]:
            learned = self._learned
            self._end_refresh()
            self._hold_momentum_by_bucket()
            self._restore_momentum(learned)

    def _watch(self) -> None:
        """Takes note of how large the last steps were, on all ranks alike, and lets a refresh begin when they have shrunk."""
        # rounded, so that the order of summation does not matter
        before, now = self._energy, self._exchanged_energy()
        self._energy = Download(now.float()) if now is not None else None
        if before is not None:
            self._shrinking.record(before.read())
        # (the last step's has not been recorded)
        if self._shrinking.due(self._unrefreshed - 1):
            self._begun_after = self._unrefreshed + self.mid_local
            log.info(
                "step %d: steps are down to %.0f %% of what they were after the second moments had frozen or been refreshed, %d steps "
                "ago; %d dense ones refresh them",
                *(self._steps, 100 * (self._shrinking.average / self._shrinking.highest) ** 0.5),
                *(self._unrefreshed, self.settings["refresh_steps"]),
            )

    def _first_gradients(self, indices: list[int]) -> None:
        """See the base; a refresh follows once those have moved a little."""
        super()._first_gradients(indices)
        self._want(self._steps + (self.settings["refresh_steps"] or 0))

    def _take_in(self, index: int, state: dict[str, Tensor]) -> None:
        """See the base; a refresh follows."""
        super()._take_in(index, state)
        self._want(self._steps)

    def _want(self, step: int) -> None:
        if self.settings["refresh_interval"] == "auto" and self._phase is not Phase.WARMUP:
            self._wanted = step

    def _begin_wanted(self) -> None:
        """Begins a refresh that is due for a late parameter, unless the last one has ended just now."""
        if self._wanted is None or self._steps < self._wanted or self._begun_after is not None:
            return
        if self._unrefreshed >= LEAST_BETWEEN * self.settings["refresh_steps"]:
            self._begun_after = self._unrefreshed + self.mid_local

    def _exchanged_energy(self) -> Tensor | None:
        """Sum of squares of the momentum as it came out of the last step's exchange, fp64 0-d; None if there was no exchange."""
        buckets = self._buckets()
        if not buckets:  # no parameter has an element
            return None
        held = [self._held_momentum(bucket) for bucket in buckets]
        scales = [momentum.scales.flatten() for momentum in held if isinstance(momentum, Packed)]
        if len(scales) < len(held):
            return torch.stack([self._momentum_energy(bucket).sum() for bucket in buckets]).sum()
        # all buckets at once where they are packed, as they mostly are
        plan = self._known_plan()
        if self._lengths is None or self._lengths[0] is not plan:
            self._lengths = plan, torch.cat([bucket.lengths for bucket in buckets]).double()
        return torch.cat(scales).double().square_().dot(self._lengths[1])

    def _restore_momentum(self, learned: set[int]) -> None:
        """Gives who had no gradient in a refresh of one step its momentum back, which its change of form and back has rounded."""
        before, self._momentum_before = self._momentum_before, []
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

    def _end_refresh(self) -> None:
        """Ends a refresh: denominators of the second moments as they are now. Residuals stay: they are owed as before."""
        if self._refreshing:
            v = self._flat.pop("v")
            for i in self._learned:
                self._invert_slot(self._slot_of[i], v, self._flat["r"])
        self._unrefreshed, self._learned = 0, set()
        self._shrinking, self._energy, self._begun_after = ShrinkPolicy(), None, None
        if self._wanted is not None and self._steps >= self._wanted:
            self._wanted = None

    # ----- checkpoints ------------------------------------------------------------------------------------------------

    def _books(self) -> dict[str, Any]:
        books = super()._books()
        if self.settings["refresh_interval"] != "never":
            books |= {
                "unrefreshed": self._unrefreshed,
                "refreshing": self._refreshing,
                "learned": sorted(self._learned),
            }
        if self.settings["refresh_interval"] == "auto":
            books["shrinking"] = {
                **self._shrinking.state_dict(),
                "energy": None if self._energy is None else self._energy.read(),
                "begun_after": self._begun_after,
                **({} if self._wanted is None else {"wanted": self._wanted}),
            }
        return books

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        chosen = self.settings["refresh_interval"]
        refreshing = chosen != "never" and bool(books.get("refreshing", False))
        self._learned = set(books["learned"]) if refreshing else set()
        self._unrefreshed = 0 if chosen == "never" else books.get("unrefreshed", 0)
        self._shrinking, self._energy, self._begun_after, self._wanted = ShrinkPolicy(), None, None, None
        if chosen == "auto":
            self._load_shrinking(books.get("shrinking"), refreshing)
        elif chosen != "never":
            # the interval may be another now: a refresh that has begun is finished, one that is overdue begins
            bound = max if refreshing else min
            self._unrefreshed = bound(self._unrefreshed, chosen + refreshing)
        super()._load_phase(phase, books, saved)
        if not refreshing or "r" not in self._flat:
            return
        for name, key in (("m", "exp_avg"), ("v", "exp_avg_sq")):
            self._flat[name] = fp32_zeros_like(self._flat["r"])
            self._load_moment(self._flat[name], key, saved)
        self._momentum = []

    def _load_shrinking(self, saved: dict[str, Any] | None, refreshing: bool) -> None:
        """Goes on watching; a refresh of another interval, of which at least one step has been made, is finished."""
        if saved is None:
            self._begun_after = self._unrefreshed - 1 if refreshing else None
            return
        self._shrinking.load_state_dict(saved)
        self._begun_after, self._wanted = saved["begun_after"], saved.get("wanted")
        if saved["energy"] is not None:
            self._energy = Download(torch.tensor(saved["energy"], dtype=torch.float64))


@shown_as("OnebitOptimizer")
class CompressingAdam(RefreshingAdam):
    """Base of the optimizers that compress every step after the freeze but those of refreshes."""

    def _wants_dense(self) -> bool:
        return super()._wants_dense() or self._refresh_due()

    def _may_be_dense(self) -> bool:
        return super()._may_be_dense() or self.settings["refresh_interval"] != "never"

    def _step_dense(self, active: list[int]) -> None:
        planned: set[int] = set()
        if self.compresses and self._refresh_due():
            planned = self._slot_of.keys() - self._late.keys()
            # begins even where no parameter has a gradient in its first step: the count of its steps has begun
            self._refresh([i for i in active if i in planned])
        super()._step_dense([i for i in active if i not in planned])

    def _leave_compressed(self) -> None:
        self._end_refresh()
        self._wanted = None
        super()._leave_compressed()
