"""1-bit Adam (arXiv 2102.02888, algorithm 1; docs/algorithms, section 4)."""

# ruff: noqa: E741  l is the letter of a parameter tensor
from __future__ import annotations

import math
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


def gap_of_refreshes(t: int, scaler: int = 16) -> int:
    """Steps from a refresh at step t to the next: ``2^floor(log2(1 + (t-1)/scaler))``."""
    return 2 ** math.floor(math.log2(1 + (t - 1) / scaler))


def updates_of_refresh(gap: int, b2: float, k: float) -> float:
    """For how many updates of v, which has had k, a refresh counts.

    The weight of its gradient in the corrected v, ``(1 - b2^s)/(1 - b2^(k+s))``, is at most 1/16, or that of one update where it is more.
    """
    return min(gap, max(1.0, math.log(15 / (16 - b2**k), b2))) if b2 > 0 else 1.0


class Adam:
    """n workers of 1-bit Adam.

    Args:
        x: initial weights, any shapes.
        n: workers.
        lr: learning rate; an attribute that a schedule may change between steps, like all others.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the denominator.
        wd: decoupled weight decay.
        T_w: dense steps; None until ``freeze()``.
        bias_correction: as torch.optim.AdamW, or none.
        block_size: elements per block.
        phi: denominator floor.
        preconditioned: m/D travels, with D the denominators, rather than m.
        refresh: "auto": after the freeze dense steps refresh v, ``gap_of_refreshes`` apart but 16 steps at least; a number: so many
            compressed steps between them; "never".
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
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        wd: float = 0.0,
        T_w: int | None = None,
        bias_correction: bool = True,
        block_size: int = 2048,
        phi: float = 0.1,
        preconditioned: bool = True,
        refresh: int | str = "auto",
        max_norm: float | None = None,
        compressed: Sequence[bool] | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        self.x = [np.array(a, dtype=np.float64).ravel() for a in x]
        self.n, self.lr, self.b1, self.b2, self.eps, self.wd = n, lr, b1, b2, eps, wd
        self.T_w, self.bias_correction, self.phi, self.max_norm = T_w, bias_correction, phi, max_norm
        self.preconditioned = preconditioned
        self.refresh = refresh
        self.dense_steps: list[bool] = []  # of the steps made, which were dense
        self.compressed = [True] * len(x) if compressed is None else list(compressed)
        sizes = [a.size for a in self.x]
        self.m = [np.zeros(size) for size in sizes]
        self.v = [np.zeros(size) for size in sizes]
        # t counts steps in which the tensor took part, k those in which its v was updated (as torch.optim.AdamW counts, per tensor)
        self.t = [0] * len(x)
        self.k: list[float] = [0] * len(x)
        self.exchange = Exchange(sizes, n, block_size, ranks_per_node)
        self.steps = self.skipped = 0
        # what the denominators are made of in the compressed stage: v and k as they were at the freeze or the last refresh
        self.v_D = self.v
        self.k_D = self.k
        self.frozen = False
        self.learned = 0  # the last step in which v has learned
        if T_w == 0:
            self.freeze()

    def freeze(self) -> None:
        """The next step is compressed."""
        self.frozen = True
        self.v_D, self.k_D, self.learned = [floored(v, self.phi) for v in self.v], list(self.k), self.steps

    @property
    def refreshing(self) -> bool:
        """Whether the next step is a refresh."""
        gap = max(16, gap_of_refreshes(self.learned)) if isinstance(self.refresh, str) else self.refresh + 1
        return self.frozen and self.refresh != "never" and self.steps + 1 - self.learned >= gap

    def step(self, g: Gradients) -> None:
        """One step from the local gradients ``g[i][l]``."""
        if not finite(g):  # any non-finite value anywhere: all skip, nothing changes
            self.skipped += 1
            return
        g = flatten(g)
        refreshing = self.refreshing
        self.dense_steps.append(not self.frozen or refreshing)
        factor = clip_factor(self._norm(g), self.max_norm)
        for l in range(len(self.x)):
            if not present(g, l):  # no gradient on any worker: left alone
                continue
            self.t[l] += 1
            local = [factor * a for a in zero_if_missing(g, l, self.x[l].size)]
            if self.frozen and self.compressed[l] and not refreshing:
                # m = exchange(b1 m + (1-b1) g_i), or m/D = exchange((b1 m + (1-b1) g_i)/D)
                vd, k = self.v_D[l], self.k_D[l]
                D = (vd, k, self.b2, self.eps, self.bias_correction)
                sent = [self.b1 * self.m[l] + (1 - self.b1) * local[i] for i in range(self.n)]
                if self.preconditioned:
                    self.m[l] = times_denominator(self.exchange(l, [step_over(c, *D) for c in sent]), *D)
                else:
                    self.m[l] = self.exchange(l, sent)
            else:
                mean = np.mean(local, axis=0)  # g = mean_i g_i (dense)
                self.m[l] = self.b1 * self.m[l] + (1 - self.b1) * mean  # m = b1 m + (1-b1) g
                # v = b2 v + (1-b2) g^2; in a refresh g counts for s steps: v = b2^s vd + (1-b2^s) g^2
                renews = refreshing and self.compressed[l]
                s = updates_of_refresh(self.steps + 1 - self.learned, self.b2, self.k[l]) if renews else 1
                b2 = self.b2**s
                self.v[l] = b2 * (self.v_D[l] if renews else self.v[l]) + (1 - b2) * mean**2
                self.k[l] += s
                if renews:
                    self.v_D[l], self.k_D[l] = floored(self.v[l], self.phi), self.k[l]
                vd, k = (self.v_D[l], self.k_D[l]) if renews else (self.v[l], self.k[l])
            mhat = self.m[l] / (1 - self.b1 ** self.t[l]) if self.bias_correction else self.m[l]
            # x -= lr*wd*x + lr * mhat/(sqrt(vhat)+eps)
            update = step_over(mhat, vd, k, self.b2, self.eps, self.bias_correction)
            self.x[l] = self.x[l] - self.lr * self.wd * self.x[l] - self.lr * update
        self.steps += 1
        if refreshing:
            self.learned = self.steps
        if not self.frozen and self.T_w is not None and self.steps >= self.T_w:
            self.freeze()

    def _norm(self, g: Gradients) -> float:
        """Norm of the averaged gradient in a dense step, ``G = sqrt((1/n) sum_i ||g_i||^2)`` where gradients are local."""
        squares = 0.0
        for l in range(len(self.x)):
            if self.frozen and self.compressed[l] and not self.refreshing:
                squares += sum(squared_norm([g[i][l]]) for i in range(self.n)) / self.n
            elif present(g, l):
                squares += squared_norm([average(g, l, self.x[l].size)])
        return float(np.sqrt(squares))
