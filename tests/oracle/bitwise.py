"""The numbers every kernel backend must reproduce bit for bit, in float32 NumPy, one block at a time (docs/architecture).

NumPy rounds every operation once, so nothing here depends on the machine. Written from the definition, not from the reference kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
f32 = np.float32


def scale(y: Array, block_size: int) -> np.float32:
    """Root mean square of one block's valid elements ``y`` (fp32), summed lane by lane and then folded."""
    if y.size == 0:
        return f32(0)
    W = block_size // 32
    padded = np.zeros(block_size, dtype=f32)
    padded[: y.size] = y
    acc = padded[:W] * padded[:W]
    for k in range(1, 32):
        acc = acc + padded[k * W : (k + 1) * W] * padded[k * W : (k + 1) * W]
    w = W
    while w > 1:
        h = (w + 1) // 2
        acc[: w - h] = acc[: w - h] + acc[h:w]
        w = h
    return np.sqrt(acc[0] / f32(y.size))


def words(negative: Array, block_size: int) -> Array:
    """Sign bits of one block as ``block_size/32`` little-endian words: bit k of word j is element ``k*W + j``."""
    W = block_size // 32
    out = np.zeros(W, dtype=np.uint32)
    for index in np.flatnonzero(negative):
        out[index % W] |= np.uint32(1) << np.uint32(index // W)
    return out


def compress_block(y: Array, block_size: int) -> tuple[np.float32, Array, Array]:
    """``(scale, words, residual)`` of one block."""
    s = scale(y, block_size)
    negative = np.signbit(y)
    return s, words(negative, block_size), y - np.where(negative, -s, s)


def decode_block(s: np.float32, w: Array, length: int) -> Array:
    """``+-s`` for the valid elements of one block."""
    W = w.size
    index = np.arange(length)
    negative = (w[index % W] >> (index // W).astype(np.uint32)) & 1
    return np.where(negative == 1, -s, s).astype(f32)


class Ranks:
    """n ranks exchanging one bucket, simulated: what each of them sends, keeps and receives.

    Args:
        lengths: valid length of each block, in bucket order; a multiple of n blocks.
        n: ranks.
        block_size: elements per block.
    """

    def __init__(self, lengths: Sequence[int], n: int, block_size: int) -> None:
        assert len(lengths) % n == 0
        self.lengths, self.n, self.block_size = list(lengths), n, block_size
        self.e = [[np.zeros(length, dtype=f32) for length in lengths] for _ in range(n)]
        self.d = [np.zeros(length, dtype=f32) for length in lengths]

    def exchange(self, c: Sequence[Sequence[Array]]) -> list[tuple[np.float32, Array]]:
        """Exchanges ``c[i][block]``; returns scale and words of every block, alike on all ranks."""
        sent: list[list[Array]] = []
        for i in range(self.n):
            sent.append([])
            for block, length in enumerate(self.lengths):
                y = c[i][block] + self.e[i][block]
                s, w, self.e[i][block] = compress_block(y, self.block_size)
                sent[i].append(decode_block(s, w, length))
        result = []
        inv_n = f32(1.0 / self.n)
        for block in range(len(self.lengths)):
            total = sent[0][block]
            for i in range(1, self.n):
                total = total + sent[i][block]
            z = total * inv_n + self.d[block]
            s, w, self.d[block] = compress_block(z, self.block_size)
            result.append((s, w))
        return result
