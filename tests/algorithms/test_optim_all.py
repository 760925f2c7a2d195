"""What all optimizers promise alike: missing gradients, cold coordinates, dense groups, 16 bits, and runs that are interrupted."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import copy
import dataclasses
import io
import math
import types
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from harness import grouped
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_support import (
    CLASSES,
    CROSSING,
    NO_WARM_UP,
    SMALL,
    Problem,
    close,
    equal,
    joined,
    run_world,
    snapshot,
    sure,
    train,
    whole_state,
)
from torch import Tensor

from lightning_onebit.algorithms import LocalSteps, moments, zero_one_adam
from lightning_onebit.algorithms.updates import reciprocal_denominator_
from lightning_onebit.algorithms.zero_one_adam import ZeroOneAdam
from lightning_onebit.comm import SimulatedGroup, SimulatedWorld
from lightning_onebit.engine import ExchangeOptions, engine
from lightning_onebit.engine.redistribute import Redistribution
from lightning_onebit.kernels import KernelsUnavailable, get_backend

ALGORITHMS = list(CLASSES)
ADAM_LIKE = ALGORITHMS[:3]
# 1-bit LAMB and 1-bit SGD have one rule each
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    **{algorithm: (algorithm, {}) for algorithm in ALGORITHMS},
    **{
        f"{a}, as published": (a, {"recipe": "published"}) for a in ALGORITHMS if a not in ("onebit_lamb", "onebit_sgd")
    },
}
STEPS = 16


def problem(algorithm: str, options: dict[str, Any] | None = None, **differing: Any) -> Problem:
    """16 steps across every phase change."""
    algorithm, rule = RULES[algorithm]
    settings = {"lr": 0.01, "weight_decay": 0.1, "block_size": 32, **CROSSING[algorithm], **rule, **(options or {})}
    steps = differing.pop("steps", STEPS)
    return Problem(steps, settings, **{"shapes": SMALL, "algorithm": algorithm, **differing})


def synchronised(state: dict[str, Any]) -> bool:
    """Whether replicas are meant to be equal."""
    return state["books"].get("sync_policy", {"since": 0})["since"] == 0


# ----- many ranks ---------------------------------------------------------------------------------------------------------------------


# on these no sign of 64 ranks is decided by rounding
CROWD_SEEDS = {"onebit_adam": 1, "zero_one_adam": 0}


# 1-bit LAMB exchanges as 1-bit Adam does, and its coefficients come of what all ranks have
@pytest.mark.parametrize("algorithm", CROWD_SEEDS)
def test_sixty_four_ranks_follow_the_oracle(algorithm: str) -> None:
    """Through every phase change and a refresh: weights after every step, residuals at the end."""
    made = problem(algorithm, {"refresh": 6}, steps=16, seed=CROWD_SEEDS[algorithm])
    seen: list[Any] = []
    # 0/1 Adam's workers have weights of their own
    simulated = made.simulate(
        64, lambda o, t: seen.append([[a.copy() for a in x] for x in getattr(o, "xs", [o.x] * 64)])
    )
    sure(simulated)
    results = run_world(train, 64, made)
    kinds = [record.dense for record in results[0]["records"]]
    assert any(b and not a for a, b in pairwise(kinds[made.options["freeze_step"] :])), "no refresh"
    for rank, result in enumerate(results):
        for t, (ours, theirs) in enumerate(zip(result["trajectory"], seen, strict=True)):
            for l, x in enumerate(ours):
                close(x, theirs[rank][l], 0.01, f"rank {rank}, step {t + 1}, tensor {l}")
    e, d = joined(results, made)
    for l in range(len(made.shapes)):
        for rank in range(64):
            np.testing.assert_allclose(e[rank][l], simulated.exchange.e[rank][l], atol=2e-4)
        np.testing.assert_allclose(d[l], simulated.exchange.d[l], atol=2e-4)


# ----- frozen parameters ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_frozen_parameters_may_have_any_dtype_until_they_are_trained(algorithm: str, dtype: torch.dtype) -> None:
    """As quantised weights below trained adapters have."""
    frozen = torch.nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
    trained = torch.nn.Parameter(torch.ones(3))
    optimizer = CLASSES[algorithm]([frozen, trained], lr=0.1)
    for _ in range(2):
        trained.grad = torch.ones(3)
        optimizer.step()
    assert bool((trained < 1).all())
    assert frozen.tolist() == [1] * 4
    optimizer.load_state_dict(optimizer.state_dict())
    if frozen.is_floating_point():
        frozen.requires_grad_(True)
        with pytest.raises(TypeError, match="float64"):
            optimizer.step()


# ----- gradients that are missing, zero or not finite ------------------------------------------------------------------------------


def stepwise(group: Any, rank: int, world: int, made: Problem) -> list[dict[str, Any]]:
    params = made.parameters()
    optimizer = made.build(params, process_group=group)
    states = []
    for t in range(made.steps):
        made.put(params, t, rank)
        optimizer.step()
        states.append(snapshot(optimizer, params))
    return states


@pytest.mark.parametrize(
    ("algorithm", "bucket_mb"),
    [*((algorithm, 16.0) for algorithm in ALGORITHMS), *((a, 0.0005) for a in RULES if a != "onebit_adam")],
)
def test_a_parameter_without_gradient_on_all_ranks_is_left_alone_exactly(algorithm: str, bucket_mb: float) -> None:
    """In every phase, in buckets of its own and in shared ones: weights and state of the tensor do not move by a bit."""
    gone = {1: (0,), 4: (0, 1), 5: (4,), 7: (0,), 9: (4, 3), 10: (0, 1, 2, 3, 4), 12: (0,), 14: (4,)}
    missing = frozenset((t, -1, l) for t, ls in gone.items() for l in ls)
    made = problem(algorithm, {"bucket_mb": bucket_mb}, missing=missing)
    results = run_world(stepwise, 2, made)
    for states in results:
        for t, ls in gone.items():
            before, after = states[t - 1], states[t]
            # a synchronisation brings in what earlier local steps have done
            joins = made.algorithm == "zero_one_adam" and not synchronised(before) and synchronised(after)
            for l in ls:
                if joins:
                    continue
                assert equal(before["x"][l], after["x"][l]), f"weights of tensor {l} in step {t + 1}"
                for key in set(before["state"].get(l, {})) & set(after["state"].get(l, {})):
                    # the bitmap is merged at t = 2^k, gradient or not; v is recomputed from its inverse after the freeze
                    frozen = before["books"]["phase"] != after["books"]["phase"]
                    if key == "exp_avg" and (algorithm == "zero_one_adam" or frozen):
                        # divided by denominators and multiplied again, at the freeze or always
                        torch.testing.assert_close(after["state"][l][key], before["state"][l][key], rtol=1e-6, atol=0)
                    elif key != "live" and not (key == "exp_avg_sq" and frozen):
                        assert equal(before["state"][l][key], after["state"][l][key]), f"{key} of {l} in step {t + 1}"
            for l in {0, 1, 3, 4} - set(ls):
                assert not equal(before["x"][l], after["x"][l]), f"tensor {l} moves in step {t + 1}"
    for t in range(made.steps):
        if synchronised(results[0][t]):
            assert equal(results[0][t]["x"], results[1][t]["x"]), f"step {t + 1}"


@pytest.mark.parametrize("algorithm", ["onebit_lamb", "zero_one_adam"])
def test_a_gradient_missing_on_one_rank_counts_as_zero(algorithm: str) -> None:
    missing = frozenset({(1, 0, 0), (4, 1, 4), (6, 0, 0), (9, 1, 4), (9, 1, 0), (12, 0, 1), (13, 1, 0)})
    made = problem(algorithm, missing=missing, seed=3)
    seen: list[Any] = []
    simulated = made.simulate(2, lambda o, t: seen.append([a.copy() for a in o.x]))
    assert simulated.exchange.margin > 1e-6
    (result, _) = run_world(train, 2, made)
    for t in range(made.steps):
        for l, x in enumerate(result["trajectory"][t]):
            close(x, seen[t][l], 0.01, f"step {t + 1}, tensor {l}")


def broken_worker(group: Any, rank: int, world: int, made: Problem) -> Any:
    params = made.parameters()
    optimizer = made.build(params, process_group=group)
    bad, unchanged = sorted({t for t, *_ in made.broken}), []
    for t in range(made.steps):
        before = snapshot(optimizer, params)
        made.put(params, t, rank)
        optimizer.step()
        if t in bad:
            after = snapshot(optimizer, params)
            for count in ("skipped", "skips_in_a_row"):
                before["books"].pop(count), after["books"].pop(count)
            unchanged.append(equal(before, after))
    return unchanged, optimizer.steps, optimizer.skipped_steps


@pytest.mark.parametrize("algorithm", RULES)
def test_nan_on_one_rank_skips_the_step_on_all_and_changes_nothing(algorithm: str) -> None:
    broken = frozenset({(1, 1, 0), (5, 0, 4), (9, 1, 3), (13, 0, 1)})
    for unchanged, steps, skipped in run_world(broken_worker, 3, problem(algorithm, broken=broken)):
        assert unchanged == [True] * 4 and steps == 12 and skipped == 4


def zero_worker(group: Any, rank: int, world: int, algorithm: str) -> Any:
    """Tensors: ordinary; zero gradients always; zero weights; gradients only in the warm-up; only after it."""
    same = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(70, generator=same)) for _ in range(5)]
    with torch.no_grad():
        params[2].zero_()
    options = {**CROSSING[algorithm], "lr": 0.01, "block_size": 32}
    optimizer = CLASSES[algorithm](params, **grouped(options, process_group=group))  # type: ignore[arg-type]
    draws = torch.Generator().manual_seed(10 + rank)
    start = params[1].detach().clone()
    largest = 0.0
    for t in range(40):
        for l, p in enumerate(params):
            g = torch.randn(70, generator=draws)
            zero = l == 1 or (l == 3 and t >= 4) or (l == 4 and t < 8)
            p.grad = torch.zeros(70) if zero else g
        before = [p.detach().clone() for p in params]
        optimizer.step()
        largest = max(largest, max((p.detach() - b).abs().max().item() for p, b in zip(params, before, strict=True)))
    return {**snapshot(optimizer, params), "still": equal(start, params[1].detach()), "largest": largest}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tensors_with_zero_gradients_or_weights_crash_nothing_and_stay_bounded(algorithm: str) -> None:
    results = run_world(zero_worker, 3, algorithm)
    for result in results:
        assert result["still"], "a tensor that never had a gradient"
        for value in (
            *result["x"],
            *result["residuals"].values(),
            *(v for s in result["state"].values() for v in s.values()),
        ):
            assert value.isfinite().all()
        # a step is about lr in size; 1/phi of it at the very worst
        assert result["largest"] < 100 * 0.01
        if synchronised(result):
            assert equal(result["x"], results[0]["x"])


# ----- coordinates with (almost) no gradient -------------------------------------------------------------------------------------


def rows_worker(group: Any, rank: int, world: int, made: Problem, rows: int) -> Any:
    """Largest |update| / lr of the last rows of an embedding and of the others, once steps are compressed."""
    params = made.parameters()
    optimizer = made.build(params, process_group=group)
    worst = [0.0, 0.0]
    for t in range(made.steps):
        made.put(params, t, rank)
        before = params[0].detach().clone()
        optimizer.step()
        if t >= 8:
            moved = (params[0].detach() - before).abs() / 0.01
            worst = [max(worst[0], moved[-rows:].max().item()), max(worst[1], moved[:-rows].max().item())]
    return worst


@pytest.mark.parametrize("algorithm", [*ADAM_LIKE, "binsgdm"])
def test_cold_and_nearly_cold_rows_stay_bounded(algorithm: str) -> None:
    def worst(faint: float, **options: Any) -> list[float]:
        # cold and warm rows share a block: blocks of their own would protect them already
        settings = {"weight_decay": 0.0, "block_size": 512, **options}
        made = problem(algorithm, settings, shapes=((64, 8),), cold=16 * 8, faint=faint, steps=30)
        return run_world(rows_worker, 2, made, 16)[0]

    cold, warm = worst(0.0)
    assert warm > 0
    if algorithm == "binsgdm":
        assert cold == 0.0 and worst(1e-20)[0] == pytest.approx(1.0, rel=1e-3), "never seen; seen, however faintly"
        return
    # warm coordinates stay within what they do without cold rows beside them
    assert cold < 3 * warm
    assert worst(1e-6)[0] < 200 * max(1.0, warm / 4)
    lamb = algorithm == "onebit_lamb"  # which has this rule only
    momentum = {} if lamb else {"recipe": "published"}
    with mock.patch.object(zero_one_adam, "LARGEST_NOISE", math.inf):  # (0/1 Adam would refuse it)
        assert worst(1e-6, denominator_floor=0.0, **momentum)[0] > 2000, "the floor is what bounds them"
    if not lamb:
        bounded = worst(1e-6, denominator_floor=0.0)[0]
        assert bounded < 3 * warm, "so does what travels in the units of the step"


# ----- what is compressed: the momentum, or the momentum divided by its denominators ------------------------------------------------


def other_rule_worker(group: Any, rank: int, world: int, made: Problem) -> None:
    """The state of one rule in an optimizer of the other, and in one of its own without what only this release saves."""
    params = made.parameters()
    optimizer = made.build(params, process_group=group)
    for t in range(made.steps):
        made.put(params, t, rank)
        optimizer.step()
    state, residuals = whole_state(optimizer), optimizer.residual_state_dict()
    published = made.options["recipe"] == "published"
    preconditioned = not published
    assert any("preconditioned_momentum" in s for s in state["state"].values()) == preconditioned
    other = made.build(made.parameters(), process_group=group, recipe="default" if published else "published")
    other.load_state_dict(state)
    words = f"preconditioned={preconditioned}, this run has {not preconditioned}"
    message = f"{words}.*continue with recipe='{made.options['recipe']}'"
    with pytest.raises(ValueError, match=message):
        other.load_residual_state_dict(residuals)
    with pytest.raises(ValueError, match=message):
        Redistribution(other.residual_state_dict()).add(residuals)
    for s in state["state"].values():
        s.pop("preconditioned_momentum", None)
    again = made.build(made.parameters(), process_group=group)
    again.load_state_dict(state)
    again.load_residual_state_dict(residuals)
    for one in (other, again):
        for i, s in one.state_dict()["state"].items():
            torch.testing.assert_close(s["exp_avg"], state["state"][i]["exp_avg"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe", ["default", "published"])
@pytest.mark.parametrize("algorithm", ["onebit_adam", "zero_one_adam"])
def test_residuals_of_the_other_rule_are_refused_and_the_momentum_is_converted(algorithm: str, recipe: str) -> None:
    # the last step is a one-bit round, with gap 1 if there are local steps
    made = problem(algorithm, {"recipe": recipe}, steps=6 if algorithm == "zero_one_adam" else 8)
    run_world(other_rule_worker, 2, made)


# ----- groups that stay dense, and worlds of one ------------------------------------------------------------------------------------


def mixed_worker(group: Any, rank: int, world: int, made: Problem) -> Any:
    params = made.parameters()
    optimizer = CLASSES[made.algorithm](
        [{"params": params[:4]}, {"params": params[4:], "compress": False}],
        **grouped(made.options, process_group=group),
    )
    trajectory = []
    for t in range(made.steps):
        made.put(params, t, rank)
        optimizer.step()
        trajectory.append(params[4].detach().clone())
    return trajectory, optimizer.ledger.last


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_dense_group_is_stepped_on_averaged_gradients_by_the_uncompressed_rule(algorithm: str) -> None:
    """In every step of every phase it equals a single process that sees the averages, silent steps of 0/1 Adam included."""
    made = problem(algorithm)
    alone = torch.nn.Parameter(torch.from_numpy(made.start()[4]))
    optimizer = made.build([alone])
    expected = []
    for t in range(made.steps):
        alone.grad = made.average(t, 3, 4)
        optimizer.step()
        expected.append(alone.detach().clone())
    results = run_world(mixed_worker, 3, made)
    for trajectory, last in results:
        assert equal(trajectory, results[0][0])
        assert not last.dense and last.bytes_sent > 0
        for ours, theirs in zip(trajectory, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _draw(t: int, k: int, rank: int) -> Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(1000 * t + 10 * k + rank))


def newcomer_worker(group: Any, rank: int, world: int, algorithm: str, joins: int | None, compress: bool) -> Any:
    """What a ``compress=False`` parameter goes through while another one joins before step ``joins``, and whether that one moves."""
    same = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(40, generator=same)) for _ in range(3)]
    groups: Any = [{"params": params[:1]}, {"params": params[1:2], "compress": False}]
    options: Any = {**CROSSING[algorithm], "lr": 0.01, "block_size": 32}
    optimizer = CLASSES[algorithm](groups, **grouped(options, process_group=group))
    trajectory, start = [], params[2].detach().clone()
    for t in range(12):
        if t == joins:
            optimizer.add_param_group({"params": params[2:], "compress": compress})
        for k, p in enumerate(params):
            p.grad = _draw(t, k, rank)
        optimizer.step()
        trajectory.append(params[1].detach().clone())
    return trajectory, equal(start, params[2].detach())


@pytest.mark.parametrize(
    ("algorithm", "joins", "compress"),
    [
        *((algorithm, joins, False) for algorithm in ALGORITHMS for joins in (2, 8)),
        # between one-bit rounds
        ("zero_one_adam", 4, True),
        ("binsgdm", 4, True),
    ],
)
def test_a_dense_group_keeps_its_state_when_another_parameter_joins(algorithm: str, joins: int, compress: bool) -> None:
    usual = run_world(newcomer_worker, 2, algorithm, None, False)
    for (expected, waits), (trajectory, stays) in zip(
        usual, run_world(newcomer_worker, 2, algorithm, joins, compress), strict=True
    ):
        assert equal(trajectory, expected)
        assert waits and not stays


def beside_a_newcomer(group: Any, rank: int, world: int, algorithm: str, joins: int | None, unfrozen: bool) -> Any:
    """What the others have, compressed ones among them, while a ``compress=False`` parameter joins before step ``joins``."""
    same = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(70, generator=same)) for _ in range(3)]
    options: Any = {**CROSSING[algorithm], "lr": 0.01, "block_size": 32}
    groups: Any = [{"params": params[:2]}]
    if unfrozen:
        params[2].requires_grad_(False)
        groups.append({"params": params[2:], "compress": False})
    optimizer = CLASSES[algorithm](groups, **grouped(options, process_group=group))
    seen = []
    for t in range(12):
        if t == joins:
            params[2].requires_grad_()
            if not unfrozen:
                optimizer.add_param_group({"params": params[2:], "compress": False})
        for k, p in enumerate(params):
            p.grad = _draw(t, k, rank).repeat(2)[:70] if p.requires_grad else None
        optimizer.step()
        residuals = optimizer.residual_state_dict()["tensors"]
        seen.append([p.detach().clone() for p in params[:2]] + [value.clone() for value in residuals.values()])
    return seen


# both ways for each algorithm and for each moment
@pytest.mark.parametrize(
    ("algorithm", "joins", "unfrozen"),
    [(a, joins, (i + j) % 2 == 1) for i, a in enumerate(ALGORITHMS) for j, joins in enumerate((2, 4, 8))],
)
def test_a_dense_newcomer_changes_nothing_for_the_others(algorithm: str, joins: int, unfrozen: bool) -> None:
    """Blocks are dealt anew for a compressed newcomer alone: residuals, momenta and feedback of the others stay bit for bit."""
    usual = run_world(beside_a_newcomer, 2, algorithm, None, unfrozen)
    assert equal(run_world(beside_a_newcomer, 2, algorithm, joins, unfrozen), usual)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_state_of_before_the_first_step_is_that_of_nobody(algorithm: str) -> None:
    """Loading it lays nothing out, dense groups neither: who joins in the first step joins beside the same others as without it."""

    def run(resumes: bool) -> Any:
        params = [torch.nn.Parameter(torch.ones(70)) for _ in range(2)]
        optimizer, loaded = (
            CLASSES[algorithm](
                [{"params": params[:1]}, {"params": params[1:], "compress": False}],
                exchange=ExchangeOptions(block_size=32),
            )
            for _ in range(2)
        )
        if resumes:
            loaded.load_state_dict(optimizer.state_dict())
            assert loaded.state_dict()["onebit"]["known"] == []
        for t in range(3):
            for k, p in enumerate(params):
                p.grad = _draw(t, k, 0).repeat(2)[:70]
            loaded.step()
        books = loaded.state_dict()["onebit"]
        del books["ledger"]
        return books, *params

    (books, *weights), (expected, *usual) = run(True), run(False)
    assert books == expected and equal(weights, usual)


def moving_worker(group: Any, rank: int, world: int, algorithm: str, late: bool, unfrozen: bool) -> dict[str, Any]:
    """A dense group joins after the freeze, before or after the ranks are arranged as two nodes, or is ``unfrozen`` then."""
    same = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(40, generator=same)) for _ in range(3)]
    options: Any = {**CROSSING[algorithm], "lr": 0.01, "block_size": 32}
    optimizer = CLASSES[algorithm](params[:2], **grouped(options))
    params[2].requires_grad_(not unfrozen)
    if unfrozen:
        optimizer.add_param_group({"params": params[2:], "compress": False})
    optimizer.configure_communication(group)
    for t in range(12):
        if t == 9:
            if not late and not unfrozen:
                optimizer.add_param_group({"params": params[2:], "compress": False})
            optimizer.release_communication()
            optimizer.configure_communication(group, ranks_per_node=2)
            if late and not unfrozen:
                optimizer.add_param_group({"params": params[2:], "compress": False})
            params[2].requires_grad_()
        for k, p in enumerate(params):
            p.grad = _draw(t, k, rank) if p.requires_grad else None
        optimizer.step()
    return snapshot(optimizer, params)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_dense_group_may_join_while_the_ranks_are_arranged_anew(algorithm: str) -> None:
    before, after = (run_world(moving_worker, 4, algorithm, late, False) for late in (False, True))
    assert equal(before, run_world(moving_worker, 4, algorithm, True, True))
    assert equal(before, after) and set(after[0]["state"]) == {0, 1, 2}


def test_a_single_process_of_zero_one_adam_is_adamw() -> None:
    made = problem("zero_one_adam")
    params, others = made.parameters(), made.parameters()
    optimizer = made.build(params)
    adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1)
    for t in range(made.steps):
        made.put(params, t, 0)
        made.put(others, t, 0)
        optimizer.step()
        adamw.step()
    assert optimizer.next_step_is_dense and optimizer.ledger.total.bytes_sent == 0 and not optimizer.mid_local
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("algorithm", ["onebit_lamb", "zero_one_adam"])
def test_a_rank_that_compresses_alone_follows_the_oracle_of_one_worker(algorithm: str) -> None:
    made = problem(algorithm, seed=1)
    simulated = made.simulate(1)
    assert simulated.exchange.margin > 1e-6
    params = made.parameters()
    optimizer = made.build(params, _alone=True)
    for t in range(made.steps):
        made.put(params, t, 0)
        optimizer.step()
    assert optimizer.ledger.compressed_steps == 12
    assert optimizer.residual_state_dict()["tensors"]["worker_residual"].any()
    for p, x in zip(params, simulated.x, strict=True):
        close(p.detach(), x, 0.01)


# ----- precision and backends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algorithm", RULES)
def test_16_bit_parameters_are_the_rounded_masters_of_an_fp32_run(algorithm: str, dtype: torch.dtype) -> None:
    """Gradients that 16 bits hold exactly: the masters take the very steps of fp32 parameters."""
    made = problem(algorithm, dtype=dtype, quantum=0.25)
    wide = dataclasses.replace(made, dtype=torch.float32)
    start = [p.detach().float() for p in made.parameters()]

    def fp32(group: Any, rank: int, world: int) -> Any:
        params = [torch.nn.Parameter(x.clone()) for x in start]
        optimizer = wide.build(params, process_group=group)
        for t in range(wide.steps):
            wide.put(params, t, rank)
            optimizer.step()
        return snapshot(optimizer, params)

    for ours, theirs in zip(run_world(train, 2, made), run_world(fp32, 2), strict=True):
        for l, x in enumerate(ours["x"]):
            assert x.dtype == dtype and equal(x, theirs["x"][l].to(dtype))
            for key, value in ours["state"].get(l, {}).items():
                assert value.dtype == (torch.bool if key == "live" else torch.float32)
        for key, value in theirs["residuals"].items():
            assert equal(ours["residuals"][key], value), key


@pytest.mark.parametrize("algorithm", CLASSES)
def test_what_is_written_into_16_bit_parameters_is_not_undone(algorithm: str) -> None:
    """Masters take over the elements that were written, in the warm-up and after the freeze, and keep the others to the last bit."""

    def run(group: Any, rank: int, world: int, written: bool) -> list[Tensor]:
        draw = torch.Generator().manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(100, generator=draw).bfloat16()) for _ in range(2)]
        options = {} if algorithm in NO_WARM_UP else {"freeze_step": 3}
        optimizer = CLASSES[algorithm](params, lr=1e-3, **grouped(options, block_size=32, process_group=group))
        mine = torch.Generator().manual_seed(100 + rank)
        for t in range(6):
            if written and t in (1, 5):
                with torch.no_grad():
                    params[0][:50] = 8.0
                    params[1].copy_(params[1].clone())  # written, but nothing new
            for p in params:
                p.grad = torch.randn(100, generator=mine).bfloat16()
            optimizer.step()
        return [optimizer.state_dict()["state"][k]["master"].clone() for k in range(2)]

    plain, other = (run_world(run, 2, written) for written in (False, True))
    for (a, b), (c, d) in zip(plain, other, strict=True):
        assert (c[:50] - 8.0).abs().max() < 0.1 and (a[:50] - 8.0).abs().min() > 1
        if algorithm != "onebit_lamb":  # whose ratio depends on the whole tensor
            assert equal(a[50:], c[50:])
        assert equal(b, d)


@pytest.mark.parametrize("algorithm", RULES)
def test_every_backend_gives_the_same_bits(algorithm: str) -> None:
    try:
        get_backend("cpu", torch.device("cpu"))
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    reference, compiled = (
        run_world(
            train, 2, problem(algorithm, {"kernels": kernels, "bucket_mb": 0.0012}, shapes=((3, 700), (7,), (64,)))
        )
        for kernels in ("reference", "cpu")
    )
    for a, b in zip(reference, compiled, strict=True):
        assert equal(a["trajectory"], b["trajectory"]) and equal(a["residuals"], b["residuals"])
        assert equal(a["state"], b["state"])


def redistributed_worker(group: Any, rank: int, world: int, made: Problem, ranks_per_node: int) -> dict[str, Any]:
    """A run, and its state as a checkpoint and the change to another world hold it."""
    params = made.parameters()
    optimizer = made.build(params, process_group=group)
    optimizer.configure_communication(group, ranks_per_node=ranks_per_node)
    for t in range(made.steps):
        made.put(params, t, rank)
        optimizer.step()
    parts = Redistribution(optimizer.residual_state_dict())
    parts.add(optimizer.residual_state_dict())
    return {**snapshot(optimizer, params), "redistributed": parts.result()["tensors"]}


@pytest.mark.parametrize(
    ("algorithm", "rule", "kernels"),
    [
        *((algorithm, {}, "cpu") for algorithm in RULES),
        *(("onebit_adam", {"refresh": 3}, kernels) for kernels in ("cpu", "reference")),
        *(("onebit_lamb", {}, "reference"), ("binsgdm", {}, "reference")),
    ],
)
def test_state_is_fp32_whatever_torchs_default_dtype(algorithm: str, rule: dict[str, Any], kernels: str) -> None:
    """Under a 16-bit default, as in a ``training_step`` with ``precision="bf16-true"``, a run is the same bit for bit."""
    try:
        get_backend(kernels, torch.device("cpu"))
    except KernelsUnavailable as error:
        pytest.skip(str(error))

    def run(dtype: torch.dtype) -> list[Any]:
        made = problem(algorithm, {"kernels": kernels, **rule}, dtype=torch.bfloat16)
        torch.set_default_dtype(dtype)
        try:
            return [run_world(redistributed_worker, 2 * share, made, share) for share in (1, 2)]
        finally:
            torch.set_default_dtype(torch.float32)

    for usual, narrow in zip(run(torch.float32), run(torch.bfloat16), strict=True):
        for a, b in zip(usual, narrow, strict=True):
            different = [name for name in a if not equal(a[name], b[name])]
            assert different == [], "in dtype or bits"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_clipping_takes_the_scale_out_of_gradients(algorithm: str) -> None:
    """In all phases: weights and momenta are those of gradients 1024 times as small."""
    options = {"max_grad_norm": 0.5, "weight_decay": 0.0}
    if algorithm in ADAM_LIKE:
        options["eps"] = 1e-12
    ones, thousands = (run_world(train, 2, problem(algorithm, options, scale=s)) for s in (1.0, 1024.0))
    for a, b in zip(ones, thousands, strict=True):
        for x, y in zip(a["x"], b["x"], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        for key in set(a["residuals"]) & {"momentum", "magnitude", "momentum_buffer", "worker_residual"}:
            torch.testing.assert_close(a["residuals"][key], b["residuals"][key], rtol=1e-3, atol=1e-6)


# ----- many steps -------------------------------------------------------------------------------------------------------------------

#: options, and the dense steps that follow from them
LONG: dict[str, tuple[dict[str, Any], int]] = {
    # and refreshes at 36, 52, ..., 100
    "onebit_adam": ({"freeze_step": 20}, 25),
    "onebit_lamb": ({"freeze_step": 20}, 20),
    # refreshes at 1 to 20, and at 36, 52, ..., 100; gap 1, then 2 from step 31 on, then 4 from step 41 on
    "zero_one_adam": ({"freeze_step": 20, "local_steps": LocalSteps(max_gap=4, double_every=10)}, 25),
    "binsgdm": ({}, 0),
    "onebit_sgd": ({"momentum": 0.9}, 0),
}


def long_worker(group: None, rank: int, world: int, made: Problem) -> dict[str, Any]:
    params = made.parameters()
    optimizer = made.build(params)
    draws = np.random.default_rng(rank)
    shared, apart, held = [], 0, []
    for t in range(made.steps):
        for p in params:
            p.grad = torch.from_numpy(draws.standard_normal(p.shape, dtype=np.float32))
        optimizer.step()
        if t >= 60:
            tensors = optimizer.residual_state_dict()["tensors"].items()
            held.append(sum(float(tensor.square().sum()) for name, tensor in tensors if name.endswith("residual")))
        if t % 10 == 9:
            apart += optimizer.mid_local
            with optimizer.consensus():
                shared.append([p.detach().clone() for p in params])
    optimizer.synchronise()
    return {
        **snapshot(optimizer, params),
        "shared": shared,
        "apart": apart,
        "held": held,
        "dense": optimizer.ledger.dense_steps,
        "steps": optimizer.steps,
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_replicas_are_bitwise_equal_after_100_steps(algorithm: str) -> None:
    """On real processes; between local steps it is what ``consensus()`` shows."""
    options, dense = LONG[algorithm]
    made = Problem(100, {"weight_decay": 0.1, "bucket_mb": 0.02, **options}, algorithm=algorithm)
    results = run_world(long_worker, 3 if algorithm == "onebit_adam" else 2, made, real=True)
    for other in results[1:]:
        for part in ("shared", "x", "state", "books"):
            assert equal(results[0][part], other[part]), part
        assert not equal(results[0]["residuals"], other["residuals"]), "residuals differ by rank"
    assert results[0]["steps"] == 100 and results[0]["dense"] == dense
    assert (results[0]["apart"] > 0) == (algorithm == "zero_one_adam")
    for result in results:
        # error feedback keeps residuals bounded: what is held back does not grow
        assert 0 < np.mean(result["held"][-20:]) < 1.5 * np.mean(result["held"][:20])


# ----- parameters that become trainable ---------------------------------------------------------------------------------------------


def layers() -> list[torch.nn.Parameter]:
    """Four layers with the same weights at every call."""
    draw = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(40 + 8 * k, generator=draw)) for k in range(4)]


def go(optimizer: Any, params: Any, steps: range, rank: int) -> None:
    """Steps on gradients that each rank, step and size has of its own."""
    for t in steps:
        for p in params:
            draw = torch.Generator().manual_seed(1000 * t + 10 * p.numel() + rank)
            p.grad = torch.randn(p.shape, generator=draw) if p.requires_grad else None
        optimizer.step()


@pytest.mark.parametrize("algorithm", ADAM_LIKE)
def test_a_layer_may_be_unfrozen_while_a_group_is_added_after_the_freeze(algorithm: str) -> None:
    """The blocks are dealt already: among them each would take its neighbour's state, so both are given blocks behind the others'."""

    def train(group: Any, begins: int) -> list[Tensor]:
        params = layers()
        params[0].requires_grad_(False)
        options = {} if algorithm == "onebit_lamb" else {"refresh": "never"}
        optimizer = problem(algorithm, options).build(params[:3], process_group=group)
        go(optimizer, params[:3], range(16), group.rank)
        if begins == 16:
            params[0].requires_grad_(True)
            optimizer.add_param_group({"params": params[3:]})
        before = [p.detach().clone() for p in params]
        go(optimizer, params if begins == 16 else params[:3], range(16, 40), group.rank)
        optimizer.synchronise()
        moved = [(p - b).abs().min() > 0 for p, b in zip(params, before, strict=True)]
        assert moved == [begins == 16, True, True, begins == 16]
        return [p.detach() for p in params]

    results = SimulatedWorld(2, timeout=60).run(train, 16)
    assert equal(*results)
    assert equal([r[1:3] for r in results], [r[1:3] for r in SimulatedWorld(2, timeout=60).run(train, 99)])


@pytest.mark.parametrize("algorithm", ADAM_LIKE)
def test_a_layer_that_a_compressed_checkpoint_does_not_know_joins_as_in_the_run_that_goes_on(algorithm: str) -> None:

    def train(group: Any) -> None:
        params = layers()
        params[0].requires_grad_(False)
        optimizer = problem(algorithm).build(params, process_group=group)
        go(optimizer, params, range(16), group.rank)
        optimizer.synchronise()
        again = [torch.nn.Parameter(p.detach().clone()) for p in params]
        resumed = problem(algorithm).build(again, process_group=group)
        resumed.load_state_dict(optimizer.state_dict())
        resumed.load_residual_state_dict(copy.deepcopy(optimizer.residual_state_dict()))
        params[0].requires_grad_(True)
        for one, ps in ((optimizer, params), (resumed, again)):
            go(one, ps, range(16, 20), group.rank)
        assert equal(snapshot(resumed, again), snapshot(optimizer, params))

    SimulatedWorld(2, timeout=60).run(train)


@pytest.mark.parametrize("at", [3, 16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_layer_that_is_frozen_after_the_state_was_loaded_costs_no_residuals(algorithm: str, at: int) -> None:
    """``on_train_start`` comes after Lightning has loaded the optimizers: until then every parameter is trainable."""

    def train(group: Any) -> None:
        params = layers()
        params[0].requires_grad_(False)
        optimizer = problem(algorithm).build(params, process_group=group)
        go(optimizer, params, range(at), group.rank)
        optimizer.synchronise()
        again = [torch.nn.Parameter(p.detach().clone()) for p in params]
        resumed = problem(algorithm).build(again, process_group=group)
        resumed.load_state_dict(optimizer.state_dict())
        resumed.load_residual_state_dict(copy.deepcopy(optimizer.residual_state_dict()))
        again[0].requires_grad_(False)
        for one, ps in ((optimizer, params), (resumed, again)):
            go(one, ps, range(at, at + 6), group.rank)
        assert equal(snapshot(resumed, again), snapshot(optimizer, params))

    SimulatedWorld(2, timeout=60).run(train)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_optimizer_saved_before_its_first_step_loads_what_it_saved(algorithm: str) -> None:
    """One of two that has been toggled off so far: it has dealt no blocks yet, and deals none by being loaded."""

    def train(group: Any) -> None:
        first = problem(algorithm).build(layers(), process_group=group)
        params = layers()
        second = problem(algorithm).build(params, process_group=group)
        second.load_state_dict(first.state_dict())
        assert second.residual_state_dict()["numels"] == first.residual_state_dict()["numels"] == []
        second.load_residual_state_dict(first.residual_state_dict())
        again = layers()
        go(second, params, range(16), group.rank)
        go(first := problem(algorithm).build(again, process_group=group), again, range(16), group.rank)
        assert equal(snapshot(second, params), snapshot(first, again))

    SimulatedWorld(2, timeout=60).run(train)


@pytest.mark.parametrize("added", [False, True])
def test_a_layer_that_joins_0_1_adam_behind_its_last_refresh_is_refreshed_at_once(added: bool) -> None:
    """The next refresh by the schedule would come after the variance has frozen, and the layer would never move."""

    def train(group: Any) -> list[bool]:
        params = layers()
        params[0].requires_grad_(added)
        first = params[1:] if added else params
        exchange = ExchangeOptions(process_group=group, block_size=32)
        optimizer = ZeroOneAdam(first, 0.01, freeze_step=40, _doubling=1, exchange=exchange)
        go(optimizer, first, range(34), group.rank)
        assert not optimizer.variance_policy.due(41), "no refresh is left before the freeze"
        if added:
            optimizer.add_param_group({"params": params[:1]})
        params[0].requires_grad_(True)
        start, dense = params[0].detach().clone(), []
        for t in range(34, 48):
            go(optimizer, params, range(t, t + 1), group.rank)
            dense.append(optimizer.ledger.last.dense)
        assert (params[0] - start).abs().min() > 0, "every weight has moved"
        return dense

    for dense in SimulatedWorld(2, timeout=60).run(train):
        assert dense[:6] == [True] + [False] * 5


def test_overlap_leaves_what_is_frozen_for_a_while_beside_others_as_it_is() -> None:
    """Momentum and residuals of a layer that shares its bucket, bit for bit, as with overlap="step"."""

    def train(group: Any, overlap: str) -> Any:
        params = layers()
        optimizer = problem("onebit_adam", {"overlap": overlap}).build(params, process_group=group)

        def steps(which: range) -> None:
            for t in which:
                optimizer.zero_grad()
                optimizer.begin_backward()
                draw = torch.Generator().manual_seed(10 * t + group.rank)
                sum((p * torch.randn(p.shape, generator=draw)).sum() for p in params).backward()
                optimizer.step()

        steps(range(8))
        before = snapshot(optimizer, params)
        params[0].requires_grad_(False)
        steps(range(8, 12))
        after = snapshot(optimizer, params)
        assert equal(after["state"][0], before["state"][0]) and torch.equal(after["x"][0], before["x"][0])
        params[0].requires_grad_(True)
        steps(range(12, 16))
        end = snapshot(optimizer, params)
        assert not torch.equal(end["x"][0], before["x"][0])
        return after, end

    step, backward = (SimulatedWorld(2, timeout=60).run(train, overlap) for overlap in ("step", "backward"))
    assert equal(step, backward)


def test_overlap_hears_of_a_layer_that_was_frozen_when_the_first_bucket_left() -> None:
    """Otherwise its bucket, and all behind it, would wait for the end of backward from then on."""

    def train(group: Any) -> list[bool]:
        params, sent = layers(), []
        options = {"overlap": "backward", "freeze_step": 3, "bucket_mb": 32 * 4 / 2**20}
        optimizer = problem("onebit_adam", options).build(params, process_group=group)
        for t in range(8):
            params[3].requires_grad_(t != 3)
            optimizer.zero_grad()
            optimizer.begin_backward()
            draw = torch.Generator().manual_seed(10 * t + group.rank)
            sum((p * torch.randn(p.shape, generator=draw)).sum() for p in params).backward()
            if t >= 3:
                sent.append(optimizer._engine.early._launched == len(optimizer._engine.early._buckets) > 0)
            optimizer.step()
        return sent

    for sent in SimulatedWorld(2, timeout=60).run(train):
        assert sent == [True] * 5, "all buckets leave during backward"


# ----- interrupted runs ------------------------------------------------------------------------------------------------------------


def saved(optimizer: Any, params: list[torch.nn.Parameter]) -> bytes:
    """A checkpoint as files hold it: what all ranks share, and this rank's part."""
    file = io.BytesIO()
    optimizer.show_consensus()
    weights = [p.detach().clone() for p in params]
    state = {"x": weights, "o": optimizer.state_dict(), "r": optimizer.residual_state_dict()}
    torch.save(state, file)
    optimizer.show_local()
    return file.getvalue()


