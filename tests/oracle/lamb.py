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
    times_denominator,
    zero_if_missing,
)


class Lamb:
    """n workers of 1-bit LAMB; arguments as ``oracle.adam.Adam`` and the coefficients of the paper.

    Attributes:
        c_avg: moving averages of the trust ratios ``c`` of the warm-up, per tensor.
        r: last scaling factors ``f``, per tensor.
        rho: moving averages of ``||x||/||u||`` in the warm-up, per tensor; 0 where there was none.
        coeff: coefficient c of the last step, per tensor.
        seen: what has been measured of every tensor with weights and gradients, in the steps in which it was: ``(||x||, energy)``.
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
        trust_ratio: str = "followed",
        ranks_per_node: int = 1,
    ) -> None:
        self.x = [np.array(a, dtype=np.float64).ravel() for a in x]
        self.n, self.lr, self.b1, self.b2, self.eps, self.wd = n, lr, b1, b2, eps, wd
        self.T_w, self.bias_correction, self.phi, self.max_norm = T_w, bias_correction, phi, max_norm
        self.max_coeff, self.min_coeff, self.coeff_beta = max_coeff, min_coeff, coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold
        self.followed = trust_ratio == "followed"
        sizes = [a.size for a in self.x]
        self.m = [np.zeros(size) for size in sizes]
        self.v = [np.zeros(size) for size in sizes]
        self.vfresh = [np.zeros(size) for size in sizes]
        self.c_avg = [0.0] * len(x)  # init: c_avg = 0, r = 1
        self.r = [1.0] * len(x)
        self.rho = [0.0] * len(x)
        self.seen: list[list[tuple[float, float]]] = [[] for _ in x]
        self.c = [1.0] * len(x)  # of the next step
        self.since = 0  # compressed steps
        self.coeff = [1.0] * len(x)
        self.t = [0] * len(x)
        self.k = [0] * len(x)
        self.exchange = Exchange(sizes, n, block_size, ranks_per_node)
        self.steps = self.skipped = 0
        self.frozen = False

    def freeze(self) -> None:
        """The next step is compressed: ``vfresh = vd``, and k stays."""
        self.frozen = True
        self.vfresh = [floored(v, self.phi) for v in self.v]
        self.c_avg = [1.0 if c == 0.0 else c for c in self.c_avg]  # every c was exactly 1: use c_avg = 1
        self.c = [self._clipped(ratio) for ratio in self.rho]

    def step(self, g: Gradients) -> None:
        """One step from the local gradients ``g[i][l]``."""
        if not finite(g):
            self.skipped += 1
            return
        g = flatten(g)
        factor = clip_factor(self._norm(g), self.max_norm)
        self.since += self.frozen
        for l in range(len(self.x)):
            if present(g, l):
                self.t[l] += 1
                local = [factor * a for a in zero_if_missing(g, l, self.x[l].size)]
                if self.frozen:
                    self._compressed(l, local)
                    if self.followed and (self.since <= 10 or self.since % 10 == 0):
                        self._measure(l, local)
                else:
                    self._dense(l, np.mean(local, axis=0))
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
            ratio = float(np.linalg.norm(x) / np.linalg.norm(u))
            c = float(np.clip(ratio, self.min_coeff, self.max_coeff))
            # rho = coeff_beta*rho + (1-coeff_beta)*||x||/||u||, from the first there is
            self.rho[l] = self.coeff_beta * (self.rho[l] or ratio) + (1 - self.coeff_beta) * ratio
        if c != 1.0:
            # c_avg = coeff_beta*c_avg + (1-coeff_beta)*c
            self.c_avg[l] = self.coeff_beta * self.c_avg[l] + (1 - self.coeff_beta) * c
        self.coeff[l] = c
        self.x[l] = x - self.lr * c * u  # x -= lr*c*u

    def _compressed(self, l: int, g: Sequence[Array]) -> None:
        if self.followed:
            self._followed(l, g)
            return
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

    def _followed(self, l: int, g: Sequence[Array]) -> None:
        x = self.x[l]
        D = self._denominators(l)
        # m/D = exchange((b1 m + (1-b1) g_i)/D)
        sent = [step_over(self.b1 * self.m[l] + (1 - self.b1) * g[i], *D) for i in range(self.n)]
        self.m[l] = times_denominator(self.exchange(l, sent), *D)
        self.coeff[l] = self.c[l]
        self.x[l] = x - self.lr * self.c[l] * (step_over(self._mhat(l), *D) + self.wd * x)  # x -= lr*c*u

    def _measure(self, l: int, g: Sequence[Array]) -> None:
        norm = float(np.linalg.norm(self.x[l]))
        energy = squared_norm([step_over(g[i], *self._denominators(l)) for i in range(self.n)]) / self.n**2
        if norm == 0 or energy == 0:
            return
        self.seen[l].append((norm, energy))
        # G0: mean of the first ten, G: average over time from there
        G0 = G = float(np.mean([e for _, e in self.seen[l][:10]]))
        for _, e in self.seen[l][10:]:
            G = 0.8 * G + 0.2 * e
        w0 = self.seen[l][0][0]
        U0 = w0 / (self.rho[l] or 1.0)
        U = np.sqrt(max(0.0, U0**2 - (self.wd * w0) ** 2) * min(1.0, G / G0) + (self.wd * norm) ** 2)
        if U > 0:
            self.c[l] = self._clipped(norm / U)

    def _clipped(self, ratio: float) -> float:
        return float(np.clip(ratio, self.min_coeff, self.max_coeff)) if ratio > 0 else 1.0

    def _denominators(self, l: int) -> tuple[Array, int, float, float, bool]:
        return floored(self.v[l], self.phi), self.k[l], self.b2, self.eps, self.bias_correction

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
