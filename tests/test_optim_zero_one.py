"""ZeroOneAdam: against the float64 oracle through refreshes, one-bit rounds and local steps, and what others see in between."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from optim_support import Problem, close, equal, joined, run_world, snapshot, sure, train, whole_state

from lightning_onebit.checkpoint import Stamp, restore_residuals, write_shard
from lightning_onebit.optim import OnebitAdam, Phase
from lightning_onebit.optim.policies import ShrinkPolicy
from lightning_onebit.optim.redistribute import Redistribution
from lightning_onebit.optim.rules import compression_noise
from lightning_onebit.optim.zero_one_adam import ZeroOneAdam

SHAPES = ((20, 33), (7,), (0,), (1,), (300,))
#: refreshes at 1 to 4, 6 and 8 (by default every step up to 8 would be one); one-bit rounds between them; gaps 1, 2 and 4 after step 8
SCHEDULE: dict[str, Any] = {
    "lr": 0.01,
    "weight_decay": 0.1,
    "var_freeze_step": 8,
    "var_update_scaler": 2,
    "var_rise_steps": 3,
    "local_step_scaler": 4,
    "local_step_clipper": 4,
    "block_size": 64,
    "bucket_mb": 0.0012,
}
# lr is 0 in the first step, as in a schedule that warms up
WARMED_UP = (0.0, 0.005, *[0.01] * 28)
# gap 1, then 2 and 4 as lr halves
HALVED = (0.0, 0.005, *[0.01] * 8, *[0.005] * 6, *[0.0025] * 14)
# gap 4, then 1, for lr is back where it was at the freeze (two steps after a synchronisation), then 2 and 4
RESTARTED = (0.0, 0.005, *[0.01] * 8, *[0.0025] * 6, *[0.01] * 4, *[0.005] * 2, *[0.0025] * 8)
#: the paper's rules, of which the defaults differ
PUBLISHED = {"preconditioned": False, "var_decay": "refresh", "refresh_interval": "never", "var_rise_steps": 0}
BY_LR = {k: v for k, v in SCHEDULE.items() if k != "local_step_scaler"} | {"local_step_policy": "learning_rate"}


def problem(**differing: Any) -> Problem:
    """30 steps that cross every change of the schedule; part of the first tensor never has a gradient."""
    settings = {"options": SCHEDULE, "lrs": WARMED_UP, "shapes": SHAPES, "cold": 100, "seed": 5, **differing}
    return Problem(30, algorithm="zero_one_adam", **settings)


def kinds_of(records: list[Any], buckets: int) -> list[str]:
    """What each step was, by what it sent."""
    kinds = {(True, False): "dense", (False, True): "one-bit", (False, False): "silent"}
    # and one where tensors that come late are averaged
    assert all(record.collectives // 2 in (0, buckets) for record in records if not record.dense)
    return [kinds[record.dense, record.collectives > 1 and not record.dense] for record in records]


def assert_follows(results: list[dict[str, Any]], made: Problem, simulated: Any, seen: list[Any]) -> None:
    sure(simulated)
    lr = max(made.lrs or (0.01,))
    names = {
        "refresh": "dense",
        "dense": "dense",
        "compressed": "one-bit",
        "sync": "one-bit",
        "local": "silent",
        "relearn": "dense",
    }
    buckets = results[0]["records"][-1].collectives // 2 or max(r.collectives for r in results[0]["records"][1:]) // 2
    for rank, result in enumerate(results):
        assert kinds_of(result["records"], buckets) == [names[kind] for kind in simulated.kinds]
        for t, (ours, theirs) in enumerate(zip(result["trajectory"], seen, strict=True)):
            for l, x in enumerate(ours):
                close(x, theirs[rank][l], lr, f"rank {rank}, step {t + 1}, tensor {l}")
        for l, size in enumerate(np.prod(s) for s in made.shapes):
            if size:
                m = result["state"][l]["exp_avg"].numpy().ravel()
                np.testing.assert_allclose(m, simulated.ms[rank][l], rtol=1e-4, atol=1e-4)
    e, d = joined(results, made)
    for i in range(len(results)):
        for l in range(len(made.shapes)):
            np.testing.assert_allclose(e[i][l], simulated.exchange.e[i][l], rtol=1e-5, atol=1e-4)
    for l in range(len(made.shapes)):
        np.testing.assert_allclose(d[l], simulated.exchange.d[l], rtol=1e-5, atol=1e-4)


def simulate(made: Problem, world: int) -> tuple[Any, list[Any]]:
    """The oracle after the run, and the weights of all its workers after every step."""
    seen: list[Any] = []
    simulated = made.simulate(world, lambda o, t: seen.append([[a.copy() for a in x] for x in o.xs]))
    return simulated, seen


CASES = {
    "interval": problem(),
    "interval, no bias correction": problem(options={**SCHEDULE, "bias_correction": False}, seed=1),
    "learning rate": problem(options=BY_LR, lrs=HALVED),
    # synchronisations at every step are rounds of their own kind: local steps after them begin at the model they have led to
    "learning rate that rises again": problem(options=BY_LR, lrs=RESTARTED),
    "as published": problem(options={**SCHEDULE, **PUBLISHED}),
    "all refreshes count": problem(options={**SCHEDULE, "var_rise_steps": 0}),
    # first gradients in a refresh after the first one-bit round, and in a one-bit round
    "tensors that come late": problem(
        lrs=None,
        seed=6,
        missing=frozenset({*((t, -1, 0) for t in range(6)), *((t, -1, 4) for t in range(5))}),
        options={**SCHEDULE, "bucket_mb": 16.0},
    ),
    "preconditioned from the start": problem(options={**SCHEDULE, "preconditioned": True}),
    "a scale of the servers": problem(options={**SCHEDULE, "server_scale_factor": 1.5}),
    "an average of refreshes, preconditioned, no bias correction": problem(
        options={**SCHEDULE, "var_decay": "refresh", "preconditioned": True, "bias_correction": False}
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_follows_the_oracle_through_every_phase(world: int, case: str) -> None:
    """Every rank's weights after every step, silent ones included; momentum and both residuals at the end. On real processes."""
    made = CASES[case]
    simulated, seen = simulate(made, world)
    gaps = np.diff([t for t, kind in enumerate(simulated.kinds) if kind == "sync"])
    assert {1, 2, 4} <= set(gaps.tolist()) and simulated.kinds[0] == "refresh" and "compressed" in simulated.kinds
    assert_follows(run_world(train, world, made, real=True), made, simulated, seen)