def resumed_worker(group: Any, rank: int, world: int, made: Problem, ats: tuple[int, ...], ranks_per_node: int) -> Any:
    """Trains through; then once more from a checkpoint after ``at`` steps, for each of ``ats``."""

    def begin(params: list[torch.nn.Parameter], **differing: Any) -> Any:
        optimizer = made.build(params, process_group=group, **differing)
        optimizer.configure_communication(group, ranks_per_node=ranks_per_node)
        return optimizer

    params = made.parameters()
    optimizer = begin(params)
    files = {}
    for t in range(made.steps):
        if t in ats:
            files[t] = saved(optimizer, params)
        made.put(params, t, rank)
        optimizer.step()
    through = {**snapshot(optimizer, params), "sent": optimizer.ledger.total.bytes_sent}
    resumed = {}
    for at, file in files.items():
        state = torch.load(io.BytesIO(file), weights_only=True)
        params = [torch.nn.Parameter(x.clone()) for x in state["x"]]
        optimizer = begin(params, lr=77.0)
        optimizer.load_state_dict(state["o"])
        optimizer.load_residual_state_dict(state["r"])
        again = torch.load(io.BytesIO(saved(optimizer, params)), weights_only=True)
        unchanged = equal(again["x"], state["x"]) and equal(again["o"], state["o"])
        unchanged = unchanged and equal(again["r"]["tensors"], state["r"]["tensors"])
        for t in range(at, made.steps):
            made.put(params, t, rank)
            optimizer.step()
        resumed[at] = (unchanged, {**snapshot(optimizer, params), "sent": optimizer.ledger.total.bytes_sent})
    return through, resumed


