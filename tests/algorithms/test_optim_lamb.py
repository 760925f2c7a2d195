"""OnebitLamb: against the float64 oracle across the freeze, against an independent LAMB, and where tensors have nothing to scale by."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from harness import grouped
from optim_support import SMALL, Problem, close, equal, joined, run_world, snapshot, sure, train, whole_state

from lightning_onebit.algorithms import LambCoefficients, OnebitLamb
from lightning_onebit.engine import ExchangeOptions

#: the trust ratio meets both of its clips and moves between them; its correction meets both of its bounds and its speed limit
OPTIONS: dict[str, Any] = {
    "lr": 0.02,
    "betas": (0.9, 0.9),
    "weight_decay": 0.3,
    "freeze_step": 8,
    "trust_clip": (0.5, 1.2),
    "coefficients": LambCoefficients(beta=0.7, factor_min=0.7, factor_max=1.8, threshold=0.08),
    "block_size": 64,
    "bucket_mb": 0.0016,
}
SHAPES = ((40, 30), (7,), (0,), (1,), (3, 100), (50,))


def growing(growth: float = 1.12, seed: int = 3, **differing: Any) -> Problem:
    """8 dense steps and 16 compressed ones, with growing gradients; part of the first tensor never has a gradient."""
    options = {**OPTIONS, **differing}
    return Problem(24, options, shapes=SHAPES, cold=100, seed=seed, algorithm="onebit_lamb", growth=growth)


#: no step of the warm-up moves anything, so that two tensors are 0 up to the second compressed step
BLANK = dataclasses.replace(growing(seed=13), lrs=(0.0,) * 8 + (0.02,) * 16, blank=(1, 4))
RUNS = {
    "defaults": growing(),
    "published recipe": growing(bias_correction=False),
    "shrinking gradients": growing(growth=0.9, seed=1),
    "no weight decay": growing(weight_decay=0.0),
    "weights that start at zero": BLANK,
}


def coefficients(group: Any, rank: int, world: int, problem: Problem) -> dict[str, Any]:
    params = problem.parameters()
    optimizer = problem.build(params, process_group=group)
    seen = []
    for t in range(problem.steps):
        problem.put(params, t, rank)
        optimizer.param_groups[0]["lr"] = problem.lr_at(t)
        optimizer.step()
        seen.append(optimizer.get_lamb_coeffs())
    dense = [optimizer.ledger.dense_steps, optimizer.ledger.compressed_steps]
    return {
        **snapshot(optimizer, params),
        "coefficients": seen,
        "kinds": dense,
        "bytes": optimizer.ledger.last.bytes_sent,
    }


@pytest.mark.parametrize(
    ("world", "run"),
    [*((3, run) for run in RUNS), (2, "defaults"), (4, "published recipe")],
)
def test_follows_the_oracle_across_the_freeze(world: int, run: str) -> None:
    """Weights, momentum, residuals, fresh second moments and every coefficient of every step, on real processes."""
    problem = RUNS[run]
    theirs: list[list[float]] = []
    simulated = problem.simulate(world, lambda o, t: theirs.append(list(o.coeff)))
    sure(simulated)
    results = run_world(coefficients, world, problem, real=True)
    e, d = joined(results, problem)
    for result in results:
        dense = OPTIONS["freeze_step"]
        assert result["kinds"] == [dense, problem.steps - dense] and result["bytes"] > 0
        for l, size in enumerate(np.prod(s) for s in SHAPES):
            close(result["x"][l], simulated.x[l], problem.lr_at(problem.steps - 1))
            if size:
                for key, expected in {"exp_avg": simulated.m[l], "exp_avg_sq_fresh": simulated.vfresh[l]}.items():
                    ours = result["state"][l][key].numpy().ravel()
                    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5, err_msg=f"{key} of tensor {l}")
        for t, coeffs in enumerate(result["coefficients"]):
            used = {f"parameter {l}": c for l, c in enumerate(theirs[t]) if np.prod(SHAPES[l])}
            ours = {name: c for name, c in coeffs.items() if name in used}
            assert ours == pytest.approx(used, rel=1e-5), f"step {t + 1}"
    for i in range(world):
        for l in range(len(SHAPES)):
            np.testing.assert_allclose(e[i][l], simulated.exchange.e[i][l], atol=2e-4)
    for l in range(len(SHAPES)):
        np.testing.assert_allclose(d[l], simulated.exchange.d[l], atol=2e-4)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_run_of_the_oracle_test_meets_every_clip(world: int) -> None:
    """Else that test would pass without them: bounds of c, bounds of f, its speed limit, and the blend for weight decay."""
    problem, o = growing(), OPTIONS
    c: list[list[float]] = []
    r: list[list[float]] = []
    problem.simulate(world, lambda s, t: (c.append(list(s.coeff)), r.append(list(s.r))))  # type: ignore[func-returns-value]
    warm = np.array(c[: o["freeze_step"]])
    (low, high), bounds = o["trust_clip"], o["coefficients"]
    assert (warm == high).any() and (warm == low).any()
    assert ((warm > low) & (warm < high) & (warm != 1)).any()
    f = np.array(r[o["freeze_step"] - 1 :])
    before, after = f[:-1], f[1:]
    assert (after == bounds.factor_max).any() and (after == bounds.factor_min).any()
    threshold = bounds.threshold
    fastest = np.isclose(after / before, 1 + threshold) | np.isclose(after / before, 1 - threshold)
    assert fastest.any()
    free = ~fastest & (after != bounds.factor_max) & (after != bounds.factor_min) & (after != 1)
    assert free[:, 0].any(), "where f is bounded by nothing, the blend with weight decay decides"


def independent_lamb(problem: Problem, world: int, clip: tuple[float, float]) -> list[np.ndarray]:
    """LAMB as "Large Batch Optimization for Deep Learning", algorithm 2, writes it, on averaged gradients."""
    o = problem.options
    b1, b2 = o["betas"]
    x = [torch.from_numpy(a).double() for a in problem.start()]
    m, v = [torch.zeros_like(a) for a in x], [torch.zeros_like(a) for a in x]
    for t in range(1, problem.steps + 1):
        for l in range(len(x)):
            g = problem.average(t - 1, world, l)
            assert g is not None
            m[l] = b1 * m[l] + (1 - b1) * g.double()
            v[l] = b2 * v[l] + (1 - b2) * g.double() ** 2
            ratio = (m[l] / (1 - b1**t)) / ((v[l] / (1 - b2**t)).sqrt() + 1e-8) + o["weight_decay"] * x[l]
            trust = min(max(float(x[l].norm() / ratio.norm()), clip[0]), clip[1]) if x[l].numel() else 1.0
            x[l] = x[l] - o["lr"] * trust * ratio
    return [a.numpy().ravel() for a in x]


def test_warmup_is_lamb_on_averaged_gradients() -> None:
    options = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1, "trust_clip": (0.01, 1.0)}
    problem = Problem(8, options, shapes=SMALL, algorithm="onebit_lamb")
    expected = independent_lamb(problem, 3, (0.01, 1.0))
    for result in run_world(train, 3, problem):
        assert all(record.dense for record in result["records"])
        for l, x in enumerate(expected):
            close(result["x"][l], x, 0.02)


def test_a_single_process_is_plain_lamb_even_after_the_freeze() -> None:
    options = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1, "trust_clip": (0.01, 1.0), "freeze_step": 3}
    problem = Problem(8, options, shapes=SMALL, algorithm="onebit_lamb")
    (result,) = run_world(train, 1, problem)
    assert result["books"]["phase"] == "compressed"
    for l, x in enumerate(independent_lamb(problem, 1, (0.01, 1.0))):
        close(result["x"][l], x, 0.02)


# ----- coefficients --------------------------------------------------------------------------------------------------------------


def test_an_average_that_never_moved_counts_as_one() -> None:
    """Clips at exactly 1 make every c exactly 1, so c_avg is still 0 at the freeze."""
    options = {"lr": 0.02, "freeze_step": 4, "trust_clip": (1.0, 1.0), "block_size": 32}
    problem = Problem(10, options, shapes=SMALL, algorithm="onebit_lamb", seed=1)
    simulated = problem.simulate(2)
    sure(simulated)
    assert simulated.c_avg == [1.0] * 5
    for result in run_world(coefficients, 2, problem):
        assert result["coefficients"][3] == {f"parameter {l}": 1.0 for l in range(5)}
        for l in range(5):
            close(result["x"][l], simulated.x[l], 0.02)
        moved = np.abs(result["x"][0].numpy() - problem.start()[0])
        assert moved.max() > 5 * 0.02 * 0.5, "a coefficient of 0 would stop the tensor for ever"


def test_get_lamb_coeffs_is_fresh_and_named() -> None:
    p, q = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
    optimizer = OnebitLamb([p, q], trust_clip=(0.01, 2.0))
    optimizer.configure_communication(None, parameter_names={p: "head.weight"})
    assert optimizer.get_lamb_coeffs() == {}
    p.grad = torch.ones(8)
    optimizer.step()
    first = optimizer.get_lamb_coeffs()
    assert first == {"head.weight": pytest.approx(1.0, abs=1e-3)}, "the other parameter has not been stepped"
    first["head.weight"] = 77.0
    q.grad = torch.ones(8)
    optimizer.step()
    assert set(optimizer.get_lamb_coeffs()) == {"head.weight", "parameter 1"}
    assert optimizer.get_lamb_coeffs()["head.weight"] != 77.0


def test_the_freeze_starts_fresh_moments_at_the_frozen_ones() -> None:
    """Where gradients go on as before, f differs from 1 only by what one more step adds to v."""
    p = torch.nn.Parameter(torch.full((64,), 2.0))
    options: Any = {"freeze_step": 3, "coefficients": LambCoefficients(threshold=1.0), "bias_correction": False}
    exchange = ExchangeOptions(_alone=True, block_size=32, state_dtype="float32")
    optimizer = OnebitLamb([p], lr=0.01, exchange=exchange, **options)
    for _ in range(3):
        p.grad = torch.ones(64)
        optimizer.step()
    average = optimizer.state_dict()["onebit"]["coeff_average"]
    p.grad = torch.ones(64)
    optimizer.step()
    f = optimizer.get_lamb_coeffs()["parameter 0"] / average[0]
    # v goes on from (1 - b2^3) with b2 = 0.999 by one more step of g = 1
    assert f == pytest.approx(((1 - 0.999**3) / (1 - 0.999**4)) ** 0.5, rel=1e-4)


# ----- frozen ratios ------------------------------------------------------------------------------------------------------------


def growing_worker(group: Any, rank: int, world: int) -> list[list[dict[str, float]]]:
    """Small weights under shrinking gradients that point the same way: what makes up the coefficient, per step and tensor."""
    params = [torch.nn.Parameter(torch.full((70,), 0.02, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = OnebitLamb(
        params,
        lr=0.1,
        freeze_step=3,
        trust_clip=(0.01, 0.15),
        weight_decay=0.1,
        exchange=ExchangeOptions(block_size=32, process_group=group),
    )
    draws = torch.Generator().manual_seed(rank)
    seen = []
    for t in range(32):
        for p in params:
            p.grad = ((-1.0 - 0.2 * torch.randn(p.shape, generator=draws)) / (1 + 0.02 * t)).to(p.dtype)
        optimizer.step()
        books, used = optimizer.state_dict()["onebit"], optimizer.get_lamb_coeffs()
        seen.append(
            [
                {"used": used[f"parameter {i}"], **{key: books[key][i] for key in ("coeff_average", "last_factor")}}
                for i in range(len(params))
            ]
        )
    return seen[3:]


def test_a_coefficient_stays_the_average_times_its_correction() -> None:
    first, second = run_world(growing_worker, 2)
    assert first == second
    for tensor in zip(*first, strict=True):
        for step in tensor:
            assert step["used"] == pytest.approx(step["coeff_average"] * step["last_factor"], rel=1e-14)
            assert step["coeff_average"] == tensor[0]["coeff_average"]
        assert len({step["last_factor"] for step in tensor}) > 5


def tracked(**options: Any) -> tuple[list[torch.nn.Parameter], Any]:
    params = [torch.nn.Parameter(torch.full((40,), 0.5)) for _ in range(2)]
    return params, OnebitLamb(params, lr=0.01, **grouped({"_alone": True, "block_size": 32, **options}))


def stepped(params: list[torch.nn.Parameter], optimizer: Any) -> None:
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_a_thaw_learns_both_averages_anew() -> None:
    params, optimizer = tracked(betas=(0.9, 0.9))
    stepped(params, optimizer)
    optimizer.freeze()
    for _ in range(5):
        stepped(params, optimizer)
    assert "exp_avg_sq_fresh" in whole_state(optimizer)["state"][0]
    before = optimizer.state_dict()["onebit"]["coeff_average"]
    optimizer.thaw()
    assert "exp_avg_sq_fresh" not in whole_state(optimizer)["state"][0]
    stepped(params, optimizer)
    assert optimizer.state_dict()["onebit"]["coeff_average"] != before
    optimizer.freeze()
    stepped(params, optimizer)
    assert "exp_avg_sq_fresh" in whole_state(optimizer)["state"][0]


def test_a_dense_group_that_joins_after_the_freeze_has_a_ratio_of_its_own() -> None:
    """Also in a run that goes on from its checkpoint."""
    params, optimizer = tracked()
    for _ in range(3):
        stepped(params, optimizer)
    optimizer.freeze()
    params.append(torch.nn.Parameter(torch.full((40,), 3.0)))
    optimizer.add_param_group({"params": params[2:], "compress": False})
    assert set(optimizer.get_lamb_coeffs()) == {"parameter 0", "parameter 1"}
    for _ in range(8):
        stepped(params, optimizer)
    coeffs = optimizer.get_lamb_coeffs()
    assert set(coeffs) == {"parameter 0", "parameter 1", "parameter 2"} and coeffs["parameter 2"] > 1
    other = tracked()[1]
    other.add_param_group({"params": [torch.nn.Parameter(torch.zeros(40))], "compress": False})
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.get_lamb_coeffs() == coeffs


def resumed_everywhere(group: Any, rank: int, world: int, problem: Problem) -> tuple[list[bool], list[float]]:
    """Whether a run saved after each of its steps and continued by another optimizer ends as the one that was not interrupted."""
    params = problem.parameters()
    optimizer = problem.build(params, process_group=group)
    saved, used = [], []
    for t in range(problem.steps):
        problem.put(params, t, rank)
        optimizer.step()
        used.append(optimizer.get_lamb_coeffs()["parameter 0"])
        weights = [p.detach().clone() for p in params]
        saved.append(copy.deepcopy((weights, optimizer.state_dict(), optimizer.residual_state_dict())))
    equals = []
    for cut, (weights, state, residuals) in enumerate(saved[:-1], start=1):
        copies = [torch.nn.Parameter(p) for p in weights]
        other = problem.build(copies, process_group=group)
        other.load_state_dict(state)
        other.load_residual_state_dict(residuals)
        for t in range(cut, problem.steps):
            problem.put(copies, t, rank)
            other.step()
        same = all(torch.equal(a, b) for a, b in zip(copies, params, strict=True))
        equals.append(same and other.get_lamb_coeffs() == optimizer.get_lamb_coeffs())
    return equals, used


def test_a_run_resumed_anywhere_is_the_run_that_was_not_interrupted() -> None:
    """Bit for bit, in the warm-up and after the freeze."""
    problem = dataclasses.replace(growing(trust_clip=(0.0, 30.0)), cold=0, shapes=SMALL)
    for equals, used in run_world(resumed_everywhere, 2, problem):
        assert equals == [True] * 23
        assert len(set(used[8:])) > 10, "ratios move in this run"


def test_a_rank_that_goes_on_alone_is_plain_lamb() -> None:
    """With second moments that learn, and a ratio of each step's own."""
    params, optimizer = tracked(freeze_step=2)
    for _ in range(4):
        stepped(params, optimizer)
    own, alone = tracked(freeze_step=2, _alone=False)
    alone.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        norm = float(own[0].detach().double().norm())
        before = own[0].detach().clone()
        stepped(own, alone)
        assert "exp_avg_sq_fresh" not in whole_state(alone)["state"][0]
        # x -= lr*c*u with c = ||x||/||u||: every step is lr times as long as the weights
        assert float((own[0].detach() - before).norm()) == pytest.approx(0.01 * norm, rel=1e-3)


