"""OnebitLamb: against the float64 oracle across the freeze, against an independent LAMB, and where tensors have nothing to scale by."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from optim_support import SMALL, Problem, close, equal, joined, run_world, snapshot, sure, train, whole_state

from lightning_onebit.optim.lamb import OnebitLamb

#: the trust ratio meets both of its clips, and moves between them
FOLLOWED = {
    "lr": 0.02,
    "betas": (0.9, 0.9),
    "weight_decay": 0.1,
    "freeze_step": 8,
    "max_coeff": 2.0,
    "min_coeff": 0.6,
    "block_size": 64,
    "bucket_mb": 0.0016,
}
#: and the correction both of its bounds and its speed limit
FROZEN = {
    **{**FOLLOWED, "weight_decay": 0.3, "max_coeff": 1.2, "min_coeff": 0.5},
    **{"trust_ratio": "frozen", "coeff_beta": 0.7, "factor_max": 1.8, "factor_min": 0.7, "factor_threshold": 0.08},
}
SHAPES = ((40, 30), (7,), (0,), (1,), (3, 100), (50,))


def followed(steps: int = 48, growth: float = 1.02, seed: int = 1, **differing: Any) -> Problem:
    """8 dense steps, compressed ones with growing gradients, refreshes at 24 and 40; part of the first tensor never has a gradient."""
    options = {**FOLLOWED, **differing}
    return Problem(steps, options, shapes=SHAPES, cold=100, seed=seed, algorithm="onebit_lamb", growth=growth)


def frozen(**differing: Any) -> Problem:
    """The same by the published rule, 16 compressed steps."""
    options = {**FROZEN, **differing}
    return Problem(24, options, shapes=SHAPES, cold=100, seed=3, algorithm="onebit_lamb", growth=1.12)


#: no step of the warm-up moves anything, so that two tensors are 0 up to the second compressed step, and grow fast from there
BLANK = dataclasses.replace(
    followed(24, seed=13, max_coeff=1.2), lrs=(0.0,) * 8 + (0.02,) * 16, blank=(1, 4), growth=1.12
)
RUNS = {
    "defaults": followed(seed=0),
    "shrinking gradients": followed(growth=0.975, seed=1),
    "a refresh after every 7 steps": followed(40, seed=10, refresh=7),
    "published recipe": frozen(bias_correction=False),
    "frozen ratios": frozen(),
    "never refreshed": followed(40, refresh="never", bias_correction=False),
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
        dense = sum(simulated.dense_steps)
        assert result["kinds"] == [dense, problem.steps - dense] and result["bytes"] > 0
        for l, size in enumerate(np.prod(s) for s in SHAPES):
            close(result["x"][l], simulated.x[l], problem.lr_at(problem.steps - 1))
            if size:
                kept = {"exp_avg": simulated.m[l]}
                if problem.options.get("trust_ratio") == "frozen":
                    kept["exp_avg_sq_fresh"] = simulated.vfresh[l]
                assert kept.keys() == result["state"][l].keys() & {"exp_avg", "exp_avg_sq_fresh"}
                for key, expected in kept.items():
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
    problem, o = frozen(), FROZEN
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
    """Both clips of c and ratios between them that move on, products X below 0, tensors without a norm, refreshes."""
    dense = FOLLOWED["freeze_step"]
    bounds = FOLLOWED["min_coeff"], FOLLOWED["max_coeff"]
    for name, clips in (("shrinking gradients", bounds), ("weights that start at zero", (1.2,))):
        c: list[list[float]] = []
        simulated = RUNS[name].simulate(world, lambda o, t, c=c: c.append(list(o.coeff)))  # type: ignore[misc]
        now = np.array(c[dense:])
        assert all((now == clip).any() for clip in clips)
        if RUNS[name].blank:
            assert (now[0, list(RUNS[name].blank)] == 1.0).all(), "the first compressed step finds them at 0"
            assert all(simulated.seen[l] for l in RUNS[name].blank)
        else:
            between = [set(column[(column > bounds[0]) & (column < bounds[1])]) for column in now[1:].T]
            assert max(len(values) for values in between) > 6
    assert any(X < 0 for run in RUNS.values() for seen in run.simulate(world).seen for _, X in seen)
    kinds = {name: "".join("cd"[d] for d in RUNS[name].simulate(world).dense_steps[dense:]) for name in RUNS}
    assert kinds["defaults"] == 2 * (15 * "c" + "d") + 8 * "c"
    assert kinds["a refresh after every 7 steps"] == 4 * (7 * "c" + "d")
    for name in ("never refreshed", "frozen ratios"):
        assert set(kinds[name]) == {"c"}


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
    options = {
        "lr": 0.02,
        "freeze_step": 4,
        "max_coeff": 1.0,
        "min_coeff": 1.0,
        "block_size": 32,
        "trust_ratio": "frozen",
    }
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
    options = {
        "freeze_step": 3,
        "factor_threshold": 1.0,
        "bias_correction": False,
        "block_size": 32,
        "trust_ratio": "frozen",
    }
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


# ----- ratios that follow both norms ----------------------------------------------------------------------------------------------


MEASURED = ("signal", "energy", "measurements")
DECAY = 0.1


def growing_worker(group: Any, rank: int, world: int, trust_ratio: str) -> list[list[dict[str, Any]]]:
    """Small weights under shrinking gradients that point the same way: what decides the coefficient, per step and tensor."""
    params = [torch.nn.Parameter(torch.full((70,), 0.02, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = OnebitLamb(
        params,
        **{"lr": 0.1, "freeze_step": 3, "max_coeff": 0.15, "trust_ratio": trust_ratio},
        **{"refresh": "never", "block_size": 32, "process_group": group, "weight_decay": DECAY},
    )
    draws = torch.Generator().manual_seed(rank)
    seen = []
    for t in range(64):
        for p in params:
            p.grad = ((-1.0 - 0.2 * torch.randn(p.shape, generator=draws)) / (1 + 0.02 * t)).to(p.dtype)
        before = whole_state(optimizer)["state"]
        optimizer.step()
        state = optimizer.state_dict()
        books, used = state["onebit"], optimizer.get_lamb_coeffs()
        seen.append(
            [
                {
                    "norm": float(state["state"][i].get("master", p).detach().double().norm()),
                    "used": used[f"parameter {i}"],
                    **{key: books[key][i] for key in (*MEASURED, "coefficient", "coeff_average", "last_factor")},
                    **own_products(p, before.get(i, {})),
                }
                for i, p in enumerate(params)
            ]
        )
    return seen[2:]


def own_products(p: torch.nn.Parameter, state: dict[str, torch.Tensor]) -> dict[str, float]:
    """What this rank measures of a parameter, from its state before the step."""
    if "preconditioned_momentum" not in state or p.grad is None:
        return {"E": 0.0, "X": 0.0}
    h = p.grad.double() * state["reciprocal_denominator"].double()
    return {"E": float(h.square().sum()), "X": float((h * state["preconditioned_momentum"].double()).sum())}


def test_the_coefficient_follows_both_norms() -> None:
    """Of the fp32 master weights where parameters are kept in 16 bits; of all ranks' gradients, in the steps that measure them."""
    results = run_world(growing_worker, 2, "followed")
    for i in range(2):
        mine, other = ([step[i] for step in seen] for seen in results)
        assert mine[0]["coefficient"] == mine[0]["used"], (
            "that of the last dense step, until something has been measured"
        )
        assert mine[0]["norm"] < 0.5 * mine[-1]["norm"], "the weights of this run grow"
        assert mine[-1]["E"] < 0.5 * mine[1]["E"], "and its gradients shrink"
        count, free, energy, signal, before = 0, 0, 0.0, 0.0, mine[0]["coefficient"]
        for k in range(1, len(mine)):
            step = mine[k]
            assert step["used"] == before, "what was known before the step"
            if k <= 10 or k % 2 == 0:
                count += 1
                weight = max(1 / count, 2 / 50)
                energy += weight * ((step["E"] + other[k]["E"]) / 2**2 - energy)
                signal += weight * ((step["X"] + other[k]["X"]) / 2 - signal)
                square = (1.8 * signal + 0.1 * (energy + signal / 2)) / 1.9 / (1 - 0.9 ** (k + 3)) ** 2
                length = (square + (DECAY * step["norm"]) ** 2) ** 0.5
                before = min(max(step["norm"] / length, 0.01), 0.15)
                free += 0.01 < before < 0.15
            assert step["coefficient"] == pytest.approx(before, rel=1e-6)
            before = step["coefficient"]
            assert [step[key] for key in MEASURED] == pytest.approx([signal, energy, count], rel=1e-6)
            assert [other[k][key] for key in (*MEASURED, "coefficient")] == [
                step[key] for key in (*MEASURED, "coefficient")
            ]
        assert signal > 0 and free >= 10 and mine[-1]["used"] == 0.15