#: before the first step, in the warm-up, at the freeze, after it; 0/1 Adam: between one-bit rounds and in local steps as well
POINTS = dict.fromkeys([rule for rule in RULES if rule.startswith("zero_one_adam")], (0, 2, 4, 6, 9, 11, 12, 13, 15))


@pytest.mark.parametrize(
    ("algorithm", "ranks_per_node"),
    [
        *((algorithm, 2) for algorithm in ALGORITHMS),
        *((rule, 1) for rule in RULES if rule not in ALGORITHMS),
        *(("onebit_lamb", 1), ("onebit_sgd", 1)),
    ],
)
def test_saved_state_continues_bit_for_bit(algorithm: str, ranks_per_node: int) -> None:
    ats = POINTS.get(algorithm, (0, 2, 4, 5, 9))
    made = problem(algorithm)
    for through, resumed in run_world(resumed_worker, 2 * ranks_per_node, made, ats, ranks_per_node):
        assert set(resumed) == set(ats)
        for at, (unchanged, state) in resumed.items():
            # before the first step there is nothing; loading lays it out
            assert unchanged or at == 0, f"loading and saving after step {at} changes nothing"
            assert equal(state, through), f"resumed after step {at}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_saved_state_of_16_bit_parameters_continues_bit_for_bit(algorithm: str) -> None:
    made = problem(algorithm, dtype=torch.bfloat16)
    ats = (2, 5, 11, 13)
    for through, resumed in run_world(resumed_worker, 2, made, ats, 1):
        for at, (unchanged, state) in resumed.items():
            assert unchanged and equal(state, through), f"resumed after step {at}"