def test_local_steps_are_bounded_as_adams_are_and_lose_nothing_as_the_oracle_says() -> None:
    """Gradients outgrow the variance that has frozen. No weight moves by more than ``lr_t*(1-b1)/sqrt(1-b2)`` alone, but u takes it all."""
    made = problem(growth=1.2, seed=7, lrs=None)
    simulated, seen = simulate(made, 2)
    assert simulated.bounded > 10_000
    results = run_world(train, 2, made)
    assert_follows(results, made, simulated, seen)
    for t in (t for t, kind in enumerate(simulated.kinds) if kind == "local"):
        lr_t, decay = 0.01 / (1 - 0.9 ** (t + 1)), 1 - 0.01 * 0.1
        for before, after in zip(results[0]["trajectory"][t - 1], results[0]["trajectory"][t], strict=True):
            moved = (after - before * decay).abs()
            assert not moved.numel() or float(moved.max()) <= lr_t * 0.1 / 0.001**0.5 * (1 + 1e-5)


def without_local_steps(group: Any, rank: int, world: int, kind: Any, options: dict[str, Any]) -> Any:
    made = problem()
    params = made.parameters()
    optimizer = kind(params, lr=0.01, weight_decay=0.1, block_size=64, process_group=group, **options)
    trajectory = []
    for t in range(made.steps):
        made.put(params, t, rank)
        optimizer.param_groups[0]["lr"] = 0.01 * 0.8**t
        optimizer.step()
        trajectory.append([p.detach().clone() for p in params])
    tensors = optimizer.residual_state_dict()["tensors"]
    return trajectory, {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("preconditioned", [True, False])
def test_without_local_steps_it_is_1_bit_adam_bit_for_bit_however_lr_falls(preconditioned: bool) -> None:
    """So what is held back enters with the lr of the step that it enters, and is no larger than 1-bit Adam's at the end of a schedule."""
    rule = {} if preconditioned else {"preconditioned": False}
    ours = run_world(without_local_steps, 2, ZeroOneAdam, {"var_freeze_step": 8, "local_step_clipper": 1, **rule})
    theirs = run_world(without_local_steps, 2, OnebitAdam, {"freeze_step": 8, **rule})
    assert equal(ours, theirs)


RISES: dict[Any, Any] = {
    # lr rises at 2 and 3, or at 2 to 5. None: all but 3 to 16 count; else all but 3 to 5, all but 3, or all
    (None, 3): ([*range(1, 17)], []),
    (None, 5): ([*range(1, 17)], []),
    (5, 5): ([1, 2, 3, 4, 5, 6, 8, 10, 14], [7, 9, 11, 12, 13, 15, 16]),
    (3, 5): ([1, 2, 3, 4, 6, 8, 12, 16], [5, 7, 9, 10, 11, 13, 14, 15]),
    (0, 5): ([1, 2, 3, 5, 7, 11, 15], [4, 6, 8, 9, 10, 12, 13, 14, 16]),
}


@pytest.mark.parametrize(("wait", "rise"), RISES)
def test_refreshes_of_a_rising_lr_do_not_count_as_the_oracle_says(wait: int | None, rise: int) -> None:
    lrs = tuple(min(t, rise) * 0.01 / rise for t in range(1, 31))
    options = {**SCHEDULE, "var_rise_steps": wait, "var_freeze_step": 16}
    made = problem(options={k: v for k, v in options.items() if v is not None}, lrs=lrs, seed=6)
    simulated, seen = simulate(made, 2)
    kinds = dict(enumerate(simulated.kinds[:16], 1))
    refreshed, one_bit = RISES[wait, rise]
    assert [t for t, kind in kinds.items() if kind == "refresh"] == refreshed
    assert [t for t, kind in kinds.items() if kind == "compressed"] == one_bit
    assert_follows(run_world(train, 2, made), made, simulated, seen)


# ----- learning rate 0 -----------------------------------------------------------------------------------------------------------


def test_lr_zero_where_a_round_is_due_makes_it_a_dense_round_that_leaves_the_variance_alone() -> None:
    """Before the freeze (step 6, between refreshes), and in local steps right after a synchronisation."""
    lrs = list(WARMED_UP)
    lrs[5] = lrs[8] = lrs[9] = 0.0  # a one-bit round, and the first two steps after the freeze
    made = problem(options={**SCHEDULE, "var_rise_steps": 0}, lrs=tuple(lrs))
    simulated, seen = simulate(made, 2)
    assert [simulated.kinds[t] for t in (5, 8, 9)] == ["dense"] * 3
    assert_follows(run_world(train, 2, made), made, simulated, seen)


def test_lr_zero_between_synchronisations_still_feeds_the_momentum() -> None:
    """A local step that moves nothing: m takes its gradient, and the synchronisation comes when it would have come."""
    lrs = list(WARMED_UP)
    lrs[21] = lrs[22] = 0.0
    made = problem(lrs=tuple(lrs))
    simulated, seen = simulate(made, 2)
    assert simulated.kinds[19:24] == ["sync", "local", "local", "local", "sync"]
    assert_follows(run_world(train, 2, made), made, simulated, seen)


def groups_at_zero(group: Any, rank: int, world: int) -> Any:
    same = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(90, generator=same)) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.0}]
    optimizer = ZeroOneAdam(groups, process_group=group, **SCHEDULE)
    draws = torch.Generator().manual_seed(rank)
    start = params[1].detach().clone()
    for _ in range(30):
        for p in params:
            p.grad = torch.randn(90, generator=draws)
        optimizer.step()
        assert equal(params[1].detach(), start)
    optimizer.param_groups[1]["lr"] = 0.01
    while optimizer.mid_local or equal(params[1].detach(), start):
        for p in params:
            p.grad = torch.randn(90, generator=draws)
        optimizer.step()
    return snapshot(optimizer, params)


def test_a_group_at_lr_zero_is_left_alone_and_joins_later() -> None:
    first, second = run_world(groups_at_zero, 2)
    assert equal(first["x"], second["x"]) and equal(first["state"], second["state"])


# ----- refreshes after the freeze ------------------------------------------------------------------------------------------------

#: synchronisations at 9 to 12, 14 and, early, 15, after which steps 16 and 17 refresh; then again at 25 and 26
REFRESHED = {**SCHEDULE, "refresh_interval": 7, "refresh_steps": 2}
#: gradients shrink by a half in 34 steps: refreshes begin by themselves, with gaps of 1, 2 and 4
FADING = {
    **SCHEDULE,
    "weight_decay": 0.0,  # a factor that is rounded adds up over many steps
    "betas": (0.9, 0.9),
    "local_step_scaler": 40,
    "bucket_mb": 0.0005,
}


def fading(seed: int = 3, **options: Any) -> Problem:
    # few elements: 260 steps of many would bring a sign that rounding decides
    shapes = ((40, 3), (20,), (33,), (5, 2))
    broken = frozenset({(30, 1, 0), (112, 0, 2)})
    made = problem(
        options={**FADING, **options}, lrs=None, shapes=shapes, cold=32, seed=seed, growth=0.98, broken=broken
    )
    return dataclasses.replace(made, steps=260)


