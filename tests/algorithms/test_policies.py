"""The schedules: when second moments are refreshed, when ranks synchronise, and what a checkpoint keeps of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_onebit.algorithms.schedules import (
    LocalSteps,
    SyncPolicy,
    VariancePolicy,
    replay_schedule,
)


def refreshes(policy: VariancePolicy, last: int, first: int = 1) -> list[int]:
    seen = []
    for step in range(first, last + 1):
        if policy.due(step):
            policy.record(step)
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


def test_the_first_steps_may_all_be_refreshes() -> None:
    """Until the freeze; afterwards gaps are those of the steps."""
    assert refreshes(VariancePolicy(dense=100), 113) == [*range(1, 101), 104, 108, 112]
    policy = VariancePolicy(dense=100)
    assert refreshes(policy, 40) == [*range(1, 41)]
    policy.freeze(40, None, learned=False)
    assert refreshes(policy, 80, first=41) == [56, 72]


def test_after_the_freeze_gaps_are_those_of_the_steps_and_16_at_least() -> None:
    policy = VariancePolicy(16)
    policy.freeze(300, None, learned=True)
    assert refreshes(policy, 600, first=301) == [*range(316, 509, 16), 540, 572]
    assert VariancePolicy(16).count(300, 600) == 15 and policy.refreshes == 16
    # 0/1 Adam's last refresh may lie before its freeze
    policy = VariancePolicy(2)
    assert refreshes(policy, 40) == [1, 2, 3, 5, 7, 11, 15, 23, 31]
    policy.freeze(40, None, learned=False)
    assert refreshes(policy, 80, first=41) == [47, 63]
    policy = VariancePolicy(2)
    policy.freeze(40, 5, learned=False)
    assert refreshes(policy, 60, first=41) == [45, 50, 55, 60]


def test_a_refresh_that_is_missed_is_made_up_for_and_one_may_come_early() -> None:
    policy = VariancePolicy(16)
    policy.record(1000)
    assert not policy.due(1031) and policy.due(1032) and policy.due(1040)
    policy.bring_forward(1010)
    policy.bring_forward(1020)
    assert policy.due(1010) and not policy.due(1009)
    policy.record(1010)
    assert policy.next_step == 1020, "what was asked for last counts even where a refresh comes before it"


def test_a_refresh_counts_for_all_steps_since_the_last_up_to_a_weight_of_a_sixteenth() -> None:
    policy = VariancePolicy(16)
    policy.record(1000)
    assert policy.updates(1032, 0.999, 1000) == 32
    # b2 remembers 20 steps: as Adam's own step where that weighs more
    assert policy.updates(1032, 0.95, 1000) == pytest.approx(np.log(15 / 16) / np.log(0.95))
    assert policy.updates(1032, 0.9, 1000) == policy.updates(1032, 0.0, 1000) == 1
    # few updates so far: the weight that counts is that in the corrected moment
    for b2, known in ((0.999, 100.0), (0.95, 60.0)):
        s = policy.updates(2000, b2, known)
        assert (1 - b2**s) / (1 - b2 ** (known + s)) == pytest.approx(1 / 16)


def test_the_schedule_goes_on_where_it_was_after_a_resume() -> None:
    whole = refreshes(VariancePolicy(2), 60)
    for cut in (4, 6, 9, 20, 41):
        first, rest = VariancePolicy(2), VariancePolicy(2)
        before = refreshes(first, cut)
        rest.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + refreshes(rest, 60, first=cut + 1) == whole


def test_synchronisation_gap_doubles_every_scaler_steps_up_to_the_clipper() -> None:
    policy = SyncPolicy(LocalSteps(max_gap=4, double_every=3))
    policy.start(10, 1.0)
    # gaps 1 at 11-13, 2 at 14-16, 4 from 17 on
    assert [policy.gap(step, 1.0) for step in range(11, 21)] == [1, 1, 1, 2, 2, 2, 4, 4, 4, 4]
    assert synchronisations(policy, 11, 28) == [11, 12, 13, 15, 19, 23, 27]


def test_without_local_steps_every_step_synchronises() -> None:
    policy = SyncPolicy()
    policy.start(5, 1.0)
    assert synchronisations(policy, 6, 40) == list(range(6, 41))


def test_gap_follows_the_learning_rate() -> None:
    policy = SyncPolicy(LocalSteps(max_gap=8, double_every="lr_halving"))
    policy.start(10, 0.4)
    gaps = {0.4: 1, 0.21: 1, 0.2: 2, 0.11: 2, 0.1: 4, 0.05: 8, 0.001: 8, 0.0: 8, 0.8: 1}
    assert {lr: policy.gap(11, lr) for lr in gaps} == gaps
    # lr halves every 4 steps: 0.4 at 11-13, 0.2 from 14, 0.1 from 18
    halving = synchronisations(policy, 11, 24, lambda step: 0.4 * 0.5 ** ((step - 10) // 4))
    assert halving == [11, 12, 13, 15, 17, 21]


def test_an_lr_that_halves_by_multiplication_reaches_its_power_of_two() -> None:
    """Also in seven steps, after which rounding leaves it a little above the half."""
    for steps in (1, 7):
        policy, lr, above = SyncPolicy(LocalSteps(max_gap=1024, double_every="lr_halving")), 0.003, 0
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
    refresh=st.booleans(),
)
def test_replay_counts_the_rounds_of_the_written_down_policies(
    scaler: int, local_scaler: int, clipper: int, freeze: int, steps: int, refresh: bool
) -> None:
    policy = SyncPolicy(LocalSteps(max_gap=clipper, double_every=local_scaler) if clipper > 1 else None)
    ours = replay_schedule(steps, freeze_step=freeze, policy=policy, refresh=refresh, doubling=scaler, dense=0)
    t_v, t_u = oracle.VariancePolicy(scaler), oracle.SyncPolicy(freeze, local_scaler, clipper)
    theirs = {"dense": 0, "one_bit": 0, "silent": 0}
    for t in range(1, steps + 1):
        frozen, due = t > freeze, t_v(t) and (t <= freeze or refresh)
        dense = due and (not frozen or t_u.last == t - 1)  # where ranks are equal
        sync = t_u(t, 1.0) or (frozen and refresh and (due or t_v(t + 1)))
        if sync or dense:
            t_u.last = t
        if dense:
            t_v.refreshed(t)
        if t == freeze:
            t_v.frozen = True
            t_v.next = t_v.last + t_v.gap(t_v.last)
        theirs["dense" if dense else "one_bit" if sync else "silent"] += 1
    assert ours == theirs


@pytest.mark.parametrize("double_every", [5, "lr_halving"])
@given(cut=st.integers(0, 40))
def test_sync_policy_continues_from_its_state(double_every: Any, cut: int) -> None:
    def lr(step: int) -> float:
        return 0.5 ** (step / 7)

    def fresh() -> Any:
        return SyncPolicy(LocalSteps(max_gap=8, double_every=double_every))

    whole, first, second = fresh(), fresh(), fresh()
    for policy in (whole, first):
        policy.start(20, 1.0)
    expected = synchronisations(whole, 21, 100, lr)
    seen = synchronisations(first, 21, 20 + cut, lr)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert seen + synchronisations(second, 21 + cut, 100, lr) == expected