def noisy_worker(group: Any, rank: int, world: int, signal: float) -> tuple[float, float, float]:
    """Weights that stand still under a steady gradient in the noise of each rank: c, ``||x||/||u||`` undisturbed and as exchanged."""
    draw = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4096, generator=draw))
    steady = signal * torch.randn(4096, generator=draw)
    optimizer = OnebitLamb([p], lr=0.0, freeze_step=40, min_coeff=1e-9, max_coeff=1e9, process_group=group)
    draws = [torch.Generator().manual_seed(1 + i) for i in range(world)]
    momentum = torch.zeros(4096, dtype=torch.float64)
    for _ in range(400):
        gradients = [steady + torch.randn(4096, generator=draw) for draw in draws]
        momentum = 0.9 * momentum + 0.1 * torch.stack(gradients).double().mean(0)
        p.grad = gradients[rank]
        optimizer.step()
    state = whole_state(optimizer)["state"][0]
    exchanged, r = state["preconditioned_momentum"].double(), state["reciprocal_denominator"].double()
    norm = float(p.detach().double().norm())
    return (
        optimizer.get_lamb_coeffs()["parameter 0"],
        norm / float((momentum * r).norm()),
        norm / float(exchanged.norm()),
    )


@pytest.mark.parametrize("signal", [0.0, 0.1, 0.3, 1.0, 3.0])
def test_compression_noise_does_not_enter_the_ratio(signal: float) -> None:
    """c is LAMB's ratio whether gradients are noise or not, where that of the exchanged step would be up to 1.7 times too small."""
    for c, undisturbed, exchanged in run_world(noisy_worker, 4, signal):
        assert c == pytest.approx(undisturbed, rel=0.05)
        assert exchanged < (0.95 if signal > 1 else 0.9) * undisturbed
        if 0 < signal < 1:
            assert exchanged < 0.6 * undisturbed


