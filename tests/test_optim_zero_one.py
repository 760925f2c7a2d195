"""ZeroOneAdam: against the float64 oracle through refreshes, one-bit rounds and local steps, and what others see in between."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from optim_support import Problem, close, equal, joined, run_world, snapshot, sure, train

from lightning_onebit.optim import Phase
from lightning_onebit.optim.zero_one_adam import ZeroOneAdam

SHAPES = ((20, 33), (7,), (0,), (1,), (300,))
#: refreshes at 1, 2, 3, 5, 7; one-bit rounds between them; gaps 1, 2 and 4 after step 8
SCHEDULE: dict[str, Any] = {
    "lr": 0.01,
    "weight_decay": 0.1,
    "var_freeze_step": 8,
    "var_update_scaler": 2,
    "local_step_scaler": 4,
    "local_step_clipper": 4,
    "block_size": 64,
    "bucket_mb": 0.0012,
}
# lr is 0 in the first step, as in a schedule that warms up
WARMED_UP = (0.0, 0.005, *[0.01] * 28)
# gap 1, then 2 and 4 as lr halves
HALVED = (0.0, 0.005, *[0.01] * 8, *[0.005] * 6, *[0.0025] * 14)
BY_LR = {k: v for k, v in SCHEDULE.items() if k != "local_step_scaler"} | {"local_step_policy": "learning_rate"}


def problem(**differing: Any) -> Problem:
    """30 steps that cross every change of the schedule; part of the first tensor never has a gradient."""
    settings = {"options": SCHEDULE, "lrs": WARMED_UP, "shapes": SHAPES, "cold": 100, "seed": 5, **differing}
    return Problem(30, algorithm="zero_one_adam", **settings)


def kinds_of(records: list[Any], buckets: int) -> list[str]:
    """What each step was, by what it sent."""
    kinds = {(True, False): "dense", (False, True): "one-bit", (False, False): "silent"}
    assert all(record.collectives in (0, 2 * buckets) for record in records if not record.dense)
    return [kinds[record.dense, record.collectives > 0 and not record.dense] for record in records]


def assert_follows(results: list[dict[str, Any]], made: Problem, simulated: Any, seen: list[Any]) -> None:
    sure(simulated)
    lr = max(made.lrs or (0.01,))
    names = {"refresh": "dense", "dense": "dense", "compressed": "one-bit", "sync": "one-bit", "local": "silent"}
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
            np.testing.assert_allclose(e[i][l], simulated.exchange.e[i][l], atol=1e-4 * lr)
    for l in range(len(made.shapes)):
        np.testing.assert_allclose(d[l], simulated.exchange.d[l], atol=1e-4 * lr)


def simulate(made: Problem, world: int) -> tuple[Any, list[Any]]:
    """The oracle after the run, and the weights of all its workers after every step."""
    seen: list[Any] = []
    simulated = made.simulate(world, lambda o, t: seen.append([[a.copy() for a in x] for x in o.xs]))
    return simulated, seen


CASES = {
    "interval": problem(),
    "interval, no bias correction": problem(options={**SCHEDULE, "bias_correction": False}),
    "learning rate": problem(options=BY_LR, lrs=HALVED),
    "preconditioned": problem(options={**SCHEDULE, "preconditioned": True}),
    "a variance over time": problem(options={**SCHEDULE, "var_decay": "step"}),
    "a variance over time, preconditioned, no bias correction": problem(
        options={**SCHEDULE, "var_decay": "step", "preconditioned": True, "bias_correction": False}
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
    optimizer = ZeroOneAdam(
        [p], var_freeze_step=2, local_step_scaler=1, local_step_clipper=clipper, process_group=group
    )
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
    """Residuals hold updates, lr_t times m: the ratio neither depends on lr nor vanishes in local steps."""
    small, large = ([seen for seen, _ in run_world(ratios, 2, lr)] for lr in (2.0**-10, 2.0**-3))
    np.testing.assert_allclose(small, large, rtol=1e-4)
    # refreshes at t = 1, 2, 3, then the first one-bit round
    assert small[0][:3] == [0.0] * 3 and all(0.2 < ratio < 5 for ratio in small[0][3:])


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

    lr_t = [0.01 / (1 - 0.9**t) for t in range(25, 29)]
    for rank, ours in enumerate(run_world(ratio, 2)):
        e = np.concatenate(simulated.exchange.e[rank])
        scale = [
            simulated._over_denominator(l, np.ones_like(m)) if preconditioned else 1.0
            for l, m in enumerate(simulated.m)
        ]
        ubar = sum(lr_t) * np.concatenate([m * s for m, s in zip(simulated.m, scale, strict=True)])
        assert ours == pytest.approx(np.linalg.norm(e) / np.linalg.norm(ubar), rel=1e-3)


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
        ({"local_step_scaler": 0}, ValueError, "local_step_scaler=0"),
        ({"local_step_clipper": 0}, ValueError, "local_step_clipper=0"),
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
            {"var_decay": "step", "var_freeze_step": 18},
            ValueError,
            "var_decay='step' has no effect with var_freeze_step=18.*step 19",
        ),
        ({"var_decay": "step", "var_freeze_step": 0}, ValueError, "var_freeze_step=0"),
    ],
)
def test_bad_options_are_named_with_their_value(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ZeroOneAdam([torch.nn.Parameter(torch.ones(3))], **options)


def test_a_variance_over_time_may_freeze_at_the_first_refresh_that_skips_a_step() -> None:
    ZeroOneAdam([torch.nn.Parameter(torch.ones(3))], var_decay="step", var_freeze_step=19)


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
