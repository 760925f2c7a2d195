"""The oracle itself against independent truths: torch's AdamW, closed forms, published schedules."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Adam, BinSGDM, Exchange, Lamb, SyncPolicy, VariancePolicy, ZeroOneAdam, blocks, compress
from oracle.blocks import node_means
from oracle.common import floored

SHAPES = [(6, 5), (0,), (1,), (70,)]


def start(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in SHAPES]


def gradients(t: int, n: int, seed: int = 1) -> list[list[np.ndarray]]:
    return [[np.random.default_rng([seed, t, i, l]).standard_normal(s) for l, s in enumerate(SHAPES)] for i in range(n)]


def adamw_of(x: list[np.ndarray], **options: float) -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    params = [torch.nn.Parameter(torch.from_numpy(a.copy())) for a in x]
    return params, torch.optim.AdamW(params, **options)


# ----- blocks and the exchange --------------------------------------------------------------------------------------------------


def test_blocks_cover_a_tensor_once_and_only_the_last_is_short() -> None:
    assert blocks(0, 32) == []
    assert blocks(7, 32) == [slice(0, 7)]
    assert blocks(64, 32) == [slice(0, 32), slice(32, 64)]
    assert blocks(65, 32) == [slice(0, 32), slice(32, 64), slice(64, 65)]


def test_compressor_keeps_the_root_mean_square_of_each_block_and_every_sign_bit() -> None:
    c = np.array([3.0, -4.0, 0.0, -0.0, 2.0])
    out = compress(c, 4)
    assert np.allclose(out, [2.5, -2.5, 2.5, -2.5, 2.0])
    assert not compress(np.zeros(5), 4).any()


@given(
    n=st.integers(1, 4),
    size=st.integers(0, 40),
    steps=st.integers(1, 6),
    block_size=st.sampled_from([1, 7, 32]),
    seed=st.integers(0, 9),
)
def test_exchange_telescopes(n: int, size: int, steps: int, block_size: int, seed: int) -> None:
    """What came out, plus what is still held back, is the mean of what went in."""
    rng = np.random.default_rng(seed)
    exchange = Exchange([size], n, block_size)
    put_in, came_out = np.zeros(size), np.zeros(size)
    for _ in range(steps):
        c = [rng.standard_normal(size) for _ in range(n)]
        put_in += np.mean(c, axis=0)
        came_out += exchange(0, c)
    held_back = np.mean([e[0] for e in exchange.e], axis=0) + exchange.d[0]
    assert np.allclose(came_out + held_back, put_in, atol=1e-12)


def test_hierarchical_exchange_is_the_flat_one_on_node_means() -> None:
    flat, nodes = Exchange([50], 2, 16), Exchange([50], 4, 16, ranks_per_node=2)
    rng = np.random.default_rng(0)
    for _ in range(3):
        c = [rng.standard_normal(50) for _ in range(4)]
        assert np.array_equal(nodes(0, c), flat(0, [(c[0] + c[1]) / 2, (c[2] + c[3]) / 2]))
    assert [m.tolist() for m in node_means([np.array([1.0]), np.array([3.0])], 2)] == [[2.0]]


def test_margin_is_the_closest_call() -> None:
    exchange = Exchange([2], 1, 32)
    exchange(0, [np.array([1e-5, 1.0])])
    assert exchange.margin == pytest.approx(1e-5 / np.sqrt(0.5), rel=1e-3)


@pytest.mark.parametrize(
    ("v", "phi", "expected"),
    [
        ([0.0, 0.0], 0.01, [0.0, 0.0]),
        ([0.0, 2.0, 4.0], 0.01, [3.0, 2.0, 4.0]),
        ([1e-12, 2.0], 0.1, [0.01 * (1.0 + 5e-13), 2.0]),
        ([1e-12, 2.0], 0.0, [1e-12, 2.0]),
    ],
)
def test_denominator_floor(v: list[float], phi: float, expected: list[float]) -> None:
    assert np.allclose(floored(np.array(v), phi), expected, rtol=1e-12)


# ----- Adam ----------------------------------------------------------------------------------------------------------------------


def test_adam_warmup_is_torch_adamw_on_averaged_gradients() -> None:
    x = start()
    ours = Adam(x, 3, lr=0.01, wd=0.1)
    params, adamw = adamw_of(x, lr=0.01, weight_decay=0.1)
    for t in range(5):
        g = gradients(t, 3)
        if t == 2:  # a tensor that nobody has a gradient for is left alone by both
            g = [[*worker[:3], None] for worker in g]
        ours.step(g)
        for l, p in enumerate(params):
            p.grad = None if g[0][l] is None else torch.from_numpy(np.mean([g[i][l] for i in range(3)], axis=0))
        adamw.step()
    for a, p in zip(ours.x, params, strict=True):
        assert np.allclose(a, p.detach().numpy().ravel(), rtol=1e-12, atol=1e-14)


def warmed_up(preconditioned: bool) -> Adam:
    """After one dense step with m = (1, -2) and denominators (1, 2)."""
    settings = {"lr": 0.1, "b1": 0.5, "b2": 0.75, "eps": 0.0, "wd": 0.5, "T_w": 1, "bias_correction": False, "phi": 0.0}
    ours = Adam([np.array([1.0, 1.0])], 2, preconditioned=preconditioned, **settings)
    ours.step([[np.array([2.0, -4.0])], [np.array([2.0, -4.0])]])
    assert ours.m[0].tolist() == [1.0, -2.0] and ours.v[0].tolist() == [1.0, 4.0]
    return ours


def test_adam_first_compressed_step_by_hand() -> None:
    ours = warmed_up(preconditioned=False)
    x = ours.x[0].copy()
    ours.step([[np.array([1.0, 0.0])], [np.array([-1.0, 0.0])]])
    # y_0 = (1, -1), s = 1 ; y_1 = (0, -1), s = sqrt(1/2), the sign of 0 is +
    s = np.sqrt(0.5)
    z = np.array([(1 + s) / 2, -(1 + s) / 2])
    assert np.allclose(ours.m[0], z) and np.allclose(ours.exchange.e[0][0], 0)
    assert np.allclose(ours.exchange.e[1][0], [-s, -1 + s])
    assert np.allclose(ours.x[0], x - 0.1 * 0.5 * x - 0.1 * ours.m[0] / np.array([1.0, 2.0]))


def test_adam_first_preconditioned_step_by_hand() -> None:
    ours = warmed_up(preconditioned=True)
    x = ours.x[0].copy()
    ours.step([[np.array([1.0, 0.0])], [np.array([-1.0, 0.0])]])
    # u = m/D = (1, -1) ; y_0 = (1, -1/2), s_0 = sqrt(5/8) ; y_1 = (0, -1/2), s_1 = sqrt(1/8)
    s = np.sqrt([5 / 8, 1 / 8])
    u = np.array([s.sum() / 2, -s.sum() / 2])
    assert np.allclose(ours.m[0], u * [1.0, 2.0])
    assert np.allclose(ours.exchange.e[0][0], [1 - s[0], -0.5 + s[0]])
    assert np.allclose(ours.exchange.e[1][0], [-s[1], -0.5 + s[1]])
    assert np.allclose(ours.x[0], x - 0.1 * 0.5 * x - 0.1 * u)


def test_adam_skips_everything_when_one_worker_is_not_finite() -> None:
    ours = Adam(start(), 2, T_w=1)
    for t in range(3):
        ours.step(gradients(t, 2))
    before = [a.copy() for a in (*ours.x, *ours.m, *ours.exchange.d, *ours.exchange.e[0])]
    g = gradients(9, 2)
    g[1][3][5] = np.inf
    ours.step(g)
    assert ours.skipped == 1 and ours.steps == 3
    for a, b in zip(before, (*ours.x, *ours.m, *ours.exchange.d, *ours.exchange.e[0]), strict=True):
        assert np.array_equal(a, b)


def test_adam_clipping_makes_the_step_independent_of_the_gradient_scale() -> None:
    runs = [Adam(start(), 2, T_w=2, max_norm=0.5) for _ in range(2)]
    for t in range(5):
        for factor, run in zip((1.0, 1000.0), runs, strict=True):
            run.step([[factor * a for a in worker] for worker in gradients(t, 2)])
    for a, b in zip(runs[0].x, runs[1].x, strict=True):
        assert np.allclose(a, b, atol=1e-7)


# ----- LAMB ----------------------------------------------------------------------------------------------------------------------


def test_lamb_warmup_scales_adamw_updates_by_the_trust_ratio() -> None:
    x = start()
    ours = Lamb(x, 2, lr=0.01, wd=0.1, min_coeff=0.01, max_coeff=3.0)
    for t in range(4):
        before = [a.copy() for a in ours.x]
        g = gradients(t, 2)
        # an independent u: the AdamW update of the same moments without decay, divided by lr, plus wd*x
        params, adamw = adamw_of(before, lr=1.0, weight_decay=0.0)
        for l, p in enumerate(params):
            adamw.state[p] = {
                "step": torch.tensor(float(t)),
                "exp_avg": torch.from_numpy(ours.m[l].copy()),
                "exp_avg_sq": torch.from_numpy(ours.v[l].copy()),
            }
            p.grad = torch.from_numpy(((g[0][l] + g[1][l]) / 2).ravel())
        adamw.step()
        ours.step(g)
        for l, p in enumerate(params):
            u = before[l] - p.detach().numpy() + 0.1 * before[l]
            c = 1.0
            if u.size:
                c = min(3.0, max(0.01, np.linalg.norm(before[l]) / np.linalg.norm(u)))
            assert np.allclose(ours.x[l], before[l] - 0.01 * c * u, rtol=1e-10)
            assert ours.coeff[l] == pytest.approx(c)
    assert ours.c_avg[1] == 0.0 and ours.c_avg[0] > 0  # an empty tensor never has a ratio


def test_lamb_factor_moves_slowly_within_its_bounds_and_the_blend_pulls_it_to_one() -> None:
    coefficients = {}
    for wd in (0.0, 1.0):
        ours = Lamb(start(), 2, lr=0.01, b2=0.9, wd=wd, T_w=3)
        last = [1.0] * len(SHAPES)
        for t in range(12):
            scale = 1.0 if t < 3 else 0.01  # smaller gradients after the freeze: D/Dfresh > 1
            ours.step([[scale * a for a in worker] for worker in gradients(t, 2)])
            for l in range(len(SHAPES)):
                assert 0.9 * last[l] - 1e-12 <= ours.r[l] <= 1.1 * last[l] + 1e-12 and 0.5 <= ours.r[l] <= 4.0
            last = list(ours.r)
        coefficients[wd] = last
    assert coefficients[0.0][3] > 1.0
    assert abs(coefficients[1.0][3] - 1) < abs(coefficients[0.0][3] - 1)


def test_lamb_survives_a_tensor_without_momentum() -> None:
    ours = Lamb([np.ones(4), np.zeros(3)], 2, wd=0.1, T_w=2)
    for _ in range(5):
        ours.step([[np.zeros(4), np.zeros(3)] for _ in range(2)])
    assert all(np.isfinite(a).all() for a in ours.x)
    assert (ours.x[0] < 1).all() and not ours.x[1].any()


# ----- 0/1 Adam ------------------------------------------------------------------------------------------------------------------


def test_variance_policy_refreshes_in_doubling_gaps() -> None:
    policy, times = VariancePolicy(scaler=16), []
    for t in range(1, 61):
        if policy(t):
            policy.refreshed(t)
            times.append(t)
    assert times == [*range(1, 18), *range(19, 50, 2), 53, 57]


def test_sync_policy_counts_steps_since_the_last_synchronisation() -> None:
    policy = SyncPolicy(10, scaler=4, clipper=4)
    assert [t for t in range(1, 36) if policy(t, 1.0)] == [*range(1, 15), 16, 18, 22, 26, 30, 34]


def test_sync_policy_by_learning_rate_doubles_the_gap_with_every_halving() -> None:
    policy = SyncPolicy(2, policy="learning_rate", clipper=4)
    lrs = [1.0, 1.0, 0.9, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.01, 0.01, 0.01, 0.01]
    assert [t for t, lr in enumerate(lrs, 1) if policy(t, lr)] == [1, 2, 3, 5, 9, 13]


def test_published_schedule() -> None:
    """152,511 steps, variance freeze at 12,500: published are 153 dense, 74,200 one-bit and 78,158 silent steps; ours within 1 %."""
    total, frozen = 152_511, 12_500
    T_v, T_u = VariancePolicy(16), SyncPolicy(frozen, 32_678, 16)
    dense = one_bit = silent = 0
    for t in range(1, total + 1):
        refresh, sync = T_v(t) and t <= frozen, T_u(t, 1.0)
        if refresh:
            T_v.refreshed(t)
        dense += refresh
        one_bit += sync and not refresh
        silent += not sync
    assert dense + one_bit + silent == total
    for ours, published in ((dense, 153), (one_bit, 74_200), (silent, 78_158)):
        assert ours == pytest.approx(published, rel=0.01)


def test_zero_one_adam_refreshing_always_is_adam() -> None:
    zero_one = ZeroOneAdam(start(), 2, lr=0.01, wd=0.1, var_freeze_step=100)
    adam = Adam(start(), 2, lr=0.01, wd=0.1)
    for t in range(10):
        zero_one.step(gradients(t, 2))
        adam.step(gradients(t, 2))
    assert zero_one.kinds == ["refresh"] * 10
    for a, b in zip(zero_one.x, adam.x, strict=True):
        assert np.allclose(a, b, atol=1e-14)


def test_zero_one_adam_workers_part_in_local_steps_and_meet_at_synchronisations() -> None:
    ours = ZeroOneAdam(
        start(),
        3,
        lr=0.01,
        wd=0.1,
        var_freeze_step=4,
        var_update_scaler=1,
        local_step_scaler=3,
        local_step_clipper=4,
        refresh="never",
    )
    for t in range(24):
        ours.step(gradients(t, 3))
        equal = all(np.array_equal(ours.xs[0][3], ours.xs[i][3]) for i in range(3))
        assert equal == (ours.kinds[-1] != "local")
    # refreshes at 1, 2, 4 (gaps 1, 2); then gaps 1 for three steps, 2 for three, then 4
    assert ours.kinds[:4] == ["refresh", "refresh", "compressed", "refresh"]
    assert [t + 1 for t, kind in enumerate(ours.kinds) if kind == "sync"] == [5, 6, 7, 9, 13, 17, 21]


def test_zero_one_adam_telescopes_in_parameter_space() -> None:
    """Without decay the weights moved by what was put into the exchanges, less what residuals still hold back, over a fixed denominator."""
    ours = ZeroOneAdam(
        *(start(), 2),
        **dict(
            lr=0.01, var_freeze_step=2, local_step_scaler=2, local_step_clipper=4, preconditioned=False, refresh="never"
        ),
        bias_correction=False,  # (lr_t is constant)
    )
    for t in range(2):
        ours.step(gradients(t, 2))
    x, put_in, exchange = ours.x[3].copy(), np.zeros(70), ours.exchange

    def recording(l: int, c: list[np.ndarray]) -> np.ndarray:
        nonlocal put_in
        put_in = put_in + np.mean(c, axis=0) if l == 3 else put_in
        return exchange(l, c)

    ours.exchange = recording  # type: ignore[assignment]
    for t in range(2, 20):
        ours.step(gradients(t, 2))
    assert ours.kinds.count("local") > 5 and ours.kinds.count("sync") > 5
    while ours.kinds[-1] != "sync":
        ours.step(gradients(len(ours.kinds), 2))
    held_back = np.mean([e[3] for e in exchange.e], axis=0) + exchange.d[3]
    denominator = np.sqrt(floored(ours.v[3], ours.phi)) + ours.eps
    assert np.allclose((x - ours.x[3]) * denominator, ours.lr * (put_in - held_back), atol=1e-12)


def test_zero_one_adam_with_lr_zero_makes_dense_rounds_that_leave_the_variance_alone() -> None:
    ours = ZeroOneAdam(start(), 2, var_freeze_step=3, var_update_scaler=1, refresh="never", local_step_scaler=2)
    for t in range(8):
        ours.lr = 0.0 if t in (2, 4) else 0.01
        v = [a.copy() for a in ours.v]
        ours.step(gradients(t, 2))
        if t in (2, 4):
            assert ours.kinds[-1] == "dense"
            assert all(np.array_equal(a, b) for a, b in zip(v, ours.v, strict=True))
            assert all(np.array_equal(a, b) for a, b in zip(ours.ms[0], ours.ms[1], strict=True))
    assert all(np.isfinite(a).all() for a in ours.x)


# ----- BinSGDM -------------------------------------------------------------------------------------------------------------------


def draws(t: int, who: int | str, l: int) -> np.ndarray:
    size = int(np.prod(SHAPES[l]))
    return np.random.default_rng([7, t, 99 if who == "server" else int(who), l]).uniform(-1, 1, size)


def test_binsgdm_update_is_lr_times_an_unbiased_estimate_of_the_mean_of_m_over_a() -> None:
    n, steps, lr = 4, 400, 0.5
    total, expected = np.zeros(70), np.zeros(70)
    ours = BinSGDM([np.zeros(70)], n, uniform=lambda t, i, l: draws(t, i, 3), lr=lr, ba=0.7, server="random")
    for t in range(steps):
        before = ours.x[0].copy()
        ours.step([[worker[3]] for worker in gradients(t, n)])
        total += (before - ours.x[0]) / lr
        expected += np.mean([ours.m[i][0] / ours.a[i][0] for i in range(n)], axis=0)
    assert np.std(expected) > 1
    # each step adds a variance of at most 1
    assert np.all(np.abs(total - expected) < 5 * np.sqrt(steps))
    assert abs(np.mean(total - expected)) < 5 * np.sqrt(steps / 70)


@pytest.mark.parametrize("server", ["feedback", "random"])
def test_binsgdm_moves_every_seen_coordinate_by_lr_and_no_other(server: str) -> None:
    ours = BinSGDM(start(), 3, uniform=draws, lr=0.5, server=server)
    x = [a.copy() for a in ours.x]
    g = gradients(0, 3)
    for worker in g:
        worker[3][:10] = 0.0
    ours.step(g)
    assert np.allclose(np.abs(ours.x[0] - x[0]), 0.5)
    assert np.array_equal(ours.x[3][:10], x[3][:10]) and np.allclose(np.abs(ours.x[3] - x[3])[10:], 0.5)


def test_binsgdm_coordinate_first_seen_between_merges_waits_for_the_next() -> None:
    ours = BinSGDM([np.zeros(2)], 2, uniform=lambda t, i, l: np.zeros(2), lr=1.0)
    moved = []
    for t in range(1, 9):
        g = np.array([1.0, 0.0 if t < 5 else 1.0])
        before = ours.x[0].copy()
        ours.step([[g], [g]])
        moved.append(ours.x[0][1] != before[1])
    assert moved == [False] * 7 + [True]  # first gradient at t = 5, merged at t = 8