def spread_worker(group: Any, rank: int, world: int) -> float:
    """One global batch of four gradients that have nothing in common, ranks take equal parts of it."""
    p = torch.nn.Parameter(torch.full((64,), 2.0))
    optimizer = OnebitLamb([p], freeze_step=1, block_size=32, process_group=group)
    parts = 4 // world
    for dense in (True, False):
        p.grad = torch.ones(64)
        if not dense:
            p.grad = torch.zeros(64)
            p.grad[16 * parts * rank : 16 * parts * (rank + 1)] = 1.0 / parts
        optimizer.step()
    return float(optimizer.state_dict()["onebit"]["energy"][0])


def test_what_is_measured_does_not_depend_on_who_shares_the_batch() -> None:
    """Else a run resumed in another world would take its ratios for grown or shrunk."""
    two, four = run_world(spread_worker, 2)[0], run_world(spread_worker, 4)[0]
    assert two == pytest.approx(four, rel=1e-6) and two > 0


def test_a_frozen_coefficient_stays_the_average_times_its_correction() -> None:
    for seen in run_world(growing_worker, 2, "frozen"):
        for tensor in zip(*seen[1:], strict=True):
            for step in tensor:
                assert [step[key] for key in MEASURED] == [0.0] * 3
                assert step["used"] == pytest.approx(step["coeff_average"] * step["last_factor"], rel=1e-14)
                assert step["coeff_average"] == tensor[0]["coeff_average"]


def tracked(**options: Any) -> tuple[list[torch.nn.Parameter], Any]:
    params = [torch.nn.Parameter(torch.full((40,), 0.5)) for _ in range(2)]
    return params, OnebitLamb(params, lr=0.01, block_size=32, **{"force_compression": True, **options})


def stepped(params: list[torch.nn.Parameter], optimizer: Any, *, only: int | None = None, scale: float = 1.0) -> Any:
    """One step, of the parameter ``only`` or of all; how often each has been measured."""
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, scale) if only in (None, i) else None
    optimizer.step()
    books = optimizer.state_dict()["onebit"]
    assert [k > 0 for k in books["measurements"]] == [e > 0 for e in books["energy"]]
    return books["measurements"]


