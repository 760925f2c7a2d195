"""OnebitLamb: against the float64 oracle across the freeze, against an independent LAMB, and where tensors have nothing to scale by."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from optim_support import SMALL, Problem, close, equal, joined, run_world, snapshot, sure, train

from lightning_onebit.kernels.reference import block_square_sums
from lightning_onebit.optim.lamb import OnebitLamb

#: the correction meets both of its bounds and its speed limit, the trust ratio both of its clips
CLIPPED = {
    "lr": 0.02,
    "betas": (0.9, 0.9),
    "weight_decay": 0.3,
    "freeze_step": 8,
    "max_coeff": 1.2,
    "min_coeff": 0.5,
    "coeff_beta": 0.7,
    "factor_max": 1.8,
    "factor_min": 0.7,
    "factor_threshold": 0.08,
    "block_size": 64,
    "bucket_mb": 0.0016,
}
SHAPES = ((40, 30), (7,), (0,), (1,), (3, 100), (50,))


def clipped(**differing: Any) -> Problem:
    """A run of 24 steps, 8 of them dense, over several buckets; part of the first tensor never has a gradient."""
    options = {**CLIPPED, **differing}
    return Problem(24, options, shapes=SHAPES, cold=100, seed=3, algorithm="onebit_lamb", growth=1.12)


#: no step of the warm-up moves anything, so that two tensors are 0 up to the second compressed step, and grow fast from there
BLANK = dataclasses.replace(clipped(), lrs=(0.0,) * 8 + (0.02,) * 16, blank=(1, 4))
RUNS = {
    "defaults": clipped(),
    "published recipe": clipped(bias_correction=False, track_weight_norm=False),
    "frozen ratios": clipped(track_weight_norm=False),
    "without bias correction": clipped(bias_correction=False),
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
    [(world, run) for run in RUNS for world in (2, 3, 4) if world == 3 or run in ("defaults", "published recipe")],
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
        assert result["kinds"] == [8, 16] and result["bytes"] > 0
        for l, size in enumerate(np.prod(s) for s in SHAPES):
            close(result["x"][l], simulated.x[l], problem.lr_at(problem.steps - 1))
            if size:
                for key, expected in (("exp_avg", simulated.m[l]), ("exp_avg_sq_fresh", simulated.vfresh[l])):
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
    problem, o = clipped(), CLIPPED
    c: list[list[float]] = []
    r: list[list[float]] = []
    problem.simulate(world, lambda s, t: (c.append(list(s.coeff)), r.append(list(s.r))))  # type: ignore[func-returns-value]
    warm = np.array(c[: o["freeze_step"]])
    assert (warm == o["max_coeff"]).any() and (warm == o["min_coeff"]).any()
    assert ((warm > o["min_coeff"]) & (warm < o["max_coeff"]) & (warm != 1)).any()
    f = np.array(r[o["freeze_step"] - 1 :])
    before, after = f[:-1], f[1:]
    assert (after == o["factor_max"]).any() and (after == o["factor_min"]).any()
    fastest = np.isclose(after / before, 1 + o["factor_threshold"]) | np.isclose(
        after / before, 1 - o["factor_threshold"]
    )
    assert fastest.any()
    free = ~fastest & (after != o["factor_max"]) & (after != o["factor_min"]) & (after != 1)
    assert free[:, 0].any(), "where f is bounded by nothing, the blend with weight decay decides"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_runs_of_the_oracle_test_meet_every_case_of_the_norms(world: int) -> None:
    """Both clips of c, coefficients between them that have left ``c_avg*f``, and tensors without a norm."""
    dense = CLIPPED["freeze_step"]
    for name, bound in (("defaults", "min_coeff"), ("weights that start at zero", "max_coeff")):
        c: list[list[float]] = []
        r: list[list[float]] = []
        w0: list[list[float]] = []
        simulated = RUNS[name].simulate(
            world,
            lambda o, t, c=c, r=r, w0=w0: (c.append(list(o.coeff)), r.append(list(o.r)), w0.append(list(o.w0))),  # type: ignore[misc]
        )
        now, frozen = np.array(c[dense:]), np.array(simulated.c_avg) * np.array(r[dense:])
        assert np.isclose(now, CLIPPED[bound]).any()
        free = (now > CLIPPED["min_coeff"] * 1.001) & (now < CLIPPED["max_coeff"] * 0.999)
        assert (free & (abs(now / frozen - 1) > 0.01)).any()
        if RUNS[name].blank:
            first, second = np.array(w0[dense : dense + 2])[:, list(RUNS[name].blank)]
            assert not first.any() and second.all(), "the first compressed step finds them at 0"
            assert now[0, 1] == frozen[0, 1] and now[0, 4] == frozen[0, 4]


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
    options = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1, "max_coeff": 1.0}
    problem = Problem(8, options, shapes=SMALL, algorithm="onebit_lamb")
    expected = independent_lamb(problem, 3, (0.01, 1.0))
    for result in run_world(train, 3, problem):
        assert all(record.dense for record in result["records"])
        for l, x in enumerate(expected):
            close(result["x"][l], x, 0.02)


def test_a_single_process_is_plain_lamb_even_after_the_freeze() -> None:
    options = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1, "max_coeff": 1.0, "freeze_step": 3}
    problem = Problem(8, options, shapes=SMALL, algorithm="onebit_lamb")
    (result,) = run_world(train, 1, problem)
    assert result["books"]["phase"] == "compressed"
    for l, x in enumerate(independent_lamb(problem, 1, (0.01, 1.0))):
        close(result["x"][l], x, 0.02)


# ----- coefficients --------------------------------------------------------------------------------------------------------------


def test_an_average_that_never_moved_counts_as_one() -> None:
    """Clips at exactly 1 make every c exactly 1, so c_avg is still 0 at the freeze."""
    options = {"lr": 0.02, "freeze_step": 4, "max_coeff": 1.0, "min_coeff": 1.0, "block_size": 32}
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
    optimizer = OnebitLamb([p, q], max_coeff=2.0)
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
    options = {"freeze_step": 3, "factor_threshold": 1.0, "bias_correction": False, "block_size": 32}
    optimizer = OnebitLamb([p], lr=0.01, force_compression=True, **options)
    for _ in range(3):
        p.grad = torch.ones(64)
        optimizer.step()
    average = optimizer.state_dict()["onebit"]["coeff_average"]
    p.grad = torch.ones(64)
    optimizer.step()
    f = optimizer.get_lamb_coeffs()["parameter 0"] / average[0]
    # v goes on from (1 - b2^3) with b2 = 0.999 by one more step of g = 1
    assert f == pytest.approx(((1 - 0.999**3) / (1 - 0.999**4)) ** 0.5, rel=1e-4)


# ----- ratios that follow the weights -------------------------------------------------------------------------------------------


def norm_of(x: torch.Tensor, block_size: int = 32) -> float:
    """``||x||`` as the kernels sum it: squares of a block in fp32 in their fixed order, blocks in fp64."""
    flat = torch.zeros(-(-x.numel() // block_size) * block_size)
    flat[: x.numel()] = x.detach().float().flatten()
    return float(block_square_sums(flat.view(-1, block_size)).double().sum().sqrt())


def growing_worker(group: Any, rank: int, world: int, track: bool) -> list[list[dict[str, float]]]:
    """Small weights under gradients that always point the same way: what decides the coefficient, per step and tensor."""
    params = [torch.nn.Parameter(torch.full((70,), 0.02, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = OnebitLamb(
        params,
        **{"lr": 0.5, "freeze_step": 3, "coeff_beta": 0.0, "max_coeff": 0.2, "track_weight_norm": track},
        **{"block_size": 32, "process_group": group},
    )
    seen = []
    for _ in range(16):
        for p in params:
            p.grad = -torch.ones_like(p)
        masters = [optimizer.state_dict()["state"].get(i, {}).get("master", p) for i, p in enumerate(params)]
        norms = [norm_of(x) for x in masters]
        optimizer.step()
        books = optimizer.state_dict()["onebit"]
        used = optimizer.get_lamb_coeffs()
        seen.append(
            [
                {
                    "norm": norm,
                    "used": used[f"parameter {i}"],
                    **{key: books[key][i] for key in ("coeff_average", "last_factor", "weight_norm")},
                }
                for i, norm in enumerate(norms)
            ]
        )
    return seen[3:]


@pytest.mark.parametrize("track", [True, False])
def test_the_coefficient_follows_the_norm_of_the_weights_exactly(track: bool) -> None:
    """Of the fp32 master weights where parameters are kept in 16 bits; without the option it stays at ``c_avg*f``."""
    for seen in run_world(growing_worker, 2, track):
        for tensor in zip(*seen, strict=True):
            w0 = tensor[0]["norm"]
            assert tensor[-1]["norm"] > 3 * w0, "the weights of this run grow"
            for step in tensor:
                assert step["weight_norm"] == (w0 if track else 0.0)
                expected = step["coeff_average"] * step["last_factor"]
                if track:
                    expected = min(max(expected * step["norm"] / w0, 0.01), 0.2)
                assert step["used"] == pytest.approx(expected, rel=1e-14)
            ratios = [step["used"] / step["last_factor"] for step in tensor]
            if track:
                assert max(ratios) > 2 * ratios[0] and max(step["used"] for step in tensor) == 0.2
            else:
                assert ratios == pytest.approx([ratios[0]] * len(ratios))


def tracked(**options: Any) -> tuple[list[torch.nn.Parameter], Any]:
    params = [torch.nn.Parameter(torch.full((40,), 0.5)) for _ in range(2)]
    return params, OnebitLamb(params, lr=0.01, block_size=32, **{"force_compression": True, **options})


def stepped(params: list[torch.nn.Parameter], optimizer: Any, *, only: int | None = None) -> list[float]:
    """One step, of the parameter ``only`` or of all; the norms that the ratios belong to."""
    for i, p in enumerate(params):
        p.grad = torch.ones_like(p) if only in (None, i) else None
    optimizer.step()
    norms: list[float] = optimizer.state_dict()["onebit"]["weight_norm"]
    return norms


def test_a_parameter_that_sits_a_step_out_neither_sets_nor_uses_its_norm() -> None:
    params, optimizer = tracked(freeze_step=2)
    for _ in range(2):
        assert stepped(params, optimizer) == [0.0, 0.0]
    first = norm_of(params[0])
    assert stepped(params, optimizer, only=0) == [first, 0.0]
    with torch.no_grad():
        params[1].mul_(2)
    coefficient = optimizer.get_lamb_coeffs()["parameter 1"]
    assert stepped(params, optimizer, only=0) == [first, 0.0]
    assert optimizer.get_lamb_coeffs()["parameter 1"] == coefficient
    second = norm_of(params[1])
    assert stepped(params, optimizer) == [first, second]


def test_a_thaw_forgets_the_norms() -> None:
    params, optimizer = tracked()
    stepped(params, optimizer)
    optimizer.freeze()
    assert all(stepped(params, optimizer))
    optimizer.thaw()
    assert optimizer.state_dict()["onebit"]["weight_norm"] == [0.0, 0.0]
    stepped(params, optimizer)
    optimizer.freeze()
    before = [norm_of(p) for p in params]
    assert stepped(params, optimizer) == before


def test_a_checkpoint_without_norms_takes_them_at_the_next_compressed_step() -> None:
    params, optimizer = tracked(freeze_step=2)
    for _ in range(4):
        stepped(params, optimizer)
    state = optimizer.state_dict()
    assert all(state["onebit"].pop("weight_norm"))
    optimizer.load_state_dict(state)
    before = [norm_of(p) for p in params]
    assert stepped(params, optimizer) == before


def test_a_rank_that_goes_on_alone_measures_anew() -> None:
    """It steps by plain LAMB, which moves c_avg: the norm that belonged to the old average would be wrong beside it."""
    params, optimizer = tracked(freeze_step=2)
    for _ in range(4):
        stepped(params, optimizer)
    _, alone = tracked(freeze_step=2, force_compression=False)
    alone.load_state_dict(optimizer.state_dict())
    assert all(alone.state_dict()["onebit"]["weight_norm"])
    assert stepped(alone.param_groups[0]["params"], alone) == [0.0, 0.0]


# ----- tensors with nothing to scale by -------------------------------------------------------------------------------------------


def nothing_worker(group: Any, rank: int, world: int) -> dict[str, Any]:
    """Five tensors: ordinary, never a gradient, zero gradients, zero weights, first gradient after the freeze."""
    same = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(70, generator=same)) for _ in range(5)]
    with torch.no_grad():
        params[3].zero_()
    optimizer = OnebitLamb(params, lr=0.01, freeze_step=4, weight_decay=0.0, block_size=32, process_group=group)
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
        assert not late.any(), "second moments that froze at zero leave no scale to move by"
        assert ordinary.min() > 0 and ordinary.max() < 1.0
        assert blank.min() > 0 and blank.max() < 1.0
        assert set(result["coefficients"]) == {f"parameter {l}" for l in (0, 2, 3, 4)}
        assert all(np.isfinite(c) for c in result["coefficients"].values())


@pytest.mark.parametrize("shapes", [((0,), (5,)), ((0,), (0,)), ((5,), (0,))])
def test_parameters_without_elements_are_legal_anywhere(shapes: tuple[tuple[int, ...], ...]) -> None:
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = OnebitLamb(params, freeze_step=2, force_compression=True)
    for _ in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert all((p < 1).all() for p in params) and optimizer.steps == 4


# ----- options -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_coeff": 0.0}, ValueError, "max_coeff=0.0"),
        ({"min_coeff": 11.0}, ValueError, "min_coeff=11.0 .* <= 10"),
        ({"min_coeff": -0.1}, ValueError, "min_coeff=-0.1"),
        ({"coeff_beta": 1.0}, ValueError, "coeff_beta=1.0 .* < 1"),
        ({"factor_max": 0}, ValueError, "factor_max=0"),
        ({"factor_min": 5.0}, ValueError, "factor_min=5.0 .* <= 4"),
        ({"factor_threshold": -1.0}, ValueError, "factor_threshold=-1.0"),
        ({"factor_threshold": "0.1"}, TypeError, "factor_threshold='0.1'"),
        ({"track_weight_norm": 1}, TypeError, "track_weight_norm=1"),
        ({"freeze_step": 0}, ValueError, "freeze_step=0"),
        ({"bias_correction": 1}, TypeError, "bias_correction=1"),
    ],
)
def test_bad_options_are_named_with_their_value(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        OnebitLamb([torch.nn.Parameter(torch.ones(3))], **options)