#: rules of the algorithms that have denominators and residuals, the published ones among them
DIVIDING = [rule for rule in RULES if not rule.startswith(("binsgdm", "onebit_sgd"))]


@pytest.mark.parametrize("algorithm", [*DIVIDING, "onebit_sgd"])
def test_saved_state_in_16_bits_continues_bit_for_bit(algorithm: str) -> None:
    made = problem(algorithm, {"state_dtype": "bfloat16"})
    for through, resumed in run_world(resumed_worker, 2, made, POINTS.get(algorithm, (4, 5, 9)), 1):
        for at, (unchanged, state) in resumed.items():
            assert (unchanged or at == 0) and equal(state, through), f"resumed after step {at}"


@pytest.mark.parametrize(("saved", "loaded"), [("float32", None), ("bfloat16", "float32")])
@pytest.mark.parametrize("algorithm", [rule for rule in DIVIDING if rule in CLASSES])
def test_state_that_was_saved_in_the_other_dtype_is_taken(algorithm: str, saved: Any, loaded: Any) -> None:
    def worker(group: SimulatedGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
        p = torch.nn.Parameter(torch.linspace(1, 2, 512))
        draws = torch.Generator().manual_seed(group.rank)
        options = {**CROSSING[algorithm], "block_size": 32, "process_group": group}
        first = CLASSES[algorithm]([p], lr=0.01, **grouped(options, state_dtype=saved))  # type: ignore[call-arg]
        second = CLASSES[algorithm]([p], lr=0.01, **grouped(options, state_dtype=loaded))  # type: ignore[call-arg]
        for _ in range(8):
            p.grad = torch.randn(512, generator=draws)
            first.step()
        before = first.residual_state_dict()["tensors"]
        second.load_state_dict(first.state_dict())
        second.load_residual_state_dict(first.residual_state_dict())
        after = second.residual_state_dict()["tensors"]
        p.grad = torch.randn(512, generator=draws)
        second.step()
        assert p.isfinite().all()
        return [(before[name], after[name]) for name in ("worker_residual", "server_residual")]

    for before, after in SimulatedWorld(2).run(worker)[0]:
        assert (before.dtype, after.dtype) == (getattr(torch, saved), getattr(torch, loaded or "bfloat16"))
        assert before.any() and torch.equal(before.to(after.dtype), after)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("algorithm", DIVIDING)
def test_denominators_in_16_bits_are_those_of_32_rounded_once(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, kernels: str
) -> None:
    """Nothing else of a run changes: with fp32 ones that have been rounded to bf16 the weights are the same, bit for bit."""

    def weights() -> list[Any]:
        made = problem(algorithm, {"state_dtype": "bfloat16", "kernels": kernels})
        return [result["x"] for result in run_world(train, 2, made)]

    def rounding(v: torch.Tensor, out: torch.Tensor, **options: Any) -> bool:
        known = reciprocal_denominator_(v, out, **options)
        out.copy_(out.bfloat16())
        return known

    short = weights()
    monkeypatch.setattr(moments.FrozenMoments, "r_dtype", torch.float32)
    exact = weights()
    monkeypatch.setattr(moments, "reciprocal_denominator_", rounding)
    assert equal(weights(), short)
    assert not equal(exact, short), "the option has an effect"


def test_denominators_that_16_bits_make_alike_are_not_those_of_a_cold_tensor() -> None:
    draws = torch.Generator().manual_seed(0)
    # between 0.997 and 1.003, which bf16 makes 1, but for two
    alike = torch.cat([1 + 1e-3 * torch.randn(1000, generator=draws), torch.tensor([0.985, 1.015])])
    of_the_rest = torch.exp(torch.randn(400, generator=draws))
    cold = torch.cat([of_the_rest, torch.ones(600)])
    for dtype in (torch.float32, torch.bfloat16):
        for values, between in ((alike, False), (cold, True)):
            r = values.to(dtype)
            below, equal, above, fresh, elements = moments._compared(r, moments._of_most(r), r != 1).tolist()
            assert bool(below and above) is between and elements == r.numel() and fresh == elements - (r == 1).sum()
            assert 2 * equal > elements or (dtype is torch.float32 and not between)


def test_the_points_of_the_resume_test_lie_between_local_steps_too() -> None:
    kinds = problem("zero_one_adam").simulate(2).kinds
    # saved after step `at`: local steps since the last synchronisation
    assert [kinds[at - 1] for at in POINTS["zero_one_adam"] if at >= 9] == ["local", "local", "local", "local", "local"]


def elsewhere(group: Any, rank: int, world: int, made: Problem, file: bytes, steps: int) -> Any:
    """Goes on in this world from the shared part of a checkpoint alone."""
    state = torch.load(io.BytesIO(file), weights_only=True)
    params = [torch.nn.Parameter(x.clone()) for x in state["x"]]
    optimizer = made.build(params, process_group=group)
    optimizer.load_state_dict(state["o"])
    with optimizer.consensus() if isinstance(optimizer, ZeroOneAdam) else torch.no_grad():
        first = equal([p.detach() for p in params], state["x"])
    states = []
    for t in range(steps):
        made.put(params, 100 + t, rank)
        optimizer.step()
        states.append(snapshot(optimizer, params))
    return first, states


@pytest.mark.parametrize(
    ("algorithm", "world"),
    [*((algorithm, 3) for algorithm in ALGORITHMS), *((rule, 2) for rule in RULES if rule not in ALGORITHMS)],
)
def test_the_shared_part_alone_continues_in_any_world(algorithm: str, world: int) -> None:
    """Residuals and local progress start from zero: weights are those saved, steps stay of their usual size, replicas are equal."""
    made = problem(algorithm, {"weight_decay": 0.0})
    at = 13  # 0/1 Adam: between local steps

    def checkpoint(group: Any, rank: int, world: int) -> bytes:
        params = made.parameters()
        optimizer = made.build(params, process_group=group)
        for t in range(at):
            made.put(params, t, rank)
            optimizer.step()
        return saved(optimizer, params)

    (file, _) = run_world(checkpoint, 2)
    state = torch.load(io.BytesIO(file), weights_only=True)
    results = run_world(elsewhere, world, made, file, 12)
    for first, states in results:
        assert first, "the model that is shown right after loading"
        for k, now in enumerate(states):
            assert now["books"]["steps"] == at + 1 + k
            if synchronised(now):
                assert equal(now["x"], results[0][1][k]["x"])
        before = state["x"]
        moved = max(float((x - b).abs().max()) for x, b in zip(states[-1]["x"], before, strict=True) if x.numel())
        assert 0.01 < moved < 12 * 0.01 * 30
    # momentum is an average of gradients, which are of order 1, whatever was lost
    m = [s["state"][0].get("exp_avg") for _, states in results for s in states if synchronised(s)]
    assert all(v is None or 0.1 < float(v.square().mean().sqrt()) < 1.5 for v in m)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_part_of_another_layout_is_refused_by_name(algorithm: str) -> None:
    made = problem(algorithm)

    def parts(group: Any, rank: int, world: int) -> Any:
        params = made.parameters()
        optimizer = made.build(params, process_group=group)
        for t in range(6):
            made.put(params, t, rank)
            optimizer.step()
        return optimizer.residual_state_dict()

    two, three = run_world(parts, 2), run_world(parts, 3)

    def refusing(group: Any, rank: int, world: int) -> None:
        params = made.parameters()
        optimizer = made.build(params, process_group=group)
        for t in range(6):
            made.put(params, t, rank)
            optimizer.step()
        with pytest.raises(ValueError, match="world_size=3, this run has 2"):
            optimizer.load_residual_state_dict(three[rank])
        with pytest.raises(ValueError, match=f"rank={1 - rank}, this run has {rank}"):
            optimizer.load_residual_state_dict(two[1 - rank])
        with pytest.raises(ValueError, match=r"steps=7, this run has 6"):
            optimizer.load_residual_state_dict({**two[rank], "steps": 7})
        optimizer.load_residual_state_dict(two[rank])

    run_world(refusing, 2)


def test_lamb_that_continues_from_adam_starts_with_fresh_trust_ratios() -> None:
    """Also where it has stepped before: averages of another run's ratios mean nothing for these weights."""
    p = torch.nn.Parameter(torch.full((40,), 3.0))
    adamw = torch.optim.AdamW([p])
    p.grad = torch.ones(40)
    adamw.step()
    optimizer = CLASSES["onebit_lamb"]([p])
    optimizer.step()
    assert optimizer.state_dict()["onebit"]["coeff_average"] != [0.0]
    optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.state_dict()["onebit"]["coeff_average"] == [0.0] and optimizer.steps == 1


# ----- anything at all -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=5)
@given(data=st.data())
def test_whatever_happens_replicas_agree_and_nothing_explodes(algorithm: str, data: st.DataObject) -> None:
    """Missing and broken gradients, learning rates of 0, buckets of any size, in any order: invariants hold at every step."""
    world = data.draw(st.integers(1, 3), label="world")
    steps = 20
    events = st.frozensets(
        st.tuples(st.integers(0, steps - 1), st.integers(-1, world - 1), st.integers(0, len(SMALL) - 1)), max_size=25
    )
    missing = data.draw(events, label="missing")
    broken = frozenset(e for e in data.draw(events, label="broken") if e[1] >= 0 and np.prod(SMALL[e[2]]) > 0)
    lrs = tuple(data.draw(st.lists(st.sampled_from([0.0, 0.01, 0.02]), min_size=steps, max_size=steps), label="lrs"))
    options = {
        "bucket_mb": data.draw(st.sampled_from([0.0005, 0.0012, 16.0]), label="bucket_mb"),
        "_alone": data.draw(st.booleans(), label="alone"),
    }
    if algorithm in ADAM_LIKE:
        # one step of warm-up leaves second moments that say little: the floor must still hold
        options["denominator_floor"] = 0.1
    made = problem(algorithm, options, steps=steps, missing=missing, broken=broken, lrs=lrs)
    results = run_world(stepwise_lrs, world, made)
    for t in range(steps):
        states = [r[t] for r in results]
        shared = [s["shared"] for s in states]
        assert all(equal(x, shared[0]) for x in shared), f"shared model after step {t + 1}"
        for state in states:
            assert all(x.isfinite().all() and (not x.numel() or x.abs().max() < 50) for x in state["x"])
            if state["synchronised"]:
                assert equal(state["x"], shared[0])
            assert state["steps"] == shared_count(states)


def shared_count(states: list[dict[str, Any]]) -> int:
    (count,) = {s["steps"] for s in states}
    return count


def stepwise_lrs(group: Any, rank: int, world: int, made: Problem) -> list[dict[str, Any]]:
    params = made.parameters()
    optimizer = made.build(params, process_group=group)
    states = []
    for t in range(made.steps):
        made.put(params, t, rank)
        optimizer.param_groups[0]["lr"] = made.lr_at(t)
        optimizer.step()
        local = [p.detach().clone() for p in params]
        optimizer.show_consensus()
        states.append(
            {
                "x": local,
                "shared": [p.detach().clone() for p in params],
                "steps": optimizer.steps,
                "synchronised": not getattr(optimizer, "mid_local", False),
            }
        )
        optimizer.show_local()
    return states


def skipping_worker(group: Any, rank: int, world: int, algorithm: str) -> tuple[int, str]:
    """Two skips, a checkpoint, and more skips in a run that goes on from it; how many it took then, and what was said."""

    def made() -> Any:
        params = [torch.nn.Parameter(torch.zeros(40))]
        options = {**CROSSING[algorithm], "block_size": 32}
        return params, CLASSES[algorithm](params, **grouped(options, process_group=group))  # type: ignore[arg-type]

    params, optimizer = made()
    for t in range(8):
        params[0].grad = torch.full((40,), float("nan") if t > 5 and rank == 1 else 0.5)
        optimizer.step()
    state = optimizer.state_dict()
    params, optimizer = made()
    optimizer.load_state_dict(state)
    for t in range(1, 5):
        params[0].grad = torch.full((40,), float("nan"))
        try:
            optimizer.step()
        except FloatingPointError as error:
            return t, str(error)
    return 0, ""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_skips_in_a_row_are_counted_across_a_checkpoint(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    monkeypatch.setattr(engine, "MOST_SKIPS", 4)
    for more, said in run_world(skipping_worker, 2, algorithm):
        assert more == 2 and "4 steps in a row were skipped" in said and "the run has diverged" in said


def no_skip_worker(group: Any, rank: int, world: int, algorithm: str, on_nonfinite: str, bad_at: int) -> dict[str, Any]:
    """Steps of a group that is compressed and of one that is not; where a gradient is not finite on rank 0 only, and what was looked at."""
    params = [
        torch.nn.Parameter(torch.ones(5, 9)),
        torch.nn.Parameter(torch.ones(70)),
        torch.nn.Parameter(torch.ones(4)),
    ]
    groups: Any = [{"params": params[:2]}, {"params": params[2:], "compress": False}]
    options: Any = {**CROSSING[algorithm], "block_size": 32, "on_nonfinite": on_nonfinite, "_alone": True}
    optimizer: Any = CLASSES[algorithm](groups, **grouped(options, process_group=group))  # type: ignore[arg-type]
    optimizer.prepare()
    kernels, looked = optimizer._engine.kept.kernels, []
    optimizer._engine.kept.kernels = types.SimpleNamespace(
        **{name: getattr(kernels, name) for name in dir(kernels) if not name.startswith("_")}
        | {"grad_stats": lambda tensors: looked.append(sum(t.numel() for t in tensors)) or kernels.grad_stats(tensors)}
    )
    draws = torch.Generator().manual_seed(rank)
    said = ""
    for t in range(12):
        for index, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=draws)
            if rank == 0 and t == bad_at % 100 and index == (2 if bad_at >= 100 else 1):
                p.grad[-1] = float("inf")
        try:
            optimizer.step()
        except FloatingPointError as error:
            said = str(error)
            break
    return {"steps": optimizer.steps, "said": said, "looked": looked, "x": [p.detach().clone() for p in params]}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_where_no_skip_is_allowed_the_first_bad_gradient_is_an_error_on_all_ranks(algorithm: str, world: int) -> None:
    """Also in a group that is not compressed; runs without one are the same, and nobody looks at what only shows afterwards."""
    usual, never = (run_world(no_skip_worker, world, algorithm, rule, 99) for rule in ("skip", "raise"))
    for a, b in zip(usual, never, strict=True):
        assert equal(a["x"], b["x"]) and a["steps"] == b["steps"] == 12 and not b["said"]
        assert a["looked"] == b["looked"]
    for bad_at in (1, 9, 109):
        for result in run_world(no_skip_worker, world, algorithm, "raise", bad_at):
            assert "on_nonfinite='raise'" in result["said"] and f"step {bad_at % 100 + 1}:" in result["said"]
            assert result["steps"] <= bad_at % 100 + 1


def backward(params: list[torch.nn.Parameter], t: int, rank: int, skip: tuple[int, ...] = ()) -> None:
    """Gradients of step t by autograd."""
    draws = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(97 * t + 7 * rank + k))
        for k, p in enumerate(params)
    ]
    torch.stack(
        [(p * d).sum() for k, (p, d) in enumerate(zip(params, draws, strict=True)) if k not in skip]
    ).sum().backward()


