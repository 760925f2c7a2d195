"""Counter-based randomness: one definition for ever, uniform, independent but between steps, over which it can be even."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_onebit.kernels import counter_rng
from lightning_onebit.kernels.counter_rng import SERVER_STREAM, WORKER_STREAM, DrawKey, draw_key, uniform

CPU = torch.device("cpu")
U32, U64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def draw(key: DrawKey, first_block: int, blocks: int, block_size: int) -> torch.Tensor:
    return counter_rng.draw_hash(key, first_block, blocks, block_size, CPU)


def draws(
    step: int = 1,
    rank: int = 0,
    stream: int = WORKER_STREAM,
    seed: int = 0,
    blocks: int = 64,
    stratified: bool = False,
    block_size: int = 2048,
) -> np.ndarray:
    """2048 uniform numbers per block."""
    return uniform(draw(draw_key(seed, step, rank, stream, stratified), 0, blocks, block_size)).numpy().ravel()


# ----- the definition, once more, in Python's integers ------------------------------------------------------------------------------


def mix32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & U32
    x ^= x >> 15
    x = x * 0x846CA68B & U32
    return x ^ x >> 16


def splitmix_key(*fields: int) -> tuple[int, int]:
    state = 0
    for field in fields:
        z = (state + field + 0x9E3779B97F4A7C15) & U64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & U64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & U64
        state = z ^ z >> 31
    return state & U32, state >> 32


def hash_of(key: DrawKey, block: int, element: int) -> int:
    return mix32((mix32(block & U32 ^ key[0]) + element * 0x9E3779B9 & U32) ^ key[1]) + key[2] & U32


def test_the_hash_never_changes() -> None:
    """Recorded values: another hash would change every run and every resume."""
    assert draw_key(0, 1, 0, WORKER_STREAM, stratified=False) == (4211568874, 4121392438, 0)
    assert draw_key(-5, 2**40, 63, SERVER_STREAM, stratified=False) == (2403453741, 738927892, 0)
    assert draw_key(7, 0, 2, SERVER_STREAM)[:2] == draw_key(7, 0, 2, SERVER_STREAM, stratified=False)[:2]
    assert [draw_key(7, t, 2, WORKER_STREAM)[2] for t in (1, 2**33 + 3)] == [0xC13FA9A9, 3 * 0xC13FA9A9 & U32]
    assert [draw_key(7, t, 2, SERVER_STREAM)[2] for t in (1, 2**33 + 3)] == [0x91E10DA5, 3 * 0x91E10DA5 & U32]
    key = draw_key(7, 3, 2, WORKER_STREAM, stratified=False)
    assert draw(key, 5, 1, 32)[0, :4].tolist() == [2776426294, 2148839614, 1026604528, 776369455]


@given(
    seed=st.integers(-(2**70), 2**70),
    step=st.integers(1, 2**40),
    rank=st.integers(0, 4095),
    stream=st.sampled_from([WORKER_STREAM, SERVER_STREAM]),
    block=st.integers(0, 2**34),
    size=st.sampled_from([32, 64, 96, 2048]),
    stratified=st.booleans(),
)
def test_the_draw_is_the_documented_one(
    seed: int, step: int, rank: int, stream: int, block: int, size: int, stratified: bool
) -> None:
    key = draw_key(seed, step, rank, stream, stratified)
    turn = {WORKER_STREAM: 0xC13FA9A9, SERVER_STREAM: 0x91E10DA5}[stream]
    if stratified:
        assert key == (*splitmix_key(seed, 0, rank, stream), step * turn & U32)
    else:
        assert key == (*splitmix_key(seed, step, rank, stream), 0)
    h = draw(key, block, 3, size)
    assert h.dtype == torch.int64 and h.shape == (3, size)
    for b, j in itertools.product(range(3), (0, 1, size // 2, size - 1)):
        assert int(h[b, j]) == hash_of(key, block + b, j)


def test_a_draw_depends_on_the_element_and_not_on_who_draws_it_with_which_others() -> None:
    key = draw_key(0, 1, 0, WORKER_STREAM)
    whole = draw(key, 10, 6, 64)
    assert torch.equal(whole, torch.cat([draw(key, 10, 2, 64), draw(key, 12, 1, 64), draw(key, 13, 3, 64)]))


# ----- uniform numbers ------------------------------------------------------------------------------------------------------------


def test_uniform_is_symmetric_exact_and_never_zero() -> None:
    h = torch.tensor([0, 511, 512, 2**31 - 1, 2**31, 2**32 - 1])
    ends = [-1 + 2.0**-23, -1 + 2.0**-23, -1 + 3 * 2.0**-23, -(2.0**-23), 2.0**-23, 1 - 2.0**-23]
    assert uniform(h).tolist() == ends and uniform(h).dtype == torch.float32
    mirrored = (2**32 - 1) - h
    assert torch.equal(uniform(mirrored), -uniform(h))


def chi_square(counts: np.ndarray, expected: float) -> float:
    """Standardised chi-square: about normal with mean 0 and deviation 1 for many cells."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("stream", [WORKER_STREAM, SERVER_STREAM])
