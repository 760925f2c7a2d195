"""ZeroOneAdam: against the float64 oracle through refreshes, one-bit rounds and local steps, and what others see in between."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from harness import grouped
from optim_support import Problem, close, equal, joined, run_world, snapshot, sure, train, whole_state
from oracle.adam import updates_of_refresh

from lightning_onebit.algorithms import LocalSteps, OnebitAdam
from lightning_onebit.algorithms.updates import compression_noise
from lightning_onebit.algorithms.zero_one_adam import ZeroOneAdam
from lightning_onebit.engine import ExchangeOptions, Phase
from lightning_onebit.engine.redistribute import Redistribution

SHAPES = ((20, 33), (7,), (0,), (1,), (300,))
#: refreshes at 1, 2, 3, 5 and 7, one-bit rounds between them; gaps 1, 2 and 4 after step 8
SCHEDULE: dict[str, Any] = {
    "lr": 0.01,
    "weight_decay": 0.1,
    "freeze_step": 8,
    "_doubling": 2,
    "refresh": "never",
    "local_steps": LocalSteps(max_gap=4, double_every=4),
    "block_size": 64,
    "bucket_mb": 0.0012,
}
# lr is 0 in the first step, as in a schedule that warms up
WARMED_UP = (0.0, 0.005, *[0.01] * 28)
# gap 1, then 2 and 4 as lr halves
HALVED = (0.0, 0.005, *[0.01] * 8, *[0.005] * 6, *[0.0025] * 14)
# gap 4, then 1, for lr is back where it was at the freeze (two steps after a synchronisation), then 2 and 4
RESTARTED = (0.0, 0.005, *[0.01] * 8, *[0.0025] * 6, *[0.01] * 4, *[0.005] * 2, *[0.0025] * 8)
PUBLISHED = {**SCHEDULE, "recipe": "published"}
BY_LR = {**SCHEDULE, "local_steps": LocalSteps(max_gap=4, double_every="lr_halving")}


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
    "as published": problem(options=PUBLISHED),
    "as published, no bias correction": problem(options={**PUBLISHED, "bias_correction": False}),
    "as published, learning rate": problem(options={**BY_LR, "recipe": "published"}, lrs=HALVED),
    # first gradients in a refresh after the first one-bit round, and in a one-bit round
    "tensors that come late": problem(
        lrs=None,
        seed=6,
        missing=frozenset({*((t, -1, 0) for t in range(6)), *((t, -1, 4) for t in range(5))}),
        options={**SCHEDULE, "bucket_mb": 16.0},
    ),
}


# what a case adds does not depend on the number of ranks: that of both recipes goes through all
@pytest.mark.parametrize(
    ("world", "case"),
    [(2 + number % 3, case) for number, case in enumerate(CASES)],
)
def test_follows_the_oracle_through_every_phase(world: int, case: str) -> None:
    """Every rank's weights after every step, silent ones included; momentum and both residuals at the end. On real processes."""
    made = CASES[case]
    simulated, seen = simulate(made, world)
    gaps = np.diff([t for t, kind in enumerate(simulated.kinds) if kind == "sync"])
    assert {1, 2, 4} <= set(gaps.tolist()) and simulated.kinds[0] == "refresh" and "compressed" in simulated.kinds
    assert_follows(run_world(train, world, made, real=True), made, simulated, seen)