def returning_worker(group: Any, rank: int, world: int, algorithm: str, how: str, at: int, last: int) -> list[Any]:
    """Six steps from a checkpoint after ``at``: of the optimizer that had begun step ``last``, and of one that begins with it."""
    params = [torch.nn.Parameter(torch.full((40,), 0.5)) for _ in range(3)]
    options: Any = {**CROSSING[algorithm], "lr": 0.01, "block_size": 32, "bucket_mb": 0.0001}
    if how == "overlap":
        options["overlap"] = "backward"
    make: Any = CLASSES[algorithm]
    optimizer = make(params, **grouped(options, process_group=group))

    def step(t: int) -> None:
        optimizer.zero_grad()
        if how != "clip":
            optimizer.begin_backward()
        backward(params, t, rank)
        if how == "clip":
            optimizer.clip_grad_norm_(1e9)
        optimizer.step()

    file = b""
    for t in range(last):
        if t == at:
            file = saved(optimizer, params)
        step(t)
    optimizer.zero_grad()
    if how != "clip":
        optimizer.begin_backward()
    backward(params, last, rank, skip=(1,) if rank == 0 else ())
    if how == "clip":
        optimizer.clip_grad_norm_(1e9)
    results = []
    for fresh in (False, True):
        if fresh:
            optimizer.release_communication()
            optimizer = make(params, **grouped(options, process_group=group))
        state = torch.load(io.BytesIO(file), weights_only=True)
        with torch.no_grad():
            for p, x in zip(params, state["x"], strict=True):
                p.copy_(x)
        optimizer.load_state_dict(state["o"])
        optimizer.load_residual_state_dict(state["r"])
        for t in range(at, at + 6):
            step(t)
        results.append(snapshot(optimizer, params))
    return results