@pytest.mark.parametrize("preconditioned", ["auto", True, False])
@pytest.mark.parametrize("policy", ["interval", "learning_rate"])
@pytest.mark.parametrize("world", [2, 3])
def test_refreshes_after_the_freeze_follow_the_oracle(world: int, policy: str, preconditioned: bool | str) -> None:
    """Twice, each after a synchronisation that comes early for it; gaps take back a doubling. Gradients are missing in the first."""
    schedule = {"refresh_interval": 7, "refresh_steps": 2, "preconditioned": preconditioned}
    missing = frozenset({(15, 0, 1), (15, -1, 4), (16, -1, 1)})
    by_lr = policy == "learning_rate"
    made = problem(
        options={**(BY_LR if by_lr else SCHEDULE), **schedule},
        lrs=HALVED if by_lr else WARMED_UP,
        seed=8,
        missing=missing,
    )
    simulated, seen = simulate(made, world)
    first = ["sync"] * 4 + ["local", "sync", "sync"]
    if by_lr:  # lr halves at steps 11 and 17; the second refresh finds it as it was
        first = ["sync"] * 2 + ["local", "sync"] * 2 + ["sync"]
        second, third = ["local", "sync"] * 3 + ["sync"], ["sync"] * 4
    else:  # a doubling less, then one more
        second, third = ["local", "sync"] + ["local"] * 3 + ["sync"] * 2, ["local"] * 3 + ["sync"]
    assert simulated.kinds[8:] == first + ["relearn"] * 2 + second + ["relearn"] * 2 + third
    results = run_world(train, world, made)
    assert_follows(results, made, simulated, seen)
    for l, (v, k) in enumerate(zip(*simulated.frozen, strict=True)):
        if v.any():
            r = results[0]["state"][l]["reciprocal_denominator"].numpy().ravel()
            np.testing.assert_allclose(r, 1 / (np.sqrt(v / (1 - 0.999**k)) + 1e-8), rtol=1e-5)


@pytest.mark.parametrize(("preconditioned", "seed"), [("auto", 2), (False, 1)])
@pytest.mark.parametrize("world", [2, 3])
def test_refreshes_begin_by_themselves_as_the_oracle_says(world: int, preconditioned: bool | str, seed: int) -> None:
    made = fading(seed, preconditioned=preconditioned)
    simulated, seen = simulate(made, world)
    begun = [t for t, kind in enumerate(simulated.kinds) if kind == "relearn" and simulated.kinds[t - 1] != "relearn"]
    assert len(begun) >= 2 and all(simulated.kinds[t - 1] == "sync" for t in begun)
    assert Counter(simulated.kinds)["relearn"] == 4 * len(begun) and Counter(simulated.kinds)["local"] > 60
    results = run_world(train, world, made)
    for result in results:
        result["trajectory"] = [
            x for x, r in zip(result["trajectory"], result["records"], strict=True) if not r.skipped
        ]
        result["records"] = [r for r in result["records"] if not r.skipped]
    seen = [x for t, x in enumerate(seen) if t not in {b[0] for b in made.broken}]
    assert_follows(results, made, simulated, seen)


def test_the_exchange_before_a_refresh_is_forgotten_with_it() -> None:
    """Where lr is 0 after a refresh nothing is exchanged, and nothing counts; so an interrupted run goes on with the same average."""
    options: dict[str, Any] = {"block_size": 32, "var_freeze_step": 4, "var_update_scaler": 1, "var_rise_steps": 0, "refresh_steps": 2}
    gaps: dict[str, Any] = {"local_step_scaler": 2, "local_step_clipper": 4}  # the refresh waits for a synchronisation
    p, other = (torch.nn.Parameter(torch.ones(70)) for _ in range(2))
    optimizer, resumed = (ZeroOneAdam([x], force_compression=True, **options, **gaps) for x in (p, other))
    refreshing, ended = False, False
    with mock.patch.multiple(ShrinkPolicy, WINDOW=2, FALL=0.999, LEAST=3):
        for t in range(40):
            p.grad = torch.full_like(p, 0.9**t)
            optimizer.step()
            ended = refreshing and not optimizer._refreshing
            refreshing = optimizer._refreshing
            if ended:
                break
        assert ended
        other.data.copy_(p.data)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        resumed.load_residual_state_dict(copy.deepcopy(optimizer.residual_state_dict()))
        for x, either in ((p, optimizer), (other, resumed)):
            for t in range(4):
                x.grad = torch.ones_like(x)
                either.param_groups[0]["lr"] = 0.0 if t < 2 else 0.01
                either.step()
                if t < 2:
                    assert either._energy is None
    assert optimizer.state_dict()["onebit"]["shrinking"] == resumed.state_dict()["onebit"]["shrinking"]
    assert torch.equal(p, other)


def test_what_does_not_shrink_is_bit_for_bit_a_run_without_refreshes() -> None:
    steady = dataclasses.replace(fading(), growth=1.0)
    auto, never = (
        run_world(train, 2, dataclasses.replace(steady, options={**FADING, "refresh_interval": kind}))
        for kind in ("auto", "never")
    )
    for a, b in zip(auto, never, strict=True):
        assert equal(a["x"], b["x"]) and equal(a["residuals"], b["residuals"])
        assert not any(record.dense for record in a["records"][9:])


def resumed_everywhere(group: Any, rank: int, world: int, made: Problem, first: int, last: int) -> Any:
    """A run, and from step ``first`` on every step made by a new optimizer too, continued from what the run would save."""

    def step(optimizer: ZeroOneAdam, params: list[torch.nn.Parameter], t: int) -> bool:
        made.put(params, t, rank)
        for g in optimizer.param_groups if made.lrs is not None else ():
            g["lr"] = made.lrs[t]
        optimizer.step()
        assert optimizer.ledger.last is not None
        return optimizer.ledger.last.dense

    params = made.parameters()
    optimizer: ZeroOneAdam = made.build(params, process_group=group)
    kinds, equals, local = [], [], []
    for t in range(last):
        if t >= first:
            with optimizer.consensus():  # what a checkpoint keeps
                copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
            residuals = optimizer.residual_state_dict()
            other: ZeroOneAdam = made.build(copies, process_group=group)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            other.load_residual_state_dict(copy.deepcopy(residuals))
        kinds.append(step(optimizer, params, t))
        local.append(optimizer.mid_local)
        if t >= first:
            same = step(other, copies, t) == kinds[-1]
            ours, theirs = snapshot(optimizer, params), snapshot(other, copies)
            equals.append(same and equal(ours, theirs))
    return kinds, equals, local


@pytest.mark.parametrize("preconditioned", ["auto", True, False])
def test_a_run_resumed_anywhere_is_the_run_that_was_not_interrupted(preconditioned: bool | str) -> None:
    """Bit for bit: before and after the freeze, in local steps, before a synchronisation that comes early, and in a refresh."""
    made = problem(options={**REFRESHED, "preconditioned": preconditioned}, lrs=None)
    for kinds, equals, local in run_world(resumed_everywhere, 2, made, 5, 30):
        assert sum(kinds[8:]) == 4 and any(local)
        assert equals == [True] * 25


