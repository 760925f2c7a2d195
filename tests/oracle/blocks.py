"""Blocks, the compressor C and the error-compensated exchange (docs/algorithms, sections 1, 2 and 8)."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray


def blocks(size: int, block_size: int) -> list[slice]:
    """The blocks of one parameter tensor: ``block_size`` elements each, the last one what is left. None for an empty tensor."""
    return [slice(start, min(start + block_size, size)) for start in range(0, size, block_size)]


def compress(c: Array, block_size: int) -> Array:
    """``C(c)``: on every block the root mean square, with the sign bit of each element."""
    out = np.zeros_like(c)
    for b in blocks(c.size, block_size):
        s = np.sqrt(np.mean(c[b] ** 2))  # s = sqrt(mean_{j<L} c_j^2)
        q = np.where(np.signbit(c[b]), -1.0, 1.0)  # q_j = -1 where the sign bit of c_j is set, +1 elsewhere
        out[b] = s * q  # C(c)_j = s * q_j
    return out


def node_means(c: Sequence[Array], ranks_per_node: int) -> list[Array]:
    """Means over the ranks of each node: ranks ``l*K ... l*K + K-1`` form node l."""
    return [np.mean(c[start : start + ranks_per_node], axis=0) for start in range(0, len(c), ranks_per_node)]


class Exchange:
    """The exchange of one set of tensors, with the residuals of all workers and servers.

    A block has one owner, so the server residuals of all ranks together are one vector ``d`` over all elements.
    Hierarchical (``ranks_per_node = K > 1``): the workers of the exchange are the L nodes, each with its mean.

    Attributes:
        e: worker residuals, ``e[i][l]`` (i counts nodes when hierarchical).
        d: server residuals, ``d[l]``.
        margin: smallest ``|y| / s`` (or ``|z| / s``) whose sign was ever taken: how close a rounding error came to turning a bit.
    """

    def __init__(self, sizes: Sequence[int], n: int, block_size: int, ranks_per_node: int = 1) -> None:
        self.block_size = block_size
        self.ranks_per_node = ranks_per_node
        self.e = [[np.zeros(size) for size in sizes] for _ in range(n // ranks_per_node)]
        self.d = [np.zeros(size) for size in sizes]
        self.margin = np.inf

    def __call__(self, l: int, c: Sequence[Array]) -> Array:
        """Exchanges tensor l; ``c[i]`` is what worker i wants averaged, without its residual. The result is the same on all ranks."""
        c = node_means(c, self.ranks_per_node)
        sent = []
        for i in range(len(c)):
            y = c[i] + self.e[i][l]  # y_i = c_i + e_i
            sent.append(self._compress(y))  # send C(y_i)
            self.e[i][l] = y - sent[i]  # e_i = y_i - C(y_i)
        z = np.mean(sent, axis=0) + self.d[l]  # z = (1/n) sum_i C(y_i) + d_r
        reply = self._compress(z)  # send C(z)
        self.d[l] = z - reply  # d_r = z - C(z)
        return reply

    def _compress(self, y: Array) -> Array:
        c = compress(y, self.block_size)
        # an exact 0 (and an all-zero block) has its sign for certain: fp32 computes the same 0
        unsure = (y != 0) & (c != 0)
        if unsure.any():
            self.margin = min(self.margin, float(np.min(np.abs(y[unsure]) / np.abs(c[unsure]))))
        return c