@pytest.mark.parametrize(
    ("algorithm", "how", "at", "last"),
    [
        *((algorithm, how, 3, 4) for algorithm in ALGORITHMS for how in ("clip", "begin")),
        *((algorithm, "begin", at, last) for algorithm in ALGORITHMS for at, last in ((1, 8), (7, 11))),
        *((algorithm, "overlap", at, last) for algorithm, at, last in (("onebit_adam", 7, 11), ("onebit_lamb", 3, 4))),
    ],
)
def test_a_checkpoint_that_is_loaded_in_the_middle_of_a_step_is_all_that_counts(
    algorithm: str, how: str, at: int, last: int
) -> None:
    """What that step had decided, and what its backward has sent, is forgotten; a gradient is missing on one rank."""
    for used, fresh in run_world(returning_worker, 2, algorithm, how, at, last):
        assert equal(used, fresh)


def skip_worker(group: Any, rank: int, world: int, algorithm: str, how: str) -> Any:
    params = [torch.nn.Parameter(torch.full((40,), 0.5)) for _ in range(3)]
    options: Any = {**CROSSING[algorithm], "lr": 0.01, "block_size": 32, "bucket_mb": 0.0001, "timeout": 20.0}
    optimizer: Any = CLASSES[algorithm](params, **grouped(options, process_group=group))
    for t in range(8):
        if t in (2, 5):
            before = snapshot(optimizer, params)
            optimizer.zero_grad()
            if how != "unannounced":
                optimizer.begin_backward()
                backward(params, 50 + t, rank, skip=(1,) if how == "missing" and rank == 0 else ())
            optimizer.skip_step()
            after = snapshot(optimizer, params)
            assert equal(
                [before["x"], before["state"], before["residuals"]], [after["x"], after["state"], after["residuals"]]
            )
        optimizer.zero_grad()
        if how == "accumulated":
            optimizer.begin_backward(False)
            backward(params, 20 + t, rank)
            optimizer.begin_backward()
        backward(params, t, rank)
        optimizer.step()
    assert optimizer.skipped_steps == 2
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_that_is_skipped_after_its_backward_leaves_nothing_behind(algorithm: str) -> None:
    """The gradients that an overlapped average has begun to send are nobody's, where one is missing on a rank too."""
    announced, missing, unannounced = (
        run_world(skip_worker, 2, algorithm, how) for how in ("announced", "missing", "unannounced")
    )
    assert equal(announced, unannounced) and equal(missing, unannounced)
    first, second = run_world(skip_worker, 2, algorithm, "accumulated")
    assert equal(first, second)