def test_a_run_resumed_before_its_first_gradient_and_after_its_first_one_bit_round_goes_on_alike() -> None:
    """Nothing is known of a parameter by then, but that its variance has been part of a compressed stage.

    Its first gradient comes at lr 0, in the place of a one-bit round: m learns, and v does not.
    """
    late = frozenset((t, -1, 0) for t in range(5))
    lrs = (*[0.01] * 5, 0.0, *[0.01] * 24)
    made = problem(options={**SCHEDULE, "var_rise_steps": 0}, lrs=lrs, shapes=((300,),), cold=30, missing=late)
    for kinds, equals, _ in run_world(resumed_everywhere, 2, made, 2, 14):
        assert [not dense for dense in kinds[:8]] == [False, False, False, True, False, False, False, True]
        assert equals == [True] * 12


def test_a_run_resumed_anywhere_is_refreshed_when_the_other_is() -> None:
    made = fading(local_step_scaler=20)
    simulated, _ = simulate(made, 2)
    begins = simulated.kinds.index("relearn") + 1  # (one step before is skipped)
    assert simulated.kinds[begins - 4 : begins - 2].count("local") > 0, (
        "its last step alone has not been synchronised when it is due"
    )
    for kinds, equals, _ in run_world(resumed_everywhere, 2, made, begins - 8, begins + 8):
        assert kinds[begins : begins + 4] == [True] * 4
        assert all(equals)


def test_a_step_alone_is_synchronised_before_a_refresh_that_another_interval_makes_overdue() -> None:
    """Saved between two synchronisations with a long interval, continued with a short one: synchronised first, two dense steps then."""
    made = problem(options=REFRESHED | {"refresh_interval": 50}, lrs=None)

    def cut(group: Any, rank: int, world: int) -> Any:
        params = made.parameters()
        optimizer = made.build(params, process_group=group)
        for t in range(19):
            made.put(params, t, rank)
            optimizer.step()
        assert optimizer.mid_local
        with optimizer.consensus():
            copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = made.build(copies, process_group=group, refresh_interval=3)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.load_residual_state_dict(copy.deepcopy(optimizer.residual_state_dict()))
        for t in range(19, 30):
            made.put(copies, t, rank)
            other.step()
            yield other.ledger.last.dense, other.mid_local, [p.detach().clone() for p in copies]

    first, second = run_world(lambda *args: list(cut(*args)), 2)
    assert [dense for dense, *_ in first] == [False, True, True, False, False, False, True, True, False, False, False]
    assert not any(first[t][1] for t in (0, 1, 2, 5, 6, 7))
    for (_, local, ours), (*_, theirs) in zip(first, second, strict=True):
        assert local or equal(ours, theirs)


@pytest.mark.parametrize("through", ["state", "shards"])
def test_residuals_of_before_the_freeze_are_converted_where_a_run_resumes_with_an_earlier_one(
    through: str, tmp_path: Path
) -> None:
    """A run that freezes after 8 steps, and one that would have frozen later, saved after 8 and continued as the first."""
    made = problem(lrs=None)

    def resumed(group: Any, rank: int, world: int) -> Any:
        params = made.parameters()
        optimizer = made.build(params, process_group=group, var_freeze_step=20)
        for t in range(8):
            made.put(params, t, rank)
            optimizer.step()
        other = made.build(params, process_group=group)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if through == "state":
            other.load_residual_state_dict(copy.deepcopy(optimizer.residual_state_dict()))
        else:  # as the strategies do it
            path, stamp = str(tmp_path / "x.ckpt"), Stamp("0" * 32, world, True)
            write_shard(path, stamp, rank, [optimizer.residual_state_dict()])
            assert restore_residuals(path, stamp, optimizer._transport, [other], torch.device("cpu")) is None
        return other.phase, other.residual_state_dict()

    def whole(group: Any, rank: int, world: int) -> Any:
        params = made.parameters()
        optimizer = made.build(params, process_group=group)
        for t in range(8):
            made.put(params, t, rank)
            optimizer.step()
        return optimizer.phase, optimizer.residual_state_dict()

    for (phase, ours), (other, theirs) in zip(run_world(resumed, 2), run_world(whole, 2), strict=True):
        assert phase == other == Phase.LOCAL
        assert ours["preconditioned"] and float(ours["tensors"]["worker_residual"].abs().max()) > 0
        assert equal(ours, theirs)


@pytest.mark.parametrize("freeze", [8, 10])
def test_residuals_that_wait_with_one_rank_alone_are_converted_when_the_variance_freezes(freeze: int) -> None:
    """On loading, for the freeze is over by then, or two steps later; redistributed from two ranks, which would have frozen later."""
    made = problem(lrs=None)
    saved = run_world(saved_early, 2, made)
    params = made.parameters()
    optimizer = made.build(params, var_freeze_step=freeze)
    optimizer.load_state_dict(copy.deepcopy(saved[0][0]))
    parts = Redistribution(optimizer.residual_state_dict(), converts=optimizer.converts_residuals)
    for _, part in saved:
        parts.add(part)
    waiting = parts.result()
    assert not waiting.get("preconditioned", False)
    owed = {name: tensor.clone() for name, tensor in waiting["tensors"].items()}
    optimizer.load_residual_state_dict(waiting)
    for t in range(8, freeze):
        assert equal(optimizer.residual_state_dict()["tensors"], owed)
        made.put(params, t, 0)
        optimizer.step()
    assert optimizer.phase is Phase.LOCAL and optimizer.residual_state_dict()["preconditioned"]
    for i, state in optimizer.state_dict()["state"].items():
        v, slot = state["exp_avg_sq"].flatten(), optimizer._slot_of[i]
        above = v > 0.05 * v.mean()  # the floor
        D = (v / (1 - 0.999**freeze)).sqrt() + 1e-8
        for name, tensor in optimizer.residual_state_dict()["tensors"].items():
            before, after = optimizer._part(owed[name], slot), optimizer._part(tensor, slot)
            assert params[i].numel() <= 1 or float(before[above].abs().max()) > 0
            torch.testing.assert_close(after[above] * D[above], before[above], rtol=1e-4, atol=1e-9)


def saved_early(group: Any, rank: int, world: int, made: Problem) -> Any:
    optimizer = made.build(params := made.parameters(), process_group=group, var_freeze_step=20)
    for t in range(8):
        made.put(params, t, rank)
        optimizer.step()
    return optimizer.state_dict(), optimizer.residual_state_dict()


# ----- the variance through other worlds -----------------------------------------------------------------------------------------