# ----- tensors with nothing to scale by -------------------------------------------------------------------------------------------


def nothing_worker(group: Any, rank: int, world: int) -> dict[str, Any]:
    """Five tensors: ordinary, never a gradient, zero gradients, zero weights, first gradient after the freeze."""
    same = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(70, generator=same)) for _ in range(5)]
    with torch.no_grad():
        params[3].zero_()
    optimizer = OnebitLamb(
        params, lr=0.01, freeze_step=4, weight_decay=0.0, exchange=ExchangeOptions(block_size=32, process_group=group)
    )
    draws = torch.Generator().manual_seed(10 + rank)
    moves, start = [], [p.detach().clone() for p in params]
    for t in range(12):
        for l, p in enumerate(params):
            g = torch.randn(70, generator=draws)
            p.grad = {1: None, 2: torch.zeros(70), 4: g if t >= 4 else torch.zeros(70)}.get(l, g)
        before = [p.detach().clone() for p in params]
        optimizer.step()
        moves.append([(p.detach() - b).abs().max().item() for p, b in zip(params, before, strict=True)])
    return {**snapshot(optimizer, params), "moves": moves, "start": start, "coefficients": optimizer.get_lamb_coeffs()}


def test_tensors_without_norm_or_momentum_crash_nothing_and_stay_bounded() -> None:
    results = run_world(nothing_worker, 3)
    for result in results:
        assert equal(result["x"], results[0]["x"]), "replicas are equal"
        ordinary, absent, zero, blank, late = np.array(result["moves"]).T
        assert not absent.any() and not zero.any(), "nothing to move by"
        assert not late[:4].any() and late[4:].min() > 0 and late[4:].max() < 1.0
        assert ordinary.min() > 0 and ordinary.max() < 1.0
        assert blank.min() > 0 and blank.max() < 1.0
        assert set(result["coefficients"]) == {f"parameter {l}" for l in (0, 2, 3, 4)}
        assert all(np.isfinite(c) for c in result["coefficients"].values())


