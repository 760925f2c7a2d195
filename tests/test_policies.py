"""The schedules: when second moments are refreshed, when ranks synchronise, and what a checkpoint keeps of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from unittest import mock

import numpy as np
import oracle
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_onebit.optim.policies import (
    IntervalPolicy,
    LearningRatePolicy,
    ShrinkPolicy,
    VariancePolicy,
    make_sync_policy,
    replay_schedule,
)


def refreshes(policy: VariancePolicy, last: int, first: int = 1, lr: Any = lambda step: 1.0) -> list[int]:
    seen = []
    for step in range(first, last + 1):
        if policy.due(step):
            policy.record(step, lr(step))
            seen.append(step)
    return seen


def synchronisations(policy: Any, first: int, last: int, lr: Any = lambda step: 1.0) -> list[int]:
    seen = []
    for step in range(first, last + 1):
        due = policy.due(step, lr(step))
        policy.record(due)
        if due:
            seen.append(step)
    return seen


def test_refresh_gap_doubles_after_every_scaler_refreshes() -> None:
    assert refreshes(VariancePolicy(), 60) == [*range(1, 18), *range(19, 50, 2), 53, 57]
    assert refreshes(VariancePolicy(2), 40) == [1, 2, 3, 5, 7, 11, 15, 23, 31]
    assert refreshes(VariancePolicy(1), 40) == [1, 2, 4, 8, 16, 32]


def test_gaps_grow_when_the_lr_has_risen() -> None:
    def warmed_up(step: int) -> float:
        return min(step, 7) / 7

    # 1 and 2 count, 3 to 39 do not: four times as many steps as lr rises in; then 40, and gaps of 2, 4 and 8
    def slowly(step: int) -> float:
        return min(step, 10) / 10

    assert refreshes(VariancePolicy(2, rise_steps=64), 72, lr=slowly) == [*range(1, 41), 42, 44, 48, 52, 60, 68]
    # no longer than it is told to: 8 counts too, and 9 is a refresh still; or 6, and 7 is none
    assert refreshes(VariancePolicy(2, rise_steps=8), 40, lr=warmed_up) == [*range(1, 10), 11, 13, 17, 21, 29, 37]
    assert refreshes(VariancePolicy(2, rise_steps=5), 60, lr=warmed_up) == [*range(1, 7), 8, 10, 14, 18, 26, 34, 50]
    # a rise that ends before the first gap would grow changes nothing
    assert refreshes(VariancePolicy(32, rise_steps=64), 80, lr=slowly) == refreshes(VariancePolicy(32), 80)
    for policy in (VariancePolicy(2), VariancePolicy(2, rise_steps=1)):
        assert refreshes(policy, 60, lr=warmed_up) == refreshes(VariancePolicy(2), 60)
    # neither a lr that stays nor one that falls is one that rises
    for lr in (lambda step: 1.0, lambda step: 1 / step):
        assert refreshes(VariancePolicy(32, rise_steps=64), 80, lr=lr) == refreshes(VariancePolicy(32), 80)


def test_gaps_grow_when_there_have_been_32_refreshes() -> None:
    """Noise of one-bit rounds is divided by the variance: it is that of 32 gradients at least by then. Up to rise_steps, as with lr."""
    assert refreshes(VariancePolicy(16, rise_steps=256), 70) == [*range(1, 33), *range(34, 65, 2), 68]
    assert refreshes(VariancePolicy(1, rise_steps=256), 70) == [*range(1, 33), 34, 38, 46, 62]
    assert refreshes(VariancePolicy(16, rise_steps=20), 70) == [*range(1, 22), *range(23, 54, 2), 57, 61, 65, 69]
    for scaler, rise_steps in ((16, 256), (1, 256), (16, 20), (40, 256), (16, 0)):
        policy = VariancePolicy(scaler, rise_steps)
        kept = refreshes(policy, 100)
        assert VariancePolicy.first_gap(scaler, rise_steps) == next(t for t in range(1, 100) if t not in kept)
        assert policy.settled == (len(kept) >= 32)


def test_a_rise_between_refreshes_counts_from_the_next_refresh_on() -> None:
    """lr rises at 12 and 13; the refresh at 15 sees it, so those up to 18 do not count; 1, 2, 3, 5, 7, 11 and 19 do, and 27, 35."""
    policy = VariancePolicy(2, rise_steps=18)

    def lr(step: int) -> float:
        return 1.0 + (step > 11) + (step > 12)

    with mock.patch.object(VariancePolicy, "SETTLED", 0):  # (the other reason to wait)
        assert refreshes(policy, 40, lr=lr) == [1, 2, 3, 5, 7, 11, *range(15, 20), 27, 35]
        assert (policy.done, policy.risen, policy.refreshes, policy.top) == (9, 4, 13, 15)
        assert refreshes(VariancePolicy(2, rise_steps=64), 68, lr=lr) == [1, 2, 3, 5, 7, 11, *range(15, 61), 68]


def test_gaps_that_wait_go_on_waiting_after_a_resume() -> None:
    def lr(step: int) -> float:
        return min(step, 9)

    whole = refreshes(VariancePolicy(2, rise_steps=64), 60, lr=lr)
    assert whole[:37] == [*range(1, 37), 38]
    for cut in (4, 6, 9, 20, 33, 37, 41):
        first, rest = VariancePolicy(2, rise_steps=64), VariancePolicy(2, rise_steps=64)
        before = refreshes(first, cut, lr=lr)
        rest.load_state_dict(first.state_dict())
        assert before + refreshes(rest, 60, lr=lr, first=cut + 1) == whole


def test_synchronisation_gap_doubles_every_scaler_steps_up_to_the_clipper() -> None:
    policy = IntervalPolicy(4, scaler=3)
    policy.start(10, 1.0)
    # gaps 1 at 11-13, 2 at 14-16, 4 from 17 on
    assert [policy.gap(step, 1.0) for step in range(11, 21)] == [1, 1, 1, 2, 2, 2, 4, 4, 4, 4]
    assert synchronisations(policy, 11, 28) == [11, 12, 13, 15, 19, 23, 27]


def test_a_clipper_of_one_synchronises_at_every_step() -> None:
    policy = IntervalPolicy(1, scaler=2)
    policy.start(5, 1.0)
    assert synchronisations(policy, 6, 40) == list(range(6, 41))


def test_gap_follows_the_learning_rate() -> None:
    policy = LearningRatePolicy(8)
    policy.start(10, 0.4)
    gaps = {0.4: 1, 0.21: 1, 0.2: 2, 0.11: 2, 0.1: 4, 0.05: 8, 0.001: 8, 0.0: 8, 0.8: 1}
    assert {lr: policy.gap(11, lr) for lr in gaps} == gaps
    # lr halves every 4 steps: 0.4 at 11-13, 0.2 from 14, 0.1 from 18
    halving = synchronisations(policy, 11, 24, lambda step: 0.4 * 0.5 ** ((step - 10) // 4))
    assert halving == [11, 12, 13, 15, 17, 21]


def test_an_lr_that_halves_by_multiplication_reaches_its_power_of_two() -> None:
    """Also in seven steps, after which rounding leaves it a little above the half."""
    for steps in (1, 7):
        policy, lr, above = LearningRatePolicy(1024), 0.003, 0
        policy.start(0, lr)
        for step in range(10 * steps + 1):
            assert policy.gap(1, lr) == 2 ** (step // steps), f"step {step}"
            above += step % steps == 0 and lr > 0.003 * 0.5 ** (step // steps)
            lr *= 0.5 ** (1 / steps)
        assert steps == 1 or above > 0, "rounding is what this test is about"


@given(
    scaler=st.integers(1, 20),
    local_scaler=st.integers(1, 50),
    clipper=st.integers(1, 20),
    freeze=st.integers(1, 150),
    steps=st.integers(1, 300),
    rise=st.integers(0, 80),
    wait=st.integers(0, 120),
)
def test_replay_counts_the_rounds_of_the_written_down_policies(
    scaler: int, local_scaler: int, clipper: int, freeze: int, steps: int, rise: int, wait: int
) -> None:
    policy = make_sync_policy("interval", scaler=local_scaler, clipper=clipper)
    ours = replay_schedule(
        steps,
        var_freeze_step=freeze,
        var_update_scaler=scaler,
        policy=policy,
        lr_warmup_steps=rise,
        var_rise_steps=wait,
    )
    t_v, t_u = oracle.VariancePolicy(freeze, scaler, wait), oracle.SyncPolicy(freeze, local_scaler, clipper)
    theirs = {"dense": 0, "one_bit": 0, "silent": 0}
    for t in range(1, steps + 1):
        refresh, sync = t_v(t, min(t, max(rise, 1)) / 100), t_u(t, 1.0)
        theirs["dense" if refresh else "one_bit" if sync else "silent"] += 1
    assert ours == theirs


# ----- refreshes of frozen moments ----------------------------------------------------------------------------------------------------


def shrinking(energies: Iterable[float]) -> ShrinkPolicy:
    policy = ShrinkPolicy()
    for energy in energies:
        policy.record(energy)
    return policy


@given(
    st.lists(st.floats(0.5, 2.0), min_size=95, max_size=130) | st.lists(st.floats(0.5, 2.0), max_size=130),
    st.floats(1e-6, 1e6),
)
def test_a_refresh_is_due_when_the_average_has_fallen_by_a_fifth(energies: list[float], unit: float) -> None:
    weights = [0.95**k for k in range(len(energies))]
    averages = [np.average(energies[: k + 1][::-1], weights=weights[: k + 1]) for k in range(len(energies))]
    policy = shrinking(energies)
    assert policy.average == pytest.approx(averages[-1] if averages else 0.0)
    falls = averages[-1] / max(averages[19:]) if len(averages) >= 20 else 1.0
    assume(abs(falls - 0.8) > 1e-9)
    for steps in (99, 100, 1000):
        assert policy.due(steps) == (falls < 0.8 and steps >= 100)
        assert shrinking(unit * energy for energy in energies).due(steps) == policy.due(steps)


@pytest.mark.parametrize(("rate", "due"), [(1.0, False), (1.01, False), (0.99, True), (0.9, True), (0.0, True)])
def test_only_what_shrinks_is_refreshed(rate: float, due: bool) -> None:
    assert not shrinking(rate**k for k in range(99)).due(99), "too early"
    assert shrinking(rate**k for k in range(100)).due(100) == due
    # where not every step exchanges, 20 exchanges of a hundred steps and more will do
    assert not shrinking(rate**k for k in range(19)).due(304) and not shrinking([]).due(304)
    assert shrinking(rate ** (5 * k) for k in range(100)).due(500) == due
    assert not shrinking([0.0] * 100).due(100)


@given(st.lists(st.floats(0.0, 1e3), max_size=40), st.integers(0, 40))
def test_shrink_policy_continues_from_its_state(energies: list[float], cut: int) -> None:
    second = ShrinkPolicy()
    second.load_state_dict(shrinking(energies[:cut]).state_dict())
    for energy in energies[cut:]:
        second.record(energy)
    assert second == shrinking(energies)


@given(scaler=st.integers(1, 6), rise=st.integers(0, 40), peak=st.integers(1, 50), cut=st.integers(0, 60))
def test_variance_policy_continues_from_its_state(scaler: int, rise: int, peak: int, cut: int) -> None:
    def lr(step: int) -> float:
        return float(min(step, peak))

    whole = refreshes(VariancePolicy(scaler, rise), 120, lr=lr)
    first = VariancePolicy(scaler, rise)
    seen = refreshes(first, cut, lr=lr)
    second = VariancePolicy(scaler, rise)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert seen + refreshes(second, 120, first=cut + 1, lr=lr) == whole


@given(scaler=st.integers(1, 6), cut=st.integers(0, 60))
def test_a_variance_policy_of_an_earlier_release_knows_its_last_refresh(scaler: int, cut: int) -> None:
    first, second = VariancePolicy(scaler), VariancePolicy(scaler + 1)
    refreshes(first, cut)
    state = first.state_dict()
    del state["last_step"], state["risen"], state["lr"]
    second.load_state_dict(state)
    assert (second.last_step, second.next_step) == (first.last_step, first.next_step)


@pytest.mark.parametrize("name", ["interval", "learning_rate"])
@given(cut=st.integers(0, 40))
def test_sync_policy_continues_from_its_state(name: str, cut: int) -> None:
    def lr(step: int) -> float:
        return 0.5 ** (step / 7)

    def fresh() -> Any:
        return make_sync_policy(name, scaler=5 if name == "interval" else 32768, clipper=8)

    whole, first, second = fresh(), fresh(), fresh()
    for policy in (whole, first):
        policy.start(20, 1.0)
    expected = synchronisations(whole, 21, 100, lr)
    seen = synchronisations(first, 21, 20 + cut, lr)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert seen + synchronisations(second, 21 + cut, 100, lr) == expected


@pytest.mark.parametrize(("name", "value"), [("scaler", 0), ("clipper", 0), ("scaler", 2.5), ("clipper", True)])
def test_bad_constants_are_named(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=f"local_step_{name}={value}"):
        make_sync_policy("interval", **{"scaler": 1, "clipper": 1, name: value})