def pausing_worker(group: Any, rank: int, world: int, algorithm: str, dtype: torch.dtype, cut: str) -> dict[str, Any]:
    """Of three tensors one trains all the time, one pauses from step 5 to 9, one does so and has had no gradient before."""
    algorithm, rule = RULES[algorithm]
    options: Any = {"lr": 0.01, "block_size": 32, **CROSSING[algorithm], **rule}

    def make(state: list[Tensor] | None = None) -> Any:
        same = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(40, generator=same).to(dtype)) for _ in range(2 if cut == "older" else 3)
        ]
        for p, x in zip(params, state or [], strict=False):
            p.data.copy_(x)
        return params, CLASSES[algorithm](params, **grouped(options, process_group=group))

    params, optimizer = make()
    for t in range(12):
        if cut and t == 7:
            file = torch.load(io.BytesIO(saved(optimizer, params)), weights_only=True)
            optimizer.release_communication()
            params, optimizer = make(file["x"])
            for p in params[1:]:
                p.requires_grad_(False)
            if cut == "older":
                del file["o"]["onebit"]["known"]
            optimizer.load_state_dict(file["o"])
            optimizer.load_residual_state_dict(file["r"])
        for k, p in enumerate(params):
            p.requires_grad_(k == 0 or not 5 <= t < 9)
            has = p.requires_grad and (k < 2 or t >= 9)
            p.grad = _draw(t, k, rank).to(dtype) if has else None
        optimizer.step()
    return snapshot(optimizer, params)


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        *((algorithm, torch.bfloat16) for algorithm in ALGORITHMS),
        *((rule, torch.float32) for rule in RULES if rule not in ALGORITHMS),
        ("onebit_lamb", torch.float32),
    ],
)
def test_a_parameter_that_is_not_trainable_while_a_checkpoint_is_loaded_keeps_its_state(
    algorithm: str, dtype: torch.dtype
) -> None:
    """Its moments, count and master, and its place in the plan; also if it had no gradient yet (older checkpoints do not list those)."""
    through, resumed = (run_world(pausing_worker, 2, algorithm, dtype, cut) for cut in ("", "now"))
    for a, b in zip(through, resumed, strict=True):
        assert equal(a, b) and set(a["state"]) == {0, 1, 2}
    for a, b in zip(resumed, run_world(pausing_worker, 2, algorithm, dtype, "older"), strict=True):
        if algorithm == "onebit_adam":
            assert equal(a["x"][:2], b["x"])
        assert set(b["state"]) == {0, 1} and equal(a["state"][1]["step"], b["state"][1]["step"])


def elementless_worker(group: Any, rank: int, world: int, algorithm: str) -> Any:
    params = [torch.nn.Parameter(torch.ones(40)), torch.nn.Parameter(torch.ones(3, 0))]
    options: Any = {**CROSSING[algorithm], "block_size": 32}
    optimizer = CLASSES[algorithm](params, **grouped(options, process_group=group))
    for t in range(9):
        params[0].grad = _draw(t, 0, rank)
        params[1].grad = torch.ones(3, 0) if (rank + t) % 3 == 0 else None  # on no rank every third time
        optimizer.step()
    state = optimizer.state_dict()
    return state["state"][1], state["onebit"].get("variance_steps")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_parameter_without_elements_counts_alike_on_all_ranks(algorithm: str) -> None:
    """In every step in which some rank has a gradient of it."""
    first, second = run_world(elementless_worker, 2, algorithm)
    assert equal(first, second) and first[0]["step"] == 6


# (the state of 1-bit SGD that ranks share has no tensor of a parameter's shape: its shards name what differs)
@pytest.mark.parametrize("algorithm", [*ADAM_LIKE, "binsgdm"])
def test_a_state_that_does_not_fit_is_refused_before_anything_changes(algorithm: str) -> None:
    """Another shape (one that could be broadcast too), other groups, an option out of range, books that are not complete."""

    def made(*shapes: tuple[int, ...], steps: int = 5) -> Any:
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        options: Any = {**CROSSING[algorithm], "block_size": 32, "_alone": True}
        optimizer = CLASSES[algorithm](params, **grouped(options))
        for _ in range(steps):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        return optimizer

    def edited(change: Any) -> dict[str, Any]:
        state = copy.deepcopy(made((3, 5), (4,)).state_dict())
        change(state)
        return state

    cases = [
        (
            made((5,), (4,)).state_dict(),
            r"of shape \(5,\) for parameter 0, whose shape is \(3, 5\); build the model that was saved",
        ),
        (made((3, 5), (7,)).state_dict(), r"of shape \(7,\) for parameter 1, whose shape is \(4,\)"),
        (
            made((3, 5)).state_dict(),
            r"groups of \[1\] parameters, this optimizer has groups of \[2\]; make the optimizer",
        ),
        (edited(lambda s: s["param_groups"][0].update(lr=-1.0)), "lr=-1.0"),
        (edited(lambda s: s["onebit"].pop("ledger")), "without 'ledger'"),
        (edited(lambda s: s["state"][1].pop("step")), "parameter 1 has no 'step'"),
    ]
    optimizer = made((3, 5), (4,), steps=7)
    params = optimizer.param_groups[0]["params"]
    before, groups = snapshot(optimizer, params), copy.deepcopy(optimizer.state_dict()["param_groups"])
    for state, words in cases:
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(state)
        assert equal(snapshot(optimizer, params), before)
        assert equal(optimizer.state_dict()["param_groups"], groups)


