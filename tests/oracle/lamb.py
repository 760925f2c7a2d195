"""1-bit LAMB (arXiv 2104.06069, algorithm 1; docs/algorithms, section 5)."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oracle.blocks import Array, Exchange
from oracle.common import (
    Gradients,
    average,
    clip_factor,
    finite,
    flatten,
    floored,
    present,
    squared_norm,
    step_over,
    zero_if_missing,
)


class Lamb:
    """n workers of 1-bit LAMB; arguments as ``oracle.adam.Adam`` and the coefficients of the paper.

    Attributes:
        c_avg: moving averages of the trust ratios ``c`` of the warm-up, per tensor.
        r: last scaling factors ``f``, per tensor.
        coeff: coefficient c of the last step, per tensor.
    """

    def __init__(
        self,
        x: Sequence[Array],
        n: int,
        *,
        lr: float = 1e-3,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        wd: float = 0.0,
        T_w: int | None = None,
        bias_correction: bool = True,
        block_size: int = 2048,
        phi: float = 0.1,
        max_norm: float | None = None,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        ranks_per_node: int = 1,
    ) -> None:
        self.x = [np.array(a, dtype=np.float64).ravel() for a in x]
        self.n, self.lr, self.b1, self.b2, self.eps, self.wd = n, lr, b1, b2, eps, wd
        self.T_w, self.bias_correction, self.phi, self.max_norm = T_w, bias_correction, phi, max_norm
        self.max_coeff, self.min_coeff, self.coeff_beta = max_coeff, min_coeff, coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold
        sizes = [a.size for a in self.x]
        self.m = [np.zeros(size) for size in sizes]
        self.v = [np.zeros(size) for size in sizes]
        self.k = [0] * len(x)
        self.vfresh = [np.zeros(size) for size in sizes]
        self.c_avg = [0.0] * len(x)  # init: c_avg = 0, r = 1
        self.r = [1.0] * len(x)
        self.coeff = [1.0] * len(x)
        self.t = [0] * len(x)
        self.exchange = Exchange(sizes, n, block_size, ranks_per_node)
        self.steps = self.skipped = 0
        self.frozen = False

    def freeze(self) -> None:
        """The next step is compressed: ``vfresh = vd``, and k stays."""
        self.frozen = True
        self.vfresh = [floored(v, self.phi) for v in self.v]
        self.c_avg = [1.0 if c == 0.0 else c for c in self.c_avg]  # every c was exactly 1: use c_avg = 1

    def step(self, g: Gradients) -> None:
        """One step from the local gradients ``g[i][l]``."""
        if not finite(g):
            self.skipped += 1
            return
        g = flatten(g)
        factor = clip_factor(self._norm(g), self.max_norm)
        for l in range(len(self.x)):
            if present(g, l):
                self.t[l] += 1
                local = [factor * a for a in zero_if_missing(g, l, self.x[l].size)]
                if not self.frozen:
                    self._dense(l, np.mean(local, axis=0))
                else:
                    self._compressed(l, local)
        self.steps += 1
        if not self.frozen and self.T_w is not None and self.steps >= self.T_w:
            self.freeze()

    def _dense(self, l: int, g: Array) -> None:
        x = self.x[l]
        self.m[l] = self.b1 * self.m[l] + (1 - self.b1) * g
        self.v[l] = self.b2 * self.v[l] + (1 - self.b2) * g**2
        self.k[l] += 1
        # u = mhat/(sqrt(vhat)+eps) + wd*x
        u = step_over(self._mhat(l), self.v[l], self.k[l], self.b2, self.eps, self.bias_correction) + self.wd * x
        c = 1.0  # c = 1 if either norm is 0
        if np.linalg.norm(x) != 0 and np.linalg.norm(u) != 0:
            # c = clip(||x||/||u||, min_coeff, max_coeff)
            c = float(np.clip(np.linalg.norm(x) / np.linalg.norm(u), self.min_coeff, self.max_coeff))
        if c != 1.0:
            # c_avg = coeff_beta*c_avg + (1-coeff_beta)*c
            self.c_avg[l] = self.coeff_beta * self.c_avg[l] + (1 - self.coeff_beta) * c
        self.coeff[l] = c
        self.x[l] = x - self.lr * c * u  # x -= lr*c*u

    def _compressed(self, l: int, g: Sequence[Array]) -> None:
        x, m_old = self.x[l], self.m[l]
        # m = exchange(b1 m + (1-b1) g_i)
        self.m[l] = self.exchange(l, [self.b1 * m_old + (1 - self.b1) * g[i] for i in range(self.n)])
        ghat = (self.m[l] - self.b1 * m_old) / (1 - self.b1)  # ghat = (m - b1*m_old)/(1-b1)
        self.vfresh[l] = self.b2 * self.vfresh[l] + (1 - self.b2) * ghat**2  # vfresh = b2 vfresh + (1-b2) ghat^2
        if x.size == 0:
            return
        vd = floored(self.v[l], self.phi)
        # sqrt(vfresh/(1-b2^T_w)): the correction of the frozen v, which stopped at k updates
        correction = 1 - self.b2 ** self.k[l] if self.bias_correction and self.k[l] else 1.0
        D = np.sqrt(vd / correction) + self.eps  # D = sqrt(vhat_Tw)+eps
        Dfresh = np.sqrt(self.vfresh[l] / correction) + self.eps  # Dfresh = sqrt(vfresh/(1-b2^T_w))+eps
        up = step_over(self._mhat(l), vd, self.k[l], self.b2, self.eps, self.bias_correction)  # up = mhat/D
        u = up + self.wd * x  # u = up + wd*x
        f = float(np.max(D / Dfresh))  # f = max_j D_j/Dfresh_j
        if self.wd > 0:
            norm = float(np.linalg.norm(u))
            k = min(1.0, float(np.linalg.norm(up)) / norm) if norm > 0 else 1.0  # k = min(1, ||up||/||u||)
            f = f * k + (1 - k)  # f = f*k + (1-k)
        f = float(np.clip(f, self.factor_min, self.factor_max))  # f = clip(f, factor_min, factor_max)
        # f = clip(f, r(1-factor_threshold), r(1+factor_threshold)) ; r = f
        f = float(np.clip(f, self.r[l] * (1 - self.factor_threshold), self.r[l] * (1 + self.factor_threshold)))
        self.r[l] = f
        self.coeff[l] = self.c_avg[l] * f
        self.x[l] = x - self.lr * self.coeff[l] * u  # x -= lr * c_avg*f * u

    def _mhat(self, l: int) -> Array:
        return self.m[l] / (1 - self.b1 ** self.t[l]) if self.bias_correction else self.m[l]

    def _norm(self, g: Gradients) -> float:
        squares = 0.0
        for l in range(len(self.x)):
            if self.frozen:
                squares += sum(squared_norm([g[i][l]]) for i in range(self.n)) / self.n
            elif present(g, l):
                squares += squared_norm([average(g, l, self.x[l].size)])
        return float(np.sqrt(squares))