def worlds_worker(group: Any, rank: int, world: int, saved: Any, first: int, last: int) -> Any:
    """Steps of 0/1 Adam on gradients of changing size, with refreshes at 1, 2, 3, 5, 7, 11, ... and a freeze at 34 on two ranks."""
    p = torch.nn.Parameter(torch.zeros(40) if saved is None else saved[0][0].clone())
    optimizer = ZeroOneAdam(
        *([p], 1e-3),
        **dict(block_size=32, process_group=group, var_update_scaler=2, var_rise_steps=0, var_freeze_step=34),
        denominator_floor=0.0,
    )
    if saved is not None:
        optimizer.load_state_dict(saved[0][1])
        parts = Redistribution(optimizer.residual_state_dict())
        for part in saved:
            parts.add(part[2])
        optimizer.load_residual_state_dict(parts.result())
    seen = []
    for t in range(first, last):
        p.grad = worlds_gradient(t, rank).float()
        dense = optimizer.next_step_is_dense
        optimizer.step()
        v, state = optimizer._flat.get("v"), whole_state(optimizer)
        seen.append((dense, optimizer._variance_steps.get(0, optimizer._t[0]), None if v is None else v[:40].clone()))
    return p.detach().clone(), state, optimizer.residual_state_dict(), seen


def worlds_gradient(t: int, rank: int) -> torch.Tensor:
    noise = torch.rand(40, generator=torch.Generator().manual_seed(10 * t + rank), dtype=torch.float64)
    return (1 + noise) * (1 + t % 5)


def test_the_variance_and_its_updates_are_those_of_the_definition_on_two_ranks_one_and_two() -> None:
    """Alone v learns at every step, so the first refresh after that stands for few steps; k is what v has had all the way."""
    b2, v, k, learned, saved, kinds = 0.999, torch.zeros(40, dtype=torch.float64), 0, 0, None, []
    for world, first, last in ((2, 0, 10), (1, 10, 30), (2, 30, 33), (1, 33, 36), (2, 36, 38)):
        results = run_world(worlds_worker, world, saved, first, last)
        if world == 1:  # as if v had been updated at every step
            v, k = v * (1 - b2**first) / (1 - b2**k), first
        for t, (dense, updates, ours) in zip(range(first, last), results[0][3], strict=True):
            if dense:
                g = torch.stack([worlds_gradient(t, rank) for rank in range(world)]).mean(dim=0)
                gap = 1 if world == 1 else t + 1 - learned
                v, k, learned = b2**gap * v + (1 - b2**gap) * g**2, k + gap, t + 1
            kinds.append((world, dense))
            assert updates == k, f"step {t + 1}"
            if ours is not None:
                torch.testing.assert_close(ours.double(), v, rtol=1e-5, atol=0.0, msg=f"step {t + 1}")
        saved = results
    assert set(kinds) == {(1, True), (2, True), (2, False)} and kinds[30:33] == [(2, True), (2, False), (2, False)]
    state = saved[0][1]
    assert state["onebit"]["phase"] == "local"
    denominators = 1 / state["state"][0]["reciprocal_denominator"].double()
    torch.testing.assert_close(denominators, (v / (1 - b2**k)).sqrt(), rtol=1e-5, atol=1e-7)


# ----- when steps are compressed -------------------------------------------------------------------------------------------------

#: the 32nd refresh is step 47; steps 48, 50 to 52 and 54 to 56 are one-bit rounds after it, step 57 is the first after the freeze
SETTLING = {**SCHEDULE, "var_update_scaler": 16, "var_rise_steps": 0, "var_freeze_step": 56}


def settling(**options: Any) -> Problem:
    shapes = ((40, 3), (20,), (33,), (5, 2))  # (see fading)
    missing = frozenset({(46, 0, 1), (47, -1, 2), (49, 1, 0)})
    made = problem(
        options={**SETTLING, **options},
        lrs=None,
        shapes=shapes,
        cold=32,
        seed=4,
        missing=missing,
        broken=frozenset({(48, 1, 0)}),
    )
    return dataclasses.replace(made, steps=74)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_steps_are_compressed_from_the_32nd_refresh_on_as_the_oracle_says(world: int, bias_correction: bool) -> None:
    made = dataclasses.replace(settling(bias_correction=bias_correction), broken=frozenset())
    simulated, seen = simulate(made, world)
    assert simulated.kinds[46:50] == ["refresh", "compressed", "refresh", "compressed"]
    assert simulated.kinds[55:57] == ["compressed", "sync"] and simulated.kinds.count("local") > 4
    assert_follows(run_world(train, world, made), made, simulated, seen)


def refused_load_worker(group: Any, rank: int, world: int) -> bool:
    p = torch.nn.Parameter(torch.ones(40))
    options = {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}
    optimizer = ZeroOneAdam([p], lr=0.1, block_size=32, process_group=group, **options)
    draw = torch.Generator().manual_seed(rank)
    while not optimizer.mid_local:
        p.grad = torch.randn(40, generator=draw)
        optimizer.step()
    mine = p.detach().clone()
    optimizer.show_consensus()
    shown = p.detach().clone()
    with pytest.raises(ValueError, match="groups"):
        optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": []})
    optimizer.show_local()
    return not equal(mine, shown) and equal(p.detach(), mine)


def test_a_load_that_is_refused_while_the_shared_model_is_shown_leaves_the_way_back() -> None:
    assert run_world(refused_load_worker, 2) == [True, True]


def test_a_run_resumed_around_the_32nd_refresh_is_the_run_that_was_not_interrupted() -> None:
    for kinds, equals, _ in run_world(resumed_everywhere, 2, settling(), 44, 62):
        # (48 is skipped, and its refresh made at 49)
        assert [t for t in range(44, 57) if kinds[t]] == [44, 46, 48, 49, 53]
        assert equals == [True] * 18


def test_what_ranks_owe_changes_its_units_at_the_32nd_refresh_and_not_again_at_the_freeze() -> None:
    """A run whose variance has settled before it freezes goes on from the freeze with the residuals it had."""
    made = settling()

    def owed(group: Any, rank: int, world: int, freeze: int) -> Any:
        params = made.parameters()
        optimizer: ZeroOneAdam = made.build(params, process_group=group, var_freeze_step=freeze)
        kept = []
        for t in range(58):
            made.put(params, t, rank)
            optimizer.step()
            state = optimizer.residual_state_dict()
            r = optimizer._flat["r"].clone() if "r" in optimizer._flat else None
            worker = state["tensors"].get("worker_residual")
            kept.append((state.get("preconditioned", False), None if worker is None else worker.clone(), r))
        return optimizer.phase, kept

    # (a step is skipped: the freeze comes at the end of the 57th call)
    for (phase, kept), (later, others) in zip(run_world(owed, 2, 56), run_world(owed, 2, 70), strict=True):
        assert phase == Phase.LOCAL and later == Phase.WARMUP
        assert equal(kept[56][1], others[56][1])
        assert [units for units, *_ in kept] == [False] * 46 + [True] * 12
        (_, before, _), (_, after, r) = kept[45], kept[46]
        assert float(before.abs().max()) > 0 and equal(after, before * r)