@pytest.mark.parametrize("shapes", [((0,), (5,)), ((0,), (0,)), ((5,), (0,))])
def test_parameters_without_elements_are_legal_anywhere(shapes: tuple[tuple[int, ...], ...]) -> None:
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = OnebitLamb(params, freeze_step=2, exchange=ExchangeOptions(_alone=True))
    for _ in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert all((p < 1).all() for p in params) and optimizer.steps == 4


def frozen_backbone(group: Any, rank: int, world: int) -> torch.Tensor:
    backbone = torch.nn.Parameter(torch.ones(40), requires_grad=False)
    head = torch.nn.Parameter(torch.ones(40))
    groups: Any = [{"params": [backbone]}, {"params": [head], "compress": False}]
    optimizer = OnebitLamb(groups, lr=0.01, freeze_step=2, exchange=ExchangeOptions(process_group=group))
    for _ in range(6):
        head.grad = torch.full((40,), rank + 1.0)
        optimizer.step()
    assert optimizer.ledger.compressed_steps == 4
    return head.detach()


def test_a_run_in_which_no_compressed_parameter_is_trainable_is_legal() -> None:
    first, second = run_world(frozen_backbone, 2)
    assert equal(first, second) and first.max() < 1


# ----- options -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"trust_clip": (0.0, 0.0)}, ValueError, r"trust_clip\[1\]=0.0"),
        ({"trust_clip": (11.0, 10.0)}, ValueError, r"trust_clip\[0\]=11.0 .* <= 10"),
        ({"trust_clip": (-0.1, 10.0)}, ValueError, r"trust_clip\[0\]=-0.1"),
        ({"trust_clip": 0.3}, TypeError, r"trust_clip=0.3 must be a pair of numbers \(low, high\)"),
        ({"trust_clip": (0.1, "1")}, TypeError, r"trust_clip\[1\]='1'"),
        ({"coefficients": {"beta": 0.9}}, TypeError, "coefficients={'beta': 0.9} must be a LambCoefficients, not dict"),
        ({"freeze_step": 0}, ValueError, "freeze_step=0"),
        ({"refresh": "never"}, TypeError, "refresh"),
        ({"bias_correction": 1}, TypeError, "bias_correction=1"),
    ],
)
def test_bad_options_are_named_with_their_value(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        OnebitLamb([torch.nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"beta": 1.0}, ValueError, "beta=1.0 .* < 1"),
        ({"factor_max": 0}, ValueError, "factor_max=0"),
        ({"factor_min": 5.0}, ValueError, "factor_min=5.0 .* <= 4"),
        ({"threshold": -1.0}, ValueError, "threshold=-1.0"),
        ({"threshold": "0.1"}, TypeError, "threshold='0.1'"),
    ],
)
def test_bad_coefficients_are_named_with_their_value(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LambCoefficients(**given)