def order_worker(group: Any, rank: int, world: int, algorithm: str, plain: bool, model_first: bool) -> list[Tensor]:
    """Weights in bfloat16 after a step that follows on a checkpoint; the second parameter had no gradient before (AdamW: it had)."""

    def parameters(seed: int) -> list[torch.nn.Parameter]:
        draw = torch.Generator().manual_seed(seed)
        return [torch.nn.Parameter(torch.randn(40, generator=draw).bfloat16()) for _ in range(2)]

    options: Any = {**CROSSING[algorithm], "lr": 0.01, "block_size": 32}
    params = parameters(0)
    optimizer: Any = CLASSES[algorithm](params, **grouped(options, process_group=group))
    if plain:
        optimizer = torch.optim.AdamW(params, lr=0.01)
    for t in range(3):
        for k, p in enumerate(params):
            p.grad = _draw(t, k, 0 if plain else rank).bfloat16() if plain or k == 0 else None
        optimizer.step()
    weights, state = [p.detach().clone() for p in params], optimizer.state_dict()
    params = parameters(99)
    optimizer = CLASSES[algorithm](params, **grouped(options, process_group=group))
    for loads_model in (True, False) if model_first else (False, True):
        if loads_model:
            torch._foreach_copy_([p.detach() for p in params], weights)
        else:
            optimizer.load_state_dict(state)
    for k, p in enumerate(params):
        p.grad = _draw(3, k, rank).bfloat16()
    optimizer.step()
    assert all((p.detach() - x).abs().max() < 0.3 for p, x in zip(params, weights, strict=True))
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize(("algorithm", "plain"), [*((a, False) for a in ALGORITHMS), *((a, True) for a in ADAM_LIKE)])
def test_16_bit_weights_may_be_loaded_after_the_state_of_their_optimizer(algorithm: str, plain: bool) -> None:
    """Also weights that this state has no master of."""
    first, last = (run_world(order_worker, 2, algorithm, plain, order) for order in (True, False))
    assert equal(first, last)


def thaw_worker(group: Any, rank: int, world: int, algorithm: str) -> dict[str, Any]:
    """An optimizer before and after ``thaw()``, and after one more step, which is AdamW's or LAMB's own."""
    params = [torch.nn.Parameter(torch.ones(5, 9)), torch.nn.Parameter(torch.ones(70))]
    optimizer: Any = CLASSES[algorithm](params, lr=0.01, exchange=ExchangeOptions(process_group=group, block_size=32))  # type: ignore[arg-type]
    draws = torch.Generator().manual_seed(rank)

    def step() -> None:
        for p in params:
            p.grad = torch.randn(p.shape, generator=draws)
        optimizer.step()

    for t in range(9):
        step()
        if t == 4:
            optimizer.freeze()
    before = snapshot(optimizer, params)
    optimizer.thaw()
    after = snapshot(optimizer, params)
    phase, dense = optimizer.phase, optimizer.next_step_is_dense
    step()
    return {
        "before": before,
        "after": after,
        "thawed": (phase.value, dense, optimizer.phase.value),
        "record": optimizer.ledger.last,
        "x": [p.detach().clone() for p in params],
    }


@pytest.mark.parametrize("algorithm", ["onebit_adam", "onebit_lamb"])
def test_thaw_keeps_weights_momentum_and_variance_and_drops_residuals(algorithm: str) -> None:
    results = run_world(thaw_worker, 2, algorithm)
    for result in results:
        before, after = result["before"], result["after"]
        assert result["thawed"] == ("warmup", True, "warmup") and result["record"].dense
        assert equal(before["x"], after["x"]) and before["residuals"] and not after["residuals"]
        for i, state in after["state"].items():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                # (second moments are made of denominators, here and in a state, to rounding)
                rounding = {"rtol": 1e-6, "atol": 1e-44} if key == "exp_avg_sq" else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(state[key], before["state"][i][key], **rounding, msg=key)
            assert set(state) == {"exp_avg", "exp_avg_sq", "step"}
        assert equal(result["x"], results[0]["x"])


def finishing_worker(group: Any, rank: int, world: int) -> dict[str, Any]:
    """0/1 Adam between synchronisations, brought together, and trained on."""
    params = [torch.nn.Parameter(torch.ones(5, 9)), torch.nn.Parameter(torch.ones(70))]
    options = {"freeze_step": 3, "local_steps": LocalSteps(max_gap=8, double_every=1)}
    optimizer = ZeroOneAdam(params, lr=0.01, **grouped(options, process_group=group, block_size=32))
    draws = torch.Generator().manual_seed(rank)

    def step() -> None:
        for p in params:
            p.grad = torch.randn(p.shape, generator=draws) + 1.0
        optimizer.step()

    while optimizer.steps < 6 or not optimizer.mid_local:
        step()
    with optimizer.consensus():
        shared = [p.detach().clone() for p in params]
    own = [p.detach().clone() for p in params]
    counted = (optimizer.steps, optimizer.ledger.steps, optimizer.ledger.total.bytes_sent)
    optimizer.synchronise()
    met = [p.detach().clone() for p in params]
    after = (optimizer.steps, optimizer.ledger.steps, optimizer.ledger.total.bytes_sent)
    still = optimizer.mid_local
    optimizer.synchronise()  # nothing is pending any more
    again = optimizer.ledger.total.bytes_sent
    step()
    finite = all(bool(torch.isfinite(p).all()) for p in params)
    return {
        "shared": shared,
        "own": own,
        "met": met,
        "counts": (counted, after, again),
        "mid_local": still,
        "finite": finite,
    }


def test_synchronise_brings_the_replicas_of_zero_one_adam_together_with_their_progress() -> None:
    first, second = run_world(finishing_worker, 2)
    assert not equal(first["own"], second["own"]) and equal(first["shared"], second["shared"])
    assert equal(first["met"], second["met"])
    for result in (first, second):
        assert not result["mid_local"] and result["finite"]
        (steps, records, sent), (steps_after, records_after, sent_after), again = result["counts"]
        assert (steps, records) == (steps_after, records_after) and sent < sent_after == again
    # where all go the same way (the mean gradient is 1) the model has gone along: closer to the ranks' own than what they shared
    mean = [(a + b) / 2 for a, b in zip(first["own"], second["own"], strict=True)]
    for met, shared, goal in zip(first["met"], first["shared"], mean, strict=True):
        assert (met - goal).norm() < 0.5 * (shared - goal).norm()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hooks_of_the_state_see_all_of_it_once_and_in_torchs_order(algorithm: str, trained: bool) -> None:
    """What post-hooks return is the state, what pre-hooks return is what is checked and loaded; plain AdamW is the reference."""

    def watched(cls: Any, **options: Any) -> tuple[list[Any], Any, Any]:
        params = [torch.nn.Parameter(torch.ones(5))]
        optimizer = cls(params, lr=0.01, **options)
        for _ in range(6 if trained else 0):
            params[0].grad = torch.ones_like(params[0])
            optimizer.step()
        seen: list[Any] = []

        def packs(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            seen.append(("packs", sorted(state), len(state["state"])))
            return {"packed": state}

        def unpacks(_: Any, state: dict[str, Any]) -> Any:
            seen.append(("unpacks", sorted(state)))
            return state.pop("packed")

        def edits(_: Any, state: dict[str, Any]) -> None:
            seen.append(("edits", sorted(state)))
            state["param_groups"] = [{**group, "lr": 0.5} for group in state["param_groups"]]

        def after(loaded: Any) -> None:
            seen.append(("after", loaded.param_groups[0]["lr"], getattr(loaded, "steps", 6 * trained)))

        optimizer.register_state_dict_pre_hook(lambda _: seen.append("before"))
        optimizer.register_state_dict_post_hook(lambda _, state: seen.append(sorted(state)))
        handle = optimizer.register_state_dict_post_hook(packs)
        optimizer.register_load_state_dict_pre_hook(edits)
        optimizer.register_load_state_dict_pre_hook(unpacks, prepend=True)
        optimizer.register_load_state_dict_post_hook(after)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        assert sorted(saved) == ["packed"], "editing happens on a copy"
        handle.remove()
        return seen, saved["packed"], optimizer

    def expected(*entries: str) -> list[Any]:
        packed = [("packs", [*entries], int(trained)), ("unpacks", ["packed"]), ("edits", [*entries])]
        return ["before", [*entries], *packed, ("after", 0.5, 6 * trained)]

    options: Any = {**CROSSING[algorithm], "block_size": 32, "_alone": True}
    seen, saved, optimizer = watched(CLASSES[algorithm], **grouped(options))
    assert seen == expected("onebit", "param_groups", "state")
    assert watched(torch.optim.AdamW)[0] == expected("param_groups", "state")
    again = optimizer.state_dict()
    assert equal(again["state"], saved["state"])
    assert seen[-2:] == ["before", ["onebit", "param_groups", "state"]], "the handle has removed its hook"
    optimizer.register_load_state_dict_pre_hook(lambda *_: {**saved, "param_groups": []})
    with pytest.raises(ValueError, match="make the optimizer"):
        optimizer.load_state_dict({"packed": saved})
