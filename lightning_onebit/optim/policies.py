"""Schedules: when 0/1 Adam refreshes its variance and when its ranks synchronise, when second moments are refreshed that have frozen.

Objects with state, saved in checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

from lightning_onebit._choices import LocalStepPolicy, choices
from lightning_onebit.optim.options import check_integer

# steps after which gaps between refreshes wait no longer for the learning rate (see VariancePolicy)
RISE_STEPS = 256


@dataclass
class VariancePolicy:
    """Steps ``T_v`` at which the variance is refreshed by a dense round.

    The gap between the j-th and (j+1)-th refresh (j = 0, 1, ...) is ``2**floor(j / scaler)``; the first refresh is at t
    = 1. With the
    default scaler 16, t = 1 .. 17 all refresh. Source: "0/1 Adam", arXiv 2202.06009, section 6.

    Where the learning rate still rises when gaps would grow, they wait: until ``WAIT`` times the step at which its rise ends, and step
    ``rise_steps`` at most, a refresh after which the gap would be larger than 1 does not count, and the next step is one too. So they do
    until there have been ``SETTLED`` refreshes: denominators of fewer gradients are too uneven for one-bit rounds. Not in
    the paper; what it is good for is measured in docs/convergence.

    Attributes:
        scaler: refreshes after which the gap doubles (``var_update_scaler``).
        rise_steps: last step that may not count (``var_rise_steps``); 0: all count.
        done: refreshes so far that count.
        next_step: step of the next refresh.
        last_step: step of the last one; 0 before the first.
        risen: refreshes so far that do not count.
        top: the last of these whose learning rate was above that of the refresh before; 0: there was none.
        lr: learning rate of the last refresh; None before the first.

    Example:
        >>> policy, refreshes = VariancePolicy(scaler=2), []
        >>> for step in range(1, 17):
        ...     if policy.due(step):
        ...         policy.record(step, lr=1e-3)
        ...         refreshes.append(step)
        >>> refreshes
        [1, 2, 3, 5, 7, 11, 15]
    """

    WAIT: ClassVar[int] = 4
    SETTLED: ClassVar[int] = 32

    scaler: int = 16
    rise_steps: int = 0
    done: int = 0
    next_step: int = 1
    last_step: int = 0
    risen: int = 0
    top: int = 0
    lr: float | None = None

    @property
    def refreshes(self) -> int:
        """All so far."""
        return self.done + self.risen

    @property
    def settled(self) -> bool:
        """Whether there have been enough of them for one-bit rounds."""
        return self.refreshes >= self.SETTLED

    @classmethod
    def first_gap(cls, scaler: int, rise_steps: int) -> int:
        """First step that may not be a refresh, where the learning rate does not rise."""
        return max(scaler + 1, min(rise_steps + 1, cls.SETTLED)) + 1

    def due(self, step: int) -> bool:
        """Whether step ``step`` (1, 2, ...) is a refresh."""
        return step >= self.next_step

    def may_wait(self, step: int) -> bool:
        """Whether the learning rate has a say in what follows from ``step``, if that is a refresh."""
        return self.done >= self.scaler and step <= self.rise_steps

    def record(self, step: int, lr: float) -> None:
        """Says that ``step`` was a refresh, at learning rate ``lr``."""
        may_wait = self.may_wait(step)
        if may_wait and self.lr is not None and lr > self.lr:
            self.top = step
        waits = may_wait and (step < self.WAIT * self.top or self.refreshes + 1 < self.SETTLED)
        self.last_step, self.lr = step, lr
        self.next_step = step + (1 if waits else 2 ** (self.done // self.scaler))
        self.risen += waits
        self.done += not waits

    def join(self, step: int) -> None:
        """Says that second moments that have learned nothing take part from ``step`` on, which is a refresh then."""
        self.next_step = min(self.next_step, step)

    def note(self, step: int, lr: float) -> None:
        """Says that v has learned in ``step``, at learning rate ``lr``, without a round that the schedule counts (one rank alone)."""
        self.last_step, self.lr = step, lr

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()``; the scaler and ``rise_steps`` stay what this run was given."""
        self.done, self.next_step = state["done"], state["next_step"]
        # states of earlier releases do not say it; their scaler does
        gap = 2 ** ((self.done - 1) // state.get("scaler", self.scaler)) if self.done else 1
        self.last_step = state.get("last_step", self.next_step - gap)
        self.risen, self.top, self.lr = state.get("risen", 0), state.get("top", 0), state.get("lr")


@dataclass
class ShrinkPolicy:
    """When frozen second moments are to be refreshed: once steps have become smaller.

    Where gradients go on shrinking after the freeze, denominators stay as large as they were, and the momentum in units of them,
    which is what ranks exchange, shrinks too. All ranks hold the scales of what was exchanged, so each knows its energy (the sum
    of its squares) without asking. A refresh is due when that energy, as an average that forgets in ``WINDOW`` steps, has fallen below
    ``FALL`` of the highest since the last refresh. Where it rises or stays, there is none; where it jumps up and down, one in
    ``LEAST`` steps at most, so that dense steps never cost more than a few per cent of a run. Not in the papers; what it is good for
    is measured in docs/convergence.

    Attributes:
        mean: average of the energies, biased towards 0 as long as there are few.
        seen: energies since the freeze or the last refresh.
        highest: largest average since then, from ``WINDOW`` energies on.

    Example:
        >>> policy = ShrinkPolicy()
        >>> for step in range(1, 201):
        ...     policy.record(energy=1.0 if step <= 150 else 0.5)
        ...     if policy.due(step):
        ...         print(step)
        ...         break
        160
    """

    WINDOW: ClassVar[int] = 20
    FALL: ClassVar[float] = 0.8
    LEAST: ClassVar[int] = 100

    mean: float = 0.0
    seen: int = 0
    highest: float = 0.0

    def record(self, energy: float) -> None:
        """Says how large the momentum was that an exchange brought, in any unit that does not change between refreshes."""
        self.mean += (energy - self.mean) / self.WINDOW
        self.seen += 1
        if self.seen >= self.WINDOW:
            self.highest = max(self.highest, self.average)

    @property
    def average(self) -> float:
        """Of the energies, without bias; 0 before the first."""
        return self.mean / (1.0 - (1.0 - 1.0 / self.WINDOW) ** self.seen) if self.seen else 0.0

    def due(self, steps: int) -> bool:
        """Whether a refresh is, that many steps after the freeze or the last one; where not every step exchanges, they exceed ``seen``."""
        return steps >= self.LEAST and self.average < self.FALL * self.highest

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()``."""
        self.mean, self.seen, self.highest = state["mean"], state["seen"], state["highest"]


class SyncPolicy(Protocol):
    """Steps ``T_u`` at which ranks synchronise after the variance freeze.

    Example:
        >>> policy, synchronised = IntervalPolicy(clipper=4, scaler=3), []
        >>> policy.start(10, lr=1e-3)
        >>> for step in range(11, 25):
        ...     due = policy.due(step, lr=1e-3)
        ...     policy.record(due)
        ...     if due:
        ...         synchronised.append(step)
        >>> synchronised
        [11, 12, 13, 15, 19, 23]
    """

    def gap(self, step: int, lr: float) -> int:
        """Gap that holds at ``step``."""
        ...

    def start(self, step: int, lr: float) -> None:
        """Says that the variance froze after ``step``, at learning rate ``lr``."""
        ...

    def step_back(self, step: int, lr: float) -> None:
        """Says that the variance was refreshed by dense steps, of which ``step`` was the last: the gap is halved, or grows later."""
        ...

    def due(self, step: int, lr: float) -> bool:
        """Whether ``step`` synchronises."""
        ...

    def record(self, synchronised: bool) -> None:
        """Says that a step was made."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()``."""
        ...


@dataclass
class _SyncBase:
    """Steps since the last synchronisation; subclasses say how long the gap may grow.

    Attributes:
        clipper: largest gap (``local_step_clipper``).
        frozen_at: last step before the local steps, later by ``scaler`` with every refresh since.
        frozen_lr: learning rate then, half of it with every refresh since.
        since: steps since the last synchronisation.
    """

    clipper: int = 16
    frozen_at: int = 0
    frozen_lr: float = 0.0
    since: int = 0

    def gap(self, step: int, lr: float) -> int:
        raise AssertionError("abstract")

    def start(self, step: int, lr: float) -> None:
        self.frozen_at, self.frozen_lr, self.since = step, lr, 0

    def step_back(self, step: int, lr: float) -> None:
        raise AssertionError("abstract")

    def due(self, step: int, lr: float) -> bool:
        return self.since + 1 >= self.gap(step, lr)

    def record(self, synchronised: bool) -> None:
        self.since = 0 if synchronised else self.since + 1

    def state_dict(self) -> dict[str, Any]:
        return {"frozen_at": self.frozen_at, "frozen_lr": self.frozen_lr, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.frozen_at, self.frozen_lr, self.since = state["frozen_at"], state["frozen_lr"], state["since"]


@dataclass
class IntervalPolicy(_SyncBase):
    """``gap(t) = min(clipper, 2**floor((t - frozen_at - 1) / scaler))``.

    Attributes:
        scaler: steps after which the gap doubles (``local_step_scaler``).

    Example:
        >>> policy = IntervalPolicy(clipper=16, scaler=100)
        >>> policy.start(1000, lr=1e-3)
        >>> print(*(policy.gap(step, lr=1e-3) for step in (1001, 1101, 1201, 9999)))
        1 2 4 16
    """

    scaler: int = 32768

    def step_back(self, step: int, lr: float) -> None:
        """A doubling less than there would be, or none at all so far."""
        self.frozen_at, self.since = min(step, self.frozen_at + self.scaler), 0

    def gap(self, step: int, lr: float) -> int:
        """See the class."""
        doublings = max(0, step - self.frozen_at - 1) // self.scaler
        return min(self.clipper, 2 ** min(doublings, 30))


@dataclass
class LearningRatePolicy(_SyncBase):
    """The gap doubles each time lr has halved since the freeze: ``gap = min(clipper, 2**floor(log2(frozen_lr / lr)))``, at least 1.

    Example:
        >>> policy = LearningRatePolicy(clipper=16)
        >>> policy.start(1000, lr=1e-3)
        >>> print(*(policy.gap(2000, lr) for lr in (2e-3, 1e-3, 5e-4, 3e-4, 1e-4, 0.0)))
        1 1 2 2 8 16
    """

    def step_back(self, step: int, lr: float) -> None:
        """A doubling less than there would be, or none at all so far."""
        self.frozen_lr, self.since = max(lr, self.frozen_lr / 2), 0

    def gap(self, step: int, lr: float) -> int:
        """See the class; an lr of 0 gives the largest gap."""
        if lr <= 0:
            return self.clipper
        if self.frozen_lr <= lr:
            return 1
        # the small margin keeps a schedule that halves exactly from missing its own power of two by rounding
        return min(self.clipper, 2 ** min(30, math.floor(math.log2(self.frozen_lr / lr) + 1e-9)))


LOCAL_STEP_POLICIES = choices(LocalStepPolicy)


def make_sync_policy(name: str, *, scaler: int, clipper: int) -> _SyncBase:
    """The synchronisation policy called ``name`` (``local_step_policy``).

    Example:
        >>> make_sync_policy("interval", scaler=100, clipper=8)
        IntervalPolicy(clipper=8, frozen_at=0, frozen_lr=0.0, since=0, scaler=100)
    """
    check_integer("local_step_scaler", scaler, least=1)
    check_integer("local_step_clipper", clipper, least=1)
    return IntervalPolicy(clipper, scaler=scaler) if name == "interval" else LearningRatePolicy(clipper)


def replay_schedule(
    steps: int,
    *,
    var_freeze_step: int,
    var_update_scaler: int,
    policy: SyncPolicy,
    refresh_interval: int | None = None,
    refresh_steps: int = 4,
    lr_warmup_steps: int = 0,
    var_rise_steps: int = RISE_STEPS,
) -> dict[str, int]:
    """Counts the rounds of a run of 0/1 Adam without running it (lr constant, but for ``lr_warmup_steps``).

    Args:
        steps: real steps of the run.
        var_freeze_step: last step at which the variance may be refreshed.
        var_update_scaler: see ``VariancePolicy``.
        policy: synchronisation policy, fresh.
        refresh_interval: steps between two refreshes of the frozen variance; None: there are none (those that begin by themselves
            depend on the gradients).
        refresh_steps: dense steps of such a refresh.
        lr_warmup_steps: steps in which lr rises, from the first on.
        var_rise_steps: see ``VariancePolicy``.

    Returns:
        ``{"dense": refreshes, "one_bit": one-bit rounds, "silent": steps without a data round}``.

    Example:
        >>> replay_schedule(1000, var_freeze_step=200, var_update_scaler=16, policy=IntervalPolicy(16, scaler=100))
        {'dense': 73, 'one_bit': 339, 'silent': 588}
    """
    variance = VariancePolicy(var_update_scaler, var_rise_steps)
    counts = {"dense": 0, "one_bit": 0, "silent": 0}
    unrefreshed = 0  # steps since the freeze or the last refresh
    for step in range(1, steps + 1):
        if step <= var_freeze_step:
            if variance.due(step):
                variance.record(step, float(min(step, max(1, lr_warmup_steps))))
                counts["dense"] += 1
            else:
                counts["one_bit"] += 1
            if step == var_freeze_step:
                policy.start(step, 1.0)
            continue
        unrefreshed += 1
        if refresh_interval is not None and unrefreshed > refresh_interval:
            counts["dense"] += 1
            if unrefreshed == refresh_interval + refresh_steps:
                unrefreshed = 0
                policy.step_back(step, 1.0)
            continue
        due = policy.due(step, 1.0) or unrefreshed == refresh_interval
        policy.record(due)
        counts["one_bit" if due else "silent"] += 1
    return counts
