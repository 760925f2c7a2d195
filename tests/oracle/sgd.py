"""1-bit SGD with momentum (dist-EF-blockSGD, arXiv 1905.10936; docs/algorithms)."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oracle.blocks import Array, Exchange
from oracle.common import Gradients, average, clip_factor, finite, flatten, present, squared_norm, zero_if_missing


class SGD:
    """n workers of 1-bit SGD.

    Args:
        x: initial weights, any shapes.
        n: workers.
        lr: learning rate; an attribute that a schedule may change between steps, like all others.
        mu: momentum.
        dampening: of the gradient, from the second step on.
        wd: coupled weight decay.
        nesterov: ``g + mu m`` is sent in the place of m.
        block_size: elements per block.
        max_norm: clip the global norm.
        compressed: per tensor, False for one that stays dense for ever (``compress=False``).
        ranks_per_node: hierarchical exchange.
    """

    def __init__(
        self,
        x: Sequence[Array],
        n: int,
        *,
        lr: float = 1e-3,
        mu: float = 0.0,
        dampening: float = 0.0,
        wd: float = 0.0,
        nesterov: bool = False,
        block_size: int = 2048,
        max_norm: float | None = None,
        compressed: Sequence[bool] | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        self.x = [np.array(a, dtype=np.float64).ravel() for a in x]
        self.n, self.lr, self.mu, self.dampening, self.wd, self.nesterov = n, lr, mu, dampening, wd, nesterov
        self.max_norm = max_norm
        self.compressed = [True] * len(x) if compressed is None else list(compressed)
        sizes = [a.size for a in self.x]
        self.m: list[list[Array | None]] = [[None] * len(x) for _ in range(n)]  # m[i][l]: each worker has its own
        self.exchange = Exchange(sizes, n, block_size, ranks_per_node)
        self.last_lr: list[float | None] = [None] * len(x)  # of the last exchange of a tensor
        self.steps = self.skipped = 0

    def step(self, g: Gradients) -> None:
        """One step from the local gradients ``g[i][l]``."""
        if not finite(g):  # any non-finite value anywhere: all skip, nothing changes
            self.skipped += 1
            return
        g = flatten(g)
        factor = clip_factor(self._norm(g), self.max_norm)
        for l in range(len(self.x)):
            if not present(g, l):  # no gradient on any worker: left alone
                continue
            local = [factor * a for a in zero_if_missing(g, l, self.x[l].size)]
            if not self.compressed[l]:
                local = [np.mean(local, axis=0)] * self.n
            p = [self._direction(i, l, local[i]) for i in range(self.n)]
            if not self.compressed[l]:
                self.x[l] = self.x[l] - self.lr * p[0]
            elif self.lr > 0:  # with lr = 0 no residual and no weight changes
                ratio = 1.0 if self.last_lr[l] is None else self.last_lr[l] / self.lr
                self.exchange.d[l] = ratio * self.exchange.d[l]  # (lr_{t-1}/lr_t) * residual
                for e in self.exchange.e:
                    e[l] = ratio * e[l]
                self.x[l] = self.x[l] - self.lr * self.exchange(l, p)  # x -= lr exchange(p_i)
                self.last_lr[l] = self.lr
        self.steps += 1

    def _direction(self, i: int, l: int, g: Array) -> Array:
        """``p_i``."""
        g = g + self.wd * self.x[l]  # g_i += wd x
        m = self.m[i][l]
        # torch.optim.SGD begins with the gradient itself, and dampens no step without momentum
        begins = m is None or self.mu == 0
        m = g if begins else self.mu * m + (1 - self.dampening) * g  # m_i = mu m_i + (1-dampening) g_i
        self.m[i][l] = m
        return g + self.mu * m if self.nesterov else m

    def _norm(self, g: Gradients) -> float:
        """``G = sqrt((1/n) sum_i ||g_i||^2)`` where gradients are local, the norm of the average where they are averaged."""
        squares = 0.0
        for l in range(len(self.x)):
            if self.compressed[l]:
                squares += sum(squared_norm([g[i][l]]) for i in range(self.n)) / self.n
            elif present(g, l):
                squares += squared_norm([average(g, l, self.x[l].size)])
        return float(np.sqrt(squares))