def test_local_steps_are_bounded_as_adams_are_and_lose_nothing_as_the_oracle_says() -> None:
    """Gradients outgrow the variance that has frozen. No weight moves by more than ``lr_t*(1-b1)/sqrt(1-b2)`` alone, but u takes it all."""
    made = problem(growth=1.2, seed=0, lrs=None)
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
    optimizer = kind(params, lr=0.01, weight_decay=0.1, **grouped(options, block_size=64, process_group=group))
    trajectory = []
    for t in range(made.steps):
        made.put(params, t, rank)
        optimizer.param_groups[0]["lr"] = 0.01 * 0.8**t
        optimizer.step()
        trajectory.append([p.detach().clone() for p in params])
    tensors = optimizer.residual_state_dict()["tensors"]
    return trajectory, {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize(("recipe", "freeze_step"), [("default", 20), ("published", 8)])
def test_without_local_steps_it_is_1_bit_adam_bit_for_bit_however_lr_falls(recipe: str, freeze_step: int) -> None:
    """So what is held back enters with the lr of the step that it enters, and is no larger than 1-bit Adam's at the end of a schedule."""
    rule = {"freeze_step": freeze_step, "refresh": "never", "recipe": recipe}
    ours = run_world(without_local_steps, 2, ZeroOneAdam, rule)
    theirs = run_world(without_local_steps, 2, OnebitAdam, rule)
    assert equal(ours, theirs)


@pytest.mark.parametrize(("recipe", "dense"), [("default", 104), ("published", 49)])
def test_its_first_hundred_steps_are_dense_by_the_default_recipe_alone(recipe: str, dense: int) -> None:
    """Then, up to step 120, the published schedule: 4 refreshes in both."""
    p = torch.nn.Parameter(torch.zeros(40))
    optimizer = ZeroOneAdam([p], freeze_step=200, recipe=recipe, exchange=ExchangeOptions(_alone=True, block_size=32))
    for _ in range(120):
        p.grad = torch.ones(40)
        optimizer.step()
    assert (optimizer.ledger.dense_steps, optimizer.ledger.compressed_steps) == (dense, 120 - dense)


# ----- learning rate 0 -----------------------------------------------------------------------------------------------------------


def test_lr_zero_where_a_round_is_due_makes_it_a_dense_round_that_leaves_the_variance_alone() -> None:
    """Before the freeze (step 6, between refreshes), and in local steps right after a synchronisation."""
    lrs = list(WARMED_UP)
    lrs[5] = lrs[8] = lrs[9] = 0.0  # a one-bit round, and the first two steps after the freeze
    made = problem(lrs=tuple(lrs))
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
    optimizer = ZeroOneAdam(groups, **grouped(SCHEDULE, process_group=group))
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

#: refreshes at 14, 20 and 26, each after a synchronisation that comes early for it
REFRESHED = {**SCHEDULE, "refresh": 5}


@pytest.mark.parametrize("by_lr", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_refreshes_after_the_freeze_follow_the_oracle(world: int, by_lr: bool) -> None:
    """Each after a synchronisation that comes early for it; gradients are missing in the second."""
    missing = frozenset({(19, 0, 1), (19, -1, 4)})
    made = problem(
        options={**(BY_LR if by_lr else SCHEDULE), "refresh": 5},
        lrs=HALVED if by_lr else WARMED_UP,
        seed=8,
        missing=missing,
    )
    simulated, seen = simulate(made, world)
    assert [t for t, kind in enumerate(simulated.kinds, 1) if kind == "relearn"] == [14, 20, 26]
    assert all(simulated.kinds[t - 2] == "sync" for t in (14, 20, 26)) and simulated.kinds.count("local") > 3
    results = run_world(train, world, made)
    assert_follows(results, made, simulated, seen)
    for l, (v, k) in enumerate(zip(*simulated.frozen, strict=True)):
        if v.any():
            r = results[0]["state"][l]["reciprocal_denominator"].numpy().ravel()
            np.testing.assert_allclose(r, 1 / (np.sqrt(v / (1 - 0.999**k)) + 1e-8), rtol=1e-5)


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


@pytest.mark.parametrize(("options", "refreshes"), [(REFRESHED, 3), (PUBLISHED, 0)], ids=["default", "published"])
def test_a_run_resumed_anywhere_is_the_run_that_was_not_interrupted(options: dict[str, Any], refreshes: int) -> None:
    """Bit for bit: before and after the freeze, in local steps, before a synchronisation that comes early, and in a refresh."""
    made = problem(options=options, lrs=None)
    for kinds, equals, local in run_world(resumed_everywhere, 2, made, 5, 30):
        assert sum(kinds[8:]) == refreshes and any(local)
        assert equals == [True] * 25


def test_a_run_resumed_before_its_first_gradient_and_after_its_first_one_bit_round_goes_on_alike() -> None:
    """Nothing is known of a parameter by then, but that its variance has been part of a compressed stage.

    Its first gradient comes at lr 0, in the place of a one-bit round: m learns, and v does not.
    """
    late = frozenset((t, -1, 0) for t in range(5))
    lrs = (*[0.01] * 5, 0.0, *[0.01] * 24)
    made = problem(lrs=lrs, shapes=((300,),), cold=30, missing=late)
    for kinds, equals, _ in run_world(resumed_everywhere, 2, made, 2, 14):
        assert [not dense for dense in kinds[:8]] == [False, False, False, True, False, False, False, True]
        assert equals == [True] * 12


def test_a_step_alone_is_synchronised_before_a_refresh_that_is_overdue() -> None:
    """Saved between two synchronisations without refreshes, continued with them: synchronised first, a dense step then."""
    made = problem(lrs=None)

    def cut(group: Any, rank: int, world: int) -> Any:
        params = made.parameters()
        optimizer = made.build(params, process_group=group)
        for t in range(25):
            made.put(params, t, rank)
            optimizer.step()
        assert optimizer.mid_local
        with optimizer.consensus():
            copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = made.build(copies, process_group=group, refresh="auto")
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.load_residual_state_dict(copy.deepcopy(optimizer.residual_state_dict()))
        for t in range(25, 30):
            made.put(copies, t, rank)
            other.step()
            yield other.ledger.last.dense, other.mid_local, [p.detach().clone() for p in copies]

    first, second = run_world(lambda *args: list(cut(*args)), 2)
    assert [dense for dense, *_ in first] == [False, True, False, False, False]
    assert not any(first[t][1] for t in (0, 1))
    for (_, local, ours), (*_, theirs) in zip(first, second, strict=True):
        assert local or equal(ours, theirs)


# ----- the variance through other worlds -----------------------------------------------------------------------------------------


def worlds_worker(group: Any, rank: int, world: int, saved: Any, first: int, last: int) -> Any:
    """Steps of 0/1 Adam on gradients of changing size, with refreshes at 1, 2, 3, 5, 7, 11, ... and a freeze at 34 on two ranks."""
    p = torch.nn.Parameter(torch.zeros(40) if saved is None else saved[0][0].clone())
    options = {"freeze_step": 34, "refresh": "never", "denominator_floor": 0.0}
    exchange = ExchangeOptions(block_size=32, state_dtype="float32", process_group=group)
    optimizer = ZeroOneAdam([p], 1e-3, _doubling=2, exchange=exchange, **options)
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
        v, state = optimizer._engine.kept.flat.get("v"), whole_state(optimizer)
        seen.append(
            (
                dense,
                optimizer._engine.rule.updates.get(0, optimizer._engine.kept.t[0]),
                None if v is None else v[:40].clone(),
            )
        )
    return p.detach().clone(), state, optimizer.residual_state_dict(), seen


def worlds_gradient(t: int, rank: int) -> torch.Tensor:
    noise = torch.rand(40, generator=torch.Generator().manual_seed(10 * t + rank), dtype=torch.float64)
    return (1 + noise) * (1 + t % 5)


def test_the_variance_and_its_updates_are_those_of_the_definition_on_two_ranks_one_and_two() -> None:
    """Alone v learns at every step, so the next refresh is a gap after that; k is what v has had all the way."""
    b2, v, k, learned, saved, kinds = 0.999, torch.zeros(40, dtype=torch.float64), 0.0, 0, None, []
    for world, first, last in ((2, 0, 10), (1, 10, 22), (2, 22, 33), (1, 33, 36), (2, 36, 38)):
        results = run_world(worlds_worker, world, saved, first, last)
        if world == 1:  # as if v had been updated at every step
            v, k = v * (1 - b2**first) / (1 - b2**k), first
        for t, (dense, updates, ours) in zip(range(first, last), results[0][3], strict=True):
            if dense:
                g = torch.stack([worlds_gradient(t, rank) for rank in range(world)]).mean(dim=0)
                times = 1.0 if world == 1 else updates_of_refresh(t + 1 - learned, b2, k)
                v, k, learned = b2**times * v + (1 - b2**times) * g**2, k + times, t + 1
            kinds.append((world, dense))
            assert updates == pytest.approx(k, rel=1e-12), f"step {t + 1}"
            if ours is not None:
                torch.testing.assert_close(ours.double(), v, rtol=1e-5, atol=0.0, msg=f"step {t + 1}")
        saved = results
    assert set(kinds) == {(1, True), (2, True), (2, False)} and kinds[22:33] == [(2, t == 29) for t in range(22, 33)]
    state = saved[0][1]
    assert state["onebit"]["phase"] == "local"
    denominators = 1 / state["state"][0]["reciprocal_denominator"].double()
    torch.testing.assert_close(denominators, (v / (1 - b2**k)).sqrt(), rtol=1e-5, atol=1e-7)


def refused_load_worker(group: Any, rank: int, world: int) -> bool:
    p = torch.nn.Parameter(torch.ones(40))
    gaps = LocalSteps(max_gap=4, double_every=1)
    exchange = ExchangeOptions(block_size=32, process_group=group)
    optimizer = ZeroOneAdam([p], lr=0.1, freeze_step=2, local_steps=gaps, exchange=exchange)
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
    # refreshes at t = 1 to 3, then the first one-bit round
    assert small[0][:3] == [0.0] * 3 and all(0.2 < ratio < 5 for ratio in small[0][3:])


@pytest.mark.parametrize("recipe", ["default", "published"])
def test_residual_ratio_is_the_residual_over_the_update_exchanged_last(recipe: str) -> None:
    settings = {**SCHEDULE, "weight_decay": 0.0, "recipe": recipe}
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
            simulated._over_denominator(l, np.ones_like(m)) if recipe == "default" else 1.0
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
        ({"freeze_step": 0}, ValueError, "freeze_step=0"),
        ({"freeze_step": 2.5}, TypeError, "freeze_step=2.5 must be an integer"),
        ({"local_steps": 8}, TypeError, "local_steps=8 must be a LocalSteps or None, not int"),
        ({"recipe": "paper"}, ValueError, "recipe='paper' is unknown; choose one of 'default', 'published'"),
        ({"recipe": "published", "refresh": 5}, ValueError, "refresh=5 has no effect with recipe='published'"),
        ({"refresh": 0}, ValueError, "refresh=0"),
        ({"bias_correction": 1}, TypeError, "bias_correction=1 must be True or False"),
    ],
)
def test_bad_options_are_named_with_their_value(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ZeroOneAdam([torch.nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"max_gap": 0}, ValueError, "max_gap=0 is out of range; it must be at least 1"),
        ({"max_gap": 2.0}, TypeError, "max_gap=2.0 must be an integer"),
        ({"double_every": 0}, ValueError, "double_every=0"),
        ({"double_every": "never"}, ValueError, "double_every='never' is unknown; choose one of 'lr_halving'"),
        ({"max_gap": 1}, ValueError, "max_gap=1 makes no local steps, for which local_steps=None is the way"),
    ],
)
def test_bad_local_steps_are_named_with_their_value(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LocalSteps(**given)


# ----- young variances -----------------------------------------------------------------------------------------------------------

VOCABULARY, WIDTH = 4096, 32


def vocabulary_worker(group: Any, rank: int, world: int, make: Any) -> float:
    """A tiny language model, trained for 30 steps of 64 tokens per rank: most rows of its embedding have a gradient in few of them."""
    draw = torch.Generator().manual_seed(0)
    embedding, mix, norm = (
        torch.nn.Embedding(VOCABULARY, WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.LayerNorm(WIDTH),
    )
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
        gaps = LocalSteps(max_gap=8, double_every=2)
        return ZeroOneAdam(params, freeze_step=3, local_steps=gaps, exchange=ExchangeOptions(process_group=group))

    (adamw, *_), (ours, *_) = (
        run_world(vocabulary_worker, 4, make)
        for make in (lambda params, group: torch.optim.AdamW(params, weight_decay=0.0), young)
    )
    assert ours < 1.02 * adamw


def frozen_young(group: Any, rank: int, world: int, steps: int, large: float, options: dict[str, Any]) -> Any:
    """One row in 16 has gradients that are ``large`` times as large as those of the others in its block."""
    p = torch.nn.Parameter(torch.ones(64, 32))
    exchange = ExchangeOptions(process_group=group, block_size=512)
    optimizer = ZeroOneAdam([p], freeze_step=steps, exchange=exchange, **options)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps + 2):
        p.grad = torch.randn(64, 32, generator=draw)
        p.grad[::16] *= large
        optimizer.step()
    return optimizer.phase


@pytest.mark.parametrize("local", [True, False])
def test_the_published_rule_refuses_a_young_variance_whose_noise_would_move_weights_too_far(local: bool) -> None:
    options: dict[str, Any] = {"recipe": "published", "local_steps": LocalSteps() if local else None}
    words = r"recipe='published': the variance of parameter 0 freezes at step 10 after 10 refreshes.* by \d+\.\d lr in a step"
    with pytest.raises(ValueError, match=words):
        run_world(frozen_young, 2, 10, 100.0, options)
    assert run_world(frozen_young, 2, 10, 1.0, options) == [Phase.LOCAL] * 2  # an even one
    # one of 32 refreshes
    assert run_world(frozen_young, 2, 32, 100.0, {**options, "_doubling": 31}) == [Phase.LOCAL] * 2
    options["recipe"] = "default"
    assert run_world(frozen_young, 2, 10, 100.0, options) == [Phase.LOCAL] * 2


def root_mean_square(v: torch.Tensor) -> float:
    total, elements = compression_noise(v, phi=0.1, block_size=64).tolist()
    return float((total / elements) ** 0.5)


def test_noise_of_one_bit_rounds_is_what_weights_would_move_by() -> None:
    """Against its definition, over blocks that the tensor's length is no multiple of, in chunks."""
    v = torch.rand(1000, generator=torch.Generator().manual_seed(0)) ** 8
    v[100:200] = 0
    vd = v.clone()
    w = v[v > 0].mean()
    vd = torch.where(v == 0, w, v.clamp(min=float(0.01 * w)))
    moved = [(block.mean() / d) for block, d in zip(v.split(64), vd.split(64), strict=True)]
    with mock.patch("lightning_onebit.algorithms.updates._CHUNK", 128):
        noise = root_mean_square(v)
    assert noise == pytest.approx(float(torch.cat(moved).mean().sqrt()), rel=1e-5)
    assert root_mean_square(torch.zeros(10)) == 0.0
    assert root_mean_square(torch.full((10,), 3.0)) == pytest.approx(1.0)


def test_freeze_ends_the_refreshes_where_no_step_was_given() -> None:
    made = problem(options={k: v for k, v in SCHEDULE.items() if k != "freeze_step"}, lrs=None)

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
