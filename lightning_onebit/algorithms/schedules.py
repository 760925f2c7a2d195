"""Schedules: when second moments are refreshed, and when the ranks of 0/1 Adam synchronise.

Objects with state, saved in checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from lightning_onebit._choices import GapRule, choices
from lightning_onebit.engine.options import check_choice, check_integer

#: refreshes after which the gap to the next doubles, as published; none counts for more than one part in as many of a second moment, and
#: after the freeze no more than one step in as many is one
REFRESHES_PER_DOUBLING = 16

#: a second moment is a mean over gradients of its coordinate, and one over fewer is so uncertain that steps divided by its root are noise
FEWEST_GRADIENTS = 100


@dataclass
class VariancePolicy:
    """Steps ``T_v`` in which second moments learn from a dense round.

    The gap that follows a refresh at step t is ``2**floor(log2(1 + (t-1)/scaler))``, and the first refresh is at t = 1: followed from
    there, gaps double with every ``scaler`` refreshes. With the default scaler 16, t = 1 .. 17 all refresh. It is a function
    of t, so an algorithm whose second moments freeze after a dense warm-up can enter it at any step. Source: "0/1 Adam", arXiv
    2202.06009, section 6.

    Attributes:
        scaler: refreshes after which the gap doubles.
        dense: first steps which are all refreshes, unless second moments freeze before; by the published schedule there are none.
        frozen: whether second moments have frozen: gaps are 16 at least from there on, so that most steps are compressed.
        interval: steps from any refresh to the next one, in the place of the schedule; None: the schedule.
        last_step: the last step in which second moments have learned; 0 before the first.
        next_step: step of the next refresh.
        asked: the last step that was asked for besides the schedule; 0: none.
        refreshes: number of refreshes so far.

    Example:
        >>> policy, refreshes = VariancePolicy(scaler=2), []
        >>> for step in range(1, 17):
        ...     if policy.due(step):
        ...         policy.record(step)
        ...         refreshes.append(step)
        >>> refreshes
        [1, 2, 3, 5, 7, 11, 15]
    """

    scaler: int = REFRESHES_PER_DOUBLING
    dense: int = 0
    frozen: bool = False
    interval: int | None = None
    last_step: int = 0
    next_step: int = 1
    asked: int = 0
    refreshes: int = 0

    def due(self, step: int) -> bool:
        """Whether step ``step`` (1, 2, ...) is a refresh, or the last one before it has been missed."""
        return step >= self.next_step

    def record(self, step: int) -> None:
        """Says that second moments have learned in ``step``."""
        self.last_step, self.next_step = step, step + self.gap(step)
        self.refreshes += 1
        if self.asked > step:
            self.next_step = min(self.next_step, self.asked)

    def gap(self, step: int) -> int:
        """Steps from a refresh at ``step`` to the next one."""
        if self.interval is not None:
            return self.interval
        if step < self.dense and not self.frozen:
            return 1
        least = REFRESHES_PER_DOUBLING if self.frozen else 1
        return max(least, 1 << (1 + max(0, step - 1) // self.scaler).bit_length() - 1)

    def freeze(self, step: int, interval: int | None, *, learned: bool) -> None:
        """Says that second moments freeze after ``step``.

        Args:
            step: the last one before the freeze.
            interval: of refreshes from here on; None: the schedule.
            learned: whether they have learned in that step, as in all of a dense warm-up.
        """
        self.frozen, self.interval = True, interval
        if learned:
            self.record(step)
        else:
            self.next_step = step + interval if interval is not None else self.last_step + self.gap(self.last_step)

    def updates(self, step: int, b2: float, known: float) -> float:
        """For how many updates of a second moment a refresh at ``step`` counts: all steps since the last one, within a bound.

        A gap may be longer than what ``b2`` remembers, and one gradient is no average: its weight in the bias-corrected moment is at most
        ``1/16``, or that of one update where that is more.

        Args:
            step: of the refresh.
            b2: decay of the second moment.
            known: updates that it has had.
        """
        gap = step - self.last_step
        if b2 == 0:
            return 1.0
        # 1 - b2**s <= (1 - b2**(known+s)) / 16
        n = REFRESHES_PER_DOUBLING
        return min(gap, max(1.0, math.log((n - 1) / (n - b2**known)) / math.log(b2)))

    def bring_forward(self, step: int) -> None:
        """Makes ``step`` a refresh, unless there is one before it."""
        if step != self.next_step:
            self.asked, self.next_step = step, min(self.next_step, step)

    def count(self, after: int, until: int) -> int:
        """Number of refreshes in steps ``after + 1`` to ``until`` of second moments that have learned in step ``after`` and frozen then.

        Example:
            >>> VariancePolicy().count(1000, 10_000)
            52
        """
        frozen = replace(self, frozen=True)
        step, number = after, 0
        while (step := step + frozen.gap(step)) <= until:
            number += 1
        return number

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {name: getattr(self, name) for name in ("last_step", "next_step", "asked", "refreshes")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()``; the scaler stays what this run was given."""
        self.last_step, self.next_step = state["last_step"], state["next_step"]
        self.asked, self.refreshes = state["asked"], state["refreshes"]


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """How rarely the ranks of 0/1 Adam synchronise after its freeze. ``LocalSteps()`` is the published schedule.

    Attributes:
        max_gap: most steps from one synchronisation to the next, >= 2.
        double_every: steps after which the gap doubles, >= 1, or ``"lr_halving"``: it doubles each time lr has halved since the freeze.
    """

    max_gap: int = 16
    double_every: int | GapRule = 32768

    def __post_init__(self) -> None:
        """Checks both."""
        check_integer("max_gap", self.max_gap, least=1)
        if self.max_gap == 1:
            raise ValueError(
                "max_gap=1 makes no local steps, for which local_steps=None is the way; leave it out, or allow larger gaps"
            )
        if isinstance(self.double_every, str):
            check_choice("double_every", self.double_every, choices(GapRule))
        else:
            check_integer("double_every", self.double_every, least=1)