def test_a_variance_that_settles_before_the_first_one_bit_round_is_as_if_steps_had_always_been_compressed() -> None:
    options = {"var_update_scaler": 40, "var_freeze_step": 60}
    auto, always = (run_world(train, 2, settling(**options, preconditioned=kind)) for kind in ("auto", True))
    assert any(not record.dense for record in auto[0]["records"][:60])
    for ours, theirs in zip(auto, always, strict=True):
        assert equal(ours["trajectory"], theirs["trajectory"]) and equal(ours["residuals"], theirs["residuals"])


# ----- what replicas share -------------------------------------------------------------------------------------------------------


def test_replicas_are_bitwise_equal_after_every_synchronisation_and_differ_between() -> None:
    made = problem()
    simulated, _ = simulate(made, 3)
    results = run_world(train, 3, made)
    for t, kind in enumerate(simulated.kinds):
        same = equal(results[0]["trajectory"][t], results[1]["trajectory"][t])
        assert same == (kind != "local"), f"step {t + 1} ({kind})"
        assert same == equal(results[0]["trajectory"][t], results[2]["trajectory"][t])
    assert results[0]["records"][-1].ratio > 1


def looked_at(group: Any, rank: int, world: int, made: Problem, look: str) -> Any:
    params = made.parameters()
    optimizer: ZeroOneAdam = made.build(params, process_group=group)
    shown = []
    for t in range(made.steps):
        made.put(params, t, rank)
        optimizer.param_groups[0]["lr"] = made.lr_at(t)
        optimizer.step()
        before = [p.detach().clone() for p in params]
        places = [p.data_ptr() for p in params]
        if look == "consensus":
            with optimizer.consensus(), optimizer.consensus():
                shown.append([p.detach().clone() for p in params])
        elif look == "shown until the next step":
            optimizer.show_consensus()
            optimizer.show_consensus()
            shown.append([p.detach().clone() for p in params])
            continue
        elif look == "saved":
            with optimizer.consensus():
                shown.append([p.detach().clone() for p in params])
                optimizer.state_dict(), optimizer.residual_ratio()
        assert equal([p.detach() for p in params], before) and places == [p.data_ptr() for p in params]
    optimizer.show_local()
    return {**snapshot(optimizer, params), "shown": shown}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_consensus_is_what_all_ranks_share_and_training_continues_as_if_nobody_had_looked(dtype: torch.dtype) -> None:
    made = problem(dtype=dtype)
    anchors: list[Any] = []
    simulated = made.simulate(2, lambda o, t: anchors.append([a.copy() for a in o.anchor]))
    assert simulated.kinds[-1] == "local"
    untouched = run_world(looked_at, 2, made, "")
    for look in ("consensus", "shown until the next step", "saved"):
        results = run_world(looked_at, 2, made, look)
        assert equal(results[0]["shown"], results[1]["shown"]), "all ranks show the same model"
        for result, other in zip(results, untouched, strict=True):
            assert equal({**result, "shown": 0}, {**other, "shown": 0}), look
        if dtype == torch.float32:
            for shown, anchor in zip(results[0]["shown"], anchors, strict=True):
                for x, expected in zip(shown, anchor, strict=True):
                    close(x, expected, 0.01)
    # the anchor is that of the last synchronisation, decayed by every local step since
    last = max(t for t, kind in enumerate(simulated.kinds) if kind == "sync")
    decay = (1 - 0.01 * 0.1) ** (made.steps - 1 - last)
    for then, now in zip(results[0]["shown"][last], results[0]["shown"][-1], strict=True):
        torch.testing.assert_close(
            now.float(), then.float() * decay, rtol=2e-2 if dtype != torch.float32 else 1e-6, atol=0
        )


def test_consensus_outside_of_local_steps_shows_the_weights_themselves() -> None:
    p = torch.nn.Parameter(torch.ones(50))
    optimizer = ZeroOneAdam([p], var_freeze_step=2)
    for _ in range(4):
        with optimizer.consensus():
            shown = p.data_ptr()
        assert shown == p.data_ptr() and not optimizer.mid_local
        p.grad = torch.ones(50)
        optimizer.step()


# ----- what is sent and held ------------------------------------------------------------------------------------------------------


def test_silent_steps_send_the_control_round_alone() -> None:
    made = problem()
    simulated, _ = simulate(made, 2)
    (result, _) = run_world(train, 2, made)
    assert simulated.kinds.count("local") == 13
    for kind, record in zip(simulated.kinds, result["records"], strict=True):
        if kind == "local":
            assert record.bytes_sent == record.collectives == 0 and record.phase == "local"
            assert record.control_collectives == 1 and record.ratio == float("inf")
        elif kind in ("compressed", "sync"):
            assert 0 < record.bytes_sent < record.dense_bytes / 5 and record.control_collectives >= 1


def memory(group: Any, rank: int, world: int, clipper: int) -> Any:
    p = torch.nn.Parameter(torch.ones(500))
    options: Any = {"local_step_scaler": 1} if clipper > 1 else {}
    optimizer = ZeroOneAdam([p], var_freeze_step=2, local_step_clipper=clipper, process_group=group, **options)
    middle = []
    for t in range(8):
        p.grad = torch.full((500,), float(rank + t))
        optimizer.step()
        middle.append(optimizer.mid_local)
    return any(middle), sorted(optimizer._flat), optimizer.phase


def test_with_a_gap_of_one_there_is_no_local_step_and_no_anchor() -> None:
    assert run_world(memory, 2, 1)[0] == (False, ["r"], Phase.LOCAL)
    assert run_world(memory, 2, 4)[0] == (True, ["anchor", "m", "r", "u"], Phase.LOCAL)


def ratios(group: Any, rank: int, world: int, lr: float) -> Any:
    made = problem(lrs=tuple([lr] * 30), options={**SCHEDULE, "weight_decay": 0.0})
    params = made.parameters()
    optimizer = made.build(params, process_group=group)
    seen = []
    for t in range(made.steps):
        made.put(params, t, rank)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        seen.append(optimizer.residual_ratio())
    return seen, snapshot(optimizer, params)


def test_residual_ratio_compares_like_with_like() -> None:
    """Residuals hold momenta, at a synchronisation all of them together: the ratio neither depends on lr nor vanishes in local steps."""
    small, large = ([seen for seen, _ in run_world(ratios, 2, lr)] for lr in (2.0**-10, 2.0**-3))
    np.testing.assert_allclose(small, large, rtol=1e-4)
    # refreshes at t = 1 to 4, then the first one-bit round
    assert small[0][:4] == [0.0] * 4 and all(0.2 < ratio < 5 for ratio in small[0][4:])