def test_a_parameter_that_sits_a_step_out_is_measured_when_it_comes_back() -> None:
    params, optimizer = tracked(freeze_step=2)
    for _ in range(2):
        assert stepped(params, optimizer) == [0, 0]
    assert stepped(params, optimizer, only=0) == [1, 0]
    coefficient = optimizer.get_lamb_coeffs()["parameter 1"]
    with torch.no_grad():
        params[1].mul_(2)
    assert stepped(params, optimizer, only=0) == [2, 0]
    assert optimizer.get_lamb_coeffs()["parameter 1"] == coefficient
    assert stepped(params, optimizer) == [3, 1]
    stepped(params, optimizer)
    c = optimizer.get_lamb_coeffs()
    assert c["parameter 1"] > 1.3 * c["parameter 0"], "weights twice as large"


def test_a_thaw_forgets_what_was_measured() -> None:
    params, optimizer = tracked(refresh="never")
    stepped(params, optimizer)
    optimizer.freeze()
    for _ in range(25):
        assert all(stepped(params, optimizer))
    assert optimizer.state_dict()["onebit"]["measurements"] == [10 + 7] * 2
    optimizer.thaw()
    books = optimizer.state_dict()["onebit"]
    assert [books[name] for name in MEASURED] == [[0.0, 0.0]] * 3 and books["ratio_steps"] == 0
    stepped(params, optimizer)
    optimizer.freeze()
    assert stepped(params, optimizer) == [1, 1]


def test_a_refresh_leaves_ratios_as_they_were_and_measures_nothing() -> None:
    params, optimizer = tracked(refresh=20)
    stepped(params, optimizer)
    optimizer.freeze()
    for _ in range(20):
        before = stepped(params, optimizer, scale=1 + 0.1 * optimizer.steps)
    ratios = optimizer.state_dict()["onebit"]["coefficient"]
    assert optimizer.next_step_is_dense and before == [10 + 5] * 2
    assert stepped(params, optimizer) == before
    assert list(optimizer.get_lamb_coeffs().values()) == ratios == optimizer.state_dict()["onebit"]["coefficient"]
    stepped(params, optimizer)
    assert stepped(params, optimizer) == [10 + 6] * 2


@pytest.mark.parametrize("trust_ratio", ["followed", "frozen"])
def test_a_dense_group_that_joins_after_the_freeze_has_a_ratio_of_its_own(trust_ratio: str) -> None:
    """Also in a refresh, and in a run that goes on from its checkpoint."""
    rule: dict[str, Any] = {"refresh": 4} if trust_ratio == "followed" else {}
    params, optimizer = tracked(trust_ratio=trust_ratio, **rule)
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
    other = tracked(trust_ratio=trust_ratio, **rule)[1]
    other.add_param_group({"params": [torch.nn.Parameter(torch.zeros(40))], "compress": False})
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.get_lamb_coeffs() == coeffs


def test_a_refresh_renews_the_denominators() -> None:
    params, optimizer = tracked(freeze_step=2, refresh=30, betas=(0.9, 0.9))
    for _ in range(2 + 30 + 1):
        stepped(params, optimizer, scale=0.1 if optimizer.steps >= 2 else 1.0)
    r = whole_state(optimizer)["state"][0]["reciprocal_denominator"]
    # two updates before, and the gradient counts as one more
    v = 0.9 * (1 - 0.9**2) + 0.1 * 0.01
    assert float(r[0]) == pytest.approx(((1 - 0.9**3) / v) ** 0.5, rel=1e-4)


def test_a_checkpoint_without_measurements_takes_them_at_the_next_compressed_step() -> None:
    params, optimizer = tracked(freeze_step=2)
    for _ in range(4):
        stepped(params, optimizer)
    state = optimizer.state_dict()
    for name in (*MEASURED, "ratio_steps"):
        del state["onebit"][name]
    optimizer.load_state_dict(state)
    assert stepped(params, optimizer) == [1, 1]


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
    """Bit for bit: in the warm-up, among the first measurements and between the later ones, and around a refresh."""
    problem = followed(44, max_coeff=30.0, min_coeff=0.0)
    problem = dataclasses.replace(problem, cold=0, shapes=SMALL)
    for equals, used in run_world(resumed_everywhere, 2, problem):
        assert equals == [True] * 43
        assert len(set(used[9:19])) == 10 and len(set(used[24:39])) == 8, (
            "ratios move in this run when they are measured"
        )
        assert used[22] == used[23], "not in its refresh"