def test_draws_are_uniform(stream: int, stratified: bool) -> None:
    """Chi-square over 1,024 cells and 1.3 million draws; so are the lowest bits that the numbers use, and every single bit.

    Stratified draws of one step: those of several are more even than chance.
    """
    if stratified:
        u = np.concatenate([draws(5, rank, stream, stratified=True) for rank in range(10)])
    else:
        u = np.concatenate([draws(step, rank, stream) for step in range(1, 6) for rank in range(2)])
    counts, _ = np.histogram(u, bins=1024, range=(-1, 1))
    assert abs(chi_square(counts, u.size / 1024)) < 4
    h = draw(draw_key(1, 1, 0, stream, stratified), 0, 512, 2048).numpy().ravel()
    low = np.bincount((h >> 9) & 1023, minlength=1024)
    assert abs(chi_square(low, h.size / 1024)) < 4
    for bit in range(32):
        share = ((h >> bit) & 1).mean()
        assert abs(share - 0.5) < 4.5 * 0.5 / np.sqrt(h.size), f"bit {bit}"


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard deviations of what independent streams give."""
    return float(np.corrcoef(a, b)[0, 1] * np.sqrt(a.size))


def test_streams_of_ranks_steps_seeds_and_sides_are_independent() -> None:
    """Correlation of the draws, of their signs, and of where two streams agree."""
    base = {"step": 5, "rank": 0, "stream": WORKER_STREAM, "seed": 0}
    names = [dict(base, rank=r) for r in (1, 2, 3, 63)]
    names += [dict(base, step=s) for s in (6, 7, 1000)]
    names += [dict(base, seed=s) for s in (1, -1, 2**32)]
    names += [dict(base, stream=SERVER_STREAM), dict(base, stream=SERVER_STREAM, rank=1)]
    # fields must not be interchangeable
    names += [dict(base, step=0, rank=5), dict(base, seed=5, step=0)]
    streams = [draws(**base)] + [draws(**n) for n in names]
    for (i, a), (j, b) in itertools.combinations(enumerate(streams), 2):
        assert abs(correlation(a, b)) < 4.5, f"streams {i} and {j}"
        assert abs(correlation(np.sign(a), np.sign(b))) < 4.5, f"signs of streams {i} and {j}"


def test_stratified_streams_of_ranks_seeds_and_sides_are_independent_at_every_step() -> None:
    base = {"rank": 0, "stream": WORKER_STREAM, "seed": 0}
    names = [base, *(dict(base, rank=r) for r in (1, 2, 63)), dict(base, seed=1), dict(base, stream=SERVER_STREAM)]
    for step in (1, 2, 1000):
        streams = [draws(step=step, stratified=True, **n) for n in names]
        for (i, a), (j, b) in itertools.combinations(enumerate(streams), 2):
            assert abs(correlation(a, b)) < 4.5, f"streams {i} and {j} at step {step}"


def test_stratified_draws_of_successive_steps_fill_the_interval_evenly_and_pairs_the_square() -> None:
    """Of any T successive draws of an element, every interval gets its share to within five; of pairs (worker, server) every rectangle."""
    steps, first = 512, 7
    sides = [
        np.stack(
            [
                draws(step=t, stream=stream, stratified=True, blocks=1, block_size=64)
                for t in range(first, first + steps)
            ]
        )
        for stream in (WORKER_STREAM, SERVER_STREAM)
    ]
    for u in sides:
        for cut in (-0.9, -0.31, 0.0, 0.5, 0.77):
            for count in (steps // 8, steps // 2, steps):
                excess = (u[:count] < cut).sum(axis=0) - count * (1 + cut) / 2
                assert abs(excess).max() < 5, f"{cut} in {count} steps"
    for a, b in itertools.product((-0.5, 0.0, 0.6), repeat=2):
        excess = ((sides[0] < a) & (sides[1] < b)).sum(axis=0) - steps * (1 + a) / 2 * (1 + b) / 2
        assert abs(excess).max() < 8, f"{a}, {b}"  # chance: 2.5 to 3.5 times that


@pytest.mark.parametrize("stratified", [False, True])
def test_neighbouring_elements_and_blocks_are_independent(stratified: bool) -> None:
    u = uniform(draw(draw_key(0, 1, 0, WORKER_STREAM, stratified), 0, 256, 2048)).numpy()
    for lag in (1, 2, 31, 32, 64, 1024):
        assert abs(correlation(u[:, :-lag].ravel(), u[:, lag:].ravel())) < 4.5, f"elements {lag} apart"
    for lag in (1, 2, 128):
        assert abs(correlation(u[:-lag].ravel(), u[lag:].ravel())) < 4.5, f"blocks {lag} apart"
    # pairs of neighbours fill the square evenly
    cells = np.histogram2d(u[:, 0::2].ravel(), u[:, 1::2].ravel(), bins=32, range=((-1, 1), (-1, 1)))[0]
    assert abs(chi_square(cells.ravel(), u.size / 2 / 1024)) < 4
