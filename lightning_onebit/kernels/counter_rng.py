"""Counter-based randomness: an integer function of (seed, step, rank, stream, block, element), alike on every backend.

No generator state exists, so nothing needs saving: a run, its resume and its twin on another device draw the same bits.

Draws of an element are either independent from step to step (a hash of all six), or stratified: a hash of all but the step, which every
step turns further by a fixed irrational part of a full turn (a Kronecker sequence). Each draw is as uniform and elements, ranks and
streams are as independent as before, but the draws of successive steps spread evenly, so that signs drawn from a slowly
changing probability add up to it with an error of the order of one draw instead of the root of their number. Workers and
server turn by two numbers with which no integer relation exists (powers of the inverse of the plastic number: Roberts' R2 sequence), so
that the pair of their draws spreads evenly too.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # odd, so that consecutive elements differ in many bits before mixing

WORKER_STREAM = 1
SERVER_STREAM = 2

# by stream: how far a step turns a stratified draw, in 2^-32 of a turn: 0.7548776662... and its square, odd
TURNS = {WORKER_STREAM: 0xC13FA9A9, SERVER_STREAM: 0x91E10DA5}

DrawKey = tuple[int, int, int]
"""Three 32-bit words: two that go into the hash, and what is added to it."""


def draw_key(seed: int, step: int, rank: int, stream: int, stratified: bool = True) -> DrawKey:
    """What stands for a (seed, step, rank, stream): splitmix64 over the fields in turn, and the turn of a step.

    Args:
        seed: the optimizer's seed, any integer.
        step: real step, 1, 2, ...
        rank: worker that draws (a rank, or a node in a hierarchical exchange).
        stream: what the draw is for (worker or server).
        stratified: over the steps; the hashed step is then 0 and the third word counts. Otherwise the third word is 0.
    """
    state = 0
    for field in (seed, 0 if stratified else step, rank, stream):
        state = (state + field + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state = z ^ (z >> 31)
    return state & _MASK, state >> 32, step * TURNS[stream] & _MASK if stratified else 0


def _mix32(x: Tensor) -> Tensor:
    """A bijective 32-bit finaliser; int64 tensors hold the uint32 values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def draw_hash(key: DrawKey, first_block: int, blocks: int, block_size: int, device: torch.device) -> Tensor:
    """The draw of every element: ``h = mix(mix(block ^ k0) + j * golden ^ k1) + k2``; int64 ``(blocks, block_size)`` with uint32 values."""
    ids = torch.arange(first_block, first_block + blocks, dtype=torch.int64, device=device)
    elements = torch.arange(block_size, dtype=torch.int64, device=device)
    per_block = _mix32((ids & _MASK) ^ key[0])
    return (_mix32(((per_block[:, None] + elements[None, :] * _GOLDEN) & _MASK) ^ key[1]) + key[2]) & _MASK


def uniform(h: Tensor) -> Tensor:
    """Uniform in (-1, 1), fp32, exact: ``(2*(h >> 9) + 1 - 2^23) * 2^-23``, never 0 and symmetric about it."""
    return ((h >> 9) * 2 + 1 - (1 << 23)).to(torch.float32) * 2.0**-23
