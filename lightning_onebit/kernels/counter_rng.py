"""Counter-based randomness: an integer hash of (seed, step, rank, stream, block, element), alike on every backend.

No generator state exists, so nothing needs saving: a run, its resume and its twin on another device draw the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # odd, so that consecutive elements differ in many bits before mixing

WORKER_STREAM = 1
SERVER_STREAM = 2


def draw_key(seed: int, step: int, rank: int, stream: int) -> tuple[int, int]:
    """Two 32-bit words that stand for a (seed, step, rank, stream); splitmix64 over the fields in turn.

    Args:
        seed: the optimizer's seed, any integer.
        step: real step, 1, 2, ...
        rank: worker that draws (a rank, or a node in a hierarchical exchange).
        stream: what the draw is for (worker or server).
    """
    state = 0
    for field in (seed, step, rank, stream):
        state = (state + field + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state = z ^ (z >> 31)
    return state & _MASK, state >> 32


def _mix32(x: Tensor) -> Tensor:
    """A bijective 32-bit finaliser; int64 tensors hold the uint32 values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def draw_hash(key: tuple[int, int], first_block: int, blocks: int, block_size: int, device: torch.device) -> Tensor:
    """The hash of every element: ``h = mix(mix(block ^ k0) + j * golden ^ k1)``; int64 ``(blocks, block_size)`` with uint32 values."""
    ids = torch.arange(first_block, first_block + blocks, dtype=torch.int64, device=device)
    elements = torch.arange(block_size, dtype=torch.int64, device=device)
    per_block = _mix32((ids & _MASK) ^ key[0])
    return _mix32(((per_block[:, None] + elements[None, :] * _GOLDEN) & _MASK) ^ key[1])


def uniform(h: Tensor) -> Tensor:
    """Uniform in (-1, 1), fp32, exact: ``(2*(h >> 9) + 1 - 2^23) * 2^-23``, never 0 and symmetric about it."""
    return ((h >> 9) * 2 + 1 - (1 << 23)).to(torch.float32) * 2.0**-23