def test_a_rank_that_goes_on_alone_measures_anew() -> None:
    """It steps by plain LAMB, with second moments that learn: measures in units of the old ones would be wrong beside them."""
    params, optimizer = tracked(freeze_step=2)
    for _ in range(4):
        stepped(params, optimizer)
    _, alone = tracked(freeze_step=2, force_compression=False)
    alone.load_state_dict(optimizer.state_dict())
    assert all(alone.state_dict()["onebit"]["energy"])
    assert stepped(alone.param_groups[0]["params"], alone) == [0, 0]


def test_clipped_gradients_are_measured_as_they_enter_the_exchange() -> None:
    seen = []
    for limit in (None, 1e-3):
        params, optimizer = tracked(freeze_step=2, max_grad_norm=limit, denominator_floor=0.0)
        for _ in range(3):
            stepped(params, optimizer)
        books = whole_state(optimizer)
        seen.append([books["onebit"][name][0] for name in ("energy", "signal")])
        if limit is not None:
            clipped = limit / 80**0.5  # of each element: 80 ones
            r = books["state"][0]["reciprocal_denominator"]
            assert seen[1][0] == pytest.approx(float((clipped * r.double()).square().sum()), rel=1e-3)
    assert seen[0] == pytest.approx(seen[1], rel=1e-3), "in units of the denominators, which were clipped too"


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
        assert not late[:4].any() and late[4:].min() > 0 and late[4:].max() < 1.0
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


def frozen_backbone(group: Any, rank: int, world: int, trust_ratio: str) -> torch.Tensor:
    backbone = torch.nn.Parameter(torch.ones(40), requires_grad=False)
    head = torch.nn.Parameter(torch.ones(40))
    groups: Any = [{"params": [backbone]}, {"params": [head], "compress": False}]
    optimizer = OnebitLamb(groups, lr=0.01, freeze_step=2, trust_ratio=trust_ratio, process_group=group)
    for _ in range(6):
        head.grad = torch.full((40,), rank + 1.0)
        optimizer.step()
    assert optimizer.ledger.compressed_steps == 4
    return head.detach()


@pytest.mark.parametrize("trust_ratio", ["followed", "frozen"])
def test_a_run_in_which_no_compressed_parameter_is_trainable_is_legal(trust_ratio: str) -> None:
    first, second = run_world(frozen_backbone, 2, trust_ratio)
    assert equal(first, second) and first.max() < 1


# ----- options -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_coeff": 0.0}, ValueError, "max_coeff=0.0"),
        ({"min_coeff": 11.0}, ValueError, "min_coeff=11.0 .* <= 10"),
        ({"min_coeff": -0.1}, ValueError, "min_coeff=-0.1"),
        ({"coeff_beta": 1.0}, ValueError, "coeff_beta=1.0 .* < 1"),
        ({"factor_max": 0}, ValueError, "factor_max=0"),
        (
            {"factor_max": 2.0},
            ValueError,
            "factor_max=2.0 has no effect with trust_ratio='followed'; .* trust_ratio='frozen'",
        ),
        ({"coeff_beta": 0.8}, ValueError, "coeff_beta=0.8 has no effect"),
        ({"factor_min": 0.7}, ValueError, "factor_min=0.7 has no effect"),
        ({"factor_threshold": 0.2}, ValueError, "factor_threshold=0.2 has no effect"),
        ({"factor_min": 5.0}, ValueError, "factor_min=5.0 .* <= 4"),
        ({"factor_threshold": -1.0}, ValueError, "factor_threshold=-1.0"),
        ({"factor_threshold": "0.1"}, TypeError, "factor_threshold='0.1'"),
        ({"trust_ratio": "live"}, ValueError, "trust_ratio='live' is unknown; choose one of 'followed', 'frozen'"),
        ({"freeze_step": 0}, ValueError, "freeze_step=0"),
        (
            {"trust_ratio": "frozen", "refresh": "auto"},
            ValueError,
            "refresh='auto' has no effect with trust_ratio='frozen'.*leave it out",
        ),
        ({"refresh": 0}, ValueError, "refresh=0"),
        ({"refresh": "often"}, ValueError, "refresh='often'"),
        ({"bias_correction": 1}, TypeError, "bias_correction=1"),
    ],
)
def test_bad_options_are_named_with_their_value(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        OnebitLamb([torch.nn.Parameter(torch.ones(3))], **options)