@pytest.mark.parametrize("preconditioned", [True, False])
def test_residual_ratio_is_the_residual_over_the_update_exchanged_last(preconditioned: bool) -> None:
    settings = {**SCHEDULE, "weight_decay": 0.0, "preconditioned": preconditioned}
    made = problem(options=settings, lrs=tuple([0.01] * 28))
    made = dataclasses.replace(made, steps=28)
    simulated, _ = simulate(made, 2)
    assert simulated.kinds[-1] == "sync"

    def ratio(group: Any, rank: int, world: int) -> float:
        params = made.parameters()
        optimizer = made.build(params, process_group=group)
        for t in range(28):
            made.put(params, t, rank)
            optimizer.step()
        return optimizer.residual_ratio()

    for rank, ours in enumerate(run_world(ratio, 2)):
        e = np.concatenate(simulated.exchange.e[rank])
        scale = [
            simulated._over_denominator(l, np.ones_like(m)) if preconditioned else 1.0
            for l, m in enumerate(simulated.m)
        ]
        exchanged = 4 * np.concatenate([m * s for m, s in zip(simulated.m, scale, strict=True)])  # of four steps
        assert ours == pytest.approx(np.linalg.norm(e) / np.linalg.norm(exchanged), rel=1e-3)


def test_weight_decay_does_not_leak_into_the_momentum() -> None:
    """Gradients do not depend on the weights here, so momentum and residuals must not see the decay at all."""
    with_decay, without = (run_world(train, 2, problem(options={**SCHEDULE, "weight_decay": wd})) for wd in (0.5, 0.0))
    for a, b in zip(with_decay, without, strict=True):
        for key in ("worker_residual", "server_residual", "local_momentum", "local_update"):
            assert equal(a["residuals"][key], b["residuals"][key]), key
        assert not equal(a["x"], b["x"])


# ----- skipping and joining --------------------------------------------------------------------------------------------------------


def skipping(group: Any, rank: int, world: int, made: Problem) -> Any:
    params = made.parameters()
    optimizer = made.build(params, process_group=group)
    unchanged = []
    bad = sorted({t for t, *_ in made.broken})
    for t in range(made.steps):
        before = snapshot(optimizer, params) if t else None
        made.put(params, t, rank)
        optimizer.step()
        if t in bad:
            after = snapshot(optimizer, params)
            assert before is not None
            for count in ("skipped", "skips_in_a_row"):
                before["books"].pop(count), after["books"].pop(count)
            unchanged.append(equal(before, after))
    return unchanged, optimizer.skipped_steps, optimizer.steps


def test_nan_on_one_rank_skips_the_step_on_all_and_keeps_the_schedule() -> None:
    """At a refresh, a one-bit round, a local step and a synchronisation: weights, state, residuals and policies are as before."""
    broken = frozenset({(2, 0, 0), (6, 1, 4), (18, 0, 0), (19, 1, 1), (23, 1, 0)})
    made = problem(broken=broken, lrs=None)
    for unchanged, skipped, steps in run_world(skipping, 2, made):
        assert unchanged == [True] * 5 and skipped == 5 and steps == 25


def joining(group: Any, rank: int, world: int, when: int) -> Any:
    made = problem(lrs=None)
    params = made.parameters()
    optimizer = made.build(params[:4], process_group=group)
    history = []
    for t in range(made.steps):
        if t == when:
            optimizer.add_param_group({"params": params[4:], "lr": 0.02})
        made.put(params, t, rank)
        momentum = optimizer.state_dict()["state"].get(0, {}).get("exp_avg")
        optimizer.step()
        after = optimizer.state_dict()["state"][0]["exp_avg"]
        history.append(0.0 if momentum is None else float((after - momentum).norm() / (momentum.norm() + 1e-12)))
    return snapshot(optimizer, params), history


@pytest.mark.parametrize("when", [2, 6])
def test_a_group_that_joins_between_one_bit_rounds_costs_the_others_nothing_but_residuals(
    when: int, caplog: pytest.LogCaptureFixture
) -> None:
    results = run_world(joining, 2, when)
    assert any("residuals start from zero" in r.message for r in caplog.records) == (when == 6)
    assert equal(results[0][0]["x"], results[1][0]["x"]) or results[0][0]["books"]["sync_policy"]["since"] > 0
    for state, history in results:
        # momentum goes on from where it was: no step changes it out of proportion
        assert max(history[when : when + 2]) < 2 * max(history[3:6])
        moved = (state["x"][4] - torch.from_numpy(problem().start()[4])).abs()
        assert moved.min() > 0 and moved.isfinite().all()


# ----- options -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"var_freeze_step": 0}, ValueError, "var_freeze_step=0"),
        ({"var_update_scaler": 0}, ValueError, "var_update_scaler=0"),
        ({"var_rise_steps": -1}, ValueError, "var_rise_steps=-1"),
        ({"var_rise_steps": 1.5}, TypeError, "var_rise_steps=1.5"),
        ({"var_rise_steps": 16}, ValueError, "var_rise_steps=16 has no effect with var_update_scaler=16.* 17 or more"),
        (
            {"var_rise_steps": 20, "var_freeze_step": 17},
            ValueError,
            "var_rise_steps=20 has no effect.*var_freeze_step=17",
        ),
        ({"local_step_scaler": 0}, ValueError, "local_step_scaler=0"),
        ({"local_step_clipper": 0}, ValueError, "local_step_clipper=0"),
        ({"local_step_clipper": 1, "local_step_scaler": 9}, ValueError, "local_step_scaler=9 has no effect"),
        (
            {"local_step_clipper": 1, "local_step_policy": "learning_rate"},
            ValueError,
            "'learning_rate' has no effect with local_step_clipper=1",
        ),
        ({"local_step_policy": "never"}, ValueError, "local_step_policy='never' .* 'interval', 'learning_rate'"),
        (
            {"local_step_policy": "learning_rate", "local_step_scaler": 7},
            ValueError,
            "local_step_scaler=7 has no effect",
        ),
        ({"freeze_step": 3}, TypeError, "freeze_step"),
        ({"var_decay": "steps"}, ValueError, "var_decay='steps' .* 'refresh', 'step'"),
        # refreshes at t = 1 to 17 and at 19, the first that skips a step
        (
            {"var_decay": "step", "var_freeze_step": 18, "var_rise_steps": 0},
            ValueError,
            "var_decay='step' has no effect with var_freeze_step=18.*step 19",
        ),
        # at t = 1 to 32 and at 34
        ({"var_decay": "step", "var_freeze_step": 33}, ValueError, "var_freeze_step=33.*var_rise_steps=256.*step 34"),
        ({"var_decay": "refresh", "var_freeze_step": 18}, ValueError, "var_decay='refresh' has no effect"),
        ({"var_decay": "step", "var_freeze_step": 0}, ValueError, "var_freeze_step=0"),
        ({"preconditioned": "always"}, ValueError, "preconditioned='always' is unknown.*'auto'.*True or False"),
        ({"preconditioned": 1}, TypeError, "preconditioned=1"),
        ({"refresh_interval": 0}, ValueError, "refresh_interval=0"),
        ({"refresh_interval": "never", "refresh_steps": 2}, ValueError, "refresh_steps=2 has no effect"),
    ],
)
def test_bad_options_are_named_with_their_value(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ZeroOneAdam([torch.nn.Parameter(torch.ones(3))], **options)


# ----- young variances -----------------------------------------------------------------------------------------------------------

VOCABULARY, WIDTH = 4096, 32


def vocabulary_worker(group: Any, rank: int, world: int, make: Any) -> float:
    """A tiny language model, trained for 30 steps of 64 tokens per rank: most rows of its embedding have a gradient in few of them."""
    draw = torch.Generator().manual_seed(0)
    embedding, mix, norm = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)
    embedding.weight.data.normal_(std=0.02, generator=draw)
    mix.weight.data.normal_(std=0.2, generator=draw)
    mix.bias.data.zero_()
    params = [*embedding.parameters(), *mix.parameters(), *norm.parameters()]
    frequency, following = 1 / torch.arange(1.0, VOCABULARY + 1), torch.randperm(VOCABULARY, generator=draw)

    def loss(seed: int, tokens: int) -> torch.Tensor:
        """Each second token follows from the one before."""
        draw = torch.Generator().manual_seed(seed)
        now, other = torch.multinomial(frequency, 2 * tokens, replacement=True, generator=draw).chunk(2)
        after = torch.where(torch.rand(tokens, generator=draw) < 0.5, following[now], other)
        hidden = embedding(now)
        logits = norm(hidden + mix(hidden)) @ embedding.weight.T
        return torch.nn.functional.cross_entropy(logits, after)

    optimizer = make(params, group)
    for t in range(30):
        optimizer.param_groups[0]["lr"] = 0.01 * min((t + 1) / 3, 1 - t / 30)
        optimizer.zero_grad()
        loss(1000 + t * world + rank, 64).backward()
        if isinstance(optimizer, torch.optim.AdamW):
            for p in params:
                group.all_reduce(p.grad).wait()
                p.grad /= world
        optimizer.step()
    if isinstance(optimizer, ZeroOneAdam):
        optimizer.synchronise()
    with torch.no_grad():
        return loss(5, 2048).item()