@dataclass
class SyncPolicy:
    """Steps ``T_u`` at which ranks synchronise after the variance freeze.

    The gap is ``min(max_gap, 2**floor((t - frozen_at - 1) / double_every))``, or with ``"lr_halving"``
    ``min(max_gap, 2**floor(log2(frozen_lr / lr)))`` and at least 1.

    Attributes:
        local_steps: how the gap grows; None: it is 1.
        frozen_at: last step before the local steps.
        frozen_lr: learning rate then.
        since: steps since the last synchronisation.

    Example:
        >>> policy, synchronised = SyncPolicy(LocalSteps(max_gap=4, double_every=3)), []
        >>> policy.start(10, lr=1e-3)
        >>> for step in range(11, 25):
        ...     due = policy.due(step, lr=1e-3)
        ...     policy.record(due)
        ...     if due:
        ...         synchronised.append(step)
        >>> synchronised
        [11, 12, 13, 15, 19, 23]
        >>> policy = SyncPolicy(LocalSteps(double_every="lr_halving"))
        >>> policy.start(1000, lr=1e-3)
        >>> print(*(policy.gap(2000, lr) for lr in (2e-3, 1e-3, 5e-4, 3e-4, 1e-4, 0.0)))
        1 1 2 2 8 16
    """

    local_steps: LocalSteps | None = None
    frozen_at: int = 0
    frozen_lr: float = 0.0
    since: int = 0

    def gap(self, step: int, lr: float) -> int:
        """Gap that holds at ``step``; an lr of 0 gives the largest."""
        if self.local_steps is None:
            return 1
        largest, double_every = self.local_steps.max_gap, self.local_steps.double_every
        if not isinstance(double_every, str):
            doublings = max(0, step - self.frozen_at - 1) // double_every
        elif lr <= 0:
            return largest
        elif lr >= self.frozen_lr:
            return 1
        else:
            # the small margin keeps a schedule that halves exactly from missing its own power of two by rounding
            doublings = math.floor(math.log2(self.frozen_lr / lr) + 1e-9)
        return min(largest, 2 ** min(30, doublings))

    def start(self, step: int, lr: float) -> None:
        """Says that the variance froze after ``step``, at learning rate ``lr``."""
        self.frozen_at, self.frozen_lr, self.since = step, lr, 0

    def due(self, step: int, lr: float) -> bool:
        """Whether ``step`` synchronises."""
        return self.since + 1 >= self.gap(step, lr)

    def record(self, synchronised: bool) -> None:
        """Says that a step was made."""
        self.since = 0 if synchronised else self.since + 1

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"frozen_at": self.frozen_at, "frozen_lr": self.frozen_lr, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()``."""
        self.frozen_at, self.frozen_lr, self.since = state["frozen_at"], state["frozen_lr"], state["since"]


def replay_schedule(
    steps: int,
    *,
    freeze_step: int,
    policy: SyncPolicy,
    refresh: bool = True,
    doubling: int = REFRESHES_PER_DOUBLING,
    dense: int = FEWEST_GRADIENTS,
) -> dict[str, int]:
    """Counts the rounds of a run of 0/1 Adam without running it (lr constant).

    Args:
        steps: real steps of the run.
        freeze_step: last step before the local steps.
        policy: synchronisation policy, fresh.
        refresh: whether the variance is refreshed after ``freeze_step`` too.
        doubling: refreshes after which the gap to the next doubles.
        dense: first steps that are all refreshes; 0 by the published schedule.

    Returns:
        ``{"dense": refreshes, "one_bit": one-bit rounds, "silent": steps without a data round}``.

    Example:
        >>> replay_schedule(1000, freeze_step=200, policy=SyncPolicy(LocalSteps(double_every=100)))
        {'dense': 148, 'one_bit': 292, 'silent': 560}
    """
    variance = VariancePolicy(doubling, dense)
    counts = {"dense": 0, "one_bit": 0, "silent": 0}
    for step in range(1, steps + 1):
        frozen = step > freeze_step
        if variance.due(step) and not (frozen and (not refresh or policy.since)):
            variance.record(step)
            counts["dense"] += 1
            if frozen:
                policy.record(True)
        elif frozen:
            due = policy.due(step, 1.0) or (refresh and variance.due(step + 1))
            policy.record(due)
            counts["one_bit" if due else "silent"] += 1
        else:
            counts["one_bit"] += 1
        if step == freeze_step:
            policy.start(step, 1.0)
            variance.freeze(step, None, learned=False)
    return counts