def test_local_steps_on_a_young_variance_of_a_large_vocabulary_keep_adamws_loss() -> None:
    """Rows that were rare before the freeze have denominators of nearly nothing, and then their first gradients of one worker."""

    def young(params: Any, group: Any) -> ZeroOneAdam:
        gaps = {"local_step_scaler": 2, "local_step_clipper": 8}
        return ZeroOneAdam(params, process_group=group, var_freeze_step=3, **gaps)

    (adamw, *_), (ours, *_) = (
        run_world(vocabulary_worker, 4, make)
        for make in (lambda params, group: torch.optim.AdamW(params, weight_decay=0.0), young)
    )
    assert ours < 1.02 * adamw


def frozen_young(group: Any, rank: int, world: int, steps: int, large: float, options: dict[str, Any]) -> Any:
    """One row in 16 has gradients that are ``large`` times as large as those of the others in its block."""
    p = torch.nn.Parameter(torch.ones(64, 32))
    optimizer = ZeroOneAdam([p], process_group=group, block_size=512, var_freeze_step=steps, **options)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps + 2):
        p.grad = torch.randn(64, 32, generator=draw)
        p.grad[::16] *= large
        optimizer.step()
    return optimizer.phase


@pytest.mark.parametrize("local", [True, False])
def test_the_published_rule_refuses_a_young_variance_whose_noise_would_move_weights_too_far(local: bool) -> None:
    options = {**PUBLISHED, **({} if local else {"local_step_clipper": 1})}
    del options["var_decay"], options["var_rise_steps"]
    words = r"preconditioned=False: the variance of parameter 0 freezes at step 10 after 10 refreshes.* by \d+\.\d lr in a step"
    with pytest.raises(ValueError, match=words):
        run_world(frozen_young, 2, 10, 100.0, options)
    assert run_world(frozen_young, 2, 10, 1.0, options) == [Phase.LOCAL] * 2  # an even one
    assert run_world(frozen_young, 2, 32, 100.0, {**options, "var_update_scaler": 31}) == [Phase.LOCAL] * 2  # a settled one
    options["preconditioned"] = "auto"
    assert run_world(frozen_young, 2, 10, 100.0, options) == [Phase.LOCAL] * 2


def test_noise_of_one_bit_rounds_is_what_weights_would_move_by() -> None:
    """Against its definition, over blocks that the tensor's length is no multiple of, in chunks."""
    v = torch.rand(1000, generator=torch.Generator().manual_seed(0)) ** 8
    v[100:200] = 0
    vd = v.clone()
    w = v[v > 0].mean()
    vd = torch.where(v == 0, w, v.clamp(min=float(0.01 * w)))
    moved = [(block.mean() / d) for block, d in zip(v.split(64), vd.split(64), strict=True)]
    with mock.patch("lightning_onebit.optim.rules._CHUNK", 128):
        noise = compression_noise(v, phi=0.1, block_size=64)
    assert noise == pytest.approx(float(torch.cat(moved).mean().sqrt()), rel=1e-5)
    assert compression_noise(torch.zeros(10), phi=0.1, block_size=64) == 0.0
    assert compression_noise(torch.full((10,), 3.0), phi=0.1, block_size=64) == pytest.approx(1.0)


def test_a_variance_over_time_may_freeze_at_the_first_refresh_that_skips_a_step() -> None:
    ZeroOneAdam([torch.nn.Parameter(torch.ones(3))], var_decay="step", var_freeze_step=34)
    ZeroOneAdam([torch.nn.Parameter(torch.ones(3))], var_decay="step", var_freeze_step=19, var_rise_steps=0)
    ZeroOneAdam([torch.nn.Parameter(torch.ones(3))], var_decay="step", var_freeze_step=23, var_rise_steps=20)


def test_a_rise_of_one_step_may_hold_the_gap() -> None:
    ZeroOneAdam([torch.nn.Parameter(torch.ones(3))], var_rise_steps=17, var_freeze_step=18)


def test_freeze_ends_the_refreshes_where_no_step_was_given() -> None:
    made = problem(options={k: v for k, v in SCHEDULE.items() if k != "var_freeze_step"}, lrs=None)

    def frozen(group: Any, rank: int, world: int) -> Any:
        params = made.parameters()
        optimizer = made.build(params, process_group=group)
        for t in range(made.steps):
            if t == 8:
                optimizer.freeze()
            made.put(params, t, rank)
            optimizer.step()
        return snapshot(optimizer, params)["x"]

    reference = run_world(train, 2, problem(lrs=None))
    for ours, theirs in zip(run_world(frozen, 2), reference, strict=True):
        assert equal(ours, theirs["x"])
